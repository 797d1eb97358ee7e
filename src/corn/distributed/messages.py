"""Messages between neighbours: d numbers, and a header with what the sender knows of others.

News in a header is signed by the agent that it speaks of, so a neighbour can pass it on or withhold
it, and cannot invent it. A message that breaks a rule costs its sender the link, and nothing else.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, final

import torch
from torch import Tensor

from corn.noise.stream import encode_fields
from corn.transport import Credentials, Dropout, LinkError

NEVER = 2**32 - 1
"""The step at which no loss was noticed, and after which no run stops."""
PREFIX_BYTES = 8
DIGEST_BYTES = 32
PIECE_BYTES = 1 << 18
"""The most bytes of a sum that one message has; the rest follows in pieces of this size."""
LARGEST_NUMBER = 1e9
"""The largest size of a number in a model; a model with a larger one has diverged."""
MAX_ENTRIES = 4
"""The most breaks of one link, and the most returns of one agent, that news contains."""

_MAGIC = b"corn/msg"
_FIXED = struct.Struct("<8s8s8s32s64sIIIIIQIIIIIII")
_PIECE = struct.Struct("<8sI52x")
_PIECE_MAGIC = b"corn/prt"
_SIGNATURE_BYTES = 64
# Fields, and the number of the agent that signed with its signature; an agent signs its own return.
_CUT, _RETURN = struct.Struct("<IIII64s"), struct.Struct("<II64s")
_STOP = struct.Struct("<I64s")
# A cache line, so that the parameters behind a header are aligned for vector code.
_ALIGNMENT = 64

Edge = tuple[int, int]
"""Two neighbours, the lower number first."""


class StopReason(StrEnum):
    """The reason for an end before the last step. Headers carry the position in this list."""

    NONE = "none"
    INTERRUPTED = "interrupted"
    LOSS = "loss"
    DIVERGED = "diverged"
    BUDGET_SPENT = "budget spent"
    MODELS_DIFFER = "models differ"
    VOID_SUMS = "void sums"


# The order is part of the protocol: headers carry positions.
_REASONS = tuple(StopReason)


@dataclass(frozen=True, order=True)
class StopNotice:
    """Announcement that all stop after ``step`` steps, because of ``agent``; the least counts.

    ``by`` is the agent that announces and signs it: the same one, or a neighbour that lost it.
    """

    step: int = NEVER
    agent: int = 0
    reason: StopReason = StopReason.NONE
    by: int = 0


NO_STOP = StopNotice()


class ProtocolError(LinkError):
    """A message that breaks the rules: the link to its sender is given up."""

    def __init__(self, message: str) -> None:
        super().__init__(message, Dropout.MISBEHAVED)


Statement = tuple[str | int, ...]
"""One piece of news, as it is signed: its kind and its numbers."""


class Proof(NamedTuple):
    """The agent that signed a statement, and its signature."""

    author: int
    signature: bytes


_NO_PROOF = Proof(0, bytes(_SIGNATURE_BYTES))


@final
class NewsKeys:
    """Signatures of news in one run.

    Args:
        credentials: of this agent.
        session: of the run: news of another run has no valid signature in this one.
    """

    def __init__(self, credentials: Credentials, session: bytes) -> None:
        self._credentials, self._session = credentials, session

    def sign(self, statement: Statement) -> Proof:
        """Return this agent's signature of a statement."""
        signature = self._credentials.identity.sign(self._encode(statement))
        return Proof(self._credentials.agent, signature)

    def verify(self, statement: Statement, proof: Proof) -> bool:
        """Return whether the author of a proof signed a statement."""
        text = self._encode(statement)
        return self._credentials.roster.verify(proof.author, proof.signature, text)

    def _encode(self, statement: Statement) -> bytes:
        return encode_fields("corn news", self._session, *statement)


def state_cut(edge: Edge, step: int) -> Statement:
    """Return the statement that a link broke."""
    return ("cut", *edge, step)


def state_return(agent: int, step: int) -> Statement:
    """Return the statement that an agent takes part again from a step on."""
    return ("return", agent, step)


def state_model(step: int, model: bytes) -> Statement:
    """Return the statement that the root of a tree had a model before a step."""
    return ("model", step, model.hex())


def state_stop(notice: StopNotice) -> Statement:
    """Return the statement that all stop."""
    return ("stop", notice.step, notice.agent, notice.reason.value, notice.by)


