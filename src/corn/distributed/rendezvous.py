"""Start of a run: agents join a store, publish signed entries to each other, and agree on terms.

Every entry is signed for one session, a hash of fresh random numbers from all agents. So the host
of the store can neither change, invent or replay an entry, nor show agents different ones. It can
withhold entries; agents then time out. Once training has begun no agent needs the store.

A refusal is bound to its agent's fresh random number, as there may be no session yet.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import secrets
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, asdict, dataclass
from functools import partial
from pathlib import Path
from typing import final

from corn.checks import require
from corn.distributed.logs import log_event
from corn.distributed.membership import name_agents
from corn.errors import (
    CornError,
    InfeasibleError,
    InvalidArgumentError,
    PublicError,
    StoppedByUserError,
    make_printable,
)
from corn.learn.sweep import Interruption
from corn.noise import agree_on_nonce, load_compiled, load_identity
from corn.noise.stream import check_fingerprint, check_nonce, decode_fields, encode_fields
from corn.parsing import DEFAULT_PORT, build, format_address, parse_address, parse_hex, parse_json
from corn.plan import AgentGuarantee, Plan, verify_plan
from corn.topology.graphs import add_names
from corn.transport import (
    NO_SESSION,
    Address,
    Channel,
    Credentials,
    LinkError,
    LinkOpener,
    Listener,
    MemoryStore,
    Purpose,
    RemoteStore,
    StoreHost,
    dial,
)

# Values of other agents are quoted in full, to compare them, but nobody may fill a log.
_MAX_VALUE = 2000
_MAX_REASON = 300
_MAX_NAMED = 5
_SECONDS_TO_LEAVE = 2.0
# Between two requests to the store an agent looks for refusals and signals.
_LONGEST_WAIT = 0.2
_CHALLENGE_BYTES = 32
_JOIN = "join"
_REFUSAL = "refusal"
_SECONDS_OF_SILENCE = 2.0


class AbsentError(PublicError):
    """Some agents published nothing in time."""


class RefusalError(PublicError):
    """Another agent cannot start, so none does."""

    def __init__(self, refused_by: int, reason: str) -> None:
        why = make_printable(reason, limit=_MAX_REASON)
        super().__init__(f"does not start, because agent {refused_by} refused: {why}")


class HandshakeError(PublicError):
    """Agents do not agree on the run."""


class ForgedEntryError(PublicError):
    """An entry that its agent did not sign for this run."""

    def __init__(self, topic: str, agent: int) -> None:
        super().__init__(
            f"the store has a message ({topic}) under the number of agent {agent} which that agent "
            "did not sign for this run: a second run uses the store, or its host cannot be "
            "trusted; start all agents anew with a new store"
        )


def raise_if_stopped(interruption: Interruption | None) -> None:
    """Raise if a person ended the start of the run."""
    if interruption is not None and interruption.requested:
        raise StoppedByUserError("interrupted before the first step, nothing was released")


@contextmanager
def naming_agent(agent: int, names: Sequence[str] = ()) -> Iterator[None]:
    """Begin the message of every failure inside with the agent, and name all agents in it."""
    try:
        yield
    except CornError as error:
        # In place, so that the type and its fields stay: callers decide by them.
        error.args = (add_names(f"agent {agent}: {error}", names),)
        raise
    except OSError as error:
        what = f"{error.filename or 'file'}: {error.strerror or error}"
        raise CornError(add_names(f"agent {agent}: {what}", names)) from error


def compare(topic: str, values: Mapping[int, str]) -> None:
    """Raise unless all values agree; the most common one is the standard, agent 0's in a tie."""
    # Insertion order decides ties in most_common, so it must be the same everywhere.
    usual, _ = Counter(values[who] for who in sorted(values)).most_common(1)[0]
    others = tuple(who for who in sorted(values) if values[who] != usual)
    if not others:
        return

    def quote(value: str) -> str:
        return make_printable(value, limit=_MAX_VALUE) or "nothing"

    found = "; ".join(f"agent {who} has {quote(values[who])}" for who in others[:_MAX_NAMED])
    raise HandshakeError(f"agents differ in {topic}: {found}; the rest {quote(usual)}")


def signed_text(key: str, message: bytes, session: bytes) -> bytes:
    """Return what an agent signs: its message, the place at the store, and the session."""
    # The prefix keeps these signatures apart from those of rotations.
    return encode_fields("corn word", session, key, message)


@dataclass(frozen=True)
class Meeting:
    """The addresses of all agents' listeners, and the session to which links are bound."""

    session: bytes
    addresses: dict[int, Address]


