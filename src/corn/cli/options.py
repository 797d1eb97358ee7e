"""Options that several commands share, with one name, one default and one help text each.

Options that belong together are fields of a record, whose methods turn them into the library's
records. Commands take such records like single options (``spread_records``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import wraps
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, TypeAlias, get_type_hints

import typer

from corn.covariance import (
    DEFAULT_THREAT,
    MECHANISMS,
    ONE_STEP,
    Horizon,
    Objective,
    ObjectiveLike,
    ThreatModel,
    default_objective,
)
from corn.covariance.design import read_objective
from corn.covariance.threat import (
    MOST_FOR_PAIRS,
    PARTNERS_BESIDE_HUBS,
    SPARSE_PARTNERS,
)
from corn.errors import InvalidArgumentError
from corn.files import load_function
from corn.privacy import Adjacency, PrivacyBudget, Sampling, Unit
from corn.privacy.budget import fit_sampling, read_promises
from corn.topology import (
    ONE_ROUND,
    Gossip,
    Mixing,
    Network,
    choose_cooldown,
    load_network,
)
from corn.topology.files import read_matrix
from corn.topology.mixing import WEIGHTS

_GRAPH_HELP = (
    "Graph spec (er:n=20,p=0.2,seed=1, ring:20, grid:4x5, karate, …) or file: edge list, GraphML, "
    "node-link JSON, adjacency matrix as .csv, or mixing matrix as .csv or .npy."
)
_NETWORK = "Network"
_THREAT = "Insiders"
DEFAULT_GOSSIP = str(ONE_ROUND)
"""The mixing rounds of a step in commands that design or train."""

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
        "(Default: metropolis; a given mixing matrix as it is.)",
        rich_help_panel=_NETWORK,
    ),
]


def _check_figure_name(path: Path | None) -> Path | None:
    """Raise for a bad name before the command runs, not after hours."""
    # Imported here, because Matplotlib takes a second that commands without a figure save.
    if path is not None:
        from corn.report.figures import check_figure_name

        check_figure_name(path)
    return path


PlotOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(help="Figure file to write: .png, .svg or .pdf.", callback=_check_figure_name),
]
PlotStyleOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help="Style file of Matplotlib for --plot, with lines such as figure.figsize: 3.3, 2.6 "
        "(inches of a panel, a column of a paper) and font.size: 8. (Default: the file "
        "corn.mplstyle of the package.)"
    ),
]
JsonOption: TypeAlias = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def _check_mechanisms(text: str | None) -> str | None:
    """Raise for a name that is neither known nor that of a mechanism of the user's own."""
    for name in (part.strip() for part in (text or "").split(",") if text is not None):
        if "=" not in name and name not in MECHANISMS:
            raise typer.BadParameter(
                f"must be one of {', '.join(MECHANISMS)}, or NAME=R.npy, NAME=FILE.py:FUNCTION of "
                f"your own, found {name!r}"
            )
    return text


_OWN_MECHANISM = (
    "NAME=R.npy is a covariance of your own, NAME=FILE.py:FUNCTION a function of the design "
    "problem (links, mixing matrix, caps, objective) that returns one; it is scaled to the budget."
)
MechanismOption: TypeAlias = Annotated[
    str,
    typer.Option(
        help=f"Mechanism that correlates the noise of agents: {', '.join(MECHANISMS[:4])}. "
        f"{_OWN_MECHANISM}",
        callback=_check_mechanisms,
    ),
]
MechanismsOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help=f"Mechanisms of {', '.join(MECHANISMS)}, separated by commas. central trusts a "
        "server; none clips but adds no noise; unclipped does neither. "
        f"{_OWN_MECHANISM} (Default: corn, decor, ldp, none; for compare zero-sum and central too; "
        "with a plan, the plan alone.)",
        callback=_check_mechanisms,
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


