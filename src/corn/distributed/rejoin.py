"""Return of an agent to a run with exact sums, which lost it.

The agent asks a neighbour, its sponsor, for the terms of the run, signs the step of its return, of
which the sponsor tells all others, and connects to its neighbours. All wait for it before that
step. It receives the sponsor's model and state, which are public, and takes part in the recovery
that lets it in. A neighbour that only connects outward calls the lost agent at intervals.

No noise is released twice: the agent returns after every step that its ledger has ever reserved.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

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
from corn.distributed.rendezvous import HandshakeError, Hello, Meeting, compare_hellos
from corn.errors import (
    CornError,
    FileFormatError,
    InvalidArgumentError,
    PublicError,
    make_printable,
)
from corn.files import writing_whole
from corn.noise.stream import check_nonce, decode_fields, encode_fields
from corn.parsing import build, build_fields, parse_hex, parse_json, read_json
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
    open_links,
)

if TYPE_CHECKING:
    from corn.distributed.agent import AgentRun

_MAX_REQUEST_BYTES = 1 << 20
_MAX_SHAPE_BYTES = 200
# Room for both sides of a difference between terms.
_MAX_REFUSAL = 5000
_SECONDS_TO_ANSWER = 1.0
_SECONDS_TO_CONNECT = 5.0
# News of a call reaches all agents in one step. The next one gives the agent time to connect.
_STEPS_OF_NOTICE = 2
# Between two calls of a neighbour that only connects outward.
_SECONDS_BETWEEN_CALLS = 2.0
_ENDED = "the run ends before it could take part again"
_MISBEHAVED = "it broke the protocol in this run"
_ADDRESSES = "addresses.json"
_STATE = "corn state"
_LAST_TOTAL = "sum of the step before"
# No optimizer of torch keeps as many tensors of the size of the model, of eight bytes each.
_MAX_COPIES = 8
_MAX_INDEX_BYTES = 1 << 20
_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in ("float16", "bfloat16", "float32", "float64", "int16", "int32", "int64", "bool")
}


class RejoinError(PublicError):
    """No neighbour lets this agent in."""


@dataclass(frozen=True)
class Welcome:
    """Answer of a sponsor: session and nonce of the run, in hexadecimal, or why it refuses.

    The agent takes part from ``return_step`` on, with those that are ``present`` now.
    """

    session: str = ""
    nonce: str = ""
    return_step: int = 0
    last_step: int = 0
    present: tuple[int, ...] = ()
    refusal: str = ""

    def __post_init__(self) -> None:
        # It comes from another machine.
        if not self.refusal:
            check_nonce(parse_hex(self.nonce, "nonce"))
            parse_hex(self.session, "session")

    def encode(self) -> bytes:
        """Return the answer as a message."""
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True, eq=False)
class Admission:
    """An agent's way back into a run: the terms, its links, and all that its sponsor has."""

    welcome: Welcome
    links: Mapping[int, Link]
    opener: LinkOpener
    header: Header
    parameters: Tensor
    state: Mapping[str, Tensor]
    last_total: Tensor | None


def request_return(run: AgentRun, addresses: dict[int, Address]) -> Admission:
    """Return to a run by the first neighbour that lets this agent in, or raise ``RejoinError``."""
    rendezvous = run.rendezvous
    accepts = rendezvous.credentials.roster.accepts
    sponsors = sorted(peer for peer in run.neighbours if peer in addresses or not accepts[peer])
    opener = rendezvous.make_opener(Meeting(NO_SESSION, addresses), Purpose.REJOIN)
    reasons: dict[int, CornError] = {}
    with closing(opener):
        for sponsor in sponsors:
            # A neighbour may be lost too. One that only connects outward calls at intervals.
            seconds = rendezvous.timeout
            if accepts[sponsor]:
                seconds = min(_SECONDS_TO_CONNECT, seconds)
            try:
                channel = opener.open_channel(
                    sponsor, timeout=seconds, check=rendezvous.check, connects=accepts[sponsor]
                )
                with closing(channel):
                    return _negotiate(run, channel, addresses)
            except InvalidArgumentError as error:
                reasons[sponsor] = RejoinError(f"sent an answer that cannot be read: {error}")
            except (LinkError, ChannelClosedError, TamperedError, RejoinError) as error:
                reasons[sponsor] = error
    found = [f"agent {sponsor}: {error}" for sponsor, error in sorted(reasons.items())]
    why = "; ".join(found) or "its folder (--out) has no addresses: it took part in no run there"
    raise RejoinError(f"cannot return to the run: {why}")


