"""Plots of single results stay readable: no title is cut at the edge of its figure."""

import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from corn.report import MECHANISM_COLOURS, plot_comparison, plot_training
from corn.report.style import darken

LONG_TITLE = (
    "graphs/a$b/er.edges, breast-cancer, mechanism corn, ε = 10 and δ = 1e-05 for each agent "
    "after 5000 steps, unit: agent (the mini-batch gradient is clipped once to 0.1), against "
    "one insider who knows a seed for each pair"
)


def assert_title_is_inside(figure: Figure) -> None:
    figure.draw_without_rendering()
    (title,) = (text.get_window_extent() for text in figure.texts)
    page = figure.bbox
    assert page.x0 <= title.x0 < title.x1 <= page.x1
    assert title.y1 <= page.y1


@pytest.mark.parametrize("scores", [(), ("test_loss",), ("test_loss", "test_accuracy")])
def test_the_title_of_a_run_is_not_cut(scores: tuple[str, ...]) -> None:
    rows = [
        {"mechanism": "corn", "step_size": "0.1", "step": step, "consensus_distance": 1.0}
        | dict.fromkeys(scores, 0.5)
        for step in (1, 2)
    ]
    for samples in (None, [10, 20, 30]):
        figure = plot_training(rows, {"corn": "0.1"}, samples, title=LONG_TITLE)
        assert len(figure.axes) == len(scores) + 1
        assert_title_is_inside(figure)


def test_the_title_of_a_comparison_is_not_cut() -> None:
    rows = [("ldp", "any insiders", 20.0), ("corn", "pairs · one insider", 1.05)]
    assert_title_is_inside(plot_comparison(rows, title=LONG_TITLE))


def test_names_of_lines_can_be_read_on_white() -> None:
    """The contrast is at least 4.5, as the guidelines for accessible content ask of text."""
    for colour in (*MECHANISM_COLOURS.values(), "#56B4E9"):
        red, green, blue = (
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
            for c in to_rgb(darken(colour))
        )
        assert 1.05 / (0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05) >= 4.5, colour


def test_lines_of_a_run_are_named_at_their_ends() -> None:
    rows = [
        {"mechanism": name, "step_size": "1", "step": step, "consensus_distance": height}
        for name, height in (("corn", 1.0), ("ldp", 1.01))
        for step in (1, 2)
    ]
    figure = plot_training(rows, {"corn": "1", "ldp": "1"}, None, title="")
    figure.draw_without_rendering()
    low, high = (text.get_window_extent() for text in figure.axes[0].texts)
    assert low.y1 <= high.y0 + 1
    assert figure.axes[0].get_legend() is None


def test_bars_have_the_lengths_of_their_ratios() -> None:
    (axes,) = plot_comparison([("ldp", "", 20.0), ("mine", "", 30.0)], title="").axes
    widths = [bar.get_width() for bar in axes.patches if isinstance(bar, Rectangle)]
    assert widths == [20.0, 30.0]
    assert axes.get_xlim()[1] > 30