@dataclass(frozen=True)
class News:
    """Knowledge of an agent about others, which travels with every message.

    Attributes:
        cuts: the links that broke, each with a step at which this was noticed.
        returns: the agents that came back, each with the step from which it takes part again.
        stop: the earliest stop.
        calls: with exact sums, the agents that ask to come back, each with the step before which
            all wait for it. Whether it came, its own return tells.
        proofs: by whom each statement is signed.
    """

    cuts: frozenset[tuple[Edge, int]] = frozenset()
    returns: frozenset[tuple[int, int]] = frozenset()
    stop: StopNotice = NO_STOP
    calls: frozenset[tuple[int, int]] = frozenset()
    proofs: Mapping[Statement, Proof] = field(default_factory=dict, compare=False, repr=False)

    def find_proof(self, statement: Statement) -> Proof:
        """Return the signature of a statement; zeros, which nobody signed, without one."""
        return self.proofs.get(statement, _NO_PROOF)


@dataclass(frozen=True)
class Header:
    """The description of a message, and what its sender knows of losses.

    Attributes:
        plan: the first 8 bytes of the fingerprint of the plan in force.
        next_plan: those of the plan that replaces it at the next step; zeros if none does.
        sender: the agent.
        step: from 0.
        mixing_round: of the step, from 0.
        degree: number of neighbours to which the sender is still linked.
        payload_bytes: the size of the parameters.
        news: of losses, returns and a stop.
        model: a digest of the sender's model before the step; zeros where models differ anyway.
        signature: of this digest by the root, on the way down at some steps; zeros otherwise.
        attempt: the number of a recovery, whose rounds the mixing rounds are; zero outside of any.
        has_released: in a recovery, whether any agent has released ``step``.
    """

    plan: bytes
    next_plan: bytes
    sender: int
    step: int
    mixing_round: int
    degree: int
    payload_bytes: int
    news: News = field(default_factory=News)
    model: bytes = bytes(DIGEST_BYTES)
    signature: bytes = bytes(_SIGNATURE_BYTES)
    attempt: int = 0
    has_released: bool = False

    def encode(self) -> bytes:
        """Return the header as bytes, a multiple of 64 of them to align the parameters."""
        news = self.news
        fixed = _FIXED.pack(
            _MAGIC,
            self.plan,
            self.next_plan,
            self.model,
            self.signature,
            self.sender,
            self.step,
            self.mixing_round,
            self.attempt,
            self.degree,
            self.payload_bytes,
            _REASONS.index(news.stop.reason),  # by position: a name has no fixed size
            news.stop.agent,
            news.stop.step,
            len(news.cuts),
            len(news.returns),
            len(news.calls),
            self.has_released,
        )
        cuts = [
            _CUT.pack(*edge, step, *news.find_proof(state_cut(edge, step)))
            for edge, step in sorted(news.cuts)
        ]
        returns = [
            _RETURN.pack(*one, news.find_proof(state_return(*one)).signature)
            for kind in (news.returns, news.calls)
            for one in sorted(kind)
        ]
        stop = []
        if news.stop.reason is not StopReason.NONE:
            stop = [_STOP.pack(news.stop.by, news.find_proof(state_stop(news.stop)).signature)]
        body = b"".join([fixed, *cuts, *returns, *stop])
        return body.ljust(_header_bytes(len(cuts), len(returns), len(stop)), b"\0")

    @property
    def place(self) -> tuple[int, int]:
        """Step and mixing round."""
        return self.step, self.mixing_round


def _header_bytes(num_cuts: int, num_returns: int, num_stops: int) -> int:
    size = _FIXED.size + _CUT.size * num_cuts + _RETURN.size * num_returns + _STOP.size * num_stops
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def message_limit(num_agents: int, num_links: int, payload_bytes: int) -> int:
    """Return the most bytes that a message may have, whatever its sender knows of losses."""
    # A return, and the call for it.
    return _header_bytes(MAX_ENTRIES * num_links, 2 * MAX_ENTRIES * num_agents, 1) + payload_bytes


