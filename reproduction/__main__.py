"""``python -m reproduction``: the paper's figures, more mechanisms, and verdicts on its claims."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from corn.cli import run_command
from corn.cli.options import read_numbers
from corn.cli.output import (
    make_progress,
    print_facts,
    print_json,
    print_note,
    print_table,
    save_json,
)
from corn.errors import StoppedByUserError
from reproduction.cells import Cell, CellStore
from reproduction.figures import FIGURES, make_studies
from reproduction.mechanisms import AUTHORS_MECHANISMS, MECHANISMS, choose_mechanisms
from reproduction.report import write_report
from reproduction.run import Reproduction, reproduce
from reproduction.scale import FULL, QUICK

_SETTINGS = (
    "epsilons",
    "connectivities",
    "seeds",
    "graph",
    "agents",
    "steps",
    "clip",
    "mechanisms",
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(context_settings={"help_option_names": ["-h", "--help"]})
def main(
    figures: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FIGURE...",
            help=f"{', '.join(FIGURES)}, a panel such as fig5a-agent, or all (the default).",
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
    mechanisms: Annotated[
        str | None,
        typer.Option(
            help="Lines of the figures, separated by commas: "
            f"{', '.join(one.name for one in MECHANISMS)}, which are the default; "
            f"{', '.join(one.name for one in AUTHORS_MECHANISMS)}, the noise of the authors' code, "
            "in panels of unit sample; NAME=R.npy, a covariance; NAME=FILE.py:FUNCTION, a function "
            "from mixing matrix and precision caps to a covariance."
        ),
    ] = None,
    jobs: Annotated[
        int,
        typer.Option(min=-1, help="Number of processes, of one thread each; -1 is one per core."),
    ] = -1,
    cluster: Annotated[
        str | None,
        typer.Option(help="Run on a Dask cluster: dask, or dask:ADDRESS for a running one."),
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(help="Directory of data sets. (Default: $CORN_DATA, or the user's cache.)"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the claims as JSON.")] = False,
) -> None:
    """Reproduce the paper's figures, and more; finished cells are not computed again."""
    # First of all, while the options are the only local names.
    configuration = dict(locals())
    if quick and full:
        raise typer.BadParameter("--quick and --full exclude each other")
    if jobs == 0:
        raise typer.BadParameter("--jobs must be at least 1, or -1 for all cores")
    scale = (FULL if full else QUICK).restrict(
        epsilons=read_numbers("--epsilons", epsilons) if epsilons else (),
        connectivities=read_numbers("--connectivities", connectivities) if connectivities else (),
        num_seeds=seeds,
        num_agents=agents,
        num_steps=steps,
        clip=clip,
        graph=graph,
        mechanisms=choose_mechanisms(
            [text.strip() for text in mechanisms.split(",")] if mechanisms else []
        ),
    )
    names = figures or ["all"]
    # Before the store makes its folder: a misspelt name leaves none.
    make_studies(names, scale)
    start = time.perf_counter()
    with make_progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[finished]}/{task.fields[cells]} cells"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    ) as shown:
        bar = CellBar(shown)
        # Finished cells are files of their own, so an interruption loses nothing of them.
        try:
            made = reproduce(
                names,
                scale,
                store=CellStore(out / "cells"),
                jobs=jobs,
                cluster=cluster,
                directory=cache,
                on_plan=bar.expect,
                on_done=bar.finish,
            )
        except KeyboardInterrupt:
            raise StoppedByUserError(
                f"interrupted: {len(bar.finished)} of {bar.num_cells} cells are kept in "
                f"{out / 'cells'}; the same command resumes from there"
            ) from None
    seconds = time.perf_counter() - start
    written = write_report(
        made,
        out,
        command=_command(names, configuration),
        timing=f"This run took {seconds:.0f} s; {bar.num_stored} of {bar.num_cells} cells were "
        f"already finished. All cells take {made.compute_seconds:.0f} s on one core.",
    )
    facts = {
        "configuration": configuration,
        "scale": asdict(made.scale),
        "seconds": round(seconds, 1),
        "compute_seconds": round(made.compute_seconds, 1),
        "notes": [*made.notes, *made.breakdowns],
        "claims": [asdict(claim) for claim in made.claims],
    }
    save_json(facts, out / "run.json")
    if json:
        print_json(facts)
    else:
        _print_claims(made)
    print_note(f"wrote {', '.join(map(str, written))}")


class CellBar:
    """A progress bar over all cells, weighted by their estimated cost."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task = bar.add_task("computing", total=None, finished=0, cells=0)
        self.num_cells = 0
        self.num_stored = 0
        self.finished: set[Cell] = set()

    def expect(self, cells: Sequence[Cell]) -> None:
        """Set the length; again after the pilots, which reveal the cells of the other seeds."""
        self.num_cells = len(cells)
        # Costs range from a twentieth of a second to an hour: a count of cells would mislead.
        total = sum(cell.cost for cell in cells)
        self._bar.update(self._task, total=total, cells=len(cells))

    def finish(self, cell: Cell, is_new: bool) -> None:
        """Count a cell; a design that several stages need counts once."""
        if cell in self.finished:
            return
        self.finished.add(cell)
        self.num_stored += not is_new
        done = sum(cell.cost for cell in self.finished)
        self._bar.update(self._task, completed=done, finished=len(self.finished))


def _command(names: Sequence[str], configuration: Mapping[str, object]) -> str:
    """Return the command line that gives the same results."""
    words = ["python", "-m", "reproduction", *names]
    words.append("--full" if configuration["full"] else "--quick")
    for option, value in configuration.items():
        # The others decide where and how it is computed, not what.
        if value is not None and option in _SETTINGS:
            words += [f"--{option}", str(value)]
    # A graph such as er:n={n},p={p},seed={seed} would mean something else to a shell.
    return shlex.join(words)


def _print_claims(made: Reproduction) -> None:
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


if __name__ == "__main__":
    run_command(app, name="python -m reproduction")
