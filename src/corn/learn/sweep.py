"""Sweeps: every trial for every seed, step by step, with measurements and checkpoints."""

from __future__ import annotations

import hashlib
import json
import math
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from corn.checks import require_count
from corn.covariance.lattice import LatticeNoise
from corn.errors import FileFormatError, InvalidArgumentError
from corn.files import writing_whole
from corn.learn.batches import AgentData
from corn.learn.method import Method, Trial
from corn.learn.metrics import (
    PUBLIC_SEEDS,
    Breakdown,
    BreakdownCause,
    Result,
    Row,
    Samples,
    choose_evaluation_steps,
    choose_measured,
    has_diverged,
    measure,
)
from corn.learn.problem import SweepSettings, TrainingProblem
from corn.learn.simulation import Simulation
from corn.learn.step import StepStatistics, describe_optimizer
from corn.learn.tasks import HasFingerprint, Task
from corn.privacy.rounding import round_up
from corn.threads import own_threads
from corn.topology import Network


class ProgressBar:
    """A bar on stderr with steps, best loss, ε and time left, if stderr is a terminal.

    Args:
        num_steps: the total number of steps.
        done: the number of steps completed before, for a resumed run.
        show: False hides the bar on a terminal too.
    """

    def __init__(self, num_steps: int, *, done: int = 0, show: bool = True) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[news]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,  # leaves nothing behind among the results
            disable=not (show and console.is_terminal),
        )
        self._task = self._progress.add_task("", total=num_steps, completed=done, news="")

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self, rows: Sequence[Row] = ()) -> None:
        """Count one more step, and show its measurements, if any."""
        # Summaries of rows take time that nobody would see.
        if self._progress.disable:
            return
        if rows:
            self._progress.update(self._task, news=summarize_rows(rows))
        self._progress.advance(self._task)


def summarize_rows(rows: Sequence[Row]) -> str:
    """Return the least loss and the largest ε among rows, in a few words."""
    name = "test_loss" if any(not math.isnan(float(r["test_loss"])) for r in rows) else "train_loss"
    losses = [float(row[name]) for row in rows if not math.isnan(float(row[name]))]
    parts = [f"best {name.replace('_', ' ')} {min(losses):.4g}"] if losses else []
    # A simulated ε keeps its name on the screen too: it is no promise.
    for kind, label in (("epsilon", "ε"), ("simulated_epsilon", "simulated ε")):
        known = [row for row in rows if not math.isnan(float(row[kind]))]
        if known:
            # All methods of a sweep protect the same unit.
            largest = max(float(row[kind]) for row in known)
            parts.append(f"{label} ({known[0]['unit']}) {round_up(largest, 3)}")
    return ", ".join(parts)


class Interruption:
    """A record of whether Ctrl-C was pressed."""

    requested = False


@contextmanager
def catch_interruption() -> Iterator[Interruption]:
    """Turn the first Ctrl-C into a request, so that the present step finishes; a second interrupts.

    Outside the main thread, where Python delivers no signals, nothing is caught.
    """
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return

    # A signal can arrive in the middle of a step. The loop stops between steps, where models and
    # measurements agree.
    def request(number: int, frame: FrameType | None) -> None:
        # The second Ctrl-C raises ``KeyboardInterrupt``, in case a step hangs.
        if interruption.requested:
            signal.default_int_handler(number, frame)
        interruption.requested = True

    before = signal.signal(signal.SIGINT, request)
    try:
        yield interruption
    finally:
        # Callers of the library get their own handler back.
        signal.signal(signal.SIGINT, before)


# Increased when the fields change: an older file is then refused, not misread.
_VERSION = 5


@dataclass(frozen=True, eq=False)
class SweepCheckpoint:
    """The state of a sweep after ``step`` steps.

    Attributes:
        fingerprint: a hash of everything the result depends on; it fits no other sweep.
        parameters: shape (seeds, agents, trials, parameters).
        memory: the average of releases, of the same shape; None without momentum.
        optimizers: the state of each run's optimizer; None without.
        alive: the runs that continue, shape (seeds, trials).
        rows: the measurements so far.
        stopped: step and cause of each breakdown, by the indices of seed and trial.
    """

    fingerprint: str
    step: int
    parameters: Tensor
    memory: Tensor | None
    optimizers: list[dict[str, Any]] | None
    alive: Tensor
    rows: list[Row]
    stopped: dict[tuple[int, int], tuple[int, BreakdownCause]]


