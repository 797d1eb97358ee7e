"""``corn audit``: attack the code that runs a plan, and compare with what the plan promises."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from corn.cli.options import JsonOption, PlotOption
from corn.cli.output import (
    print_error,
    print_facts,
    print_json,
    print_note,
    print_table,
    print_written,
    progress,
)
from corn.errors import InvalidArgumentError
from corn.learn.names import WorkloadName
from corn.plan import Plan, load_plan
from corn.privacy.rounding import round_bound_down, round_up, write_exactly

if TYPE_CHECKING:  # needs torch, whose import takes a second
    from corn.audit import AuditReport, AuditSettings, Break, Finding, View

_ONE_RUN = "One run"
_TRIALS = 10_000
# Of the training run; the bound on ε holds for any.
_STEP_SIZE = 0.1
EXAMPLE = "corn audit plan.corn --view worst --trials 10000"


@dataclass(frozen=True)
class TrainingOptions:
    """The training run of ``--one-run``."""

    one_run: Annotated[
        bool,
        typer.Option(
            "--one-run",
            help="Audit one training run with many canaries in the data (plans for samples).",
            rich_help_panel=_ONE_RUN,
        ),
    ] = False
    task: Annotated[WorkloadName, typer.Option(help="Task to learn.", rich_help_panel=_ONE_RUN)] = (
        "digits"
    )
    canaries: Annotated[
        int, typer.Option(min=10, help="Samples to insert or not.", rich_help_panel=_ONE_RUN)
    ] = 500


def audit(
    path: Annotated[Path, typer.Argument(metavar="PLAN", help="Plan file.")],
    *,
    view: Annotated[
        str,
        typer.Option(
            help="Attacker: eavesdropper, neighbour:AGENT, coalition:AGENT,AGENT,… or worst, the "
            "coalition within the plan's threat model that learns most about a victim."
        ),
    ] = "worst",
    victim: Annotated[str, typer.Option(help="Number of the agent with the canary, or all.")] = (
        "all"
    ),
    trials: Annotated[int, typer.Option(min=100, help="Trials of each of the two data sets.")] = (
        _TRIALS
    ),
    through: Annotated[
        Literal["shares", "step", "processes"] | None,
        typer.Option(
            help="Part of the program that is attacked: shares (keys and noise), step (also "
            "sampling, clipping, rounding and the message) or processes (messages of real agents; "
            "no seed reproduces them). (Default: shares; step for plans with the sample unit.)"
        ),
    ] = None,
    confidence: Annotated[
        float,
        typer.Option(
            help="Confidence of all verdicts and bounds together: the probability that an audit of "
            "a correct program raises no alarm."
        ),
    ] = 0.99,
    seed: Annotated[int, typer.Option(min=0, help="Seed of keys, coins and canaries.")] = 0,
    training: TrainingOptions,
    plot: PlotOption = None,
    json: JsonOption = False,
) -> None:
    """Attack the code that runs a plan with canaries; exit 1 if a promise is violated."""
    from corn.audit import AuditSettings, audit_plan, find_smallest_break, read_view

    if training.one_run:
        given = {
            "--victim": victim != "all",
            "--trials": trials != _TRIALS,
            "--through": through is not None,
            "--plot": plot is not None,
        }
        if any(given.values()):
            names = ", ".join(name for name, is_given in given.items() if is_given)
            raise InvalidArgumentError(f"{names} must be left out with --one-run")
    elif training != TrainingOptions():
        raise InvalidArgumentError("--task and --canaries need --one-run")
    plan = load_plan(path)
    if training.one_run:
        attacker = None if view == "worst" else read_view(view)
        _audit_one_run(path, plan, training, attacker, confidence, seed, json)
        return
    # A plan for samples depends on sampling, which only whole steps contain.
    settings = AuditSettings(
        through or ("shares" if plan.budget.unit == "agent" else "step"),
        num_trials=trials,
        confidence=confidence,
        seed=seed,
    )
    report = audit_plan(
        plan,
        victims=_read_victims(victim),
        view=None if view == "worst" else read_view(view),
        settings=settings,
        track=lambda pairs: progress(pairs, "attacking"),
    )
    # An audit that finds nothing might be too weak. Beyond the threat it should find something.
    weakest = find_smallest_break(plan)
    beyond = _audit_break(plan, weakest, settings)
    if json:
        print_json(_facts(plan, report, beyond))
    else:
        _print(plan, report, beyond)
    if plot is not None:
        _draw(plan, report, settings, plot)
    # After the table, so that the last lines say what failed.
    for problem in _list_failures(report):
        print_error(f"{path}: {problem}")
    if report.violated:
        raise typer.Exit(1)


def _audit_one_run(
    path: Path,
    plan: Plan,
    training: TrainingOptions,
    view: View | None,
    confidence: float,
    seed: int,
    json: bool,
) -> None:
    from corn import learn
    from corn.audit import View, audit_training

    report = audit_training(
        plan,
        learn.Workload(training.task, partition="iid").build(plan.num_agents),
        schedule=learn.make_schedule(_STEP_SIZE),
        num_canaries=training.canaries,
        view=view,
        confidence=confidence,
        seed=seed,
        track=lambda steps: progress(steps, "training"),
    )
    attacker = (view or View()).describe()
    facts = vars(report) | {"violated": report.violated, "view": attacker, "task": training.task}
    if json:
        print_json({"promise": plan.budget.describe(), **facts})
    else:
        print_facts(
            f"audit of one run: {'VIOLATED' if report.violated else 'no violation found'}",
            [
                ("promise", plan.budget.describe()),
                ("attacker", attacker),
                (
                    "canaries",
                    f"{report.num_canaries}, of which {report.num_guesses} were guessed: "
                    f"{report.num_right} right",
                ),
                ("AUC", f"{report.auc:.3f}"),
                (
                    "certified ε",
                    f"≥ {round_bound_down(report.epsilon, 3)} at δ = "
                    f"{write_exactly(report.delta)}, with confidence {confidence:g}; promised "
                    f"{round_up(report.promised_epsilon)}",
                ),
            ],
        )
    if report.violated:
        shown = round_bound_down(report.epsilon, 3)
        print_error(
            f"{path}: one run shows ε ≥ {shown} for one sample, against {attacker}: more than was "
            "promised"
        )
        raise typer.Exit(1)


def _read_victims(text: str) -> list[int] | None:
    if text == "all":
        return None
    try:
        return [int(text)]
    except ValueError as error:
        raise InvalidArgumentError(
            f"--victim must be an agent's number or all, found {text!r}"
        ) from error


def _audit_break(plan: Plan, weakest: Break | None, settings: AuditSettings) -> Finding | None:
    """Attack with the smallest coalition that the plan does not hold against."""
    from corn.audit import audit_plan

    if weakest is None:
        return None
    # By the noise alone, which is the fastest: the plan does not promise anything here.
    settings = replace(settings, through="shares", num_releases=None)
    report = audit_plan(plan, victims=[weakest.victim], view=weakest.view, settings=settings)
    return report.findings[0]


def _list_failures(report: AuditReport) -> list[str]:
    violated = [
        f"agent {one.victim} is exposed to {one.view.describe()}: {'; '.join(one.excess)}"
        for one in report.findings
        if one.excess
    ]
    return [*report.problems, *violated]


def _facts(plan: Plan, report: AuditReport, beyond: Finding | None) -> dict[str, object]:
    return {
        "promise": plan.budget.describe(),
        "adversary": plan.threat.describe(),
        "mixing": plan.network.mixing,
        "unit": plan.budget.unit,
        "through": report.settings.through,
        "num_trials": report.settings.num_trials,
        "num_releases": report.num_releases,
        "confidence": report.settings.confidence,
        "seed": report.settings.seed,
        "violated": report.violated,
        "problems": report.problems,
        # The tests of messages under masks; null without masks.
        "messages": None if report.messages is None else asdict(report.messages),
        "findings": [_row(one) for one in sorted(report.findings, key=lambda one: one.victim)],
        "smallest_break": None if beyond is None else _row(beyond),
    }


def _row(one: Finding) -> dict[str, object]:
    return {
        "victim": one.victim,
        "view": one.view.describe(),
        "coalition": one.view.coalition,
        "is_promised": one.is_promised,
        "promised_mu": one.promise.effective_mu,
        "promised_epsilon": one.promise.epsilon,
        "delta": one.promise.delta,
        "exact_mu": one.exact_mu,
        "mu": one.mu.estimate,
        "mu_low": one.mu.low,
        "mu_high": one.mu.high,
        "certified_epsilon": one.certified_epsilon,
        "gaussian_epsilon": one.gaussian_epsilon,
        "auc": one.auc,
        "true_positives_at_1_percent": one.power,
        "verdict": one.verdict,
        "excess": one.excess,
    }


def _print(plan: Plan, report: AuditReport, beyond: Finding | None) -> None:
    settings = report.settings
    print_facts(
        f"audit of {plan.network.source}, {plan.num_agents} agents: "
        f"{'VIOLATED' if report.violated else 'no violation found'}",
        [
            ("promise", plan.budget.describe()),
            ("against", plan.threat.describe()),
            ("attacked", _describe_target(report)),
            *_describe_messages(report),
            (
                "trials",
                f"{settings.num_trials:,} with the canary and {settings.num_trials:,} without it, "
                f"{report.num_releases} releases each, seed {settings.seed}",
            ),
            (
                "confidence",
                f"{settings.confidence:g} for all bounds on ε together, at the promised δ; 0.95 "
                "for the interval of each μ",
            ),
            ("smallest break", _describe_break(beyond)),
        ],
    )
    print_table(
        f"What attackers learn about {plan.budget.promises[0].query.protects}",
        [
            "victim",
            "attacker",
            "promised ε",
            "certified ε",
            "Gaussian ε",
            "promised μ",
            "measured μ",
            "AUC",
            "TPR 1 %",
            "verdict",
        ],
        [
            [
                str(one.victim),
                one.view.describe(),
                round_up(one.promise.epsilon),
                f"≥ {round_bound_down(one.certified_epsilon, 3)}",
                ""
                if one.gaussian_epsilon is None
                else f"≥ {round_bound_down(one.gaussian_epsilon, 4)}",
                round_up(one.promise.effective_mu, 4),
                f"{one.mu.estimate:.4g} ± {(one.mu.high - one.mu.low) / 2:.2g}",
                f"{one.auc:.3f}",
                f"{one.power:.3f}",
                one.verdict,
            ]
            for one in sorted(report.findings, key=lambda one: one.victim)
        ],
    )
    if any(not one.is_promised for one in report.findings):
        print_note("the plan promises nothing against so many insiders")


def _describe_target(report: AuditReport) -> str:
    if report.settings.through == "processes":
        return "messages of real processes in two runs; a few releases stand for the whole run"
    if report.settings.through == "shares":
        what = "noise" if report.messages is None else "noise, masks and messages"
        return f"keys, nonces and {what} of all agents; a few releases stand for the whole run"
    return "sampling, clipping, noise, rounding and messages, over the releases of a trial"


def _describe_messages(report: AuditReport) -> list[tuple[str, str]]:
    found = report.messages
    if found is None:
        return []
    told = "faults were found, see below" if found.problems else "no deviation from that was found"
    return [
        (
            "messages",
            f"integers of {found.bits} bits under masks, of which attackers read complete sums. "
            "Single messages, incomplete sums and differences between steps must be uniform: "
            f"{told}, in {found.num_tests:,} tests of {found.num_words:,} words each",
        )
    ]


def _describe_break(beyond: Finding | None) -> str:
    if beyond is None:
        return "none: no coalition exceeds the promise"
    return (
        f"{beyond.view.describe()} against agent {beyond.victim}: measured μ "
        f"{beyond.mu.estimate:.4g}, promised {round_up(beyond.promise.effective_mu, 4)}"
    )


def _draw(plan: Plan, report: AuditReport, settings: AuditSettings, path: Path) -> None:
    from corn.audit.auditing import map_exposure
    from corn.report.audits import plot_audit
    from corn.report.style import save_figure

    exposure = map_exposure(plan, settings)
    title = f"{plan.budget.describe()}; planned against {plan.threat.describe()}"
    save_figure(plot_audit(report, exposure, title=title), path)
    print_written(path)
