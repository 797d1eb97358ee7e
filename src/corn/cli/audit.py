"""``corn audit``: attack the code that runs a plan, and compare with what the plan promises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from corn.cli.options import JsonOption, refuse_given
from corn.cli.output import (
    Column,
    Fact,
    collect_rows,
    print_error,
    print_note,
    print_result,
    print_rows,
    progress,
)
from corn.learn.datasets import WorkloadName
from corn.plan import Plan, load_plan
from corn.privacy.rounding import round_bound_down, round_up, write_exactly
from corn.topology.graphs import label_agent

if TYPE_CHECKING:  # needs torch, whose import takes a second
    from corn.audit import AuditReport, Finding
    from corn.audit.checks import MessageCheck

in_one_run = partial(typer.Option, rich_help_panel="One run")
_CONFIDENCE = 0.99
# Of the training run; the bound on ε holds for any.
_STEP_SIZE = 0.1
_TARGETS = {
    "shares": "keys, noise and messages of all agents; a few releases stand for the whole run",
    "step": "sampling, clipping, noise, rounding and messages, over the releases of a trial",
}
EXAMPLE = "corn audit plan.corn --view worst --trials 10000"


def audit(
    context: typer.Context,
    path: Annotated[Path, typer.Argument(metavar="PLAN", help="Plan file.")],
    *,
    view: Annotated[
        str,
        typer.Option(
            help="Attacker: eavesdropper, coalition:AGENT,AGENT,… or worst, the coalition within "
            "the plan's threat model that learns most about a victim."
        ),
    ] = "worst",
    victim: Annotated[
        str | None,
        typer.Option(help="Name or number of the agent with the canary. (Default: each in turn.)"),
    ] = None,
    trials: Annotated[
        int, typer.Option(min=100, help="Trials of each of the two data sets.")
    ] = 10_000,
    through: Annotated[
        Literal["shares", "step"] | None,
        typer.Option(
            help="Part of the program that is attacked: shares (keys, noise and messages) or step "
            "(also sampling and clipping). (Default: shares; step for plans with the sample unit.)"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of keys, coins and canaries.")] = 0,
    one_run: Annotated[
        bool,
        in_one_run(
            "--one-run",
            help="Audit one training run with many canaries in the data (plans for samples).",
        ),
    ] = False,
    task: Annotated[WorkloadName, in_one_run(help="Task to learn.")] = "digits",
    canaries: Annotated[int, in_one_run(min=10, help="Samples to insert or not.")] = 500,
    json: JsonOption = False,
) -> None:
    """Attack the code that runs a plan with canaries; exit 1 if a promise is violated."""
    from corn.audit import audit_plan, find_smallest_break
    from corn.audit.views import largest_compared, read_view

    if one_run:
        why = "must be left out with --one-run"
        refuse_given(context, ("view", "victim", "trials", "through"), why)
    else:
        refuse_given(context, ("task", "canaries"), "needs --one-run")
    plan = load_plan(path)
    agents = plan.network.agent_names
    if one_run:
        _audit_one_run(path, plan, task, num_canaries=canaries, seed=seed, as_json=json)
        return
    # A plan for samples depends on sampling, which only whole steps contain.
    through = through or ("shares" if plan.budget.unit == "agent" else "step")
    report = audit_plan(
        plan,
        victims=(
            None if victim is None else [plan.network.find_agent(victim, argument="--victim")]
        ),
        view=None if view == "worst" else read_view(view, agents),
        through=through,
        num_trials=trials,
        confidence=_CONFIDENCE,
        seed=seed,
        track=lambda pairs: progress(pairs, "attacking"),
    )
    # An audit that finds nothing might be too weak. Beyond the threat it should find something.
    weakest = find_smallest_break(plan)
    beyond = None
    if weakest is not None:
        # By the noise alone, which is the fastest: the plan does not promise anything here.
        (beyond,) = audit_plan(
            plan,
            victims=[weakest.victim],
            view=weakest.view,
            num_trials=trials,
            seed=seed,
        ).findings
    settings = {"through": through, "num_trials": trials, "seed": seed}
    _print(plan, report, beyond, largest_compared(plan), settings, as_json=json)
    # After the table, so that the last lines say what failed.
    for problem in report.problems:
        print_error(f"{path}: {problem}")
    for one in report.findings:
        if one.excess:
            who = one.view.describe(agents)
            agent = label_agent(agents, one.victim)
            print_error(f"{path}: agent {agent} is exposed to {who}: {'; '.join(one.excess)}")
    if report.violated:
        raise typer.Exit(1)


def _audit_one_run(
    path: Path, plan: Plan, task: str, *, num_canaries: int, seed: int, as_json: bool
) -> None:
    from corn import learn
    from corn.audit import audit_training

    report = audit_training(
        plan,
        learn.Workload(task, partition="iid").build(plan.num_agents),
        schedule=learn.make_schedule(_STEP_SIZE),
        num_canaries=num_canaries,
        confidence=_CONFIDENCE,
        seed=seed,
        track=lambda steps: progress(steps, "training"),
    )
    certified = round_bound_down(report.epsilon, 3)
    print_result(
        f"audit of one run: {'VIOLATED' if report.violated else 'no violation found'}",
        [
            Fact("promise", plan.budget.describe(), "promise"),
            Fact("task", task),
            Fact("view", "eavesdropper", "attacker"),
            Fact("violated", report.violated),
            Fact(
                "num_canaries",
                report.num_canaries,
                "canaries",
                f"{report.num_canaries}, of which {report.num_guesses} were guessed: "
                f"{report.num_right} right",
            ),
            Fact("num_guesses", report.num_guesses),
            Fact("num_right", report.num_right),
            Fact("auc", report.auc, "AUC", f"{report.auc:.3f}"),
            Fact(
                "epsilon",
                report.epsilon,
                "certified ε",
                f"≥ {certified} at δ = {write_exactly(report.delta)}, with confidence "
                f"{_CONFIDENCE:g}; promised {round_up(report.promised_epsilon)}",
            ),
            Fact("promised_epsilon", report.promised_epsilon),
            Fact("delta", report.delta),
            Fact("confidence", _CONFIDENCE),
        ],
        as_json=as_json,
    )
    if report.violated:
        print_error(
            f"{path}: one run shows ε ≥ {certified} for one sample, against an eavesdropper: more "
            "than was promised"
        )
        raise typer.Exit(1)


def _print(
    plan: Plan,
    report: AuditReport,
    beyond: Finding | None,
    most_compared: int,
    settings: dict[str, Any],
    *,
    as_json: bool,
) -> None:
    through, trials, seed = settings["through"], settings["num_trials"], settings["seed"]
    columns = _list_columns(plan.network.agent_names)
    findings = sorted(report.findings, key=lambda one: one.victim)
    found = report.messages
    print_result(
        f"audit of {plan.network.source}, {plan.num_agents} agents: "
        f"{'VIOLATED' if report.violated else 'no violation found'}",
        [
            Fact("promise", plan.budget.describe(), "promise"),
            Fact("adversary", plan.threat.describe(), "against"),
            Fact("mixing", plan.network.mixing),
            Fact("unit", plan.budget.unit),
            Fact("through", through, "attacked", _TARGETS[through]),
            # The tests of messages under masks; null without masks.
            Fact("messages", found and asdict(found), "messages" if found else "", _tell(found)),
            Fact(
                "num_trials",
                trials,
                "trials",
                f"{trials:,} with the canary and {trials:,} without it, {report.num_releases} "
                f"releases each, seed {seed}",
            ),
            Fact("num_releases", report.num_releases),
            Fact("seed", seed),
            Fact(
                "confidence",
                _CONFIDENCE,
                "confidence",
                f"{_CONFIDENCE:g} for all bounds on ε together, at the promised δ; 0.95 "
                "for the interval of each μ",
            ),
            Fact("violated", report.violated),
            Fact("problems", report.problems),
            Fact("findings", collect_rows(columns, findings)),
            Fact(
                "smallest_break",
                None if beyond is None else collect_rows(columns, [beyond])[0],
                "smallest break",
                _describe_break(beyond, most_compared, plan.network.agent_names),
            ),
        ],
        as_json=as_json,
    )
    if not as_json:
        protected = plan.budget.promises[0].query.protects
        print_rows(f"What attackers learn about {protected}", columns, findings)
        if any(not one.is_promised for one in report.findings):
            print_note("the plan promises nothing against so many insiders")


def _list_columns(names: Sequence[str]) -> list[Column[Finding]]:
    def interval(one: Finding) -> str:
        return f"{one.mu.estimate:.4g} ± {(one.mu.high - one.mu.low) / 2:.2g}"

    return [
        Column("victim", lambda one: one.victim, "victim", lambda own: label_agent(names, own)),
        Column("view", lambda one: one.view.describe(names), "attacker"),
        Column("coalition", lambda one: one.view.coalition),
        Column("is_promised", lambda one: one.is_promised),
        Column("promised_epsilon", lambda one: one.promise.epsilon, "promised ε", round_up),
        Column("delta", lambda one: one.promise.delta),
        Column("certified_epsilon", lambda one: one.certified_epsilon, "certified ε", _bound),
        Column("gaussian_epsilon", lambda one: one.gaussian_epsilon, "Gaussian ε", _bound),
        Column("promised_mu", lambda one: one.promise.mu, "promised μ", lambda mu: round_up(mu, 4)),
        Column("exact_mu", lambda one: one.exact_mu),
        Column("mu", lambda one: one.mu.estimate),
        Column("", interval, "measured μ"),
        Column("mu_low", lambda one: one.mu.low),
        Column("mu_high", lambda one: one.mu.high),
        Column("verdict", lambda one: one.verdict, "verdict"),
        Column("excess", lambda one: one.excess),
    ]


def _bound(epsilon: float | None) -> str:
    return "" if epsilon is None else f"≥ {round_bound_down(epsilon, 3)}"


def _tell(found: MessageCheck | None) -> str:
    if found is None:
        return ""
    told = "faults were found, see below" if found.problems else "no deviation from that was found"
    return (
        f"integers of {found.bits} bits under masks, of which attackers read complete sums. "
        "Single messages, incomplete sums and differences between steps must be uniform: "
        f"{told}, in {found.num_tests:,} tests of {found.num_words:,} words each"
    )


def _describe_break(beyond: Finding | None, most_compared: int, names: Sequence[str]) -> str:
    if beyond is None:
        return f"none: no coalition of up to {most_compared} insiders exceeds the promise"
    who = f"{beyond.view.describe(names)} against agent {label_agent(names, beyond.victim)}"
    promised = round_up(beyond.promise.mu, 4)
    return f"{who}: measured μ {beyond.mu.estimate:.4g}, promised {promised}"
