"""Options that several commands share, with one name, one default and one help text each.

Options that belong together are fields of a record, whose methods turn them into the library's
records. Commands take such records like single options (``spread_records``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import partial, wraps
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
from corn.privacy.budget import fit_sampling
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
# Options in the panels of the help.
in_network = partial(typer.Option, rich_help_panel="Network")
in_threat = partial(typer.Option, rich_help_panel="Insiders")
in_budget = partial(typer.Option, rich_help_panel="Privacy budget")
in_learning = partial(typer.Option, rich_help_panel="Learning")
in_own_data = partial(typer.Option, rich_help_panel="Your own data")
in_agents = partial(typer.Option, rich_help_panel="Agents")

DEFAULT_GOSSIP = str(ONE_ROUND)
"""The mixing rounds of a step in commands that design or train."""

GraphOption: TypeAlias = Annotated[str, in_network(help=_GRAPH_HELP)]
OptionalGraphOption: TypeAlias = Annotated[str | None, in_network(help=_GRAPH_HELP)]


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


_OWN_MECHANISM = (
    "NAME=R.npy is a covariance of your own, NAME=FILE.py:FUNCTION a function of the design "
    "problem (links, mixing matrix, caps, objective) that returns one; it is scaled to the budget."
)
MechanismOption: TypeAlias = Annotated[
    str,
    typer.Option(
        help=f"Mechanism that correlates the noise of agents: {', '.join(MECHANISMS[:4])}. "
        f"{_OWN_MECHANISM}",
    ),
]
MechanismsOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help=f"Mechanisms of {', '.join(MECHANISMS)}, separated by commas. central trusts a "
        "server; none clips but adds no noise; unclipped does neither. "
        f"{_OWN_MECHANISM} (Default: corn, decor, ldp, none; for compare zero-sum and central too; "
        "with a plan, the plan alone.)",
    ),
]
ColludersOption: TypeAlias = Annotated[
    int | None,
    in_threat(
        min=0,
        help="Number of curious insiders who pool their seeds; 0 is an eavesdropper alone. "
        f"(Default: {DEFAULT_THREAT.max_colluders}.)",
    ),
]


@dataclass(frozen=True)
class NoiseOptions:
    """Mixing weights and rounds, and the objective of the noise."""

    horizon: Annotated[
        float | None,
        typer.Option(
            min=1,
            help="Number of steps over which the design lets noise accumulate; 1 is the paper's "
            "objective. (Default: a fifth of the steps.)",
        ),
    ] = None
    objective: Annotated[
        str | None,
        in_network(
            help="Instead of --horizon, your own objective Tr(A R): A as .npy or .csv, or "
            "FILE.py:FUNCTION, a function of the mixing matrix of a step that returns A.",
        ),
    ] = None
    mixing: Annotated[
        Mixing | None,
        in_network(
            help="Combination of a step's releases: sum adds all of them up over a tree of links, "
            "so that all agents hold one model; gossip, the paper's, mixes models with "
            "neighbours. (Default: sum; gossip for a mixing matrix, and with "
            "--weights, --gossip, --cooldown, --horizon or --objective.)",
        ),
    ] = None
    weights: Annotated[
        str | None,
        in_network(
            help=f"Rule for the mixing weights: {', '.join(WEIGHTS)}. Only sinkhorn uses edge "
            "weights. (Default: metropolis; a given mixing matrix as it is.)",
        ),
    ] = None
    gossip: Annotated[
        str,
        in_network(
            help="Mixing rounds per step: a number, plain:ROUNDS or chebyshev:ROUNDS "
            "(accelerated). Each costs one message over every link, in each direction, and no "
            "privacy.",
        ),
    ] = DEFAULT_GOSSIP
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
        given = (self.weights, self.horizon, self.objective)
        has_rounds = Gossip.parse(self.gossip) != ONE_ROUND
        return has_rounds or any(option is not None for option in given)

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
        in_network(
            min=0,
            help="Number of steps after training that only mix, so that agents agree on one model. "
            "Each costs the messages of a step, and no privacy. (Default: one mixing time.)",
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
    seeds: Annotated[
        str,
        in_threat(
            help="Sets of agents that share a seed: global, edges, pairs, sparse:K (links and K "
            "more partners of each agent), partners:K or groups:M; auto is global without "
            f"insiders, pairs up to {MOST_FOR_PAIRS} agents, and sparse:{SPARSE_PARTNERS} above "
            f"(sparse:{PARTNERS_BESIDE_HUBS} with hubs); for exact sums partners:K with twice as "
            "many partners as insiders and four more.",
        ),
    ] = "auto"

    def make_if_given(self) -> ThreatModel | None:
        """Return the threat model asked for, or None, which leaves it to the mechanism."""
        if self == ThreatOptions():
            return None
        colluders = DEFAULT_THREAT.max_colluders if self.colluders is None else self.colluders
        return ThreatModel(colluders, self.seeds)


def read_numbers(option: str, text: str, kind: Callable[[str], Any] = float) -> tuple[Any, ...]:
    """Return the numbers of an option, which are separated by commas.

    >>> read_numbers("--epsilon", "1,8"), read_numbers("--colluders", "0", int)
    ((1.0, 8.0), (0,))
    """
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError as error:
        what = "whole numbers" if kind is int else "numbers"
        raise InvalidArgumentError(
            f"{option} must be {what} separated by commas, found {text!r}"
        ) from error


def read_per_agent(option: str, text: str, kind: Callable[[str], Any] = float) -> Any:
    """Return the number for all agents, or the numbers of each."""
    values = read_numbers(option, text, kind)
    return values if len(values) > 1 else values[0]


BatchSizeOption: TypeAlias = Annotated[
    int | None, in_budget(help="Samples per mini-batch (with --unit sample only).")
]


@dataclass(frozen=True)
class BudgetOptions:
    """A privacy budget."""

    epsilon: Annotated[
        str,
        in_budget(
            metavar="NUMBER[,NUMBER…]",
            help="ε of the whole run, or one for each agent separated by commas.",
        ),
    ] = "10"
    delta: Annotated[
        str,
        in_budget(
            metavar="NUMBER[,NUMBER…]",
            help="δ of the whole run, or one for each agent separated by commas.",
        ),
    ] = "1e-05"
    steps: Annotated[int, in_budget(min=1, help="Number of training steps T.")] = 5000
    clip: Annotated[float, in_budget(help="Largest norm C of a clipped gradient.")] = 0.1
    unit: Annotated[
        Unit,
        in_budget(
            help="Protected unit: an agent's whole data set (its mini-batch gradient is clipped "
            "once), or one sample (each sample's gradient is clipped).",
        ),
    ] = "agent"
    adjacency: Annotated[
        Adjacency,
        in_budget(
            help="Relation of neighbouring data sets: the unit's data is replaced by any other, or "
            "its gradient by zero (with Poisson sampling: a sample is added or removed).",
        ),
    ] = "replace"
    sampling: Annotated[
        Sampling | None,
        in_budget(
            help="Rule by which samples enter mini-batches (with --unit sample only): poisson, "
            "each by its own secret coin; passes, in batches of fixed size and a new secret order "
            "for each pass; every-step, any sample in any batch, which needs the most noise. "
            "(Default: poisson.)",
        ),
    ] = None
    samples_per_agent: Annotated[
        str | None,
        in_budget(
            metavar="COUNT[,COUNT…]",
            help="Declared number of samples of an agent, or one number for each agent, from which "
            "the sampling rate or the passes follow (with --unit sample only); with more samples "
            "or fewer, batches are larger or smaller. It is public, and ε does not cover it: "
            "declare a number that does not depend on the data. (Default for train: those of the "
            "data.)",
        ),
    ] = None

    def make(self, batch_size: int | None, sizes: Sequence[int] | None = None) -> PrivacyBudget:
        """Return the budget.

        ``sizes`` are those of the data sets to train on, if there are any: the sampling follows
        from them where no option states it, and for the agent unit the batch size, which then is
        the training's alone, is left out.
        """
        samples, rate = None, None
        if self.samples_per_agent is not None:
            samples = read_per_agent("--samples-per-agent", self.samples_per_agent, int)
        if sizes is not None and self.unit == "agent":
            batch_size = None
        elif sizes is not None and samples is None and self.sampling != "every-step":
            rate, samples = fit_sampling(sizes, batch_size or 1, self.sampling)
        return PrivacyBudget(
            epsilon=read_per_agent("--epsilon", self.epsilon),
            delta=read_per_agent("--delta", self.delta),
            num_steps=self.steps,
            clip=self.clip,
            unit=self.unit,
            adjacency=self.adjacency,
            batch_size=batch_size,
            sampling=self.sampling,
            sampling_rate=rate,
            samples_per_agent=samples,
        )


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


def refuse_given(context: typer.Context, names: Iterable[str], why: str) -> None:
    """Raise misuse for the first of these options that was given."""
    for name in names:
        if is_given(context, name):
            raise typer.BadParameter(why, param_hint=f"--{name.replace('_', '-')}")


def _options(record: type) -> Iterator[Parameter]:
    types = get_type_hints(record, include_extras=True)
    for field in fields(record):
        default = Parameter.empty if field.default is MISSING else field.default
        yield Parameter(
            field.name, Parameter.KEYWORD_ONLY, default=default, annotation=types[field.name]
        )


def _by_name(parameter: Parameter) -> Parameter:
    return parameter.replace(kind=Parameter.KEYWORD_ONLY)
