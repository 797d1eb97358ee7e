"""``corn train``: train with several mechanisms side by side, and compare the results."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias, cast

import typer

from corn import learn
from corn.checks import require
from corn.cli.learning import (
    LEARNING,
    LearningOptions,
    draw_run,
    refuse_options_of_plan,
    write_run,
)
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
from corn.cli.output import (
    KAPPA,
    collect_sampling,
    describe_outcome,
    describe_reference,
    format_kappa,
    print_facts,
    print_json,
    print_line,
    print_note,
    print_table,
    strictest_facts,
    warn_of_large_disagreement,
    working,
)
from corn.cli.records import read_configuration
from corn.covariance import Objective, ThreatModel
from corn.covariance.objective import momentum_of
from corn.errors import StoppedByUserError
from corn.learn.names import METHOD_NAMES, usual_schedule
from corn.learn.step import (
    NAMED_OPTIMIZERS,
    OptimizerName,
    require_exact_sums,
)
from corn.plan import Plan, fingerprint, load_plan
from corn.privacy import PrivacyBudget
from corn.privacy.rounding import round_up, round_up_range, write_exactly
from corn.topology import Network

if TYPE_CHECKING:
    from corn.learn.tuning import GridEnd

EXAMPLE = (
    "corn train --task breast-cancer --graph er:n=20,p=0.2,seed=1 "
    "--mechanism corn,decor,ldp,none --epsilon 10 --steps 500"
)

_OUTPUT = "Output"
_MECHANISMS = "corn,decor,ldp,none"
# The options that a plan decides.
_DECIDED_BY_PLAN = (
    "graph",
    *(
        field.name
        for record in (BudgetOptions, MixingOptions, ThreatOptions)
        for field in fields(record)
    ),
)


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
    device: Annotated[str, typer.Option(help="Torch device to compute on.")] = "cpu",
    rehearse: Annotated[
        bool,
        typer.Option(
            "--rehearse",
            help="Draw the noise from keyed streams, as agents do, but with public keys. Slower.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Directory for metrics.csv and run.json (configuration and result).",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
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
    # Before the training, not after it.
    if out is not None and out.exists() and not out.is_dir():
        raise typer.BadParameter(f"must be a directory, found a file {out}", param_hint="--out")
    configuration = read_configuration(context)
    if plan is not None:
        planned = load_plan(plan)
        # The defaults of these options are not what is run.
        for name in refuse_options_of_plan(context, planned.budget, _DECIDED_BY_PLAN):
            del configuration[name]
        terms = TrainingTerms(
            network=planned.network,
            budget=planned.budget,
            objective=planned.objective,
            threat=planned.threat,
            cooldown_steps=planned.cooldown_steps,
            plan=planned,
        )
    elif graph is not None:
        network = mixing.load_network(graph)
        sizes = learning.count_samples(network.num_agents) if budget.needs_sizes else ()
        terms = TrainingTerms(
            network=network,
            budget=budget.make_for_data(learning.batch_size, sizes, network),
            objective=mixing.choose_objective(network.mixing, budget.steps),
            threat=threat.make_if_given(),
            cooldown_steps=mixing.choose_cooldown(network, budget.steps),
        )
        # Not with a plan: its cool-down was chosen, and maybe noted, when it was made.
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
    settings = learn.SweepSettings(
        num_steps=terms.budget.num_steps,
        batch_size=terms.budget.batch_size or learning.batch_size,
        seeds=tuple(range(runs)),
        cooldown_steps=terms.cooldown_steps,
        momentum=momentum_of(terms.objective) if factory is None else 0.0,
        optimizer=factory,
        dtype=_choose_dtype(terms.plan, is_quadratic=learning.is_quadratic, rehearse=rehearse),
        device=device,
        noise_keys="seed" if rehearse else "none",
    )
    problem = learning.make_workload().build(terms.network.num_agents)
    if learning.data is not None:
        # The user's own data is private, whatever the options are: all runs on it count.
        tuning = replace(tuning, private_tuning=True)
        _note_own_data(learning, problem)
    methods = _make_methods(mechanism, terms)
    _note_exposed(methods)
    note_disagreement(methods)
    # The quadratic has no held-out samples; its training loss is its objective.
    column = "validation_loss" if "validation" in problem.parts else "train_loss"
    schedule = usual_schedule(learning.task or "")
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
        has_curves=out is not None or plot is not None,
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
    facts = collect_facts(configuration, problem, terms, found)
    facts |= {"grid_ends": learn.find_ends(tuned), "tuning": tuning.collect(result, prices)}
    if out is not None:
        # A simulation has the data of all agents, and measures on them without noise.
        write_run(result.rows, facts, out, is_private=True)
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
        kept = f"; {out} has the result so far" if out else ""
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


def _choose_dtype(plan: Plan | None, *, is_quadratic: bool, rehearse: bool) -> str:
    if plan is not None and (rehearse or not is_quadratic):
        return plan.dtype
    # In single precision the rounding of the quadratic's loss, 1434, hides the gaps to measure.
    return "float64" if is_quadratic else "float32"


def _make_methods(mechanisms: str | None, terms: TrainingTerms) -> list[learn.Method]:
    """Return the plan's method, if there is a plan, and those named, for the same budget."""
    # Named "plan", because a mechanism of the same name may stand beside it.
    planned = [] if terms.plan is None else [learn.Method.from_plan(terms.plan, name="plan")]
    if mechanisms is None:
        mechanisms = _MECHANISMS if terms.plan is None else ""
    names = [name.strip() for name in mechanisms.split(",") if mechanisms]
    with working("designing the noise"):
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
        learning.make_schedule(size)
    is_unique = len(set(sizes)) == len(sizes)
    require(is_unique, "step_size", "different numbers", repr(text), advice="try 0.1,0.01")
    return sizes


