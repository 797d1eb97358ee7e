"""``corn train``: train with several mechanisms side by side, and compare the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from corn import learn
from corn.checks import require
from corn.cli.learning import LEARNING, LearningOptions, draw_run, let_plan_decide, write_run
from corn.cli.options import (
    BudgetOptions,
    JsonOption,
    MixingOptions,
    OptionalGraphOption,
    PlanOption,
    PlotOption,
    ThreatOptions,
    parse_numbers,
)
from corn.cli.output import print_json, print_note, print_table
from corn.cli.records import read_configuration
from corn.covariance import Objective, ThreatModel
from corn.errors import StoppedByUserError
from corn.learn.names import METHOD_NAMES
from corn.plan import Plan, fingerprint, load_plan
from corn.privacy import PrivacyBudget
from corn.topology import Network

EXAMPLE = (
    "corn train --task breast-cancer --graph er:n=20,p=0.2,seed=1 "
    "--mechanism corn,decor,ldp,none --epsilon 10 --steps 500"
)

_OUTPUT = "Output"
_MECHANISMS = "corn,decor,ldp,none"

# Columns of the printed table, by the names of summaries.
_COLUMNS = {
    "test_loss": "test loss",
    "test_accuracy": "test accuracy",
    "train_loss": "train loss",
    "optimality_gap": "optimality gap",
    "consensus_distance": "disagreement",
}


@dataclass(frozen=True)
class SimulationOptions:
    """Precision, device and noise of the simulation."""

    dtype: Annotated[
        Literal["float32", "float64"] | None,
        typer.Option(help="Floating-point type. (Default: float32; quadratic: float64.)"),
    ] = None
    device: Annotated[str, typer.Option(help="Torch device to compute on.")] = "cpu"
    rehearse: Annotated[
        bool,
        typer.Option(
            "--rehearse",
            help="Draw the same noise, bit for bit, as corn launch --rehearse SEED. Slower.",
        ),
    ] = False

    def make_settings(
        self, terms: _TrainingTerms, learning: LearningOptions, num_runs: int
    ) -> learn.SweepSettings:
        """Return the settings of a sweep with one seed per run."""
        return learn.SweepSettings(
            num_steps=terms.budget.num_steps,
            batch_size=terms.budget.batch_size or learning.batch_size,
            seeds=tuple(range(num_runs)),
            gossip_rounds=terms.gossip_rounds,
            cooldown_rounds=terms.cooldown_rounds,
            dtype=self._choose_dtype(terms.plan, is_quadratic=learning.is_quadratic),
            device=self.device,
            noise_keys="seed" if self.rehearse else "none",
        )

    def _choose_dtype(self, plan: Plan | None, *, is_quadratic: bool) -> str:
        # In single precision the rounding of the quadratic's loss, 1434, hides the gaps to measure.
        if self.dtype is None and is_quadratic and not (plan and self.rehearse):
            return "float64"
        return self.dtype or (plan.dtype if plan else "float32")


@dataclass(frozen=True)
class OutputOptions:
    """Files for the measurements and the result."""

    out: Annotated[
        Path | None,
        typer.Option(
            help="Directory for metrics.csv and run.json (configuration and result).",
            rich_help_panel=_OUTPUT,
        ),
    ] = None
    parquet: Annotated[
        bool,
        typer.Option("--parquet", help="Also write metrics.parquet.", rich_help_panel=_OUTPUT),
    ] = False
    tensorboard: Annotated[
        Path | None, typer.Option(help="Directory for TensorBoard.", rich_help_panel=_OUTPUT)
    ] = None

    def check(self) -> None:
        """Raise before the training, not after it, if a file could not be written."""
        if self.parquet and self.out is None:
            raise typer.BadParameter(
                "needs --out, the directory to write to", param_hint="--parquet"
            )
        if self.out is not None and self.out.exists() and not self.out.is_dir():
            raise typer.BadParameter(
                f"must be a directory, found a file {self.out}", param_hint="--out"
            )
        if self.parquet or self.tensorboard:
            learn.require_writers(parquet=self.parquet, tensorboard=self.tensorboard is not None)

    def write(self, result: learn.Result, facts: dict[str, object]) -> None:
        """Write the files that were asked for."""
        if self.out:
            # A simulation has the data of all agents, and measures on them without noise.
            write_run(result.rows, facts, self.out, is_private=True)
            if self.parquet:
                learn.write_table(result.rows, self.out / "metrics.parquet", is_private=True)
        if self.tensorboard:
            learn.write_tensorboard(result.rows, self.tensorboard)
            print_note(f"wrote {self.tensorboard}")


def train(
    context: typer.Context,
    *,
    learning: LearningOptions,
    step_size: Annotated[
        str | None,
        typer.Option(
            help="First step size, or several separated by commas: each mechanism gets the one "
            "with the least validation loss. (Default: the paper's grid; quadratic: 0.01.)",
            rich_help_panel=LEARNING,
        ),
    ] = None,
    mechanism: Annotated[
        str | None,
        typer.Option(
            help=f"One or more of {', '.join(METHOD_NAMES)}, separated by commas. none clips but "
            "adds no noise; unclipped does neither; central trusts a server. "
            f"(Default: {_MECHANISMS}; with a plan, the plan alone.)",
            rich_help_panel=LEARNING,
        ),
    ] = None,
    runs: Annotated[
        int,
        typer.Option(
            min=1,
            help="Number of runs, with seeds 0, 1, …; the table shows their average.",
            rich_help_panel=LEARNING,
        ),
    ] = 1,
    graph: OptionalGraphOption = None,
    plan: PlanOption = None,
    budget: BudgetOptions,
    mixing: MixingOptions,
    threat: ThreatOptions,
    simulation: SimulationOptions,
    output: OutputOptions,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="File to save the state to every 1000 steps. If it exists, training resumes.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    plot: PlotOption = None,
    json: JsonOption = False,
) -> None:
    """Train with several mechanisms side by side, at the same privacy, on the same batches."""
    output.check()
    if plan is not None:
        terms = _read_plan(context, load_plan(plan))
    elif graph is not None:
        terms = _TrainingTerms(
            network=mixing.load_network(graph),
            budget=budget.make_for_batches(learning.batch_size),
            objective=mixing.choose_objective(budget.steps),
            threat=threat.make_if_given(),
            gossip_rounds=mixing.gossip_rounds,
            cooldown_rounds=mixing.cooldown,
        )
    else:
        raise typer.BadParameter("give a graph or a --plan", param_hint="--graph")
    # Options are checked before anything is designed, which can take minutes.
    step_sizes = _parse_step_sizes(step_size, learning)
    settings = simulation.make_settings(terms, learning, runs)
    problem = learning.make_workload().build(terms.network.num_agents)
    methods = _make_methods(mechanism, terms)
    _note_exposed(methods)
    trials = learn.make_grid(methods, step_sizes=step_sizes, schedule=learning.choose_schedule())
    try:
        result = learn.run_sweep(
            problem,
            terms.network,
            trials,
            settings=settings,
            checkpoint=checkpoint,
            resume=checkpoint is not None,
        )
    except KeyboardInterrupt:
        # The first Ctrl-C ends the sweep with a result. A second one ends it in the middle of a
        # step, and only an earlier checkpoint is left.
        if checkpoint is None or not checkpoint.exists():
            raise
        raise StoppedByUserError(
            f"interrupted; the same command resumes from the last checkpoint in {checkpoint}"
        ) from None
    # The quadratic has no held-out samples; its training loss is its objective.
    column = "validation_loss" if "validation" in problem.parts else "train_loss"
    tuning = learn.read_tuning(result, column)
    facts = _collect_facts(read_configuration(context), problem, terms, tuning)
    output.write(result, facts)
    if plot:
        _draw(problem, terms, tuning, plot)
    if json:
        print_json(facts)
    else:
        _print_methods(problem, terms, tuning)
    # After everything was written and printed, so that an interrupted run loses nothing.
    if result.status == "interrupted":
        kept = f"; {output.out} has the result so far" if output.out else ""
        again = f"; the same command resumes from {checkpoint}" if checkpoint else ""
        raise StoppedByUserError(f"interrupted after {result.num_steps} steps{kept}{again}")


@dataclass(frozen=True, eq=False)
class _TrainingTerms:
    """The network, its mixing and the promise, from options or from a plan."""

    network: Network
    budget: PrivacyBudget
    objective: Objective
    threat: ThreatModel | None
    gossip_rounds: int
    cooldown_rounds: int
    plan: Plan | None = None


def _read_plan(context: typer.Context, plan: Plan) -> _TrainingTerms:
    let_plan_decide(context, plan)
    gossip_rounds, cooldown_rounds = learn.planned_rounds(plan)
    return _TrainingTerms(
        network=plan.network,
        budget=plan.budget,
        objective=plan.objective,
        threat=plan.threat,
        gossip_rounds=gossip_rounds,
        cooldown_rounds=cooldown_rounds,
        plan=plan,
    )


def _make_methods(mechanisms: str | None, terms: _TrainingTerms) -> list[learn.Method]:
    """Return the plan's method, if there is a plan, and those named, for the same budget."""
    # Named "plan", because a mechanism of the same name may stand beside it.
    planned = [] if terms.plan is None else [learn.Method.from_plan(terms.plan, name="plan")]
    if mechanisms is None:
        mechanisms = _MECHANISMS if terms.plan is None else ""
    names = [name.strip() for name in mechanisms.split(",") if mechanisms]
    return planned + learn.make_methods(
        names, terms.network, terms.budget, objective=terms.objective, threat=terms.threat
    )


