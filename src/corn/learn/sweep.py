"""Run a sweep: step, measure, report, save."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from corn.errors import InvalidArgumentError
from corn.learn.checkpoint import load_checkpoint, save_checkpoint
from corn.learn.loop import SweepLoop
from corn.learn.method import Trial
from corn.learn.metrics import Row
from corn.learn.monitor import ProgressBar, catch_interruption
from corn.learn.problem import TrainingProblem
from corn.learn.result import Result
from corn.learn.settings import SweepSettings
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

    Ctrl-C ends the sweep after the present step, and what was reached is returned. A run whose
    gradients or loss are not finite, or whose loss explodes, is stopped with a message; the others
    go on.

    Args:
        problem: what is learnt.
        network: who mixes with whom.
        trials: methods and step sizes.
        settings: how to run.
        evaluate_at: steps to measure at; by default 0, the last, and some twenty between.
        max_train_samples: measure the training loss on so many samples, evenly spaced; None is all.
        checkpoint: a file to save the state to, every ``checkpoint_every`` steps and at the end.
        checkpoint_every: how often.
        resume: go on from ``checkpoint`` if that file exists.
        show_progress: draw a progress bar if there is a terminal.
        on_rows: called with the measurements after each step that is measured.
    """
    if resume and settings.noise_keys == "secret":
        raise InvalidArgumentError(
            "resume must be False with secret keys: steps that run again would spend more than the "
            "budget; corn launch keeps a ledger of releases and can go on"
        )
    file = _CheckpointFile(None if checkpoint is None else Path(checkpoint), checkpoint_every)
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
        _run(loop, file, settings.num_steps, show_progress=show_progress, on_rows=on_rows)
        return loop.finish()


def _run(
    loop: SweepLoop,
    file: _CheckpointFile,
    num_steps: int,
    *,
    show_progress: bool,
    on_rows: Callable[[Sequence[Row]], None] | None,
) -> None:
    """Advance to the last step or to Ctrl-C, and save what was reached."""
    bar = ProgressBar(num_steps, done=loop.step, show=show_progress)
    with catch_interruption() as interruption, bar:
        while loop.step < num_steps and not interruption.requested:
            rows = loop.advance()
            bar.advance(rows)
            if rows and on_rows:
                on_rows(rows)
            if loop.step % file.every == 0:
                file.save(loop)
    file.save(loop)


@dataclass(frozen=True)
class _CheckpointFile:
    """Where the state is saved, if anywhere."""

    path: Path | None
    every: int

    def __post_init__(self) -> None:
        if self.every < 1:
            raise InvalidArgumentError(f"checkpoint_every must be at least 1, found {self.every}")

    def load_into(self, loop: SweepLoop) -> None:
        if self.path is not None and self.path.exists():
            loop.restore(load_checkpoint(self.path, fingerprint=loop.fingerprint))

    def save(self, loop: SweepLoop) -> None:
        if self.path is not None:
            save_checkpoint(loop.checkpoint(), self.path)
