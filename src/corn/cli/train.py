"""``corn train``: train with several mechanisms side by side, and compare the results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from corn import learn
from corn.checks import require
from corn.cli.learning import (
    MODEL_FILE,
    LearningOptions,
    describe_quality,
    read_consortium,
    refuse_options_of_plan,
    write_run,
)
from corn.cli.options import (
    BudgetOptions,
    JsonOption,
    MechanismsOption,
    MixingOptions,
    OptionalGraphOption,
    PlotOption,
    PlotStyleOption,
    ThreatOptions,
    in_learning,
    in_network,
    is_given,
    read_configuration,
    read_numbers,
)
from corn.cli.output import (
    KAPPA,
    Column,
    collect_sampling,
    describe_outcome,
    describe_reference,
    format_kappa,
    is_open_to_insiders,
    print_facts,
    print_json,
    print_line,
    print_note,
    print_rows,
    warn_of_insiders,
    warn_of_large_disagreement,
    working,
)
from corn.covariance import Objective, ThreatModel
from corn.errors import StoppedByUserError
from corn.learn.datasets import usual_schedule
from corn.learn.optimizers import NAMED_OPTIMIZERS, OptimizerName, require_exact_sums
from corn.plan import Plan, fingerprint, load_plan
from corn.privacy import PrivacyBudget
from corn.privacy.rounding import round_up, round_up_range, write_exactly
from corn.topology import Network

if TYPE_CHECKING:
    from corn.learn.metrics import Quality
    from corn.learn.tuning import GridEnd
    from corn.learn.workloads import ProblemSource

EXAMPLE = (
    "corn train --task breast-cancer --graph er:n=20,p=0.2,seed=1 "
    "--mechanism corn,decor,ldp,none --epsilon 10 --steps 500"
)

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
        in_learning(
            help="First step size, or several separated by commas: each mechanism gets the one "
            "with the least validation loss. (Default: a search that starts at an estimate "
            "from clip and noise, and continues while the best is the smallest or largest "
            "tried; quadratic: 0.01.)"
        ),
    ] = None,
    mechanism: MechanismsOption = None,
    optimizer: Annotated[
        OptimizerName,
        in_learning(
            help="Optimizer of the averaged releases, whose learning rate is the step size; adam "
            "and adamw need --mixing sum. (Default: sgd, with --momentum.)",
            show_default=False,
        ),
    ] = "sgd",
    runs: Annotated[
        int,
        in_learning(
            min=1,
            help="Number of runs, with seeds 0, 1, …; the table shows their mean and its 95 % "
            "interval.",
        ),
    ] = 1,
    graph: OptionalGraphOption = None,
    plan: Annotated[
        Path | None,
        in_network(help="Plan file from corn plan, which sets network, budget and noise."),
    ] = None,
    budget: BudgetOptions,
    mixing: MixingOptions,
    threat: ThreatOptions,
    device: Annotated[str, typer.Option(help="Torch device to compute on.")] = "cpu",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Directory for metrics.csv, run.json (configuration and result) and model.pt."
        ),
    ] = None,
    plot: PlotOption = None,
    plot_style: PlotStyleOption = None,
    json: JsonOption = False,
) -> None:
    """Train with several mechanisms side by side, at the same privacy."""
    # Before the training, not after it.
    if out is not None and out.exists() and not out.is_dir():
        raise typer.BadParameter(f"must be a directory, found a file {out}", param_hint="--out")
    if learning.data is not None and plan is None:
        budget = _protect_rows(context, budget)
    configuration = {**read_configuration(context), "unit": budget.unit, "clip": budget.clip}
    consortium = read_consortium(context, plan, learning.data)
    planned = (
        None if plan is None else load_plan(plan) if consortium is None else consortium.load_plan()
    )
    if planned is not None:
        network = planned.network
    elif graph is not None:
        network = mixing.load_network(graph)
    else:
        raise typer.BadParameter("give a graph or a --plan", param_hint="--graph")
    source: ProblemSource
    if consortium is not None and learning.data is not None:
        source = consortium.make_workload(learning.data)
    else:
        source = learning.make_workload(network.agent_names)
    problem = source.build(network.num_agents)
    adversary: ThreatModel | None
    objective: Objective
    if planned is not None:
        # The defaults of these options are not what is run.
        for name in refuse_options_of_plan(context, planned.budget, _DECIDED_BY_PLAN):
            del configuration[name]
        promise = planned.budget
        objective = planned.objective
        adversary = planned.threat
        cooldown_steps = planned.cooldown_steps
    else:
        promise = budget.make(learning.batch_size, problem.data.sizes)
        objective = mixing.choose_objective(network, budget.steps)
        adversary = threat.make_if_given()
        cooldown_steps = mixing.choose_cooldown(network, budget.steps)
    # Options are checked before anything is designed, which can take minutes.
    agreed = None if consortium is None else consortium.training
    step_sizes = _parse_step_sizes(
        step_size if consortium is None else str(consortium.step_size), learning
    )
    factory = NAMED_OPTIMIZERS[optimizer]
    if factory is not None:
        require_exact_sums(network)
        # Silently ignored, a momentum would leave the user with another model than intended.
        if mixing.momentum:
            raise typer.BadParameter(
                f"belongs to --optimizer sgd, found {optimizer}", param_hint="--momentum"
            )
    settings = learn.SweepSettings(
        num_steps=promise.num_steps,
        batch_size=promise.batch_size or (agreed or learning).batch_size,
        seeds=tuple(range(runs)),
        cooldown_steps=cooldown_steps,
        momentum=objective.momentum if factory is None else 0.0,
        optimizer=factory,
        dtype=_choose_dtype(planned, is_quadratic=learning.is_quadratic),
        device=device,
    )
    if learning.data is not None:
        _note_user_data(problem, promise)
    # The plan's mechanism, if there is a plan, and those named, for the same budget.
    names = _MECHANISMS if mechanism is None and planned is None else mechanism or ""
    with working("designing the noise"):
        mechanisms = (
            learn.make_mechanisms(names, network, promise, objective=objective, threat=adversary)
            if names
            else []
        )
    if planned is not None:
        # Named "plan", because a mechanism of the same name may stand beside it.
        mechanisms.insert(0, learn.Mechanism.from_plan(planned, name="plan"))
    warn_of_insiders(
        [
            own.name
            for own in mechanisms
            if own.noise and not own.is_central and is_open_to_insiders(own.noise, own.threat)
        ]
    )
    for one in mechanisms:
        if one.name == ("corn" if planned is None else "plan"):
            warn_of_large_disagreement(one.disagreement_ratio)
    # On large data sets, measuring takes longer than training. A table needs the last values only.
    steps = settings.num_steps
    has_curves = out is not None or plot is not None
    comparison = learn.tune(
        problem,
        network,
        mechanisms,
        step_sizes=step_sizes,
        schedule=usual_schedule(learning.task or ""),
        settings=settings,
        evaluate_at=None if has_curves else sorted({0, steps // 2, steps}),
    )
    result = comparison.result
    price = None
    # The user's own data is private, whatever the options are: all runs on it count.
    if learning.data is not None and result.status == "complete":
        with working("adding up the runs"):
            price = learn.price_tuning(result)
    models = _collect_models(comparison, planned)
    qualities = _measure_models(models, problem)
    summary = {
        name: own | {"test_quality": qualities.get(name) and asdict(qualities[name])}
        for name, own in comparison.summary.items()
    }
    facts = {
        "configuration": configuration,
        "task": problem.task.describe(),
        "notes": list(result.notes),
        **({} if planned is None else {"plan": fingerprint(planned).hex()}),
        "graph": network.source,
        "num_agents": network.num_agents,
        "agent_samples": problem.data.sizes,
        "promise": f"simulated: {promise.describe()}",
        **collect_sampling(promise),
        "privacy": result.privacy,
        "objective": objective.describe(),
        "gossip": str(network.gossip),
        "cooldown_steps": cooldown_steps,
        "messages_per_link": network.gossip.count_messages(promise.num_steps, cooldown_steps),
        "status": result.status,
        "num_steps": result.num_steps,
        "seeds": result.seeds,
        "stopped": [f"{', '.join(map(str, run))}: {why}" for run, why in result.stopped.items()],
        "mechanisms": summary,
        "grid_ends": comparison.ends,
        "tuning": {
            "data_is_private": learning.data is not None,
            "num_runs": len(result.trials) * len(result.seeds),
            "price": None if price is None else vars(price),
        },
    }
    if out is not None:
        # A simulation has the data of all agents, and measures on them without noise.
        write_run(result.rows, facts, out, is_private=True)
        # Of the mechanism whose outcome is printed, if its model predicts.
        for name in [name for name in _rank_outcomes(comparison) if name in models][:1]:
            models[name].save(out / MODEL_FILE, is_private=True)
            print_note(f"wrote the model of {name} to {out / MODEL_FILE}: corn export {out}")
    if plot:
        _draw(comparison, promise, plot, names=network.agent_names, style=plot_style)
    if json:
        print_json(facts)
    else:
        _print_comparison(comparison, network, promise, cooldown_steps, qualities)
        for name, end in comparison.ends.items():
            print_note(
                f"{name}: the best step size, {comparison.best_step_sizes[name]}, is the {end} "
                f"that was tried; a {_BEYOND[end]} one may be better (--step-size)"
            )
        if learning.data is not None:
            _note_price(result, price)
        elif len(result.trials) > len(mechanisms):
            print_note(
                f"step sizes were chosen from {len(result.trials)} runs per seed, which is counted "
                f"as free because {learning.task} is public; runs on --data are counted"
            )
        for name in _rank_outcomes(comparison)[:1]:
            lines = describe_quality(qualities.get(name), models[name].classes if models else None)
            if lines:
                print_facts(f"{name}, its average model in the first run", lines)
        _print_outcome(comparison)
    # After everything was written and printed, so that an interrupted run loses nothing.
    if result.status == "interrupted":
        kept = f"; {out} has the result so far" if out else ""
        raise StoppedByUserError(f"interrupted after step {result.num_steps}{kept}")


def _collect_models(
    comparison: learn.Comparison, plan: Plan | None
) -> dict[str, learn.TrainedModel]:
    """Return each mechanism's model: the average of its agents in the first run, if it predicts."""
    result = comparison.result
    found = {}
    for place, trial in enumerate(result.trials):
        name = trial.mechanism.name
        average = result.average_parameters[place]
        if trial.schedule != comparison.schedules.get(name) or not bool(average.isfinite().all()):
            continue
        planned = plan if name == "plan" else None
        promise = learn.ModelPromise.of_result(result, trial.mechanism, plan=planned)
        model = learn.TrainedModel.from_problem(comparison.problem, average, promise)
        if model is not None:
            found[name] = model
    return found


