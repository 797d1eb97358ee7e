"""Before the first byte of training: everyone says what it is about to do, and all must agree.

All agents read the same words, so all come to the same verdict: a mismatch stops everybody, with
the names of those who differ. Nothing secret is said.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import TypeVar

from corn.distributed.links import LinkError
from corn.distributed.meeting import AbsentError, Meeting, RefusalError
from corn.distributed.membership import name_agents
from corn.errors import (
    CornError,
    InfeasibleError,
    InvalidArgumentError,
    PublicError,
    make_printable,
)
from corn.noise import BudgetSpentError, agree_on_nonce
from corn.noise.address import check_fingerprint, check_nonce
from corn.parsing import build, parse_hex, parse_json
from corn.plan import AgentGuarantee, Plan, verify_plan

_SECONDS_FOR_LAST_WORDS = 3.0
_MAX_QUOTED, _MAX_REASON = 60, 300


class HandshakeError(PublicError):
    """Agents do not agree on what to run."""


@dataclass(frozen=True)
class Hello:
    """What an agent says of itself.

    Attributes:
        plan: the plan's fingerprint, in hexadecimal.
        model: what is trained: names, shapes and type of its parameters, in a hash.
        start: the initial parameters, in a hash.
        roster: the public keys, in a hash.
        settings: the rest that must be the same, by name.
        nonce: what this agent brings to the nonce of the run, in hexadecimal.
        remaining: how many releases its ledger still allows.
        checkpoints: steps it can go on from; 0 is always one.
        reserved: releases that its ledger counts though a run that crashed may not have made them.
    """

    plan: str
    model: str
    start: str
    roster: str
    settings: Mapping[str, str]
    nonce: str
    remaining: int
    checkpoints: tuple[int, ...] = (0,)
    reserved: int = 0

    def __post_init__(self) -> None:
        check_fingerprint(parse_hex(self.plan, "plan"))
        check_nonce(parse_hex(self.nonce, "nonce"))
        if min(self.remaining, self.reserved, *self.checkpoints, 0) < 0:
            raise InvalidArgumentError("remaining, reserved and checkpoints must not be negative")
        if 0 not in self.checkpoints:
            raise InvalidArgumentError("checkpoints must include step 0, where all can begin")


@dataclass(frozen=True)
class Verdict:
    """What an agent found: a hash of the agreement, equal for all who heard the same."""

    agreed: str


Word = TypeVar("Word", Hello, Verdict)


@dataclass(frozen=True)
class Agreement:
    """What all agents found out: the run's nonce, where it starts, and for how many steps at most.

    ``scarce`` is the agent whose ledger allows the fewest steps, and ``reserved`` what that ledger
    counts for a run that crashed.
    """

    nonce: bytes
    first_step: int
    max_steps: int
    scarce: int
    reserved: int = 0


def check_guarantee(plan: Plan, agent: int) -> AgentGuarantee:
    """What this agent is promised; a plan that does not keep what it promises is refused."""
    verification = verify_plan(plan)
    if verification.passed:
        return verification.guarantees[agent]
    own = [text for text in verification.problems if text.startswith(f"agent {agent} ")]
    raise InfeasibleError(
        f"agent {agent}: refuses to start, the plan does not keep its promise: "
        f"{[*own, *verification.problems][0]}"
    )


@contextmanager
def refusing_aloud(meeting: Meeting) -> Iterator[None]:
    """If this agent cannot start, tell the others why, so that they do not wait for it.

    Whom it misses may have refused itself: then that is the reason.
    """
    try:
        yield
    except CornError as error:
        if isinstance(error, AbsentError | LinkError) or isinstance(error.__cause__, LinkError):
            _explain_by_refusal(meeting, error)
        _refuse(meeting, str(error) if is_public(error) else _tell_only_kind(error))
        raise
    except (Exception, KeyboardInterrupt) as error:
        _refuse(meeting, _tell_only_kind(error))
        raise


def is_public(error: Exception) -> bool:
    """Say whether others may read an error: it is about the run, the plan or the budget.

    All other errors may quote data, or the name of a file, which tells of its owner.
    """
    return isinstance(error, PublicError | InfeasibleError | BudgetSpentError)


def _tell_only_kind(error: BaseException) -> str:
    return f"{type(error).__name__}; only its owner sees the details"


def _refuse(meeting: Meeting, why: str) -> None:
    with suppress(CornError):  # the store may be gone, which is not the reason
        meeting.refuse(why)
        meeting.part()


def _explain_by_refusal(meeting: Meeting, error: CornError) -> None:
    try:
        meeting.heed_refusal()
    except RefusalError as refusal:
        meeting.part()
        raise refusal from error
    except CornError:
        return


@contextmanager
def naming_the_silent(meeting: Meeting, topic: str) -> Iterator[None]:
    """If a link does not come up, blame those who say nothing at all under a topic.

    The neighbour at the other end may itself have waited for somebody.
    """
    try:
        yield
    except LinkError as error:
        silent = []
        with suppress(CornError):
            meeting.say("trouble", b"")
            silent = meeting.find_silent(topic, "trouble", seconds=_SECONDS_FOR_LAST_WORDS)
        if silent:
            raise PublicError(
                f"agent {meeting.agent}: does not start, because no more was heard from "
                f"{name_agents(silent)} within {meeting.timeout:g} s"
            ) from error
        raise


def shake_hands(meeting: Meeting, hello: Hello) -> Agreement:
    """Compare with everybody; raise the same ``HandshakeError`` everywhere if anyone differs."""
    hellos = _tell_and_hear(meeting, "hello", hello)
    compare_hellos(hellos, meeting.agent)
    nonces = {agent: bytes.fromhex(own.nonce) for agent, own in hellos.items()}
    first_step = _choose_start(hellos, meeting.agent)
    scarce = min(hellos, key=lambda agent: (hellos[agent].remaining, agent))
    return Agreement(
        agree_on_nonce(nonces, plan_fingerprint=bytes.fromhex(hello.plan)),
        first_step,
        hellos[scarce].remaining,
        scarce,
        hellos[scarce].reserved,
    )


def confirm(meeting: Meeting, agreement: Agreement, topic: str = "ready") -> None:
    """Go on together: nobody does before everybody is there and came to the same verdict."""
    digest = hashlib.sha256(repr(agreement).encode()).hexdigest()
    words = _tell_and_hear(meeting, topic, Verdict(digest))
    meeting.heed_refusal()  # by one that said this word before
    verdicts = {agent: word.agreed for agent, word in words.items()}
    _compare("what was agreed on", verdicts, meeting.agent)


def compare_hellos(hellos: Mapping[int, Hello], agent: int) -> None:
    """Name the first thing on which agents differ, and who does."""
    parts: tuple[tuple[str, Callable[[Hello], str]], ...] = (
        ("the plan's fingerprint", lambda own: own.plan[:16]),
        ("the model", lambda own: own.model),
        ("the initial parameters", lambda own: own.start),
        ("the roster of public keys", lambda own: own.roster),
    )
    for what, read in parts:
        _compare(what, {who: read(own) for who, own in hellos.items()}, agent)
    for name in sorted({name for own in hellos.values() for name in own.settings}):
        values = {who: own.settings.get(name, "") for who, own in hellos.items()}
        _compare(make_printable(name, limit=_MAX_QUOTED), values, agent)


def _tell_and_hear(meeting: Meeting, topic: str, word: Word) -> dict[int, Word]:
    """Everybody's words, this agent's own as it said it.

    Whoever runs the store could answer with the words of an earlier run. Each agent's new nonce
    makes the noise new, so an agent must insist that its own was heard.
    """
    said = json.dumps(asdict(word)).encode()
    meeting.say(topic, said)
    heard = meeting.hear_all(topic)
    if heard[meeting.agent] != said:
        raise HandshakeError(
            f"agent {meeting.agent}: the store has another word ({topic}) of agent "
            f"{meeting.agent} than this agent said: a second process runs under its number, or "
            "the store cannot be trusted; start all agents anew with a new store"
        )
    return {
        sender: _read(type(word), text, f"agent {meeting.agent}: agent {sender}'s word ({topic})")
        for sender, text in heard.items()
    }


def _choose_start(hellos: Mapping[int, Hello], agent: int) -> int:
    """The newest step of which all have a checkpoint; never back to the start unasked."""
    common = set.intersection(*(set(own.checkpoints) for own in hellos.values()))
    newest = {who: max(own.checkpoints) for who, own in hellos.items()}
    if max(common) == 0 and any(newest.values()):
        behind = [who for who, step in newest.items() if step == min(newest.values())]
        raise HandshakeError(
            f"agent {agent}: no step but the first has a checkpoint of every agent: "
            f"{name_agents(behind)} came to step {min(newest.values())}, others to step "
            f"{max(newest.values())}; a run without --resume begins anew in another folder, with "
            "what ledgers still allow"
        )
    return max(common)


def _compare(what: str, values: Mapping[int, str], agent: int) -> None:
    """The most common value counts, agent 0's if several are; the others are named."""
    counts = Counter(values[who] for who in sorted(values))
    usual, _ = counts.most_common(1)[0]
    others = [who for who in sorted(values) if values[who] != usual]
    if others:
        shown = others[:5]
        limit = _MAX_REASON // (1 + len(shown))
        short = {who: make_printable(values[who], limit=limit) for who in shown}
        found = "; ".join(f"agent {who} has {value}" for who, value in short.items())
        rest = make_printable(usual, limit=limit)
        raise HandshakeError(f"agent {agent}: agents differ in {what}: {found}; the rest {rest}")


def _read(record: type[Word], text: bytes, name: str) -> Word:
    try:
        word: Word = build(record, parse_json(text), "it")
    except InvalidArgumentError as error:
        raise HandshakeError(
            f"{name} is damaged, or of another version of CorN: {error}"
        ) from error
    return word
