"""Handshake before the first step: every agent publishes its terms, and all must agree.

All agents read the same messages, so all come to the same conclusion: a mismatch stops every agent,
with the numbers of those that differ. Nothing secret is published.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass

from corn.distributed.membership import name_agents
from corn.distributed.rendezvous import (
    AbsentError,
    HandshakeError,
    RefusalError,
    Rendezvous,
    compare,
    naming_agent,
)
from corn.errors import (
    CornError,
    InfeasibleError,
    InvalidArgumentError,
    PublicError,
    make_printable,
)
from corn.noise import BudgetSpentError, agree_on_nonce
from corn.noise.stream import check_fingerprint, check_nonce
from corn.parsing import build, parse_hex, parse_json
from corn.plan import AgentGuarantee, Plan, verify_plan
from corn.transport import LinkError

# Agents that wait for the same missing one time out at nearly the same moment.
_SECONDS_FOR_TROUBLE = 3.0
# Texts of other agents are cut, so that one of them cannot fill the log or the console.
_MAX_QUOTED, _MAX_REASON = 100, 300


class NoReleasesLeftError(PublicError, BudgetSpentError):
    """A run that cannot start, because the ledger of an agent allows no more releases."""


@dataclass(frozen=True)
class Hello:
    """The terms that an agent publishes.

    Attributes:
        plan: the plan's fingerprint, in hexadecimal.
        terms: everything else that must be the same at all agents, by name.
        nonce: this agent's contribution to the nonce of the run, in hexadecimal.
        remaining: how many releases its ledger still allows.
        checkpoints: steps from which it can continue; 0 is always one.
        reserved: releases that its ledger counts though a run that crashed may not have made them.
        first_free_step: the first step that its ledger has never reserved, if it returns to a run.
    """

    plan: str
    terms: Mapping[str, str]
    nonce: str
    remaining: int
    checkpoints: tuple[int, ...] = (0,)
    reserved: int = 0
    first_free_step: int = 0

    def __post_init__(self) -> None:
        # Hellos of other agents come from the store, and may hold anything.
        check_fingerprint(parse_hex(self.plan, "plan"))
        check_nonce(parse_hex(self.nonce, "nonce"))
        if min(self.remaining, self.reserved, self.first_free_step, *self.checkpoints, 0) < 0:
            raise InvalidArgumentError("numbers of releases and steps must not be negative")
        if 0 not in self.checkpoints:
            raise InvalidArgumentError("checkpoints must include step 0, where all can begin")


@dataclass(frozen=True)
class Agreement:
    """The outcome of the handshake.

    Attributes:
        nonce: of the run; a hash of all contributions, so equal nonces mean that all agents read
            the same ones.
        first_step: where the run starts.
        max_steps: the number of steps that all ledgers allow.
        scarce: the agent whose ledger allows the fewest steps; None if that is not known.
        reserved: releases that this ledger counts for a run that crashed.
    """

    nonce: bytes
    first_step: int
    max_steps: int
    scarce: int | None
    reserved: int = 0


def check_guarantee(plan: Plan, agent: int) -> AgentGuarantee:
    """Verify a plan from scratch and return what it guarantees to an agent."""
    # The plan's own claims count for nothing here: whoever made it need not be trusted.
    verification = verify_plan(plan)
    if not verification.passed:
        problems = make_printable("; ".join(verification.problems), limit=_MAX_REASON)
        raise InfeasibleError(f"refuses to start, the plan does not keep its promise: {problems}")
    return verification.guarantees[agent]


@contextmanager
def announcing_failure(rendezvous: Rendezvous) -> Iterator[None]:
    """If this agent cannot start, publish a refusal, so that the others do not wait for it."""
    try:
        yield
    except CornError as error:
        # An agent that is missed may have refused: then that is the reason.
        if isinstance(error, AbsentError | LinkError) or isinstance(error.__cause__, LinkError):
            try:
                # Callers name the agent in failures inside; this one is new.
                with naming_agent(rendezvous.agent):
                    rendezvous.raise_refusal()
            except RefusalError as refusal:
                rendezvous.leave()
                raise refusal from error
            except CornError:
                pass
        # Whoever follows another's refusal has no reason of its own.
        if isinstance(error, RefusalError):
            rendezvous.leave()
        else:
            _refuse(rendezvous, str(error) if is_public(error) else name_kind(error))
        raise
    # An unexpected error may quote data, so others get its type alone.
    except (Exception, KeyboardInterrupt) as error:
        _refuse(rendezvous, name_kind(error))
        raise


def is_public(error: Exception) -> bool:
    """Return whether other agents may read an error: it is about the run, the plan or the budget.

    This is an allow list. Any other error may quote data, or the name of a file that describes its
    owner, and no ε covers that.
    """
    # By type, never by text: a new kind of error is private until it is listed here. A ledger's own
    # ``BudgetSpentError`` names its file, and is not.
    return isinstance(error, PublicError | InfeasibleError)


def name_kind(error: BaseException) -> str:
    """Return what others may know of an error that is not public."""
    # A few errors have a word for others beside the message for the owner.
    word = getattr(error, "public_reason", type(error).__name__)
    return f"{word}; only its owner sees the details"


def _refuse(rendezvous: Rendezvous, reason: str) -> None:
    with suppress(CornError):  # the store may be gone, which is not the reason
        rendezvous.refuse(reason)
        rendezvous.leave()


@contextmanager
def naming_absent_agents(rendezvous: Rendezvous, topic: str) -> Iterator[None]:
    """If links cannot be opened, name the agents that publish nothing under a topic.

    An agent that is missed may itself have waited for another one.
    """
    try:
        yield
    except (LinkError, AbsentError) as error:
        absent: list[int] = []
        # Agents that wait in vain publish this too: those that publish neither are the cause.
        with suppress(CornError):
            rendezvous.publish("trouble", b"")
            absent = rendezvous.find_absent(topic, "trouble", seconds=_SECONDS_FOR_TROUBLE)
        if absent:
            raise AbsentError(topic, absent, rendezvous.timeout) from error
        raise


def shake_hands(rendezvous: Rendezvous, hello: Hello) -> Agreement:
    """Compare terms with all agents; all raise the same error if any differs.

    Raises:
        HandshakeError: agents differ.
        NoReleasesLeftError: some ledger allows no release.
    """
    texts = rendezvous.exchange("hello", json.dumps(asdict(hello)).encode())
    hellos = {sender: _parse_hello(text, sender) for sender, text in texts.items()}
    compare_hellos(hellos)
    # The run's nonce is a hash of all contributions: one new nonce makes all noise new, even if
    # every other agent repeats its own.
    nonces = {agent: bytes.fromhex(own.nonce) for agent, own in hellos.items()}
    # The number breaks ties, so that all agents name the same one: they compare the agreement bit
    # by bit.
    scarce = min(hellos, key=lambda agent: (hellos[agent].remaining, agent))
    agreement = Agreement(
        nonce=agree_on_nonce(nonces, plan_fingerprint=bytes.fromhex(hello.plan)),
        first_step=_choose_start(hellos),
        max_steps=hellos[scarce].remaining,
        scarce=scarce,
        reserved=hellos[scarce].reserved,
    )
    if agreement.max_steps == 0:
        crashed = f", {agreement.reserved} of it reserved by a run that crashed"
        raise NoReleasesLeftError(
            f"agent {agreement.scarce}'s ledger allows no more releases under this plan: its "
            f"budget is spent{crashed if agreement.reserved else ''}"
        )
    return agreement


def compare_hellos(hellos: Mapping[int, Hello]) -> None:
    """Raise ``HandshakeError`` for the first topic on which agents differ."""
    # All agents compare in the same order, and so raise the same error.
    compare("the plan's fingerprint", {who: own.plan[:16] for who, own in hellos.items()})
    for name in dict.fromkeys(name for who in sorted(hellos) for name in hellos[who].terms):
        values = {who: own.terms.get(name, "") for who, own in hellos.items()}
        compare(make_printable(name, limit=_MAX_QUOTED), values)


def _choose_start(hellos: Mapping[int, Hello]) -> int:
    """Return the newest step of which all have a checkpoint; never restart a run unasked."""
    common = set.intersection(*(set(own.checkpoints) for own in hellos.values()))
    newest = {who: max(own.checkpoints) for who, own in hellos.items()}
    # Step 0 is always common. To begin there again would discard models for which budget was spent.
    if max(common) == 0 and any(newest.values()):
        least, most = min(newest.values()), max(newest.values())
        behind = tuple(who for who, step in newest.items() if step == least)
        raise HandshakeError(
            f"no step but the first has a checkpoint of every agent: {name_agents(behind)} came to "
            f"step {least}, others to step {most}; a run without --resume begins anew in another "
            "folder, with the releases that ledgers still allow",
            topic="checkpoints",
            agents=behind,
        )
    return max(common)


def _parse_hello(text: bytes, sender: int) -> Hello:
    try:
        return build(Hello, parse_json(text), "it")  # type: ignore[no-any-return]
    except InvalidArgumentError as error:
        raise HandshakeError(
            f"agent {sender}'s message (hello) is damaged, or of another version of CorN: {error}",
            topic="hello",
            agents=(sender,),
        ) from error
