"""``corn reproduce``: the paper's figures, further methods, and verdicts on its claims."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from corn.checks import require
from corn.cli.output import (
    make_progress,
    print_facts,
    print_json,
    print_note,
    print_table,
    save_json,
)
from corn.cli.promises import parse_numbers
from corn.errors import StoppedByUserError

if TYPE_CHECKING:
    from corn.experiments import CellStore, Reproduction, Scale
    from corn.experiments.cells import Cell
    from corn.experiments.methods import MethodSpec

_OWN_SETTINGS = ("graph", "agents", "steps", "clip", "methods")
EXAMPLE = "corn reproduce fig1a fig1b --quick --out out/reproduction"


def reproduce(
    figures: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FIGURE...",
            help="fig1a, fig1b, fig1c, fig2, fig3a … fig5b, a panel such as fig5a-agent, or all "
            "(the default).",
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Reduced scale, a few minutes: a small network and embedded data sets. The "
            "default.",
        ),
    ] = False,
    full: Annotated[
        bool,
        typer.Option(
            "--full", help="The paper's settings on a9a and MNIST (see corn data): hours."
        ),
    ] = False,
    out: Annotated[
        Path, typer.Option(help="Directory for report.html, figures, tables and finished cells.")
    ] = Path("out/reproduction"),
    epsilons: Annotated[
        str | None, typer.Option(help="Values of ε in panels that vary ε, separated by commas.")
    ] = None,
    connectivities: Annotated[
        str | None, typer.Option(help="Values of p in panels that vary p, separated by commas.")
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of seeds for every task. On MNIST, step sizes are chosen with the first.",
        ),
    ] = None,
    graph: Annotated[
        str | None,
        typer.Option(
            help="Graph spec or file, in which {n}, {p} and {seed} stand for the number of agents, "
            "the connectivity and the seed. Figures that vary what it does not contain are left "
            "out. (Default: er:n={n},p={p},seed={seed}.)"
        ),
    ] = None,
    agents: Annotated[int | None, typer.Option(min=2, help="Number of agents n.")] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Number of training steps T of every task.")
    ] = None,
    clip: Annotated[
        float | None, typer.Option(help="Largest norm C of a clipped gradient.")
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Lines of the figures, separated by commas: ldp-paper, decor-paper, corn-paper, "
            "ldp, corn-one-step, decor, corn, corn-1-insider, corn-2-insiders, corn-defaults, "
            "corn-defaults-1-insider, central, none; and ldp-authors, decor-authors, corn-authors, "
            "the noise of the authors' code, in panels of unit sample. (Default: all but these "
            "three.)"
        ),
    ] = None,
    mechanism: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=SOURCE",
            help="One more line: NAME=R.npy, a covariance, or NAME=FILE.py:FUNCTION, a function "
            "from mixing matrix and precision caps to a covariance. Can be given several times.",
        ),
    ] = None,
    jobs: Annotated[
        int,
        typer.Option(min=-1, help="Number of processes, of one thread each; -1 is one per core."),
    ] = -1,
    cluster: Annotated[
        str | None,
        typer.Option(help="Run on dask or ray, with :ADDRESS for a running cluster."),
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(help="Directory of data sets. (Default: $CORN_DATA, or the user's cache.)"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the claims as JSON.")] = False,
) -> None:
    """Reproduce the paper's figures with further methods; finished cells are not computed again."""
    # First of all, while the options are the only local names.
    configuration = dict(locals())
    # Inside, because both need torch, whose import takes seconds that `corn --help` need not wait.
    from corn import experiments
    from corn.report.page import write_reproduction

    if quick and full:
        raise typer.BadParameter("--quick and --full exclude each other")
    if jobs == 0:
        raise typer.BadParameter("--jobs must be at least 1, or -1 for all cores")
    scale = (experiments.FULL if full else experiments.QUICK).restrict(
        epsilons=parse_numbers("epsilons", epsilons, example="3,10,30"),
        connectivities=parse_numbers("connectivities", connectivities, example="0.2,0.6,1"),
        num_seeds=seeds,
        num_agents=agents,
        num_steps=steps,
        clip=clip,
        graph=graph,
        methods=_choose_lines(methods, mechanism),
    )
    names = figures or ["all"]
    store = experiments.CellStore(out / "cells")
    found, _ = _count_cells(names, scale, store)
    # After the cells were counted, which checks names and settings: a typo leaves no folder.
    store.directory.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    try:
        with _show_cells() as bar:
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
        seconds = time.perf_counter() - start
        # The pilots have shown which cells are needed, so the total may differ from the forecast.
        _, total = _count_cells(names, scale, store)
        written = write_reproduction(
            made,
            out,
            command=_command(names, configuration),
            timing=f"This run took {seconds:.0f} s; {found} of {total} cells were already "
            f"finished. All cells take {made.compute_seconds:.0f} s on one core.",
        )
    # Finished cells are files of their own, so nothing of them is lost.
    except KeyboardInterrupt:
        kept, total = _count_cells(names, scale, store)
        raise StoppedByUserError(
            f"interrupted: {kept} of {total} cells are kept in {store.directory}; the same command "
            "resumes from there"
        ) from None
    facts = _facts(made, configuration, seconds)
    save_json(facts, out / "run.json")
    if json:
        print_json(facts)
    else:
        _print(made)
    print_note(f"wrote {', '.join(map(str, written))}")


