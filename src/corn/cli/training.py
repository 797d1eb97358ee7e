"""What ``corn train`` tells: facts, files, a figure and a table of all methods."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from corn import learn
from corn.cli.learning import draw_run, write_run
from corn.cli.output import print_note, print_table
from corn.covariance import Objective, ThreatModel
from corn.plan import Plan, fingerprint
from corn.privacy import PrivacyBudget
from corn.topology import Network


@dataclass(frozen=True, eq=False)
class Terms:
    """What is promised on which network, and how it mixes: as options say, or a plan."""

    network: Network
    budget: PrivacyBudget
    objective: Objective
    threat: ThreatModel
    gossip_rounds: int
    cooldown: int
    plan: Plan | None = None


def training_facts(
    configuration: dict[str, object],
    problem: learn.TrainingProblem,
    terms: Terms,
    tuning: learn.Tuning,
) -> dict[str, object]:
    """Configuration and result, for JSON."""
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
        "privacy": result.privacy,
        "objective": terms.objective.describe(),
        "status": result.status,
        "num_steps": result.num_steps,
        "seeds": result.seeds,
        "stopped": [f"{', '.join(map(str, run))}: {why}" for run, why in result.stopped.items()],
        "contenders": learn.summarize_methods(problem, tuning),
    }


def write_results(
    result: learn.Result,
    facts: dict[str, object],
    out: Path | None,
    *,
    parquet: bool,
    tensorboard: Path | None,
) -> None:
    """Write tables and facts to ``out``, and what TensorBoard reads, where asked for."""
    if out:
        # A simulation has the data of all agents, and measures on them without noise.
        write_run(result.rows, facts, out, is_private=True)
        if parquet:
            learn.write_table(result.rows, out / "metrics.parquet")
    if tensorboard:
        learn.write_tensorboard(result.rows, tensorboard)
        print_note(f"wrote {tensorboard}")


def draw_curves(
    problem: learn.TrainingProblem, terms: Terms, tuning: learn.Tuning, path: Path
) -> None:
    """Draw what was measured of each method with the step size chosen for it."""
    promise = f"simulated {terms.budget.describe()}, against {terms.threat.describe()}"
    draw_run(
        learn.select_measured(problem, tuning.result.rows),
        {name: schedule.describe() for name, schedule in tuning.schedules.items()},
        agent_samples=problem.data.sizes,
        title=f"{problem.task.describe()}: {promise}",
        path=path,
    )


def print_methods(problem: learn.TrainingProblem, terms: Terms, tuning: learn.Tuning) -> None:
    """Print a table of what each method reached and spent, and what is to be known of it."""
    result, network = tuning.result, terms.network
    columns = {
        "test_loss": "test loss",
        "test_accuracy": "test accuracy",
        "train_loss": "train loss",
        "optimality_gap": "optimality gap",
        "consensus_distance": "disagreement",
    }
    facts = learn.summarize_methods(problem, tuning)
    shown = [name for name in columns if any(name in own for own in facts.values())]
    rows = [
        [
            name,
            str(own["step_size"] or "all broke down"),
            *(f"{own[column]:.4g}" if column in own else "" for column in shown),
            _describe_spent(own),
        ]
        for name, own in facts.items()
    ]
    title = f"{problem.task.describe()}, {network.num_agents} agents on {network.source}"
    print_table(
        "\n".join([f"{title}.", *result.notes, f"Simulated: {terms.budget.describe()}."]),
        ["mechanism", "step size", *(columns[name] for name in shown), "simulated ε (unit)"],
        rows,
    )
    print_note(result.privacy)
    for note in result.private_notes:
        print_note(note)
    for adversary in dict.fromkeys(own["against"] for own in facts.values()):
        names = ", ".join(name for name, own in facts.items() if own["against"] == adversary)
        print_note(f"{names}: private against {adversary}")
    for run, why in result.stopped.items():
        print_note(f"{', '.join(map(str, run))}: {why}")


def _describe_spent(own: dict[str, object]) -> str:
    spent = own["simulated_epsilon"]
    return "none" if spent is None else f"{spent:.4g} ({own['unit']})"
