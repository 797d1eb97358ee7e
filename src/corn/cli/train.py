"""``corn train``: train with several mechanisms side by side, and compare the results."""

from __future__ import annotations

import math
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from corn import learn
from corn.checks import require
from corn.cli.learning import (
    MODEL_FILE,
    LearningOptions,
    read_consortium,
    refuse_options_of_plan,
    write_run,
)
from corn.cli.options import (
    JSON,
    OPTIONAL_GRAPH,
    PLOT,
    PLOT_STYLE,
    SEVERAL_MECHANISMS,
    BudgetOptions,
    MixingOptions,
    ThreatOptions,
    in_learning,
    in_network,
    is_given,
    option,
    read_configuration,
    read_numbers,
)
from corn.cli.output import (
    KAPPA,
    collect_sampling,
    describe_outcome,
    name_server,
    print_facts,
    print_json,
    print_line,
    print_note,
    print_table,
    warn_of_insiders,
    warn_of_large_disagreement,
    working,
    write_fact,
)
from corn.covariance import Objective, ThreatModel
from corn.distributed.logs import PRIVATE_MARK
from corn.errors import StoppedByUserError
from corn.learn.datasets import usual_schedule
from corn.learn.schedule import OptimizerName
from corn.plan import Plan, fingerprint, load_plan
from corn.privacy import PrivacyBudget
from corn.privacy.rounding import round_up, round_up_range, write_exactly
from corn.topology import Network, choose_cooldown

if TYPE_CHECKING:
    from corn.learn.metrics import Quality
    from corn.learn.workloads import ProblemSource

_MECHANISMS = "corn,decor,ldp,none"
# The options that a plan decides.
_RECORDS = (BudgetOptions, MixingOptions, ThreatOptions)
_DECIDED_BY_PLAN = ("graph", *(own.name for record in _RECORDS for own in fields(record)))
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


