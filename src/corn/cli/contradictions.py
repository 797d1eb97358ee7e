"""Options that say something else than the plan that they are given with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import typer

from corn.plan import Plan
from corn.topology import load_network


def let_plan_decide(context: typer.Context, plan: Plan, **also_fixed: object) -> None:
    """Give options the values that the plan has, as the command's configuration.

    Those on the command line that differ from it are refused, with exit code 2. ``also_fixed`` are
    options that only the command which runs leaves to the plan.
    """
    fixed = {**_fixed_by_plan(plan, context.params), **also_fixed}
    for name, value in fixed.items():
        source = context.get_parameter_source(name)
        found = context.params[name]
        if source is not None and source.name == "COMMANDLINE" and found != value:
            flag = f"--{name.replace('_', '-')}"
            raise typer.BadParameter(
                f"the plan has {'none' if value is None else value}, found {found}: leave it out",
                param_hint=flag,
            )
    context.params.update(fixed, graph=plan.network.source, weights=None)


def _fixed_by_plan(plan: Plan, given: Mapping[str, Any]) -> dict[str, object]:
    """What a plan says of the options that it decides.

    A graph that is the plan's under another name is no contradiction. The batch is the plan's where
    its size counts for privacy, and the precision where noise is drawn bit for bit as deployed.
    """
    budget, threat, objective = plan.budget, plan.threat, plan.objective
    graph, weights = given["graph"], given["weights"]
    named = plan.network if graph is None else load_network(graph, weights=weights)
    is_same = np.array_equal(named.mixing_matrix, plan.network.mixing_matrix)
    fixed = {
        "graph": graph if is_same else plan.network.source,
        "weights": weights if is_same and graph is not None else "weights of its own",
        "epsilon": budget.epsilon,
        "delta": budget.delta,
        "steps": budget.num_steps,
        "clip": budget.clip,
        "unit": budget.unit,
        "accounting": budget.accounting,
        "adjacency": budget.adjacency,
        "sampling_rate": budget.sampling_rate,
        "horizon": getattr(objective, "length", None),
        "gossip_rounds": getattr(objective, "gossip_rounds", 1),
        "cooldown": getattr(objective, "cooldown_rounds", 0),
        "colluders": threat.max_colluders,
        "seeds": threat.seeds,
        "private_noise": threat.private_noise,
    }
    if budget.batch_size is not None:
        fixed["batch_size"] = budget.batch_size
    if "dtype" in given and given.get("rehearse"):
        fixed["dtype"] = plan.dtype
    return fixed
