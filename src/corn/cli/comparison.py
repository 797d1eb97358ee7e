"""The output of ``corn train``: a table with notes, JSON, and a figure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from corn import learn
from corn.cli.learning import draw_run
from corn.cli.outcome import describe_outcome
from corn.cli.output import (
    KAPPA,
    collect_sampling,
    format_kappa,
    print_facts,
    print_line,
    print_note,
    print_table,
    warn_of_large_disagreement,
)
from corn.cli.strictest import describe_reference, strictest_facts
from corn.covariance import Objective, ThreatModel
from corn.plan import Plan, fingerprint
from corn.privacy import PrivacyBudget
from corn.privacy.rounding import round_up_range
from corn.topology import Network

if TYPE_CHECKING:
    from corn.learn.tuning import GridEnd

# Columns of the printed table, by the names of summaries.
_COLUMNS = {
    "test_loss": "test loss",
    "test_loss_of_average": "average",
    "test_accuracy": "accuracy",
    "test_accuracy_of_average": "average",
    "optimality_gap": "optimality gap",
    "train_loss": "train loss",
    "consensus_distance": "disagreement",
}
_SCORES = "means over the agents' own models; 'average': those of their average model"
_FAR_MORE = 2
_BEYOND: dict[GridEnd, str] = {"smallest": "smaller", "largest": "larger"}


@dataclass(frozen=True, eq=False)
class TrainingTerms:
    """The network, its mixing and the promise, from options or from a plan."""

    network: Network
    budget: PrivacyBudget
    objective: Objective
    threat: ThreatModel | None
    cooldown_steps: int
    plan: Plan | None = None

    def describe_mixing(self) -> str:
        """Return rounds, cool-down and messages in one line."""
        return self.network.describe_mixing(self.budget.num_steps, self.cooldown_steps)


def collect_facts(
    configuration: dict[str, object],
    problem: learn.TrainingProblem,
    terms: TrainingTerms,
    tuning: learn.Tuning,
) -> dict[str, object]:
    """Return configuration and result for JSON."""
    result, network, plan = tuning.result, terms.network, terms.plan
    return {
        "configuration": configuration,
        "task": problem.task.describe(),
        "notes": list(result.notes),
        **({} if plan is None else {"plan": fingerprint(plan).hex()}),
        "graph": network.source,
        "num_agents": network.num_agents,
        "agent_samples": problem.data.sizes,
        "promise": f"simulated: {terms.budget.describe()}",
        **collect_sampling(terms.budget),
        "privacy": result.privacy,
        "objective": terms.objective.describe(),
        "gossip": str(network.gossip),
        "cooldown_steps": terms.cooldown_steps,
        "messages_per_link": network.gossip.count_messages(
            terms.budget.num_steps, terms.cooldown_steps
        ),
        "status": result.status,
        "num_steps": result.num_steps,
        "seeds": result.seeds,
        "stopped": [f"{', '.join(map(str, run))}: {why}" for run, why in result.stopped.items()],
        "mechanisms": learn.summarize_methods(problem, tuning),
    }


def draw_comparison(
    problem: learn.TrainingProblem, terms: TrainingTerms, tuning: learn.Tuning, path: Path
) -> None:
    """Draw the measurements of each method at its best step size."""
    # Methods differ in their adversaries, so the title names each with those that hold against it.
    holders: dict[str, list[str]] = {}
    for method in dict.fromkeys(trial.method for trial in tuning.result.trials):
        if method.budget is not None:
            holders.setdefault(_name_adversary(method), []).append(method.name)
    against = "; ".join(f"{', '.join(names)} against {who}" for who, names in holders.items())
    promise = f"simulated {terms.budget.describe()}: {against}" if holders else "no noise"
    draw_run(
        learn.select_measured(problem, tuning.result.rows),
        {name: schedule.describe() for name, schedule in tuning.schedules.items()},
        agent_samples=problem.data.sizes,
        title=f"{problem.task.describe()}: {promise}",
        path=path,
    )


def print_comparison(
    problem: learn.TrainingProblem, terms: TrainingTerms, tuning: learn.Tuning
) -> None:
    """Print a table with the scores, the spent ε and the adversary of each method, and notes."""
    result, network = tuning.result, terms.network
    facts = learn.summarize_methods(problem, tuning)
    # Columns that no method has a value for are left out: the quadratic has no test set.
    shown = [name for name in _COLUMNS if any(own.get(name) is not None for own in facts.values())]
    # The loss on held-out samples says more, and a narrower table is easier to read.
    if "test_loss" in shown or "optimality_gap" in shown:
        shown.remove("train_loss")
    is_sum = network.mixing == "sum"
    if is_sum:
        # All agents have one model, which is the average.
        hidden = ("test_loss_of_average", "test_accuracy_of_average", "consensus_distance")
        shown = [name for name in shown if name not in hidden]
    # The two models' scores side by side show how far agents disagree.
    if "test_loss_of_average" in shown:
        shown.remove("consensus_distance")
    methods = dict.fromkeys(trial.method for trial in result.trials)
    print_facts(
        f"{problem.task.describe()}, {network.num_agents} agents on {network.source}",
        [
            *(("data", note) for note in result.notes),
            ("promise", f"simulated: {terms.budget.describe()}"),
            *strictest_facts(terms.budget, network.num_agents),
            ("mixing", terms.describe_mixing()),
            ("runs", _describe_runs(len(result.seeds))),
            *([] if is_sum else [("scores", _SCORES)]),
            ("× server", describe_reference(terms.budget)),
            *([] if is_sum else [("κ", KAPPA)]),
        ],
    )
    print_table(
        "Scores of each mechanism at its best step size",
        [
            "mechanism",
            "step size",
            *(_COLUMNS[name] for name in shown),
            f"ε ({terms.budget.unit})",
            "× server",
            "" if is_sum else "κ",
            "holds against",
        ],
        [_make_row(method, facts[method.name], shown) for method in methods],
    )
    print_note(result.privacy)
    _note_least(terms.budget, problem.data.sizes)
    for note in result.private_notes:
        print_note(note)
    for run, breakdown in result.stopped.items():
        print_note(f"{', '.join(map(str, run))}: {breakdown}")


def print_outcome(problem: learn.TrainingProblem, tuning: learn.Tuning) -> None:
    """Print the last line: what CorN, or else the first private method, has reached."""
    methods = [
        method
        for method in dict.fromkeys(trial.method for trial in tuning.result.trials)
        # A trusted server is a reference, not an outcome of decentralised training.
        if method.budget is not None and not method.is_central
    ]
    methods.sort(key=lambda method: method.name not in ("plan", "corn"))
    if not methods:
        return
    chosen, budget = methods[0], methods[0].budget
    if budget is None or chosen.central_ratio is None or chosen.weighted_central_ratio is None:
        return
    own = learn.summarize_methods(problem, tuning)[chosen.name]
    spent = own["simulated_epsilon" if budget.is_uniform else "simulated_epsilon_of_each_agent"]
    text = describe_outcome(
        own,
        spent,
        budget,
        threat=chosen.threat,
        central_ratio=chosen.central_ratio,
        weighted_ratio=chosen.weighted_central_ratio,
        is_simulated=True,
    )
    print_line(None if text is None else f"{chosen.name}: {text}")


def note_disagreement(methods: Sequence[learn.Method], terms: TrainingTerms) -> None:
    """Print a note if agents with CorN's noise, or a plan's, disagree much."""
    for method in methods:
        if method.name in ("plan", "corn"):
            warn_of_large_disagreement(
                terms.network,
                terms.objective,
                method.disagreement_ratio,
                mechanism="corn" if terms.plan is None else terms.plan.mechanism,
                num_steps=terms.budget.num_steps,
            )
            return


def note_ends(tuning: learn.Tuning) -> None:
    """Print a note for each method whose best step size is an end of those that were tried."""
    for name, end in learn.find_ends(tuning).items():
        best = tuning.schedules[name].describe()
        print_note(
            f"{name}: the best step size, {best}, is the {end} that was tried; a "
            f"{_BEYOND[end]} one may be better (--step-size)"
        )


def _make_row(method: learn.Method, own: dict[str, object], shown: Sequence[str]) -> list[str]:
    # The range of agents, where their promises differ; else that of the least protected.
    is_uniform = method.budget is None or method.budget.is_uniform
    spent = own["simulated_epsilon" if is_uniform else "simulated_epsilon_of_each_agent"]
    return [
        method.name,
        str(own["step_size"] or "all broke down"),
        *(_format_score(own, column) for column in shown),
        "none" if spent is None else round_up_range(spent),
        "" if method.central_ratio is None else f"{method.central_ratio:.3g}",
        format_kappa(method.disagreement_ratio),
        _name_adversary(method),
    ]


def _format_score(own: dict[str, object], column: str) -> str:
    """Return a score, with its 95 % interval if there were several runs."""
    if own.get(column) is None:
        return ""
    width = cast("dict[str, float]", own["intervals"]).get(column)
    return f"{own[column]:.4g}" + ("" if width is None else f" ± {width:.2g}")


def _note_least(budget: PrivacyBudget, sizes: Sequence[int]) -> None:
    """Print a note if the budget counts on far fewer samples than most agents have."""
    least, usual = budget.samples_per_agent, statistics.median(sizes)
    if isinstance(least, int) and usual > _FAR_MORE * least:
        print_note(
            f"the noise, and that of the trusted server, counts on {least:,} samples of every "
            f"agent, and half of the agents have {usual:,.0f} or more: a lower rate for all agents "
            "(--sampling poisson --sampling-rate) needs less noise"
        )


def _describe_runs(num_runs: int) -> str:
    if num_runs == 1:
        return "one, so chance is not shown; --runs 5 gives intervals"
    return f"mean ± 95 % interval of {num_runs}, which differ in batches, noise and first models"


def _name_adversary(method: learn.Method) -> str:
    """Return the adversary in a few words; ``Method.against`` has the full description."""
    if method.budget is None:
        return "nobody"
    if method.is_central:
        return "model readers"
    if not method.threat.max_colluders:
        return "eavesdropper"
    return method.threat.describe_colluders()