def train(
    context: typer.Context,
    *,
    learning: LearningOptions,
    step_size: str | None = in_learning(
        "First step size, or several separated by commas, of which the least validation loss "
        "decides. (Default: a search; quadratic: 0.01.)"
    ),
    mechanism: str | None = SEVERAL_MECHANISMS,
    optimizer: OptimizerName = in_learning(
        "Optimizer of the averaged releases; adam and adamw need --mixing sum. (Default: sgd.)",
        default="sgd",
        show_default=False,
    ),
    runs: int = in_learning(
        "Number of runs, with seeds 0, 1, …, and 95 % intervals.", default=1, min=1
    ),
    graph: str | None = OPTIONAL_GRAPH,
    plan: Path | None = in_network(
        "Plan file from corn plan, which sets network, budget and noise."
    ),
    budget: BudgetOptions,
    mixing: MixingOptions,
    threat: ThreatOptions,
    device: str = option("Torch device to compute on.", default="cpu"),
    out: Path | None = option(
        "Directory for metrics.csv, run.json (configuration and result) and model.pt."
    ),
    plot: Path | None = PLOT,
    plot_style: Path | None = PLOT_STYLE,
    json: bool = JSON,
) -> None:
    """Train with several mechanisms side by side, at the same privacy."""
    # Before the training, not after it.
    if out is not None and out.exists() and not out.is_dir():
        raise typer.BadParameter(f"must be a directory, found a file {out}", param_hint="--out")
    is_private = learning.data is not None
    # Rows of users' own files are protected, unless they choose otherwise.
    if is_private and plan is None and not is_given(context, "unit"):
        budget = replace(budget, unit="sample")
    if is_private and plan is None and budget.unit == "sample" and not is_given(context, "clip"):
        budget = replace(budget, clip=1.0)
    configuration = {**read_configuration(context), "unit": budget.unit, "clip": budget.clip}
    consortium = read_consortium(context, plan, learning.data)
    planned = None
    if plan is not None:
        planned = load_plan(plan) if consortium is None else consortium.load_plan()
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
        promise, objective, adversary = planned.budget, planned.objective, planned.threat
        cooldown_steps = planned.cooldown_steps
    else:
        promise = budget.make(learning.batch_size, problem.data.sizes)
        objective = mixing.choose_objective(network, budget.steps)
        adversary = threat.make_if_given()
        cooldown_steps = (
            choose_cooldown(network, budget.steps) if mixing.cooldown is None else mixing.cooldown
        )
    # Options are checked before anything is designed, which can take minutes.
    agreed = None if consortium is None else consortium.training
    asked = step_size if consortium is None else str(consortium.step_size)
    step_sizes = _parse_step_sizes(asked, learning)
    from corn.learn.optimizers import NAMED_OPTIMIZERS, require_exact_sums

    factory = NAMED_OPTIMIZERS[optimizer]
    if factory is not None:
        require_exact_sums(network)
        # Silently ignored, a momentum would leave the user with another model than intended.
        if mixing.momentum:
            why = f"belongs to --optimizer sgd, found {optimizer}"
            raise typer.BadParameter(why, param_hint="--momentum")
    dtype = "float32" if planned is None else planned.dtype
    settings = learn.SweepSettings(
        num_steps=promise.num_steps,
        batch_size=promise.batch_size or (agreed or learning).batch_size,
        seeds=tuple(range(runs)),
        cooldown_steps=cooldown_steps,
        momentum=objective.momentum if factory is None else 0.0,
        optimizer=factory,
        # In single precision the rounding of the quadratic's loss, 1434, hides the gaps to measure.
        dtype="float64" if learning.task == "quadratic" else dtype,
        device=device,
    )
    for note in problem.private_notes:
        print_note(f"{PRIVATE_MARK}{note}")
    if learning.data is not None and promise.unit == "sample":
        print_note("each row is protected by itself: a person with several rows is not")
    # The plan's mechanism, if there is a plan, and those named, for the same budget.
    names = _MECHANISMS if mechanism is None and planned is None else mechanism
    mechanisms = []
    with working("designing the noise"):
        if names:
            mechanisms = learn.make_mechanisms(
                names, network, promise, objective=objective, threat=adversary
            )
    if planned is not None:
        # Named "plan", because a mechanism of the same name may stand beside it.
        mechanisms.insert(0, learn.Mechanism.from_plan(planned, name="plan"))
    warn_of_insiders(
        [
            (own.name, own.noise, own.threat)
            for own in mechanisms
            if own.noise and not own.is_central
        ]
    )
    for own in mechanisms:
        if own.name == ("corn" if planned is None else "plan"):
            warn_of_large_disagreement(own.disagreement_ratio)
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
    if is_private and result.status == "complete":
        with working("adding up the runs"):
            price = learn.price_tuning(result)
    models, qualities = _collect_models(comparison, planned)
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
        "mechanisms": {
            name: own | {"test_quality": asdict(qualities[name]) if name in qualities else None}
            for name, own in comparison.summary.items()
        },
        "grid_ends": comparison.ends,
        "tuning": {
            "data_is_private": is_private,
            "num_runs": len(result.trials) * len(result.seeds),
            "price": None if price is None else vars(price),
        },
    }
    ranked = sorted(comparison.mechanisms, key=_rank)
    if out is not None:
        # A simulation has the data of all agents, and measures on them without noise.
        write_run(result.rows, facts, out, learn.COLUMNS, is_private=True)
        # Of the mechanism whose outcome is printed, if its model predicts.
        for name in [own.name for own in ranked if own.name in models][:1]:
            models[name].save(out / MODEL_FILE, is_private=True)
            print_note(f"wrote the model of {name} to {out / MODEL_FILE}: corn export {out}")
    if plot:
        _draw(comparison, promise, plot, names=network.agent_names, style=plot_style)
    if json:
        print_json(facts)
    else:
        _print_comparison(comparison, network, promise, cooldown_steps, qualities)
        for name, end in comparison.ends.items():
            best = comparison.best_step_sizes[name]
            print_note(f"{name}: the best step size, {best}, is the {end} that was tried")
        if is_private:
            _note_price(result, price)
        elif len(result.trials) > len(mechanisms):
            print_note(
                f"step sizes were chosen from {len(result.trials)} runs per seed, which is counted "
                f"as free because {learning.task} is public"
            )
        _print_outcome(comparison, ranked[0])
    # After everything was written and printed, so that an interrupted run loses nothing.
    if result.status == "interrupted":
        kept = f"; {out} has the result so far" if out else ""
        raise StoppedByUserError(f"interrupted after step {result.num_steps}{kept}")


