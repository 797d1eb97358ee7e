"""Whether an agent's own samples fit the plan, and which plan would fit them."""

from __future__ import annotations

import shlex
from dataclasses import replace

from corn.learn.sampling import TooFewSamplesError, require_fitting_samples
from corn.plan import Plan
from corn.privacy.rounding import write_exactly


def check_samples(plan: Plan, agent: int, num_samples: int) -> None:
    """Raise unless a plan's sampling can be followed with so many samples of an agent.

    The error is for the agent's owner: the number of samples is not told to others.
    """
    own = plan.budget.of_agent(agent)
    try:
        require_fitting_samples(own, [num_samples], first=agent)
    except TooFewSamplesError as error:
        fitting = suggest_plan(plan, agent, num_samples)
        raise TooFewSamplesError(
            f"refuses to start: {error}; a plan that fits, with its other options as before: "
            f"{fitting}"
        ) from error


def note_large_delta(plan: Plan, agent: int, num_samples: int) -> tuple[str, ...]:
    """Return a note for the agent's owner if a plan's δ is more than one over its samples."""
    delta = plan.budget.of_agent(agent).promise.delta
    # A mechanism that publishes one random sample in full keeps any ε at such a δ.
    if delta * num_samples <= 1:
        return ()
    return (
        f"the plan's δ = {write_exactly(delta)} is more than one over the number of samples here, "
        f"{num_samples}: publishing a whole sample would satisfy it; ask for a plan with a smaller "
        "δ, or set a limit on ε at a δ of your own with --require",
    )


def suggest_plan(plan: Plan, agent: int, num_samples: int) -> str:
    """Return the command that makes the same plan for an agent with so many samples."""
    budget = plan.budget
    samples = budget.samples_per_agent
    if isinstance(samples, tuple):
        samples = tuple(num_samples if k == agent else own for k, own in enumerate(samples))
    else:
        samples = num_samples
    fitting = replace(budget, samples_per_agent=samples)
    options = {
        "graph": plan.network.source,
        "epsilon": _join(fitting.epsilon),
        "delta": _join(fitting.delta),
        "steps": str(fitting.num_steps),
        "clip": write_exactly(fitting.clip),
        "unit": fitting.unit,
        "adjacency": fitting.adjacency,
        "batch-size": str(fitting.batch_size),
        "sampling": str(fitting.sampling),
        "samples-per-agent": _join(samples),
    }
    # Quoted, as the name of a graph's file may contain spaces.
    return "corn plan " + " ".join(
        f"--{name} {shlex.quote(value)}" for name, value in options.items()
    )


def _join(values: float | tuple[float, ...]) -> str:
    return ",".join(
        write_exactly(value) if isinstance(value, float) else str(value)
        for value in (values if isinstance(values, tuple) else (values,))
    )
