"""Status page of an agent: one page without scripts, which needs nothing from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import resources

import jinja2

from corn.distributed.board import Snapshot
from corn.privacy.rounding import round_up, write_exactly
from corn.version import __version__

_WIDTH, _HEIGHT, _MARGIN, _TOP = 680.0, 180.0, 44.0, 6.0
_GRID_LINES = 4


@dataclass(frozen=True)
class Chart:
    """A line chart in the coordinates of its picture.

    Attributes:
        points: of the line, as SVG expects them.
        marks: the height of each grid line, and its number.
        begin: the time at the left end.
        end: the time at the right end.
    """

    points: str
    marks: tuple[tuple[float, str], ...]
    begin: str
    end: str


def draw_chart(paces: Sequence[tuple[float, float]]) -> Chart | None:
    """Return the chart of steps per minute; None for fewer than two points.

    >>> draw_chart([(0.0, 10.0), (60.0, 20.0)]).points
    '44.0,93.0 680.0,6.0'
    """
    if len(paces) < 2:
        return None
    # The board keeps points more than five seconds apart, so last − first is not zero.
    first, last = paces[0][0], paces[-1][0]
    interval = _choose_interval(max(pace for _, pace in paces))
    top = _GRID_LINES * interval

    def height(pace: float) -> float:
        return _TOP + (_HEIGHT - _TOP) * (1 - pace / top)

    points = (
        f"{_MARGIN + (_WIDTH - _MARGIN) * (when - first) / (last - first):.1f},{height(pace):.1f}"
        for when, pace in paces
    )
    marks = tuple((height(k * interval), f"{k * interval:,g}") for k in range(_GRID_LINES + 1))
    return Chart(" ".join(points), marks, _clock(first), _clock(last))


def _choose_interval(largest: float) -> float:
    """Return 1, 2, 2.5 or 5 times a power of ten, so that the grid lines reach the largest pace."""
    least = max(largest, 1.0) / _GRID_LINES
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= least)


def render_page(snapshot: Snapshot, *, show_private: bool = False) -> str:
    """Return the page as HTML."""
    state = snapshot.state
    spent, epsilon = None, ""
    if state is not None and state.epsilon is not None:
        spent = min(1.0, state.epsilon / state.promised_epsilon)
        epsilon = round_up(state.epsilon)
    return _template().render(
        snapshot=snapshot,
        state=state,
        local=snapshot.local if show_private else None,
        spent=spent,
        epsilon=epsilon,
        promised="" if state is None else write_exactly(state.promised_epsilon),
        delta="" if state is None else write_exactly(state.delta),
        done=0.0 if state is None else state.step / state.num_steps,
        chart=draw_chart(snapshot.paces),
        width=_WIDTH,
        height=_HEIGHT,
        margin=_MARGIN,
        updated=None if state is None else _clock(state.updated),
        version=__version__,
    )


@cache
def _template() -> jinja2.Template:
    source = resources.files("corn.distributed").joinpath("status.html")
    # Escaped, as texts of a plan come from others; strict, so that a missing value is an error, not
    # a gap.
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(source.read_text(encoding="utf-8"))


def _clock(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%H:%M:%S UTC")
