"""Sweeps: every trial for every seed, step by step, with measurements and traces."""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, final

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from corn.checks import require
from corn.learn.mechanism import Trial
from corn.learn.metrics import (
    PUBLIC_SEEDS,
    TRACED,
    Result,
    Row,
    choose_evaluation_steps,
    choose_measured,
    measure,
    name_of,
    spread_of,
)
from corn.learn.problem import SweepSettings, TrainingProblem
from corn.learn.simulation import Simulation
from corn.learn.step import StepStatistics
from corn.threads import own_threads
from corn.topology import Network


class Interruption:
    """A record of whether Ctrl-C was pressed."""

    requested = False


@contextmanager
def catch_interruption() -> Iterator[Interruption]:
    """Turn the first Ctrl-C in the main thread into a request to stop; a second interrupts."""
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return

    # The loop stops between steps, where models and measurements agree.
    def request(number: int, frame: FrameType | None) -> None:
        # The second Ctrl-C raises ``KeyboardInterrupt``, in case a step hangs.
        if interruption.requested:
            signal.default_int_handler(number, frame)
        interruption.requested = True

    before = signal.signal(signal.SIGINT, request)
    try:
        yield interruption
    finally:
        signal.signal(signal.SIGINT, before)


# A loss that grew by this factor will not come back; one that only fluctuates stays far below.
_DIVERGENCE = 1e6
# Seconds between lines of progress where there is no terminal, such as in the log of a cluster.
_SECONDS_BETWEEN_LINES = 30.0


@contextmanager
def _showing_progress(num_steps: int, num_runs: int) -> Iterator[Callable[[], None]]:
    """Yield a function that counts a step, and show the steps so far and the time left."""
    what = f"training {num_runs} {'run' if num_runs == 1 else 'runs'}"
    console = Console(stderr=True)
    if console.is_terminal:
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task(what, total=num_steps)
            yield lambda: bar.advance(task)
        return
    started = printed = time.monotonic()
    steps = 0

    def count() -> None:
        nonlocal printed, steps
        steps += 1
        now = time.monotonic()
        if now - printed >= _SECONDS_BETWEEN_LINES and steps < num_steps:
            printed = now
            left = timedelta(seconds=round((now - started) / steps * (num_steps - steps)))
            sys.stderr.write(f"{what}: step {steps} of {num_steps}, {left} left\n")

    yield count


def run_sweep(
    problem: TrainingProblem,
    network: Network,
    trials: Sequence[Trial],
    *,
    settings: SweepSettings,
    evaluate_at: Sequence[int] | None = None,
    max_train_samples: int | None = 10_000,
    show_progress: bool = True,
    on_step: Callable[[Sequence[Row]], None] | None = None,
) -> Result:
    """Run every trial for every seed, all together, with common random numbers.

    Ctrl-C ends the sweep after the present step and returns the result so far. A run whose
    gradients or loss are not finite, or whose loss diverges, is stopped; the others continue.

    Args:
        problem: model, loss and data.
        network: the agents and their mixing matrix.
        trials: mechanisms with step-size schedules.
        settings: steps, batches, seeds, mixing, precision and device.
        evaluate_at: steps to measure at; by default 0, the last, and nineteen between.
        max_train_samples: number of evenly spaced samples to measure the training loss on; None
            for all.
        show_progress: show the steps so far and the time left on stderr: a bar on a terminal, and
            elsewhere a line every 30 seconds.
        on_step: a function that gets the trace of each step, one row for each run, with the columns
            of `TRACED`. Traces are of gradients without noise: they are private, for simulations
            only, and refused with secret keys.
    """
    is_public = on_step is None or settings.noise_keys != "secret"
    # A trace has norms of gradients and of noise, which no ε covers.
    require(is_public, "on_step", "None with secret keys (secure=True)", "a function")
    shown = _showing_progress(settings.num_steps, len(trials) * len(settings.seeds))
    hidden: Any = nullcontext(lambda: None)
    # Threads gain little on products of this size, and lose much on a busy machine.
    with (
        own_threads(),
        catch_interruption() as interruption,
        shown if show_progress else hidden as count_step,
    ):
        loop = SweepLoop(
            problem, network, trials, settings, evaluate_at, max_train_samples, on_step
        )
        while loop.step < settings.num_steps and not interruption.requested:
            loop.advance()
            count_step()
        return loop.finish()


