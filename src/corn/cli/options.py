"""Options that several commands share, so that they look and mean the same everywhere.

Those that go together are fields of a record, which makes what the library takes of them. Commands
take records as they take single options: see ``corn.cli.records``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from corn.covariance import (
    DEFAULT_THREAT,
    Corn,
    Decor,
    Horizon,
    Mechanism,
    MechanismName,
    ThreatModel,
    ZeroSum,
    default_objective,
)
from corn.covariance.threat import PrivateNoise
from corn.errors import InvalidArgumentError
from corn.privacy import Accounting, Adjacency, PrivacyBudget, Unit
from corn.topology import Network, load_network
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
BatchSizeOption: TypeAlias = Annotated[
    int | None,
    typer.Option(help="Samples a batch (sample unit only).", rich_help_panel=_BUDGET),
]


def _check_figure_name(path: Path | None) -> Path | None:
    """Refuse it now rather than after hours."""
    if path is not None:
        from corn.report.style import check_figure_name

        check_figure_name(path)
    return path


PlotOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(help="Draw to this .png, .svg or .pdf.", callback=_check_figure_name),
]
JsonOption: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]
MechanismOption: TypeAlias = Annotated[
    MechanismName, typer.Option(help="How noise is correlated across agents.")
]
HorizonOption: TypeAlias = Annotated[
    float | None,
    typer.Option(
        min=1,
        help="Design for noise that accumulates over this many steps; 1 is the paper's objective. "
        "(Default: a fifth of the steps.)",
    ),
]
_ColludersOption: TypeAlias = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Curious insiders who pool what they know; 0 is an eavesdropper alone. (Default: "
        f"{DEFAULT_THREAT.max_colluders}.)",
        rich_help_panel=_THREAT,
    ),
]
_SeedsOption: TypeAlias = Annotated[
    str,
    typer.Option(
        help="Sets of agents that share a seed: global, edges, pairs, balls:R, groups:M, "
        "communities:SIZE or leave-one-out; auto is pairs, or global without insiders.",
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


@dataclass(frozen=True)
class OpenBudgetOptions:
    """How a run is accounted for; ε may be what is asked."""

    epsilon: Annotated[
        float | None,
        typer.Option(help="ε for the whole run. With --covariance: report δ at this ε too."),
    ] = None
    delta: Annotated[float, typer.Option(help="δ for the whole run.", rich_help_panel=_BUDGET)] = (
        1e-5
    )
    steps: Annotated[
        int, typer.Option(help="Training steps T, each with new noise.", rich_help_panel=_BUDGET)
    ] = 5000
    clip: Annotated[float, typer.Option(help="Clipping norm C.", rich_help_panel=_BUDGET)] = 0.1
    unit: Annotated[
        Unit,
        typer.Option(
            help="Whose data is protected: an agent's whole data set (its mini-batch gradient is "
            "clipped once), or one sample (each sample's gradient is clipped).",
            rich_help_panel=_BUDGET,
        ),
    ] = "agent"
    accounting: Annotated[
        Accounting,
        typer.Option(
            help="How privacy is counted: gdp is exact, rdp is the paper's Theorem 2, paper its "
            "eq. (13b).",
            rich_help_panel=_BUDGET,
        ),
    ] = "gdp"
    adjacency: Annotated[
        Adjacency,
        typer.Option(
            help="What neighbouring data sets are: the unit's data becomes any other, or its "
            "gradient is there or zero (with --sampling-rate that is adding or removing a sample).",
            rich_help_panel=_BUDGET,
        ),
    ] = "replace"
    sampling_rate: Annotated[
        float | None,
        typer.Option(
            help="Poisson sampling: the chance of a sample to be in a batch (sample unit only).",
            rich_help_panel=_BUDGET,
        ),
    ] = None

    def make_with(self, epsilon: float, batch_size: int | None) -> PrivacyBudget:
        """The budget of this ε; a batch size belongs to the sample unit only."""
        return PrivacyBudget(
            epsilon,
            self.delta,
            self.steps,
            self.clip,
            self.unit,
            self.accounting,
            self.adjacency,
            batch_size,
            self.sampling_rate,
        )


@dataclass(frozen=True)
class BudgetOptions(OpenBudgetOptions):
    """What is promised."""

    epsilon: Annotated[
        float, typer.Option(help="ε for the whole run.", rich_help_panel=_BUDGET)
    ] = 10.0

    def make(self, batch_size: int | None) -> PrivacyBudget:
        """The budget; a batch size belongs to the sample unit only."""
        return self.make_with(self.epsilon, batch_size)

    def make_for_batches(self, size: int) -> PrivacyBudget:
        """The budget of training in batches, whose size counts only where a sample is protected."""
        return self.make(size if self.unit == "sample" else None)


@dataclass(frozen=True)
class MixingOptions:
    """How agents mix, and over how many steps noise is to be judged."""

    horizon: HorizonOption = None
    weights: WeightsOption = None
    gossip_rounds: Annotated[
        int, typer.Option(min=1, help="Mixing rounds a step.", rich_help_panel=_NETWORK)
    ] = 1
    cooldown: Annotated[
        int,
        typer.Option(min=0, help="Mixing rounds after the last step.", rich_help_panel=_NETWORK),
    ] = 0

    def load_network(self, graph: str) -> Network:
        """The graph that a spec or a file names, with weights."""
        return load_network(graph, weights=self.weights)

    def choose_objective(self, num_steps: int) -> Horizon:
        """The horizon asked for, or the default for a run of this many steps."""
        if self.horizon is None:
            return default_objective(num_steps, self.gossip_rounds, self.cooldown)
        return Horizon(self.horizon, self.gossip_rounds, self.cooldown)


@dataclass(frozen=True)
class ThreatOptions:
    """The adversary that noise is designed against: by default one insider, with pair seeds."""

    colluders: _ColludersOption = None
    seeds: _SeedsOption = "auto"
    private_noise: PrivateNoiseOption = "per-agent"

    def make(self) -> ThreatModel:
        """Return the threat model."""
        colluders = DEFAULT_THREAT.max_colluders if self.colluders is None else self.colluders
        return ThreatModel(colluders, self.seeds, self.private_noise)

    def make_if_given(self) -> ThreatModel | None:
        """Return the threat model asked for, or None, which leaves it to the mechanism."""
        return None if self == ThreatOptions() else self.make()


def choose_mechanism(name: MechanismName, options: Corn) -> Mechanism | MechanismName:
    """Return the mechanism of this name with the options that it shares with ``Corn``.

    Options of CorN alone are refused with another mechanism rather than ignored.
    """
    if name == "corn":
        return options
    if options != Corn(max_noise_std=options.max_noise_std):
        raise InvalidArgumentError(
            "--solver, --tolerance, --ridge, --drop-share and --jobs apply to mechanism 'corn' "
            f"only, found {name!r}: leave them out"
        )
    if name == "decor":
        return Decor(max_noise_std=options.max_noise_std)
    if name == "zero-sum":
        return ZeroSum(max_noise_std=options.max_noise_std)
    if options.max_noise_std is not None:
        raise InvalidArgumentError(
            f"--max-noise-std limits correlated noise, found mechanism {name!r}: leave it out"
        )
    return name
