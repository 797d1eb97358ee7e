"""One live table of all agents, on stderr; silent unless that is a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import final

from rich.console import Console
from rich.live import Live
from rich.table import Table

from corn.distributed.recording import Progress

_COLUMNS = ("agent", "step", "test loss", "ε spent", "neighbours", "MB sent")
_PRIVATE_COLUMNS = ("train loss", "clipped")


@final
class ProgressTable:
    """Shows how far every agent is.

    Args:
        num_steps: the total.
        show: False silences it on a terminal too.
        show_private: show what is computed from private data without noise, too.
    """

    def __init__(self, num_steps: int, *, show: bool = True, show_private: bool = False) -> None:
        console = Console(stderr=True)
        self._num_steps, self._shown = num_steps, show and console.is_terminal
        self._shows_private = show_private
        self._live = Live(console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> ProgressTable:
        if self._shown:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._live.stop()

    def update(self, progress: Mapping[int, Progress], ends: Mapping[int, str]) -> None:
        """Show the newest figures; ``ends`` says how agents that are gone ended."""
        if self._shown:
            table = draw_table(progress, ends, self._num_steps, show_private=self._shows_private)
            self._live.update(table)


def draw_table(
    progress: Mapping[int, Progress],
    ends: Mapping[int, str],
    num_steps: int,
    *,
    show_private: bool = False,
) -> Table:
    """The table as rich draws it."""
    columns = (*_COLUMNS, *(_PRIVATE_COLUMNS if show_private else ()))
    table = Table(title="train loss and clipped: private, no noise" if show_private else None)
    for name in columns:
        table.add_column(name, justify="right")
    table.add_column("")
    for agent in sorted(progress.keys() | ends.keys()):
        own = progress.get(agent)
        figures = [] if own is None else _figures(own, num_steps, show_private=show_private)
        blanks = [""] * (len(columns) - 1 - len(figures))
        table.add_row(str(agent), *figures, *blanks, ends.get(agent, ""))
    return table


def _figures(own: Progress, num_steps: int, *, show_private: bool) -> list[str]:
    private = [f"{own.train_loss:.4g}", f"{own.fraction_clipped:.0%}"]
    return [
        f"{own.step}/{num_steps}",
        "" if math.isnan(own.loss) else f"{own.loss:.4g}",
        f"{own.epsilon:.3g}",
        str(own.neighbours),
        f"{own.bytes_sent / 1e6:.1f}",
        *(private if show_private else []),
    ]
