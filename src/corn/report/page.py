"""The report of a reproduction: tables, figures and one self-contained page."""

from __future__ import annotations

import base64
import csv
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import jinja2

from corn.experiments import Claim, Panel, Point, Reproduction
from corn.experiments.claims import find_broken_promises
from corn.report.panels import Lines, choose_lines, plot_panel
from corn.report.style import save_figure
from corn.version import __version__

_LIBRARIES = ("numpy", "scipy", "networkx", "torch", "matplotlib")

SOURCES = {
    "paper": "the paper",
    "expected": "expected from its figures",
    "corn": "this project",
}
FIGURE_TITLES = {
    "fig1a": "Figure 1a. Noise against the privacy budget",
    "fig1b": "Figure 1b. Noise against connectivity",
    "fig1c": "Figure 1c. Noise against the number of agents",
    "fig2": "Figure 2. Noise against the number of seed groups, and of insiders",
    "fig3a": "Figure 3a. Quadratic optimisation against the privacy budget",
    "fig3b": "Figure 3b. Quadratic optimisation against connectivity",
    "fig4a": "Figure 4a. Logistic regression against the privacy budget",
    "fig4b": "Figure 4b. Logistic regression against connectivity",
    "fig5a": "Figure 5a. Image classification against the privacy budget",
    "fig5b": "Figure 5b. Image classification against connectivity",
}


def write_reproduction(
    reproduction: Reproduction, out: Path, *, command: str, timing: str
) -> list[Path]:
    """Write all files into ``out`` and return the main ones, the page first.

    ``runs.csv`` has every run, ``points.csv`` every point of a figure, ``claims.csv`` and
    ``claims.md`` every claim with its verdict. ``figures/`` has every panel as PNG, SVG and PDF:
    with the paper's methods, with the main ones of this project, and with all. The page states
    ``command`` and ``timing``.
    """
    out.mkdir(parents=True, exist_ok=True)
    _write_csv(reproduction.runs, out / "runs.csv")
    _write_csv(
        (_point_row(panel, point) for panel, points in reproduction.panels for point in points),
        out / "points.csv",
    )
    _write_csv((asdict(claim) for claim in reproduction.claims), out / "claims.csv")
    (out / "claims.md").write_text(_claims_markdown(reproduction.claims), encoding="utf-8")
    page = out / "report.html"
    drawings = _draw_all(reproduction, out / "figures")
    page.write_text(_render(reproduction, drawings, command, timing), encoding="utf-8")
    return [page, out / "runs.csv", out / "points.csv", out / "claims.csv"]


def _draw_all(reproduction: Reproduction, directory: Path) -> dict[str, list[dict[str, Any]]]:
    """Save every drawing, and return the drawings of each figure as the page needs them."""
    broken = find_broken_promises(reproduction.scale)
    drawings: dict[str, list[dict[str, Any]]] = {}
    for panel, points in reproduction.panels:
        for name, lines, caption in _list_versions(panel, points):
            figure = plot_panel(panel, points, lines=lines, broken_promises=broken)
            drawn = directory / f"{name}.svg"
            save_figure(figure, drawn)
            save_figure(figure, drawn.with_suffix(".png"))
            save_figure(figure, drawn.with_suffix(".pdf"))
            axes = f"{panel.y_label} against {panel.x_label}"
            drawings.setdefault(panel.figure, []).append(
                {
                    "source": _embed(drawn),
                    "caption": f"{axes}, unit: {panel.unit}; {caption}",
                    "text": f"{axes}, {panel.title}; {caption}",
                    # All lines together are hard to read, so that the page shows them on request.
                    "is_folded": lines == "all",
                }
            )
    return drawings


def _list_versions(panel: Panel, points: Sequence[Point]) -> Iterator[tuple[str, Lines, str]]:
    """Yield the file name, the lines and the caption of each drawing of a panel."""
    if panel.in_paper:
        yield panel.name, "paper", "the paper’s methods"
    methods = [point.method for point in points]
    yield f"{panel.name}-added", "main", "the methods of this project"
    if len(choose_lines(methods, "all")) > len(choose_lines(methods, "main")):
        yield f"{panel.name}-all", "all", "all methods"


def _embed(drawing: Path) -> str:
    """Return an SVG as a data URI, so that the page needs no other file."""
    return "data:image/svg+xml;base64," + base64.b64encode(drawing.read_bytes()).decode("ascii")


def _render(
    reproduction: Reproduction,
    drawings: Mapping[str, Sequence[Mapping[str, Any]]],
    command: str,
    timing: str,
) -> str:
    # Notes and breakdowns quote file names and graphs, hence autoescape.
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    source = resources.files("corn.report").joinpath("page.html").read_text("utf-8")
    scale = reproduction.scale
    return environment.from_string(source).render(
        scale=scale,
        command=command,
        timing=timing,
        figures=[{"title": FIGURE_TITLES[name], "drawings": own} for name, own in drawings.items()],
        verdicts=_count_verdicts(reproduction.claims),
        claims=reproduction.claims,
        trainings=[scale.quadratic, scale.regression, scale.network, scale.softmax],
        notes=reproduction.notes,
        breakdowns=reproduction.breakdowns,
        sources=SOURCES,
        versions={"corn": __version__, "python": platform.python_version()}
        | {name: metadata.version(name) for name in _LIBRARIES},
        machine=platform.platform(),
    )


def _count_verdicts(claims: Sequence[Claim]) -> dict[str, dict[str, int]]:
    """Return how many claims of each source hold, do not hold, or are undecided."""
    # All three verdicts of all sources, so that the page has zeros and no gaps.
    counts = {
        source: dict.fromkeys(("holds", "does not hold", "undecided"), 0) for source in SOURCES
    }
    for claim in claims:
        counts[claim.source][claim.verdict] += 1
    return counts


def _claims_markdown(claims: Sequence[Claim]) -> str:
    rows = [
        f"| {claim.source} | {claim.panel} | {claim.statement} | {claim.verdict} "
        f"| {claim.evidence} |"
        for claim in claims
    ]
    head = ["| source | panel | statement | verdict | evidence |", "|---|---|---|---|---|"]
    return "\n".join([*head, *rows]) + "\n"


def _point_row(panel: Panel, point: Point) -> dict[str, Any]:
    # One seed has no interval. An empty column says so; a 0 would look exact.
    return {
        "panel": panel.name,
        "method": point.method.name,
        "x": point.x,
        "mean": point.mean,
        "half_width_95": "" if panel.is_random and len(point.values) < 2 else point.half_width,
        "num_seeds": len(point.values) if panel.is_random else "",
        "unit": panel.unit,
        "against": point.against,
        "note": point.note,
    }


def _write_csv(rows: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Write rows that may have different columns; a column that a row lacks is empty."""
    table = list(rows)
    # Noise studies and trainings have different columns; the order is that of first appearance.
    columns = list(dict.fromkeys(name for row in table for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
