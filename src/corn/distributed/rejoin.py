"""Return of an agent to a run under way, which lost it.

The agent asks one neighbour, its sponsor, for the terms of the run, and compares its own. The
sponsor announces the step of the return, so late that all agents know of it by then. Until then the
agent connects to its neighbours. At that step it receives the sponsor's model and takes part again,
with the noise of the plan of all. It then connects to neighbours that have returned meanwhile; of
two that return at the same step, the one with the higher number connects.

No noise is released twice: the agent returns after every step that its ledger has ever reserved,
and spends no more than if it had never left. The sponsor's model is public, as every message is.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import final

from torch import Tensor

from corn.distributed.handshake import Hello, compare_hellos
from corn.distributed.membership import Membership
from corn.distributed.messages import (
    Header,
    NewsKeys,
    Proof,
    ProtocolError,
    decode_message,
    is_sane,
    state_return,
)
from corn.distributed.public_state import (
    PublicState,
    decode_state,
    encode_state,
    state_limit,
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
_ADDRESSES = "addresses.json"


class RejoinError(PublicError):
    """No neighbour lets this agent in."""


class AloneError(RejoinError):
    """A neighbour that would help trains alone, and others may be together."""


# Of one sponsor: the next one is asked.
_FAILURES = (UnreachableError, ChannelClosedError, TamperedError, ProtocolError, RejoinError)


@dataclass(frozen=True)
class Request:
    """Request of an agent that wants to return, to its sponsor.

    Attributes:
        hello: its terms, which must be those of the run.
        first_free_step: the first step that its ledger has never reserved.
        wants_company: whether a sponsor that trains alone is to refuse, because others may be
            together.
    """

    hello: Hello
    first_free_step: int
    wants_company: bool = False


@dataclass(frozen=True)
class Welcome:
    """Answer of a sponsor.

    Attributes:
        session: of the run, in hexadecimal.
        nonce: of the run, in hexadecimal.
        return_step: from which the agent takes part.
        last_step: at which the run ends.
        addresses: of the members' listeners.
        present: the agents that take part now.
        refusal: why the agent is not let in; empty if it is.
        is_alone: whether that is because the sponsor trains alone.
    """

    session: str = ""
    nonce: str = ""
    return_step: int = 0
    last_step: int = 0
    addresses: Mapping[str, tuple[str, int]] | None = None
    present: tuple[int, ...] = ()
    refusal: str = ""
    is_alone: bool = False

    def __post_init__(self) -> None:
        # It comes from another machine.
        if not self.refusal:
            check_nonce(parse_hex(self.nonce, "nonce"))
            parse_hex(self.session, "session")
        _check_agents(self.addresses or {})


def _check_agents(addresses: Iterable[str]) -> None:
    # int() would accept signs and spaces too, and raises for thousands of digits.
    if not all(number.isdecimal() and len(number) <= MAX_DIGITS for number in addresses):
        raise InvalidArgumentError("addresses must be those of agents")


@final
class Applicant:
    """An agent that waits to return, at its sponsor."""

    def __init__(self, channel: Channel, request: Request) -> None:
        self._channel, self.request = channel, request
        self.agent = channel.peer

    def answer(self, welcome: Welcome) -> None:
        """Send the terms of the return, or a refusal."""
        self._send(json.dumps(asdict(welcome)).encode())
        if welcome.refusal:
            self.close()

    def confirm(self) -> Proof:
        """Return the agent's signature of its return; an empty one if it sends none in time."""
        try:
            # It answers at once. A sponsor waits for nobody else, and for each agent once.
            self._channel.set_timeout(_SECONDS_TO_ANSWER)
            return Proof(self.agent, bytes(self._channel.receive(max_bytes=_MAX_SIGNATURE_BYTES)))
        except (ChannelClosedError, TamperedError):
            return Proof(self.agent, b"")

    def report_step(self, step: int) -> None:
        """Show that the run goes on."""
        self._send(json.dumps(step).encode())

    def hand_over(self, header: Header, parameters: Tensor, state: PublicState) -> None:
        """Send the model, all news and the state; the agent takes part from now on."""
        self._send(header.encode() + parameters.numpy().tobytes())
        self._send(encode_state(state))
        # The system still delivers what was sent, as nothing is left to be read at this end.
        self.close()

    @property
    def is_gone(self) -> bool:
        """Whether it has closed its connection."""
        return self._channel.is_over

    def close(self) -> None:
        """End the connection; the agent asks another sponsor."""
        self._channel.close()

    def _send(self, message: bytes) -> None:
        # A sponsor never waits for an applicant: one that is gone again is noticed by its links.
        with suppress(ChannelClosedError):
            self._channel.set_timeout(1.0)
            self._channel.send(message)


