"""Plots of single results stay readable: no title is cut at the edge of its figure."""

from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.offsetbox import AnnotationBbox
from matplotlib.patches import Rectangle

from corn.errors import FileFormatError, InvalidArgumentError
from corn.learn import Row
from corn.report import (
    MECHANISM_COLOURS,
    figure_style,
    plot_comparison,
    plot_training,
    save_figure,
)
from corn.report.figures import choose_styles, darken

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
    for samples in (None, {"Oslo": 10, "1": 20, "$x": 30}):
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
    (axes,) = figure.axes
    labels = [own for own in axes.get_children() if isinstance(own, AnnotationBbox)]
    low, high = (label.get_window_extent() for label in labels)
    assert low.y1 <= high.y0 + 1
    assert axes.get_legend() is None
    # The name stands beside a piece of its line, with the marker of that line.
    samples = [label.findobj(Line2D)[0] for label in labels]
    assert [own.get_marker() for own in samples] == [own.get_marker() for own in axes.lines]
    assert len({own.get_marker() for own in samples}) == 2


def test_a_cool_down_is_shaded_after_the_last_step() -> None:
    rows = [
        {"mechanism": "corn", "step_size": "1", "step": step, "consensus_distance": 1.0}
        for step in (0, 50, 100)
    ]
    (axes,) = plot_training(rows, {"corn": "1"}, cooldown_steps=20).axes
    assert np.asarray(axes.lines[0].get_xdata()).tolist() == [0, 50, 120]
    assert axes.patches[0].get_extents().width > 0
    assert max(axes.get_xticks()) == 100


def test_several_own_mechanisms_are_told_apart() -> None:
    names = ["corn", "ldp", "a", "b", "c", "d", "e", "f"]
    styles = choose_styles(names)
    assert len({(own.colour, own.marker) for own in styles.values()}) == len(names)


def test_fonts_are_those_that_journals_accept(tmp_path: Path) -> None:
    with figure_style(width=3.3, font_size=7):
        figure = plot_comparison([("ldp", "", 20.0)], title="")
        save_figure(figure, tmp_path / "a.pdf")
    assert figure.get_figwidth() == 3.3
    assert figure.axes[0].xaxis.label.get_fontsize() == 7
    written = (tmp_path / "a.pdf").read_bytes()
    assert b"/CIDFontType2" in written, "Type 42"
    assert b"/Type3" not in written


def test_a_figure_of_one_measure_is_as_wide_as_a_column() -> None:
    with figure_style(width=3.3):
        figure = plot_training([_ROW], {"corn": "1"}, measures=["consensus_distance"])
    assert len(figure.axes) == 1
    assert figure.get_figwidth() == 3.3
    with pytest.raises(InvalidArgumentError, match="measures"):
        plot_training([_ROW], {"corn": "1"}, measures=["loss"])


@pytest.mark.parametrize("text", ["font.siz: 8", "font.size: eight", "hello"])
def test_a_style_that_matplotlib_does_not_understand_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.mplstyle").write_text(f"figure.dpi: 100\n{text}\n")
    with (
        pytest.raises(FileFormatError, match="not a style"),
        figure_style(tmp_path / "bad.mplstyle"),
    ):
        pass


def test_a_style_file_changes_figures(tmp_path: Path) -> None:
    before = dict(mpl.rcParams)
    (tmp_path / "mine.mplstyle").write_text("figure.figsize: 2, 3\nfont.size: 6\n")
    with figure_style(tmp_path / "mine.mplstyle"):
        figure = plot_training([_ROW], {"corn": "1"}, title="a run")
    assert list(figure.get_size_inches()) == [2, 3]
    assert figure.axes[0].yaxis.label.get_fontsize() == 6
    assert not figure.axes[0].spines["top"].get_visible(), "the rest is the package's style"
    assert dict(mpl.rcParams) == before
    with (
        pytest.raises(FileFormatError, match="cannot be read as a style"),
        figure_style(tmp_path / "none.mplstyle"),
    ):
        pass


_ROW: Row = {"mechanism": "corn", "step_size": "1", "step": 0, "consensus_distance": 1.0}


def test_bars_have_the_lengths_of_their_ratios() -> None:
    (axes,) = plot_comparison([("ldp", "", 20.0), ("mine", "", 30.0)], title="").axes
    widths = [bar.get_width() for bar in axes.patches if isinstance(bar, Rectangle)]
    assert widths == [20.0, 30.0]
    assert axes.get_xlim()[1] > 30
