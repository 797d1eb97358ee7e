"""Options of commands: how they are declared, and groups that several commands share.

Options that belong together are fields of a record, whose methods turn them into the library's
records. A command takes such a record like a single option.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from functools import partial, wraps
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, get_type_hints

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
from corn.errors import InvalidArgumentError
from corn.files import load_function
from corn.privacy import Adjacency, PrivacyBudget, Sampling, Unit
from corn.privacy.budget import fit_sampling
from corn.topology import ONE_ROUND, Gossip, Mixing, Network, load_network
from corn.topology.files import read_matrix

REQUIRED = MISSING
"""The default of an option that must be given."""

_WRITTEN = frozenset(["out", "plot"])


def option(
    text: str, *, default: Any = None, panel: str | None = None, flag: str = "", **settings: Any
) -> Any:
    """Declare an option, as the default of a parameter of a command or of a field of a record.

    Its name is that of the parameter, unless ``flag`` has another.
    """
    info = partial(typer.Option, help=text, rich_help_panel=panel, **settings)
    return field(default=default, metadata={"info": info, "flag": flag})


def argument(text: str, *, default: Any = REQUIRED, **settings: Any) -> Any:
    """Declare a positional argument of a command."""
    info = partial(typer.Argument, help=text, **settings)
    return field(default=default, metadata={"info": info, "flag": ""})


def spread_records(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with a signature for typer, in which fields replace their records."""
    # Annotations are text where a module postpones them; typer needs the types themselves.
    parameters = inspect.signature(command, eval_str=True).parameters.values()
    records: Any = {p.name: p.annotation for p in parameters if is_dataclass(p.annotation)}

    @wraps(command)
    def call(**given: Any) -> None:
        _refuse_replaced_inputs(given)
        for name, record in records.items():
            own = {each.name: given.pop(each.name) for each in fields(record)}
            given[name] = record(**own)
        command(**given)

    spread = []
    for p in parameters:
        if p.name in records:
            types = get_type_hints(p.annotation)
            spread += [_declare(own.name, types[own.name], own) for own in fields(p.annotation)]
        else:
            spread.append(_declare(p.name, p.annotation, p.default))
    # Typer reads options from the signature.
    call.__signature__ = inspect.Signature(spread)  # type: ignore[attr-defined]
    return call


def _refuse_replaced_inputs(given: Mapping[str, Any]) -> None:
    """Raise misuse if a file to write is also a file to read, which would be lost."""
    for name in _WRITTEN & given.keys():
        out = given[name]
        if out is None or not out.is_file():
            continue
        for other, value in given.items():
            values = value if isinstance(value, list) else [value]
            paths = [Path(one) for one in values if isinstance(one, Path | str)]
            if other not in _WRITTEN and any(_is_same_file(path, out) for path in paths):
                why = f"would replace {out}, which is also read: give another name"
                raise typer.BadParameter(why, param_hint=f"--{name}")


def _is_same_file(path: Path, other: Path) -> bool:
    # The text of an option may be no possible name of a file.
    with suppress(OSError, ValueError):
        return path.samefile(other)
    return False


def _declare(name: str, kind: Any, declared: Any) -> Parameter:
    """Return the parameter from which typer makes an option."""
    if not isinstance(declared, Field):
        return Parameter(name, Parameter.KEYWORD_ONLY, annotation=kind)
    # Typer would give a switch a second name with --no-.
    flag = declared.metadata["flag"] or (f"--{name.replace('_', '-')}" if kind is bool else "")
    info = declared.metadata["info"](*([flag] if flag else []))
    made = Parameter(name, Parameter.KEYWORD_ONLY, annotation=Annotated[kind, info])
    return made if declared.default is MISSING else made.replace(default=declared.default)


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


def check_figure_name(path: Path | None) -> Path | None:
    """Raise for a bad name before the command runs, not after hours."""
    # Imported here, because Matplotlib takes a second that commands without a figure save.
    if path is not None:
        from corn.report import figures

        figures.check_figure_name(path)
    return path


