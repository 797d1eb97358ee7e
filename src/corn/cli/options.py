"""Options that several commands share, so that they look and mean the same everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import numpy as np
import typer

from corn.covariance import Horizon, Mechanism
from corn.covariance.threat import PrivateNoise
from corn.plan import Plan
from corn.privacy import Accounting, Adjacency, Unit
from corn.topology import load_network
from corn.topology.mixing import WEIGHTS

_GRAPH_HELP = (
    "A spec (er:n=20,p=0.2,seed=1, ring:20, grid:4x5, karate, …) or a file: edge list, GraphML, "
    "node-link JSON, CSV adjacency, or mixing matrix as .csv or .npy."
)
_BUDGET = "Privacy budget"
_NETWORK = "Network"
_THREAT = "Insiders"

GraphArgument: TypeAlias = Annotated[str, typer.Argument(metavar="GRAPH", help=_GRAPH_HELP)]
GraphOption: TypeAlias = Annotated[str, typer.Option(help=_GRAPH_HELP, rich_help_panel=_NETWORK)]
OptionalGraphOption: TypeAlias = Annotated[
    str | None, typer.Option(help=_GRAPH_HELP, rich_help_panel=_NETWORK)
]
PlanOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help="A plan, made by corn plan: network, budget and noise are its own.",
        rich_help_panel=_NETWORK,
    ),
]
WeightsOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help=f"Rule for the mixing weights: {', '.join(WEIGHTS)}.", rich_help_panel=_NETWORK
    ),
]
EpsilonOption: TypeAlias = Annotated[
    float, typer.Option(help="ε for the whole run.", rich_help_panel=_BUDGET)
]
DeltaOption: TypeAlias = Annotated[
    float, typer.Option(help="δ for the whole run.", rich_help_panel=_BUDGET)
]
StepsOption: TypeAlias = Annotated[
    int, typer.Option(help="Training steps T, each with new noise.", rich_help_panel=_BUDGET)
]
ClipOption: TypeAlias = Annotated[
    float, typer.Option(help="Clipping norm C.", rich_help_panel=_BUDGET)
]
UnitOption: TypeAlias = Annotated[
    Unit,
    typer.Option(
        help="Whose data is protected: an agent's whole data set (its mini-batch gradient is "
        "clipped once), or one sample (each sample's gradient is clipped).",
        rich_help_panel=_BUDGET,
    ),
]
AccountingOption: TypeAlias = Annotated[
    Accounting,
    typer.Option(
        help="How privacy is counted: gdp is exact, rdp is the paper's Theorem 2, paper its "
        "eq. (13b).",
        rich_help_panel=_BUDGET,
    ),
]
AdjacencyOption: TypeAlias = Annotated[
    Adjacency, typer.Option(help="What neighbouring data sets are.", rich_help_panel=_BUDGET)
]
BatchSizeOption: TypeAlias = Annotated[
    int | None,
    typer.Option(help="Samples a batch (sample unit only).", rich_help_panel=_BUDGET),
]
SamplingRateOption: TypeAlias = Annotated[
    float | None,
    typer.Option(
        help="Poisson sampling: the chance of a sample to be in a batch (sample unit only).",
        rich_help_panel=_BUDGET,
    ),
]
PlotOption: TypeAlias = Annotated[
    Path | None, typer.Option(help="Draw to this .png, .svg or .pdf.")
]
JsonOption: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]
MechanismOption: TypeAlias = Annotated[
    Mechanism, typer.Option(help="How noise is correlated across agents.")
]
HorizonOption: TypeAlias = Annotated[
    float | None,
    typer.Option(
        min=1,
        help="Design for noise that accumulates over this many steps; 1 is the paper's objective. "
        "(Default: a fifth of the steps.)",
    ),
]
GossipRoundsOption: TypeAlias = Annotated[
    int, typer.Option(min=1, help="Mixing rounds a step.", rich_help_panel=_NETWORK)
]
CooldownOption: TypeAlias = Annotated[
    int, typer.Option(min=0, help="Mixing rounds after the last step.", rich_help_panel=_NETWORK)
]
ColludersOption: TypeAlias = Annotated[
    int,
    typer.Option(min=0, help="Curious insiders who pool what they know.", rich_help_panel=_THREAT),
]
SeedsOption: TypeAlias = Annotated[
    str,
    typer.Option(
        help="Who shares a seed: global, edges, pairs, balls:R, groups:M, communities:SIZE or "
        "leave-one-out.",
        rich_help_panel=_THREAT,
    ),
]
PrivateNoiseOption: TypeAlias = Annotated[
    PrivateNoise,
    typer.Option(
        help="Noise known to one agent alone: a variance for each, or one for all (the paper).",
        rich_help_panel=_THREAT,
    ),
]


def refuse_contradictions(
    context: typer.Context, fixed: Mapping[str, object], *, what: str
) -> None:
    """Refuse, with exit code 2, options given on the command line that differ from ``fixed``."""
    for name, value in fixed.items():
        source = context.get_parameter_source(name)
        found = context.params[name]
        if source is not None and source.name == "COMMANDLINE" and found != value:
            flag = f"--{name.replace('_', '-')}"
            raise typer.BadParameter(
                f"{what} has {'none' if value is None else value}, found {found}: leave it out",
                param_hint=flag,
            )


def fixed_by_plan(plan: Plan, given: Mapping[str, Any]) -> dict[str, object]:
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
    if given["secure_noise"]:
        fixed["dtype"] = plan.noise_type
    return fixed


def choose_objective(
    horizon: float | None, num_steps: int, *, gossip_rounds: int = 1, cooldown_rounds: int = 0
) -> Horizon:
    """The horizon asked for, or a fifth of the run: the best choice is flat around it."""
    length = max(1.0, num_steps / 5) if horizon is None else horizon
    return Horizon(length, gossip_rounds=gossip_rounds, cooldown_rounds=cooldown_rounds)
