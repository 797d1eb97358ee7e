"""``corn audit``: attack the code that runs a plan, and compare with what the plan promises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from corn.cli.options import JSON, argument, option, refuse_given
from corn.cli.output import print_error, print_json, print_note, print_result, print_rows, progress
from corn.learn.datasets import WorkloadName
from corn.plan import Plan, load_plan
from corn.privacy.rounding import round_bound_down, round_up
from corn.topology.graphs import label_agent

if TYPE_CHECKING:  # needs torch, whose import takes a second
    from corn.audit import AuditReport, Finding

in_one_run = partial(option, panel="One run")
_CONFIDENCE = 0.99
# Of the training run; the bound on ε holds for any.
_STEP_SIZE = 0.1


def audit(
    context: typer.Context,
    path: Path = argument("Plan file.", metavar="PLAN"),
    *,
    view: str = option(
        "Attacker: eavesdropper, coalition:AGENT,AGENT,… or worst, the coalition within the plan's "
        "threat model that learns most about a victim.",
        default="worst",
    ),
    victim: str | None = option(
        "Name or number of the agent with the canary. (Default: each in turn.)"
    ),
    trials: int = option("Trials of each of the two data sets.", default=10_000, min=100),
    through: Literal["shares", "step"] | None = option(
        "Part of the program that is attacked: shares (keys, noise and messages) or step (also "
        "sampling and clipping). (Default: shares; step for plans with the sample unit.)"
    ),
    seed: int = option("Seed of keys, coins and canaries.", default=0, min=0),
    one_run: bool = in_one_run(
        "Audit one training run with many canaries in the data (plans for samples).", default=False
    ),
    task: WorkloadName = in_one_run("Task to learn.", default="digits"),
    canaries: int = in_one_run("Samples to insert or not.", default=500, min=10),
    json: bool = JSON,
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
    victims = None if victim is None else [plan.network.find_agent(victim, argument="--victim")]
    report = audit_plan(
        plan,
        victims=victims,
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
        attacker, exposed = weakest
        # By the noise alone, which is the fastest: the plan does not promise anything here.
        last = audit_plan(plan, victims=[exposed], view=attacker, num_trials=trials, seed=seed)
        (beyond,) = last.findings
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
    facts = {
        "promise": plan.budget.describe(),
        "task": task,
        "view": "eavesdropper",
        "violated": report.violated,
        **asdict(report),
        "certified_epsilon": report.epsilon,
        "confidence": _CONFIDENCE,
    }
    del facts["epsilon"]
    verdict = "VIOLATED" if report.violated else "no violation found"
    print_result(f"audit of one run: {verdict}", facts, as_json=as_json)
    if report.violated:
        print_error(
            f"{path}: one run shows ε ≥ {round_bound_down(report.epsilon, 3)} for one sample, "
            "against an eavesdropper: more than was promised"
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
    names = plan.network.agent_names
    found = report.messages
    ordered = sorted(report.findings, key=lambda one: one.victim)
    findings = [_describe_finding(one, names) for one in ordered]
    facts = {
        "promise": plan.budget.describe(),
        "adversary": plan.threat.describe(),
        "protects": plan.budget.promises[0].query.protects,
        "mixing": plan.network.mixing,
        "unit": plan.budget.unit,
        **settings,
        # The tests of messages under masks; null without masks.
        "messages": found and asdict(found),
        "num_releases": report.num_releases,
        "confidence": _CONFIDENCE,
        "violated": report.violated,
        "problems": report.problems,
        "findings": findings,
        "smallest_break": None if beyond is None else _describe_finding(beyond, names),
    }
    verdict = "VIOLATED" if report.violated else "no violation found"
    title = f"audit of {plan.network.source}, {plan.num_agents} agents: {verdict}"
    if as_json:
        print_json(facts)
        return
    if found is not None:
        told = "faults were found, see below" if found.problems else "no deviation was found"
        facts["messages"] = (
            f"integers of {found.bits} bits under masks; single messages, incomplete sums and "
            f"differences between steps must be uniform: {told}, in {found.num_tests:,} tests of "
            f"{found.num_words:,} words each"
        )
    broken = f"none: no coalition of up to {most_compared} insiders exceeds the promise"
    if beyond is not None:
        broken = (
            f"{beyond.view.describe(names)} against agent {label_agent(names, beyond.victim)}: "
            f"measured μ {beyond.mu.estimate:.4g}, promised {round_up(beyond.promise.mu, 4)}"
        )
    print_result(title, facts | {"smallest_break": broken}, as_json=False)
    rows = [
        {
            **one,
            "victim": label_agent(names, one["victim"]),
            "measured_mu": f"{one['mu']:.4g} ± {(one['mu_high'] - one['mu_low']) / 2:.2g}",
        }
        for one in findings
    ]
    columns = ["victim", "view", "promised_epsilon", "certified_epsilon", "gaussian_epsilon"]
    columns += ["promised_mu", "measured_mu", "verdict"]
    print_rows("What attackers learn", rows, columns)
    if any(not one.is_promised for one in report.findings):
        print_note("the plan promises nothing against so many insiders")


def _describe_finding(one: Finding, names: Sequence[str]) -> dict[str, Any]:
    return {
        "victim": one.victim,
        "view": one.view.describe(names),
        "coalition": one.view.coalition,
        "is_promised": one.is_promised,
        "promised_epsilon": one.promise.epsilon,
        "delta": one.promise.delta,
        "certified_epsilon": one.certified_epsilon,
        "gaussian_epsilon": one.gaussian_epsilon,
        "promised_mu": one.promise.mu,
        "exact_mu": one.exact_mu,
        "mu": one.mu.estimate,
        "mu_low": one.mu.low,
        "mu_high": one.mu.high,
        "verdict": one.verdict,
        "excess": one.excess,
    }
