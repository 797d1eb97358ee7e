"""The paper's figures by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from corn.errors import InvalidArgumentError
from corn.experiments.figure1 import figure1a, figure1b, figure1c
from corn.experiments.figure2 import figure2
from corn.experiments.scale import Scale
from corn.experiments.studies import Study
from corn.experiments.training_figures import figure3, figure4, figure5

FIGURES: dict[str, Callable[[Scale], Sequence[Study]]] = {
    "fig1a": figure1a,
    "fig1b": figure1b,
    "fig1c": figure1c,
    "fig2": figure2,
    "fig3a": partial(figure3, panel="a"),
    "fig3b": partial(figure3, panel="b"),
    "fig4a": partial(figure4, panel="a"),
    "fig4b": partial(figure4, panel="b"),
    "fig5a": partial(figure5, panel="a"),
    "fig5b": partial(figure5, panel="b"),
}


def make_studies(names: Sequence[str], scale: Scale) -> list[Study]:
    """The panels of the figures named; ``all`` is every figure, and a panel has its own name."""
    studies = [study for make in FIGURES.values() for study in make(scale)]
    known = {*FIGURES, *(study.panel.name for study in studies), "all"}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InvalidArgumentError(
            f"figure must be all, one of {', '.join(FIGURES)}, or a panel such as fig5a-agent, "
            f"found {unknown[0]!r}"
        )
    return [
        study
        for study in studies
        if "all" in names or not {study.panel.figure, study.panel.name}.isdisjoint(names)
    ]