@final
class Sponsor:
    """The opener at which agents ask to return, in an agent that takes part."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        # One place for each agent, so that none takes those of others.
        self._waiting: dict[int, Applicant] = {}
        self._lock = threading.Lock()
        rendezvous.listener.handle(Purpose.REJOIN, NO_SESSION, self._accept)

    def take_applicants(self) -> list[Applicant]:
        """Return the agents that asked since the last call, and still wait for an answer."""
        with self._lock:
            found, self._waiting = list(self._waiting.values()), {}
        # Nobody is announced who will not come: all its neighbours would wait for it.
        for applicant in found:
            if applicant.is_gone:
                applicant.close()
        return [applicant for applicant in found if not applicant.is_gone]

    def put_back(self, applicant: Applicant) -> None:
        """Let an agent wait until its loss is known everywhere."""
        with self._lock:
            # It may have asked again meanwhile.
            if self._waiting.setdefault(applicant.agent, applicant) is not applicant:
                applicant.close()

    def _accept(self, channel: Channel) -> None:
        try:
            channel.set_timeout(5.0)
            data = bytes(channel.receive(max_bytes=_MAX_REQUEST_BYTES))
            request = build(Request, parse_json(data), "the request")
            channel.set_timeout(None)
        except (ChannelClosedError, TamperedError, InvalidArgumentError):
            channel.close()
            return
        with self._lock:
            before = self._waiting.pop(channel.peer, None)
            self._waiting[channel.peer] = Applicant(channel, request)
        if before is not None:
            before.close()


def refuse_terms(own: Hello, request: Request, agent: int) -> str:
    """Return why an agent's terms are not those of the run; empty if they are."""
    try:
        # The numbers only name the two sides. Nonces, ledgers and checkpoints are not compared:
        # those of an agent that returns are its own.
        compare_hellos({-1: own, agent: request.hello})
    except HandshakeError as error:
        return f"the terms of agent {agent} differ from those of the run in {error.topic}"
    return ""


@dataclass(frozen=True, eq=False)
class Admission:
    """An agent's way back into a run: all that it needs to take part.

    Attributes:
        welcome: the terms.
        links: to the neighbours that it reached.
        header: the sponsor's, with all news.
        parameters: the model to start from.
        state: what the sponsor has besides, with exact sums.
    """

    welcome: Welcome
    links: Mapping[int, Link]
    header: Header
    parameters: Tensor
    state: PublicState


def request_return(
    rendezvous: Rendezvous,
    request: Request,
    neighbours: Iterable[int],
    addresses: Mapping[int, Address],
    *,
    start: Tensor,
    max_bytes: int,
) -> Admission:
    """Return to a run with the help of the first neighbour that answers, if possible in company.

    ``start`` is the initial model: the one that is received must have its type and size.

    Raises:
        RejoinError: no neighbour lets this agent in; the message has the reasons.
    """
    reasons: dict[int, CornError] = {}
    # A neighbour may be lost too, or wait for its own return: the others are asked before this
    # agent waits for it. And one that was cut off and trains alone would lead away from the others.
    short = min(_SECONDS_TO_ANSWER, rendezvous.timeout)
    for patience, wants_company in ((short, True), (rendezvous.timeout, False)):
        for sponsor in sorted(set(neighbours) & set(addresses)):
            # A neighbour that refused does so again; one that was not there may come up.
            if not isinstance(reasons.get(sponsor), UnreachableError | AloneError | None):
                continue
            try:
                return _return_by(
                    rendezvous,
                    sponsor,
                    replace(request, wants_company=wants_company),
                    sorted(neighbours),
                    addresses,
                    start=start,
                    max_bytes=max_bytes,
                    patience=patience,
                )
            except _FAILURES as error:
                reasons[sponsor] = error
    found = [f"agent {sponsor}: {error}" for sponsor, error in sorted(reasons.items())]
    why = "; ".join(found) or "the addresses of its neighbours are not known"
    raise RejoinError(f"cannot return to the run: {why}")