def decode_message(
    data: memoryview, *, num_agents: int, sender: int, dtype: torch.dtype
) -> tuple[Header, Tensor]:
    """Read a message that came from ``sender``; raise ``ProtocolError`` for anything else.

    Of a sum in pieces, it is the first. Signatures are not checked: see :meth:`Membership.check`.
    """
    if len(data) < _FIXED.size or data[: len(_MAGIC)] != _MAGIC:
        raise ProtocolError(f"agent {sender} sent bytes that are not a message of CorN")
    _, plan, next_plan, model, model_signature, found, *rest = _FIXED.unpack_from(data)
    step, mixing_round, attempt, degree, size, why, who, stop, *rest = rest
    num_cuts, num_returns, num_calls, has_released = rest
    num_stops = int(why > 0)
    begin = _header_bytes(num_cuts, num_returns + num_calls, num_stops)
    if found != sender:
        raise ProtocolError(f"agent {sender}'s link carries a message of agent {found}")
    # Every field comes from another machine: positions must be in range before they are used.
    is_whole = len(data) - begin in (size, min(size, PIECE_BYTES))
    if why >= len(_REASONS) or who >= num_agents or not is_whole:
        raise ProtocolError(f"agent {sender} sent a message that was cut short or is damaged")
    end_of_cuts = _FIXED.size + _CUT.size * num_cuts
    end_of_returns = end_of_cuts + _RETURN.size * num_returns
    end_of_calls = end_of_returns + _RETURN.size * num_calls
    proofs: dict[Statement, Proof] = {}
    cuts, notice = set(), NO_STOP
    for i, j, when, author, signature in _CUT.iter_unpack(data[_FIXED.size : end_of_cuts]):
        cuts.add(((i, j), when))
        proofs[state_cut((i, j), when)] = Proof(author, signature)
    returns = _decode_returns(data[end_of_cuts:end_of_returns], proofs)
    calls = _decode_returns(data[end_of_returns:end_of_calls], proofs)
    if num_stops:
        by, signature = _STOP.unpack_from(data, end_of_calls)
        notice = StopNotice(stop, who, _REASONS[why], by)
        proofs[state_stop(notice)] = Proof(by, signature)
    # Order too: an edge named the other way round would be another one in every set.
    is_known = all(i < j < num_agents for (i, j), _ in cuts) and notice.by < num_agents
    if not is_known or not all(agent < num_agents for agent, _ in returns | calls):
        raise ProtocolError(f"agent {sender} sent a message that names unknown agents")
    news = News(frozenset(cuts), returns, notice, calls, proofs)
    header = Header(
        plan=plan,
        next_plan=next_plan,
        sender=found,
        step=step,
        mixing_round=mixing_round,
        degree=degree,
        payload_bytes=size,
        news=news,
        model=model,
        signature=model_signature,
        attempt=attempt,
        has_released=bool(has_released),
    )
    # frombuffer would raise for either. check_header refuses the wrong size, and names its sender.
    if size == 0 or size % dtype.itemsize:
        return header, torch.empty(0, dtype=dtype)
    return header, torch.frombuffer(data[begin:], dtype=dtype)


def encode_piece(number: int) -> bytes:
    """Return what comes before the numbers of a piece of a sum, other than the first."""
    return _PIECE.pack(_PIECE_MAGIC, number)


def is_piece(data: memoryview) -> bool:
    """Return whether bytes are a piece of a sum, other than the first."""
    return len(data) >= _PIECE.size and data[: len(_PIECE_MAGIC)] == _PIECE_MAGIC


def decode_piece(data: memoryview, number: int, like: Tensor, *, sender: int) -> Tensor:
    """Read a piece that must have this number, and as many numbers as ``like``."""
    if data[: _PIECE.size] != encode_piece(number) or len(data) != _PIECE.size + like.nbytes:
        raise ProtocolError(f"agent {sender} sent another piece of a sum than piece {number}")
    return torch.frombuffer(data[_PIECE.size :], dtype=like.dtype)


def _decode_returns(data: memoryview, proofs: dict[Statement, Proof]) -> frozenset[tuple[int, int]]:
    """Return the agents and steps of returns, and add the signatures to ``proofs``."""
    found = set()
    for agent, when, signature in _RETURN.iter_unpack(data):
        found.add((agent, when))
        proofs[state_return(agent, when)] = Proof(agent, signature)
    return frozenset(found)


def is_sane(model: Tensor) -> bool:
    """Return whether all numbers of a model are finite, and none is absurdly large.

    >>> is_sane(torch.tensor([1e8, -1.0])), is_sane(torch.tensor([0.0, torch.nan]))
    (True, False)
    """
    if not len(model):
        return True
    low, high = torch.aminmax(model)
    # NaN compares as false.
    return float(low) >= -LARGEST_NUMBER and float(high) <= LARGEST_NUMBER


def check_header(found: Header, own: Header) -> None:
    """Raise ``ProtocolError`` unless a message belongs to the same step of the same run."""
    who = f"agent {found.sender}"
    if found.plan != own.plan:
        raise ProtocolError(f"{who} runs another plan ({found.plan.hex()}, not {own.plan.hex()})")
    # A model of another step would be mixed without an error, and agents would drift apart.
    if found.place != own.place:
        raise ProtocolError(
            f"{who} is at step {found.step}, round {found.mixing_round}, not at step {own.step}, "
            f"round {own.mixing_round}"
        )
    if found.next_plan != own.next_plan:
        # Compared in the step before the switch, so that no noise of two plans is ever mixed.
        raise ProtocolError(f"{who} made another plan for the survivors at step {found.step}")
    if found.payload_bytes != own.payload_bytes:
        raise ProtocolError(
            f"{who} sent {found.payload_bytes} bytes of parameters, not {own.payload_bytes}"
        )