TuningData: TypeAlias = Literal["data", "held-out"]
TuningPrices: TypeAlias = "tuple[dict[learn.Method, learn.TuningPrice], learn.TuningPrice | None]"
"""The price of each method's runs, and of all together."""


@dataclass(frozen=True)
class TuningOptions:
    """The data that step sizes are chosen on, and whether it is private."""

    private_tuning: Annotated[
        bool,
        typer.Option(
            "--private-tuning",
            help="Treat the agents' data as private, and print the ε that all runs spend together.",
            rich_help_panel=LEARNING,
        ),
    ] = False
    tune_on: Annotated[
        TuningData,
        typer.Option(
            help="Samples on which step sizes are chosen: the agents' data, or public held-out "
            "samples. With held-out samples, each mechanism trains only once per run on the "
            "agents' data.",
            rich_help_panel=LEARNING,
        ),
    ] = "data"

    def price(self, result: learn.Result) -> TuningPrices:
        """Return the price of each method's runs and of all, if the data is private."""
        if not self.private_tuning or result.status == "interrupted":
            return {}, None
        with working("adding up the runs"):
            return learn.price_tuning(result), learn.price_all(result)

    def collect(self, result: learn.Result, found: TuningPrices) -> dict[str, object]:
        """Return the runs on the agents' data and what they spend together, for JSON."""
        prices, total = found
        return {
            "data_is_private": self.private_tuning,
            "tuned_on": self.tune_on,
            "num_runs": len(result.trials) * len(result.seeds),
            "prices": {
                method.name: {**vars(price), "against": method.against}
                for method, price in prices.items()
            },
            "price_of_all": None if total is None else vars(total),
        }

    def print_notes(self, result: learn.Result, found: TuningPrices, task: str) -> None:
        """Print what the runs on the agents' data cost, or that they are counted as free."""
        num_methods = len({trial.method for trial in result.trials})
        is_tuned = len(result.trials) > num_methods
        if not self.private_tuning:
            if is_tuned:
                print_note(
                    f"step sizes were chosen from {len(result.trials)} runs per seed, which is "
                    f"counted as free because {task} is public; --private-tuning counts it"
                )
            return
        if result.status == "interrupted":
            print_note("private tuning: runs that were interrupted are not priced")
        prices, total = found
        for method, price in prices.items():
            # One run spends what the table shows.
            if price.num_runs == 1:
                continue
            print_note(
                f"private tuning: {method.name} made {price.num_runs} runs on the agents' data; "
                f"together they spend ε = {round_up(price.epsilon)} at δ = "
                f"{write_exactly(price.delta)}, not {write_exactly(price.epsilon_of_one)}, for "
                f"{price.protects}, against {method.against}, if {price.assumes}, which "
                "runs of a simulation have in common"
            )
        noiseless = sorted({t.method.name for t in result.trials if t.method.budget is None})
        if noiseless:
            print_note(
                f"private tuning: {', '.join(noiseless)} ran on the agents' data without noise, "
                "which no ε covers: leave it out where data is private"
            )
        if total is not None and len(prices) > 1:
            print_note(
                f"private tuning: all {total.num_runs} runs with noise together spend ε = "
                f"{round_up(total.epsilon)} at δ = {write_exactly(total.delta)}, for "
                f"{total.protects}, against {total.against}, if {total.assumes}"
            )
        if is_tuned:
            print_note(
                "--tune-on held-out chooses step sizes on held-out samples instead, which must be "
                "public, and spends one run; a comparison by validation loss is never covered by ε"
            )


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


def note_disagreement(methods: Sequence[learn.Method]) -> None:
    """Print a note if agents with CorN's noise, or a plan's, disagree much."""
    for method in methods:
        if method.name in ("plan", "corn"):
            warn_of_large_disagreement(method.disagreement_ratio)
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
            "(--sampling poisson) needs less noise"
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
