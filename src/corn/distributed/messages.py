"""Messages between neighbours: d numbers, and a header with what the sender knows of others.

News in a header is signed by the agent that says it, so a neighbour can pass it on or withhold it,
and cannot invent it. A message that breaks a rule costs its sender the link, and nothing else.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple, TypeAlias, final

import torch
from torch import Tensor

from corn.noise.stream import encode_fields
from corn.transport import Credentials, Dropout, LinkError

PREFIX_BYTES = 8
DIGEST_BYTES = 32
PIECE_BYTES = 1 << 18
"""The most bytes of a sum that one message has; the rest follows in pieces of this size."""
LARGEST_NUMBER = 1e9
"""The largest size of a number in a model; a model with a larger one has diverged."""

_MAGIC = b"corn/msg"
_FIXED = struct.Struct("<8s8s32s64sIIIIQI")
_PIECE = struct.Struct("<8sI52x")
_PIECE_MAGIC = b"corn/prt"
# Subject, step and signature of one piece of news.
_NEWS = struct.Struct("<IIIII64s")
# A cache line, so that the parameters behind a header are aligned for vector code.
_ALIGNMENT = 64


class ProtocolError(LinkError):
    """A message that breaks the rules: the link to its sender is given up."""

    def __init__(self, message: str) -> None:
        super().__init__(message, Dropout.MISBEHAVED)


class Kind(IntEnum):
    """A kind of news, by what its author says. The numbers are part of the protocol."""

    CUT = 0  # its link to another agent broke
    LEAVE = 1  # it takes no more part
    CALL = 2  # it asks to come back, and all wait for it before a step
    RETURN = 3  # it has come back, and takes part again from a step on
    BEGUN = 4  # in a recovery: it has begun so many steps
    # Under gossip, in heartbeats only: it waits for the message of this number over a link.
    WAIT = 5


class Subject(NamedTuple):
    """A subject of news: its kind, a link, and its author; or the author three times."""

    kind: Kind
    first: int
    second: int
    author: int


class Saying(NamedTuple):
    """The last step of which the author of some news says it, with a signature."""

    step: int
    signature: bytes = bytes(64)


News: TypeAlias = Mapping[Subject, Saying]


@final
class NewsKeys:
    """Signatures of news in one run, the session: in another run they are not valid."""

    def __init__(self, credentials: Credentials, session: bytes) -> None:
        self._credentials = credentials
        self._session = session

    def sign(self, subject: Subject, step: int) -> bytes:
        """Return this agent's signature of some news."""
        return self._credentials.identity.sign(self._encode(subject, step))

    def verify(self, subject: Subject, saying: Saying) -> bool:
        """Return whether the author of some news signed it."""
        text = self._encode(subject, saying.step)
        return self._credentials.roster.verify(subject.author, saying.signature, text)

    def sign_model(self, step: int, model: bytes) -> bytes:
        """Return this agent's signature of the digest of its model before a step."""
        return self._credentials.identity.sign(self._model_text(step, model))

    def verify_model(self, agent: int, signature: bytes, step: int, model: bytes) -> bool:
        """Return whether an agent signed the digest of its model before a step."""
        return self._credentials.roster.verify(agent, signature, self._model_text(step, model))

    def _model_text(self, step: int, model: bytes) -> bytes:
        return encode_fields("corn model", self._session, step, model)

    def _encode(self, subject: Subject, step: int) -> bytes:
        return encode_fields("corn news", self._session, subject.kind.name, *subject[1:], step)


