"""Figures have the panels, lines and texts that they should."""

from dataclasses import replace
from pathlib import Path

import pytest

from corn.errors import InvalidArgumentError
from corn.experiments import FULL, CellStore, Scale, Training, make_studies, reproduce

from .scales import TINY

NAMES = ("corn", "corn-1-insider", "corn-2-insiders")


def test_a_panel_can_be_named_alone() -> None:
    (study,) = make_studies(["fig5a-agent"], TINY)
    assert study.panel.unit == "agent"
    assert len(make_studies(["fig5a", "fig5a-agent"], TINY)) == 2


def test_unknown_figures_and_impossible_graphs_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="fig9"):
        make_studies(["fig1a", "fig9"], TINY)
    with pytest.raises(InvalidArgumentError, match=r"\(0, 1\]"):
        TINY.restrict(connectivities=[1.5])


def test_a_scale_can_be_restricted() -> None:
    restricted = TINY.restrict(epsilons=[5, 3, 5], num_seeds=7)
    assert restricted.epsilons == (3.0, 5.0)
    assert restricted.connectivities == TINY.connectivities
    assert {restricted.regression.num_seeds, restricted.softmax.num_seeds} == {7}
    assert TINY.restrict() == TINY


@pytest.mark.parametrize("scale", [TINY, FULL])
def test_every_title_names_unit_clipping_and_adversary(scale: Scale) -> None:
    for study in make_studies(["all"], scale):
        assert f"unit: {study.panel.unit} (" in study.panel.title
        assert "clipped" in study.panel.title
        assert "adversary: " in study.panel.title


def test_designs_against_many_coalitions_stop_at_a_number_of_agents(tmp_path: Path) -> None:
    scale = replace(TINY, sizes=(6, 8), insider_sizes=(8, 6))
    made = reproduce(["fig1c"], scale, store=CellStore(tmp_path), jobs=1)
    for _, points in made.panels:
        places = {name: [p.x for p in points if p.method.name == name] for name in NAMES}
        assert places == {"corn": [6, 8], "corn-1-insider": [6, 8], "corn-2-insiders": [6]}


def test_rows_name_the_insiders_that_a_design_protects_against(tmp_path: Path) -> None:
    made = reproduce(["fig2-insiders"], TINY, store=CellStore(tmp_path), jobs=1)
    rows = {(row["method"], row["x"]): row["against"] for row in made.runs}
    ((_, points),) = made.panels
    assert {(point.method.name, point.x): point.against for point in points} == rows
    for method in ("corn-pairs", "corn-links"):
        assert "insider" not in rows[method, 0.0]
        assert "one insider" in rows[method, 1.0]
        assert "2 insiders" in rows[method, 2.0]
    # Independent noise needs no design against insiders, and none is computed.
    assert "insider" not in rows["ldp", 2.0]


def make_training(num_seeds: int, num_pilots: int | None) -> Training:
    return Training("a9a", "agent", 5, (0.1,), num_seeds, seeds_per_cell=2, num_pilots=num_pilots)


def test_seeds_are_split_into_pilots_and_repeats() -> None:
    training = make_training(7, 3)
    assert training.pilot_blocks == ((0, 1), (2,))
    assert training.repeat_blocks == ((3, 4), (5, 6))
    for num_seeds in (2, 3):
        few = make_training(num_seeds, 3)
        assert few.repeat_blocks == ()
        assert sum(map(len, few.pilot_blocks)) == num_seeds
    assert make_training(7, None).pilot_blocks == ((0, 1), (2, 3), (4, 5), (6,))
    with pytest.raises(InvalidArgumentError, match="num_pilots"):
        make_training(7, 0)