GossipOption: TypeAlias = Annotated[
    str,
    typer.Option(
        help="Mixing rounds per step: a number, plain:ROUNDS or chebyshev:ROUNDS (accelerated). "
        "Each costs one message over every link, in each direction, and no privacy.",
        callback=_normalise_gossip,
        rich_help_panel=_NETWORK,
    ),
]
ColludersOption: TypeAlias = Annotated[
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
        "partners of each agent), partners:K or groups:M; auto is global "
        f"without insiders, pairs up to {MOST_FOR_PAIRS} agents, and sparse:{SPARSE_PARTNERS} "
        f"above (sparse:{PARTNERS_BESIDE_HUBS} with hubs); for exact sums partners:K with twice as "
        "many partners as insiders and four more.",
        rich_help_panel=_THREAT,
    ),
]


@dataclass(frozen=True)
class NoiseOptions:
    """Mixing weights and rounds, and the objective of the noise."""

    horizon: HorizonOption = None
    objective: Annotated[
        str | None,
        typer.Option(
            help="Instead of --horizon, your own objective Tr(A R): A as .npy or .csv, or "
            "FILE.py:FUNCTION, a function of the mixing matrix of a step that returns A.",
            rich_help_panel=_NETWORK,
        ),
    ] = None
    mixing: Annotated[
        Mixing | None,
        typer.Option(
            help="Combination of a step's releases: sum adds all of them up over a tree of links, "
            "so that all agents hold one model; gossip, the paper's, mixes models with "
            "neighbours. (Default: sum; gossip for a mixing matrix, and with "
            "--weights, --gossip, --cooldown, --horizon or --objective.)",
            rich_help_panel=_NETWORK,
        ),
    ] = None
    weights: WeightsOption = None
    gossip: GossipOption = DEFAULT_GOSSIP
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
        mixing = "gossip" if self.mixing is None and self._asks_for_gossip else self.mixing
        return load_network(
            graph, weights=self.weights, gossip=Gossip.parse(self.gossip), mixing=mixing
        )

    def choose_mixing(self) -> Mixing:
        """Return how releases are combined on a network that is not known yet."""
        return self.mixing or ("gossip" if self._asks_for_gossip else "sum")

    @property
    def _asks_for_gossip(self) -> bool:
        """Whether an option is given that exact sums do not have."""
        is_usual = self.gossip == DEFAULT_GOSSIP
        given = (self.weights, self.horizon, self.objective)
        return not is_usual or any(option is not None for option in given)

    def choose_objective(self, network: Network, num_steps: int) -> Objective:
        """Return the objective asked for, or the default for this many steps."""
        if self.objective is None:
            return self.choose_horizon(network.mixing, num_steps)
        for name in ("horizon", "momentum"):
            if getattr(self, name) is not None:
                raise typer.BadParameter("--objective decides this", param_hint=f"--{name}")
        is_function = ".py:" in self.objective
        given: ObjectiveLike = (
            load_function(self.objective)
            if is_function
            else read_matrix(Path(self.objective), name="an objective")
        )
        return read_objective(given, network, num_steps)

    def choose_horizon(self, mixing: Mixing, num_steps: int) -> Horizon:
        """Return the objective asked for, or the default, on a network that is not known yet."""
        if self.objective is not None:
            raise typer.BadParameter("needs a graph", param_hint="--objective")
        usual = default_objective(num_steps, mixing=mixing, momentum=self.momentum)
        if self.horizon is None:
            return usual
        # A horizon of one step is the paper's objective, which weighs all noise the same, and whose
        # agents have no momentum.
        if self.horizon == 1:
            return replace(ONE_STEP, momentum=self.momentum or 0.0)
        return replace(usual, length=self.horizon)


@dataclass(frozen=True)
class MixingOptions(NoiseOptions):
    """The same, and the cool-down of a run."""

    cooldown: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Number of steps after training that only mix, so that agents agree on one model. "
            "Each costs the messages of a step, and no privacy. (Default: one mixing time.)",
            rich_help_panel=_NETWORK,
        ),
    ] = None

    @property
    def _asks_for_gossip(self) -> bool:
        return super()._asks_for_gossip or self.cooldown is not None

    def choose_cooldown(self, network: Network, num_steps: int) -> int:
        """Return the number of steps that only mix after a run of this many steps."""
        return choose_cooldown(network, num_steps) if self.cooldown is None else self.cooldown


