"""An owner's requirements of a plan, and the total of everything that is released of the data.

Requirements and totals are for the owner alone: they show what else the data was used for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, get_args

from corn.checks import require, require_choice, require_count, require_positive
from corn.errors import CornError, InvalidArgumentError
from corn.noise import ReleaseLedger
from corn.noise.ledger import ledger_path, read_history
from corn.parsing import quote
from corn.plan import Plan, fingerprint
from corn.privacy import Adjacency, Unit
from corn.privacy.composition import Expense, PlanTerms, TotalLoss, common_unit, compose_expenses
from corn.privacy.rounding import write_exactly

if TYPE_CHECKING:
    from corn.distributed.planning import PlanningRequest

_KINDS = {"insiders": int, "steps": int, "epsilon": float, "delta": float, "total_epsilon": float}
_NAMES = ("unit", "adjacency", *_KINDS)


class RequirementError(CornError):
    """A run that the owner's requirements do not allow; the message is for the owner alone."""


@dataclass(frozen=True)
class Requirements:
    """An owner's requirements of every plan, and of all releases of an agent's data together.

    What is None is not required. ε is that of the noise at the owner's ``delta``: a plan with a
    large δ of its own has a small ε that says nothing.

    Attributes:
        unit: the data that a plan must protect: ``agent``, or ``sample``, which plans for agents
            protect as well.
        adjacency: the adjacency that a plan must have.
        epsilon: the most ε, for ``unit``, that a plan may promise this agent.
        delta: δ of both ε.
        insiders: the fewest insiders against whom a plan, and the total, must hold.
        steps: the most steps of a plan.
        total_epsilon: the most ε, for ``unit``, of all releases under this and other plans.
        other_keys: more folders of keys whose agent of the same number has the same data.

    >>> Requirements.parse(["unit=agent", "total-epsilon=3"]).total_epsilon
    3.0
    """

    unit: Unit | None = None
    adjacency: Adjacency | None = None
    epsilon: float | None = None
    delta: float = 1e-5
    insiders: int | None = None
    steps: int | None = None
    total_epsilon: float | None = None
    other_keys: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        if self.unit is not None:
            require_choice("unit", self.unit, get_args(Unit))
        if self.adjacency is not None:
            require_choice("adjacency", self.adjacency, get_args(Adjacency))
        for name, value in {"epsilon": self.epsilon, "total-epsilon": self.total_epsilon}.items():
            if value is not None:
                require_positive(name, value)
                # A plan for samples would keep a limit that was meant for the agent's whole data.
                if self.unit is None:
                    raise InvalidArgumentError(
                        f'{name} needs a unit, what ε is to protect: "unit=agent" or "unit=sample"'
                    )
        require(0 < self.delta < 1, "delta", "in (0, 1)", self.delta, advice="try 1e-5")
        if self.insiders is not None:
            require_count("insiders", self.insiders, least=0)
        if self.steps is not None:
            require_count("steps", self.steps)

    @classmethod
    def parse(cls, texts: Iterable[str], *, other_keys: Iterable[Path] = ()) -> Self:
        """Return the requirements in texts NAME=VALUE, with the names of fields, - for _."""
        fields: dict[str, Any] = {}
        for text in texts:
            name, _, value = (part.strip() for part in text.partition("="))
            field = name.replace("-", "_")
            if field not in _NAMES or field in fields:
                rule = f"NAME=VALUE, each name once, of {', '.join(_NAMES)}"
                raise InvalidArgumentError(f"a requirement must be {rule}, found {quote(text)}")
            try:
                fields[field] = _KINDS.get(field, str)(value)
            except ValueError as error:
                why = f"{name} must be a number, found {quote(value)}"
                raise InvalidArgumentError(why) from error
        # Alone it would require nothing, and a plan with any δ would pass.
        if "delta" in fields and not {"epsilon", "total_epsilon"} & fields.keys():
            raise InvalidArgumentError(
                "a requirement of delta must be given with epsilon or total-epsilon, which are "
                "computed at it"
            )
        return cls(**fields, other_keys=tuple(other_keys))

    def check(self, source: Plan | PlanningRequest, agent: int) -> None:
        """Raise unless a plan, or every plan that a request leads to, meets them for an agent.

        A new plan after a loss meets them too: it keeps the same cap on each step that is left, and
        holds against all coalitions that leave an agent to protect.
        """
        if failures := "; ".join(self._find_failures(source, agent)):
            why = f"the plan does not meet its owner's requirements: {failures}"
            raise RequirementError(f"refuses to start, as {why}")

    def _find_failures(self, source: Plan | PlanningRequest, agent: int) -> Iterator[str]:
        terms = PlanTerms(source.budget.of_agent(agent), source.threat.max_colluders)
        budget = terms.budget
        protects_unit = self.unit in (None, "sample", budget.unit)
        if not protects_unit:
            yield f"unit must be {self.unit}, found {budget.unit}"
        if self.adjacency not in (None, budget.adjacency):
            yield f"adjacency must be {self.adjacency}, found {budget.adjacency}"
        if self.insiders is not None and terms.max_colluders < self.insiders:
            yield f"insiders must be at least {self.insiders}, found {terms.max_colluders}"
        if self.steps is not None and budget.num_steps > self.steps:
            yield f"steps must be at most {self.steps}, found {budget.num_steps}"
        if self.epsilon is None or not protects_unit:
            return
        promise = budget.promise
        is_known = budget.unit == self.unit and promise.delta <= self.delta
        # Nothing to compute: ε falls as δ grows. The plan was verified to keep its promise.
        if is_known and promise.epsilon <= self.epsilon:
            return
        # The cap, not the present noise: after a loss a new plan may come up to it.
        cap = terms.precision_cap
        if isinstance(source, Plan):
            cap = float(source.precision_caps[agent])
        expense = Expense(terms, cap, budget.num_steps)
        found = compose_expenses([expense], self.delta, unit=self.unit)
        # Negated, so that an ε of NaN refuses too.
        if not found.epsilon <= self.epsilon:
            yield (
                f"epsilon must be at most {write_exactly(self.epsilon)} at δ = "
                f"{write_exactly(self.delta)}, found {found.describe()}"
            )