def _return_by(
    rendezvous: Rendezvous,
    sponsor: int,
    request: Request,
    neighbours: list[int],
    addresses: Mapping[int, Address],
    *,
    start: Tensor,
    max_bytes: int,
    patience: float,
) -> Admission:
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
        channel.send(json.dumps(asdict(request)).encode())
        # An answer comes between two steps. Without one for n time-outs the sponsor hangs.
        channel.set_timeout(rendezvous.timeout * (rendezvous.num_agents + 1))
        data = bytes(channel.receive(max_bytes=_MAX_REQUEST_BYTES))
        welcome: Welcome = build(Welcome, parse_json(data), "the welcome")
        if welcome.is_alone:
            raise AloneError("it trains alone")
        if welcome.refusal:
            raise RejoinError(welcome.refusal)
        # A sponsor that is confused may name a run of before, with the noise of before.
        if welcome.return_step < request.first_free_step:
            raise RejoinError(
                f"named step {welcome.return_step} for the return, but steps before "
                f"{request.first_free_step} may have been released under the same noise"
            )
        keys = NewsKeys(rendezvous.credentials, bytes.fromhex(welcome.session))
        channel.send(keys.sign(state_return(rendezvous.agent, welcome.return_step)).signature)
        links = _open_links(rendezvous, welcome, neighbours, addresses, max_bytes=max_bytes)
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
    return Admission(welcome, links, header, parameters, state)


