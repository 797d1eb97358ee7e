"""``corn train``: train with several mechanisms side by side, and compare what they reach."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from corn import learn
from corn.cli.contradictions import let_plan_decide
from corn.cli.learning import LEARNING, LearningOptions
from corn.cli.options import (
    BudgetOptions,
    JsonOption,
    MixingOptions,
    OptionalGraphOption,
    PlanOption,
    PlotOption,
    ThreatOptions,
)
from corn.cli.output import print_json, warn_of_insiders
from corn.cli.records import read_configuration
from corn.cli.training import Terms, draw_curves, print_methods, training_facts, write_results
from corn.errors import InvalidArgumentError, StoppedByUserError
from corn.learn.names import METHOD_NAMES
from corn.plan import Plan, load_plan
from corn.privacy import PrivacyBudget

EXAMPLE = (
    "corn train --task breast-cancer --graph er:n=20,p=0.2,seed=1 "
    "--mechanism corn,decor,ldp,none --epsilon 10 --steps 500"
)

_OUTPUT = "Output"
_MECHANISMS = "corn,decor,ldp,none"


def train(
    context: typer.Context,
    *,
    learning: LearningOptions,
    step_size: Annotated[
        str | None,
        typer.Option(
            help="First step size, or several with commas, of which each mechanism gets the one "
            "with the least validation loss. (Default: the paper's grid; quadratic: 0.01.)",
            rich_help_panel=LEARNING,
        ),
    ] = None,
    mechanism: Annotated[
        str | None,
        typer.Option(
            help=f"One or more, with commas, of {', '.join(METHOD_NAMES)}. none is clipped but has "
            "no noise; unclipped has neither; central trusts a server. "
            f"(Default: {_MECHANISMS}; with a plan, none beside it.)",
            rich_help_panel=LEARNING,
        ),
    ] = None,
    runs: Annotated[
        int,
        typer.Option(
            min=1,
            help="Runs of everything with seeds 0, 1, …, averaged.",
            rich_help_panel=LEARNING,
        ),
    ] = 1,
    graph: OptionalGraphOption = None,
    plan: PlanOption = None,
    budget: BudgetOptions,
    mixing: MixingOptions,
    threat: ThreatOptions,
    dtype: Annotated[
        Literal["float32", "float64"] | None,
        typer.Option(help="Precision. (Default: float32; quadratic: float64.)"),
    ] = None,
    device: Annotated[str, typer.Option(help="Where to compute, as torch names it.")] = "cpu",
    rehearse: Annotated[
        bool,
        typer.Option(
            "--rehearse",
            help="Draw bit for bit what corn launch --rehearse SEED draws. Slower.",
        ),
    ] = False,
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
    if parquet or tensorboard:
        learn.require_writers(parquet=parquet, tensorboard=tensorboard is not None)
    if plan is not None:
        terms = _read_terms(context, load_plan(plan))
    elif graph is None:
        raise typer.BadParameter("give a graph or a --plan", param_hint="--graph")
    else:
        terms = Terms(
            mixing.load_network(graph),
            budget.make_for_batches(learning.batch_size),
            mixing.choose_objective(budget.steps),
            threat.make(),
            mixing.gossip_rounds,
            mixing.cooldown,
        )
    problem = learning.make_workload().build(terms.network.num_agents)
    methods = _make_methods(mechanism, terms)
    _warn(methods, terms.budget)
    trials = learn.make_grid(
        methods,
        step_sizes=_parse_step_sizes(
            step_size, (0.01,) if learning.is_quadratic else learn.STEP_SIZES
        ),
        schedule=learning.choose_schedule(),
    )
    settings = learn.SweepSettings(
        terms.budget.num_steps,
        terms.budget.batch_size or learning.batch_size,
        tuple(range(runs)),
        terms.gossip_rounds,
        terms.cooldown,
        _choose_dtype(dtype, terms.plan, is_quadratic=learning.is_quadratic, rehearse=rehearse),
        device,
        "seed" if rehearse else "none",
    )
    result = learn.run_sweep(
        problem,
        terms.network,
        trials,
        settings=settings,
        checkpoint=checkpoint,
        resume=checkpoint is not None,
    )
    column = "validation_loss" if "validation" in problem.parts else "train_loss"
    tuning = learn.read_tuning(result, column)
    facts = training_facts(read_configuration(context), problem, terms, tuning)
    write_results(result, facts, out, parquet=parquet, tensorboard=tensorboard)
    if plot:
        draw_curves(problem, terms, tuning, plot)
    if json:
        print_json(facts)
    else:
        print_methods(problem, terms, tuning)
    if result.status == "interrupted":
        kept = f"; {out} has what was reached" if out else ""
        again = f"; the same command goes on from {checkpoint}" if checkpoint else ""
        raise StoppedByUserError(f"interrupted after {result.num_steps} steps{kept}{again}")


def _read_terms(context: typer.Context, plan: Plan) -> Terms:
    """What a plan says; options that say something else are misuse."""
    let_plan_decide(context, plan)
    rounds = learn.planned_rounds(plan)
    return Terms(plan.network, plan.budget, plan.objective, plan.threat, *rounds, plan)


def _make_methods(mechanisms: str | None, terms: Terms) -> list[learn.Method]:
    """The plan, if there is one, and next to it mechanisms designed for the same budget."""
    planned = [] if terms.plan is None else [learn.Method.from_plan(terms.plan, name="plan")]
    if mechanisms is None:
        mechanisms = _MECHANISMS if terms.plan is None else ""
    names = [name.strip() for name in mechanisms.split(",") if mechanisms]
    return planned + learn.make_methods(
        names, terms.network, terms.budget, objective=terms.objective, threat=terms.threat
    )


def _choose_dtype(
    dtype: str | None, plan: Plan | None, *, is_quadratic: bool, rehearse: bool
) -> str:
    # In single precision the quadratic's loss of 1434 hides the gaps that are to be measured.
    if dtype is None and is_quadratic and not (plan and rehearse):
        return "float64"
    return dtype or (plan.dtype if plan else "float32")


def _warn(methods: Sequence[learn.Method], budget: PrivacyBudget) -> None:
    """Say once, if any method shares one seed among all, what a participant can do with it."""
    for method in methods:
        parts = method.noise
        if parts is not None and parts.is_shared_by_all and not method.is_central:
            warn_of_insiders(parts, budget, method.threat)
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