def _note_exposed(methods: Sequence[learn.Method]) -> None:
    """Print a note on methods whose shared noise a participant can subtract."""
    exposed = [
        method.name
        for method in methods
        if method.noise is not None
        and method.noise.seed_groups
        and not method.is_central
        and not method.threat.max_colluders
    ]
    if exposed:
        advice = "; --colluders 1 designs corn against one" if "corn" in exposed else ""
        print_note(
            f"{', '.join(exposed)}: private against an eavesdropper only; a participant can "
            f"subtract the noise of every seed that it shares{advice}"
        )


def _parse_step_sizes(text: str | None, learning: LearningOptions) -> tuple[float, ...]:
    if text is None:
        return (0.01,) if learning.is_quadratic else learn.STEP_SIZES
    sizes = parse_numbers("step-size", text, example="0.1,0.01")
    for size in sizes:
        learn.make_schedule(size, learning.choose_schedule())
    is_unique = len(set(sizes)) == len(sizes)
    require(is_unique, "step-size", "different numbers", repr(text), advice="try 0.1,0.01")
    return sizes


def _collect_facts(
    configuration: dict[str, object],
    problem: learn.TrainingProblem,
    terms: _TrainingTerms,
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
        "privacy": result.privacy,
        "objective": terms.objective.describe(),
        "status": result.status,
        "num_steps": result.num_steps,
        "seeds": result.seeds,
        "stopped": [f"{', '.join(map(str, run))}: {why}" for run, why in result.stopped.items()],
        "contenders": learn.summarize_methods(problem, tuning),
    }


