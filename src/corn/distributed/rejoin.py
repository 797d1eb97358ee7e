"""Return of an agent to a run with exact sums, which lost it.

The agent asks one neighbour, its sponsor, for the terms of the run, and compares its own. It signs
the step of its return, of which the sponsor tells all others, and connects to its neighbours. All
wait for it before that step. It receives the sponsor's model and state, and takes part in the
recovery that lets it in, and in the plan that follows.

No noise is released twice: the agent returns after every step that its ledger has ever reserved,
and spends no more than if it had never left. The sponsor's model is public, as every message is.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from corn.distributed.handshake import Hello, compare_hellos
from corn.distributed.membership import Membership
from corn.distributed.messages import (
    Header,
    Kind,
    NewsKeys,
    ProtocolError,
    Subject,
    decode_message,
    is_sane,
)
from corn.distributed.rendezvous import HandshakeError, Meeting, Rendezvous
from corn.errors import CornError, FileFormatError, InvalidArgumentError, PublicError
from corn.files import writing_whole
from corn.noise.stream import check_nonce
from corn.parsing import MAX_DIGITS, build, build_fields, parse_hex, parse_json, read_json
from corn.transport import (
    NO_SESSION,
    Address,
    Channel,
    ChannelClosedError,
    Link,
    LinkError,
    LinkOpener,
    Purpose,
    TamperedError,
    UnreachableError,
    dial,
)

_MAX_REQUEST_BYTES = 1 << 20
_SECONDS_TO_ANSWER = 1.0
_MAX_SIGNATURE_BYTES = 64
# News of a call reaches all agents in one step. The next one gives the agent time to connect.
_STEPS_OF_NOTICE = 2
_ADDRESSES = "addresses.json"
_LAST_TOTAL = "sum of the step before"
# No optimizer of torch keeps as many tensors of the size of the model, of eight bytes each.
_MAX_COPIES = 8
_MAX_INDEX_BYTES = 1 << 20
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.bool,
    )
}


class RejoinError(PublicError):
    """No neighbour lets this agent in."""


# Of one sponsor: the next one is asked.
_FAILURES = (UnreachableError, ChannelClosedError, TamperedError, ProtocolError, RejoinError)


@dataclass(frozen=True)
class Welcome:
    """Answer of a sponsor.

    Attributes:
        session: The session of the run, in hexadecimal.
        nonce: The nonce of the run, in hexadecimal.
        return_step: The step from which the agent takes part.
        last_step: The end of the run.
        addresses: The addresses of the members' listeners.
        present: The agents that take part now.
        refusal: Why the agent is not let in; empty if it is.
    """

    session: str = ""
    nonce: str = ""
    return_step: int = 0
    last_step: int = 0
    addresses: Mapping[str, tuple[str, int]] | None = None
    present: tuple[int, ...] = ()
    refusal: str = ""

    def __post_init__(self) -> None:
        # It comes from another machine.
        if not self.refusal:
            check_nonce(parse_hex(self.nonce, "nonce"))
            parse_hex(self.session, "session")
        _check_agents(self.addresses or {})

    @property
    def known_addresses(self) -> dict[int, Address]:
        """The addresses by agent."""
        return {int(agent): address for agent, address in (self.addresses or {}).items()}


def _check_agents(addresses: Iterable[str]) -> None:
    # int() would accept signs and spaces too, and raises for thousands of digits.
    if not all(number.isdecimal() and len(number) <= MAX_DIGITS for number in addresses):
        raise InvalidArgumentError("addresses must be those of agents")


@dataclass(frozen=True, eq=False)
class Admission:
    """An agent's way back into a run: all that it needs to take part.

    Attributes:
        welcome: The terms.
        links: The links to the neighbours that it reached.
        header: The sponsor's header, with all news.
        parameters: The model to start from.
        state: All that the sponsor's optimizer keeps besides the model.
        last_total: The sum of the step before, which other agents may lack.
    """

    welcome: Welcome
    links: Mapping[int, Link]
    header: Header
    parameters: Tensor
    state: Mapping[str, Tensor]
    last_total: Tensor | None


def request_return(
    rendezvous: Rendezvous,
    hello: Hello,
    neighbours: Iterable[int],
    addresses: Mapping[int, Address],
    *,
    start: Tensor,
    max_bytes: int,
) -> Admission:
    """Return to a run with the help of the first neighbour that answers.

    ``start`` is the initial model: the one that is received must have its type and size.

    Raises:
        RejoinError: no neighbour lets this agent in; the message has the reasons.
    """
    reasons: dict[int, CornError] = {}
    ask = partial(_ask, rendezvous, hello, frozenset(neighbours), addresses, start, max_bytes)
    # A neighbour may be lost too, or wait for its own return: the others are asked before this
    # agent waits for it.
    for patience in (min(_SECONDS_TO_ANSWER, rendezvous.timeout), rendezvous.timeout):
        for sponsor in sorted(set(neighbours) & set(addresses)):
            # A neighbour that refused does so again; one that was not there may come up.
            if not isinstance(reasons.get(sponsor), UnreachableError | None):
                continue
            try:
                return ask(sponsor, patience)
            except _FAILURES as error:
                reasons[sponsor] = error
    found = [f"agent {sponsor}: {error}" for sponsor, error in sorted(reasons.items())]
    why = "; ".join(found) or "the addresses of its neighbours are not known"
    raise RejoinError(f"cannot return to the run: {why}")


def _ask(
    rendezvous: Rendezvous,
    hello: Hello,
    neighbours: frozenset[int],
    addresses: Mapping[int, Address],
    start: Tensor,
    max_bytes: int,
    sponsor: int,
    patience: float,
) -> Admission:
    """Return to a run with the help of one neighbour."""
    channel = dial(
        addresses[sponsor],
        rendezvous.credentials,
        sponsor,
        Purpose.REJOIN,
        session=NO_SESSION,
        timeout=patience,
        check=rendezvous.check_interruption,
    )
    try:
        channel.send(json.dumps(asdict(hello)).encode())
        # An answer comes between two steps. Without one for n time-outs the sponsor hangs.
        channel.set_timeout(rendezvous.timeout * (rendezvous.num_agents + 1))
        data = bytes(channel.receive(max_bytes=_MAX_REQUEST_BYTES))
        welcome: Welcome = build(Welcome, parse_json(data), "the welcome")
        if welcome.refusal:
            raise RejoinError(welcome.refusal)
        # A sponsor that is confused may name a run of before, with the noise of before.
        if welcome.return_step < hello.first_free_step:
            raise RejoinError(
                f"named step {welcome.return_step} for the return, but steps before "
                f"{hello.first_free_step} may have been released under the same noise"
            )
        keys = NewsKeys(rendezvous.credentials, bytes.fromhex(welcome.session))
        own = Subject(Kind.CALL, rendezvous.agent, rendezvous.agent, rendezvous.agent)
        channel.send(keys.sign(own, welcome.return_step))
        # The agent that returns connects to all: the others do not know its new address. Those that
        # moved published their address at the store. Agents that are lost would cost a time-out.
        known = dict(addresses) | welcome.known_addresses
        present = neighbours & known.keys() & set(welcome.present)
        links = _open_links(
            rendezvous, welcome, {peer: known[peer] for peer in present}, max_bytes=max_bytes
        )
        try:
            header, parameters = _await_model(channel, rendezvous, sponsor, start, max_bytes)
            state = decode_state(channel.receive(max_bytes=state_limit(start)))
        except BaseException:
            for link in links.values():
                link.close()
            raise
    except InvalidArgumentError as error:
        raise RejoinError(f"sent an answer that cannot be read: {error}") from error
    finally:
        channel.close()
    last_total = state.pop(_LAST_TOTAL, None)
    return Admission(welcome, links, header, parameters, state, last_total)


def _open_links(
    rendezvous: Rendezvous, welcome: Welcome, addresses: Mapping[int, Address], *, max_bytes: int
) -> dict[int, Link]:
    """Connect to all neighbours at the same time; those that are not there are left out."""
    session = bytes.fromhex(welcome.session)
    # Short, as the run goes on meanwhile: the links must be there before the step that was named.
    timeout = min(rendezvous.timeout, 5.0)

    def connect(peer: int) -> Channel | None:
        with suppress(UnreachableError):
            return dial(
                addresses[peer],
                rendezvous.credentials,
                peer,
                Purpose.LINK,
                session=session,
                timeout=timeout,
            )
        return None

    with ThreadPoolExecutor(max(len(addresses), 1)) as pool:
        channels = list(pool.map(connect, addresses))
    return {one.peer: Link(one, max_bytes=max_bytes) for one in channels if one is not None}


def _await_model(
    channel: Channel, rendezvous: Rendezvous, sponsor: int, start: Tensor, max_bytes: int
) -> tuple[Header, Tensor]:
    """Wait for the step of the return, and receive the sponsor's model."""
    data = memoryview(b"")
    # The number of a step shows that the run goes on. Only the model is as long as a header.
    while len(data) <= 32:
        rendezvous.check_interruption()
        data = channel.receive(max_bytes=max_bytes)
    header, parameters = decode_message(
        data, num_agents=rendezvous.num_agents, sender=sponsor, dtype=start.dtype
    )
    # Before the ledger reserves a step that could not be computed.
    if len(parameters) != len(start):
        raise RejoinError(f"sent {header.payload_bytes} bytes of parameters, not {start.nbytes}")
    if not is_sane(parameters):
        raise RejoinError("sent a model that is not finite, or absurdly large")
    return header, parameters


