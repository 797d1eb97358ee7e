"""Output of commands: tables for people, JSON for programs, notes and errors on stderr."""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO, TypeVar

import numpy as np
from rich.console import Console
from rich.progress import (
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    track,
)
from rich.table import Table
from rich.text import Text

import corn
from corn.covariance import Decomposition, Horizon, MechanismName, Objective, ThreatModel
from corn.covariance.decomposition import hidden_precision
from corn.covariance.disagreement import LARGE_DISAGREEMENT, list_remedies
from corn.errors import CornWarning, make_printable
from corn.files import writing_whole
from corn.privacy import PrivacyBudget, account_precision
from corn.privacy.accounting import group_agents
from corn.privacy.rounding import round_up
from corn.topology import Network

JsonValue = Any
Item = TypeVar("Item")

KAPPA = (
    "standard deviation of disagreement between agents' models, over that of a trusted server's "
    "noise in all steps"
)
"""What κ is, for tables; exact sums have none."""

_MOST_AGENTS_TO_EXPOSE = 60


def print_json(values: Mapping[str, JsonValue]) -> None:
    """Print one JSON object with the version of CorN; infinities become strings, arrays lists."""
    # Not through rich, which would break long lines.
    sys.stdout.write(to_json(values) + "\n")


def to_json(values: Mapping[str, JsonValue]) -> str:
    """Return a result as strict JSON text, with the version that made it first."""
    return json.dumps(_plain({"corn_version": corn.__version__, **values}), indent=2)