def _measure_models(
    models: dict[str, learn.TrainedModel], problem: learn.TrainingProblem
) -> dict[str, Quality]:
    """Return AUC, recall and calibration of each mechanism's model on the test samples."""
    if "test" not in problem.parts:
        return {}
    measured = {name: model.measure(*problem.parts["test"]) for name, model in models.items()}
    return {name: quality for name, quality in measured.items() if quality is not None}


def _rank_outcomes(comparison: learn.Comparison) -> list[str]:
    """Return the mechanisms in the order in which their outcome is of interest."""
    # A trusted server is a reference, not an outcome of decentralised training.
    return [
        one.name
        for one in sorted(
            comparison.mechanisms,
            key=lambda m: (m.budget is None, m.is_central, m.name not in ("plan", "corn")),
        )
    ]


def _protect_rows(context: typer.Context, budget: BudgetOptions) -> BudgetOptions:
    """Return the options for users' own files: unit sample and clip 1, unless they are given."""
    if not is_given(context, "unit"):
        budget = replace(budget, unit="sample")
    if not is_given(context, "clip") and budget.unit == "sample":
        budget = replace(budget, clip=1.0)
    return budget


def _note_user_data(problem: learn.TrainingProblem, budget: PrivacyBudget) -> None:
    """Print what the owner of the data should know."""
    if budget.unit == "sample":
        print_note(
            "each row is protected by itself: if a person has several rows, join them, or protect "
            "an agent's whole file with --unit agent"
        )
    for note in problem.private_notes:
        print_note(f"private, do not publish: {note}")
    if problem.simulation.startswith("the list of classes"):
        print_note(
            "the classes were read from the data, which a simulation may do; corn launch and corn "
            "agent need the public list --classes"
        )


