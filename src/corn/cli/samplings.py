"""Tables of ``corn account``: the promise of each agent, and the cost of each sampling."""

from __future__ import annotations

import math
from collections.abc import Sequence

from corn.cli.output import print_note, print_table
from corn.privacy import AgentPromise, ClippedQuery, PrivacyBudget, SamplingCost
from corn.privacy.budget import describe_range
from corn.privacy.rounding import round_bound_down, round_up, round_up_range, write_exactly


def print_promises(budget: PrivacyBudget) -> None:
    """Print one row for each distinct promise, with the agents that have it."""
    caps = budget.precision_caps(len(budget.promises))
    agents: dict[tuple[AgentPromise, float], list[int]] = {}
    for agent, key in enumerate(zip(budget.promises, caps.tolist(), strict=True)):
        agents.setdefault(key, []).append(agent)
    print_table(
        "Each promise",
        ["agents", "ε", "δ", "sampling", "precision cap b", "LDP noise std"],
        [
            [
                _name_agents(own),
                write_exactly(promise.epsilon),
                write_exactly(promise.delta),
                _describe_sampling(promise.query),
                round_bound_down(cap),
                round_up(1 / math.sqrt(cap)),
            ]
            for (promise, cap), own in agents.items()
        ],
    )


def _name_agents(agents: Sequence[int]) -> str:
    """Return numbers of agents, with runs of three and more as ranges.

    >>> _name_agents([0, 1, 2, 3, 7, 9, 10])
    '0–3, 7, 9, 10'
    """
    parts: list[list[int]] = []
    for agent in agents:
        if parts and agent == parts[-1][-1] + 1:
            parts[-1].append(agent)
        else:
            parts.append([agent])
    names = [f"{p[0]}–{p[-1]}" if len(p) > 2 else ", ".join(map(str, p)) for p in parts]
    return ", ".join(names)


def _describe_sampling(query: ClippedQuery) -> str:
    if query.sampling == "poisson":
        return f"poisson, rate {query.sampling_rate:.4g}"
    if query.sampling == "passes":
        return f"passes of {query.steps_per_pass} steps"
    return "every-step"


def print_samplings(budget: PrivacyBudget, costs: Sequence[SamplingCost]) -> None:
    """Print what each sampling needs for the same promise, and what it would prove."""
    best = costs[0].sampling
    print_table(
        "Noise of each sampling for the same promise, by exact accounting",
        [
            "sampling",
            "steps that count",
            "μ",
            "LDP noise std",
            "variance",
            f"ε with the noise of {best}",
        ],
        [
            [
                cost.sampling + (" (chosen)" if cost.sampling == budget.sampling else ""),
                _count_steps(cost.budget),
                "none" if cost.mu is None else round_up_range(cost.mu, 5),
                round_up_range(cost.noise_std, 5),
                f"{cost.variance_ratio:.4g} ×",
                round_up_range(cost.epsilon_at_least),
            ]
            for cost in costs
        ],
    )
    needs = {
        "poisson": "each agent flips a secret coin for every sample, so batches vary in size",
        "passes": "batches have a fixed size, and a new secret order each pass",
        "every-step": "any batches, even public ones",
    }
    if len(costs) > 1:
        print_note("; ".join(f"{cost.sampling}: {needs[cost.sampling]}" for cost in costs))
    if len(costs) == 1 and budget.samples_per_agent is None:
        print_note("--samples-per-agent adds what poisson and passes would need")


def _count_steps(budget: PrivacyBudget) -> str:
    queries = [promise.query for promise in budget.promises]
    steps = budget.num_steps
    if any(query.is_subsampled for query in queries):
        rates = describe_range([round(query.sampling_rate or 1.0, 6) for query in queries])
        return f"{steps} with probability {rates}"
    return describe_range([query.participations(steps) for query in queries])


def sampling_facts(cost: SamplingCost) -> dict[str, object]:
    """Return the cost of one sampling for JSON."""
    queries = [promise.query for promise in cost.budget.promises]
    return {
        "promise": cost.budget.describe(),
        "sampling_rate": [query.sampling_rate for query in queries],
        "participations": [query.participations(cost.budget.num_steps) for query in queries],
        "mu": cost.mu,
        "independent_noise_std": cost.noise_std,
        "variance_ratio": cost.variance_ratio,
        "epsilon_with_least_noise": cost.epsilon_at_least,
    }