@dataclass(frozen=True)
class ReleaseTotal:
    """The ε of an agent before a run, of the run by itself, and after it at most; for its owner.

    With ``problems`` of ledgers, totals are lower bounds. ``uncounted`` are other folders beside
    the keys that have ledgers, perhaps of the same data. ``drops_agent``: plans before promised
    something for the agent's whole data, and nothing does any more.
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
        parts = [
            f"all releases of this data before this run: {about}{self.before.describe_epsilon()}",
            f"this run by itself, if it makes all steps: at most {self.added.describe_epsilon()}",
            f"total after it: {about or 'at most '}{self.after.describe()}",
        ]
        if self.drops_agent:
            parts.append("nothing is promised for the agent's whole data any more")
        parts += self.problems
        if self.uncounted:
            names = ", ".join(path.name for path in self.uncounted)
            parts.append(
                f"not counted are the ledgers in {names}: name those of the same data as other "
                "keys (--other-keys)"
            )
        return "; ".join(parts)

    def require_within(self, requirements: Requirements) -> None:
        """Raise ``RequirementError`` if the total after the run is unknown or above the limit."""
        most = requirements.total_epsilon
        insiders = requirements.insiders
        if most is None:
            return
        limit = f"the limit of ε = {write_exactly(most)} on all releases of this data"
        against = self.after.max_colluders
        if self.problems:
            why = f"{limit} cannot be kept while the total is unknown"
        # Negated, so that an ε of NaN refuses too.
        elif not self.after.epsilon <= most:
            why = f"the total would exceed {limit}"
        elif insiders is not None and against is not None and against < insiders:
            why = f"{limit} must hold against {insiders} insiders, and earlier plans do not"
        else:
            return
        raise RequirementError(f"refuses to start, as {why}; {self.describe()}")


def compose_total(
    plan: Plan,
    agent: int,
    *,
    keys: Path,
    ledger: ReleaseLedger,
    requirements: Requirements,
    num_steps: int,
) -> ReleaseTotal:
    """Return an agent's totals before the first release of a run of ``num_steps`` steps.

    Raise ``RequirementError`` if the total would exceed the owner's limit, or is unknown.
    """
    own = ledger.expense
    path = ledger_path(keys, agent, fingerprint(plan).hex())
    # The own ledger is passed in; its file would count the same releases again.
    history = read_history([keys, *requirements.other_keys], agent, without=path)
    # Another process may meanwhile release all that is left of its plan.
    others = [
        replace(one, num_releases=one.terms.budget.num_steps) if record.is_running else one
        for record in history.records
        for one in [record.expense]
    ]
    added = min(num_steps, ledger.remaining)
    counted = [folder.resolve() for folder in (keys, *requirements.other_keys)]
    # Losses add up for one unit only: one for samples says nothing about an agent's whole data.
    common = common_unit([*others, own])

    def compose(*expenses: Expense) -> TotalLoss:
        return compose_expenses(expenses, requirements.delta, unit=requirements.unit or common)

    total = ReleaseTotal(
        before=compose(*others, own),
        added=compose(replace(own, num_releases=added)),
        after=compose(*others, replace(own, num_releases=own.num_releases + added)),
        problems=history.problems,
        # Folders of keys of other plans, by their usual names.
        uncounted=tuple(
            folder
            for folder in sorted(keys.resolve().parent.glob("*.keys"))
            if folder not in counted and any(folder.glob("agent-*.ledger"))
        ),
        drops_agent=common == "sample" and any(o.query.unit == "agent" for o in others),
    )
    total.require_within(requirements)
    return total