@dataclass(frozen=True)
class ThreatOptions:
    """The adversary that noise is designed against: by default one insider, with seeds of pairs."""

    colluders: ColludersOption = None
    seeds: _SeedsOption = "auto"

    def make_if_given(self) -> ThreatModel | None:
        """Return the threat model asked for, or None, which leaves it to the mechanism."""
        if self == ThreatOptions():
            return None
        colluders = DEFAULT_THREAT.max_colluders if self.colluders is None else self.colluders
        return ThreatModel(colluders, self.seeds)


_TABLE_SUFFIX = ".csv"


def parse_per_agent(
    option: str, text: str, num_agents: int | None, kind: type[float] = float
) -> Any:
    """Return the number for all agents, or the numbers of each.

    >>> parse_per_agent("--epsilon", "10", 2), parse_per_agent("--epsilon", "1,8", 2)
    (10.0, (1.0, 8.0))
    >>> parse_per_agent("--epsilon", "1,8", 3)
    Traceback (most recent call last):
    ...
    corn.errors.InvalidArgumentError: --epsilon must be one number, or 3 for 3 agents, found 2
    """
    try:
        values = tuple(kind(part) for part in text.split(","))
    except ValueError as error:
        what = "a whole number" if kind is int else "a number"
        raise InvalidArgumentError(
            f"{option} must be {what}, or one for each agent separated by commas, found {text!r}"
        ) from error
    if "," not in text:
        return values[0]
    if num_agents is not None and len(values) != num_agents:
        raise InvalidArgumentError(
            f"{option} must be one number, or {num_agents} for {num_agents} agents, "
            f"found {len(values)}"
        )
    return values


def parse_numbers(name: str, text: str | None, *, example: str) -> tuple[float, ...]:
    """Return the numbers of an option that lists them, or none if it was not given.

    >>> parse_numbers("epsilons", "3,10", example="3,10,30")
    (3.0, 10.0)
    """
    try:
        return () if text is None else tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise InvalidArgumentError(
            f"{name} must be numbers separated by commas, found {text!r}: try {example}"
        ) from error


def _is_table(text: str) -> bool:
    # A name that ends in .csv is meant as a file even if it is missing, so that the error says so.
    return Path(text).suffix == _TABLE_SUFFIX or Path(text).is_file()


def _check_numbers(text: str) -> str:
    """Raise before any work unless the text is a number, or one for each agent, or a table."""
    try:
        if not _is_table(text):
            parse_per_agent("it", text, None)
    except InvalidArgumentError as error:
        raise typer.BadParameter(str(error).removeprefix("it ")) from error
    return text


_BUDGET = "Privacy budget"

BatchSizeOption: TypeAlias = Annotated[
    int | None,
    typer.Option(help="Samples per mini-batch (with --unit sample only).", rich_help_panel=_BUDGET),
]