def save_sweep(checkpoint: SweepCheckpoint, path: Path | str) -> None:
    """Write a checkpoint; a crash while writing leaves the previous one intact."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # The measurements include losses on training data, which no noise covers.
    private = writing_whole(target, durable=True, is_private=True)
    with private as partial, partial.open("wb") as stream:
        torch.save({"version": _VERSION, **vars(checkpoint)}, stream)


def load_sweep(path: Path | str, *, fingerprint: str) -> SweepCheckpoint:
    """Read the checkpoint of the sweep with this fingerprint; raise for any other file."""
    try:
        # Plain data only: a checkpoint from an untrusted source cannot run code.
        saved: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
        # A missing or unknown field raises ``KeyError`` or ``TypeError``, and an object without
        # fields ``AttributeError``: such a file counts as damaged.
        version = saved.pop("version")
        checkpoint = SweepCheckpoint(**saved)
    except FileNotFoundError as error:
        raise FileFormatError(f"{path}: no such checkpoint") from error
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be read: {error.strerror}") from error
    except (
        pickle.UnpicklingError,
        RuntimeError,
        EOFError,
        KeyError,
        TypeError,
        AttributeError,
    ) as error:
        raise FileFormatError(f"{path}: not a checkpoint of a sweep, or damaged") from error
    if version != _VERSION or checkpoint.fingerprint != fingerprint:
        raise FileFormatError(
            f"{path}: must be a checkpoint of this sweep, found one with other data, network, "
            "methods or settings: repeat those, or choose another file"
        )
    return checkpoint


def fingerprint_sweep(
    task: Task,
    data: AgentData,
    network: Network,
    trials: Sequence[Trial],
    *,
    settings: SweepSettings,
    parts: Mapping[str, Samples],
) -> str:
    """Return a hash, in hexadecimal, of everything that the result of a sweep depends on."""
    digest = hashlib.sha256()
    plain = {
        "task": task.describe(),
        "settings": {**vars(settings), "optimizer": describe_optimizer(settings.optimizer)},
        "mixing": network.mixing,
        "offsets": data.offsets,
        "trials": [(t.describe(), repr(t.schedule), repr(t.method)) for t in trials],
    }
    digest.update(json.dumps(plain).encode())
    # Initial parameters are part of it: a task may draw them in its own way.
    arrays = [*_links_of(network), data.inputs.cpu().numpy(), data.targets.cpu().numpy()]
    arrays += [part for t in trials for part in _noise_of(t.method)]
    arrays += [task.initialize(seed).numpy() for seed in settings.seeds]
    # Measurements before and after an interruption must be of the same samples.
    for name in sorted(parts):
        digest.update(f"{name} {len(parts[name][1])}".encode())
        arrays += [values.cpu().numpy() for values in parts[name]]
    # A module's layers and frozen values show neither in ``describe`` nor in the start.
    if isinstance(task, HasFingerprint):
        digest.update(task.fingerprint())
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _links_of(network: Network) -> list[NDArray[Any]]:
    # By links: W of a large network would be n² numbers.
    W = network.sparse_matrix
    return [W.indptr, W.indices, W.data, np.array(network.schedule)]


def _noise_of(method: Method) -> list[NDArray[Any]]:
    """Return all numbers that a method's noise depends on."""
    if method.noise is None:
        return []
    if isinstance(method.noise, LatticeNoise):
        return [method.noise.eigenvalues]
    # Members too: the same factors on other agents are other noise.
    members = [np.array(group) for group in method.noise.seed_groups]
    return [method.noise.private_variance, *members, *method.noise.factors]


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
            optimizers=self._simulation.save_optimizers(),
            alive=self._simulation.alive,
            rows=list(self._rows),
            stopped={run: (own.step, own.cause) for run, own in self._stopped.items()},
        )

    def restore(self, checkpoint: SweepCheckpoint) -> None:
        """Continue from a state of this sweep."""
        self._simulation.restore(
            checkpoint.step,
            checkpoint.parameters,
            checkpoint.alive,
            memory=checkpoint.memory,
            optimizers=checkpoint.optimizers,
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
    return row["mechanism"], row["step_size"], row["seed"]


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