# Options in the panels of the help.
in_network = partial(option, panel="Network")
in_threat = partial(option, panel="Insiders")
in_budget = partial(option, panel="Privacy budget")
in_learning = partial(option, panel="Learning")
in_own_data = partial(option, panel="Your own data")
in_agents = partial(option, panel="Agents")

_GRAPH = (
    "Graph spec (er:n=20,p=0.2,seed=1, ring:20, grid:4x5, …) or file: edge list, adjacency matrix "
    "as .csv, or mixing matrix as .csv or .npy."
)
_OWN_MECHANISM = (
    "NAME=R.npy is a covariance of your own, NAME=FILE.py:FUNCTION a function of the design "
    "problem (links, mixing matrix, caps, objective) that returns one; it is scaled to the budget."
)
GRAPH = in_network(_GRAPH, default=REQUIRED)
OPTIONAL_GRAPH = in_network(_GRAPH)
MECHANISM = option(
    f"Mechanism that correlates the noise of agents: {', '.join(MECHANISMS[:4])}. {_OWN_MECHANISM}",
    default="corn",
)
SEVERAL_MECHANISMS = option(
    f"Mechanisms of {', '.join(MECHANISMS)}, separated by commas; none clips, unclipped does not. "
    f"{_OWN_MECHANISM} (Default: corn, decor, ldp, none, or the plan.)"
)
COLLUDERS = in_threat(
    "Number of curious insiders who pool their seeds; 0 is an eavesdropper alone. (Default: "
    f"{DEFAULT_THREAT.max_colluders}.)",
    min=0,
)
BATCH_SIZE = in_budget("Samples per mini-batch (with --unit sample only).")
PLOT = option("Figure file to write: .png, .svg or .pdf.", callback=check_figure_name)
PLOT_STYLE = option(
    "Style file of Matplotlib for --plot, with lines such as figure.figsize: 3.3, 2.6 (inches of a "
    "panel) and font.size: 8. (Default: the file corn.mplstyle of the package.)"
)
JSON = option("Print the result as JSON.", default=False)