@dataclass(frozen=True)
class Header:
    """The description of a message, and what its sender knows of losses."""

    plan: bytes  # the first bytes of the fingerprint of the plan in force
    sender: int
    step: int
    mixing_round: int  # of the step or of the recovery, from 0
    payload_bytes: int
    news: News = field(default_factory=dict)
    # A digest of the sender's model before the step, or zeros where models differ anyway; and the
    # root's signature of it, on the way down at some steps.
    model: bytes = bytes(DIGEST_BYTES)
    signature: bytes = bytes(64)
    attempt: int = 0  # the number of a recovery; zero outside of any

    def encode(self) -> bytes:
        """Return the header as bytes, a multiple of 64 of them to align the parameters."""
        news = [_NEWS.pack(*subject, *said) for subject, said in sorted(self.news.items())]
        when = self.step, self.mixing_round, self.attempt
        numbers = self.sender, *when, self.payload_bytes, len(news)
        fixed = _FIXED.pack(_MAGIC, self.plan, self.model, self.signature, *numbers)
        return b"".join([fixed, *news]).ljust(_header_bytes(len(news)), b"\0")


def _header_bytes(num_news: int) -> int:
    size = _FIXED.size + _NEWS.size * num_news
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def message_limit(num_agents: int, num_links: int, payload_bytes: int) -> int:
    """Return the most bytes that a message may have, whatever its sender knows of losses."""
    # Both ends of each link may say that it broke, and each agent four things about itself.
    return _header_bytes(2 * num_links + 4 * num_agents) + payload_bytes


def decode_message(
    data: memoryview, *, num_agents: int, sender: int, dtype: torch.dtype
) -> tuple[Header, Tensor]:
    """Read a message that came from ``sender``; raise ``ProtocolError`` for anything else.

    Of a sum in pieces, it is the first. Signatures are not checked: see :meth:`Membership.check`.
    """
    if len(data) < _FIXED.size or data[: len(_MAGIC)] != _MAGIC:
        raise ProtocolError(f"agent {sender} sent bytes that are not a message of CorN")
    _, plan, model, model_signature, found, *rest = _FIXED.unpack_from(data)
    step, mixing_round, attempt, size, num_news = rest
    begin = _header_bytes(num_news)
    if found != sender:
        raise ProtocolError(f"agent {sender}'s link carries a message of agent {found}")
    if len(data) - begin not in (size, min(size, PIECE_BYTES)):
        raise ProtocolError(f"agent {sender} sent a message that was cut short or is damaged")
    news: dict[Subject, Saying] = {}
    end = _FIXED.size + _NEWS.size * num_news
    for kind, first, second, author, when, signature in _NEWS.iter_unpack(data[_FIXED.size : end]):
        # Named the other way round, a link would be another one.
        if kind >= len(Kind) or not first <= second < num_agents or author not in (first, second):
            raise ProtocolError(f"agent {sender} sent news that no agent may say")
        news[Subject(Kind(kind), first, second, author)] = Saying(when, signature)
    header = Header(plan, found, step, mixing_round, size, news, model, model_signature, attempt)
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


def is_sane(model: Tensor) -> bool:
    """Return whether all numbers of a model are finite, and none is absurdly large."""
    if not len(model):
        return True
    low, high = torch.aminmax(model)
    # NaN compares as false.
    return float(low) >= -LARGEST_NUMBER and float(high) <= LARGEST_NUMBER


def check_header(found: Header, own: Header) -> None:
    """Raise ``ProtocolError`` unless a message belongs to the same step of the same run."""
    who = f"agent {found.sender}"
    # Noise of two plans is never mixed.
    if found.plan != own.plan:
        raise ProtocolError(f"{who} runs another plan ({found.plan.hex()}, not {own.plan.hex()})")
    # A model of another step would be mixed without an error, and agents would drift apart.
    if (found.step, found.mixing_round) != (own.step, own.mixing_round):
        there = f"step {found.step}, round {found.mixing_round}"
        here = f"step {own.step}, round {own.mixing_round}"
        raise ProtocolError(f"{who} is at {there}, not at {here}")
    if found.payload_bytes != own.payload_bytes:
        why = f"{who} sent {found.payload_bytes} bytes of parameters, not {own.payload_bytes}"
        raise ProtocolError(why)
