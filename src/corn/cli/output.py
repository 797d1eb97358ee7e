"""Output of commands: tables for people, JSON for programs, notes and errors on stderr."""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

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
from corn.errors import CornWarning, list_some, make_printable
from corn.files import write_file
from corn.plan import Plan
from corn.privacy import PrivacyBudget
from corn.privacy.rounding import round_bound_down, round_up, round_up_range, write_range

Item = TypeVar("Item")

KAPPA = (
    "standard deviation of disagreement between agents' models, over that of a trusted server's "
    "noise in all steps"
)
"""The meaning of κ, for tables; exact sums have none."""


def print_json(values: Mapping[str, Any]) -> None:
    """Print one JSON object with the version of CorN; infinities become strings, arrays lists."""
    # Not through rich, which would break long lines.
    sys.stdout.write(to_json(values) + "\n")


def to_json(values: Mapping[str, Any]) -> str:
    """Return a result as strict JSON text, with the version that made it first."""
    return json.dumps(_plain({"corn_version": corn.__version__, **values}), indent=2)


def save_json(values: Mapping[str, Any], path: Path, *, is_private: bool = False) -> None:
    """Write the output of ``print_json`` to a file; only its owner can read a private one."""
    write_file(path, to_json(values) + "\n", is_private=is_private)


# Names of facts in tables, where they are not their words.
_NAMES = {
    "adversary": "against",
    "auc": "AUC",
    "central_ratio": "average × server",
    "disagreement_ratio": "κ",
    "ratio_to_ldp": "over LDP",
    "gap": "above the best",
    "gaussian_epsilon": "Gaussian ε",
    "samples_per_agent": "declared samples, which ε does not cover",
    "view": "attacker",
}
_SYMBOLS = {"epsilon": "ε", "delta": "δ", "mu": "μ", "kappa": "κ is the"}
# Facts that the promise and other texts of a result say as well, or that only programs need.
_FOR_PROGRAMS = {
    *("unit", "adjacency", "clip", "participations", "max_colluders", "weighted_central_ratio"),
    *("messages_per_link", "dtype", "configuration", "agents", "sampling", "passed"),
    *("max_parameters", "precision", "grid", "central_ratio", "names", "simulation"),
}
_FOR_GOSSIP = {
    *("gossip", "cooldown_steps", "objective", "value", "lower_bound", "max_streams", "gap"),
}
_ROUNDED_UP = {"epsilon", "delta", "mu", "std", "precision"}
_ROUNDED_DOWN = {"certified", "gaussian", "bound", "cap", "caps"}


def name_fact(key: str) -> str:
    """Return the name of a fact for people.

    >>> name_fact("promised_epsilon"), name_fact("num_steps")
    ('promised ε', 'steps')
    """
    words = [_SYMBOLS.get(word, word) for word in key.split("_") if word != "num"]
    return _NAMES.get(key, " ".join(words))


def write_fact(key: str, value: Any) -> str:
    """Return a fact for people: numbers of a promise on the private side, others with 4 digits.

    >>> write_fact("epsilon", 0.99999999), write_fact("precision_cap", [0.19999999, 2.5])
    ('1', '0.199999 to 2.5')
    """
    if value is None or value is False:
        return ""
    if key == "disagreement_ratio":
        return f"{value:.2f}" if value else ""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        facts = (f"{name_fact(k)} {write_fact(f'{key}_{k}', own)}" for k, own in value.items())
        return ", ".join(facts)
    if isinstance(value, np.ndarray | list | tuple):
        if all(isinstance(own, int | float | np.number) for own in value) and len(value):
            return write_range(value, lambda own: write_fact(key, own))
        return list_some(value)
    if isinstance(value, float):
        words = set(key.split("_"))
        if key == "gap":
            return f"{value:.1%}" if value >= 0.001 else f"{value:.1e}"
        if key in ("certified_epsilon", "gaussian_epsilon"):
            return f"≥ {round_bound_down(value, 3)}"
        if words & _ROUNDED_DOWN:
            return round_bound_down(value)
        return round_up(value) if words & _ROUNDED_UP else f"{value:.4g}"
    return f"{value:,}" if type(value) is int else str(value)


def print_result(title: str, facts: Mapping[str, Any], *, as_json: bool) -> None:
    """Print facts as JSON, or those that fit a line for people."""
    if as_json:
        print_json(facts)
        return
    left_out = _FOR_PROGRAMS | (_FOR_GOSSIP if facts.get("mixing") == "sum" else set())
    lines = [
        (name_fact(key), write_fact(key, value))
        for key, value in facts.items()
        if key not in left_out
        and not (isinstance(value, list) and value and isinstance(value[0], Mapping))
    ]
    print_facts(title, [(name, text) for name, text in lines if text])


