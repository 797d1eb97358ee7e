"""Progress of designs on stderr: a display on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from corn.cli.output import make_progress
from corn.covariance import Design
from corn.covariance.low_rank import DesignProgress, watch_designs
from corn.errors import StoppedByUserError
from corn.plan import Plan

_SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def designing(what: str = "designing the noise", *, keep_best: bool = False) -> Iterator[None]:
    """Show the progress of designs inside the block, with the gap reached so far.

    With ``keep_best`` Ctrl-C ends the search with the best design so far, and a second one ends the
    command.
    """
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    next_line = time.monotonic() + _SECONDS_BETWEEN_LINES
    with make_progress(*columns) as display:
        task = display.add_task(what, total=None)

        def show(progress: DesignProgress) -> None:
            nonlocal next_line
            text = f"{what}: {describe_progress(progress)}"
            if keep_best:
                text += "; Ctrl-C keeps the best design so far"
            display.update(task, description=text)
            # Without a terminal there is no display, and a log should not get a line per
            # evaluation.
            if display.disable and time.monotonic() >= next_line:
                next_line = time.monotonic() + _SECONDS_BETWEEN_LINES
                sys.stderr.write(text + "\n")
                sys.stderr.flush()

        with watch_designs(show, keep_best=keep_best):
            yield


def describe_progress(progress: DesignProgress) -> str:
    """Return the progress in words.

    >>> describe_progress(DesignProgress(120, 500, 0.0312))
    'evaluation 120 of at most 500, at most 3.2 % above the optimum for its seeds'
    >>> describe_progress(DesignProgress(1, 500, 8.5))
    'evaluation 1 of at most 500, at most 850.0 % above the optimum for its seeds'
    """
    text = f"evaluation {progress.evaluations} of at most {progress.max_evaluations}"
    if math.isinf(progress.gap):
        return text
    percent = math.ceil(1000 * progress.gap) / 10
    return f"{text}, at most {percent:.1f} % above the optimum for its seeds"


def raise_if_interrupted(made: Design | Plan) -> None:
    """Raise `StoppedByUserError` if the user ended the design before it was done.

    Commands call this last, so that the best design is kept and scripts still see the interruption.
    """
    status = made.status if isinstance(made, Design) else made.certificate.status
    if status == "interrupted":
        raise StoppedByUserError(
            "interrupted: this is the best design so far; it keeps its promise to every agent, and "
            "may have more noise than needed"
        )
