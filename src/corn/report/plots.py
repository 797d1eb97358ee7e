"""Plots of single results: mechanisms compared, a training run."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from corn.errors import make_printable
from corn.report.style import (
    INK,
    MECHANISM_NAMES,
    PALE,
    SHORT_NAMES,
    LineEnd,
    choose_styles,
    label_ends,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    # `corn.learn` needs torch, whose import takes longer than to draw a figure.
    from corn.learn.metrics import Row


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
    width, _ = mpl.rcParams["figure.figsize"]
    font_size = mpl.rcParams["font.size"]
    # Two lines of text for each bar, and the axis below.
    height = (6 + 3.6 * len(rows)) * font_size / 72
    figure = Figure(figsize=(1.28 * width, height), layout="constrained")
    figure.suptitle(_wrap(title, 1.28 * width), fontsize=font_size, parse_math=False)
    axes = figure.subplots()
    ratios = [ratio for _, _, ratio in rows]
    styles = choose_styles(name for name, _, _ in rows)
    colours = [styles[name].colour for name, _, _ in rows]
    bars = axes.barh(range(len(rows)), ratios, color=colours, height=0.7)
    axes.bar_label(bars, [f"{ratio:.3g}" for ratio in ratios], padding=3, color=INK)
    labels = [f"{MECHANISM_NAMES.get(name, name)}\n{remark}".strip() for name, remark, _ in rows]
    axes.set_yticks(range(len(rows)), labels)
    axes.invert_yaxis()
    axes.set(
        xlabel="noise variance of the average over a trusted server's",
        # Room for the numbers beside the bars.
        xlim=(0, 1.15 * max(1.0, *ratios)),
    )
    return figure


def _wrap(title: str, width: float) -> str:
    # Names of files may hold control characters, for which fonts have no glyph. A letter is about
    # half as wide as it is high.
    letters = int(width * 72 / (0.56 * mpl.rcParams["font.size"]))
    return textwrap.fill(make_printable(title), letters)


def plot_training(
    rows: Sequence[Row],
    step_sizes: Mapping[str, str],
    agent_samples: Sequence[int] | None = None,
    *,
    title: str = "",
    cooldown_steps: int = 0,
) -> Figure:
    """Draw each mechanism at its step size, averaged over runs, and the samples of each agent.

    If ``agent_samples`` is None, the distance of models from their average takes its place. Bands
    are plus and minus one standard deviation over runs, if there are several. The last measurement
    follows ``cooldown_steps`` steps that only mix, which are shaded.
    """
    scores = list(_MEASURE_LABELS)[:-1]
    measured = [name for name in scores if any(row.get(name) is not None for row in rows)][:2]
    num_panels = len(measured) + 1
    width, height = mpl.rcParams["figure.figsize"]
    figure = Figure(figsize=(num_panels * width, height), layout="constrained")
    figure.suptitle(
        _wrap(title, num_panels * width), fontsize=mpl.rcParams["font.size"], parse_math=False
    )
    *panels, last = figure.subplots(1, num_panels, squeeze=False)[0]
    for axes, column in zip(panels, measured, strict=True):
        _draw_runs(axes, rows, step_sizes, column, cooldown_steps)
    if agent_samples is None:
        _draw_runs(last, rows, step_sizes, "consensus_distance", cooldown_steps)
    else:
        last.bar(range(len(agent_samples)), agent_samples, color=INK)
        last.set(xlabel="agent", ylabel="training samples")
        last.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    return figure


def _draw_runs(
    axes: Axes,
    rows: Sequence[Row],
    step_sizes: Mapping[str, str],
    column: str,
    cooldown_steps: int,
) -> None:
    """Draw mean and standard deviation over runs of one measure against the step."""
    ends = []
    final = max(int(row["step"]) for row in rows)
    for name, style in choose_styles(step_sizes).items():
        values: dict[int, list[float]] = {}
        for row in rows:
            if (row["mechanism"], row["step_size"]) == (name, step_sizes[name]):
                values.setdefault(int(row["step"]), []).append(float(row[column]))
        steps = sorted(values)
        means = np.array([np.mean(values[step]) for step in steps])
        stds = np.array([np.std(values[step]) for step in steps])
        every = max(1, len(steps) // 4)
        # The measurement of the last step is of models after the cool-down.
        places = [step + cooldown_steps if step == final else step for step in steps]
        axes.plot(
            places,
            means,
            color=style.colour,
            linestyle=style.dashes,
            marker=style.marker,
            # A few markers tell lines apart; one at every point would hide them.
            markevery=(every // 2, every),
        )
        text = SHORT_NAMES.get(name, name)
        ends.append(LineEnd(text, float(means[-1]), style.colour, style.marker, style.dashes))
        axes.fill_between(
            places, means - stds, means + stds, color=style.colour, alpha=0.15, linewidth=0
        )
    axes.set(xlabel="step", ylabel=_MEASURE_LABELS[column])
    # The same in all panels, and none in the cool-down, which has no steps.
    ticks = MaxNLocator(5, integer=True).tick_values(0, final)
    axes.set_xticks([tick for tick in ticks if 0 <= tick <= final])
    axes.yaxis.set_major_locator(MaxNLocator(6))
    if cooldown_steps:
        axes.axvspan(final, final + cooldown_steps, color=PALE, alpha=0.3, linewidth=0)
        axes.annotate(
            "cool-down",
            (final, 1),
            xycoords=("data", "axes fraction"),
            xytext=(-2, -2),
            textcoords="offset points",
            ha="right",
            va="top",
            color=INK,
            fontsize="small",
        )
    # Lines end at the right edge, next to their names.
    axes.margins(x=0)
    # Fixed, because labels are placed by these limits.
    axes.set_ylim(axes.get_ylim())
    label_ends(axes, ends)
