"""``corn train``: train with several mechanisms side by side, and compare the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from corn import learn
from corn.checks import require
from corn.cli.budget_options import BudgetOptions
from corn.cli.comparison import (
    TrainingTerms,
    collect_facts,
    draw_comparison,
    note_disagreement,
    note_ends,
    print_comparison,
    print_outcome,
)
from corn.cli.learning import LEARNING, LearningOptions, let_plan_decide, write_run
from corn.cli.options import (
    JsonOption,
    MixingOptions,
    OptionalGraphOption,
    PlanOption,
    PlotOption,
    ThreatOptions,
)
from corn.cli.output import print_json, print_note
from corn.cli.promises import parse_numbers
from corn.cli.records import read_configuration
from corn.cli.tuning import TuningOptions
from corn.cli.watching import designing
from corn.covariance.objective import momentum_of
from corn.errors import StoppedByUserError
from corn.learn.names import METHOD_NAMES
from corn.learn.step import (
    NAMED_OPTIMIZERS,
    OptimizerFactory,
    OptimizerName,
    require_exact_sums,
)
from corn.plan import Plan, load_plan
from corn.topology import Network

EXAMPLE = (
    "corn train --task breast-cancer --graph er:n=20,p=0.2,seed=1 "
    "--mechanism corn,decor,ldp,none --epsilon 10 --steps 500"
)

_OUTPUT = "Output"
_MECHANISMS = "corn,decor,ldp,none"


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
        self,
        terms: TrainingTerms,
        learning: LearningOptions,
        num_runs: int,
        optimizer: OptimizerFactory | None,
    ) -> learn.SweepSettings:
        """Return the settings of a sweep with one seed per run."""
        return learn.SweepSettings(
            num_steps=terms.budget.num_steps,
            batch_size=terms.budget.batch_size or learning.batch_size,
            # Seeds count from 0 everywhere, so that corn launch --rehearse SEED repeats one of
            # these runs.
            seeds=tuple(range(num_runs)),
            cooldown_steps=terms.cooldown_steps,
            momentum=momentum_of(terms.objective) if optimizer is None else 0.0,
            optimizer=optimizer,
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

    def check(self) -> None:
        """Raise before the training, not after it, if files could not be written."""
        if self.out is not None and self.out.exists() and not self.out.is_dir():
            raise typer.BadParameter(
                f"must be a directory, found a file {self.out}", param_hint="--out"
            )

    def write(self, result: learn.Result, facts: dict[str, object]) -> None:
        """Write the files, if they were asked for."""
        if self.out:
            # A simulation has the data of all agents, and measures on them without noise.
            write_run(result.rows, facts, self.out, is_private=True)


def train(
    context: typer.Context,
    *,
    learning: LearningOptions,
    step_size: Annotated[
        str | None,
        typer.Option(
            help="First step size, or several separated by commas: each mechanism gets the one "
            "with the least validation loss. (Default: a search that starts at an estimate "
            "from clip and noise, and continues while the best is the smallest or largest "
            "tried; quadratic: 0.01.)",
            rich_help_panel=LEARNING,
        ),
    ] = None,
    mechanism: Annotated[
        str | None,
        typer.Option(
            help=f"One or more of {', '.join(METHOD_NAMES)}, separated by commas. none clips but "
            "adds no noise; unclipped does neither; central trusts a server. NAME=R.npy or "
            "NAME=FILE.py:FUNCTION adds a covariance of your own, scaled to the budget. "
            f"(Default: {_MECHANISMS}; with a plan, the plan alone.)",
            rich_help_panel=LEARNING,
        ),
    ] = None,
    optimizer: Annotated[
        OptimizerName,
        typer.Option(
            help="Optimizer of the averaged releases, whose learning rate is the step size; adam "
            "and adamw need --mixing sum. (Default: sgd, with --momentum.)",
            rich_help_panel=LEARNING,
            show_default=False,
        ),
    ] = "sgd",
    runs: Annotated[
        int,
        typer.Option(
            min=1,
            help="Number of runs, with seeds 0, 1, …; the table shows their mean and its 95 % "
            "interval.",
            rich_help_panel=LEARNING,
        ),
    ] = 1,
    tuning: TuningOptions,
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
        network = mixing.load_network(graph)
        sizes = learning.count_samples(network.num_agents) if budget.needs_sizes else ()
        terms = TrainingTerms(
            network=network,
            budget=budget.make_for_data(learning.batch_size, sizes, network),
            objective=mixing.choose_objective(network, budget.steps),
            threat=threat.make_if_given(),
            cooldown_steps=mixing.choose_cooldown(network, budget.steps),
        )
        # Not with a plan: its cool-down was chosen, and maybe noted, when it was made.
        mixing.warn_of_disagreement(network, terms.cooldown_steps)
    else:
        raise typer.BadParameter("give a graph or a --plan", param_hint="--graph")
    # Options are checked before anything is designed, which can take minutes.
    step_sizes = _parse_step_sizes(step_size, learning)
    factory = NAMED_OPTIMIZERS[optimizer]
    if factory is not None:
        require_exact_sums(terms.network)
        # Silently ignored, a momentum would leave the user with another model than intended.
        if mixing.momentum:
            raise typer.BadParameter(
                f"belongs to --optimizer sgd, found {optimizer}", param_hint="--momentum"
            )
    settings = simulation.make_settings(terms, learning, runs, factory)
    problem = learning.make_workload().build(terms.network.num_agents)
    if learning.data is not None:
        # The user's own data is private, whatever the options are: all runs on it count.
        tuning = replace(tuning, private_tuning=True)
        _note_own_data(learning, problem)
    methods = _make_methods(mechanism, terms)
    _note_exposed(methods)
    note_disagreement(methods, terms)
    # The quadratic has no held-out samples; its training loss is its objective.
    column = "validation_loss" if "validation" in problem.parts else "train_loss"
    schedule = learning.choose_schedule()
    if step_sizes:
        trials = learn.make_grid(methods, step_sizes=step_sizes, schedule=schedule)
        sweep = partial(learn.run_sweep, trials=trials)
    else:
        sweep = partial(learn.search_step_sizes, methods=methods, schedule=schedule, column=column)
    run = partial(
        _run,
        network=terms.network,
        settings=settings,
        checkpoint=checkpoint,
        has_curves=output.out is not None or plot is not None,
    )
    if tuning.tune_on == "held-out":
        # Step sizes are found on public samples, so each mechanism runs once per seed on the
        # agents' data.
        public = learn.borrow_held_out(problem, seed=learning.data_seed)
        tuned = learn.read_tuning(run(sweep, public, suffix=".tuning"), column)
        if tuned.result.status == "interrupted":
            raise StoppedByUserError(
                "interrupted while step sizes were chosen; nothing was written"
            )
        # A method whose every run broke down has no step size, and is left out.
        trials = [
            learn.Trial(m, tuned.schedules[m.name]) for m in methods if m.name in tuned.schedules
        ]
        found = learn.read_tuning(run(partial(learn.run_sweep, trials=trials), problem), column)
    else:
        found = tuned = learn.read_tuning(run(sweep, problem), column)
    result = found.result
    prices = tuning.price(result)
    facts = collect_facts(read_configuration(context), problem, terms, found)
    facts |= {"grid_ends": learn.find_ends(tuned), "tuning": tuning.collect(result, prices)}
    output.write(result, facts)
    if plot:
        draw_comparison(problem, terms, found, plot)
    if json:
        print_json(facts)
    else:
        print_comparison(problem, terms, found)
        note_ends(tuned)
        tuning.print_notes(result, prices, learning.source_name)
        print_outcome(problem, found)
    # After everything was written and printed, so that an interrupted run loses nothing.
    if result.status == "interrupted":
        kept = f"; {output.out} has the result so far" if output.out else ""
        again = f"; the same command resumes from {checkpoint}" if checkpoint else ""
        raise StoppedByUserError(f"interrupted after {result.num_steps} steps{kept}{again}")


def _run(
    sweep: Callable[..., learn.Result],
    problem: learn.TrainingProblem,
    *,
    network: Network,
    settings: learn.SweepSettings,
    checkpoint: Path | None,
    has_curves: bool,
    suffix: str = "",
) -> learn.Result:
    """Run a sweep, or continue it from its checkpoint, whose name ends in ``suffix``."""
    # On large data sets, measuring takes longer than training. A table needs the last values only.
    steps = settings.num_steps
    measured = None if has_curves else sorted({0, steps // 2, steps})
    # The search and the final run have files of their own: a resume must not mix them.
    file = None if checkpoint is None else checkpoint.with_name(checkpoint.name + suffix)
    try:
        return sweep(
            problem,
            network,
            settings=settings,
            evaluate_at=measured,
            checkpoint=file,
            resume=file is not None,
        )
    except KeyboardInterrupt:
        # The first Ctrl-C ends the sweep with a result. A second one ends it in the middle of a
        # step, and only an earlier checkpoint is left.
        if file is None or not file.exists():
            raise
        raise StoppedByUserError(
            f"interrupted; the same command resumes from the last checkpoint in {file}"
        ) from None


def _note_own_data(learning: LearningOptions, problem: learn.TrainingProblem) -> None:
    """Print what the owner of the data should know."""
    for note in problem.private_notes:
        print_note(f"private, do not publish: {note}")
    if learning.classes is None and not learning.regression:
        print_note(
            "the classes were read from the data, which a simulation may do; corn launch and corn "
            "agent need the public list --classes"
        )


def _read_plan(context: typer.Context, plan: Plan) -> TrainingTerms:
    let_plan_decide(context, plan)
    return TrainingTerms(
        network=plan.network,
        budget=plan.budget,
        objective=plan.objective,
        threat=plan.threat,
        cooldown_steps=plan.cooldown_steps,
        plan=plan,
    )


def _make_methods(mechanisms: str | None, terms: TrainingTerms) -> list[learn.Method]:
    """Return the plan's method, if there is a plan, and those named, for the same budget."""
    # Named "plan", because a mechanism of the same name may stand beside it.
    planned = [] if terms.plan is None else [learn.Method.from_plan(terms.plan, name="plan")]
    if mechanisms is None:
        mechanisms = _MECHANISMS if terms.plan is None else ""
    names = [name.strip() for name in mechanisms.split(",") if mechanisms]
    with designing():
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
    """Return the step sizes to try; none if they are to be searched for."""
    if text is None:
        return (0.01,) if learning.is_quadratic else ()
    sizes = parse_numbers("step_size", text, example="0.1,0.01")
    for size in sizes:
        # Made only to raise for a wrong size now, not after minutes of design.
        learn.make_schedule(size, learning.choose_schedule())
    is_unique = len(set(sizes)) == len(sizes)
    require(is_unique, "step_size", "different numbers", repr(text), advice="try 0.1,0.01")
    return sizes
