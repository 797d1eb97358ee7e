"""``corn reproduce``: the paper's figures, what goes past them, and whether its claims hold."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from corn.cli.output import print_facts, print_json, print_note, print_table, save_json
from corn.errors import InvalidArgumentError, StoppedByUserError

if TYPE_CHECKING:
    from corn.experiments import Reproduction
    from corn.experiments.cells import Cell

EXAMPLE = "corn reproduce fig1a fig1b --quick --out out/reproduction"


def reproduce(
    figures: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FIGURE...",
            help="fig1a, fig1b, fig1c, fig2, fig3a … fig5b, a panel such as fig5a-agent, or all "
            "(default).",
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="A few minutes: small network, embedded data sets. The default."
        ),
    ] = False,
    full: Annotated[
        bool,
        typer.Option("--full", help="The paper's settings on a9a and MNIST: see corn data. Hours."),
    ] = False,
    out: Annotated[
        Path, typer.Option(help="A directory for report.html, figures, tables and finished cells.")
    ] = Path("out/reproduction"),
    epsilons: Annotated[
        str | None, typer.Option(help="Other values of ε, with commas, where ε varies.")
    ] = None,
    connectivities: Annotated[
        str | None, typer.Option(help="Other values of p, with commas, where p varies.")
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Another number of seeds for every task. On MNIST the first chooses step sizes.",
        ),
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=-1, help="Processes, of one thread each; -1 is one for each core.")
    ] = -1,
    cluster: Annotated[
        str | None,
        typer.Option(help="Run on dask or ray, with :ADDRESS for one that runs elsewhere."),
    ] = None,
    cache: Annotated[Path | None, typer.Option(help="Where data sets are kept.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the claims as JSON.")] = False,
) -> None:
    """Reproduce the paper's figures, and go past them; what was finished is not computed again."""
    configuration = dict(locals())
    from corn import experiments
    from corn.report.page import write_reproduction

    if quick and full:
        raise typer.BadParameter("--quick and --full exclude each other")
    if jobs == 0:
        raise typer.BadParameter("--jobs must be at least 1, or -1 for all cores")
    scale = (experiments.FULL if full else experiments.QUICK).restrict(
        epsilons=_parse_numbers("epsilons", epsilons),
        connectivities=_parse_numbers("connectivities", connectivities),
        num_seeds=seeds,
    )
    names = figures or ["all"]
    store = experiments.CellStore(out / "cells")

    def count_cells() -> tuple[int, int]:
        cells = experiments.list_cells(names, scale, store=store)
        return sum(store.load(cell) is not None for cell in cells), len(cells)

    found, _ = count_cells()
    store.directory.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with _progress() as bar:
        try:
            made = experiments.reproduce(
                names,
                scale,
                store=store,
                jobs=jobs,
                cluster=cluster,
                directory=cache,
                on_plan=bar.expect,
                on_done=bar.finish,
            )
        except KeyboardInterrupt:
            kept, total = count_cells()
            raise StoppedByUserError(
                f"interrupted: {kept} of {total} cells are kept in {store.directory}; the same "
                "command goes on from there"
            ) from None
    seconds = time.perf_counter() - start
    _, total = count_cells()
    written = write_reproduction(
        made,
        out,
        command=_command(names, configuration),
        timing=f"It took {seconds:.0f} s, with {found} of {total} cells found finished; all "
        f"of them from nothing take {made.compute_seconds:.0f} s of one core.",
    )
    facts = _facts(made, configuration, seconds)
    save_json(facts, out / "run.json")
    if json:
        print_json(facts)
    else:
        _print(made)
    print_note(f"wrote {', '.join(map(str, written))}")


def _parse_numbers(name: str, text: str | None) -> tuple[float, ...]:
    try:
        return () if text is None else tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise InvalidArgumentError(
            f"{name} must be numbers with commas, found {text!r}: try 3,10,30"
        ) from error


class _MatrixBar:
    """A bar over the whole matrix, by what its cells cost."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._finished: set[Cell] = set()
        self._task = bar.add_task("computing", total=None, finished=0, cells=0)

    def expect(self, cells: Sequence[Cell]) -> None:
        """Set its length: again whenever more is known."""
        total = sum(cell.cost for cell in cells)
        self._bar.update(self._task, total=total, cells=len(cells))

    def finish(self, cell: Cell) -> None:
        """Count a cell, once."""
        self._finished.add(cell)
        done = sum(own.cost for own in self._finished)
        self._bar.update(self._task, completed=done, finished=len(self._finished))


@contextmanager
def _progress() -> Iterator[_MatrixBar]:
    """One bar over the whole matrix, on stderr; silent when that is not a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[finished]}/{task.fields[cells]} cells"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        yield _MatrixBar(bar)


def _command(names: Sequence[str], configuration: Mapping[str, object]) -> str:
    """The command line that gives the same again."""
    words = ["corn reproduce", *names, "--full" if configuration["full"] else "--quick"]
    for option in ("epsilons", "connectivities", "seeds"):
        if configuration[option] is not None:
            words.append(f"--{option} {configuration[option]}")
    return " ".join(words)


def _facts(
    made: Reproduction, configuration: Mapping[str, object], seconds: float
) -> dict[str, object]:
    return {
        "configuration": configuration,
        "scale": asdict(made.scale),
        "seconds": round(seconds, 1),
        "compute_seconds": round(made.compute_seconds, 1),
        "notes": [*made.notes, *made.breakdowns],
        "claims": [asdict(claim) for claim in made.claims],
    }


def _print(made: Reproduction) -> None:
    """What does not simply hold; the page has it all."""
    doubted = [claim for claim in made.claims if claim.verdict != "holds"]
    count = f"{len(made.claims) - len(doubted)} of {len(made.claims)} statements hold"
    if not doubted:
        print_facts(f"{count} at scale {made.scale.name}", [])
        return
    print_table(
        f"{count} at scale {made.scale.name}; these do not, or are undecided:",
        ["panel", "statement (source)", "verdict", "evidence"],
        [
            [claim.panel, f"{claim.statement} ({claim.source})", claim.verdict, claim.evidence]
            for claim in doubted
        ],
    )
