"""Sweeps: every trial for every seed, step by step, with measurements and checkpoints."""

from __future__ import annotations

import hashlib
import json
import math
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any, final

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from corn.checks import require_count
from corn.errors import FileFormatError, InvalidArgumentError
from corn.files import writing_whole
from corn.learn.mechanism import Trial
from corn.learn.metrics import (
    PUBLIC_SEEDS,
    Breakdown,
    BreakdownCause,
    Result,
    Row,
    choose_evaluation_steps,
    choose_measured,
    has_diverged,
    measure,
)
from corn.learn.problem import SweepSettings, TrainingProblem
from corn.learn.simulation import Simulation
from corn.learn.step import StepStatistics, describe_optimizer
from corn.threads import own_threads
from corn.topology import Network


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


# Increased when the fields of a checkpoint change: an older file is then refused, not misread.
_VERSION = 5
_FIELDS = {"step", "parameters", "memory", "optimizers", "alive", "rows", "stopped"}


def _save_checkpoint(state: dict[str, Any], path: Path, *, fingerprint: str) -> None:
    """Write the state of a sweep; a crash while writing leaves the previous file intact."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The measurements include losses on training data, which no noise covers.
    private = writing_whole(path, durable=True, is_private=True)
    with private as partial, partial.open("wb") as stream:
        torch.save({"version": _VERSION, "fingerprint": fingerprint, **state}, stream)


def load_checkpoint(path: Path, *, fingerprint: str) -> dict[str, Any]:
    """Read the state of the sweep with this fingerprint; raise for any other file."""
    try:
        # Plain data only: a checkpoint from an untrusted source cannot run code.
        state: Any = torch.load(path, weights_only=True, map_location="cpu")
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be read: {error.strerror}") from error
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError) as error:
        raise FileFormatError(f"{path}: not a checkpoint of a sweep, or damaged") from error
    if not isinstance(state, dict) or not state.keys() >= _FIELDS:
        raise FileFormatError(f"{path}: not a checkpoint of a sweep, or damaged")
    if (state.get("version"), state.get("fingerprint")) != (_VERSION, fingerprint):
        raise FileFormatError(
            f"{path}: must be a checkpoint of this sweep, found one with other data, network, "
            "mechanisms or settings: repeat those, or choose another file"
        )
    return state


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
        trials: mechanisms with step-size schedules.
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
    require_count("checkpoint_every", checkpoint_every)
    file = None if checkpoint is None else Path(checkpoint)
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
        # No file is a fresh start, so that one command both begins and resumes.
        if resume and file is not None and file.exists():
            loop.restore(load_checkpoint(file, fingerprint=loop.fingerprint))
        console = Console(stderr=True)
        is_hidden = not (show_progress and console.is_terminal)
        # Transient: it leaves nothing behind among the results.
        bar = Progress(console=console, transient=True, disable=is_hidden)
        task = bar.add_task("training", total=settings.num_steps, completed=loop.step)
        with catch_interruption() as interruption, bar:
            while loop.step < settings.num_steps and not interruption.requested:
                rows = loop.advance()
                # A hidden bar would keep the times of a thousand steps.
                if not is_hidden:
                    bar.advance(task)
                if rows and on_rows:
                    on_rows(rows)
                if file is not None and loop.step % checkpoint_every == 0:
                    _save_checkpoint(loop.state, file, fingerprint=loop.fingerprint)
        if file is not None:
            # Also after Ctrl-C, so that the same command resumes where this one stopped.
            _save_checkpoint(loop.state, file, fingerprint=loop.fingerprint)
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
        self._problem = problem
        self._network = network
        self._trials = tuple(trials)
        self._settings = settings
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
        """A hash, in hexadecimal, of everything that the result depends on."""
        task = self._problem.task
        settings = self._settings
        data = self._data
        W = self._network.sparse_matrix
        plain = {
            "task": task.describe(),
            "settings": {**vars(settings), "optimizer": describe_optimizer(settings.optimizer)},
            "mixing": self._network.mixing,
            "offsets": data.offsets,
            "trials": [(t.describe(), repr(t.schedule), repr(t.mechanism)) for t in self._trials],
        }
        digest = hashlib.sha256(json.dumps(plain).encode())
        # A module's layers and frozen values show neither in ``describe`` nor in the start.
        digest.update(getattr(task, "fingerprint", bytes)())
        # Links, not W: in a large network that would be n² numbers.
        arrays = [W.indptr, W.indices, W.data, np.array(self._network.schedule)]
        for trial in self._trials:
            noise = trial.mechanism.noise
            if noise is not None:
                # Members too: the same factors on other agents are other noise.
                members = [np.array(group) for group in noise.seed_groups]
                arrays += [noise.private_variance, *members, *noise.factors]
        tensors = [data.inputs, data.targets]
        # Initial parameters are part of it: a task may draw them in its own way.
        tensors += [task.initialize(seed) for seed in settings.seeds]
        # Measurements before and after an interruption must be of the same samples.
        for name, part in sorted(self._parts.items()):
            digest.update(f"{name} {len(part[1])}".encode())
            tensors += part
        for array in [*arrays, *(values.cpu().numpy() for values in tensors)]:
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

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

    @property
    def state(self) -> dict[str, Any]:
        """The present state, for a checkpoint."""
        return {
            **self._simulation.state,
            "rows": list(self._rows),
            "stopped": {run: (own.step, own.cause) for run, own in self._stopped.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state of this sweep."""
        self._simulation.restore(state)
        self._rows = list(state["rows"])
        self._stopped = {run: Breakdown(*own) for run, own in state["stopped"].items()}

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
        return trial.mechanism.name, trial.schedule.describe(), seed


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