def _choose_dtype(plan: Plan | None, *, is_quadratic: bool) -> str:
    if plan is not None and not is_quadratic:
        return plan.dtype
    # In single precision the rounding of the quadratic's loss, 1434, hides the gaps to measure.
    return "float64" if is_quadratic else "float32"


def _parse_step_sizes(text: str | None, learning: LearningOptions) -> tuple[float, ...]:
    """Return the step sizes to try; none if they are to be searched for."""
    if text is None:
        return (0.01,) if learning.is_quadratic else ()
    sizes = read_numbers("--step-size", text)
    for size in sizes:
        # Made only to raise for a wrong size now, not after minutes of design.
        learning.make_schedule(size)
    is_unique = len(set(sizes)) == len(sizes)
    require(is_unique, "--step-size", "different numbers", repr(text), advice="try 0.1,0.01")
    return sizes


def _note_price(result: learn.Result, price: learn.TuningPrice | None) -> None:
    """Print what all runs on private data cost."""
    if result.status == "interrupted":
        print_note("private tuning: runs that were interrupted are not priced")
    # One run spends what the table shows.
    if price is not None and price.num_runs > 1:
        print_note(
            f"private tuning: {price.num_runs} runs with noise on the agents' data together spend "
            f"ε = {round_up(price.epsilon)} at δ = {write_exactly(price.delta)}, not "
            f"{write_exactly(price.epsilon_of_one)}, for {price.protects}, against "
            f"{price.against}, if {price.assumes}. Runs of a simulation have noise and batches in "
            "common, and these step sizes were chosen by losses on the agents' data, which no ε "
            "covers"
        )
    mechanisms = dict.fromkeys(trial.mechanism for trial in result.trials)
    uncovered = [own.name for own in mechanisms if own.budget is None or own.is_central]
    if uncovered:
        print_note(
            f"private tuning: {', '.join(uncovered)} ran on the agents' data without noise of the "
            "agents, and no ε of the agents covers that: leave it out where data is private"
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
# The first that was measured decides.
_JUDGED = ("test_accuracy", "test_loss", "train_loss")
_SCORES = "means over the agents' own models; 'average': those of their average model"
_BEYOND: dict[GridEnd, str] = {"smallest": "smaller", "largest": "larger"}


def _draw(
    comparison: learn.Comparison,
    budget: PrivacyBudget,
    path: Path,
    *,
    names: Sequence[str],
    style: Path | None,
) -> None:
    """Draw the measurements of each mechanism at its best step size."""
    # Mechanisms differ in their adversaries, so the title names each with those that hold against
    # it.
    holders: dict[str, list[str]] = {}
    for mechanism in comparison.mechanisms:
        if mechanism.budget is not None:
            holders.setdefault(_name_adversary(mechanism), []).append(mechanism.name)
    against = "; ".join(f"{', '.join(names)} against {who}" for who, names in holders.items())
    promise = f"simulated {budget.describe()}: {against}" if holders else "no noise"
    # Matplotlib takes a second to import, which runs without a figure need not wait for.
    from corn.report import figure_style, plot_training, save_figure

    with figure_style(style):
        figure = plot_training(
            comparison.measured_rows,
            comparison.best_step_sizes,
            dict(zip(names, comparison.problem.data.sizes, strict=True)),
            title=f"{comparison.problem.task.describe()}: {promise}",
            cooldown_steps=comparison.result.cooldown_steps,
        )
        save_figure(figure, path)
    print_note(f"wrote {path}")


def _print_comparison(
    comparison: learn.Comparison,
    network: Network,
    budget: PrivacyBudget,
    cooldown_steps: int,
    qualities: dict[str, Quality],
) -> None:
    """Print a table with scores, spent ε and adversary of each mechanism, and notes."""
    result = comparison.result
    is_sum = network.mixing == "sum"
    count = len(result.seeds)
    runs = f"mean ± 95 % interval of {count}, which differ in batches, noise and first models"
    if count == 1:
        runs = "one, so chance is not shown; --runs 5 gives intervals"
    print_facts(
        f"{comparison.problem.task.describe()}, {network.num_agents} agents on {network.source}",
        [
            *(("data", note) for note in result.notes),
            ("promise", f"simulated: {budget.describe()}"),
            ("mixing", network.describe_mixing(budget.num_steps, cooldown_steps)),
            ("runs", runs),
            *([] if is_sum else [("scores", _SCORES)]),
            ("× server", describe_reference(budget)),
            *([] if is_sum else [("κ", KAPPA)]),
        ],
    )
    columns = _list_columns(comparison, budget, qualities, is_sum=is_sum)
    print_rows("Scores of each mechanism at its best step size", columns, comparison.mechanisms)
    _print_verdicts(comparison)
    print_note(result.privacy)
    for note in result.private_notes:
        print_note(note)
    for run, breakdown in result.stopped.items():
        print_note(f"{', '.join(map(str, run))}: {breakdown}")


def _list_columns(
    comparison: learn.Comparison,
    budget: PrivacyBudget,
    qualities: dict[str, Quality],
    *,
    is_sum: bool,
) -> list[Column[learn.Mechanism]]:
    facts = comparison.summary
    shown = _choose_scores(facts, is_sum=is_sum)
    judged = _choose_judged(comparison)
    if judged and "test_accuracy" in shown:
        # The table must stay narrow enough to read.
        shown = [name for name in shown if name != "test_loss_of_average"]

    def spent(own: learn.Mechanism) -> str:
        return "none" if own.budget is None else round_up_range(_spent(comparison, own))

    def score(name: str) -> Column[learn.Mechanism]:
        return Column("", lambda own: _format_score(facts[own.name], name), _COLUMNS[name])

    def auc(own: learn.Mechanism) -> str:
        return f"{qualities[own.name].auc:.4g}" if own.name in qualities else ""

    return [
        Column("", lambda own: own.name, "mechanism"),
        Column("", lambda own: facts[own.name]["step_size"] or "all broke down", "step size"),
        *map(score, shown),
        Column(
            "",
            lambda own: _format_difference(facts[own.name], judged),
            f"− {comparison.reference}" if judged else "",
        ),
        Column("", auc, "AUC" if qualities else ""),
        Column("", spent, f"ε ({budget.unit})"),
        Column("", lambda own: own.central_ratio, "× server", _format_ratio),
        Column("", lambda own: own.disagreement_ratio, "" if is_sum else "κ", format_kappa),
        Column("", _name_adversary, "holds against"),
    ]


def _choose_judged(comparison: learn.Comparison) -> str:
    """Return the score that differences to one mechanism are shown of; empty for a single run."""
    if len(comparison.result.seeds) == 1 or len(comparison.schedules) == 1:
        return ""
    scores = comparison.summary[comparison.reference]
    return next(name for name in _JUDGED if name in scores)


def _print_verdicts(comparison: learn.Comparison) -> None:
    """Print whether the reference is better than each other mechanism, beyond chance."""
    column = _choose_judged(comparison)
    verdicts: dict[str, list[str]] = {}
    for name, (mean, width) in (comparison.differences(column) if column else {}).items():
        is_worse = (mean > 0) == ("accuracy" in column)
        verdict = "cannot be told from"
        if abs(mean) > width:
            verdict = "is worse than" if is_worse else "is better than"
        # A run that broke down has no interval, and a note of its own.
        if not math.isnan(width):
            verdicts.setdefault(verdict, []).append(name)
    if verdicts:
        said = "; ".join(f"{verdict} {', '.join(names)}" for verdict, names in verdicts.items())
        print_note(
            f"{_COLUMNS[column]}: {comparison.reference} {said} (95 % intervals of differences, "
            f"paired over {len(comparison.result.seeds)} runs, without correction for several "
            "mechanisms)"
        )


def _choose_scores(facts: dict[str, dict[str, object]], *, is_sum: bool) -> list[str]:
    # Columns that no mechanism has a value for are left out: the quadratic has no test set.
    shown = [name for name in _COLUMNS if any(own.get(name) is not None for own in facts.values())]
    hidden = set()
    # The loss on held-out samples says more, and a narrower table is easier to read.
    if "test_loss" in shown or "optimality_gap" in shown:
        hidden.add("train_loss")
    if is_sum:
        # All agents have one model, which is the average.
        hidden |= {"test_loss_of_average", "test_accuracy_of_average", "consensus_distance"}
    # The two models' scores side by side show how far agents disagree.
    if "test_loss_of_average" in shown:
        hidden.add("consensus_distance")
    return [name for name in shown if name not in hidden]


def _spent(comparison: learn.Comparison, mechanism: learn.Mechanism) -> object:
    """Return ε of all agents where their promises differ; else that of the least protected."""
    is_uniform = mechanism.budget is None or mechanism.budget.is_uniform
    name = "simulated_epsilon" if is_uniform else "simulated_epsilon_of_each_agent"
    return comparison.summary[mechanism.name][name]


def _print_outcome(comparison: learn.Comparison) -> None:
    """Print the last line: what CorN, or else the first private mechanism, has reached."""
    name = _rank_outcomes(comparison)[0]
    own = next(mechanism for mechanism in comparison.mechanisms if mechanism.name == name)
    central, weighted = own.central_ratio, own.weighted_central_ratio
    if own.budget is None or own.is_central or central is None or weighted is None:
        return
    scores, spent = comparison.summary[name], _spent(comparison, own)
    settings = own.budget, own.threat, (central, weighted)
    text = describe_outcome(scores, spent, *settings, is_simulated=True)
    print_line(None if text is None else f"{name}: {text}")


def _format_ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.3g}"


def _format_score(own: dict[str, object], column: str) -> str:
    """Return a score, with its 95 % interval if there were several runs."""
    if own.get(column) is None:
        return ""
    width = cast("dict[str, float]", own["intervals"]).get(column)
    return f"{own[column]:.4g}" + ("" if width is None else f" ± {width:.2g}")


def _format_difference(own: dict[str, object], column: str) -> str:
    """Return the paired difference to the reference, with its 95 % interval."""
    found = cast("dict[str, tuple[float, float]]", own["differences"]).get(column)
    return "" if found is None else f"{found[0]:+.2g} ± {found[1]:.2g}"


def _name_adversary(mechanism: learn.Mechanism) -> str:
    """Return the adversary in a few words; ``Mechanism.against`` has the full description."""
    if mechanism.budget is None:
        return "nobody"
    if mechanism.is_central:
        return "model readers"
    if not mechanism.threat.max_colluders:
        return "eavesdropper"
    return mechanism.threat.describe_colluders()