@dataclass(frozen=True)
class BudgetOptions:
    """A privacy budget."""

    epsilon: Annotated[
        str,
        typer.Option(
            metavar="NUMBER[,NUMBER…]|FILE",
            help="ε of the whole run: a number, one for each agent separated by commas, or a .csv "
            "file with the columns agent,epsilon or agent,epsilon,delta.",
            callback=_check_numbers,
            rich_help_panel=_BUDGET,
        ),
    ] = "10"
    delta: Annotated[
        str,
        typer.Option(
            metavar="NUMBER[,NUMBER…]",
            help="δ of the whole run, or one for each agent separated by commas.",
            callback=_check_numbers,
            rich_help_panel=_BUDGET,
        ),
    ] = "1e-05"
    steps: Annotated[
        int, typer.Option(min=1, help="Number of training steps T.", rich_help_panel=_BUDGET)
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
    samples_per_agent: Annotated[
        str | None,
        typer.Option(
            metavar="COUNT[,COUNT…]",
            help="Declared number of samples of an agent, or one number for each agent, from which "
            "the sampling rate or the passes follow (with --unit sample only); with more samples "
            "or fewer, batches are larger or smaller. It is public, and ε does not cover it: "
            "declare a number that does not depend on the data. (Default for train: those of the "
            "data.)",
            rich_help_panel=_BUDGET,
        ),
    ] = None

    def make(
        self,
        batch_size: int | None,
        network: Network | None = None,
        *,
        sampling_rate: float | None = None,
        samples: int | tuple[int, ...] | None = None,
    ) -> PrivacyBudget:
        """Return the budget; a batch size belongs to the sample unit only.

        ``network`` has the names by which a file of promises calls the agents; without it they are
        numbered. A sampling rate or numbers of samples replace those of the options.
        """
        count = None if network is None else network.num_agents
        if _is_table(self.epsilon):
            names = None if network is None else network.agent_names
            epsilons, deltas = read_promises(Path(self.epsilon), names)
        else:
            epsilons, deltas = parse_per_agent("--epsilon", self.epsilon, count), None
        if samples is None and self.samples_per_agent is not None:
            samples = parse_per_agent("--samples-per-agent", self.samples_per_agent, count, int)
        return PrivacyBudget(
            epsilon=epsilons,
            delta=parse_per_agent("--delta", self.delta, count) if deltas is None else deltas,
            num_steps=self.steps,
            clip=self.clip,
            unit=self.unit,
            adjacency=self.adjacency,
            batch_size=batch_size,
            sampling=self.sampling,
            sampling_rate=sampling_rate,
            samples_per_agent=samples,
        )

    def make_for_data(
        self, batch_size: int, sizes: Sequence[int], network: Network | None = None
    ) -> PrivacyBudget:
        """Return the budget of training in mini-batches on data sets of these sizes.

        The batch size and the numbers of samples count for the sample unit only, and the sizes
        where no option states the numbers of samples.
        """
        is_stated = self.samples_per_agent is not None or self.sampling == "every-step"
        if self.unit == "agent" or is_stated:
            return self.make(batch_size if self.unit == "sample" else None, network)
        rate, samples = fit_sampling(sizes, batch_size, self.sampling)
        return self.make(batch_size, network, sampling_rate=rate, samples=samples)


def spread_records(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with a signature for typer, in which fields replace their records.

    Typer accepts single options only. Without records, each command with a privacy budget would
    repeat all options of a budget and their defaults.
    """
    # Annotations are text where a module postpones them; typer needs the types themselves.
    parameters = inspect.signature(command, eval_str=True).parameters.values()
    records = {
        p.name: p.annotation
        for p in parameters
        if isinstance(p.annotation, type) and is_dataclass(p.annotation)
    }

    @wraps(command)
    def call(**given: Any) -> None:
        for name, record in records.items():
            own = {field.name: given.pop(field.name) for field in fields(record)}
            given[name] = record(**own)
        command(**given)

    spread = [
        option
        for p in parameters
        for option in (_options(p.annotation) if p.name in records else [_by_name(p)])
    ]
    # Typer reads options from the signature.
    call.__signature__ = inspect.Signature(spread)  # type: ignore[attr-defined]
    return call


def read_configuration(context: typer.Context) -> dict[str, object]:
    """Return the value of every option of the running command, in the order of its help."""
    names = [parameter.name for parameter in context.command.params]
    return {name: context.params[name] for name in names if name in context.params}


def is_given(context: typer.Context, name: str) -> bool:
    """Return whether an option was given on the command line or in the environment."""
    # A plan replaces a default silently, but contradicts a choice, so the two must be told apart.
    source = context.get_parameter_source(name)
    return source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT")


def _options(record: type) -> Iterator[Parameter]:
    types = get_type_hints(record, include_extras=True)
    for field in fields(record):
        default = Parameter.empty if field.default is MISSING else field.default
        yield Parameter(
            field.name, Parameter.KEYWORD_ONLY, default=default, annotation=types[field.name]
        )


def _by_name(parameter: Parameter) -> Parameter:
    return parameter.replace(kind=Parameter.KEYWORD_ONLY)
