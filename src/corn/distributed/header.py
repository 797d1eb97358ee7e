"""What precedes the parameters in every message: what they are, and what its sender knows.

A message is one buffer: header, d parameters, and a seal of eight bytes. Gloo takes a message that
is shorter than the buffer without a word, so only the seal shows that all of it came.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from corn.distributed.membership import NO_STOP, STOP_REASONS, StopNotice
from corn.errors import PublicError

MAGIC = b"corn/msg"
SEAL_BYTES = 8
_FIXED = struct.Struct("<8s8s8sIIIIQBBHI")
_ALIGNMENT = 64
_KINDS = ("parameters", "wait")


class ProtocolError(PublicError):
    """A neighbour sent something else than this step's message: the run cannot be trusted."""


@dataclass(frozen=True)
class Header:
    """What a message says of itself.

    Attributes:
        plan: the first 8 bytes of the fingerprint of the plan in force.
        next_plan: of the plan that is to replace it at the next step; zeros if none is.
        sender: the agent.
        step: from 0.
        mixing_round: of the step, from 0.
        degree: to how many neighbours the sender is still linked.
        payload_bytes: the size of the parameters.
        noticed: what the sender knows of losses (see ``Membership``).
        stop: what it knows of a stop.
        is_wait: it carries no parameters, and says only that its sender is alive.
    """

    plan: bytes
    next_plan: bytes
    sender: int
    step: int
    mixing_round: int
    degree: int
    payload_bytes: int
    noticed: tuple[int, ...]
    stop: StopNotice = NO_STOP
    is_wait: bool = False

    def encode(self) -> bytes:
        """The header as bytes, as many as ``header_bytes`` says."""
        fixed = _FIXED.pack(
            MAGIC,
            self.plan,
            self.next_plan,
            self.sender,
            self.step,
            self.mixing_round,
            self.degree,
            self.payload_bytes,
            int(self.is_wait),
            STOP_REASONS.index(self.stop.reason),
            self.stop.agent,
            self.stop.step,
        )
        body = fixed + struct.pack(f"<{len(self.noticed)}I", *self.noticed)
        return body.ljust(header_bytes(len(self.noticed)), b"\0")

    @property
    def seal(self) -> bytes:
        """The last bytes of the message; never zero."""
        return struct.pack("<II", self.step + 1, self.mixing_round + 1)


def header_bytes(num_agents: int) -> int:
    """The size of a header: a few bytes per agent, so that the parameters after it are aligned.

    >>> header_bytes(20)
    192
    """
    size = _FIXED.size + 4 * num_agents
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def decode_header(data: bytes, *, num_agents: int, sender: int) -> Header:
    """Read a header that came from ``sender``, or say what is wrong with it."""
    fields = _FIXED.unpack_from(data)
    magic, plan, next_plan, found, step, mixing_round, degree, size, kind, why, who, stop = fields
    is_sound = kind < len(_KINDS) and why < len(STOP_REASONS) and who < num_agents
    if magic != MAGIC or not is_sound:
        raise ProtocolError(f"agent {sender} sent something that is not a message of CorN")
    if found != sender:
        raise ProtocolError(f"agent {sender}'s link carries a message of agent {found}")
    return Header(
        plan,
        next_plan,
        found,
        step,
        mixing_round,
        degree,
        size,
        struct.unpack_from(f"<{num_agents}I", data, _FIXED.size),
        StopNotice(stop, who, STOP_REASONS[why]),
        bool(kind),
    )


def check_header(found: Header, own: Header, seal: bytes) -> None:
    """Refuse a neighbour's message that does not belong to the same step of the same run."""
    who = f"agent {found.sender}"
    if found.plan != own.plan:
        raise ProtocolError(f"{who} runs another plan ({found.plan.hex()}, not {own.plan.hex()})")
    if (found.step, found.mixing_round) != (own.step, own.mixing_round):
        raise ProtocolError(
            f"{who} is at step {found.step}, round {found.mixing_round}, not at step {own.step}, "
            f"round {own.mixing_round}"
        )
    if found.payload_bytes != own.payload_bytes:
        raise ProtocolError(
            f"{who} sent {found.payload_bytes} bytes of parameters, not {own.payload_bytes}"
        )
    if seal != own.seal:
        raise ProtocolError(f"{who} sent a message that was cut short")
