"""Output of commands: tables for people, JSON for programs, notes and errors on stderr."""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, NamedTuple, TextIO, TypeVar

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
from corn.covariance import Decomposition, ThreatModel
from corn.covariance.objective import LARGE_DISAGREEMENT
from corn.covariance.problem import weighting_gain
from corn.errors import CornWarning, list_some, make_printable
from corn.files import write_file
from corn.plan import Plan
from corn.privacy import PrivacyBudget
from corn.privacy.rounding import round_up_range

JsonValue = Any
Item = TypeVar("Item")

KAPPA = (
    "standard deviation of disagreement between agents' models, over that of a trusted server's "
    "noise in all steps"
)
"""What κ is, for tables; exact sums have none."""


def print_json(values: Mapping[str, JsonValue]) -> None:
    """Print one JSON object with the version of CorN; infinities become strings, arrays lists."""
    # Not through rich, which would break long lines.
    sys.stdout.write(to_json(values) + "\n")


def to_json(values: Mapping[str, JsonValue]) -> str:
    """Return a result as strict JSON text, with the version that made it first."""
    return json.dumps(_plain({"corn_version": corn.__version__, **values}), indent=2)


def save_json(values: Mapping[str, JsonValue], path: Path, *, is_private: bool = False) -> None:
    """Write the output of ``print_json`` to a file; only its owner can read a private one."""
    write_file(path, to_json(values) + "\n", is_private=is_private)


class Fact(NamedTuple):
    """One entry of a result, for programs and for people.

    Attributes:
        key: The name in JSON; empty for an entry that only people see.
        value: The value in JSON.
        label: The name in a table; empty for an entry that only programs see.
        text: The value in a table; None is the value itself.
    """

    key: str
    value: JsonValue
    label: str = ""
    text: str | None = None


def print_result(title: str, facts: Iterable[Fact], *, as_json: bool) -> None:
    """Print all facts with a key as JSON, or those with a label as aligned lines."""
    listed = list(facts)
    if as_json:
        print_json({fact.key: fact.value for fact in listed if fact.key})
        return
    lines = [(f.label, str(f.value) if f.text is None else f.text) for f in listed if f.label]
    print_facts(title, lines)


class Column(NamedTuple, Generic[Item]):
    """One property of the rows of a result: as ``Fact``, but ``text`` shows a value."""

    key: str
    value: Callable[[Item], JsonValue]
    label: str = ""
    text: Callable[[Any], str] = str


def collect_rows(
    columns: Sequence[Column[Item]], rows: Iterable[Item]
) -> list[dict[str, JsonValue]]:
    """Return the rows for JSON."""
    return [{c.key: c.value(row) for c in columns if c.key} for row in rows]


