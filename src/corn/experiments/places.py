"""One place of a training panel: pilot seeds choose step sizes, further seeds run at those only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from corn.experiments.cells import Results, TrainingCell
from corn.experiments.methods import MethodSpec
from corn.learn.schedule import make_schedule

Run: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """The cells of one place of the horizontal axis.

    Attributes:
        x: where.
        pilots: every method at every step size, a block of seeds each; they choose step sizes.
        repeats: further blocks of seeds, which run each method at its chosen step size only, on the
            random numbers that they would have at every size.
    """

    x: float
    pilots: tuple[TrainingCell, ...]
    repeats: tuple[tuple[int, ...], ...] = ()

    @property
    def methods(self) -> tuple[MethodSpec, ...]:
        """The lines that have this place."""
        return self.pilots[0].methods

    @property
    def pilot_seeds(self) -> tuple[int, ...]:
        """Those that choose, in order."""
        return tuple(seed for cell in self.pilots for seed in cell.seeds)

    @property
    def seeds(self) -> tuple[int, ...]:
        """All of them, in order."""
        return (*self.pilot_seeds, *(seed for block in self.repeats for seed in block))

    def cells(self, results: Results) -> tuple[TrainingCell, ...]:
        """What must be computed: repeats are known once every pilot has a result."""
        if not self._has_pilots(results):
            return self.pilots
        return (*self.pilots, *self._repeat(self.choose(results)))

    def forecast(self, results: Results) -> tuple[TrainingCell, ...]:
        """The same, but for repeats not known yet: as if all methods chose one step size.

        Other choices cost the same, in more cells.
        """
        if self._has_pilots(results):
            return self.cells(results)
        guess = next(iter(self._step_sizes))
        return (*self.pilots, *self._repeat({method.name: guess for method in self.methods}))

    def choose(self, results: Results) -> dict[str, str]:
        """The step size of each method that has one, by its name, from the pilots alone."""
        runs, count = _join_runs(self.pilots, results), len(self.pilot_seeds)
        best = {method.name: choose_step_size(runs, method.name, count) for method in self.methods}
        return {name: step_size for name, step_size in best.items() if step_size is not None}

    def runs(self, results: Results) -> list[Run]:
        """Everything that was measured here, pilots first."""
        return _join_runs(self.cells(results), results)

    def describe_pilots(self) -> str:
        """Which seeds chose step sizes; nothing where all of them did."""
        if not self.repeats:
            return ""
        count = len(self.pilot_seeds)
        return f"chosen on {count} pilot seed{'s' * (count > 1)} of {len(self.seeds)}"

    def describe_choice(self, chosen: str | None, broken: Sequence[int]) -> str:
        """The step size of a method, how it was chosen, and at which seeds it broke down then."""
        if chosen is None:
            return "every step size broke down" + (" on the pilot seeds" if self.repeats else "")
        sizes = self._step_sizes
        at_edge = len(sizes) > 1 and sizes[chosen] in (min(sizes.values()), max(sizes.values()))
        parts = [f"step size {chosen}", "the end of the grid" if at_edge else ""]
        seeds = " and ".join(map(str, broken))
        parts += [self.describe_pilots(), f"broke down at seed {seeds}" if broken else ""]
        return ", ".join(filter(None, parts))

    @property
    def _step_sizes(self) -> dict[str, float]:
        """η₁ by what a run calls its step size."""
        first = self.pilots[0]
        return {make_schedule(eta, first.schedule).describe(): eta for eta in first.step_sizes}

    def _has_pilots(self, results: Results) -> bool:
        return all(cell in results for cell in self.pilots)

    def _repeat(self, choices: Mapping[str, str]) -> Iterator[TrainingCell]:
        """Cells of the repeats: methods that chose the same step size run together."""
        for seeds in self.repeats:
            for name, eta in self._step_sizes.items():
                methods = tuple(own for own in self.methods if choices.get(own.name) == name)
                if methods:
                    yield replace(self.pilots[0], methods=methods, step_sizes=(eta,), seeds=seeds)


def choose_step_size(runs: Sequence[Run], method: str, num_seeds: int) -> str | None:
    """The step size with the least mean validation loss; one that broke down once is out.

    Where there is nothing to validate on, there is only one to choose from.
    """
    losses: dict[str, list[float]] = {}
    for run in runs:
        if run["method"] == method:
            losses.setdefault(run["step_size"], []).append(run.get("validation_loss", 0.0))
    whole = {size: float(np.mean(own)) for size, own in losses.items() if len(own) == num_seeds}
    return min(whole, key=whole.__getitem__) if whole else None


def _join_runs(cells: Sequence[TrainingCell], results: Results) -> list[Run]:
    return [run for cell in cells for run in results[cell]["runs"]]
