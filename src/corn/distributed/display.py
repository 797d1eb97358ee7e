"""Display of a launch on stderr: a live table on a terminal, and log lines elsewhere."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import final

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from corn.distributed.journal import Progress
from corn.distributed.logs import LogSettings, log_event, writing_log
from corn.distributed.processes import Note
from corn.distributed.results import AgentResult
from corn.distributed.state import Pace
from corn.privacy.rounding import round_up

_COLUMNS = ("agent", "step", "test loss", "ε spent", "neighbours", "MB sent")
_PRIVATE_COLUMNS = ("train loss", "clipped")


@final
class LaunchDisplay:
    """Display of all agents' progress on stderr.

    Args:
        num_steps: the total.
        checkpoint_every: steps between log lines.
        promise: what ε means: unit, clipping and adversary.
        epsilon: the name of ε: that of a simulation is no promise.
        show_table: False writes log lines on a terminal too.
        show_private: show numbers computed from private data without noise in the table, too.
    """

    def __init__(
        self,
        num_steps: int,
        *,
        checkpoint_every: int = 100,
        promise: str = "",
        epsilon: str = "ε",
        show_table: bool = True,
        show_private: bool = False,
    ) -> None:
        console = Console(stderr=True)
        self._num_steps, self._has_table = num_steps, show_table and console.is_terminal
        self._checkpoint_every, self._promise = checkpoint_every, promise
        self._shows_private, self._epsilon = show_private, epsilon
        self._live = Live(console=console, refresh_per_second=4, transient=True)
        self._pace, self._logged_step, self._num_logged, self._num_ended = Pace(), 0, 0, 0
        self._logged_notes: set[str] = set()

    def __enter__(self) -> LaunchDisplay:
        if self._has_table:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._has_table:
            self._live.stop()

    @contextmanager
    def logging(self, settings: LogSettings) -> Iterator[None]:
        """Write log lines to stderr while the block lasts, unless there is a table."""
        with writing_log(settings, to_stderr=not self._has_table):
            yield

    def update(
        self,
        progress: Mapping[int, Progress],
        results: Mapping[int, AgentResult],
        news: Sequence[tuple[int, Note]] = (),
    ) -> None:
        """Show the newest figures, and the agents that have ended."""
        if self._has_table:
            table = draw_table(
                progress,
                results,
                self._num_steps,
                promise=self._promise,
                epsilon=self._epsilon,
                show_private=self._shows_private,
            )
            self._live.update(table)
            return
        self._log_notes(news)
        # Where no agent has begun, the failure that all have in common is the command's last line.
        if progress:
            self._log_ends(results)
        self._log_progress({a: own for a, own in progress.items() if a not in results})

    def _log_notes(self, news: Sequence[tuple[int, Note]]) -> None:
        # Agents often note the same event, for example a loss: the first one is enough.
        for agent, note in news[self._num_logged :]:
            if note.text not in self._logged_notes:
                self._logged_notes.add(note.text)
                log_event(
                    agent, "note", note.text, level=logging.WARNING, is_private=note.is_private
                )
        self._num_logged = len(news)

    def _log_ends(self, results: Mapping[int, AgentResult]) -> None:
        for agent, own in list(results.items())[self._num_ended :]:
            if own.failure is not None:
                text = own.failure.describe_publicly(agent).removeprefix(f"agent {agent}: ")
                log_event(agent, "loss", text, level=logging.ERROR)
            else:
                log_event(agent, "end", f"{own.status} after {own.num_steps} steps")
        self._num_ended = len(results)

    def _log_progress(self, running: Mapping[int, Progress]) -> None:
        """Log one line when the slowest agent that runs passes a checkpoint."""
        step = min((own.step for own in running.values()), default=0)
        pace = self._pace.measure(step, time.monotonic())
        # A launch that resumes begins at a later step.
        reached = step - step % self._checkpoint_every
        if reached <= self._logged_step:
            return
        self._logged_step = reached
        epsilon = max(own.epsilon for own in running.values())
        losses = [own.loss for own in running.values() if not math.isnan(own.loss)]
        loss = f", test loss {min(losses):.4g} … {max(losses):.4g}" if losses else ""
        megabytes = sum(own.bytes_sent for own in running.values()) / 1e6
        agents = "1 agent" if len(running) == 1 else f"{len(running)} agents"
        log_event(
            None,
            "checkpoint",
            f"step {step} of {self._num_steps}, {agents}{loss}, {megabytes:.3g} MB "
            f"sent, {pace:.0f} steps per minute, {self._epsilon} spent at most "
            f"{round_up(epsilon)}: {self._promise}",
            fields={
                "step": step,
                "num_steps": self._num_steps,
                "agents": sorted(running),
                "epsilon": epsilon,
                "promise": self._promise,
                "bytes_sent": round(megabytes * 1e6),
                "steps_per_minute": pace,
            },
        )


def draw_table(
    progress: Mapping[int, Progress],
    results: Mapping[int, AgentResult],
    num_steps: int,
    *,
    promise: str = "",
    epsilon: str = "ε",
    show_private: bool = False,
) -> Table:
    """Return the table as rich draws it, with what ε means below it."""
    columns = (*_COLUMNS, *(_PRIVATE_COLUMNS if show_private else ()))
    table = Table(
        title="train loss and clipped: private, no noise" if show_private else None,
        # As text: rich would take brackets for markup.
        caption=Text(f"{epsilon}: {promise}") if promise else None,
    )
    for name in columns:
        table.add_column(name.replace("ε", epsilon), justify="right")
    table.add_column("")
    for agent in sorted(progress.keys() | results.keys()):
        own, end = progress.get(agent), ""
        figures = [] if own is None else _figures(own, num_steps, show_private=show_private)
        blanks = [""] * (len(columns) - 1 - len(figures))
        if agent in results:
            end = "done" if results[agent].failure is None else "lost"
        table.add_row(str(agent), *figures, *blanks, end)
    return table


def _figures(own: Progress, num_steps: int, *, show_private: bool) -> list[str]:
    private = [f"{own.train_loss:.4g}", f"{own.fraction_clipped:.0%}"]
    return [
        f"{own.step}/{num_steps}",
        "" if math.isnan(own.loss) else f"{own.loss:.4g}",
        round_up(own.epsilon, 3),
        str(own.neighbours),
        f"{own.bytes_sent / 1e6:.1f}",
        *(private if show_private else []),
    ]