def save_addresses(folder: Path, meeting: Meeting, own: Address) -> None:
    """Keep the addresses of a run in an agent's private folder, for its return."""
    document = {
        "own": list(own),
        "others": {str(agent): list(place) for agent, place in meeting.addresses.items()},
    }
    with writing_whole(folder / _ADDRESSES, is_private=True) as file:
        file.write_text(json.dumps(document), encoding="utf-8")


def load_addresses(folder: Path) -> tuple[Address | None, dict[int, Address]]:
    """Return the own address in a run before, and those of the others; none without a file."""
    path = folder / _ADDRESSES
    if not path.exists():
        return None, {}
    kinds = {"own": tuple[str, int], "others": Mapping[str, tuple[str, int]]}
    document = read_json(path, kind="addresses of a run")
    try:
        fields = build_fields(kinds, document, "addresses")
        _check_agents(fields["others"])
    except InvalidArgumentError as error:
        raise FileFormatError(f"{path}: not addresses of a run: {error}") from error
    others = {int(agent): tuple(place) for agent, place in fields["others"].items()}
    return fields["own"], others


@dataclass(eq=False)
class _Applicant:
    """An agent that waits to return, at its sponsor; its step once it was called."""

    channel: Channel
    hello: Hello
    step: int | None = None

    def send(self, message: bytes) -> None:
        # A sponsor never waits for an applicant: one that is gone again is noticed by its links.
        with suppress(ChannelClosedError):
            self.channel.set_timeout(1.0)
            self.channel.send(message)

    def answer(self, welcome: Welcome) -> None:
        self.send(json.dumps(asdict(welcome)).encode())
        if welcome.refusal:
            self.channel.close()

    def read_signature(self) -> bytes:
        """Return the agent's signature of its call; nothing if it sends none in time."""
        try:
            # It answers at once. A sponsor waits for nobody else, and for each agent once.
            self.channel.set_timeout(_SECONDS_TO_ANSWER)
            return bytes(self.channel.receive(max_bytes=_MAX_SIGNATURE_BYTES))
        except (ChannelClosedError, TamperedError):
            return b""