def _choose_lines(names: str | None, own: Sequence[str] | None) -> tuple[MethodSpec, ...]:
    """Return the lines of the figures; none stands for all."""
    from corn.experiments import methods

    if names is None and not own:
        return ()
    usual: tuple[MethodSpec, ...] = methods.METHODS
    if names is not None:
        usual = methods.choose_methods([name.strip() for name in names.split(",")])
    added = [methods.make_own_method(spec) for spec in own or ()]
    names_added = [method.name for method in added]
    # Two lines of one name would share their points and their noise.
    is_unique = len(set(names_added)) == len(names_added)
    require(is_unique, "mechanism", "given with different names", ", ".join(names_added))
    return (*usual, *added)


def _count_cells(names: Sequence[str], scale: Scale, store: CellStore) -> tuple[int, int]:
    """Return how many cells the store has, and how many the figures need."""
    from corn.experiments import list_cells

    cells = list_cells(names, scale, store=store)
    return sum(store.load(cell) is not None for cell in cells), len(cells)


@contextmanager
def _show_cells() -> Iterator[_CellBar]:
    """Show one progress bar over all cells."""
    with make_progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[finished]}/{task.fields[cells]} cells"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    ) as shown:
        yield _CellBar(shown)


class _CellBar:
    """A progress bar over all cells, weighted by their estimated cost."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._finished: set[Cell] = set()
        self._task = bar.add_task("computing", total=None, finished=0, cells=0)

    def expect(self, cells: Sequence[Cell]) -> None:
        """Set the length; again after the pilots, which reveal the cells of the other seeds."""
        # Costs range from a twentieth of a second to an hour: a count of cells would mislead.
        total = sum(cell.cost for cell in cells)
        self._bar.update(self._task, total=total, cells=len(cells))

    def finish(self, cell: Cell) -> None:
        """Count a cell; a design that several stages need counts once."""
        self._finished.add(cell)
        done = sum(own.cost for own in self._finished)
        self._bar.update(self._task, completed=done, finished=len(self._finished))


def _command(names: Sequence[str], configuration: Mapping[str, object]) -> str:
    """Return the command line that gives the same results."""
    words = ["corn", "reproduce", *names, "--full" if configuration["full"] else "--quick"]
    for option in ("epsilons", "connectivities", "seeds", *_OWN_SETTINGS):
        if configuration[option] is not None:
            words += [f"--{option}", str(configuration[option])]
    for own in cast("list[str]", configuration["mechanism"] or []):
        words += ["--mechanism", own]
    # A graph such as er:n={n},p={p},seed={seed} would mean something else to a shell.
    return shlex.join(words)


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
    """Print the claims that do not hold or are undecided; the page has all of them."""
    doubted = [claim for claim in made.claims if claim.verdict != "holds"]
    count = f"{len(made.claims) - len(doubted)} of {len(made.claims)} claims hold"
    if not doubted:
        print_facts(f"{count} at scale {made.scale.name}", [])
        return
    print_table(
        f"{count} at scale {made.scale.name}; these do not hold or are undecided:",
        ["panel", "claim (source)", "verdict", "evidence"],
        [
            [claim.panel, f"{claim.statement} ({claim.source})", claim.verdict, claim.evidence]
            for claim in doubted
        ],
    )