def print_rows(
    title: str,
    columns: Sequence[Column[Item]],
    rows: Iterable[Item],
    *,
    section_ends: Collection[int] = (),
) -> None:
    """Print the rows as a table."""
    shown = [c for c in columns if c.label]
    print_table(
        title,
        [c.label for c in shown],
        [[c.text(c.value(row)) for c in shown] for row in rows],
        section_ends=section_ends,
    )


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

    A line is drawn below each row whose index is in ``section_ends``.
    """
    table = Table()
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left", overflow="fold")
    for index, row in enumerate(rows):
        table.add_row(*map(make_printable, row), end_section=index in section_ends)
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
    columns: dict[str, list[object]] = {
        "sampling_rate": [query.sampling_rate for query in budget.queries],
        "steps_per_pass": [query.steps_per_pass for query in budget.queries],
        "participations": [query.participations(budget.num_steps) for query in budget.queries],
    }
    return {
        "sampling": budget.sampling,
        "samples_per_agent": budget.samples_per_agent,
        **{k: own[0] if len(set(own)) == 1 else own for k, own in columns.items()},
    }


def warn_of_insiders(names: Sequence[str]) -> None:
    """Print a note on mechanisms whose noise was not designed against curious agents."""
    if names:
        print_note(
            f"{', '.join(names)}: private against an eavesdropper only; an agent can subtract the "
            "noise of every seed that it shares. --mechanism corn --colluders 1 designs noise "
            "against curious agents"
        )


def is_open_to_insiders(noise: Decomposition, threat: ThreatModel) -> bool:
    """Return whether agents share seeds, and the noise does not hold against any of them."""
    return bool(noise.seed_groups) and not threat.max_colluders


def warn_of_large_disagreement(ratio: float | None) -> None:
    """Print a note on what lowers the disagreement between agents, κ, if it is large."""
    if ratio is None or ratio <= LARGE_DISAGREEMENT:
        return
    if math.isinf(ratio):
        print_note("agents never agree with these weights: --weights lazy lets them agree")
        return
    print_note(
        f"κ = {ratio:.2f} is above {LARGE_DISAGREEMENT:g}: models that are not linear lose "
        "accuracy to disagreement between agents; more rounds (--gossip chebyshev:3) and "
        "--momentum lower it, and --mixing sum makes it 0"
    )


def format_kappa(ratio: float | None) -> str:
    """Return κ for a table; nothing where agents have one model, or it was not computed.

    >>> format_kappa(1.0714), format_kappa(0.0), format_kappa(None)
    ('1.07', '', '')
    """
    return f"{ratio:.2f}" if ratio else ""


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


def find_strictest(budget: PrivacyBudget, num_agents: int) -> tuple[int, ...]:
    """Return the agents whose promise needs the most noise; none if all have the same cap."""
    # By caps, not by ε: δ and sampling decide as well how strict a promise is.
    caps = budget.precision_caps(num_agents)
    strictest = np.flatnonzero(caps == caps.min()).tolist()
    return tuple(strictest) if len(strictest) < num_agents else ()


def describe_server(ratios: tuple[float, float], budget: PrivacyBudget, what: str) -> str:
    """Return ``what`` of the average model over a trusted server's, naming the server.

    Where promises differ, one server keeps the strictest for all, and a better one weights agents:
    ``ratios`` has one number for each.

    >>> describe_server((1.2, 1.2), PrivacyBudget(1, 1e-5, num_steps=10, clip=1), "variance")
    "1.2 × a trusted server's variance"
    >>> budget = PrivacyBudget((0.5, 2), 1e-5, num_steps=10, clip=1)
    >>> describe_server((1.2, 6.15), budget, "variance")
    '1.2 × the variance of a trusted server that keeps the promise of agent 0 for all, and 6.15 ×
    that of a server that weights agents by their promises'
    """
    central, weighted = ratios
    strictest = find_strictest(budget, budget.num_agents or 1)
    if not strictest:
        return f"{central:.4g} × a trusted server's {what}"
    return (
        f"{central:.4g} × the {what} of a trusted server that keeps the promise of "
        f"{list_agents(strictest)} for all, and {weighted:.4g} × that of a server that weights "
        "agents by their promises"
    )


def describe_average(plan: Plan) -> str:
    """Return the same for the line "noise in the average" of a list of facts."""
    ratios = plan.central_ratio, plan.weighted_central_ratio
    server = describe_server(ratios, plan.budget, "variance")
    # The reference draws its batches as the agents do, also where the budget counts on fewer
    # samples than they have.
    sampling = " and sampling" if plan.budget.unit == "sample" else ""
    return f"{server}, for the same promise{sampling}"


def describe_reference(budget: PrivacyBudget) -> str:
    """Return what the column with ratios to a trusted server means."""
    n = budget.num_agents or 1
    strictest = find_strictest(budget, n)
    if not strictest:
        return "noise variance of the average over a trusted server's"
    return (
        "noise variance of the average over that of a trusted server that keeps the promise of "
        f"{list_agents(strictest)} for all; multiply by "
        f"{weighting_gain(budget.precision_caps(n)):.3g} for a server that weights agents"
    )


def list_agents(agents: Sequence[object]) -> str:
    """Return the numbers or labels of a few agents, and how many there are beyond these.

    >>> list_agents([3]), list_agents(range(8))
    ('agent 3', 'agents 0, 1, 2, 3, 4 and 3 more')
    """
    return f"agent{'s' if len(agents) > 1 else ''} {list_some(agents)}"


# The score that says most, of those that a task has.
_OUTCOME_SCORES = {
    "test_accuracy_of_average": "{:.1f} % test accuracy",
    "test_accuracy": "{:.1f} % test accuracy",
    "test_loss_of_average": "test loss {:.4g}",
    "test_loss": "test loss {:.4g}",
    "optimality_gap": "optimality gap {:.4g}",
    "train_loss": "training loss {:.4g}",
}


def describe_outcome(
    scores: Mapping[str, object],
    spent: object,
    budget: PrivacyBudget,
    threat: ThreatModel,
    ratios: tuple[float, float],
    *,
    is_simulated: bool,
) -> str | None:
    """Return score, ε, unit, adversary and the ratio to a trusted server, if there is a score.

    >>> budget = PrivacyBudget(1, 1e-5, num_steps=10, clip=1)
    >>> settings = (budget, ThreatModel(1), (1.2, 1.2))
    >>> describe_outcome({"test_accuracy": 0.9312}, 1.0, *settings, is_simulated=False)
    "93.1 % test accuracy at ε = 1 for one agent's whole data set, against an eavesdropper and one
    insider, with 1.2 × a trusted server's noise variance in the average model"
    """
    found = [(scores.get(name), words) for name, words in _OUTCOME_SCORES.items()]
    said = [
        words.format(100 * value if "%" in words else value)
        for value, words in found
        # NaN, which is not equal to itself, stands for a score that was not measured.
        if isinstance(value, float) and value == value
    ]
    if not said:
        return None
    kind = "simulated ε" if is_simulated else "ε"
    insiders = f" and {threat.describe_colluders()}" if threat.max_colluders else ""
    server = describe_server(ratios, budget, "noise variance in the average model")
    return (
        f"{said[0]} at {kind} = {round_up_range(spent)} for {budget.queries[0].protects}, against "
        f"an eavesdropper{insiders}, with {server}"
    )
