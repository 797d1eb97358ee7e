"""An audit of a plan: the strongest attackers against the code that runs, next to the promise.

:func:`audit_plan` pairs each victim with an attacker (``views``). All agents run the library's own
code, with a canary or without it (``run``). Attackers score what they read (``attacks``), and what
the scores prove is compared with :func:`promise_to`. Faults that need no victim are found by
``checks``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, TypeAlias

import numpy as np

from corn.audit.attacks import (
    Interval,
    attack_by_learning,
    attack_by_likelihood,
    bound_epsilon_by_errors,
    estimate_mu,
    estimate_mu_by_auc,
    ideal_mu,
    limit_errors,
)
from corn.audit.checks import MessageCheck, check_keys, check_messages, check_noise, check_sampler
from corn.audit.run import AuditedRun, StepRun, query_of, rate_of
from corn.audit.views import StreamWeights, View, list_worst_views, sum_parts
from corn.checks import require, require_count
from corn.plan import Plan
from corn.privacy import account_precision, gaussian
from corn.privacy.rounding import round_bound_down, round_up

Verdict: TypeAlias = Literal["tight", "loose", "violated"]
Through: TypeAlias = Literal["shares", "step"]

TIGHT = 0.9
"""An attack that reaches this share of the promised μ shows that the promise is tight."""

# A promise is a whole curve δ(ε). It is checked at these δ, and at the plan's.
_DELTAS = (1e-4, 1e-3, 1e-2, 0.03, 0.1, 0.2)


@dataclass(frozen=True)
class Promise:
    """The privacy of one agent's unit over the audited releases.

    No μ describes Poisson sampling: there it is the μ with the same AUC as the best test.
    """

    epsilon: float  # at ``delta``
    delta: float
    mu: float
    points: tuple[tuple[float, float], ...]  # (ε, δ) that hold together


@dataclass(frozen=True, eq=False)
class Finding:
    """The result of the best attacker of one view against one victim."""

    victim: int  # the agent with the canary
    view: View
    is_promised: bool  # whether the plan promises privacy against this view
    promise: Promise  # to the victim, over the releases audited
    # μ of this view by the plan's noise: what the best attacker achieves if the program is right.
    # Under Poisson sampling it is the μ with the same AUC.
    exact_mu: float
    mu: Interval  # the estimate, at 95 %; under Poisson sampling by the AUC
    # A lower bound on ε at the promised δ without assumptions, for all findings together.
    certified_epsilon: float
    # The same by the lower limit of μ, for normal scores; None under Poisson sampling.
    gaussian_epsilon: float | None
    excess: tuple[str, ...]  # reasons why the promise is violated; empty if it is kept

    @property
    def ratio(self) -> float:
        """The estimated μ over that of the promise."""
        return self.mu.estimate / self.promise.mu

    @property
    def verdict(self) -> Verdict:
        """Whether the promise is violated, and if not, whether an attack comes close to it."""
        if self.excess:
            return "violated"
        return "tight" if self.ratio >= TIGHT else "loose"


@dataclass(frozen=True, eq=False)
class AuditReport:
    """All findings of an audit.

    Attributes:
        num_releases: the releases of each trial.
        findings: one for each victim.
        problems: faults that need no victim.
        messages: the tests of messages under masks; None without masks.
    """

    num_releases: int
    findings: tuple[Finding, ...]
    problems: tuple[str, ...]
    messages: MessageCheck | None = None

    @property
    def violated(self) -> bool:
        """Whether any promise is violated, or the program is not what the plan says."""
        return bool(self.problems) or any(one.verdict == "violated" for one in self.findings)


def audit_plan(
    plan: Plan,
    *,
    victims: Iterable[int] | None = None,
    view: View | None = None,
    through: Through = "shares",
    num_trials: int = 10_000,
    num_releases: int | None = None,
    confidence: float = 0.99,
    seed: int = 0,
    run: AuditedRun | None = None,
    track: Callable[[Sequence[tuple[int, View]]], Iterable[tuple[int, View]]] = iter,
) -> AuditReport:
    """Attack the code that runs a plan, and compare the result with what the plan promises.

    Args:
        plan: what was promised, and to whom.
        victims: the agents with a canary; by default all that are not insiders.
        view: the attacker; by default, for each victim, the worst that the plan's threat allows.
        through: ``shares`` (the releases of agents without data) or ``step`` (also sampling and
            clipping).
        num_trials: trials under each of the two data sets.
        num_releases: the releases of each trial; None takes a number that suits the plan.
        confidence: of all verdicts together.
        seed: of keys, nonces, coins and canaries.
        run: messages that were made otherwise, such as those of real processes.
        track: shows the progress of a sequence.
    """
    require_count("trials", num_trials, least=100)
    size = suggest_releases(plan, through) if num_releases is None else num_releases
    require_count("releases", size, least=2)
    require(0 < confidence < 1, "confidence", "between 0 and 1", confidence)
    pairs = _pair_up(plan, victims, view)
    if run is None:
        make_run = StepRun if through == "step" else AuditedRun
        run = make_run(plan, size, num_trials, seed=seed)
    is_masked = plan.decomposition.is_masked
    # Alarms share one level: tests of the noise, of the sampler, of sums and of messages under
    # masks, and four of each finding: two attackers, each by rates and by μ.
    alpha = (1 - confidence) / ((4 if is_masked else 2) + 4 * len(pairs))
    findings: list[Finding] = []
    # Pairs are sorted by view: what all views read would not fit into memory.
    for attacker, of_view in groupby(track(pairs), key=lambda pair: pair[1]):
        chosen = (number for number, _ in of_view)
        findings += _attack(run, attacker, chosen, seed=seed, alpha=alpha)
    R = StreamWeights.of(plan.decomposition).hidden(())
    # Rounding to the grid adds an independent uniform error.
    R = R + np.eye(len(R)) * plan.grid**2 / 12
    # After the findings: ``add_canary`` notes faults too, such as messages that differ.
    problems = check_noise(run.released, R, alpha=alpha) + check_keys(run) + run.problems
    first, attacker = pairs[0]
    messages = check_messages(run, attacker, seed=seed, alpha=alpha) if is_masked else None
    problems += messages.problems if messages else ()
    # One victim suffices for the sampler, because all agents run the same code.
    if through == "step":
        problems += check_sampler(query_of(plan, first), seed=seed, alpha=alpha)
    return AuditReport(len(run.releases), tuple(findings), tuple(dict.fromkeys(problems)), messages)


def _pair_up(
    plan: Plan, victims: Iterable[int] | None, view: View | None
) -> list[tuple[int, View]]:
    n = plan.num_agents
    honest = list(range(n)) if view is None else view.honest(n)
    chosen = honest if victims is None else list(victims)
    require(len(chosen) > 0, "victims", "at least one agent", "none")
    for victim in chosen:
        require(victim in honest, "victim", f"one of {n} agents, outside the view", victim)
    views = list_worst_views(plan) if view is None else [view] * n
    pairs = ((victim, views[victim]) for victim in chosen)
    # Sorted by view, so that what a view observes is computed once.
    return sorted(pairs, key=lambda one: (one[1].coalition, one[0]))


def suggest_releases(plan: Plan, through: Through) -> int:
    """Return how many releases of a trial show what an audit is to find."""
    query = query_of(plan, 0)
    if through != "step" or query.unit == "agent" or query.sampling == "every-step":
        # Two attempts with two releases each, of which one step is repeated (``list_releases``).
        return 4
    # A whole number of passes; and enough steps that Poisson's canary takes part in some. A part of
    # a long pass, in which the canary may not be, makes the audit weaker, not wrong.
    steps = 2 * (query.steps_per_pass or 0) or math.ceil(3 / rate_of(query))
    # At most 60: time and memory of an audit grow with every release.
    return min(max(steps, 4), 60, max(plan.budget.num_steps, 2))


def promise_to(plan: Plan, victim: int, num_releases: int | None = None) -> Promise:
    """Return the promise over some releases; by default over the whole run.

    For a sample under Poisson sampling that is the promise over one release that it takes part in:
    that is what noise alone can be audited for.
    """
    epsilon, delta, query = plan.budget.of_agent(victim).promise
    # The cap, not the design's own precision: that is what was promised.
    cap, deltas = float(plan.precision_caps[victim]), (delta, *_DELTAS)
    shift = query.sensitivity * math.sqrt(cap)
    if query.is_subsampled and num_releases is not None:
        loss = account_precision([cap], query, num_steps=num_releases)
        is_replace = query.adjacency == "replace"
        mu = ideal_mu(num_releases, shift, rate_of(query), is_replace=is_replace)
        points = tuple((float(loss.epsilon(each)[0]), each) for each in deltas)
        return Promise(points[0][0], delta, mu, points)
    mu = shift if query.is_subsampled else gaussian.mu_from(epsilon, delta)
    if num_releases is not None:
        # μ² adds up over the releases that use the unit.
        every = query.participations(plan.budget.num_steps)
        mu *= math.sqrt(query.participations(num_releases) / every)
    points = tuple((gaussian.epsilon_from(mu, each), each) for each in deltas)
    is_whole = num_releases is None and not query.is_subsampled
    return Promise(epsilon if is_whole else points[0][0], delta, mu, points)


def _attack(
    run: AuditedRun, view: View, victims: Iterable[int], *, seed: int, alpha: float
) -> Iterator[Finding]:
    """Attack each victim in every way that the view allows, and compare with the promise."""
    plan, size, is_step = run.plan, len(run.releases), isinstance(run, StepRun)
    streams = StreamWeights.of(plan.decomposition)
    # Without masks each honest agent is a part. All arrays have shape (releases, parts, trials).
    parts = run.find_parts(view)
    known = sum_parts(run.project(run.draw_known(view)), parts, axis=1)
    released = run.project(run.read_sums(view))
    # What is left after the coalition has subtracted the noise of its own keys: those that it
    # really holds, which may be more than the plan gives it.
    hidden = released - known
    covariance = streams.hidden(run.held_by(view.coalition), parts)
    # By the plan's keys: what the best attacker would achieve against a correct program.
    precisions = streams.precision(view)
    # Where no seeds are shared, insiders know no more than an eavesdropper.
    is_few = len(view.coalition) <= plan.threat.max_colluders
    for victim in victims:
        signal, query = run.add_canary(victim), query_of(plan, victim)
        is_normal = signal.rate is None
        # A few shares stand for the whole run; through the step, only what was released counts.
        promise = promise_to(plan, victim, size if is_step else None)
        position = next(k for k, part in enumerate(parts) if victim in part)
        best, thresholds = attack_by_likelihood(
            hidden, signal, covariance, position, promised_mu=promise.mu, seed=seed
        )
        attacks = {"likelihood ratio": best}
        shift = query.sensitivity * math.sqrt(float(precisions[victim]))
        if signal.rate is None:
            attacks["learned discriminant"] = attack_by_learning(released, known, signal, position)
            mu = estimate_mu(best)
            # μ = Δ √(K [Σ⁻¹]_jj), docs/theory.md.
            steps = size if is_step else plan.budget.num_steps
            exact = shift * math.sqrt(1 if query.is_subsampled else query.participations(steps))
        else:
            # No linear test is the best of a mixture.
            mu = estimate_mu_by_auc(best)
            exact = ideal_mu(size, shift, signal.rate, is_replace=signal.is_replace)
        excess: list[str] = []
        certified, by_mu = 0.0, 0.0
        for name, scores in attacks.items():
            limits = limit_errors(scores, thresholds, alpha=alpha)
            certified = max(certified, bound_epsilon_by_errors(limits, promise.delta))
            if any(bound_epsilon_by_errors(limits, each) > eps for eps, each in promise.points):
                excess.append(f"{name}: error rates below the promised trade-off")
            # Tighter than the rates, but valid only if scores are normal. Both are alarms. One
            # side of a two-sided interval at 1 − 2α has the level 1 − α.
            low = estimate_mu(scores, confidence=1 - 2 * alpha).low if is_normal else 0.0
            by_mu = max(by_mu, low)
            if low > promise.mu:
                bound, promised = round_bound_down(low), round_up(promise.mu)
                excess.append(f"{name}: μ ≥ {bound}, promised {promised}")
        yield Finding(
            victim=victim,
            view=view,
            is_promised=is_few or not plan.decomposition.seed_groups,
            promise=promise,
            exact_mu=exact,
            mu=mu,
            certified_epsilon=certified,
            gaussian_epsilon=gaussian.epsilon_from(by_mu, promise.delta) if is_normal else None,
            excess=tuple(excess),
        )