def _draw(
    problem: learn.TrainingProblem, terms: _TrainingTerms, tuning: learn.Tuning, path: Path
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


def _print_methods(
    problem: learn.TrainingProblem, terms: _TrainingTerms, tuning: learn.Tuning
) -> None:
    """Print a table with the scores, the spent ε and the adversary of each method, and notes."""
    result, network = tuning.result, terms.network
    facts = learn.summarize_methods(problem, tuning)
    shown = [name for name in _COLUMNS if any(name in own for own in facts.values())]
    methods = dict.fromkeys(trial.method for trial in result.trials)
    title = f"{problem.task.describe()}, {network.num_agents} agents on {network.source}"
    print_table(
        "\n".join([f"{title}.", *result.notes, f"Simulated: {terms.budget.describe()}."]),
        [
            "mechanism",
            "step size",
            *(_COLUMNS[name] for name in shown),
            "simulated ε (unit)",
            "holds against",
        ],
        [_make_row(method, facts[method.name], shown) for method in methods],
    )
    print_note(result.privacy)
    for note in result.private_notes:
        print_note(note)
    for run, breakdown in result.stopped.items():
        print_note(f"{', '.join(map(str, run))}: {breakdown}")


def _make_row(method: learn.Method, own: dict[str, object], shown: Sequence[str]) -> list[str]:
    spent = own["simulated_epsilon"]
    return [
        method.name,
        str(own["step_size"] or "all broke down"),
        *(f"{own[column]:.4g}" if column in own else "" for column in shown),
        "none" if spent is None else f"{spent:.4g} ({own['unit']})",
        _name_adversary(method),
    ]


def _name_adversary(method: learn.Method) -> str:
    """Return the adversary in a few words; ``Method.against`` has the full description."""
    if method.budget is None:
        return "nobody"
    if method.is_central:
        return "model readers"
    if not method.threat.max_colluders:
        return "eavesdropper"
    return method.threat.describe_colluders()
