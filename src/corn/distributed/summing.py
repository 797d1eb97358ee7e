"""Exact sums over a tree: partial sums travel up to its root, and the total travels down again.

A step has one message up and one down over each link of the tree. Messages are integers modulo 2^B,
so that all agents get the same total in whatever order messages arrive. Headers carry news, and a
digest of the sender's model: all agents hold the same model, and a parent gives up the link to a
child that has another.

A step needs all agents. Where a neighbour of the tree is lost, or calls for a recovery, the sum is
given up (``corn.distributed.recovery``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from corn.distributed.exchange import Exchange, Received
from corn.distributed.membership import Membership
from corn.distributed.messages import PREFIX_BYTES, Header, check_header
from corn.noise.masks import MaskBits, MaskWords
from corn.topology.graphs import SpanningTree
from corn.transport import Dropout, LinkError

UP, DOWN = 0, 1
"""The numbers of a step's two messages, in the place of mixing rounds."""


@dataclass(frozen=True)
class SumOutcome:
    """The end of a step's sum at one agent.

    Attributes:
        total: the sum of all agents, modulo 2^B; None if it was given up.
        dropouts: the neighbours that are lost, and how; none if one called for a recovery.
    """

    total: Tensor | None = None
    dropouts: Mapping[int, LinkError] = field(default_factory=dict)


class _Stopped(Exception):  # noqa: N818 - an outcome, not an error
    """The sum cannot be completed."""

    def __init__(self, outcome: SumOutcome) -> None:
        self.outcome = outcome
        super().__init__()


@final
class TreeSum:
    """One agent's part in the sums of all steps.

    Args:
        exchange: the links to neighbours.
        tree: along which sums travel.
        agent: this agent's number.
        membership: its knowledge, to which it adds all news that it hears.
    """

    def __init__(
        self, exchange: Exchange, tree: SpanningTree, agent: int, membership: Membership
    ) -> None:
        self._exchange, self._membership = exchange, membership
        self._parent = None if agent == tree.root else tree.parents[agent]
        self._children = tree.children[agent]

    def add_up(
        self, own: Tensor, make_header: Callable[[int], Header], meanwhile: Callable[[], None]
    ) -> SumOutcome:
        """Return the sum of all agents' integers of a step.

        Args:
            own: this agent's integers, which the partial sum overwrites.
            make_header: returns the header of a message, up or down, with all news so far.
            meanwhile: called once, while this agent's message travels.
        """
        try:
            total = self._add_up(own, make_header, meanwhile)
        except _Stopped as stopped:
            return stopped.outcome
        self._exchange.note_exchange()
        return SumOutcome(total)

    def _add_up(
        self, total: Tensor, make_header: Callable[[int], Header], meanwhile: Callable[[], None]
    ) -> Tensor:
        self._exchange.recycle()
        others = {}
        for child in self._children:
            expected = make_header(UP)
            found = self._receive(child, expected)
            if found.header.model != expected.model:
                self._exchange.drop(child)
                others[child] = LinkError(f"agent {child} has another model", Dropout.DIFFERENT)
            total += found.parameters
        if others:
            raise _Stopped(SumOutcome(dropouts=others))
        if self._parent is not None:
            # With the news of all agents below this one.
            self._exchange.send([self._parent], make_header(UP), total)
            meanwhile()
            total = self._receive(self._parent, make_header(DOWN)).parameters
        # With the news of all agents, which the root has heard.
        self._exchange.send(self._children, make_header(DOWN), total)
        if self._parent is None:
            meanwhile()
        return total

    def _receive(self, peer: int, expected: Header) -> Received:
        def check(header: Header) -> None:
            if header.attempt:
                self._exchange.check_call(header)
            else:
                check_header(header, expected)

        try:
            found = self._exchange.receive(peer, check)
        except LinkError as error:
            self._exchange.drop(peer)
            raise _Stopped(SumOutcome(dropouts={peer: error})) from error
        self._membership.merge(found.header.news)
        if found.header.attempt:
            self._exchange.put_back(peer, found)
            raise _Stopped(SumOutcome())
        return found


def integer_type(bits: MaskBits) -> torch.dtype:
    """Return the type of integers modulo 2^B in messages: signed, as torch adds up no others."""
    return {16: torch.int16, 32: torch.int32, 64: torch.int64}[bits]


def as_integers(words: MaskWords) -> Tensor:
    """Return integers modulo 2^B as signed ones with the same bits, which torch can add up.

    >>> import numpy as np
    >>> as_integers(np.array([65535, 1], np.uint16)).tolist()
    [-1, 1]
    """
    return torch.from_numpy(words.view(f"i{words.itemsize}"))


def digest_model(parameters: Tensor) -> bytes:
    """Return a digest by which agents compare their models.

    SHA-256, as processors have instructions for it: other hash functions take twice as long.

    >>> digest_model(torch.zeros(3)) == digest_model(torch.tensor([0.0, 0.0, -0.0]))
    False
    """
    return hashlib.sha256(parameters.numpy().data).digest()[:PREFIX_BYTES]
