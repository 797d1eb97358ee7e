"""The total of everything that is released of an agent's data, and the owner's limit on it.

The promise of a plan is for one plan. Its owner decides how much all plans together may reveal.
Totals are for the owner alone: they show what else the data was used for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from corn.checks import require
from corn.distributed.startup.keyring import Ledger, find_terms
from corn.errors import CornError
from corn.noise.history import (
    LedgerRecord,
    describe_total,
    ledger_path,
    read_history,
    show_epsilon,
)
from corn.plan import Plan, fingerprint
from corn.privacy.composition import Expense, TotalLoss, common_unit, compose_expenses
from corn.privacy.rounding import write_exactly


class LifetimeSpentError(CornError):
    """A run that would exceed the owner's limit; the message is for the owner alone.

    Attributes:
        public_reason: what other agents may know.
    """

    public_reason = "its owner's limit on all releases does not allow this run"


@dataclass(frozen=True)
class Lifetime:
    """An owner's limit on everything that is released of an agent's data.

    Attributes:
        epsilon: the most that the total may be; None has no limit, and only states the total.
        delta: δ of the total; None takes the plan's.
        other_keys: more folders of keys whose agent of the same number has the same data.
    """

    epsilon: float | None = None
    delta: float | None = None
    other_keys: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        require(
            self.epsilon is None or self.epsilon > 0,
            "lifetime_epsilon",
            "positive",
            self.epsilon,
            advice="leave it out to have no limit",
        )
        is_fraction = self.delta is None or 0 < self.delta < 1
        require(is_fraction, "lifetime_delta", "in (0, 1)", self.delta, advice="try 1e-5")


@dataclass(frozen=True)
class LifetimeTotal:
    """The totals of an agent around a run, for its owner alone.

    Attributes:
        before: what was released before.
        added: what this run adds at most, by itself.
        after: the total after this run, at most.
        problems: ledgers that are lost or damaged; with any, the totals are lower bounds.
        uncounted: other folders beside the keys that have ledgers, perhaps of the same data.
        drops_agent: whether plans before promised something for the agent's whole data, and nothing
            is promised for it any more.
    """

    before: TotalLoss
    added: TotalLoss
    after: TotalLoss
    problems: tuple[str, ...] = ()
    uncounted: tuple[Path, ...] = ()
    drops_agent: bool = False

    def describe(self) -> str:
        """Return the totals in one line, with what they protect and against whom."""
        about = "at least " if self.problems else ""
        rest = "; nothing is promised for the agent's whole data any more" * self.drops_agent
        rest += "".join(f"; {problem}" for problem in self.problems)
        if self.uncounted:
            names = ", ".join(path.name for path in self.uncounted)
            rest += f"; not counted are the ledgers in {names}: name those of the same data as "
            rest += "other keys (--other-keys)"
        return (
            f"all releases of this data before this run: {about}{show_epsilon(self.before)}; this "
            f"run by itself: at most {show_epsilon(self.added)}; total after it: "
            f"{about or 'at most '}{describe_total(self.after)}{rest}"
        )

    def require_within(self, lifetime: Lifetime) -> None:
        """Raise ``LifetimeSpentError`` if the total after the run is unknown or above the limit."""
        if lifetime.epsilon is None:
            return
        limit = f"the limit of ε = {write_exactly(lifetime.epsilon)} on all releases of this data"
        if self.problems:
            raise LifetimeSpentError(
                f"refuses to start, as {limit} cannot be kept while the total is unknown: "
                f"{self.problems[0]}"
            )
        # Negated, so that an ε of NaN refuses too.
        if not self.after.epsilon <= lifetime.epsilon:
            raise LifetimeSpentError(
                f"refuses to start, as the total would exceed {limit}; {self.describe()}"
            )


def check_lifetime(
    plan: Plan, agent: int, *, keys: Path, ledger: Ledger, lifetime: Lifetime, num_steps: int
) -> LifetimeTotal:
    """Return the totals of an agent before the first release of a run of ``num_steps`` steps.

    Raises:
        LifetimeSpentError: the total would exceed the owner's limit, or is unknown.
    """
    terms = find_terms(plan, agent)
    own = Expense(terms, ledger.precision, terms.budget.num_steps - ledger.remaining)
    path = ledger_path(keys, agent, fingerprint(plan).hex())
    # The own ledger is locked by this process and passed in; its file would count the same releases
    # again.
    history = read_history([keys, *lifetime.other_keys], agent, without=path)
    others = [_foresee(record) for record in history.records]
    total = _add_run(others, own, num_steps, lifetime, history.problems)
    total.require_within(lifetime)
    return replace(total, uncounted=_find_uncounted(keys, lifetime))


def bound_lifetime(
    runs: Mapping[int, Expense], *, plan: str, keys: Path, lifetime: Lifetime, num_steps: int
) -> LifetimeTotal:
    """Return the totals of the agent that will have released most, or a little more.

    Agents with the same plans and terms are counted as one that has, for each plan, the most
    releases and the largest precision of any: one composition instead of one for each agent.

    Args:
        runs: for each agent the terms of the plan and its largest precision under it.
        plan: the plan's fingerprint in hexadecimal; empty if agents have yet to make it.
        keys: the folder of keys and ledgers.
        lifetime: its limit is not checked here.
        num_steps: the most steps of the run.
    """
    kinds: dict[tuple[object, ...], list[list[Expense]]] = {}
    problems: list[str] = []
    for agent, run in runs.items():
        history = read_history([keys, *lifetime.other_keys], agent)
        problems += history.problems
        path = ledger_path(keys, agent, plan)
        rest = [record for record in history.records if record.path != path]
        spent = sum(r.content.expense.num_releases for r in history.records if r.path == path)
        kind = run.terms, *((r.content.plan, r.content.expense.terms) for r in rest)
        expenses = [replace(run, num_releases=spent), *map(_foresee, rest)]
        kinds.setdefault(kind, []).append(expenses)
    totals = []
    for found in kinds.values():
        # The loss grows with releases and with precision, so the largest of each bound every agent
        # of a kind.
        own, *others = (_find_largest(expenses) for expenses in zip(*found, strict=True))
        # A folder that does not exist is a problem of every agent, and is named once.
        named = tuple(dict.fromkeys(problems))
        totals.append(_add_run(others, own, num_steps, lifetime, named))
    worst = max(totals, key=lambda total: total.after.epsilon)
    return replace(worst, uncounted=_find_uncounted(keys, lifetime))


def _foresee(record: LedgerRecord) -> Expense:
    """Return the releases by a ledger, in full if a process runs its plan now."""
    expense = record.content.expense
    limit = expense.terms.budget.num_steps
    # Another process may release all that is left while this run lasts: the limit must hold even
    # then.
    return replace(expense, num_releases=limit) if record.is_running else expense


def _find_largest(expenses: Iterable[Expense]) -> Expense:
    found = list(expenses)
    return replace(
        found[0],
        num_releases=max(expense.num_releases for expense in found),
        precision=max(expense.precision for expense in found),
    )


def _add_run(
    others: Sequence[Expense],
    own: Expense,
    num_steps: int,
    lifetime: Lifetime,
    problems: tuple[str, ...],
) -> LifetimeTotal:
    budget = own.terms.budget
    delta = lifetime.delta or budget.promise.delta
    added = min(num_steps, budget.num_steps - own.num_releases)
    # Losses add up for one unit only. A promise for samples says nothing about an agent's whole
    # data.
    unit = common_unit([*others, own])

    def total(*expenses: Expense) -> TotalLoss:
        return compose_expenses(expenses, delta, unit=unit)

    return LifetimeTotal(
        before=total(*others, own),
        added=total(replace(own, num_releases=added)),
        after=total(*others, replace(own, num_releases=own.num_releases + added)),
        problems=problems,
        drops_agent=unit == "sample" and any(other.query.unit == "agent" for other in others),
    )


def _find_uncounted(keys: Path, lifetime: Lifetime) -> tuple[Path, ...]:
    """Return the folders of keys of other plans, by their usual names, that have ledgers."""
    counted = {folder.resolve() for folder in (keys, *lifetime.other_keys)}
    return tuple(
        folder
        for folder in sorted(keys.resolve().parent.glob("*.keys"))
        if folder not in counted and any(folder.glob("agent-*.ledger"))
    )