def _negotiate(run: AgentRun, channel: Channel, addresses: dict[int, Address]) -> Admission:
    """Return to a run with the help of the neighbour at the other end of a channel."""
    rendezvous, hello, start = run.rendezvous, run.hello, run.start
    own = rendezvous.credentials
    channel.send(json.dumps(asdict(hello)).encode())
    # An answer comes between two steps. Without one for n time-outs the sponsor hangs.
    channel.set_timeout(rendezvous.timeout * (rendezvous.num_agents + 1))
    data = bytes(channel.receive(max_bytes=_MAX_REQUEST_BYTES))
    welcome: Welcome = build(Welcome, parse_json(data), "the welcome")
    if welcome.refusal:
        raise RejoinError(make_printable(welcome.refusal, limit=_MAX_REFUSAL))
    # A sponsor that is confused may name a run of before, with the noise of before.
    if welcome.return_step < hello.first_free_step:
        raise RejoinError(
            f"named step {welcome.return_step} for the return, but steps before "
            f"{hello.first_free_step} may have been released under the same noise"
        )
    session = bytes.fromhex(welcome.session)
    opener = rendezvous.make_opener(Meeting(session, addresses), max_bytes=run.max_bytes)
    links: dict[int, Link] = {}
    # Agents that are lost would cost a time-out.
    present = run.neighbours & set(welcome.present)
    accepting = {peer for peer in present if own.roster.accepts[peer]}
    # Briefly, as the run goes on: the links must be there before the step that was named.
    connect = partial(
        open_links, opener, timeout=min(rendezvous.timeout, _SECONDS_TO_CONNECT), needs_all=False
    )
    with ExitStack() as stack:
        stack.callback(opener.close)
        stack.callback(lambda: list(map(Link.close, links.values())))
        subject = Subject(Kind.CALL, own.agent, own.agent, own.agent)
        channel.send(NewsKeys(own, session).sign(subject, welcome.return_step))
        links.update(connect(accepting, connects=True))
        message = memoryview(b"")
        # The number of a step shows that the run goes on. Only the model is as long as a header.
        while len(message) <= 32:
            rendezvous.check()
            message = channel.receive(max_bytes=run.max_bytes)
        header, parameters = decode_message(
            message, num_agents=rendezvous.num_agents, sender=channel.peer, dtype=start.dtype
        )
        # Before the ledger reserves a step that could not be computed.
        if len(parameters) != len(start) or not is_sane(parameters):
            raise RejoinError(
                f"sent {header.payload_bytes} bytes of parameters, not {start.nbytes} of numbers "
                "that are finite and not absurdly large"
            )
        limit = _MAX_INDEX_BYTES + _MAX_COPIES * 8 * len(start)
        state = decode_state(channel.receive(max_bytes=limit))
        # The others connect at the step of the return, which the sponsor has reached.
        links.update(connect(present - accepting, connects=False))
        stack.pop_all()
    last_total = state.pop(_LAST_TOTAL, None)
    return Admission(welcome, links, opener, header, parameters, state, last_total)


def save_addresses(folder: Path, meeting: Meeting, own: Address) -> None:
    """Keep the addresses of a run in an agent's private folder, for its return."""
    document = {"own": own, "others": meeting.addresses}
    with writing_whole(folder / _ADDRESSES, is_private=True) as file:
        file.write_text(json.dumps(document), encoding="utf-8")


def load_addresses(folder: Path) -> tuple[Address | None, dict[int, Address]]:
    """Return the own address in a run before, and those of the others; none without a file."""
    path = folder / _ADDRESSES
    if not path.exists():
        return None, {}
    document = read_json(path, kind="addresses of a run")
    try:
        kinds = {"own": tuple[str, int], "others": Mapping[str, tuple[str, int]]}
        fields = build_fields(kinds, document, "addresses")
        return fields["own"], {int(agent): place for agent, place in fields["others"].items()}
    except (InvalidArgumentError, ValueError) as error:
        raise FileFormatError(f"{path}: not addresses of a run: {error}") from error