def _open_links(
    rendezvous: Rendezvous,
    welcome: Welcome,
    neighbours: list[int],
    addresses: Mapping[int, Address],
    *,
    max_bytes: int,
) -> dict[int, Link]:
    """Connect to all neighbours at the same time; those that are not there are left out."""
    # The agent that returns connects to all: the others do not know its new address. Those
    # that moved published their address at the store.
    known = dict(addresses) | {
        int(agent): address for agent, address in (welcome.addresses or {}).items()
    }
    links: dict[int, Link] = {}
    session = bytes.fromhex(welcome.session)

    def connect(peer: int) -> None:
        with suppress(UnreachableError):
            channel = dial(
                known[peer],
                rendezvous.credentials,
                peer,
                Purpose.LINK,
                session=session,
                # Short, as the run goes on meanwhile: the links must be there before the step that
                # was announced.
                timeout=min(rendezvous.timeout, 5.0),
            )
            links[peer] = Link(channel, max_bytes=max_bytes)

    threads = [
        threading.Thread(target=connect, args=(peer,), daemon=True)
        for peer in neighbours
        # Others are lost themselves, and would cost a time-out.
        if peer in known and peer in welcome.present
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return links


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
    with writing_whole(folder / _ADDRESSES, is_private=True) as partial:
        partial.write_text(json.dumps(document), encoding="utf-8")


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


@final
class Returns:
    """The agents that ask this one to let them in again.

    Args:
        hello: the own terms, which theirs must match.
        sponsor: where they ask.
        opener: where they connect.
        welcome: returns the terms of a return at a step, to agents that take part.
        last_step: of the run.
        timeout: seconds to wait for the link of an agent whose step has come.
        to_dial: the addresses of agents to which this one connects at its own return; all others
            connect to it.
        waits_for_all: whether all agents wait for one that returns, as with exact sums: one returns
            at a time, and is called, where gossip counts on it from an announced step on.
    """

    def __init__(
        self,
        hello: Hello,
        sponsor: Sponsor,
        opener: LinkOpener,
        *,
        welcome: Callable[[int, tuple[int, ...]], Welcome],
        last_step: int,
        timeout: float,
        to_dial: Mapping[int, Address] | None = None,
        waits_for_all: bool = False,
    ) -> None:
        self._hello, self._sponsor, self._opener = hello, sponsor, opener
        self._welcome, self._last_step, self._timeout = welcome, last_step, timeout
        self._to_dial, self._waits_for_all = dict(to_dial or {}), waits_for_all
        self._admitted: dict[int, tuple[int, Applicant]] = {}
        self._banned, self._unconfirmed, self._awaited = set[int](), set[int](), set[int]()

    @property
    def to_dial(self) -> frozenset[int]:
        """The agents to which this one still has to connect."""
        return frozenset(self._to_dial)

    def serve(self, step: int, membership: Membership, notice: int) -> None:
        """Answer all requests before a step; news of a return takes ``notice`` steps to spread."""
        for applicant in self._sponsor.take_applicants():
            agent = applicant.agent
            # It may ask before its loss has been noticed: its old link ends first. Or it may ask
            # again before the step of a return that came to nothing, at which its neighbours still
            # expect it: they would take its new link for the old return, and wait in vain.
            is_awaited = membership.is_awaited(None if self._waits_for_all else agent, step)
            if agent not in membership.lost_by(step) or is_awaited:
                self._sponsor.put_back(applicant)
                continue
            # All agents must know of a return before its step, as they switch plans and open links
            # at it.
            return_step = max(step + notice + 1, applicant.request.first_free_step)
            present = membership.present_at(step)
            if applicant.request.wants_company and len(present) == 1:
                applicant.answer(Welcome(refusal="this agent trains alone", is_alone=True))
                continue
            refusal = self._refuse(applicant, return_step)
            if refusal:
                applicant.answer(Welcome(refusal=refusal))
                continue
            applicant.answer(self._welcome(return_step, present))
            # Nobody announces the return of an agent but itself.
            proof = applicant.confirm()
            if not membership.confirms_return(agent, return_step, proof):
                self._unconfirmed.add(agent)
                applicant.close()
                continue
            if self._waits_for_all:
                membership.note_call(agent, return_step, proof)
            else:
                membership.note_return(agent, return_step, proof)
            self._admitted[agent] = return_step, applicant
        for _, applicant in self._admitted.values():
            applicant.report_step(step)

    def _refuse(self, applicant: Applicant, return_step: int) -> str:
        """Return why an agent is not let in; empty if it is."""
        left = self._last_step - return_step
        if applicant.agent in self._banned:
            return "it broke the protocol in this run"
        # Each time would cost this agent a wait.
        if applicant.agent in self._unconfirmed:
            return "it asked before, and did not confirm its return"
        if left <= 0:
            return "the run ends before it could take part again"
        # As at the start of a run, all ledgers must allow all steps: new plans for survivors are
        # made for the steps that are left, and all agents must count the same.
        if applicant.request.hello.remaining < left:
            return f"its ledger allows fewer releases than the {left} steps that are left"
        return refuse_terms(self._hello, applicant.request, applicant.agent)

    def connect(self, agent: int) -> Link:
        """Return the link to an agent whose step has come; raise ``LinkError`` without one."""
        address = self._to_dial.pop(agent, None)
        if agent in self._banned:
            self._opener.reject(agent)
            raise LinkError(f"agent {agent} broke the protocol, and is not linked again")
        # One that announces its return and does not come costs a time-out once.
        timeout = 0.0 if agent in self._awaited else self._timeout
        self._awaited.add(agent)
        if address is not None:
            link = self._opener.connect(agent, address, timeout=timeout)
        else:
            link = self._opener.wait(agent, timeout=timeout)
        self._awaited.discard(agent)
        return link

    def ban(self, agent: int) -> None:
        """Let an agent never in again, as it broke the protocol."""
        self._banned.add(agent)

    def hand_over(
        self, step: int, header: Header, parameters: Tensor, state: PublicState | None = None
    ) -> None:
        """Send the model to the agents whose step has come, and with exact sums the state."""
        for agent, (when, applicant) in list(self._admitted.items()):
            if when == step:
                applicant.hand_over(header, parameters, state or {})
                del self._admitted[agent]

    def reject(self, agents: Iterable[int]) -> None:
        """Close the connections of agents that cannot return now."""
        for agent in agents:
            self._opener.reject(agent)

    def cancel(self, step: int) -> None:
        """Let agents ask again that were to return by a step, and have not."""
        for agent, (when, applicant) in list(self._admitted.items()):
            if when <= step:
                applicant.close()
                del self._admitted[agent]

    def stop(self) -> None:
        """Let nobody in any more, and close the connections that nobody took."""
        self.close()
        self._opener.close()

    def close(self) -> None:
        """Let nobody in any more."""
        for applicant in self._sponsor.take_applicants():
            applicant.answer(Welcome(refusal="the run ends before it could take part again"))
        # A stop may come before the step of a return that was promised.
        for _, applicant in self._admitted.values():
            applicant.close()
        self._admitted = {}