@dataclass(frozen=True)
class NoiseOptions:
    """Mixing rounds, and the objective of the noise."""

    horizon: float | None = option(
        "Steps over which noise accumulates; 1 is the paper's. (Default: a fifth of the steps.)",
        min=1,
    )
    objective: str | None = in_network(
        "Instead of --horizon, the matrix A of your own objective Tr(A R): .npy, .csv, or "
        "FILE.py:FUNCTION, a function of the mixing matrix."
    )
    mixing: Mixing | None = in_network(
        "sum adds all releases of a step over a tree of links; gossip, the paper's, mixes models "
        "with neighbours. (Default: sum; gossip for a mixing matrix, and with other options of it.)"
    )
    gossip: str = in_network(
        "Mixing rounds per step, which cost messages and no privacy: a number, plain:ROUNDS or "
        "chebyshev:ROUNDS (accelerated).",
        default=str(ONE_ROUND),
    )
    momentum: float | None = option(
        "Momentum β in [0, 1), for which the noise is designed. (Default: 1 − 6/STEPS, at most "
        "0.97; 0 with --mixing sum and with --horizon 1.)"
    )

    @property
    def asked_mixing(self) -> Mixing | None:
        """The mixing asked for: gossip if an option is given that exact sums lack."""
        given = (self.horizon, self.objective, getattr(self, "cooldown", None))
        has_rounds = Gossip.parse(self.gossip) != ONE_ROUND
        asks = has_rounds or any(value is not None for value in given)
        return "gossip" if self.mixing is None and asks else self.mixing

    def load_network(self, graph: str) -> Network:
        """Return the network of a graph spec or file."""
        rounds = Gossip.parse(self.gossip)
        return load_network(graph, gossip=rounds, mixing=self.asked_mixing)

    def choose_objective(self, network: Network, num_steps: int) -> Objective:
        """Return the objective asked for, or the default for this many steps."""
        if self.objective is None:
            return self.choose_horizon(network.mixing, num_steps)
        for name in ("horizon", "momentum"):
            if getattr(self, name) is not None:
                raise typer.BadParameter("--objective decides this", param_hint=f"--{name}")
        given: ObjectiveLike = (
            load_function(self.objective)
            if ".py:" in self.objective
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

    cooldown: int | None = in_network(
        "Steps after training that only mix, and cost no privacy. (Default: one mixing time.)",
        min=0,
    )


@dataclass(frozen=True)
class ThreatOptions:
    """The adversary that noise is designed against: by default one insider, with seeds of pairs."""

    colluders: int | None = COLLUDERS
    seeds: str = in_threat(
        "Sets of agents that share a seed: global, edges, pairs, sparse:K (links and K more "
        "partners of each agent), partners:K or groups:M; auto depends on insiders, agents and "
        "mixing.",
        default="auto",
    )

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
        rule = f"{'whole ' * (kind is int)}numbers separated by commas"
        raise InvalidArgumentError(f"{option} must be {rule}, found {text!r}") from error


def _read_per_agent(option: str, text: str, kind: Callable[[str], Any] = float) -> Any:
    """Return the number for all agents, or the numbers of each."""
    values = read_numbers(option, text, kind)
    return values if len(values) > 1 else values[0]


@dataclass(frozen=True)
class BudgetOptions:
    """A privacy budget."""

    epsilon: str = in_budget(
        "ε of the whole run, or one for each agent separated by commas.",
        default="10",
        metavar="NUMBER[,NUMBER…]",
    )
    delta: str = in_budget(
        "δ of the whole run, or one for each agent separated by commas.",
        default="1e-05",
        metavar="NUMBER[,NUMBER…]",
    )
    steps: int = in_budget("Number of training steps T.", default=5000, min=1)
    clip: float = in_budget(
        "Largest norm C of a clipped gradient. (Default: 0.1; of train with --data and unit "
        "sample: 1.)",
        default=0.1,
        show_default=False,
    )
    unit: Unit = in_budget(
        "Protected unit: an agent's whole data set (its mini-batch gradient is clipped), or one "
        "sample (each sample's gradient is clipped). (Default: agent; of train with --data: "
        "sample.)",
        default="agent",
        show_default=False,
    )
    adjacency: Adjacency = in_budget(
        "Neighbouring data sets: the unit's data is replaced by any other, or its gradient by zero "
        "(with Poisson sampling: a sample is added or removed).",
        default="replace",
    )
    sampling: Sampling | None = in_budget(
        "Rule by which samples enter batches (with --unit sample only): poisson, each by a secret "
        "coin; passes, in a new secret order for each pass; every-step, any sample in any batch, "
        "which needs the most noise. (Default: poisson.)"
    )
    samples_per_agent: str | None = in_budget(
        "Declared number of samples of an agent, or of each, which sets the sampling (with --unit "
        "sample only). It is public, and ε does not cover it: declare a number that does not "
        "depend on the data. (Default for train: those of the data.)",
        metavar="COUNT[,COUNT…]",
    )

    def make(self, batch_size: int | None, sizes: Sequence[int] | None = None) -> PrivacyBudget:
        """Return the budget.

        Where no option states the sampling, it follows from the ``sizes`` of the data sets.
        """
        samples, rate = None, None
        if self.samples_per_agent is not None:
            samples = _read_per_agent("--samples-per-agent", self.samples_per_agent, int)
        if sizes is not None and self.unit == "agent":
            batch_size = None  # it is the training's alone
        elif sizes is not None and samples is None and self.sampling != "every-step":
            rate, samples = fit_sampling(sizes, batch_size or 1, self.sampling)
        return PrivacyBudget(
            epsilon=_read_per_agent("--epsilon", self.epsilon),
            delta=_read_per_agent("--delta", self.delta),
            num_steps=self.steps,
            clip=self.clip,
            unit=self.unit,
            adjacency=self.adjacency,
            batch_size=batch_size,
            sampling=self.sampling,
            sampling_rate=rate,
            samples_per_agent=samples,
        )