def _parse_step_sizes(text: str | None, learning: LearningOptions) -> tuple[float, ...]:
    """Return the step sizes to try; none if they are to be searched for."""
    if text is None:
        return (0.01,) if learning.task == "quadratic" else ()
    sizes = read_numbers("--step-size", text)
    for size in sizes:
        # Made only to raise for a wrong size now, not after minutes of design.
        learning.make_schedule(size)
    require(len(set(sizes)) == len(sizes), "--step-size", "different numbers", repr(text))
    return sizes


def _collect_models(
    comparison: learn.Comparison, plan: Plan | None
) -> tuple[dict[str, learn.TrainedModel], dict[str, Quality]]:
    """Return each mechanism's model, the average of its agents in the first run, and its scores.

    A mechanism is left out if its runs broke down, or its model does not predict.
    """
    result, problem = comparison.result, comparison.problem
    models, qualities = {}, {}
    for place, trial in enumerate(result.trials):
        name = trial.mechanism.name
        average = result.average_parameters[place]
        if trial.schedule != comparison.schedules.get(name) or not bool(average.isfinite().all()):
            continue
        planned = plan if name == "plan" else None
        promise = learn.ModelPromise.of_result(result, trial.mechanism, plan=planned)
        model = learn.TrainedModel.from_problem(problem, average, promise)
        if model is not None:
            models[name] = model
            quality = model.measure(*problem.parts["test"]) if "test" in problem.parts else None
            if quality is not None:
                qualities[name] = quality
    return models, qualities


def _rank(mechanism: learn.Mechanism) -> tuple[bool, bool, bool]:
    """Return a key that is least for the mechanism whose outcome is of most interest."""
    # A trusted server is a reference, not an outcome of decentralised training.
    return mechanism.budget is None, mechanism.is_central, mechanism.name not in ("plan", "corn")


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


