"""Plots of single results: mechanisms compared, a training run."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from corn.errors import make_printable
from corn.report.style import (
    INK,
    MECHANISM_COLOURS,
    MECHANISM_NAMES,
    OWN_COLOUR,
    SHORT_NAMES,
    LineEnd,
    label_ends,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    # `corn.learn` needs torch, whose import takes longer than to draw a figure.
    from corn.learn.metrics import Row


_TITLE_LETTERS = 50
"""Letters of a 9-point title that fit above one panel of 5 inches."""

_MEASURE_LABELS = {
    "test_loss": "test loss",
    "test_accuracy": "test accuracy",
    "train_loss": "train loss",
    "optimality_gap": "optimality gap",
    "consensus_distance": "disagreement",
}


def plot_comparison(rows: Sequence[tuple[str, str, float]], *, title: str) -> Figure:
    """Draw a bar for each mechanism: its noise variance in the average over a trusted server's.

    A row has the mechanism, a remark that stands below its name, such as the adversary that its
    noise holds against (bars of different adversaries do not compare), and the ratio.
    """
    figure = Figure(figsize=(6.4, 1.2 + 0.55 * len(rows)), layout="constrained")
    figure.suptitle(_wrap(title), fontsize=9, parse_math=False)
    axes = figure.subplots()
    ratios = [ratio for _, _, ratio in rows]
    colours = [MECHANISM_COLOURS.get(name, OWN_COLOUR) for name, _, _ in rows]
    bars = axes.barh(range(len(rows)), ratios, color=colours, height=0.7)
    axes.bar_label(bars, [f"{ratio:.3g}" for ratio in ratios], padding=3, fontsize=9, color=INK)
    labels = [f"{MECHANISM_NAMES.get(name, name)}\n{remark}".strip() for name, remark, _ in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set(
        xlabel="noise variance of the average over a trusted server's",
        # Room for the numbers beside the bars.
        xlim=(0, 1.15 * max(1.0, *ratios)),
    )
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _wrap(title: str, num_panels: int = 1) -> str:
    # Names of files may hold control characters, for which fonts have no glyph.
    return textwrap.fill(make_printable(title), _TITLE_LETTERS * num_panels)


def plot_training(
    rows: Sequence[Row],
    step_sizes: Mapping[str, str],
    agent_samples: Sequence[int] | None,
    *,
    title: str,
) -> Figure:
    """Draw each mechanism at its step size, averaged over runs, and the samples of each agent.

    If ``agent_samples`` is None, the distance of models from their average takes its place. Bands
    are plus and minus one standard deviation over runs, if there are several.
    """
    scores = list(_MEASURE_LABELS)[:-1]
    measured = [name for name in scores if any(row.get(name) is not None for row in rows)][:2]
    num_panels = len(measured) + 1
    figure = Figure(figsize=(5 * num_panels, 4.3), layout="constrained")
    figure.suptitle(_wrap(title, num_panels), fontsize=9, parse_math=False)
    *panels, last = figure.subplots(1, num_panels, squeeze=False)[0]
    for axes, column in zip(panels, measured, strict=True):
        _draw_runs(axes, rows, step_sizes, column)
    if agent_samples is None:
        _draw_runs(last, rows, step_sizes, "consensus_distance")
    else:
        last.bar(range(len(agent_samples)), agent_samples, color=INK)
        last.set(xlabel="agent", ylabel="training samples")
        last.set_title("training samples of each agent", fontsize=10)
        last.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (*panels, last):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_runs(axes: Axes, rows: Sequence[Row], step_sizes: Mapping[str, str], column: str) -> None:
    """Draw mean and standard deviation over runs of one measure against the step."""
    ends = []
    for name, step_size in step_sizes.items():
        values: dict[int, list[float]] = {}
        for row in rows:
            if (row["mechanism"], row["step_size"]) == (name, step_size):
                values.setdefault(int(row["step"]), []).append(float(row[column]))
        steps = sorted(values)
        means = np.array([np.mean(values[step]) for step in steps])
        stds = np.array([np.std(values[step]) for step in steps])
        colour = MECHANISM_COLOURS.get(name, OWN_COLOUR)
        style = "--" if name in ("none", "unclipped", "central") else "-"
        axes.plot(steps, means, style, color=colour)
        ends.append(LineEnd(SHORT_NAMES.get(name, name), float(means[-1]), colour))
        axes.fill_between(steps, means - stds, means + stds, color=colour, alpha=0.15, linewidth=0)
    axes.set(xlabel="step", ylabel=_MEASURE_LABELS[column])
    # Lines end at the right edge, next to their names.
    axes.margins(x=0)
    # Fixed, because labels are placed by these limits.
    axes.set_ylim(axes.get_ylim())
    label_ends(axes, ends, font_size=8.5)
