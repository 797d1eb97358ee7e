"""The samples of all agents as one tensor, and the mini-batch of each agent at each step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, final

import numpy as np
import torch
from scipy.special import pdtrc
from torch import Tensor

from corn.checks import FloatArray, IntArray, require, require_length
from corn.noise import Secret
from corn.noise.choices import COIN_BITS, SecretChoices
from corn.privacy import ClippedQuery, PrivacyBudget
from corn.privacy.budget import MOST_SAMPLES
from corn.privacy.rounding import write_exactly

# The first word of a seed, so that the kinds of choices never share random numbers.
_EPOCHS, _POISSON, _POSITIONS = 1, 2, 3
# Batches wider than the public width are this rare, where an agent has as many samples as its plan
# counts on. Owners hear of batches that exceed it more often than the second number.
_RARE, _NOTED = 1e-12, 1e-6


class Choices(Protocol):
    """A source of random choices: of a public seed, or ``SecretChoices`` where data is real."""

    def draw_coins(self, number: int, sizes: Sequence[int]) -> FloatArray:
        """Return one coin in [0, 1) for each sample of all agents, for the batches of a number."""

    def draw_order(self, agent: int, number: int, *, size: int) -> IntArray:
        """Return a permutation of an agent's samples for the pass of a number."""

    def draw_positions(self, agent: int, number: int, *, size: int) -> IntArray:
        """Return a permutation of the positions in an agent's batch of a number."""


@final
class SeededChoices:
    """Choices that follow from a seed, for simulations: they protect nobody."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def draw_coins(self, number: int, sizes: Sequence[int]) -> FloatArray:
        """See ``Choices``."""
        return np.random.default_rng([_POISSON, self._seed, number]).random(sum(sizes))

    def draw_order(self, agent: int, number: int, *, size: int) -> IntArray:
        """See ``Choices``."""
        return np.random.default_rng([_EPOCHS, self._seed, agent, number]).permutation(size)

    def draw_positions(self, agent: int, number: int, *, size: int) -> IntArray:
        """See ``Choices``."""
        return np.random.default_rng([_POSITIONS, self._seed, agent, number]).permutation(size)


def round_rate_down(rate: float) -> float:
    """Return the largest multiple of 2⁻⁵³, the unit of coins, that is at most ``rate``.

    A coin below it then has exactly this probability, never more than the rate that was counted.
    """
    # Powers of two scale exactly, so that ``floor`` is the only rounding, and it is downwards.
    return math.ldexp(math.floor(math.ldexp(rate, COIN_BITS)), -COIN_BITS)


def public_width(batch_size: int) -> int:
    """Return a width that a Poisson batch rarely exceeds (Anderson and Samuels 1967)."""
    # The width at which the normal law would stop, then as far as the exact tail asks.
    width = batch_size + int(6 * math.sqrt(batch_size))
    while pdtrc(width, batch_size) > _RARE:
        width += 1
    return width


def require_fitting_samples(budget: PrivacyBudget, sizes: Sequence[int], *, first: int = 0) -> None:
    """Raise for more samples, of agents from ``first`` on, than the bound on rounding covers."""
    queries = budget.queries * len(sizes) if budget.num_agents is None else budget.queries
    for agent, (query, size) in enumerate(zip(queries, sizes, strict=True), start=first):
        if query.sampling_rate is None or query.batch_size is None:
            continue
        # The bound that ``ClippedQuery.largest_norm`` and ``BatchSampler`` count on.
        most = int(MOST_SAMPLES * query.batch_size / query.sampling_rate)
        rule = f"at most {most:,} at the plan's batch size and sampling rate"
        found = f"{size:,} of agent {agent}"
        require(size <= most, "samples", rule, found, advice="raise the batch size")


def note_batch_size(query: ClippedQuery, num_samples: int) -> str | None:
    """Return a private note for the owner of so many samples if its batches are too large."""
    if query.batch_size is None or query.sampling_rate is None:
        return None
    usual = query.sampling_rate * num_samples
    width = public_width(query.batch_size)
    if usual <= query.batch_size or pdtrc(width, usual) <= _NOTED:
        return None
    return (
        f"{num_samples:,} samples give batches of {usual:.3g} on average, which can exceed the "
        f"public width of {width} positions: one sample more may then change how others are "
        "rounded (docs/floats.md); plan with more --samples-per-agent"
    )


def note_large_delta(budget: PrivacyBudget, agent: int, num_samples: int) -> str | None:
    """Return a note for an agent's owner if its promised δ is more than one over its samples."""
    delta = budget.of_agent(agent).promise.delta
    # A mechanism that publishes one random sample in full keeps any ε at such a δ.
    if delta * num_samples <= 1:
        return None
    return (
        f"the plan's δ = {write_exactly(delta)} is more than one over the number of samples here, "
        f"{num_samples}: publishing a whole sample would satisfy it; see --require"
    )


