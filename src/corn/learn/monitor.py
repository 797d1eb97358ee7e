"""Progress bar of a sweep, and Ctrl-C as a request to stop after the present step."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from corn.learn.metrics import Row
from corn.privacy.rounding import round_up


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