@final
@dataclass(eq=False, repr=False)
class SweepLoop:
    """The state of a sweep between steps; see :func:`run_sweep` for the arguments."""

    problem: TrainingProblem
    network: Network
    trials: Sequence[Trial]
    settings: SweepSettings
    evaluate_at: Sequence[int] | None = None
    max_train_samples: int | None = None
    on_step: Callable[[Sequence[Row]], None] | None = None

    def __post_init__(self) -> None:
        settings, problem = self.settings, self.problem
        self._runs = {
            (s, v): (*name_of(trial), seed)
            for s, seed in enumerate(settings.seeds)
            for v, trial in enumerate(self.trials)
        }
        counts = Counter(f"{name}, step size {size}" for name, size in map(name_of, self.trials))
        repeated = sorted(name for name, count in counts.items() if count > 1)
        require(not repeated, "trials", "different in name or step size", "; ".join(repeated))
        data, self._parts = problem.place(settings, max_train_samples=self.max_train_samples)
        self._steps = choose_evaluation_steps(self.evaluate_at, settings.num_steps)
        self._simulation = Simulation(
            problem.task, data, self.network, self.trials, settings=settings
        )
        # The reason why ε is simulated; empty if it is a promise.
        seeds = "" if settings.noise_keys == "secret" else PUBLIC_SEEDS
        self._simulated = "; ".join(filter(None, (seeds, problem.simulation)))
        self._rows: list[Row] = []
        self._first: dict[tuple[str, str, int], Row] = {}
        self._stopped: dict[tuple[int, int], str] = {}
        if 0 in self._steps:
            self._measure(None)

    @property
    def step(self) -> int:
        """The number of completed steps."""
        return self._simulation.step

    def advance(self) -> None:
        """Run one step, with the cool-down after the last, and measure if a measurement is due."""
        # Statistics of a step must be asked for before it runs.
        due = self.step + 1 in self._steps
        statistics = self._simulation.advance(observe=due or self.on_step is not None)
        if self.on_step is not None and statistics is not None:
            self.on_step(self._trace(statistics))
        self._stop(self._simulation.broken, "its gradients are not finite")
        if self.step == self.settings.num_steps:
            # Within the last step, so that its measurement is of the models that agents keep.
            self._simulation.cool_down()
        if due:
            self._measure(statistics)

    def finish(self) -> Result:
        """Return the result; an interrupted sweep is measured once more at its present step."""
        complete = self.step == self.settings.num_steps
        if not complete and (not self._rows or self._rows[-1]["step"] != self.step):
            self._measure(None)
        # Stopped runs stay at zero in the simulation, which would pass for a model.
        parameters = self._simulation.parameters.clone()
        for s, v in self._stopped:
            parameters[s, :, v] = math.nan
        n = self.network.num_agents
        scored = len(choose_measured(n))
        notes = [f"Scores of own models are of {scored} agents at equal distances, of {n:,}."]
        counts = self._simulation.num_broken
        return Result(
            trials=tuple(self.trials),
            seeds=self.settings.seeds,
            # (seeds, agents, trials, d) becomes (seeds · trials, agents, d).
            parameters=parameters.expand(-1, n, -1, -1).transpose(1, 2).flatten(0, 1),
            rows=tuple(self._rows),
            num_steps=self.step,
            status="complete" if complete else "interrupted",
            stopped={self._runs[run]: why for run, why in self._stopped.items()},
            notes=tuple(notes if scored < n and self.network.mixing != "sum" else ()),
            simulation=self._simulated,
            private_notes=tuple(
                f"{', '.join(map(str, name))}: {int(counts[run])} gradients were not finite and "
                "counted as zero; try a smaller step size"
                for run, name in self._runs.items()
                if counts[run]
            ),
            cooldown_steps=self.settings.cooldown_steps if complete else 0,
        )

    def _trace(self, statistics: StepStatistics) -> list[Row]:
        """Return the columns of `TRACED` for each run."""
        columns = (
            *vars(statistics).values(),
            self._simulation.measure_noise(of_average=True),
            spread_of(self._simulation.parameters),
        )
        rows: list[Row] = []
        for run, name in self._runs.items():
            ratio = self.trials[run[1]].mechanism.disagreement_ratio
            values = (float(column[run]) for column in columns)
            facts: Sequence[Any] = (*name, self.step, *values, math.nan if ratio is None else ratio)
            rows.append(dict(zip(TRACED, facts, strict=True)))
        return rows

    def _measure(self, statistics: StepStatistics | None) -> None:
        """Measure all runs, stop those that diverged, and keep the rows of the others."""
        rows = measure(
            self.problem.task,
            self._simulation.parameters,
            tuple(self.trials),
            seeds=self.settings.seeds,
            step=self.step,
            parts=self._parts,
            statistics=statistics,
            is_simulated=bool(self._simulated),
        )
        # Stopping a release is itself an output. It may depend on the models, which are public, and
        # not on losses, which would reveal private data without noise.
        judged = () if self.settings.noise_keys == "secret" else tuple(self._parts)
        diverged = torch.zeros_like(self._simulation.alive)
        for (run, name), row in zip(self._runs.items(), rows, strict=True):
            diverged[run] = _has_diverged(row, self._first.get(name), measured=judged)
        self._stop(diverged, "its loss diverged")
        # Rows of a run end before it broke down: a table has no losses of models that are zero.
        for (run, name), row in zip(self._runs.items(), rows, strict=True):
            if run not in self._stopped:
                self._rows.append(row)
                self._first.setdefault(name, row)

    def _stop(self, runs: Tensor, cause: str) -> None:
        for s, v in torch.nonzero(runs & self._simulation.alive).tolist():
            self._stopped[s, v] = f"stopped at step {self.step}: {cause}; try a smaller step size"
        if bool(runs.any()):
            self._simulation.stop_runs(runs)


def _has_diverged(row: Row, first: Row | None, *, measured: Iterable[str]) -> bool:
    """Return whether models are not finite, or a ``measured`` loss grew by 10⁶ or is NaN."""
    # The distance depends on models alone, which are public: a secret run may stop by it.
    if not math.isfinite(float(row["consensus_distance"])):
        return True
    for name in (f"{part}_loss" for part in measured):
        found = float(row[name])
        # At least 1: a loss that starts near zero may grow by any factor and still be small.
        start = 1.0 if first is None else max(1.0, float(np.nan_to_num(float(first[name]))))
        if not math.isfinite(found) or found > _DIVERGENCE * start:
            return True
    return False
