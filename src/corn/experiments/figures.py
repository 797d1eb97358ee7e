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
    """The panels of the figures named; ``all`` is every figure."""
    chosen = list(FIGURES) if "all" in names else list(dict.fromkeys(names))
    unknown = [name for name in chosen if name not in FIGURES]
    if unknown:
        raise InvalidArgumentError(
            f"figure must be all or one of {', '.join(FIGURES)}, found {unknown[0]!r}"
        )
    return [study for name in chosen for study in FIGURES[name](scale)]