def save_json(values: Mapping[str, JsonValue], path: Path, *, is_private: bool = False) -> None:
    """Write the output of ``print_json`` to a file; only its owner can read a private one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing_whole(path, is_private=is_private) as partial:
        partial.write_text(to_json(values) + "\n", encoding="utf-8")


def print_facts(title: str, facts: Iterable[tuple[str, str]]) -> None:
    """Print a title and aligned pairs of name and value."""
    table = Table(
        title=make_printable(title),
        title_justify="left",
        show_header=False,
        box=None,
        pad_edge=False,
    )
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(make_printable(name), make_printable(value))
    _console().print(table)


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    section_ends: Collection[int] = (),
) -> None:
    """Print a table; its first column names the row, the others are numbers or remarks.

    Columns without a name are left out if they are empty. A line is drawn below each row whose
    index is in ``section_ends``.
    """
    given = list(rows)
    kept = [k for k, name in enumerate(columns) if name or any(row[k] for row in given)]
    table = Table()
    for k in kept:
        table.add_column(columns[k], justify="left" if k == 0 else "right", overflow="fold")
    for index, row in enumerate(given):
        cells = [make_printable(row[k]) for k in kept]
        table.add_row(*cells, end_section=index in section_ends)
    console = _console()
    # Not as the title of the table, which would be broken into lines of the table's width.
    console.print(Text(make_printable(title), style="italic"))
    console.print(table)


def format_count(count: int, thing: str) -> str:
    """Return a number of things.

    >>> format_count(1, "step"), format_count(5000, "step")
    ('1 step', '5,000 steps')
    """
    return f"{count:,} {thing}" + ("" if count == 1 else "s")


def print_line(text: str | None) -> None:
    """Print one line of a result, if there is one."""
    if text is not None:
        sys.stdout.write(f"{make_printable(text)}\n")
        # Notes on stderr are written at once, and would overtake this line.
        sys.stdout.flush()


def print_note(text: str) -> None:
    """Print a note on stderr, where it does not mix with the result."""
    # Names of files and texts of plans may hold control characters of a terminal.
    sys.stderr.write(f"note: {make_printable(text)}\n")


def collect_sampling(budget: PrivacyBudget) -> dict[str, object]:
    """Return how samples enter mini-batches, for JSON; lists have a value for each agent."""
    queries = budget.queries
    return {
        "sampling": budget.sampling,
        "samples_per_agent": budget.samples_per_agent,
        "sampling_rate": _one_or_each([query.sampling_rate for query in queries]),
        "steps_per_pass": _one_or_each([query.steps_per_pass for query in queries]),
        "participations": _one_or_each(
            [query.participations(budget.num_steps) for query in queries]
        ),
    }


def _one_or_each(values: Sequence[object]) -> object:
    return values[0] if len(set(values)) == 1 else values


def warn_of_insiders(
    decomposition: Decomposition,
    budget: PrivacyBudget,
    threat: ThreatModel,
    *,
    mechanism: MechanismName,
    command: str = "",
) -> None:
    """Print a note on curious agents if the noise was not designed against any.

    ``command`` is the one whose options design noise, if it is another than the running one.
    """
    if threat.max_colluders or not decomposition.seed_groups:
        return
    # The other mechanisms that share seeds refuse insiders.
    options = "--colluders 1" if mechanism == "corn" else "--mechanism corn --colluders 1"
    advice = f"{f'{command} {options}'.strip()} designs noise against curious agents"
    if decomposition.is_shared_by_all:
        print_note(
            f"all agents share one seed, so each can subtract everyone's shared noise; {advice}"
        )
    elif decomposition.num_agents <= _MOST_AGENTS_TO_EXPOSE:
        worst = _worst_exposed(decomposition, budget)
        print_note(
            f"against one curious agent, ε for {budget.queries[0].protects} can be "
            f"{round_up(worst, 3)}; {advice}"
        )
    else:
        print_note(
            f"the noise is not designed against agents, who can subtract shared noise; {advice}"
        )


def _worst_exposed(decomposition: Decomposition, budget: PrivacyBudget) -> float:
    """Return the largest ε of any agent, at its own δ, against any one other agent."""
    n = decomposition.num_agents
    worst = np.zeros(n)
    # One insider after the other: exact, but too slow for large networks.
    for insider in range(n):
        honest, precision = hidden_precision(decomposition, [insider])
        worst[list(honest)] = np.maximum(worst[list(honest)], precision)
    # Among agents with one promise, the least protected has the largest ε.
    return max(
        account_precision(
            [worst[agents].max()], promise.query, num_steps=budget.num_steps
        ).worst_epsilon(promise.delta)
        for promise, agents in group_agents(budget, n).items()
    )


def warn_of_large_disagreement(
    network: Network,
    objective: Objective,
    ratio: float | None,
    *,
    mechanism: MechanismName,
    num_steps: int,
) -> None:
    """Print a note on what lowers the disagreement between agents, κ, if it is large."""
    if ratio is None or ratio <= LARGE_DISAGREEMENT:
        return
    # How the noise of other mechanisms changes with rounds and momentum is not estimated.
    horizon = objective if mechanism == "corn" and isinstance(objective, Horizon) else None
    remedies = list_remedies(network, horizon, num_steps=num_steps, ratio=ratio)
    advice = "; ".join(
        f"{option} makes it {f'about {lower:.2f}' if lower else '0'}"
        for option, lower in remedies.items()
    )
    print_note(
        f"κ = {ratio:.2f} is above {LARGE_DISAGREEMENT:g}: models that are not linear lose "
        f"accuracy to disagreement between agents; {advice or 'more rounds (--gossip) lower it'}"
    )


def format_kappa(ratio: float | None) -> str:
    """Return κ for a table; nothing where agents have one model, or it was not computed.

    >>> format_kappa(1.0714), format_kappa(0.0), format_kappa(None)
    ('1.07', '', '')
    """
    return f"{ratio:.2f}" if ratio else ""


def print_written(*paths: Path | None) -> None:
    """Print a note for each file that was written."""
    for path in paths:
        if path is not None:
            print_note(f"wrote {path}")


def print_error(text: str) -> None:
    """Print in one line why there is no result."""
    sys.stderr.write(f"corn: {make_printable(text)}\n")


def show_warnings_as_notes() -> None:
    """Show each CorN warning as one line on stderr."""
    # Python shows a warning once per line of code, but a note may concern another agent or file.
    warnings.simplefilter("always", CornWarning)
    default = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, CornWarning):
            print_note(str(message))
        else:
            default(message, category, filename, lineno, file, line)

    warnings.showwarning = show


def _console() -> Console:
    # A pipe or a file has no width of its own; 80 columns would fold tables that fit a screen.
    # Names come from files, so brackets and colons in them must not be taken for rich's markup.
    width = None if sys.stdout.isatty() else 120
    return Console(highlight=False, markup=False, emoji=False, width=width)


def _plain(value: JsonValue) -> JsonValue:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        return _plain(value.item())
    # JSON has no infinity; Python would write one that other parsers refuse.
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return str(value) if isinstance(value, Path) else value


def progress(items: Sequence[Item], what: str) -> Iterator[Item]:
    """Yield items with a progress bar on stderr; silent when that is not a terminal."""
    console = Console(stderr=True)
    yield from track(
        items, description=what, console=console, transient=True, disable=not console.is_terminal
    )


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show a spinner and the elapsed time on stderr; silent when that is not a terminal."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with make_progress(*columns) as shown:
        shown.add_task(what, total=None)
        yield


def make_progress(*columns: ProgressColumn) -> Progress:
    """Return a progress display on stderr; silent when that is not a terminal."""
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
