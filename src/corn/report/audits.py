"""Figures of audits: what attackers achieve next to what was promised."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from corn.audit import AuditReport, Finding
from corn.checks import FloatArray
from corn.privacy import gaussian
from corn.report.style import INK, LINK, PALE


def plot_audit(report: AuditReport, exposure: FloatArray, *, title: str) -> Figure:
    """Draw the ROC of the strongest finding, and every victim against every single insider.

    ``exposure`` is the matrix of ``map_exposure``.
    """
    figure = Figure(figsize=(12, 5.2), layout="constrained")
    figure.suptitle(textwrap.fill(title, 150), fontsize=9, parse_math=False)
    left, right = figure.subplots(1, 2)
    # By the ratio: promises of agents may differ, so that the largest μ need not be the worst.
    strongest = max(report.findings, key=lambda one: one.ratio)
    _draw_roc(left, strongest)
    _draw_exposure(right, exposure)
    return figure


def _draw_roc(axes: Axes, finding: Finding) -> None:
    false, true = finding.scores.roc()
    axes.plot(false, true, color=LINK, linewidth=2.5, label="attacker")
    if finding.promise.mu is not None:
        rates = np.linspace(0, 1, 201)
        # The trade-off gives the least rate of misses, and 1 minus it the largest of hits.
        allowed = [1 - gaussian.tradeoff(finding.promise.mu, float(rate)) for rate in rates]
        axes.plot(rates, allowed, "--", color=INK, label="largest that the promise allows")
    else:
        _draw_points(axes, finding)
    axes.plot([0, 1], [0, 1], color=PALE, linewidth=1, label="guessing")
    axes.set(xlabel="false positives", ylabel="true positives", aspect="equal")
    axes.set_title(f"{finding.view.describe()} against agent {finding.victim}", fontsize=10)
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_points(axes: Axes, finding: Finding) -> None:
    """Draw the curve that (ε, δ) at several δ allow together."""
    rates = np.linspace(0, 1, 201)
    pairs = finding.promise.points
    most = np.min([np.exp(epsilon) * rates + delta for epsilon, delta in pairs], axis=0)
    # TPR ≤ e^ε FPR + δ, and the other direction 1 − FPR ≤ e^ε (1 − TPR) + δ solved for TPR.
    back = np.min([1 - np.exp(-epsilon) * (1 - rates - delta) for epsilon, delta in pairs], axis=0)
    allowed = np.minimum(np.minimum(most, back), 1)
    axes.plot(rates, allowed, "--", color=INK, label="largest that the promise allows")


def _draw_exposure(axes: Axes, exposure: FloatArray) -> None:
    n = len(exposure)
    # Insiders who know all of a victim's noise have μ = ∞, which no colour map has.
    shown = np.minimum(exposure, 1e6)
    finite = shown[np.isfinite(shown)]
    # The norm needs limits on both sides of 1. Beyond 4 all is equally bad, and shown as such.
    low, top = min(0.8, float(finite.min())), max(1.2, min(float(finite.max()), 4.0))
    norm = TwoSlopeNorm(vcenter=1.0, vmin=low, vmax=top)
    axes.set_facecolor(PALE)  # an insider is no victim of its own
    image = axes.imshow(shown, cmap="RdBu_r", norm=norm, aspect="auto")
    axes.figure.colorbar(image, ax=axes, label="measured μ over the promised μ", extend="max")
    # About a dozen labels fit on an axis. Column 0 is the eavesdropper alone.
    step = max(1, n // 12)
    axes.set_xticks([0, *range(1, n + 1, step)], ["none", *map(str, range(0, n, step))])
    axes.set_yticks(range(0, n, step))
    axes.set(xlabel="insider", ylabel="victim")
    axes.set_title("an eavesdropper, alone and with each insider", fontsize=10)


def plot_reconstructions(
    truth: FloatArray, rows: Sequence[tuple[str, FloatArray]], *, shape: tuple[int, int], title: str
) -> Figure:
    """Draw the true images of victims, and below them what attackers made of each method.

    Args:
        truth: shape (victims, features).
        rows: a caption and reconstructed images, of this shape, for each method.
        shape: height and width of an image.
        title: of the figure.
    """
    every = [("the agents' own images", truth), *rows]
    figure = Figure(
        figsize=(1.05 * len(truth) + 3.6, 1.12 * len(every) + 0.6), layout="constrained"
    )
    figure.suptitle(textwrap.fill(title, 130), fontsize=9, parse_math=False)
    grid = figure.subplots(len(every), len(truth), squeeze=False)
    for line, (caption, images) in zip(grid, every, strict=True):
        for axes, image in zip(line, images, strict=True):
            axes.imshow(image.reshape(shape), cmap="gray_r", interpolation="nearest")
            axes.set_xticks([])
            axes.set_yticks([])
        line[0].set_ylabel(
            textwrap.fill(caption, 26),
            rotation=0,
            horizontalalignment="right",
            verticalalignment="center",
            fontsize=9,
            labelpad=10,
        )
    return figure