@final
@dataclass(eq=False)
class Rendezvous:
    """One agent's access to the store, for one run and no more.

    ``address`` is that of the listener as others see it, and ``bound`` the one that it listens at.
    ``host`` is the store where it lives in this process. The others may take ``wait`` seconds to
    start, by default the time-out. ``rejoins``: the run is under way, and lost this agent.
    """

    store: MemoryStore | RemoteStore
    credentials: Credentials
    _: KW_ONLY
    listener: Listener
    address: Address
    bound: Address
    timeout: float
    wait: float | None = None
    keys: Path | None = None
    host: StoreHost | None = None
    rejoins: bool = False
    interruption: Interruption | None = None

    @property
    def key_folder(self) -> Path:
        """The folder of the agent's key, roster and ledgers."""
        if self.keys is None:
            raise InvalidArgumentError("keys must be the folder of the agent's key, found None")
        return self.keys

    def __post_init__(self) -> None:
        self.agent = self.credentials.agent
        self.num_agents = self.credentials.roster.num_agents
        # One fresh number from each agent: a session that contains this agent's own is new,
        # whatever the host of the store shows of the others.
        challenge = secrets.token_hex(_CHALLENGE_BYTES)
        self._introduction = json.dumps([challenge, *self.address]).encode()
        # As read at the meeting: refusals are checked against these.
        self._introductions: dict[int, bytes] = {}
        self._meeting: Meeting | None = None

    @property
    def meeting(self) -> Meeting:
        """The agents of this run; waits for them when it is first asked for."""
        if self._meeting is None:
            self._meeting = self._meet()
        return self._meeting

    def agree(self, topic: str, value: str) -> None:
        """Wait until all agents have come here with the same value; raise ``HandshakeError``."""
        found = self.exchange(topic, value.encode())
        self.raise_refusal()  # of an agent that agreed and failed afterwards
        compare(topic, {agent: text.decode(errors="replace") for agent, text in found.items()})

    def exchange(self, topic: str, message: bytes) -> dict[int, bytes]:
        """Publish a message and return those of all agents under the same topic."""
        self._put(topic, message, self.meeting.session)
        found = self._wait(topic, self.meeting.session, self.timeout)
        # The store's host could replay the messages of an earlier run. All noise would then repeat,
        # and differences of messages would show gradients. The nonce in the own message is new, so
        # an agent continues only if it reads its own message back.
        if found[self.agent] != message:
            raise ForgedEntryError(topic, self.agent)
        return found

    def refuse(self, reason: str) -> None:
        """Publish that this agent does not start; every wait of another agent then ends."""
        # Others check the refusal by the fresh random number in this entry.
        self._put(_JOIN, self._introduction, NO_SESSION, is_first=False)
        self._put(_REFUSAL, reason.encode(), _bind_refusal(self._introduction), is_first=False)

    def raise_refusal(self) -> None:
        """Raise ``RefusalError`` if another agent does not start."""
        refusals = self.store.get([f"{_REFUSAL}/{agent}" for agent in range(self.num_agents)])
        for agent, entry in enumerate(refusals):
            if entry is not None and agent != self.agent:
                # That of the meeting, or else at the store.
                introduction = self._introductions.get(agent)
                if introduction is None:
                    (joined,) = self.store.get([f"{_JOIN}/{agent}"])
                    introduction = self._read(joined or b"", _JOIN, agent, NO_SESSION)
                session = _bind_refusal(introduction)
                reason = self._read(entry, _REFUSAL, agent, session)
                raise RefusalError(agent, reason.decode(errors="replace"))

    def make_opener(
        self, meeting: Meeting, purpose: Purpose = Purpose.LINK, *, max_bytes: int = 0
    ) -> LinkOpener:
        """Return a place to open channels with other agents of a meeting."""
        return LinkOpener(
            self.listener,
            self.credentials,
            session=meeting.session,
            addresses=meeting.addresses,
            max_bytes=max_bytes,
            purpose=purpose,
        )

    def close(self) -> None:
        """Accept no more connections; a store in this process ends."""
        self.listener.close()
        if self.host is not None:
            self.host.close()
        if isinstance(self.store, RemoteStore):
            self.store.close()

    def check(self) -> None:
        """Raise if a person or another agent ended the start of the run."""
        raise_if_stopped(self.interruption)
        self.raise_refusal()

    def adopt(self, meeting: Meeting) -> None:
        """Take part in a meeting of others, which is over."""
        self._meeting = meeting

    def _meet(self) -> Meeting:
        """Publish a fresh challenge and this agent's address, and read those of the others."""
        self._put(_JOIN, self._introduction, NO_SESSION)
        patience = self.timeout if self.wait is None else self.wait
        joined = self._wait(_JOIN, NO_SESSION, patience)
        # Without the own random number, the entries are of another run.
        if joined[self.agent] != self._introduction:
            raise ForgedEntryError(_JOIN, self.agent)
        self._introductions = joined
        # Agents that were shown different entries have sessions that do not connect.
        parts = [part for agent, own in joined.items() for part in (agent, own)]
        session = hashlib.sha256(encode_fields("corn session", *parts)).digest()
        addresses: dict[int, Address] = {}
        for agent, own in joined.items():
            try:
                _, host, port = build(tuple[str, str, int], parse_json(own), "the address")
            except InvalidArgumentError as error:
                why = f"agent {agent} published an address that cannot be read"
                raise PublicError(why) from error
            if port:
                addresses[agent] = host, port
        return Meeting(session, addresses)

    def _put(self, topic: str, message: bytes, session: bytes, *, is_first: bool = True) -> None:
        """Publish a message under a topic, signed; the first entry stays."""
        key = f"{topic}/{self.agent}"
        signature = self.credentials.identity.sign(signed_text(key, message, session))
        entry = encode_fields(message, signature)
        # Signatures are deterministic: another entry under this agent's key is another process's,
        # or that of another run, whose nonces this one must not read as its own.
        if self.store.set(key, entry) != entry and is_first:
            raise ForgedEntryError(topic, self.agent)

    def _read(self, entry: bytes, topic: str, agent: int, session: bytes) -> bytes:
        """Return the message of an entry that its agent signed for this session."""
        fields = decode_fields(entry) or []
        if len(fields) == 2:
            message, signature = fields
            text = signed_text(f"{topic}/{agent}", message, session)
            if self.credentials.roster.verify(agent, signature, text):
                return message
        raise ForgedEntryError(topic, agent)

    def _wait(self, topic: str, session: bytes, seconds: float) -> dict[int, bytes]:
        """Return the messages of all agents under a topic, once all are there."""
        keys = [f"{topic}/{agent}" for agent in range(self.num_agents)]
        began = time.monotonic()
        named: list[int] = []
        while True:
            found = dict(enumerate(self.store.get(keys, _LONGEST_WAIT)))
            absent = [agent for agent, entry in found.items() if entry is None]
            if not absent:
                return {a: self._read(own or b"", topic, a, session) for a, own in found.items()}
            # ``agree`` reads a refusal that comes after the last entry.
            self.check()
            waited = time.monotonic() - began
            if waited > seconds:
                who = name_agents(absent)
                raise AbsentError(f"no message ({topic}) from {who} within {seconds:g} s")
            # The owner may have to call those of the others.
            if absent != named and waited > _SECONDS_OF_SILENCE:
                log_event(self.agent, "waiting", f"waits for {name_agents(absent)} ({topic})")
                named = absent


