"""One live table of all agents, on stderr; silent unless that is a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from rich.console import Console
from rich.live import Live
from rich.table import Table

from corn.distributed.recording import Progress

_COLUMNS = ("agent", "step", "loss", "clipped", "ε spent", "neighbours", "MB sent", "")


@final
class ProgressTable:
    """Shows how far every agent is.

    Args:
        num_steps: the total.
        show: False silences it on a terminal too.
    """

    def __init__(self, num_steps: int, *, show: bool = True) -> None:
        console = Console(stderr=True)
        self._num_steps, self._shown = num_steps, show and console.is_terminal
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
            self._live.update(draw_table(progress, ends, self._num_steps))


def draw_table(progress: Mapping[int, Progress], ends: Mapping[int, str], num_steps: int) -> Table:
    """The table as rich draws it."""
    table = Table()
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name == "" else "right")
    for agent in sorted(progress.keys() | ends.keys()):
        own = progress.get(agent)
        figures = [""] * 6 if own is None else _figures(own, num_steps)
        table.add_row(str(agent), *figures, ends.get(agent, ""))
    return table


def _figures(own: Progress, num_steps: int) -> list[str]:
    return [
        f"{own.step}/{num_steps}",
        f"{own.loss:.4g}",
        f"{own.fraction_clipped:.0%}",
        f"{own.epsilon:.3g}",
        str(own.neighbours),
        f"{own.bytes_sent / 1e6:.1f}",
    ]
