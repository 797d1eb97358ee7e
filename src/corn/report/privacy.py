"""Figures of privacy: the curve δ(ε), and what an attacker's test can achieve."""

from __future__ import annotations

import math
import warnings

import numpy as np
from matplotlib.figure import Figure

from corn.errors import CornWarning, InvalidArgumentError
from corn.privacy import ACCOUNTANTS, Accounting, PrivacyLoss
from corn.report.style import PALE

_COLOURS = {"gdp": "#0072B2", "rdp": "#E69F00", "paper": "#D55E00"}


def plot_privacy(loss: PrivacyLoss) -> Figure:
    """δ against ε by each accountant, and the trade-off of error rates, for the worst agent."""
    if math.isinf(loss.worst_epsilon(1e-5)):
        raise InvalidArgumentError("there is no privacy curve to draw: some agent has ε = ∞")
    subsampled = loss.query.is_subsampled
    names: list[Accounting] = ["gdp"] if subsampled else list(ACCOUNTANTS)
    figure = Figure(figsize=(6 if subsampled else 11, 4.4), layout="constrained")
    axes = figure.subplots(1, 1 if subsampled else 2, squeeze=False)[0]
    with warnings.catch_warnings():
        # Where the paper's formula is not proved is visible: its curve crosses the exact one.
        warnings.simplefilter("ignore", CornWarning)
        for name in names:
            curve = loss.curve(accounting=name)
            label = "privacy loss distribution" if subsampled else ACCOUNTANTS[name].description
            axes[0].semilogy(curve.epsilon, curve.delta, color=_COLOURS[name], label=label)
    axes[0].set(xlabel="ε", ylabel="δ", ylim=(1e-10, 1.5), xlim=(0, None))
    axes[0].set_title(f"protects {loss.query.protects}\n{loss.query.recipe}", fontsize=9)
    axes[0].legend(frameon=False, fontsize=9)
    if not subsampled:
        tradeoff = loss.tradeoff(np.linspace(0, 1, 401))
        axes[1].plot([0, 1], [1, 0], color=PALE, linestyle="--", label="guessing")
        axes[1].plot(
            tradeoff.false_positive_rate,
            tradeoff.false_negative_rate,
            color=_COLOURS["gdp"],
            label=f"best attack, μ = {loss.mu.max():.3f}",
        )
        axes[1].set(xlabel="attacker's false positive rate", ylabel="false negative rate")
        axes[1].set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
        axes[1].legend(frameon=False, fontsize=9)
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
    return figure