def _bind_refusal(introduction: bytes) -> bytes:
    """Return what stands in for the session in the signature of a refusal."""
    return hashlib.sha256(encode_fields("corn refusal", introduction)).digest()


def join_store(
    address: Address,
    credentials: Credentials,
    *,
    timeout: float,
    wait: float | None = None,
    interruption: Interruption | None = None,
) -> RemoteStore:
    """Connect to the store that another process hosts, as soon as it is there."""
    host = credentials.roster.store_host
    dial_host = partial(dial, address, credentials, host, Purpose.STORE, session=NO_SESSION)

    def connect(seconds: float) -> Channel:
        return dial_host(timeout=seconds, check=lambda: raise_if_stopped(interruption))

    return RemoteStore(connect, timeout=timeout, wait=timeout if wait is None else wait)


def join(
    credentials: Credentials,
    *,
    store: Address,
    timeout: float = 60.0,
    wait: float | None = None,
    keys: Path | None = None,
    listen: Address | None = None,
    advertise: Address | None = None,
    opens_store: bool | None = None,
    rejoins: bool = False,
    interruption: Interruption | None = None,
) -> Rendezvous:
    """Join the other agents at the store of a run.

    Args:
        credentials: this agent's keys, as :func:`load_credentials` returns them.
        store: address and port of the store.
        timeout: seconds to wait for other agents once all have started.
        wait: seconds within which all agents must start; by default the time-out.
        keys: the folder of this agent's key, in which its ledger is kept; a run needs it.
        listen: where neighbours connect to this agent; by default the port of its address in the
            roster, or 29500, at the address that leads to the store. The host of the store uses its
            port, and on the loopback address, where all agents share one machine, others take any
            that is free.
        advertise: the address under which they reach it, where that is another, as behind NAT.
        opens_store: whether this process hosts the store; by default the roster's ``store_host``
            does.
        rejoins: whether to join a run of exact sums under way, which lost this agent. That needs no
            store.
        interruption: ends every wait when a person requests it.
    """
    load_compiled()  # may compile for seconds, and no other agent waits for this one yet
    agent = credentials.agent
    # A ledger beside another key would not count the releases under this one.
    if keys is not None:
        own = load_identity(keys / f"agent-{agent}.key").public_key
        is_own = own == credentials.identity.public_key
        require(is_own, "keys", "the folder of the key in use", f"another key in {keys}")
    is_host = agent == credentials.roster.store_host if opens_store is None else opens_store
    # A failure on the way leaves no port open.
    with naming_agent(agent, credentials.roster.names), ExitStack() as stack:
        entries: MemoryStore | RemoteStore
        host: StoreHost | None = None
        if rejoins:
            entries = MemoryStore()
        elif is_host:
            host = StoreHost(store, credentials)
            stack.callback(host.close)
            entries = host.entries
        else:
            entries = join_store(
                store, credentials, timeout=timeout, wait=wait, interruption=interruption
            )
            stack.callback(entries.close)
        site = credentials.roster.sites[agent]
        # What the roster says is what the others were told.
        stated = None if site.address is None else parse_address(site.address)
        if not site.accepts:
            listener = Listener(None, credentials)
            bound = reached = ("", 0)
        else:
            place = listen or _choose_place(store, stated, is_host=host is not None)
            # One open port serves both the store and the links of its host. Others are open before
            # the address is published, or a neighbour could dial a port that nobody listens at yet.
            is_shared = host is not None and place == store
            listener = host.listener if host and is_shared else Listener(place, credentials)
            bound = (place[0], listener.port)
            # A listener on all addresses is reached at the one that leads to the store.
            is_any = place[0] in ("", "0.0.0.0", "::")  # noqa: S104
            reached = (_find_route(*store), listener.port) if is_any else bound
        stack.pop_all()
    return Rendezvous(
        entries,
        credentials,
        listener=listener,
        address=advertise or stated or reached,
        bound=bound,
        timeout=timeout,
        wait=wait,
        keys=keys,
        host=host,
        rejoins=rejoins,
        interruption=interruption,
    )