# With more clipped samples, the rounding of their sum exceeds 1 % of one sample's sensitivity.
_MOST_SUMMED = 4 * 10**6


@dataclass(frozen=True, eq=False)
class AgentData:
    """The samples of all agents, those of agent i in rows offsets[i] to offsets[i + 1]."""

    inputs: Tensor
    targets: Tensor
    offsets: tuple[int, ...]

    def __post_init__(self) -> None:
        lengths = len(self.inputs), len(self.targets), self.offsets[-1]
        rule = "as many as targets and as the last offset"
        require(len(set(lengths)) == 1, "inputs", rule, lengths)
        for agent, size in enumerate(self.sizes):
            require(size > 0, "data", "at least one sample per agent", f"none for agent {agent}")

    @classmethod
    def from_parts(cls, parts: Sequence[tuple[Tensor, Tensor]]) -> AgentData:
        """Concatenate one pair (inputs, targets) per agent."""
        require(len(parts) > 0, "data", "that of at least one agent", "none")
        for agent, pair in enumerate(parts):
            # Checked agent by agent: equal totals could hide samples with another agent's targets.
            require_length(f"targets of agent {agent}", len(pair[1]), len(pair[0]), per="sample")
            for name, values, first in zip(("inputs", "targets"), pair, parts[0], strict=True):
                usual, own = tuple(first.shape[1:]), tuple(values.shape[1:])
                rule = f"of one shape for all agents, {usual} for agent 0"
                require(own == usual, name, rule, f"{own} of agent {agent}")
        inputs, targets = (torch.cat(own) for own in zip(*parts, strict=True))
        return cls(inputs, targets, tuple(np.cumsum([0, *(len(own) for own, _ in parts)]).tolist()))

    def of_agent(self, agent: int) -> AgentData:
        """Return the samples of one agent alone."""
        own = slice(self.offsets[agent], self.offsets[agent + 1])
        return AgentData(self.inputs[own], self.targets[own], (0, self.sizes[agent]))

    @property
    def num_agents(self) -> int:
        """The number of agents n."""
        return len(self.offsets) - 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of samples of each agent."""
        return tuple(np.diff(self.offsets).tolist())


@dataclass(frozen=True, eq=False)
class Batch:
    """The mini-batches of one step, one row per cell; a cell is an agent in a seed's run.

    ``inputs`` and ``targets`` have shape (cells, batch, …), ``weights`` (cells, batch): equal in a
    cell, 0 for padding, and in float64 where samples are clipped. Padding comes last, except in
    batches of ``BatchSampler.of_agent`` for clipped samples. ``is_average``: all weights are
    1/batch. ``most_samples`` is a public bound on the number of samples in a cell.
    """

    inputs: Tensor
    targets: Tensor
    weights: Tensor
    is_average: bool
    most_samples: int = 1

    def split(self, num_cells: int) -> list[Batch]:
        """Return batches of ``num_cells`` cells each; the last may have fewer."""
        parts = (torch.split(each, num_cells) for each in (self.inputs, self.targets, self.weights))
        return [
            replace(self, inputs=inputs, targets=targets, weights=weights)
            for inputs, targets, weights in zip(*parts, strict=True)
        ]


class BatchSampler:
    """Mini-batches of all agents for several runs; cells are run-major.

    No sample occurs twice in a batch, because sample-level sensitivity counts it once. The query of
    an agent decides how its samples enter batches, whatever their number:

    - Poisson: each sample is in a batch with the query's rate, independently of all others. The
    divisor is fixed.
    - Passes: ``steps_per_pass`` batches of ``batch_size`` slots, in an order that is new in each
    pass. Samples without a slot wait for the next pass, and slots without a sample are padding.
    - Every step: ``of_agent`` draws each batch anew, as a pass of one batch.
    - No query, the unit of agents, or every step in a simulation: passes of as many full batches as
    the agent's samples allow. An agent with less than one batch takes all of its samples.

    ``queries`` are one for all agents, one for each, or none where nothing is clipped;
    ``batch_size`` counts where they name none, and None takes the whole data.
    """

    def __init__(
        self,
        data: AgentData,
        queries: Sequence[ClippedQuery] = (),
        *,
        batch_size: int | None = None,
        choices: Sequence[Choices],
        fixed_shape: bool = False,
    ) -> None:
        self._data = data
        self._choices = tuple(choices)
        self._sizes = data.sizes
        each = tuple(queries) * data.num_agents if len(queries) == 1 else tuple(queries)
        require_length("queries", len(each) or data.num_agents, data.num_agents, per="agent")
        clips_samples = bool(each) and each[0].unit == "sample"
        is_poisson = bool(each) and each[0].sampling == "poisson"
        self._batch_size = (each[0].batch_size if clips_samples else batch_size) or max(self._sizes)
        # A fixed divisor bounds the weight of one sample by 1/B, for agents with fewer too.
        self._divisor = self._batch_size if clips_samples else None
        # A Poisson batch exceeds this with a probability far below 2⁻¹⁴⁴.
        self._most = self._batch_size
        if is_poisson:
            self._most = int((MOST_SAMPLES + 1) * self._batch_size) + 2000
        if self._divisor is not None:
            advice = f"sums of {self._most:,} clipped samples are too inaccurate"
            fits = self._most <= _MOST_SUMMED
            require(fits, "batch_size", "smaller", f"{self._divisor:,}", advice=advice)
        self._limits: FloatArray | None = None
        # 0 stands for compact batches, whose padding comes last.
        self._width = self._batch_size if fixed_shape and clips_samples else 0
        if is_poisson:
            rates = [round_rate_down(query.sampling_rate or 0.0) for query in each]
            self._limits = np.repeat(rates, self._sizes)
            self._width = public_width(self._batch_size) if self._width else 0
        planned = each or [None] * data.num_agents
        self._steps_per_pass = list(map(self._count_steps, planned, self._sizes))
        # Padding is one of the agent's own samples: a model that mixes samples must see no others.
        self._padding = np.array([*data.offsets[:-1]] * len(self._choices), np.int64)[:, None]
        # The slots of the present pass, and its number: drawing a permutation costs O(m).
        self._passes: dict[tuple[int, int], tuple[int, IntArray]] = {}

    @classmethod
    def of_agent(
        cls,
        query: ClippedQuery,
        data: AgentData,
        choices: Sequence[Choices] | None = None,
        *,
        batch_size: int | None = None,
    ) -> BatchSampler:
        """Return the sampler of one agent's batches where noise protects its data.

        Clipped samples are at secret random positions of a batch of public shape: one more then
        moves no other, whose gradient a library may round differently elsewhere (docs/floats.md).
        """
        if choices is None:
            choices = [SecretChoices(coins=Secret.random(), orders=Secret.random())]
        return cls(data, (query,), batch_size=batch_size, choices=choices, fixed_shape=True)

    def draw(self, number: int) -> Batch:
        """Return the batches of a number, from 0: of a step, or of a release."""
        rows = self.choose_rows(number)
        if self._limits is None and self._width:
            # Slots of a pass are at random positions already.
            return self._gather(np.stack(rows))
        if not self._width:
            rows = [own[own >= 0] for own in rows]
        longest = max(1, *(len(own) for own in rows))
        # An empty batch becomes one sample of weight 0, because tasks need at least one row.
        step = self._width or 1
        width = -(-longest // step) * step
        table = np.full((len(rows), width), -1, np.int64)
        for cell, own in enumerate(rows):
            table[cell, self._place(cell, number, len(own), width)] = own
        return self._gather(table)

    def choose_rows(self, number: int) -> list[IntArray]:
        """Return the rows of ``data`` in the batch of each cell; −1 is a slot without a sample."""
        if self._limits is not None:
            found = []
            for choices in self._choices:
                taken = np.flatnonzero(choices.draw_coins(number, self._sizes) < self._limits)
                found += np.split(taken, np.searchsorted(taken, self._data.offsets[1:-1]))
            return found
        # Run-major, like ``_padding`` and the cells of a ``Batch``.
        cells = itertools.product(range(len(self._choices)), range(self._data.num_agents))
        return [self._read_slots(run, agent, number) for run, agent in cells]

    def _count_steps(self, query: ClippedQuery | None, size: int) -> int:
        """Return the number of batches in a pass."""
        if query is not None and query.steps_per_pass is not None:
            return query.steps_per_pass
        # With one batch in a pass one row more changes one slot, and never the length of a pass.
        return 1 if self._width else max(1, size // self._batch_size)

    def _place(self, cell: int, number: int, count: int, width: int) -> IntArray | slice:
        """Return the positions of the samples in a cell's batch."""
        if not self._width:
            return slice(count)
        run, agent = divmod(cell, self._data.num_agents)
        # A prefix: the positions of the first samples do not depend on how many follow.
        return self._choices[run].draw_positions(agent, number, size=width)[:count]

    def _read_slots(self, run: int, agent: int, number: int) -> IntArray:
        size = self._sizes[agent]
        steps = self._steps_per_pass[agent]
        offset = self._data.offsets
        num_slots = steps * self._batch_size
        if not self._width and steps == 1 and size <= num_slots:
            return np.arange(size) + offset[agent]
        # A pass depends on its own number alone, so that any batch can be drawn.
        passes, place = divmod(number, steps)
        known = self._passes.get((run, agent))
        if known is None or known[0] != passes:
            order = self._choices[run].draw_order(agent, passes, size=max(size, num_slots))
            known = (passes, np.where(order < size, order + offset[agent], -1)[:num_slots])
            self._passes[run, agent] = known
        return known[1][place * self._batch_size : (place + 1) * self._batch_size]

    def _gather(self, table: IntArray) -> Batch:
        """Return the samples of a table of rows, shape (cells, width), in which −1 is padding."""
        data, (cells, width) = self._data, table.shape
        present = table >= 0
        rows = np.where(present, table, self._padding)
        index = torch.from_numpy(rows.reshape(-1)).to(data.inputs.device)
        inputs = data.inputs.index_select(0, index)
        targets = data.targets.index_select(0, index)
        weights = present / (self._divisor or np.maximum(present.sum(axis=1, keepdims=True), 1))
        real = inputs.dtype if inputs.is_floating_point() else torch.get_default_dtype()
        if self._divisor is not None:
            real = torch.float64  # in float32 1/B could round up to more than accounting assumes
        return Batch(
            inputs.view(cells, width, *inputs.shape[1:]),
            targets.view(cells, width, *targets.shape[1:]),
            torch.from_numpy(weights).to(device=inputs.device, dtype=real),
            # With a fixed divisor weights are an average only if as many samples are there.
            bool(present.all()) and self._divisor in (None, width),
            self._most,
        )