@final
class Returns:
    """The agents that ask this one to let them in again.

    They ask at the listener, and connect to ``opener``. An agent without a port calls its lost
    neighbours instead.
    """

    def __init__(self, run: AgentRun, opener: LinkOpener) -> None:
        self._run = run
        self._opener = opener
        rendezvous = run.rendezvous
        meeting = Meeting(NO_SESSION, rendezvous.meeting.addresses)
        self._callers = rendezvous.make_opener(meeting, Purpose.REJOIN)
        # The agents that were called, each with its step.
        self._called: dict[int, tuple[int, Channel]] = {}
        # Why agents are not let in again.
        self._refused: dict[int, str] = {}
        self._absent: set[int] = set()
        self._closed = threading.Event()
        self._can_accept = rendezvous.credentials.roster.accepts[rendezvous.agent]
        # Replaced as a whole, so that the thread reads it without a lock.
        self._lost_neighbours: frozenset[int] = frozenset()
        self._caller: threading.Thread | None = None

    def _call(self) -> None:
        """Call lost neighbours at intervals, in case they have started again and want to return."""
        while not self._closed.wait(_SECONDS_BETWEEN_CALLS):
            excluded = self._refused.keys() | self._called.keys() | self._callers.waiting
            for agent in sorted(self._lost_neighbours - excluded):
                with suppress(LinkError):
                    channel = self._callers.open_channel(
                        agent, timeout=_SECONDS_TO_ANSWER, connects=True
                    )
                    self._callers.put_back(channel)

    def serve(self, step: int, membership: Membership) -> None:
        """Answer all requests before a step."""
        if not self._can_accept:
            reachable = self._run.neighbours & self._run.rendezvous.meeting.addresses.keys()
            self._lost_neighbours = reachable & membership.lost.keys()
            if self._lost_neighbours and self._caller is None:
                self._caller = threading.Thread(target=self._call, daemon=True)
                self._caller.start()
        for channel in self._callers.take_all():
            has_asked = channel.poll()
            # Nobody is announced who will not come: all its neighbours would wait for it.
            if has_asked is None:
                channel.close()
            # It may ask before its loss has been noticed. And one agent returns at a time.
            elif (
                has_asked
                and channel.peer in membership.lost
                and max(membership.calls.values(), default=0) < step
            ):
                self._answer(channel, step, membership)
            else:
                self._callers.put_back(channel)
        for _, channel in self._called.values():
            # It shows that the run goes on.
            _send(channel, json.dumps(step).encode())

    def _answer(self, channel: Channel, step: int, membership: Membership) -> None:
        agent, run = channel.peer, self._run
        data = _receive(channel, max_bytes=_MAX_REQUEST_BYTES)
        # It is gone, or somebody on the network cut its request off: it may ask again.
        if not data or channel.poll() is None:
            channel.close()
            return
        try:
            hello: Hello = build(Hello, parse_json(data), "the request")
        except InvalidArgumentError:
            # Each time would cost this agent a wait.
            self._refused[agent] = "its request could not be read"
            channel.close()
            return
        return_step = max(step + _STEPS_OF_NOTICE, hello.first_free_step)
        if refusal := self._find_refusal(agent, hello, return_step):
            _refuse(channel, refusal)
            return
        welcome = Welcome(
            session=run.rendezvous.meeting.session.hex(),
            nonce=run.agreement.nonce.hex(),
            return_step=return_step,
            last_step=run.last_step,
            present=membership.present,
        )
        _send(channel, welcome.encode())
        # Nobody announces the return of an agent but itself.
        if membership.note_call(agent, return_step, _receive(channel, max_bytes=64)):
            self._called[agent] = return_step, channel
        else:
            self._refused[agent] = "it asked before, and did not confirm its return"
            channel.close()

    def _find_refusal(self, agent: int, hello: Hello, return_step: int) -> str:
        """Return why an agent is not let in; empty if it is."""
        left = self._run.last_step - return_step
        if agent in self._refused:
            return self._refused[agent]
        if left <= 0:
            return _ENDED
        # As at the start of a run, all ledgers must allow all steps: new plans for survivors are
        # made for the steps that are left, and all agents must count the same.
        if hello.remaining < left:
            return f"its ledger allows fewer releases than the {left} steps that are left"
        try:
            # The numbers only name the two sides. Nonces, ledgers and checkpoints are not compared:
            # those of an agent that returns are its own.
            compare_hellos({-1: self._run.hello, agent: hello})
        except HandshakeError as error:
            return str(error)
        return ""

    def connect(self, agent: int) -> Link:
        """Return the link to an agent whose step has come; raise ``LinkError`` without one."""
        if self._refused.get(agent) == _MISBEHAVED:
            self._opener.reject(agent)
            raise LinkError(f"agent {agent} is not linked again: {_MISBEHAVED}")
        # One that announces its return and does not come costs a time-out once.
        timeout = 0.0 if agent in self._absent else self._run.settings.timeout
        self._absent.add(agent)
        connects = not self._can_accept
        links = open_links(self._opener, [agent], timeout=timeout, connects=connects)
        self._absent.discard(agent)
        return links[agent]

    def ban(self, agent: int) -> None:
        """Let an agent never in again, as it broke the protocol."""
        self._refused[agent] = _MISBEHAVED

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
        for return_step, channel in self._called.values():
            if return_step == step:
                _send(channel, header.encode() + parameters.numpy().tobytes())
                _send(channel, encode_state(state))
        # The system still delivers what was sent, as nothing is left to be read here.
        self.cancel(step)

    def reject(self, agents: Iterable[int]) -> None:
        """Close the connections of agents that cannot return now."""
        for agent in agents:
            self._opener.reject(agent)

    def cancel(self, step: float = math.inf) -> None:
        """Let agents ask again that were to return by a step, and have not."""
        for agent, (return_step, channel) in list(self._called.items()):
            if return_step <= step:
                del self._called[agent]
                channel.close()

    def close(self) -> None:
        """Let nobody in any more."""
        self._closed.set()
        # Whoever asks from now on is answered too.
        self._run.rendezvous.listener.handle(Purpose.REJOIN, NO_SESSION, _turn_away)
        for channel in self._callers.take_all():
            _turn_away(channel)
        self._callers.close()
        # A stop may come before the step of a return that was promised.
        self.cancel()


