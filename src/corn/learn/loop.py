"""The state of a sweep between steps: models, measurements, and the runs that broke down."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from corn.errors import InvalidArgumentError
from corn.learn.checkpoint import Checkpoint, fingerprint_of
from corn.learn.method import Trial
from corn.learn.metrics import Row, choose_evaluation_steps, is_exploding, measure
from corn.learn.problem import TrainingProblem
from corn.learn.result import Result, blank_stopped
from corn.learn.settings import SweepSettings
from corn.learn.simulation import Simulation
from corn.learn.step import StepStatistics
from corn.topology import Network

_EXPLOSION = 1e6


@final
class SweepLoop:
    """Advances all runs step by step, measures at chosen steps, stops runs that break down.

    See :func:`corn.learn.sweep.run_sweep` for the arguments.
    """

    def __init__(
        self,
        problem: TrainingProblem,
        network: Network,
        trials: Sequence[Trial],
        *,
        settings: SweepSettings,
        evaluate_at: Sequence[int] | None = None,
        max_train_samples: int | None = None,
    ) -> None:
        _check_names(trials)
        self._problem, self._network = problem, network
        self._trials, self._settings = tuple(trials), settings
        self._data, self._parts = problem.place(settings, max_train_samples=max_train_samples)
        self._steps = choose_evaluation_steps(evaluate_at, settings.num_steps)
        self._simulation = Simulation(
            problem.task, self._data, network, self._trials, settings=settings
        )
        self._rows: list[Row] = []
        self._stopped: dict[tuple[int, int], str] = {}
        if 0 in self._steps:
            self._measure(None)

    @property
    def step(self) -> int:
        """How many steps are done."""
        return self._simulation.step

    @cached_property
    def fingerprint(self) -> str:
        """Of everything the result depends on."""
        return fingerprint_of(
            self._problem.task,
            self._data,
            self._network,
            self._trials,
            settings=self._settings,
            parts=self._parts,
        )

    def advance(self) -> list[Row]:
        """Run one step, with the cool-down after the last; return its measurements, if any."""
        due = self.step + 1 in self._steps
        statistics = self._simulation.advance(observe=due)
        broken = self._simulation.find_broken()
        if broken is not None:
            self._stop(broken, "its gradients are not finite")
        if self.step == self._settings.num_steps:
            self._simulation.cool_down()
        return self._measure(statistics) if due else []

    def checkpoint(self) -> Checkpoint:
        """The present state."""
        return Checkpoint(
            self.fingerprint,
            self.step,
            self._simulation.parameters.cpu(),
            self._simulation.alive,
            list(self._rows),
            dict(self._stopped),
        )

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a state of this sweep."""
        self._simulation.restore(checkpoint.step, checkpoint.parameters, checkpoint.alive)
        self._rows, self._stopped = list(checkpoint.rows), dict(checkpoint.stopped)

    def finish(self) -> Result:
        """What was reached; if that is not the last step, it is measured as it is."""
        complete = self.step == self._settings.num_steps
        if not complete and (not self._rows or self._rows[-1]["step"] != self.step):
            self._measure(None)
        return Result(
            self._trials,
            self._settings.seeds,
            blank_stopped(self._simulation.parameters, list(self._stopped)),
            tuple(self._rows),
            self.step,
            "complete" if complete else "interrupted",
            {self._name(run): message for run, message in self._stopped.items()},
            self._problem.notes,
            self._settings.noise_keys != "secret",
            tuple(self._describe_broken()),
        )

    def _describe_broken(self) -> list[str]:
        """Say which runs had gradients that are not finite and were taken as zero."""
        counts = self._simulation.num_broken
        return [
            f"{', '.join(map(str, self._name((s, v))))}: {int(counts[s, v])} gradients were not "
            "finite and counted as zero; try a smaller step size"
            for s, v in torch.nonzero(counts).tolist()
        ]

    def _measure(self, statistics: StepStatistics | None) -> list[Row]:
        rows = measure(
            self._problem.task,
            self._simulation.parameters,
            self._trials,
            seeds=self._settings.seeds,
            step=self.step,
            parts=self._parts,
            statistics=statistics,
            is_simulated=self._settings.noise_keys != "secret",
        )
        runs = [(s, v) for s in range(len(self._settings.seeds)) for v in range(len(self._trials))]
        first = {self._key(row): row for row in reversed(self._rows)}
        # Whether a release goes on may depend on its models, which are public, and on nothing else.
        judged = () if self._settings.noise_keys == "secret" else tuple(self._parts)
        exploding = torch.zeros_like(self._simulation.alive)
        for run, row in zip(runs, rows, strict=True):
            before = first.get(self._key(row))
            exploding[run] = is_exploding(row, before, limit=_EXPLOSION, measured=judged)
        self._stop(exploding & self._simulation.alive, "its loss exploded or is not a number")
        news = [row for run, row in zip(runs, rows, strict=True) if run not in self._stopped]
        self._rows += news
        return news

    def _stop(self, runs: Tensor, reason: str) -> None:
        for s, v in torch.nonzero(runs & self._simulation.alive).tolist():
            self._stopped[s, v] = f"stopped at step {self.step}: {reason}; try a smaller step size"
        self._simulation.stop_runs(runs)

    def _name(self, run: tuple[int, int]) -> tuple[str, str, int]:
        trial = self._trials[run[1]]
        return (
            trial.method.name,
            trial.schedule.describe(),
            self._settings.seeds[run[0]],
        )

    def _key(self, row: Row) -> tuple[object, ...]:
        return row["contender"], row["step_size"], row["seed"]


def _check_names(trials: Sequence[Trial]) -> None:
    names = [trial.describe() for trial in trials]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise InvalidArgumentError(
            f"trials must differ in name or step size, found twice: {'; '.join(repeated)}"
        )
