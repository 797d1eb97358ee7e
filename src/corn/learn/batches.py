"""The samples of all agents as one tensor, and the mini-batch of each agent at each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from corn.arrays import FloatArray, IntArray
from corn.checks import require_length
from corn.errors import InvalidArgumentError
from corn.learn.sampling import Choices, round_rate_down, usual_width
from corn.privacy.query import MOST_SAMPLES

# With more clipped samples, the rounding of their sum exceeds 1 % of one sample's sensitivity.
_MOST_SUMMED = 4 * 10**6


@dataclass(frozen=True, eq=False)
class AgentData:
    """The samples of all agents, those of agent i in rows offsets[i] to offsets[i + 1].

    Attributes:
        inputs: shape (samples, …).
        targets: shape (samples, …).
        offsets: n + 1 increasing row numbers: every agent has at least one sample.
    """

    inputs: Tensor
    targets: Tensor
    offsets: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets) or len(self.inputs) != self.offsets[-1]:
            raise InvalidArgumentError(
                f"inputs, targets and offsets must agree on the number of samples, found "
                f"{len(self.inputs)}, {len(self.targets)} and {self.offsets[-1]}"
            )
        for agent, size in enumerate(self.sizes):
            if size < 1:
                raise InvalidArgumentError(
                    f"data must have at least one sample per agent, found none for agent {agent}"
                )

    @classmethod
    def from_parts(cls, parts: Sequence[tuple[Tensor, Tensor]]) -> AgentData:
        """Concatenate one pair (inputs, targets) per agent."""
        _check_parts(parts)
        offsets = np.cumsum([0, *(len(inputs) for inputs, _ in parts)])
        return cls(
            torch.cat([inputs for inputs, _ in parts]),
            torch.cat([targets for _, targets in parts]),
            tuple(offsets.tolist()),
        )

    @property
    def num_agents(self) -> int:
        """The number of agents n."""
        return len(self.offsets) - 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of samples of each agent."""
        return tuple(np.diff(self.offsets).tolist())


def _check_parts(parts: Sequence[tuple[Tensor, Tensor]]) -> None:
    if not parts:
        raise InvalidArgumentError("data must be that of at least one agent, found none")
    for agent, pair in enumerate(parts):
        # Checked agent by agent: equal totals could hide samples with another agent's targets.
        targets = f"targets of agent {agent}"
        require_length(targets, len(pair[1]), len(pair[0]), per="sample")
        for name, values, first in zip(("inputs", "targets"), pair, parts[0], strict=True):
            if values.shape[1:] != first.shape[1:]:
                raise InvalidArgumentError(
                    f"{name} of all agents must have one shape, found {tuple(first.shape[1:])} of "
                    f"agent 0 and {tuple(values.shape[1:])} of agent {agent}"
                )


