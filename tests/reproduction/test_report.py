"""A reproduction is written as readable panels, tables and one self-contained page."""

import csv
import html
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.offsetbox import AnnotationBbox
from matplotlib.text import Annotation, Text

from corn.report import save_figure
from reproduction.cells import CellStore
from reproduction.figures import NoiseStudy, Panel, Point, make_studies
from reproduction.mechanisms import (
    AUTHORS_MECHANISMS,
    CORN_PAPER,
    LDP_PAPER,
    MECHANISMS,
    NONE,
)
from reproduction.report import plot_panel, style_of, write_report
from reproduction.run import Reproduction, reproduce
from reproduction.scale import FULL, QUICK, Scale

from .scales import PILOTS, TINY

NAMES = ["fig1a", "fig4b"]


@pytest.mark.slow
def test_tables_figures_and_page_are_complete(tmp_path: Path) -> None:
    made = reproduce(NAMES, TINY, store=CellStore(tmp_path / "cells"), jobs=1)
    # Of fig1a the panel that is not the paper's.
    panels = [(panel, points) for panel, points in made.panels if panel.name != "fig1a"]
    made = replace(made, panels=tuple(panels))
    write_report(
        made, tmp_path, command="python -m reproduction fig1a", timing="This run took 1.5 s."
    )
    with (tmp_path / "runs.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    # Two places, two step sizes, two seeds and all mechanisms.
    assert sum(row["panel"] == "fig4b" for row in rows) == 2 * 2 * 2 * len(MECHANISMS)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    # Panels with more than six lines have a drawing of all of them behind a fold.
    folded = page.count("<details>")
    assert page.count("<img ") > 1 + 2
    assert 0 < folded <= 2
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert "python -m reproduction fig1a" in page
    assert "unit: agent" in page
    assert "This run took 1.5 s." in page
    for claim in made.claims:
        assert claim.evidence.split(";")[0] in html.unescape(page)
    for name in ("fig1a-accumulated-added", "fig4b", "fig4b-added"):
        assert (tmp_path / "figures" / f"{name}.png").stat().st_size > 10_000
        assert (tmp_path / "figures" / f"{name}.svg").exists()
    table = (tmp_path / "claims.md").read_text(encoding="utf-8")
    assert len(table.splitlines()) == 2 + len(made.claims)


def test_the_page_states_which_seeds_chose_step_sizes(tmp_path: Path) -> None:
    for scale, is_said in ((PILOTS, True), (TINY, False), (PILOTS.restrict(num_seeds=1), False)):
        write_report(Reproduction(scale, (), (), (), 0.0), tmp_path, command="", timing="")
        words = " ".join((tmp_path / "report.html").read_text(encoding="utf-8").split())
        said = "step sizes are chosen on 1 of them" in words
        assert said == is_said


NOISE = Panel("fig1a", "fig1a", "title", "ε", "noise", log_y=True)


@pytest.mark.parametrize(
    "places",
    [
        (0.5, 1, 2, 5, 20),
        FULL.epsilons,
        FULL.connectivities,
        tuple(map(float, FULL.sizes)),
        tuple(map(float, range(1, 21))),
        (0.5, 0.51, 0.52, 0.9),
        (3.0,),
    ],
)
def test_labels_of_the_horizontal_axis_do_not_touch(places: tuple[float, ...]) -> None:
    points = [Point(mechanism, x, (1 / x,)) for mechanism in MECHANISMS for x in places]
    figure = plot_panel(NOISE, points)
    figure.draw_without_rendering()
    labels = [label for label in figure.axes[0].get_xticklabels() if label.get_text()]
    assert labels[0].get_text() == f"{places[0]:g}"
    boxes = [label.get_window_extent() for label in labels]
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


def test_titles_are_not_cut() -> None:
    panels = [study.panel for scale in (QUICK, FULL) for study in make_studies(["all"], scale)]
    # If the longest titles fit, so do the others.
    panels.sort(key=lambda panel: (panel.log_y, len(panel.title)))
    num_linear = sum(not panel.log_y for panel in panels)
    for panel in [*panels[max(0, num_linear - 5) : num_linear], *panels[-5:]]:
        # A vertical axis with long labels pushes the title to the right.
        figure = plot_panel(panel, [Point(NONE, x, (200 * x, 220 * x)) for x in (1.0, 1.5)])
        figure.draw_without_rendering()
        (axes,) = figure.axes
        assert axes.get_title(loc="left")
        drawn = axes.get_tightbbox()
        assert drawn is not None
        assert drawn.x1 <= figure.bbox.x1


@pytest.mark.parametrize("scale", [QUICK, FULL])
def test_no_two_lines_of_a_panel_look_the_same(scale: Scale) -> None:
    for study in make_studies(["fig1a", "fig2"], scale):
        assert isinstance(study, NoiseStudy)
        mechanisms = {entry.mechanism for entry in study.entries}
        assert len({style_of(mechanism) for mechanism in mechanisms}) == len(mechanisms)
    named = (*MECHANISMS, *AUTHORS_MECHANISMS)
    assert len({style_of(mechanism) for mechanism in named}) == len(named)


@pytest.mark.parametrize("values", [(), (0.0, 0.0), (1.0, 1.0)])
@pytest.mark.parametrize("log_y", [True, False])
def test_a_panel_without_a_finished_run_is_drawn(
    tmp_path: Path, values: tuple[float, ...], log_y: bool
) -> None:
    panel = Panel("fig3a", "fig3a", "title", "x", "y", log_y=log_y, is_random=True)
    figure = plot_panel(panel, [Point(NONE, 3.0, values)], broken_promises=[3.0])
    save_figure(figure, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000


def find_names(figure: Figure) -> list[Text]:
    """Return the names beside the ends of lines."""
    boxes = [own for own in figure.axes[0].get_children() if isinstance(own, AnnotationBbox)]
    return [text for box in boxes for text in box.offsetbox.findobj(Text)]


def test_points_of_the_paper_beyond_its_promise_are_crossed_out() -> None:
    panel = Panel("fig4a", "fig4a", "title", "ε", "y", log_x=True)
    mechanisms = (CORN_PAPER, LDP_PAPER, NONE)
    points = [Point(mechanism, x, (1 / x,)) for mechanism in mechanisms for x in (10.0, 40.0)]
    figure = plot_panel(panel, points, broken_promises=[40.0])
    crosses = [line for line in figure.axes[0].lines if line.get_marker() == "x"]
    assert [np.asarray(line.get_xdata()).tolist() for line in crosses] == [[40.0], [40.0]]
    assert [text.get_text() for text in figure.axes[0].texts] == ["× exact ε is larger"]
    assert len(find_names(figure)) == len(mechanisms)


def test_every_line_is_named_once_and_names_do_not_touch() -> None:
    points = [Point(mechanism, x, (1 / x,)) for mechanism in MECHANISMS for x in (1.0, 2.0)]
    figure = plot_panel(NOISE, points)
    figure.draw_without_rendering()
    names = find_names(figure)
    assert sorted(name.get_text() for name in names) == sorted(m.label for m in MECHANISMS)
    boxes = sorted((name.get_window_extent() for name in names), key=lambda box: box.y0)
    assert all(lower.y1 <= upper.y0 + 1 for lower, upper in pairwise(boxes))
    assert all(box.x1 <= figure.bbox.x1 for box in boxes)


def test_the_main_panel_has_at_most_six_lines() -> None:
    points = [Point(mechanism, x, (1 / x,)) for mechanism in MECHANISMS for x in (1.0, 2.0)]
    assert len(plot_panel(NOISE, points, lines="main").axes[0].lines) == 6
    assert len(plot_panel(NOISE, points, lines="paper").axes[0].lines) == 3


def test_the_axis_of_an_accuracy_ends_at_zero_and_one() -> None:
    panel = Panel("fig5b", "fig5b", "", "p", "accuracy", lower_is_better=False, is_random=True)
    points = [Point(NONE, x, (0.1, 0.99)) for x in (0.2, 1.0)]
    low, high = plot_panel(panel, points).axes[0].get_ylim()
    assert 0 <= low < 0.54 < high <= 1


@pytest.mark.parametrize(
    ("values", "label"),
    [((120.0, 270.0), "200"), ((4000.0, 52000.0), "10,000"), ((1.0, 1e-5), "10^")],
)
def test_logarithmic_axes_have_plain_numbers_or_over_many_decades_powers_of_ten(
    values: tuple[float, float], label: str
) -> None:
    figure = plot_panel(NOISE, [Point(CORN_PAPER, x, (values[x],)) for x in (0, 1)])
    figure.draw_without_rendering()
    texts = [tick.get_text() for tick in figure.axes[0].get_yticklabels(which="both")]
    assert any(label in text for text in texts)
    assert any("$" in text for text in texts) == (label == "10^")


def test_a_line_that_ends_early_is_named_at_its_end() -> None:
    whole = [Point(LDP_PAPER, x, (1.0,)) for x in (1, 2, 3)]
    part = [Point(CORN_PAPER, x, (0.5,)) for x in (1, 2)]
    (axes,) = plot_panel(NOISE, whole + part).axes
    (name,) = (text for text in axes.texts if text.get_text() == CORN_PAPER.label)
    assert isinstance(name, Annotation)
    assert name.xy == (2, 0.5)