def _draw(
    comparison: learn.Comparison,
    budget: PrivacyBudget,
    path: Path,
    *,
    names: list[str],
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
    is_gossip = network.mixing == "gossip"
    count = len(result.seeds)
    runs = f"mean ± 95 % interval of {count}, which differ in batches, noise and first models"
    if count == 1:
        runs = "one, so chance is not shown; --runs 5 gives intervals"
    lines = [
        *(("data", note) for note in result.notes),
        ("promise", f"simulated: {budget.describe()}"),
        ("mixing", network.describe_mixing(budget.num_steps, cooldown_steps)),
        ("runs", runs),
        ("× server", f"noise variance of the average over that of {name_server(budget)}"),
    ]
    if is_gossip:
        scores = "means over the agents' own models; 'average': those of their average model"
        lines += [("scores", scores), ("κ", KAPPA)]
    task = comparison.problem.task.describe()
    print_facts(f"{task}, {network.num_agents} agents on {network.source}", lines)
    judged = _choose_judged(comparison)
    shown = _choose_scores(comparison.summary, judged, is_gossip=is_gossip)
    columns = ["mechanism", "step size", *(_COLUMNS[name] for name in shown)]
    columns += [f"− {comparison.reference}"] if judged else []
    columns += ["AUC"] if qualities else []
    columns += [f"ε ({budget.unit})", "× server", *(["κ"] if is_gossip else []), "holds against"]
    rows = []
    for own in comparison.mechanisms:
        facts: Any = comparison.summary[own.name]
        row = [own.name, facts["step_size"] or "all broke down"]
        for name in shown:
            width = facts["intervals"].get(name)
            interval = "" if width is None else f" ± {width:.2g}"
            row.append(f"{facts[name]:.4g}{interval}" if name in facts else "")
        if judged:
            found = facts["differences"].get(judged)
            row.append("" if found is None else f"{found[0]:+.2g} ± {found[1]:.2g}")
        if qualities:
            row.append(f"{qualities[own.name].auc:.4g}" if own.name in qualities else "")
        row.append("none" if own.budget is None else round_up_range(_spent(comparison, own)))
        row.append("" if own.central_ratio is None else f"{own.central_ratio:.3g}")
        row += [write_fact("disagreement_ratio", own.disagreement_ratio)] if is_gossip else []
        rows.append([*row, _name_adversary(own)])
    print_table("Scores of each mechanism at its best step size", columns, rows)
    _print_verdicts(comparison, judged)
    broken = [f"{', '.join(map(str, run))}: {why}" for run, why in result.stopped.items()]
    for note in (result.privacy, *result.private_notes, *broken):
        print_note(note)


def _choose_judged(comparison: learn.Comparison) -> str:
    """Return the score that differences to one mechanism are shown of; empty for a single run."""
    if len(comparison.result.seeds) == 1 or len(comparison.schedules) == 1:
        return ""
    scores = comparison.summary[comparison.reference]
    judged = ("test_accuracy", "test_loss", "train_loss")
    return next(name for name in judged if name in scores)


def _choose_scores(
    facts: dict[str, dict[str, object]], judged: str, *, is_gossip: bool
) -> list[str]:
    """Return the scores that the table has columns for; it must stay narrow enough to read."""
    # The quadratic has no test set.
    measured = {name for own in facts.values() for name in own if own[name] is not None}
    kinds = [["optimality_gap"], ["test_loss", "test_accuracy"], ["train_loss"]]
    shown = next(names for names in kinds if names[0] in measured or names == kinds[-1])
    if not is_gossip:
        # All agents have one model, which is the average.
        return [name for name in shown if name in measured]
    # The two models' scores side by side show how far agents disagree.
    both = [name + of for name in shown for of in ("", "_of_average")]
    hidden = "test_loss_of_average" if judged else ""
    found = [name for name in both if name in measured and name in _COLUMNS and name != hidden]
    return found if len(found) > 1 else [*found, "consensus_distance"]


def _print_verdicts(comparison: learn.Comparison, column: str) -> None:
    """Print whether the reference is better than each other mechanism, beyond chance."""
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


def _spent(comparison: learn.Comparison, mechanism: learn.Mechanism) -> object:
    """Return ε of all agents where their promises differ; else that of the least protected."""
    is_uniform = mechanism.budget is None or mechanism.budget.is_uniform
    name = "simulated_epsilon" if is_uniform else "simulated_epsilon_of_each_agent"
    return comparison.summary[mechanism.name][name]


def _print_outcome(comparison: learn.Comparison, own: learn.Mechanism) -> None:
    """Print the last line: what CorN, or else the first private mechanism, has reached."""
    central, weighted = own.central_ratio, own.weighted_central_ratio
    if own.budget is None or own.is_central or central is None or weighted is None:
        return
    scores, spent = comparison.summary[own.name], _spent(comparison, own)
    ratios = central, weighted
    text = describe_outcome(scores, spent, own.budget, own.threat, ratios, is_simulated=True)
    print_line(None if text is None else f"{own.name}: {text}")


def _name_adversary(mechanism: learn.Mechanism) -> str:
    """Return the adversary in a few words; ``Mechanism.against`` has the full description."""
    if mechanism.budget is None:
        return "nobody"
    if mechanism.is_central:
        return "model readers"
    colluders = mechanism.threat.max_colluders
    return mechanism.threat.describe_colluders() if colluders else "eavesdropper"