@final
class Returns:
    """The agents that ask this one to let them in again.

    Args:
        hello: The own terms, which theirs must match.
        rendezvous: Its listener is where they ask.
        opener: The place where they connect.
        nonce: The nonce of the run.
        last_step: The end of the run.
        timeout: How many seconds to wait for the link of an agent whose step has come.
    """

    def __init__(
        self,
        hello: Hello,
        rendezvous: Rendezvous,
        opener: LinkOpener,
        *,
        nonce: bytes,
        last_step: int,
        timeout: float,
    ) -> None:
        self._hello = hello
        self._opener = opener
        self._meeting = rendezvous.meeting
        self._nonce = nonce
        self._last_step = last_step
        self._timeout = timeout
        # One place for each agent, so that none takes those of others.
        self._waiting: dict[int, _Applicant] = {}
        self._lock = threading.Lock()
        self._called: dict[int, _Applicant] = {}
        self._banned: set[int] = set()
        self._unconfirmed: set[int] = set()
        self._absent: set[int] = set()
        rendezvous.listener.handle(Purpose.REJOIN, NO_SESSION, self._accept)

    def _accept(self, channel: Channel) -> None:
        try:
            channel.set_timeout(5.0)
            data = bytes(channel.receive(max_bytes=_MAX_REQUEST_BYTES))
            hello = build(Hello, parse_json(data), "the request")
            channel.set_timeout(None)
        except (ChannelClosedError, TamperedError, InvalidArgumentError):
            channel.close()
            return
        with self._lock:
            before = self._waiting.pop(channel.peer, None)
            self._waiting[channel.peer] = _Applicant(channel, hello)
        if before is not None:
            before.channel.close()

    def _take_waiting(self) -> dict[int, _Applicant]:
        """Return the agents that asked since the last call, and still wait for an answer."""
        with self._lock:
            asked, self._waiting = self._waiting, {}
        # Nobody is announced who will not come: all its neighbours would wait for it.
        for applicant in asked.values():
            if applicant.channel.is_over:
                applicant.channel.close()
        return {agent: one for agent, one in asked.items() if not one.channel.is_over}

    def serve(self, step: int, membership: Membership) -> None:
        """Answer all requests before a step."""
        for agent, applicant in self._take_waiting().items():
            # It may ask before its loss has been noticed: its old link ends first. And one agent
            # returns at a time.
            if agent not in membership.lost or max(membership.calls.values(), default=0) >= step:
                with self._lock:
                    # It may have asked again meanwhile.
                    if self._waiting.setdefault(agent, applicant) is not applicant:
                        applicant.channel.close()
                continue
            return_step = max(step + _STEPS_OF_NOTICE, applicant.hello.first_free_step)
            refusal = self._refuse(agent, applicant.hello, return_step)
            if refusal:
                applicant.answer(Welcome(refusal=refusal))
                continue
            applicant.answer(
                Welcome(
                    session=self._meeting.session.hex(),
                    nonce=self._nonce.hex(),
                    return_step=return_step,
                    last_step=self._last_step,
                    addresses={str(a): place for a, place in self._meeting.addresses.items()},
                    present=membership.present,
                )
            )
            # Nobody announces the return of an agent but itself.
            if membership.note_call(agent, return_step, applicant.read_signature()):
                applicant.step = return_step
                self._called[agent] = applicant
            else:
                self._unconfirmed.add(agent)
                applicant.channel.close()
        for applicant in self._called.values():
            # It shows that the run goes on.
            applicant.send(json.dumps(step).encode())

    def _refuse(self, agent: int, hello: Hello, return_step: int) -> str:
        """Return why an agent is not let in; empty if it is."""
        left = self._last_step - return_step
        if agent in self._banned:
            return "it broke the protocol in this run"
        # Each time would cost this agent a wait.
        if agent in self._unconfirmed:
            return "it asked before, and did not confirm its return"
        if left <= 0:
            return "the run ends before it could take part again"
        # As at the start of a run, all ledgers must allow all steps: new plans for survivors are
        # made for the steps that are left, and all agents must count the same.
        if hello.remaining < left:
            return f"its ledger allows fewer releases than the {left} steps that are left"
        try:
            # The numbers only name the two sides. Nonces, ledgers and checkpoints are not compared:
            # those of an agent that returns are its own.
            compare_hellos({-1: self._hello, agent: hello})
        except HandshakeError as error:
            return f"the terms of agent {agent} differ from those of the run in {error.topic}"
        return ""

    def connect(self, agent: int) -> Link:
        """Return the link to an agent whose step has come; raise ``LinkError`` without one."""
        if agent in self._banned:
            self._opener.reject(agent)
            raise LinkError(f"agent {agent} broke the protocol, and is not linked again")
        # One that announces its return and does not come costs a time-out once.
        timeout = 0.0 if agent in self._absent else self._timeout
        self._absent.add(agent)
        link = self._opener.wait(agent, timeout=timeout)
        self._absent.discard(agent)
        return link

    def ban(self, agent: int) -> None:
        """Let an agent never in again, as it broke the protocol."""
        self._banned.add(agent)

    def hand_over(
        self,
        step: int,
        header: Header,
        parameters: Tensor,
        state: Mapping[str, Tensor],
        last_total: Tensor | None,
    ) -> None:
        """Send all that this agent has to the one whose step has come, and takes part from now."""
        if last_total is not None:
            state = {**state, _LAST_TOTAL: last_total}
        for agent, applicant in list(self._called.items()):
            if applicant.step == step:
                applicant.send(header.encode() + parameters.numpy().tobytes())
                applicant.send(encode_state(state))
                # The system still delivers what was sent, as nothing is left to be read here.
                applicant.channel.close()
                del self._called[agent]

    def reject(self, agents: Iterable[int]) -> None:
        """Close the connections of agents that cannot return now."""
        for agent in agents:
            self._opener.reject(agent)

    def cancel(self, step: int) -> None:
        """Let agents ask again that were to return by a step, and have not."""
        for agent, applicant in list(self._called.items()):
            if applicant.step is not None and applicant.step <= step:
                applicant.channel.close()
                del self._called[agent]

    def close(self) -> None:
        """Let nobody in any more."""
        for applicant in self._take_waiting().values():
            applicant.answer(Welcome(refusal="the run ends before it could take part again"))
        # A stop may come before the step of a return that was promised.
        for applicant in self._called.values():
            applicant.channel.close()
        self._called = {}