def print_facts(title: str, facts: Iterable[tuple[str, str]]) -> None:
    """Print a title and aligned pairs of name and value."""
    head = make_printable(title)
    table = Table(title=head, title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(make_printable(name), make_printable(value))
    _console().print(table)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; its first column names the row, the others are numbers or remarks."""
    table = Table()
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(make_printable, row))
    console = _console()
    # Not as the title of the table, which would be broken into lines of the table's width.
    console.print(Text(make_printable(title), style="italic"))
    console.print(table)


def print_rows(title: str, rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Print some facts of several things as a table."""
    cells = [[write_fact(column, row[column]) for column in columns] for row in rows]
    print_table(title, [name_fact(column) for column in columns], cells)


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


def warn_of_insiders(designs: Iterable[tuple[str, Decomposition, ThreatModel]]) -> None:
    """Print a note on mechanisms whose agents share seeds, and that hold against no insider."""
    names = [name for name, own, threat in designs if own.seed_groups and not threat.max_colluders]
    if names:
        print_note(
            f"{', '.join(names)}: private against an eavesdropper only; an agent can subtract the "
            "noise of every seed that it shares. --mechanism corn --colluders 1 designs noise "
            "against curious agents"
        )


def warn_of_large_disagreement(ratio: float | None) -> None:
    """Print a note on what lowers the disagreement between agents, κ, if it is large."""
    if ratio is None or ratio <= LARGE_DISAGREEMENT:
        return
    if math.isinf(ratio):
        print_note("agents never agree with these weights: --gossip chebyshev:2 lets them agree")
        return
    print_note(
        f"κ = {ratio:.2f} is above {LARGE_DISAGREEMENT:g}: models that are not linear lose "
        "accuracy to disagreement between agents; more rounds (--gossip chebyshev:3) and "
        "--momentum lower it, and --mixing sum makes it 0"
    )


def print_error(text: str) -> None:
    """Print in one line why there is no result."""
    sys.stderr.write(f"corn: {make_printable(text)}\n")


def show_warnings_as_notes() -> None:
    """Show each CorN warning as one line on stderr."""
    # Python shows a warning once per line of code, but a note may concern another agent or file.
    warnings.simplefilter("always", CornWarning)
    default = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *rest: Any, **options: Any) -> None:
        if issubclass(category, CornWarning):
            print_note(str(message))
        else:
            default(message, category, *rest, **options)

    warnings.showwarning = show


def _console() -> Console:
    # A pipe or a file has no width of its own; 80 columns would fold tables that fit a screen.
    # Names come from files, so brackets and colons in them must not be taken for rich's markup.
    width = None if sys.stdout.isatty() else 120
    return Console(highlight=False, markup=False, emoji=False, width=width)


def _plain(value: Any) -> Any:
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


def name_server(budget: PrivacyBudget) -> str:
    """Return the trusted server that keeps the strictest promise for all, and whose it is."""
    n = budget.num_agents or 1
    # By caps, not by ε: δ and sampling decide as well how strict a promise is.
    caps = budget.precision_caps(n)
    strictest = np.flatnonzero(caps == caps.min()).tolist()
    if len(strictest) == n:
        return "a trusted server"
    agents = f"agent{'s' if len(strictest) > 1 else ''} {list_some(strictest)}"
    return f"a trusted server that keeps the promise of {agents} for all"


def describe_server(ratios: tuple[float, float], budget: PrivacyBudget, what: str) -> str:
    """Return ``what`` of the average model over a trusted server's.

    Where promises differ, a second server weights agents by them: ``ratios`` has both numbers.
    """
    central, weighted = ratios
    server = name_server(budget)
    if server == "a trusted server":
        return f"{central:.4g} × a trusted server's {what}"
    return (
        f"{central:.4g} × the {what} of {server}, and {weighted:.4g} × that of a server that "
        "weights agents by their promises"
    )


def describe_average(plan: Plan) -> str:
    """Return the same for the line "noise in the average" of a list of facts."""
    ratios = plan.central_ratio, plan.weighted_central_ratio
    # The reference draws its batches as the agents do, also where the budget counts on fewer
    # samples than they have.
    sampling = " and sampling" if plan.budget.unit == "sample" else ""
    server = describe_server(ratios, plan.budget, "variance")
    return f"{server}, for the same promise{sampling}"


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
    """Return score, ε, unit, adversary and the ratio to a trusted server, if there is a score."""
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
