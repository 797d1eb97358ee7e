"""Messages between neighbours: d numbers, and a header with what the sender knows of others."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from torch import Tensor

from corn.errors import PublicError

NEVER = 2**32 - 1
"""The step at which no loss was noticed, and after which no run stops."""
PREFIX_BYTES = 8

_MAGIC = b"corn/msg"
_FIXED = struct.Struct("<8s8s8s8sIIIIIQIIIIIII")
_CUT, _RETURN = struct.Struct("<III"), struct.Struct("<II")
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


# The order is part of the protocol: headers carry positions.
_REASONS = tuple(StopReason)


@dataclass(frozen=True, order=True)
class StopNotice:
    """Announcement that all stop after ``step`` steps, because of ``agent``; the least counts."""

    step: int = NEVER
    agent: int = 0
    reason: StopReason = StopReason.NONE


NO_STOP = StopNotice()


class ProtocolError(PublicError):
    """A message that is not the neighbour's message of this step: the run cannot be trusted."""


@dataclass(frozen=True)
class News:
    """Knowledge of an agent about others, which travels with every message.

    Attributes:
        cuts: the links that broke, each with a step at which this was noticed.
        returns: the agents that came back, each with the step from which it takes part again.
        stop: the earliest stop.
        calls: with exact sums, the agents that ask to come back, each with the step before which
            all wait for it. Whether it came, its own return tells.
    """

    cuts: frozenset[tuple[Edge, int]] = frozenset()
    returns: frozenset[tuple[int, int]] = frozenset()
    stop: StopNotice = NO_STOP
    calls: frozenset[tuple[int, int]] = frozenset()


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
    model: bytes = bytes(PREFIX_BYTES)
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
        cuts = [_CUT.pack(*edge, step) for edge, step in sorted(news.cuts)]
        returns = [
            _RETURN.pack(*one) for kind in (news.returns, news.calls) for one in sorted(kind)
        ]
        body = b"".join([fixed, *cuts, *returns])
        return body.ljust(_header_bytes(len(cuts), len(returns)), b"\0")

    @property
    def place(self) -> tuple[int, int]:
        """Step and mixing round."""
        return self.step, self.mixing_round


def _header_bytes(num_cuts: int, num_returns: int) -> int:
    size = _FIXED.size + _CUT.size * num_cuts + _RETURN.size * num_returns
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def message_limit(num_agents: int, payload_bytes: int) -> int:
    """Return the most bytes that a message may have, whatever its sender knows of losses."""
    # Each loss is noticed by both ends, and replaced news is removed after some time.
    return _header_bytes(16 * num_agents**2, 16 * num_agents) + payload_bytes


def decode_message(
    data: memoryview, *, num_agents: int, sender: int, dtype: torch.dtype
) -> tuple[Header, Tensor]:
    """Read a message that came from ``sender``; raise ``ProtocolError`` for anything else."""
    if len(data) < _FIXED.size or data[: len(_MAGIC)] != _MAGIC:
        raise ProtocolError(f"agent {sender} sent bytes that are not a message of CorN")
    _, plan, next_plan, model, found, *rest = _FIXED.unpack_from(data)
    step, mixing_round, attempt, degree, size, why, who, stop, *rest = rest
    num_cuts, num_returns, num_calls, has_released = rest
    begin = _header_bytes(num_cuts, num_returns + num_calls)
    if found != sender:
        raise ProtocolError(f"agent {sender}'s link carries a message of agent {found}")
    # Every field comes from another machine: positions must be in range before they are used.
    if why >= len(_REASONS) or who >= num_agents or len(data) != begin + size:
        raise ProtocolError(f"agent {sender} sent a message that was cut short or is damaged")
    end_of_cuts = _FIXED.size + _CUT.size * num_cuts
    end_of_returns = end_of_cuts + _RETURN.size * num_returns
    end_of_calls = end_of_returns + _RETURN.size * num_calls
    cuts = _CUT.iter_unpack(data[_FIXED.size : end_of_cuts])
    news = News(
        frozenset(((i, j), when) for i, j, when in cuts),
        frozenset(_RETURN.iter_unpack(data[end_of_cuts:end_of_returns])),
        StopNotice(stop, who, _REASONS[why]),
        frozenset(_RETURN.iter_unpack(data[end_of_returns:end_of_calls])),
    )
    # Order too: an edge named the other way round would be another one in every set.
    is_known = all(i < j < num_agents for (i, j), _ in news.cuts)
    if not is_known or not all(agent < num_agents for agent, _ in news.returns | news.calls):
        raise ProtocolError(f"agent {sender} sent a message that names unknown agents")
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
        attempt=attempt,
        has_released=bool(has_released),
    )
    # frombuffer would raise for either. check_header refuses the wrong size, and names its sender.
    if size == 0 or size % dtype.itemsize:
        return header, torch.empty(0, dtype=dtype)
    return header, torch.frombuffer(data[begin:], dtype=dtype)


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
