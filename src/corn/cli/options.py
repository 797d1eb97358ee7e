"""Options that several commands share, with one name, one default and one help text each.

Options that belong together are fields of a record, whose methods turn them into the library's
records. Commands take such records like single options: see ``corn.cli.records``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias, cast

import typer

from corn.cli.output import print_note
from corn.covariance import (
    DEFAULT_THREAT,
    EAVESDROPPER,
    MECHANISMS,
    ONE_STEP,
    Corn,
    Decor,
    Horizon,
    Mechanism,
    MechanismName,
    ThreatModel,
    ZeroSum,
    default_objective,
    read_mechanism,
)
from corn.covariance.objective import DISAGREEMENT_WEIGHT
from corn.covariance.threat import (
    MOST_FOR_PAIRS,
    PARTNERS_BESIDE_HUBS,
    SPARSE_PARTNERS,
    PrivateNoise,
)
from corn.errors import InvalidArgumentError
from corn.topology import (
    ONE_ROUND,
    Gossip,
    Mixing,
    Network,
    choose_cooldown,
    find_remaining_disagreement,
    load_network,
)
from corn.topology.mixing import WEIGHTS

_GRAPH_HELP = (
    "Graph spec (er:n=20,p=0.2,seed=1, ring:20, grid:4x5, karate, …) or file: edge list, GraphML, "
    "node-link JSON, adjacency matrix as .csv, or mixing matrix as .csv or .npy."
)
_NETWORK = "Network"
_THREAT = "Insiders"
_AUTO = "auto"
# The share of disagreement after the cool-down above which a note is printed.
_MUCH_DISAGREEMENT = 0.05
# int() of a very long text takes long, and raises an error of its own.
_MOST_DIGITS = 9
DEFAULT_GOSSIP = str(ONE_ROUND)
"""The mixing rounds of a step in commands that design or train."""

GraphArgument: TypeAlias = Annotated[str, typer.Argument(metavar="GRAPH", help=_GRAPH_HELP)]
GraphOption: TypeAlias = Annotated[str, typer.Option(help=_GRAPH_HELP, rich_help_panel=_NETWORK)]
OptionalGraphOption: TypeAlias = Annotated[
    str | None, typer.Option(help=_GRAPH_HELP, rich_help_panel=_NETWORK)
]
PlanOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help="Plan file from corn plan, which sets network, budget and noise.",
        rich_help_panel=_NETWORK,
    ),
]
WeightsOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help=f"Rule for the mixing weights: {', '.join(WEIGHTS)}. Only sinkhorn uses edge weights. "
        "(Default: metropolis; sinkhorn for directed graphs; a given mixing matrix as it is.)",
        rich_help_panel=_NETWORK,
    ),
]


def _check_figure_name(path: Path | None) -> Path | None:
    """Raise for a bad name before the command runs, not after hours."""
    # Imported here, because Matplotlib takes a second that commands without a figure save.
    if path is not None:
        from corn.report.style import check_figure_name

        check_figure_name(path)
    return path


PlotOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(help="Figure file to write: .png, .svg or .pdf.", callback=_check_figure_name),
]
JsonOption: TypeAlias = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def _check_mechanism(name: str) -> str:
    """Raise for a name that is neither known nor that of a mechanism of the user's own."""
    if "=" not in name and name not in MECHANISMS:
        raise typer.BadParameter(
            f"must be one of {', '.join(MECHANISMS)}, or NAME=R.npy of your own, found {name!r}"
        )
    return name


MechanismOption: TypeAlias = Annotated[
    str,
    typer.Option(
        help=f"Mechanism that correlates the noise of agents: {', '.join(MECHANISMS)}; or one of "
        "your own: NAME=R.npy, a covariance, or NAME=FILE.py:FUNCTION, a function from mixing "
        "matrix and precision caps to a covariance. It is scaled to the budget.",
        callback=_check_mechanism,
    ),
]
HorizonOption: TypeAlias = Annotated[
    float | None,
    typer.Option(
        min=1,
        help="Number of steps over which the design lets noise accumulate; 1 is the paper's "
        "objective. (Default: a fifth of the steps.)",
    ),
]


