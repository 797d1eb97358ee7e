"""Figures of training: what each mechanism reaches step by step, and who holds which data."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from corn.learn.metrics import Row
from corn.report.style import INK, MECHANISM_COLOURS, MECHANISM_NAMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SCORES = {
    "test_loss": "test loss",
    "test_accuracy": "test accuracy",
    "train_loss": "train loss",
    "optimality_gap": "optimality gap",
}
_TITLE_WIDTH = 50  # letters that fit above one panel
_DISAGREEMENT = {"consensus_distance": "disagreement"}


def plot_training(
    rows: Sequence[Row],
    step_sizes: Mapping[str, str],
    agent_samples: Sequence[int] | None,
    *,
    title: str,
) -> Figure:
    """Curves of each method at its step size, averaged over runs, and samples per agent.

    Where ``agent_samples`` is None, how far models are from their average takes its place. Bands
    are plus and minus one standard deviation over runs, where there are several.
    """
    measured = [name for name in _SCORES if any(row.get(name) is not None for row in rows)][:2]
    figure = Figure(figsize=(5 * (len(measured) + 1), 4.3), layout="constrained")
    *panels, last = figure.subplots(1, len(measured) + 1, squeeze=False)[0]
    figure.suptitle(textwrap.fill(title, _TITLE_WIDTH * (len(measured) + 1)), fontsize=9)
    for axes, column in zip(panels, measured, strict=True):
        _draw_curves(axes, rows, step_sizes, column)
    if agent_samples is None:
        _draw_curves(last, rows, step_sizes, "consensus_distance")
    else:
        _draw_samples(last, agent_samples)
    for axes in (*panels, last):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_samples(axes: Axes, agent_samples: Sequence[int]) -> None:
    axes.bar(range(len(agent_samples)), agent_samples, color=INK)
    axes.set(xlabel="agent", ylabel="training samples")
    axes.set_title("who holds how much", fontsize=10)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _draw_curves(
    axes: Axes, rows: Sequence[Row], step_sizes: Mapping[str, str], column: str
) -> None:
    for name, step_size in step_sizes.items():
        steps, means, stds = _average(rows, name, step_size, column)
        colour = MECHANISM_COLOURS.get(name, INK)
        style = "--" if name in ("none", "unclipped", "central") else "-"
        axes.plot(steps, means, style, color=colour, label=MECHANISM_NAMES.get(name, name))
        axes.fill_between(steps, means - stds, means + stds, color=colour, alpha=0.15, linewidth=0)
    axes.set(xlabel="step", ylabel=(_SCORES | _DISAGREEMENT)[column])
    axes.legend(frameon=False, fontsize=8)


def _average(
    rows: Sequence[Row], name: str, step_size: str, column: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    values: dict[int, list[float]] = {}
    for row in rows:
        if (row["contender"], row["step_size"]) == (name, step_size):
            values.setdefault(int(row["step"]), []).append(float(row[column]))
    steps = np.array(sorted(values))
    means = np.array([np.mean(values[step]) for step in steps])
    stds = np.array([np.std(values[step]) for step in steps])
    return steps, means, stds