@dataclass(frozen=True, eq=False)
class Batch:
    """The mini-batches of one step, one row per cell; a cell is an agent in a seed's run.

    Attributes:
        inputs: shape (cells, batch, …).
        targets: shape (cells, batch, …).
        weights: shape (cells, batch): the weight of each sample, equal within a cell. Padding comes
            last and has weight 0. In float64 where samples are clipped.
        is_average: whether all weights are 1/batch, so that a plain mean suffices.
        most_samples: a public bound on the number of samples in a cell.
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

    No sample occurs twice in a batch, because sample-level sensitivity counts it once. Without
    ``rates`` each agent goes through its data in passes: batches of fixed size in a random order,
    which is new in each pass. The few samples left over wait for the next pass, so none is in two
    batches of one pass. With ``rates`` each sample is in a batch with its agent's rate,
    independently of all others (Poisson); batches differ in size and may be empty, and the divisor
    is fixed.

    Args:
        data: the samples of all agents.
        batch_size: samples per mini-batch, or the whole data of each agent if None. An agent with
            fewer samples takes all of them in every batch.
        choices: the source of randomness of each run.
        rates: of each agent, for Poisson sampling; then ``batch_size`` is the divisor.
        divide_by_batch_size: give every sample weight 1/batch_size even if an agent has fewer
            samples, as sample-level accounting assumes; otherwise a batch is averaged.
        hides_counts: pad Poisson batches to a public width, so that neither the time of a step
            nor the last bits of a gradient, which depend on the shape of its batch, show how many
            samples were drawn.
    """

    def __init__(
        self,
        data: AgentData,
        *,
        batch_size: int | None,
        choices: Sequence[Choices],
        rates: Sequence[float] | None = None,
        divide_by_batch_size: bool = False,
        hides_counts: bool = False,
    ) -> None:
        self._data, self._choices, self._sizes = data, tuple(choices), data.sizes
        largest = max(self._sizes)
        self._batch_size = largest if batch_size is None else min(batch_size, largest)
        # A fixed divisor bounds the weight of one sample by 1/B, for agents with fewer too.
        self._divisor = batch_size if divide_by_batch_size else None
        # A Poisson batch exceeds this with a probability far below 2⁻¹⁴⁴, because an agent has at
        # most MOST_SAMPLES times batch_size / sampling_rate samples.
        size = batch_size or largest
        self._most = size if rates is None else int((MOST_SAMPLES + 1) * size) + 2000
        if self._divisor is not None and self._most > _MOST_SUMMED:
            raise InvalidArgumentError(
                f"batch_size must be smaller, found {batch_size:,}: sums of {self._most:,} clipped "
                f"samples are too inaccurate even in float64 (at most {_MOST_SUMMED:,})"
            )
        # With rates, one limit for each sample of all agents; None draws batches in passes.
        self._limits: FloatArray | None = None
        self._step_width = 1
        if rates is not None:
            rounded = [round_rate_down(rate) for rate in rates]
            self._limits = np.repeat(rounded, self._sizes)
            if hides_counts:
                pairs = zip(self._sizes, rounded, strict=True)
                self._step_width = max(usual_width(size, rate) for size, rate in pairs)
        # Padding is one of the agent's own samples: a model that mixes samples must not see those
        # of another agent.
        self._padding = np.array([*data.offsets[:-1]] * len(self._choices), np.int64)[:, None]
        # The order of the present pass of each (run, agent), with the number of that pass: drawing
        # the permutation again for each batch of the pass would cost O(m) per step.
        self._orders: dict[tuple[int, int], tuple[int, IntArray]] = {}
        self._whole: Batch | None = None
        self._cached_weights: Tensor | None = None

    def draw(self, number: int) -> Batch:
        """Return the batches of a number, from 0: of a step, or of a release."""
        if self._limits is not None or self._batch_size < max(self._sizes):
            return self._draw(number)
        # Every batch is an agent's whole data, the same at every step.
        if self._whole is None:
            self._whole = self._draw(number)
        return self._whole

    def draw_each(self, number: int) -> list[Batch]:
        """Return the batches of a number one by one, each padded by itself, one for each cell.

        An agent's gradient then does not depend, not even in its last bits, on the number of
        samples in another agent's batch.
        """
        cells = zip(self.choose_rows(number), self._padding, strict=True)
        return [self._pad([own], padding[None]) for own, padding in cells]

    def choose_rows(self, number: int) -> list[IntArray]:
        """Return the rows of ``data`` that are in the batch of each cell."""
        if self._limits is not None:
            limits = self._limits
            return [rows for each in self._choices for rows in self._toss(each, number, limits)]
        runs, agents = range(len(self._choices)), range(self._data.num_agents)
        # Run-major, like ``_padding`` and the cells of a ``Batch``.
        return [self._next_in_order(run, agent, number) for run in runs for agent in agents]

    def _draw(self, number: int) -> Batch:
        return self._pad(self.choose_rows(number), self._padding)

    def _pad(self, rows: Sequence[IntArray], padding: IntArray) -> Batch:
        counts = np.array([len(own) for own in rows])
        # Multiples of a width that few batches exceed: see ``hides_counts``. An empty Poisson batch
        # becomes one sample of weight 0, because tasks need at least one row.
        width = -(-max(int(counts.max()), 1) // self._step_width) * self._step_width
        table = np.empty((len(rows), width), np.int64)
        # Samples come first in a row and padding last, which is what ``_weights`` counts on.
        table[:] = padding
        for cell, own in enumerate(rows):
            table[cell, : len(own)] = own
        return self._gather(table, counts)

    def _next_in_order(self, run: int, agent: int, number: int) -> IntArray:
        size = self._sizes[agent]
        batch = min(self._batch_size, size)
        if batch == size:
            return np.arange(size) + self._data.offsets[agent]
        # A pass is a permutation cut into whole batches. It depends on its own number alone, so
        # that any batch can be drawn without those before it.
        passes, place = divmod(number, size // batch)
        known = self._orders.get((run, agent))
        if known is None or known[0] != passes:
            order = self._choices[run].draw_order(agent, passes, size=size)
            known = (passes, order + self._data.offsets[agent])
            self._orders[run, agent] = known
        return known[1][place * batch : (place + 1) * batch]

    def _toss(self, choices: Choices, number: int, limits: FloatArray) -> list[IntArray]:
        # Coins are of all agents at once. Row numbers increase, so that the offsets cut them into
        # the agents' own parts.
        taken = np.flatnonzero(choices.draw_coins(number, self._sizes) < limits)
        cuts = np.searchsorted(taken, self._data.offsets[1:-1])
        return np.split(taken, cuts)

    def _gather(self, table: IntArray, counts: IntArray) -> Batch:
        data, (cells, width) = self._data, table.shape
        index = torch.from_numpy(table.reshape(-1)).to(data.inputs.device)
        inputs = data.inputs.index_select(0, index)
        targets = data.targets.index_select(0, index)
        is_full = int(counts.min()) == width
        return Batch(
            inputs.view(cells, width, *inputs.shape[1:]),
            targets.view(cells, width, *targets.shape[1:]),
            self._full_weights(table.shape) if is_full else self._weights(counts, width),
            # With a fixed divisor the weights are 1/B. They are an average only if B samples are
            # there.
            is_full and self._divisor in (None, width),
            self._most,
        )

    def _full_weights(self, shape: tuple[int, int]) -> Tensor:
        """Return weights of batches without padding, cached because most steps use them."""
        if self._cached_weights is None or self._cached_weights.shape != shape:
            self._cached_weights = self._weights(np.full(shape[0], shape[1]), shape[1])
        return self._cached_weights

    def _weights(self, counts: IntArray, width: int) -> Tensor:
        inputs = self._data.inputs
        # Shape (cells, width): row k has counts[k] ones, then zeros.
        present = np.arange(width) < counts[:, None]
        weights = present / (self._divisor or np.maximum(counts, 1)[:, None])
        real = inputs.dtype if inputs.is_floating_point() else torch.get_default_dtype()
        if self._divisor is not None:
            real = torch.float64  # in float32 1/B could round up to more than accounting assumes
        return torch.from_numpy(weights).to(device=inputs.device, dtype=real)