def _normalise_gossip(text: str) -> str:
    """Return the canonical text of a gossip."""
    try:
        return str(Gossip.parse(text))
    except InvalidArgumentError as error:
        raise typer.BadParameter(str(error).removeprefix("gossip ")) from error


def _check_cooldown(text: str) -> str:
    if text != _AUTO and not (text.isdecimal() and len(text) <= _MOST_DIGITS):
        raise typer.BadParameter(f"must be {_AUTO} or a number of steps, found {text!r}")
    # One spelling, as let_plan_decide compares options with a plan's as text.
    return text if text == _AUTO else str(int(text))


GossipOption: TypeAlias = Annotated[
    str,
    typer.Option(
        help="Mixing rounds per step: a number, plain:ROUNDS or chebyshev:ROUNDS (accelerated). "
        "Each costs one message over every link, in each direction, and no privacy.",
        callback=_normalise_gossip,
        rich_help_panel=_NETWORK,
    ),
]
_CooldownOption: TypeAlias = Annotated[
    str,
    typer.Option(
        help="Number of steps after training that only mix, so that agents agree on one model; "
        "auto is one mixing time. Each costs the messages of a step, and no privacy.",
        callback=_check_cooldown,
        rich_help_panel=_NETWORK,
    ),
]
_ColludersOption: TypeAlias = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Number of curious insiders who pool their seeds; 0 is an eavesdropper alone. "
        f"(Default: {DEFAULT_THREAT.max_colluders}.)",
        rich_help_panel=_THREAT,
    ),
]
_SeedsOption: TypeAlias = Annotated[
    str,
    typer.Option(
        help="Sets of agents that share a seed: global, edges, pairs, sparse:K (links and K more "
        "partners of each agent), balls:R, groups:M, communities:SIZE or leave-one-out; auto is "
        f"global without insiders, pairs up to {MOST_FOR_PAIRS} agents, and "
        f"sparse:{SPARSE_PARTNERS} above (sparse:{PARTNERS_BESIDE_HUBS} with hubs).",
        rich_help_panel=_THREAT,
    ),
]
PrivateNoiseOption: TypeAlias = Annotated[
    PrivateNoise,
    typer.Option(
        help="Variance of the noise that an agent draws alone: one per agent, or one for all (as "
        "in the paper).",
        rich_help_panel=_THREAT,
    ),
]


