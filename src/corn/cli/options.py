"""Options that several commands share, with one name, one default and one help text each.

Options that belong together are fields of a record, whose methods turn them into the library's
records. Commands take such records like single options: see ``corn.cli.records``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, TypeAlias, cast

import typer

from corn.cli.output import print_note
from corn.cli.promises import (
    find_promises,
    name_delta,
    name_epsilon,
    parse_samples,
    require_one_each,
)
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
from corn.covariance.objective import (
    DEFAULT_MOMENTUM,
    DISAGREEMENT_WEIGHT,
    LEAST_STEPS_FOR_MOMENTUM,
)
from corn.covariance.threat import (
    MOST_FOR_PAIRS,
    PARTNERS_BESIDE_HUBS,
    SPARSE_PARTNERS,
    PrivateNoise,
)
from corn.errors import InvalidArgumentError
from corn.privacy import Accounting, Adjacency, ClippedQuery, PrivacyBudget, Sampling, Unit
from corn.privacy.budget import fit_sampling
from corn.topology import ONE_ROUND, Gossip, Network, choose_cooldown, load_network
from corn.topology.mixing import WEIGHTS

_GRAPH_HELP = (
    "Graph spec (er:n=20,p=0.2,seed=1, ring:20, grid:4x5, karate, …) or file: edge list, GraphML, "
    "node-link JSON, adjacency matrix as .csv, or mixing matrix as .csv or .npy."
)
_EPSILON_HELP = (
    "ε of the whole run: a number, one for each agent separated by commas, or a .csv file with the "
    "columns agent,epsilon or agent,epsilon,delta."
)
_BUDGET = "Privacy budget"
_NETWORK = "Network"
_THREAT = "Insiders"
_AUTO = "auto"
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
BatchSizeOption: TypeAlias = Annotated[
    int | None,
    typer.Option(help="Samples per mini-batch (with --unit sample only).", rich_help_panel=_BUDGET),
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
        "matrix and precision caps to one. It is scaled to the budget.",
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


def _name_gossip(text: str) -> str:
    """Return the one name of a gossip that may be written in several ways."""
    try:
        return str(Gossip.parse(text))
    except InvalidArgumentError as error:
        raise typer.BadParameter(str(error).removeprefix("gossip ")) from error


def _check_cooldown(text: str) -> str:
    if text != _AUTO and not (text.isdecimal() and len(text) <= _MOST_DIGITS):
        raise typer.BadParameter(f"must be {_AUTO} or a number of steps, found {text!r}")
    return text if text == _AUTO else str(int(text))


GossipOption: TypeAlias = Annotated[
    str,
    typer.Option(
        help="Mixing rounds per step: a number, plain:ROUNDS or chebyshev:ROUNDS (accelerated). "
        "Each costs one message over every link, in each direction, and no privacy.",
        callback=_name_gossip,
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
class OpenBudgetOptions:
    """A privacy budget in which ε may be missing, because it is the result."""

    epsilon: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBER[,NUMBER…]|FILE",
            help=f"{_EPSILON_HELP} With --covariance: ε at which δ is reported.",
            callback=name_epsilon,
            rich_help_panel=_BUDGET,
        ),
    ] = None
    delta: Annotated[
        str,
        typer.Option(
            metavar="NUMBER[,NUMBER…]",
            help="δ of the whole run, or one for each agent separated by commas.",
            callback=name_delta,
            rich_help_panel=_BUDGET,
        ),
    ] = "1e-05"
    steps: Annotated[
        int, typer.Option(help="Number of training steps T.", rich_help_panel=_BUDGET)
    ] = 5000
    clip: Annotated[
        float, typer.Option(help="Largest norm C of a clipped gradient.", rich_help_panel=_BUDGET)
    ] = 0.1
    unit: Annotated[
        Unit,
        typer.Option(
            help="Protected unit: an agent's whole data set (its mini-batch gradient is clipped "
            "once), or one sample (each sample's gradient is clipped).",
            rich_help_panel=_BUDGET,
        ),
    ] = "agent"
    accounting: Annotated[
        Accounting,
        typer.Option(
            help="Accountant: gdp is exact, rdp is the paper's Theorem 2, paper is its eq. (13b).",
            rich_help_panel=_BUDGET,
        ),
    ] = "gdp"
    adjacency: Annotated[
        Adjacency,
        typer.Option(
            help="Relation of neighbouring data sets: the unit's data is replaced by any other, or "
            "its gradient by zero (with Poisson sampling: a sample is added or removed).",
            rich_help_panel=_BUDGET,
        ),
    ] = "replace"
    sampling: Annotated[
        Sampling | None,
        typer.Option(
            help="Rule by which samples enter mini-batches (with --unit sample only): poisson, "
            "each by its own secret coin; passes, in batches of fixed size and a new secret order "
            "for each pass; every-step, any sample in any batch, which needs the most noise. "
            "(Default: poisson.)",
            rich_help_panel=_BUDGET,
        ),
    ] = None
    sampling_rate: Annotated[
        float | None,
        typer.Option(
            help="Largest probability that a sample is in a mini-batch (with --sampling poisson), "
            "instead of --samples-per-agent.",
            rich_help_panel=_BUDGET,
        ),
    ] = None
    samples_per_agent: Annotated[
        str | None,
        typer.Option(
            metavar="COUNT[,COUNT…]",
            help="Least number of samples of an agent, or one number for each agent, from which "
            "the sampling rate or the passes follow (with --unit sample only). (Default for train "
            "and launch: those of the data.)",
            rich_help_panel=_BUDGET,
        ),
    ] = None

    def make(self, batch_size: int | None, network: Network | None = None) -> PrivacyBudget:
        """Return the budget; a batch size belongs to the sample unit only.

        ``network`` has the names by which a file of promises calls the agents; without it they are
        numbered.
        """
        if self.epsilon is None:
            raise typer.BadParameter("give --epsilon, or --covariance to compute ε")
        return self._make(self.epsilon, batch_size, network)

    def make_query(self, batch_size: int | None) -> ClippedQuery:
        """Return the query that is released at each step, whatever ε is."""
        return self._make("1", batch_size, None).query

    def _make(self, epsilon: str, batch_size: int | None, network: Network | None) -> PrivacyBudget:
        epsilons, deltas = find_promises(epsilon, self.delta, network)
        return PrivacyBudget(
            epsilon=epsilons,
            delta=deltas,
            num_steps=self.steps,
            clip=self.clip,
            unit=self.unit,
            accounting=self.accounting,
            adjacency=self.adjacency,
            batch_size=batch_size,
            sampling=self.sampling,
            sampling_rate=self.sampling_rate,
            samples_per_agent=require_one_each(
                "--samples-per-agent",
                parse_samples(self.samples_per_agent),
                None if network is None else network.num_agents,
            ),
        )


@dataclass(frozen=True)
class BudgetOptions(OpenBudgetOptions):
    """A privacy budget."""

    epsilon: Annotated[
        str,
        typer.Option(
            metavar="NUMBER[,NUMBER…]|FILE",
            help=_EPSILON_HELP,
            callback=name_epsilon,
            rich_help_panel=_BUDGET,
        ),
    ] = "10"

    @property
    def needs_sizes(self) -> bool:
        """Whether the sampling follows from the agents' data, because no option states it."""
        is_given = self.sampling_rate is not None or self.samples_per_agent is not None
        return self.unit == "sample" and self.sampling != "every-step" and not is_given

    def make_for_data(
        self, batch_size: int, sizes: Sequence[int], network: Network | None = None
    ) -> PrivacyBudget:
        """Return the budget of training in mini-batches on agents with so many samples each.

        The batch size and the numbers of samples count for the sample unit only.
        """
        chosen = self
        if self.needs_sizes:
            rate, samples = fit_sampling(sizes, batch_size, self.sampling)
            listed = samples if isinstance(samples, tuple) else (samples,)
            chosen = replace(
                self,
                sampling_rate=rate,
                samples_per_agent=None if samples is None else ",".join(map(str, listed)),
            )
        return chosen.make(batch_size if self.unit == "sample" else None, network)


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
    weights: WeightsOption = None
    gossip: GossipOption = DEFAULT_GOSSIP
    cooldown: _CooldownOption = _AUTO
    momentum: Annotated[
        float | None,
        typer.Option(
            help="Momentum β in [0, 1): agents step along a moving average of about their last "
            "1/(1 − β) releases, and the noise is designed for it. It costs no privacy and no "
            f"messages. (Default: {DEFAULT_MOMENTUM:g} from {LEAST_STEPS_FOR_MOMENTUM} steps on, "
            "otherwise 0; 0 with --horizon 1.)"
        ),
    ] = None

    def load_network(self, graph: str) -> Network:
        """Return the network of a graph spec or file."""
        return load_network(graph, weights=self.weights, gossip=Gossip.parse(self.gossip))

    def choose_objective(self, num_steps: int) -> Horizon:
        """Return the objective asked for, or the default for so many steps."""
        usual = default_objective(num_steps, momentum=self.momentum)
        length = usual.length if self.horizon is None else self.horizon
        gamma = self.disagreement_weight
        if gamma is None:
            gamma = ONE_STEP.disagreement_weight if self.horizon == 1 else usual.disagreement_weight
        # A horizon of one step is the paper's objective, whose agents have no momentum.
        is_paper = self.horizon == 1 and self.momentum is None
        return Horizon(length, gamma, 0.0 if is_paper else usual.momentum)

    @property
    def cooldown_steps(self) -> int | None:
        """The number of steps that only mix; None for one mixing time."""
        return None if self.cooldown == _AUTO else int(self.cooldown)

    def choose_cooldown(self, network: Network, num_steps: int) -> int:
        """Return the number of steps that only mix after a run of so many steps."""
        given = self.cooldown_steps
        return choose_cooldown(network, num_steps) if given is None else given

    def warn_of_disagreement(self, network: Network, cooldown_steps: int) -> None:
        """Print a note if agents can never agree, so that there is no cool-down by default."""
        # One step would be enough where all are neighbours, so zero steps have no other reason.
        if self.cooldown_steps is None and not cooldown_steps and network.num_agents > 1:
            print_note(
                "the mixing weights are periodic: agents never agree, so there is no cool-down; "
                "--weights lazy lets them agree"
            )

    def describe(self, network: Network, num_steps: int) -> str:
        """Return rounds, cool-down and messages of a run of so many steps, in one line."""
        return network.gossip.describe(num_steps, self.choose_cooldown(network, num_steps))


@dataclass(frozen=True)
class ThreatOptions:
    """The adversary that noise is designed against: by default one insider, with seeds of pairs."""

    colluders: _ColludersOption = None
    seeds: _SeedsOption = "auto"
    private_noise: PrivateNoiseOption = "per-agent"

    def make(self, num_agents: int | None = None) -> ThreatModel:
        """Return the threat model, by default without insiders for a single agent."""
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