def state_limit(model: Tensor) -> int:
    """Return the most bytes of a state."""
    return _MAX_INDEX_BYTES + _MAX_COPIES * 8 * len(model)


def encode_state(state: Mapping[str, Tensor]) -> bytes:
    """Return a state as bytes.

    >>> found = decode_state(memoryview(encode_state({"memory": torch.arange(3.0)})))
    >>> found["memory"].tolist()
    [0.0, 1.0, 2.0]
    """
    index, parts = [], []
    for name, tensor in state.items():
        own = tensor.detach().cpu().contiguous()
        index.append([name, str(own.dtype).removeprefix("torch."), list(own.shape)])
        parts.append(own.reshape(-1).view(torch.uint8).numpy().tobytes())
    head = json.dumps(index).encode()
    return b"".join([len(head).to_bytes(4, "big"), head, *parts])


def decode_state(data: memoryview) -> dict[str, Tensor]:
    """Return the state that a neighbour sent; raise ``ProtocolError`` for anything else."""
    size = int.from_bytes(data[:4], "big")
    rest, state = data[4 + size :], dict[str, Tensor]()
    try:
        kinds = tuple[tuple[str, str, tuple[int, ...]], ...]
        index = build(kinds, parse_json(bytes(data[4 : 4 + size])), "the state")
    except InvalidArgumentError as error:
        raise ProtocolError(f"sent a state that cannot be read: {error}") from error
    for name, kind, shape in index:
        dtype, count = _DTYPES.get(kind), 1
        for length in shape:
            count *= max(length, 0)
        if dtype is None or min(shape, default=0) < 0 or count * dtype.itemsize > len(rest):
            raise ProtocolError("sent a state that was cut short or is damaged")
        own = bytearray(rest[: count * dtype.itemsize])
        rest = rest[len(own) :]
        empty = torch.empty(shape, dtype=dtype)
        state[name] = torch.frombuffer(own, dtype=dtype).view(shape) if own else empty
    if len(rest):
        raise ProtocolError("sent a state that is longer than it says")
    return state