@dataclass(frozen=True)
class MixingOptions:
    """Mixing weights and rounds, the cool-down, and the objective of the noise."""

    horizon: HorizonOption = None
    disagreement_weight: Annotated[
        float | None,
        typer.Option(
            help="Weight of disagreement between agents in the design, in (0, 1]; 1 minimises the "
            "noise energy of all models. A cool-down removes disagreement, but not the noise of "
            "the average model. "
            f"(Default: {DISAGREEMENT_WEIGHT:g}; 1 with --horizon 1.)"
        ),
    ] = None
    mixing: Annotated[
        Mixing | None,
        typer.Option(
            help="Combination of a step's releases: sum adds all of them up over a tree of links, "
            "so that all agents hold one model; gossip, the paper's, mixes models with "
            "neighbours. (Default: sum; gossip for directed links, a mixing matrix, and with "
            "--weights, --gossip, --cooldown, --horizon or --disagreement-weight.)",
            rich_help_panel=_NETWORK,
        ),
    ] = None
    weights: WeightsOption = None
    gossip: GossipOption = DEFAULT_GOSSIP
    cooldown: _CooldownOption = _AUTO
    momentum: Annotated[
        float | None,
        typer.Option(
            help="Momentum β in [0, 1): agents step along a moving average of about their last "
            "1/(1 − β) releases, and the noise is designed for it. It costs no privacy and no "
            "messages. (Default: 1 − 6/STEPS, at least 0 and at most 0.97; 0 with "
            "--mixing sum and with --horizon 1.)"
        ),
    ] = None

    def load_network(self, graph: str) -> Network:
        """Return the network of a graph spec or file."""
        mixing = self.mixing
        # Settings that exact sums do not have ask for gossip, as those of `load_network` do.
        if mixing is None and (self.horizon, self.disagreement_weight, self.cooldown_steps) != (
            None,
            None,
            None,
        ):
            mixing = "gossip"
        return load_network(
            graph, weights=self.weights, gossip=Gossip.parse(self.gossip), mixing=mixing
        )

    def choose_objective(self, network: Network, num_steps: int) -> Horizon:
        """Return the objective asked for, or the default for this many steps."""
        usual = default_objective(num_steps, mixing=network.mixing, momentum=self.momentum)
        length = usual.length if self.horizon is None else self.horizon
        gamma = self.disagreement_weight
        if gamma is None:
            # One step is the paper's objective, which weighs all noise the same.
            gamma = ONE_STEP.disagreement_weight if self.horizon == 1 else usual.disagreement_weight
        # A horizon of one step is the paper's objective, whose agents have no momentum.
        is_paper = self.horizon == 1 and self.momentum is None
        return Horizon(length, gamma, 0.0 if is_paper else usual.momentum)

    @property
    def cooldown_steps(self) -> int | None:
        """The number of steps that only mix; None for one mixing time."""
        return None if self.cooldown == _AUTO else int(self.cooldown)

    def choose_cooldown(self, network: Network, num_steps: int) -> int:
        """Return the number of steps that only mix after a run of this many steps."""
        given = self.cooldown_steps
        return choose_cooldown(network, num_steps) if given is None else given

    def warn_of_disagreement(self, network: Network, cooldown_steps: int) -> None:
        """Print a note if the default cool-down leaves agents with different models."""
        is_exact = network.mixing == "sum" or network.num_agents == 1
        if self.cooldown_steps is not None or is_exact:
            return
        # One step would be enough where all are neighbours, so zero steps have no other reason.
        if not cooldown_steps:
            print_note(
                "the mixing weights are periodic: agents never agree, so there is no cool-down; "
                "--weights lazy lets them agree"
            )
            return
        left = find_remaining_disagreement(network, cooldown_steps)
        if left > _MUCH_DISAGREEMENT:
            print_note(
                f"the cool-down of {cooldown_steps:,} steps, as many as the run has, leaves up to "
                f"{left:.0%} of the disagreement between agents: choose a longer --cooldown, or "
                "more rounds by --gossip"
            )

    def describe(self, network: Network, num_steps: int) -> str:
        """Return rounds, cool-down and messages of a run of this many steps, in one line."""
        return network.describe_mixing(num_steps, self.choose_cooldown(network, num_steps))


@dataclass(frozen=True)
class ThreatOptions:
    """The adversary that noise is designed against: by default one insider, with seeds of pairs."""

    colluders: _ColludersOption = None
    seeds: _SeedsOption = "auto"
    private_noise: PrivateNoiseOption = "per-agent"

    def make(self, num_agents: int | None = None) -> ThreatModel:
        """Return the threat model, by default without insiders for a single agent."""
        # Insiders must be fewer than agents. An explicit wish is not weakened but refused later.
        if num_agents == 1 and self == ThreatOptions():
            return EAVESDROPPER
        colluders = DEFAULT_THREAT.max_colluders if self.colluders is None else self.colluders
        return ThreatModel(colluders, self.seeds, self.private_noise)

    def make_if_given(self) -> ThreatModel | None:
        """Return the threat model asked for, or None, which leaves it to the mechanism."""
        return None if self == ThreatOptions() else self.make()


def choose_mechanism(name: str, options: Corn | None) -> Mechanism | MechanismName:
    """Return the mechanism of this name with the options that it shares with ``Corn``.

    Options of CorN alone are refused with another mechanism rather than ignored. Without options
    a name stays a name.
    """
    own = read_mechanism(name)
    if options is None:
        return own or cast("MechanismName", name)
    if name == "corn":
        return options
    # Compared with a record of defaults, so that a new option is refused without a change here.
    if options != Corn(max_noise_std=options.max_noise_std):
        raise InvalidArgumentError(
            "--solver, --tolerance, --ridge, --drop-cost and --jobs apply to mechanism 'corn' "
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
    return own or cast("MechanismName", name)