def _send(channel: Channel, message: bytes) -> None:
    # A sponsor never waits for an applicant: one that is gone again is noticed by its links.
    with suppress(ChannelClosedError):
        channel.set_timeout(_SECONDS_TO_ANSWER)
        channel.send(message)


def _refuse(channel: Channel, reason: str) -> None:
    _send(channel, Welcome(refusal=reason).encode())
    channel.close()


def _turn_away(channel: Channel) -> None:
    # A connection that is closed with unread bytes may lose the answer.
    _receive(channel, max_bytes=_MAX_REQUEST_BYTES)
    _refuse(channel, _ENDED)


def _receive(channel: Channel, *, max_bytes: int) -> bytes:
    """Return what an applicant has sent, or nothing: it answers at once."""
    with suppress(ChannelClosedError, TamperedError):
        channel.set_timeout(_SECONDS_TO_ANSWER)
        return bytes(channel.receive(max_bytes=max_bytes))
    return b""


def encode_state(state: Mapping[str, Tensor]) -> bytes:
    """Return public tensors by name as bytes: with exact sums, all that an optimizer keeps."""
    fields: list[bytes | str] = [_STATE]
    for name, tensor in state.items():
        values = tensor.detach().cpu().contiguous()
        kind = str(values.dtype).removeprefix("torch.")
        shape = ",".join(map(str, values.shape))
        fields += [name, kind, shape, values.reshape(-1).view(torch.uint8).numpy().tobytes()]
    return encode_fields(*fields)


def decode_state(data: memoryview) -> dict[str, Tensor]:
    """Return the state that a neighbour sent; raise ``ProtocolError`` for anything else."""
    fields = decode_fields(bytes(data)) or []
    if fields[:1] != [_STATE.encode()] or len(fields) % 4 != 1:
        raise ProtocolError("sent a state that cannot be read")
    state = dict[str, Tensor]()
    for name, kind, shape, values in zip(*[iter(fields[1:])] * 4, strict=True):
        # Numbers of any length would take hours to multiply.
        if len(shape) > _MAX_SHAPE_BYTES:
            raise ProtocolError("sent a tensor of too many dimensions")
        try:
            dtype = _DTYPES[kind.decode()]
            sizes = [int(size) for size in shape.decode().split(",") if size]
            if len(values) != math.prod(sizes) * dtype.itemsize or min(sizes, default=0) < 0:
                raise ProtocolError("sent a tensor of another shape than it says")
            flat = torch.frombuffer(bytearray(values), dtype=dtype) if values else torch.empty(0)
            state[name.decode()] = flat.to(dtype).view(sizes)
        except (KeyError, ValueError, RuntimeError, TypeError, OverflowError) as error:
            raise ProtocolError("sent a state of unknown tensors") from error
    return state
