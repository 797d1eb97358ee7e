"""Figures have the panels, lines and texts that they should."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from corn.errors import InvalidArgumentError
from reproduction.cells import CellStore
from reproduction.figures import TrainingStudy, make_studies
from reproduction.mechanisms import AUTHORS_MECHANISMS, CORN_PAPER, choose_mechanisms
from reproduction.run import reproduce
from reproduction.scale import FULL, Scale, Training

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
    studies = make_studies(["all"], scale)
    assert len(studies) > 10
    for study in studies:
        assert f"unit: {study.panel.unit} (" in study.panel.title
        assert "clipped" in study.panel.title
        assert "adversary: " in study.panel.title


def test_designs_against_many_coalitions_stop_at_a_number_of_agents(tmp_path: Path) -> None:
    scale = replace(TINY, sizes=(6, 8), insider_sizes=(8, 6))
    made = reproduce(["fig1c"], scale, store=CellStore(tmp_path), jobs=1)
    assert made.panels
    for _, points in made.panels:
        places = {name: [p.x for p in points if p.mechanism.name == name] for name in NAMES}
        assert places == {"corn": [6, 8], "corn-1-insider": [6, 8], "corn-2-insiders": [6]}


def test_rows_name_the_insiders_that_a_design_protects_against(tmp_path: Path) -> None:
    made = reproduce(["fig2-insiders"], TINY, store=CellStore(tmp_path), jobs=1)
    rows = {(row["mechanism"], row["x"]): row["against"] for row in made.runs}
    ((_, points),) = made.panels
    assert {(point.mechanism.name, point.x): point.against for point in points} == rows
    for mechanism in ("corn-pairs", "corn-links"):
        assert "insider" not in rows[mechanism, 0.0]
        assert "one insider" in rows[mechanism, 1.0]
        assert "2 insiders" in rows[mechanism, 2.0]
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


@pytest.mark.parametrize("epsilon", [3.0, 10.0, 40.0])
def test_the_lines_of_the_authors_code_have_its_noise(epsilon: float) -> None:
    """Its bound is on the sum of clipped samples, to which the noise is added before the mean."""
    delta, steps, clip, batch_size = 1e-5, 1000, 0.1, 128
    log = math.log(1 / delta)
    bound = (math.sqrt(log + epsilon) - math.sqrt(log)) ** 2 / (2 * steps * clip**2)
    for mechanism in AUTHORS_MECHANISMS:
        budget = mechanism.budget(epsilon, delta, steps, clip, "sample", batch_size)
        # The mean has 1/B² of the noise variance of the sum.
        assert budget.precision_cap == pytest.approx(bound * batch_size**2, rel=1e-12)
    # The constant of the paper's eq. (13b) is another noise.
    ratio = bound * batch_size**2
    ratio /= CORN_PAPER.budget(epsilon, delta, steps, clip, "sample", batch_size).precision_cap
    assert abs(ratio - 1) > 0.05


def test_the_lines_of_the_authors_code_are_drawn_by_name_and_for_samples() -> None:
    assert not set(AUTHORS_MECHANISMS) & set(FULL.mechanisms)
    scale = TINY.restrict(mechanisms=choose_mechanisms(["corn-authors", "ldp"]))
    lines = {
        study.panel.name: {one.name for one in study.places[0].mechanisms}
        for study in make_studies(["fig5a"], scale)
        if isinstance(study, TrainingStudy)
    }
    assert lines == {"fig5a-agent": {"ldp"}, "fig5a-sample": {"ldp", "corn-authors"}}
    alone = TINY.restrict(mechanisms=AUTHORS_MECHANISMS)
    assert [study.panel.name for study in make_studies(["fig5a"], alone)] == ["fig5a-sample"]
    with pytest.raises(InvalidArgumentError, match="fig5a-sample"):
        make_studies(["fig1a"], alone)
