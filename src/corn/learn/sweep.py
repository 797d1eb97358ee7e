"""Sweeps: every trial for every seed, step by step, with measurements and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from corn.checks import require_count
from corn.errors import InvalidArgumentError
from corn.learn.checkpoint import (
    SweepCheckpoint,
    fingerprint_sweep,
    load_sweep,
    save_sweep,
)
from corn.learn.method import Trial
from corn.learn.metrics import Row, choose_evaluation_steps, choose_measured, has_diverged, measure
from corn.learn.monitor import ProgressBar, catch_interruption
from corn.learn.problem import TrainingProblem
from corn.learn.result import PUBLIC_SEEDS, Breakdown, BreakdownCause, Result
from corn.learn.settings import SweepSettings
from corn.learn.simulation import Simulation
from corn.learn.step import StepStatistics
from corn.threads import own_threads
from corn.topology import Network


def run_sweep(
    problem: TrainingProblem,
    network: Network,
    trials: Sequence[Trial],
    *,
    settings: SweepSettings,
    evaluate_at: Sequence[int] | None = None,
    max_train_samples: int | None = 10_000,
    checkpoint: Path | str | None = None,
    checkpoint_every: int = 1000,
    resume: bool = False,
    show_progress: bool = True,
    on_rows: Callable[[Sequence[Row]], None] | None = None,
) -> Result:
    """Run every trial for every seed, all together, with common random numbers.

    Ctrl-C ends the sweep after the present step and returns the result so far. A run whose
    gradients or loss are not finite, or whose loss diverges, is stopped; the others continue.

    Args:
        problem: model, loss and data.
        network: the agents and their mixing matrix.
        trials: methods with step-size schedules.
        settings: steps, batches, seeds, mixing, precision and device.
        evaluate_at: steps to measure at; by default 0, the last, and nineteen between.
        max_train_samples: number of evenly spaced samples to measure the training loss on; None
            for all.
        checkpoint: a file for the state, written every ``checkpoint_every`` steps and at the end.
        checkpoint_every: number of steps between checkpoints.
        resume: continue from ``checkpoint`` if that file exists.
        show_progress: draw a progress bar if stderr is a terminal.
        on_rows: called with the measurements of each step that is measured.
    """
    if resume and settings.noise_keys == "secret":
        # The steps after the checkpoint were released once already. New noise on the same
        # gradients would be a second release, which the budget does not count.
        raise InvalidArgumentError(
            "resume must be False with secret keys: steps that run again would spend more than the "
            "budget; corn launch keeps a ledger of releases and can resume"
        )
    file = _CheckpointFile(None if checkpoint is None else Path(checkpoint), checkpoint_every)
    # Threads gain little on products of this size, and lose much on a busy machine.
    with own_threads():
        loop = SweepLoop(
            problem,
            network,
            trials,
            settings=settings,
            evaluate_at=evaluate_at,
            max_train_samples=max_train_samples,
        )
        if resume:
            file.load_into(loop)
        bar = ProgressBar(settings.num_steps, done=loop.step, show=show_progress)
        with catch_interruption() as interruption, bar:
            while loop.step < settings.num_steps and not interruption.requested:
                rows = loop.advance()
                bar.advance(rows)
                if rows and on_rows:
                    on_rows(rows)
                if loop.step % file.every == 0:
                    file.save(loop)
        # Also after Ctrl-C, so that the same command resumes where this one stopped.
        file.save(loop)
        return loop.finish()


@final
class SweepLoop:
    """The state of a sweep between steps: models, measurements, and the runs that broke down.

    See :func:`run_sweep` for the arguments.
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
        self._stopped: dict[tuple[int, int], Breakdown] = {}
        if 0 in self._steps:
            self._measure(None)

    @property
    def step(self) -> int:
        """The number of completed steps."""
        return self._simulation.step

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything that the result depends on."""
        return fingerprint_sweep(
            self._problem.task,
            self._data,
            self._network,
            self._trials,
            settings=self._settings,
            parts=self._parts,
        )

    def advance(self) -> list[Row]:
        """Run one step, with the cool-down after the last; return its measurements, if any."""
        # Statistics of a step must be asked for before it runs.
        due = self.step + 1 in self._steps
        statistics = self._simulation.advance(observe=due)
        broken = self._simulation.find_broken()
        if broken is not None:
            self._stop(broken, "gradients-not-finite")
        if self.step == self._settings.num_steps:
            # Within the last step, so that its measurement is of the models that agents keep.
            self._simulation.cool_down()
        return self._measure(statistics) if due else []

    def checkpoint(self) -> SweepCheckpoint:
        """Return the present state."""
        return SweepCheckpoint(
            fingerprint=self.fingerprint,
            step=self.step,
            parameters=self._simulation.parameters.cpu(),
            memory=None if self._simulation.memory is None else self._simulation.memory.cpu(),
            alive=self._simulation.alive,
            rows=list(self._rows),
            stopped={run: (own.step, own.cause) for run, own in self._stopped.items()},
        )

    def restore(self, checkpoint: SweepCheckpoint) -> None:
        """Continue from a state of this sweep."""
        self._simulation.restore(
            checkpoint.step, checkpoint.parameters, checkpoint.alive, checkpoint.memory
        )
        self._rows = list(checkpoint.rows)
        self._stopped = {run: Breakdown(*own) for run, own in checkpoint.stopped.items()}

    def finish(self) -> Result:
        """Return the result; an interrupted sweep is measured once more at its present step."""
        complete = self.step == self._settings.num_steps
        if not complete and (not self._rows or self._rows[-1]["step"] != self.step):
            self._measure(None)
        # Stopped runs stay at zero in the simulation, which would pass for a model.
        parameters = self._simulation.parameters.clone()
        for s, v in self._stopped:
            parameters[s, :, v] = math.nan
        # Exact sums have one model for all agents.
        parameters = parameters.expand(-1, self._network.num_agents, -1, -1)
        return Result(
            trials=self._trials,
            seeds=self._settings.seeds,
            # (seeds, agents, trials, d) becomes (seeds · trials, agents, d).
            parameters=parameters.transpose(1, 2).flatten(0, 1),
            rows=tuple(self._rows),
            num_steps=self.step,
            status="complete" if complete else "interrupted",
            stopped={self._name(run): breakdown for run, breakdown in self._stopped.items()},
            notes=self._problem.notes + self._note_measured(),
            simulation=self._simulated,
            private_notes=tuple(self._describe_broken()),
        )

    @property
    def _simulated(self) -> str:
        """Why ε is simulated; empty if it is a promise."""
        seeds = "" if self._settings.noise_keys == "secret" else PUBLIC_SEEDS
        return "; ".join(filter(None, (seeds, self._problem.simulation)))

    def _note_measured(self) -> tuple[str, ...]:
        n = self._network.num_agents
        count = len(choose_measured(n))
        if count == n or self._network.mixing == "sum":
            return ()
        return (f"Scores of own models are of {count} agents at equal distances, of {n:,}.",)

    def _describe_broken(self) -> list[str]:
        counts = self._simulation.num_broken
        return [
            f"{', '.join(map(str, self._name((s, v))))}: {int(counts[s, v])} gradients were not "
            "finite and counted as zero; try a smaller step size"
            for s, v in torch.nonzero(counts).tolist()
        ]

    def _measure(self, statistics: StepStatistics | None) -> list[Row]:
        """Measure all runs, stop those that diverged, and return the rows of the others."""
        rows = measure(
            self._problem.task,
            self._simulation.parameters,
            self._trials,
            seeds=self._settings.seeds,
            step=self.step,
            parts=self._parts,
            statistics=statistics,
            is_simulated=bool(self._simulated),
        )
        runs = [(s, v) for s in range(len(self._settings.seeds)) for v in range(len(self._trials))]
        # Reversed, so that the earliest row of each run is the one that stays.
        first = {_run_of(row): row for row in reversed(self._rows)}
        # Stopping a release is itself an output. It may depend on the models, which are public, and
        # not on losses, which would reveal private data without noise.
        judged = () if self._settings.noise_keys == "secret" else tuple(self._parts)
        diverged = torch.zeros_like(self._simulation.alive)
        for run, row in zip(runs, rows, strict=True):
            diverged[run] = has_diverged(row, first.get(_run_of(row)), measured=judged)
        self._stop(diverged & self._simulation.alive, "loss-diverged")
        # Rows of a run end before it broke down: a table has no losses of models that are zero.
        kept = [row for run, row in zip(runs, rows, strict=True) if run not in self._stopped]
        self._rows += kept
        return kept

    def _stop(self, runs: Tensor, cause: BreakdownCause) -> None:
        for s, v in torch.nonzero(runs & self._simulation.alive).tolist():
            self._stopped[s, v] = Breakdown(self.step, cause)
        self._simulation.stop_runs(runs)

    def _name(self, run: tuple[int, int]) -> tuple[str, str, int]:
        seed, trial = self._settings.seeds[run[0]], self._trials[run[1]]
        return trial.method.name, trial.schedule.describe(), seed


def _run_of(row: Row) -> tuple[object, ...]:
    return row["contender"], row["step_size"], row["seed"]


def _check_names(trials: Sequence[Trial]) -> None:
    # Rows, files and checkpoints identify a run by these names.
    names = [trial.describe() for trial in trials]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise InvalidArgumentError(
            f"trials must differ in name or step size, found twice: {'; '.join(repeated)}"
        )


@dataclass(frozen=True)
class _CheckpointFile:
    """The file for checkpoints, if any."""

    path: Path | None
    every: int

    def __post_init__(self) -> None:
        require_count("checkpoint_every", self.every)

    def load_into(self, loop: SweepLoop) -> None:
        if self.path is not None and self.path.exists():
            # No file is a fresh start, so that one command both begins and resumes.
            loop.restore(load_sweep(self.path, fingerprint=loop.fingerprint))

    def save(self, loop: SweepLoop) -> None:
        if self.path is not None:
            save_sweep(loop.checkpoint(), self.path)
