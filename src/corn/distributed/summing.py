"""Exact sums over a tree: partial sums travel up to its root, and the total travels down again.

Messages are integers modulo 2^B, so all agents get the same total. Large ones travel in pieces; the
first piece has the header.

Headers carry a digest of the sender's model, by which neighbours compare: all agents hold the same
model. An insider could tell each side what it expects. So every few steps, and in the end, the
digest on the way down has the root's signature; and as the root could sign one for each child,
agents compare over the other links as well. Two neighbours that differ give up their link.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from corn.distributed.exchange import Exchange, Received, StepStopped
from corn.distributed.messages import PIECE_BYTES, Header, ProtocolError
from corn.noise.masks import MaskBits, MaskWords
from corn.topology.graphs import SpanningTree
from corn.transport import Dropout, LinkError

UP, DOWN, ASIDE = 0, 1, 2
"""The numbers of a step's messages, in the place of mixing rounds."""
STEPS_BETWEEN_COMPARISONS = 16
"""The steps within which an insider that hides other models is found. A signature takes as long as
a small model's sum."""


@final
class TreeSum:
    """One agent's part in the sums of all steps, along a tree of the links."""

    def __init__(self, exchange: Exchange, tree: SpanningTree) -> None:
        agent = exchange.membership.agent
        self._exchange = exchange
        self._membership = exchange.membership
        self._root = tree.root
        self._parent = None if agent == tree.root else tree.parents[agent]
        self._children = tree.children[agent]
        self._waits = _count_waits(tree, agent)
        # Of the step under way: when the wait for a message ends, by its sender and its number.
        self._deadlines: dict[tuple[int, int], float] = {}
        self._signature = b""
        self._compares = False

    def add_up(self, own: Tensor, make_header: Callable[[int], Header]) -> None:
        """Replace this agent's integers of a step by the sum of all, or raise ``StepStopped``.

        ``make_header`` returns the header of a message with all news so far.
        """
        self._deadlines = {}
        aside = make_header(ASIDE)
        # The last sum of a run is empty.
        self._compares = not len(own) or (aside.step + 1) % STEPS_BETWEEN_COMPARISONS == 0
        if self._compares:
            # Over the links that are not of the tree.
            aside = replace(aside, payload_bytes=0)
            nothing = torch.empty(0, dtype=self._exchange.dtype)
            peers = sorted({*self._exchange.neighbours} - {self._parent, *self._children})
            self._exchange.send_piece(peers, aside, nothing, 0)
            for peer in peers:
                self._receive(peer, aside, nothing, 0)
        up, down = make_header(UP), make_header(DOWN)
        pieces = torch.split(own, PIECE_BYTES // own.itemsize)
        for number, piece in enumerate(pieces):
            for child in self._children:
                piece += self._receive(child, up, piece, number)
            if self._parent is not None:
                # With the news of all agents below this one, which the first pieces told.
                up = up if number else make_header(UP)
                self._exchange.send_piece([self._parent], up, piece, number)
            else:
                if number == 0:
                    down = make_header(DOWN)  # with the news of all agents
                    down = self._membership.sign_model(down) if self._compares else down
                self._exchange.send_piece(self._children, down, piece, number)
        if self._parent is not None:
            self._exchange.on_send(up, own)
            for number, piece in enumerate(pieces):
                piece.copy_(self._receive(self._parent, down, piece, number))
                if number == 0:
                    down = make_header(DOWN)
                    down = replace(down, signature=self._signature) if self._compares else down
                self._exchange.send_piece(self._children, down, piece, number)
        self._exchange.on_send(down, own)

    def _receive(self, peer: int, expected: Header, like: Tensor, number: int) -> Tensor:
        """Return a piece of a neighbour's message."""
        try:
            found = self._read(peer, expected, like, number)
        except LinkError as error:
            self._exchange.drop(peer)
            raise StepStopped({peer: error}) from error
        if isinstance(found, Tensor):
            return found
        self._membership.merge(found.header.news)
        if found.header.attempt:
            self._exchange.put_back(peer, found)
            raise StepStopped
        if found.header.model != expected.model:
            self._exchange.drop(peer)
            differs = LinkError(f"agent {peer} has another model", Dropout.DIFFERENT)
            raise StepStopped({peer: differs})
        return found.parameters

    def _read(self, peer: int, expected: Header, like: Tensor, number: int) -> Tensor | Received:
        # One limit for all pieces: a neighbour could send them one by one, for ever.
        start = time.monotonic()
        # The agent next to one that sends nothing but heartbeats must lose patience first: it would
        # be lost itself to those that wait for it.
        longer = self._waits[expected.mixing_round] * self._exchange.timeout
        message = peer, expected.mixing_round
        deadline = self._deadlines.setdefault(message, start + self._exchange.patience + longer)
        if number:
            return self._exchange.receive_piece(peer, number, like, deadline=deadline)
        found = self._exchange.receive(peer, self._exchange.expect(expected), deadline=deadline)
        if not found.header.attempt:
            if found.parameters.nbytes != like.nbytes:
                raise ProtocolError(f"agent {peer} sent a piece of another size")
            is_signed = expected.mixing_round == DOWN and self._compares
            if is_signed and found.header.model == expected.model:
                self._membership.check_model(found.header, self._root)
                self._signature = found.header.signature
        return found


def _count_waits(tree: SpanningTree, agent: int) -> dict[int, int]:
    """Return by how many time-outs an agent waits longer for each message of a step.

    Whoever a message depends on, lower in the tree or, on the way down, nearer to the root, waits
    less.
    """
    level, node = 0, agent
    while node != tree.root:
        level, node = level + 1, tree.parents[node]
    return {UP: tree.depth - level, DOWN: tree.depth + level + 1, ASIDE: 0}


def integer_type(bits: MaskBits) -> torch.dtype:
    """Return the type of integers modulo 2^B in messages: signed, as torch adds up no others."""
    return {16: torch.int16, 32: torch.int32, 64: torch.int64}[bits]


def as_integers(words: MaskWords) -> Tensor:
    """Return integers modulo 2^B as signed ones with the same bits, which torch can add up."""
    return torch.from_numpy(words.view(f"i{words.itemsize}"))


def digest_model(parameters: Tensor) -> bytes:
    """Return a digest by which agents compare their models.

    SHA-256, as processors have instructions for it, and nobody finds two models with one digest.
    """
    return hashlib.sha256(parameters.numpy().data).digest()