def _choose_place(store: Address, stated: Address | None, *, is_host: bool) -> Address:
    """Return where an agent listens that was not told."""
    if is_host and stated in (None, store):
        return store
    route = _find_route(*store)
    # Behind NAT this machine has another address than the one that others were told.
    if stated is not None:
        return route, stated[1]
    # Firewalls are opened for a known port. On one machine all agents need different ones.
    return route, 0 if ipaddress.ip_address(route).is_loopback else DEFAULT_PORT


def _find_route(host: str, port: int) -> str:
    """Return this host's address on the route to another, which neighbours can reach."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing
            return str(probe.getsockname()[0])
    except (OSError, OverflowError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        where = format_address((host, port))
        raise CornError(f"{where}: no route to this address: {why}") from error


@dataclass(frozen=True)
class Hello:
    """The terms that an agent publishes; plan's fingerprint and nonce are in hexadecimal.

    ``terms`` must be the same at all agents, and ``nonce`` is a contribution to that of the run.
    The ledger allows ``remaining`` releases, and never reserved ``first_free_step``, for a return.
    """

    plan: str
    terms: Mapping[str, str]
    nonce: str
    remaining: int
    checkpoints: tuple[int, ...] = (0,)
    first_free_step: int = 0

    def __post_init__(self) -> None:
        # Hellos of other agents come from the store, and may hold anything.
        check_fingerprint(parse_hex(self.plan, "plan"))
        check_nonce(parse_hex(self.nonce, "nonce"))
        if min(self.remaining, self.first_free_step, *self.checkpoints, 0) < 0:
            raise InvalidArgumentError("numbers of releases and steps must not be negative")
        if 0 not in self.checkpoints:
            raise InvalidArgumentError("checkpoints must include step 0, where all can begin")


@dataclass(frozen=True)
class Agreement:
    """The outcome of the handshake: all ledgers allow ``max_steps`` from ``first_step`` on.

    ``nonce`` is a hash of all contributions: equal nonces mean that all agents read the same ones.
    """

    nonce: bytes
    first_step: int
    max_steps: int


def check_guarantee(plan: Plan, agent: int) -> AgentGuarantee:
    """Return what a plan guarantees to an agent, whatever the plan itself claims."""
    verification = verify_plan(plan)
    if not verification.passed:
        problems = make_printable("; ".join(verification.problems), limit=_MAX_REASON)
        raise InfeasibleError(f"refuses to start, the plan does not keep its promise: {problems}")
    return verification.guarantees[agent]


@contextmanager
def announcing_failure(rendezvous: Rendezvous) -> Iterator[None]:
    """Name the agent in a failure inside, and publish that it refuses, so that nobody waits for it.

    An agent that cannot return to a run must not stop the others at their start.
    """
    with naming_agent(rendezvous.agent, rendezvous.credentials.roster.names):
        try:
            yield
        except (Exception, KeyboardInterrupt) as error:
            if not rendezvous.rejoins:
                _announce(rendezvous, error)
            raise


def _announce(rendezvous: Rendezvous, error: BaseException) -> None:
    try:
        # An agent that is missed may have refused: then that is the reason.
        if isinstance(error, AbsentError | LinkError) or isinstance(error.__cause__, LinkError):
            rendezvous.raise_refusal()
        # Whoever follows another's refusal has no reason of its own.
        if not isinstance(error, RefusalError):
            rendezvous.refuse(str(error) if is_public(error) else name_kind(error))
    except RefusalError as refusal:
        raise refusal from error
    except CornError:  # the store may be gone, which is not the reason
        pass
    finally:
        # A store in this process ends with it: the others must have read the refusal before.
        if rendezvous.host is not None:
            time.sleep(min(rendezvous.timeout, _SECONDS_TO_LEAVE))


def is_public(error: BaseException) -> bool:
    """Return whether other agents may read an error: it is about the run, the plan or the budget.

    Any other error may quote data, or the name of a file, and no ε covers that.
    """
    # By type, never by text: a new kind of error is private until it is listed here. A ledger's own
    # ``BudgetSpentError`` names its file, and is not.
    return isinstance(error, PublicError | InfeasibleError | StoppedByUserError)


def name_kind(error: BaseException) -> str:
    """Return what others may know of an error that is not public."""
    return f"{type(error).__name__}; only its owner sees the details"


def shake_hands(rendezvous: Rendezvous, hello: Hello) -> Agreement:
    """Compare terms with all agents; all raise the same ``HandshakeError`` if any differs."""
    texts = rendezvous.exchange("hello", json.dumps(asdict(hello)).encode())
    hellos: dict[int, Hello] = {}
    for sender, text in texts.items():
        try:
            hellos[sender] = build(Hello, parse_json(text), "it")
        except InvalidArgumentError as error:
            why = f"damaged, or of another version of CorN: {error}"
            raise HandshakeError(f"agent {sender}'s message (hello) is {why}") from error
    compare_hellos(hellos)
    # The run's nonce is a hash of all contributions: one new nonce makes all noise new, even if
    # every other agent repeats its own.
    nonces = {agent: bytes.fromhex(own.nonce) for agent, own in hellos.items()}
    # The number breaks ties, so that all agents name the same one.
    scarce = min(hellos, key=lambda agent: (hellos[agent].remaining, agent))
    if hellos[scarce].remaining == 0:
        raise PublicError(f"agent {scarce}'s ledger allows no more releases: its budget is spent")
    return Agreement(
        nonce=agree_on_nonce(nonces, plan_fingerprint=bytes.fromhex(hello.plan)),
        first_step=_choose_start(hellos),
        max_steps=hellos[scarce].remaining,
    )


def compare_hellos(hellos: Mapping[int, Hello]) -> None:
    """Raise ``HandshakeError`` for the first topic on which agents differ."""
    # All agents compare in the same order, and so raise the same error.
    compare("the plan's fingerprint", {who: own.plan[:16] for who, own in hellos.items()})
    for name in dict.fromkeys(name for who in sorted(hellos) for name in hellos[who].terms):
        values = {who: own.terms.get(name, "") for who, own in hellos.items()}
        compare(make_printable(name, limit=100), values)


def _choose_start(hellos: Mapping[int, Hello]) -> int:
    """Return the newest step of which all have a checkpoint; never restart a run unasked."""
    common = set.intersection(*(set(own.checkpoints) for own in hellos.values()))
    # Step 0 is always common. To begin there again would discard models for which budget was spent.
    newest = {who: max(own.checkpoints) for who, own in hellos.items()}
    if max(common) == 0 and any(newest.values()):
        least = min(newest.values())
        behind = [who for who, step in newest.items() if step == least]
        raise HandshakeError(
            f"no step but the first has a checkpoint of every agent: {name_agents(behind)} came to "
            f"step {least} only; begin anew in another folder, without --resume"
        )
    return max(common)
