"""``corn train``: train with several mechanisms side by side, and compare what they reach."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from corn import learn
from corn.cli.options import (
    AccountingOption,
    AdjacencyOption,
    ClipOption,
    ColludersOption,
    CooldownOption,
    DeltaOption,
    EpsilonOption,
    GossipRoundsOption,
    HorizonOption,
    JsonOption,
    OptionalGraphOption,
    PlanOption,
    PlotOption,
    PrivateNoiseOption,
    SamplingRateOption,
    SeedsOption,
    StepsOption,
    UnitOption,
    WeightsOption,
    choose_objective,
    fixed_by_plan,
    refuse_contradictions,
)
from corn.cli.output import print_json, print_note, print_table, save_json, warn_of_insiders
from corn.covariance import Objective, ThreatModel
from corn.errors import InvalidArgumentError
from corn.learn.names import CONTENDERS, ModelName, WorkloadName
from corn.learn.schedule import ScheduleName
from corn.plan import Plan, load_plan
from corn.plan.codec import fingerprint
from corn.privacy import PrivacyBudget
from corn.topology import Network, load_network

EXAMPLE = (
    "corn train --task breast-cancer --graph er:n=20,p=0.2,seed=1 "
    "--mechanism corn,decor,ldp,none --epsilon 10 --steps 500"
)

_LEARNING = "Learning"
_OUTPUT = "Output"
_MECHANISMS = "corn,decor,ldp,none"


@dataclass(frozen=True, eq=False)
class _Terms:
    """What is promised on which network, and how it mixes: as options say, or a plan."""

    network: Network
    budget: PrivacyBudget
    objective: Objective
    threat: ThreatModel
    gossip_rounds: int
    cooldown: int
    plan: Plan | None = None


def train(
    context: typer.Context,
    task: Annotated[
        WorkloadName,
        typer.Option(
            help="What to learn; a9a and mnist: see corn data.", rich_help_panel=_LEARNING
        ),
    ],
    graph: OptionalGraphOption = None,
    plan: PlanOption = None,
    mechanism: Annotated[
        str | None,
        typer.Option(
            help=f"One or more, with commas, of {', '.join(CONTENDERS)}. none is clipped but has "
            "no noise; unclipped has neither; central trusts a server. "
            f"(Default: {_MECHANISMS}; with a plan, none beside it.)",
            rich_help_panel=_LEARNING,
        ),
    ] = None,
    model: Annotated[
        ModelName | None,
        typer.Option(
            help="linear, network (32 hidden units) or cnn. (Default: linear; mnist: network.)",
            rich_help_panel=_LEARNING,
        ),
    ] = None,
    epsilon: EpsilonOption = 10.0,
    delta: DeltaOption = 1e-5,
    steps: StepsOption = 5000,
    clip: ClipOption = 0.1,
    unit: UnitOption = "agent",
    accounting: AccountingOption = "gdp",
    adjacency: AdjacencyOption = "replace",
    sampling_rate: SamplingRateOption = None,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Samples a mini-batch.", rich_help_panel=_LEARNING)
    ] = 128,
    step_size: Annotated[
        str | None,
        typer.Option(
            help="First step size, or several with commas, of which each mechanism gets the one "
            "with the least validation loss. (Default: the paper's grid; quadratic: 0.01.)",
            rich_help_panel=_LEARNING,
        ),
    ] = None,
    schedule: Annotated[
        ScheduleName | None,
        typer.Option(
            help="How step sizes go on. (Default: constant; quadratic: inverse-sqrt.)",
            rich_help_panel=_LEARNING,
        ),
    ] = None,
    partition: Annotated[
        str,
        typer.Option(
            help="How samples are dealt out: iid, dirichlet:ALPHA or shards:K.",
            rich_help_panel=_LEARNING,
        ),
    ] = "dirichlet:10",
    l2: Annotated[
        float, typer.Option(min=0, help="Penalty of linear models.", rich_help_panel=_LEARNING)
    ] = 1e-4,
    runs: Annotated[
        int,
        typer.Option(
            min=1,
            help="Runs of everything with seeds 0, 1, …, averaged.",
            rich_help_panel=_LEARNING,
        ),
    ] = 1,
    data_seed: Annotated[
        int, typer.Option(min=0, help="Of split and partition.", rich_help_panel=_LEARNING)
    ] = 0,
    horizon: HorizonOption = None,
    weights: WeightsOption = None,
    gossip_rounds: GossipRoundsOption = 1,
    cooldown: CooldownOption = 0,
    colluders: ColludersOption = 0,
    seeds: SeedsOption = "global",
    private_noise: PrivateNoiseOption = "per-agent",
    dtype: Annotated[
        Literal["float32", "float64"] | None,
        typer.Option(help="Precision. (Default: float32; quadratic: float64.)"),
    ] = None,
    device: Annotated[str, typer.Option(help="Where to compute, as torch names it.")] = "cpu",
    secure_noise: Annotated[
        bool,
        typer.Option("--secure-noise", help="Draw bit for bit what agents would. Slower."),
    ] = False,
    cache: Annotated[Path | None, typer.Option(help="Where data sets are kept.")] = None,
    stand_in: Annotated[
        bool,
        typer.Option(help="Let an embedded data set stand in for an absent one, and say so."),
    ] = True,
    out: Annotated[
        Path | None,
        typer.Option(
            help="A directory for metrics.csv and run.json (configuration, result).",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    parquet: Annotated[
        bool,
        typer.Option("--parquet", help="Write metrics.parquet too.", rich_help_panel=_OUTPUT),
    ] = False,
    tensorboard: Annotated[
        Path | None, typer.Option(help="A directory for TensorBoard.", rich_help_panel=_OUTPUT)
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="Save the state to this file every 1000 steps; go on from it if it exists.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    plot: PlotOption = None,
    json: JsonOption = False,
) -> None:
    """Train with several mechanisms side by side, at the same privacy, on the same batches."""
    configuration = {name: value for name, value in locals().items() if name != "context"}
    if parquet or tensorboard:
        learn.require_writers(parquet=parquet, tensorboard=tensorboard is not None)
    if plan is not None:
        terms = _read_terms(context, load_plan(plan))
        batch_size = terms.budget.batch_size or batch_size
    elif graph is None:
        raise typer.BadParameter("give a graph or a --plan", param_hint="--graph")
    else:
        sampled = batch_size if unit == "sample" else None
        terms = _Terms(
            load_network(graph, weights=weights),
            PrivacyBudget(
                epsilon, delta, steps, clip, unit, accounting, adjacency, sampled, sampling_rate
            ),
            choose_objective(horizon, steps, gossip_rounds=gossip_rounds, cooldown_rounds=cooldown),
            ThreatModel(colluders, seeds, private_noise),
            gossip_rounds,
            cooldown,
        )
    network, budget = terms.network, terms.budget
    problem = learn.make_workload(
        task,
        network.num_agents,
        model=model,
        partition=partition,
        seed=data_seed,
        l2=l2,
        directory=cache,
        stand_in=stand_in,
    )
    is_quadratic = task == "quadratic"
    contenders = _make_contenders(mechanism, terms)
    _warn(contenders, budget)
    variants = learn.make_grid(
        contenders,
        step_sizes=_parse_step_sizes(step_size, (0.01,) if is_quadratic else learn.STEP_SIZES),
        schedule=schedule or ("inverse-sqrt" if is_quadratic else "constant"),
    )
    settings = learn.SweepSettings(
        budget.num_steps,
        batch_size,
        tuple(range(runs)),
        terms.gossip_rounds,
        terms.cooldown,
        _choose_dtype(dtype, terms.plan, is_quadratic=is_quadratic, secure_noise=secure_noise),
        device,
        secure_noise,
    )
    result = learn.run_sweep(
        problem,
        network,
        variants,
        settings=settings,
        checkpoint=checkpoint,
        resume=checkpoint is not None,
    )
    column = "validation_loss" if "validation" in problem.parts else "train_loss"
    tuning = learn.read_tuning(result, column)
    facts = _facts(configuration, problem, terms, tuning)
    _write(result, facts, out, parquet, tensorboard)
    if plot:
        _draw(problem, terms, tuning, plot)
    if json:
        print_json(facts)
    else:
        _print(problem, network, budget, tuning)


def _read_terms(context: typer.Context, plan: Plan) -> _Terms:
    """What a plan says; options that say something else are misuse."""
    refuse_contradictions(context, fixed_by_plan(plan, context.params), what="the plan")
    rounds = learn.planned_rounds(plan)
    return _Terms(plan.network, plan.budget, plan.objective, plan.threat, *rounds, plan)


def _make_contenders(mechanisms: str | None, terms: _Terms) -> list[learn.Contender]:
    """The plan, if there is one, and next to it mechanisms designed for the same budget."""
    planned = [] if terms.plan is None else [learn.Contender.from_plan(terms.plan, name="plan")]
    if mechanisms is None:
        mechanisms = _MECHANISMS if terms.plan is None else ""
    names = [name.strip() for name in mechanisms.split(",") if mechanisms]
    return planned + learn.make_contenders(
        names, terms.network, terms.budget, objective=terms.objective, threat=terms.threat
    )


def _choose_dtype(
    dtype: str | None, plan: Plan | None, *, is_quadratic: bool, secure_noise: bool
) -> str:
    # In single precision the quadratic's loss of 1434 hides the gaps that are to be measured.
    if dtype is None and is_quadratic and not (plan and secure_noise):
        return "float64"
    return dtype or (plan.noise_type if plan else "float32")


def _warn(contenders: Sequence[learn.Contender], budget: PrivacyBudget) -> None:
    """Say once, if any contender shares one seed among all, what a participant can do with it."""
    for contender in contenders:
        parts = contender.noise
        if parts is not None and parts.is_shared_by_all and not contender.is_central:
            warn_of_insiders(parts, budget, contender.threat)
            return


def _parse_step_sizes(text: str | None, default: tuple[float, ...]) -> tuple[float, ...]:
    if text is None:
        return default
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise InvalidArgumentError(
            f"step-size must be numbers with commas, found {text!r}: try 0.1,0.01"
        ) from error


def _facts(
    configuration: dict[str, object],
    problem: learn.Problem,
    terms: _Terms,
    tuning: learn.Tuning,
) -> dict[str, object]:
    result, network, plan = tuning.result, terms.network, terms.plan
    return {
        "configuration": configuration,
        "task": problem.task.describe(),
        "notes": list(result.notes),
        **({} if plan is None else {"plan": fingerprint(plan).hex()}),
        "graph": network.source,
        "num_agents": network.num_agents,
        "agent_samples": problem.data.sizes,
        "promise": terms.budget.describe(),
        "objective": terms.objective.describe(),
        "status": result.status,
        "num_steps": result.num_steps,
        "seeds": result.seeds,
        "stopped": [f"{', '.join(map(str, run))}: {why}" for run, why in result.stopped.items()],
        "contenders": learn.summarize_contenders(problem, tuning),
    }


def _write(
    result: learn.Result,
    facts: dict[str, object],
    out: Path | None,
    parquet: bool,
    tensorboard: Path | None,
) -> None:
    if out:
        learn.write_table(result.rows, out / "metrics.csv")
        save_json(facts, out / "run.json")
        if parquet:
            learn.write_table(result.rows, out / "metrics.parquet")
        print_note(f"wrote {out / 'metrics.csv'} and {out / 'run.json'}")
    if tensorboard:
        learn.write_tensorboard(result.rows, tensorboard)
        print_note(f"wrote {tensorboard}")


def _draw(problem: learn.Problem, terms: _Terms, tuning: learn.Tuning, path: Path) -> None:
    from corn.report.style import save_figure
    from corn.report.training import plot_training

    chosen = {name: schedule.describe() for name, schedule in tuning.schedules.items()}
    promise = f"{terms.budget.describe()}, against {terms.threat.describe()}"
    title = f"{problem.task.describe()}: {promise}"
    figure = plot_training(
        learn.select_measured(problem, tuning.result.rows),
        chosen,
        problem.data.sizes,
        title=textwrap.fill(title, 150),
    )
    save_figure(figure, path)
    print_note(f"wrote {path}")


def _print(
    problem: learn.Problem, network: Network, budget: PrivacyBudget, tuning: learn.Tuning
) -> None:
    result = tuning.result
    columns = {
        "test_loss": "test loss",
        "test_accuracy": "test accuracy",
        "train_loss": "train loss",
        "optimality_gap": "optimality gap",
        "consensus_distance": "disagreement",
    }
    facts = learn.summarize_contenders(problem, tuning)
    shown = [name for name in columns if any(name in own for own in facts.values())]
    rows = [
        [
            name,
            str(own["step_size"] or "all broke down"),
            *(f"{own[column]:.4g}" if column in own else "" for column in shown),
            "none" if own["epsilon"] is None else f"{own['epsilon']:.4g} ({own['unit']})",
        ]
        for name, own in facts.items()
    ]
    title = f"{problem.task.describe()}, {network.num_agents} agents on {network.source}"
    print_table(
        "\n".join([title, *result.notes, budget.describe()]),
        ["mechanism", "step size", *(columns[name] for name in shown), "ε spent (unit)"],
        rows,
    )
    for adversary in dict.fromkeys(own["against"] for own in facts.values()):
        names = ", ".join(name for name, own in facts.items() if own["against"] == adversary)
        print_note(f"{names}: private against {adversary}")
    for run, why in result.stopped.items():
        print_note(f"{', '.join(map(str, run))}: {why}")
    if result.status == "interrupted":
        print_note(f"interrupted after {result.num_steps} steps")
