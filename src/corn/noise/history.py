"""The history of an agent's releases: all ledgers beside its keys, and which of them are missing.

A key's file lists the plans that it was used with. So a ledger that was deleted, or left behind
when the key was copied, is noticed: its releases still count, and the total is then unknown. What
cannot be noticed is stated in ``docs/privacy.md``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from corn.covariance import ThreatModel
from corn.errors import FileFormatError
from corn.noise.keys import list_used_plans
from corn.noise.ledger_file import LOST_COUNT, LedgerContent, is_open, read_ledger
from corn.privacy.composition import Expense, TotalLoss, compose_expenses
from corn.privacy.rounding import round_up, write_exactly

_AGENT_FILE = re.compile(r"agent-(\d{1,9})(?:-[0-9a-f]{16}\.ledger|\.key)")


@dataclass(frozen=True)
class LedgerRecord:
    """The releases by one ledger.

    Attributes:
        path: the ledger's file.
        content: what is in it.
        is_running: whether a process has it open now, and may add releases.
    """

    path: Path
    content: LedgerContent
    is_running: bool = False


@dataclass(frozen=True)
class ReleaseHistory:
    """All releases of one agent's data that are known.

    Attributes:
        agent: its number.
        records: one for each ledger.
        problems: folders and ledgers that are missing or cannot be read, each in a line. With any,
            the total of ``records`` is only a lower bound.
    """

    agent: int
    records: tuple[LedgerRecord, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def expenses(self) -> tuple[Expense, ...]:
        """The releases under each plan."""
        return tuple(record.content.expense for record in self.records)


@dataclass(frozen=True)
class HistoryLoss:
    """The privacy of everything that one agent has released.

    Attributes:
        history: the releases.
        alone: the loss under each plan by itself, for the unit that it protects.
        total: all together, for the largest unit that every plan protects.
        agent_total: all together for the agent's whole data; its ε is infinite if any plan
            protects only samples.
    """

    history: ReleaseHistory
    alone: tuple[TotalLoss, ...]
    total: TotalLoss
    agent_total: TotalLoss

    @property
    def is_lower_bound(self) -> bool:
        """Whether more was released than the ledgers that are left show."""
        return bool(self.history.problems)


def compose_history(history: ReleaseHistory, delta: float) -> HistoryLoss:
    """Return the loss of an agent's releases at one δ, plan by plan and together."""
    expenses = history.expenses
    return HistoryLoss(
        history,
        alone=tuple(compose_expenses([own], delta, unit=own.query.unit) for own in expenses),
        total=compose_expenses(expenses, delta),
        agent_total=compose_expenses(expenses, delta, unit="agent"),
    )


def ledger_path(folder: Path, agent: int, plan: str) -> Path:
    """Return where an agent's ledger under a plan lies, by the plan's fingerprint."""
    # One ledger per plan: a budget is one plan's, and releases under another do not count to it.
    return folder / f"agent-{agent}-{plan[:16]}.ledger"


def find_agents(folder: Path) -> list[int]:
    """Return the agents that have a key or a ledger in a folder.

    Raises:
        FileFormatError: there are none, or it is no folder.
    """
    if not folder.is_dir():
        raise FileFormatError(f"{folder}: is not a folder of keys and ledgers")
    matches = (_AGENT_FILE.fullmatch(path.name) for path in folder.iterdir())
    agents = sorted({int(match[1]) for match in matches if match is not None})
    if not agents:
        raise FileFormatError(f"{folder}: has no agent's key or ledger")
    return agents


def read_history(
    folders: Sequence[Path], agent: int, *, without: Path | None = None
) -> ReleaseHistory:
    """Read everything that an agent has released by the ledgers in some folders of keys.

    Args:
        folders: whose agents of this number have the same data. One that is given twice counts
            once, and one that does not exist is a problem.
        agent: its number.
        without: a ledger to leave out, because the caller has it open.
    """
    records: list[LedgerRecord] = []
    problems: list[str] = []
    unique: dict[Path, Path] = {}
    for folder in folders:
        # The first name is kept, by which callers recognise their own ledger.
        unique.setdefault(folder.resolve(), folder)
    for folder in unique.values():
        # A wrong name must not pass for a folder without releases.
        if not folder.is_dir():
            problems.append(f"{folder}: is not a folder of keys and ledgers")
            continue
        for path in sorted(folder.glob(f"agent-{agent}-*.ledger")):
            if without is not None and path.resolve() == without.resolve():
                continue
            try:
                # Asked first: a run that ends meanwhile has released more than was read.
                was_running = is_open(path)
                content = read_ledger(path)
                records.append(LedgerRecord(path, content, was_running or is_open(path)))
            except FileFormatError as error:
                problems.append(str(error))
        problems += _find_missing(folder, agent)
    return ReleaseHistory(agent, tuple(records), tuple(problems))


def describe_total(total: TotalLoss) -> str:
    """Return a total in words, with unit, neighbours and adversary."""
    if total.max_colluders is None:
        return "ε = 0, as nothing was released"
    protected = "one agent's whole data set" if total.unit == "agent" else "one sample of one agent"
    return (
        f"{show_epsilon(total)} at δ = {write_exactly(total.delta)} for {protected} "
        f"({total.relation} adjacency), against {ThreatModel(total.max_colluders).describe()}"
    )


def show_epsilon(total: TotalLoss) -> str:
    """Return the ε of a total, rounded up."""
    if math.isinf(total.epsilon):
        return "no ε that can be proved"
    return f"ε = {round_up(total.epsilon)}"


def explain_missing(path: Path) -> str:
    """Return why a plan whose ledger is gone cannot be used again, and what that does."""
    return f"{path}: is missing, although the key beside it was used with this plan. {LOST_COUNT}"


def _find_missing(folder: Path, agent: int) -> Iterator[str]:
    key = folder / f"agent-{agent}.key"
    # Ledgers may be kept after their key was destroyed.
    if not key.exists():
        return
    for plan in list_used_plans(key):
        path = ledger_path(folder, agent, plan)
        if not path.exists():
            yield explain_missing(path)
