"""The consortium file: one public TOML file from which plan, sites and model follow."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import networkx as nx
import numpy as np

from corn.checks import require, require_count, require_fraction
from corn.covariance import DEFAULT_THREAT, EAVESDROPPER, ThreatModel
from corn.errors import CornError, FileFormatError, make_printable
from corn.learn.partition import TEST_FRACTION, VALIDATION_FRACTION
from corn.learn.schema import Schema, read_record, read_schema
from corn.plan import Plan, load_plan
from corn.privacy import PrivacyBudget, Unit
from corn.topology import Network, list_connections, load_network
from corn.topology.graphs import look_up_agents

if TYPE_CHECKING:  # torch takes seconds to import, and corn plan needs none of it
    from corn.learn.file_data import FileWorkload

_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Site:
    """A site, its address HOST:PORT if others can connect to it, and its public number of rows."""

    name: str
    samples: int
    address: str | None = None
    accepts: bool = True

    def __post_init__(self) -> None:
        require_count("samples", self.samples)


@dataclass(frozen=True)
class Promise:
    """The promise to every row, or to every site, and the adversary it holds against."""

    epsilon: float
    delta: float = 1e-5
    unit: Unit = "sample"
    colluders: int | None = None


@dataclass(frozen=True)
class Training:
    """The training, the same at every site; ``batch_size`` is that at a site of average size.

    Rows are held out with probability ``held_out``, unless there is ``test_data``, a public file
    beside the consortium file.
    """

    steps: int
    batch_size: int
    step_size: float = 0.1
    clip: float = 1.0
    model: str = "linear"
    held_out: float = TEST_FRACTION
    test_data: str | None = None

    def __post_init__(self) -> None:
        require_count("steps", self.steps)
        require_count("batch-size", self.batch_size)
        require_fraction("held-out", self.held_out)
        # Its hash and scores are published, so it must not name a file elsewhere at a site.
        is_beside = self.test_data is None or Path(self.test_data).name == self.test_data
        rule = "the name of a public file beside the consortium file"
        require(is_beside, "test-data", rule, repr(self.test_data))


@dataclass(frozen=True)
class Consortium:
    """Everything that sites agree on before they look at their data; all of it is public.

    ``graph`` is the spec or the file of a graph, and ``store`` HOST:PORT of the rendezvous.
    """

    path: Path
    data: Schema
    promise: Promise
    training: Training
    sites: tuple[Site, ...]
    graph: str
    store: str | None = None

    @property
    def plan_path(self) -> Path:
        """The plan beside the file: ``consortium.corn`` for ``consortium.toml``."""
        return self.path.with_suffix(".corn")

    @property
    def training_samples(self) -> tuple[float, ...]:
        """The expected number of rows that each site trains on, as declared."""
        test = self.training.held_out if self.training.test_data is None else 0.0
        fraction = (1 - test) * (1 - VALIDATION_FRACTION)
        return tuple(fraction * site.samples for site in self.sites)

    @property
    def accepts(self) -> tuple[bool, ...]:
        """Whether each site accepts connections."""
        return tuple(site.accepts for site in self.sites)

    @property
    def names(self) -> list[str]:
        """The name of each site."""
        return [site.name for site in self.sites]

    def load_network(self) -> Network:
        """Return the network: one agent for each site, with its name and in the order of sites."""
        network = load_network(self.graph)
        count = len(self.sites)
        rule = f"of {count} agents, one for each site"
        require(network.num_agents == count, "graph", rule, network.num_agents)
        place = list(range(count))
        if network.has_names:
            place = look_up_agents(self.names, network.agent_names, argument="an agent of graph")
        graph = nx.relabel_nodes(network.graph, dict(enumerate(place)))
        nx.set_node_attributes(graph, dict(enumerate(self.names)), "name")
        back = np.argsort(place)
        list_connections(graph, self.accepts)
        return replace(network, graph=graph, sparse_matrix=network.sparse_matrix[back][:, back])

    def make_budget(self) -> PrivacyBudget:
        """Return the promise of the plan, with one sampling rate that every site accepts."""
        own, training = self.promise, self.training
        batch_size = rate = None
        if own.unit == "sample":
            batch_size, rate = choose_rate(self.training_samples, training.batch_size)
        return PrivacyBudget(
            own.epsilon,
            own.delta,
            num_steps=training.steps,
            clip=training.clip,
            unit=own.unit,
            batch_size=batch_size,
            sampling_rate=rate,
        )

    @property
    def step_size(self) -> float:
        """The step size for gradients that the plan divides by its own batch size."""
        planned = self.make_budget().batch_size
        scale = 1.0 if planned is None else planned / self.training.batch_size
        return self.training.step_size * scale

    def make_threat(self) -> ThreatModel:
        """Return the adversary: by default one curious site."""
        if self.promise.colluders is None:
            return DEFAULT_THREAT if len(self.sites) > 1 else EAVESDROPPER
        return ThreatModel(self.promise.colluders)

    def load_plan(self) -> Plan:
        """Return the plan beside the file, or raise unless it was made from this file."""
        plan, network = load_plan(self.plan_path), self.load_network()
        links = [set(map(frozenset, own.graph.edges)) for own in (plan.network, network)]
        is_same = {
            "promise and sampling": plan.budget == self.make_budget(),
            "colluders": plan.threat.max_colluders == self.make_threat().max_colluders,
            "graph": links[0] == links[1],
            "names of sites": plan.network.agent_names == network.agent_names,
        }
        differing = ", ".join(name for name, same in is_same.items() if not same)
        if differing:
            raise FileFormatError(
                f"{self.plan_path}: must be the plan of {self.path}, found another {differing}"
            )
        return plan

    def find_site(self, name: str) -> int:
        """Return the number of a site by its name or its number."""
        return look_up_agents(self.names, [name], argument=f"a site of {self.path}")[0]

    def make_workload(self, data: Path) -> FileWorkload:
        """Return the training problem on files, with ``{agent}`` or ``{site}`` in their path."""
        from corn.learn.file_data import FileWorkload

        test_data = self.training.test_data
        return FileWorkload(
            data=data,
            schema=self.data,
            model=self.training.model,
            test_data=None if test_data is None else self.path.parent / test_data,
            held_out=self.training.held_out,
            sites=tuple(self.names),
        )


def choose_rate(sizes: Sequence[float], batch_size: int) -> tuple[int, float]:
    """Return a batch size and one Poisson rate that agents with data of these sizes accept.

    At the rate B·n/Σm an agent of average size draws B samples. Batches are padded to what the
    largest draws, so that no message shows how many samples there were.
    """
    require(len(sizes) > 0 and min(sizes) > 0, "sizes", "positive numbers", list(sizes))
    rate = min(1.0, batch_size * len(sizes) / sum(sizes))
    return max(1, math.ceil(rate * max(sizes))), rate


def load_consortium(path: Path) -> Consortium:
    """Read and check a consortium file."""
    document = _read_document(path)
    tables = {name: document.pop(name, None) for name in ("data", "promise", "training", "sites")}
    listed = tables["sites"] if isinstance(tables["sites"], list) else []
    try:
        consortium = read_record(
            Consortium,
            document,
            "the file:",
            path=path,
            data=read_schema(tables["data"]),
            promise=read_record(Promise, tables["promise"], "[promise]"),
            training=read_record(Training, tables["training"], "[training]"),
            sites=tuple(
                read_record(Site, own, f"[[sites]] {k + 1}") for k, own in enumerate(listed)
            ),
        )
        require(len(listed) > 0, "[[sites]]", "one table for every site", "none")
        consortium.load_network()
        consortium.make_budget()
        consortium.make_threat()
    except CornError as error:
        raise FileFormatError(f"{path}: {make_printable(str(error), limit=300)}") from error
    return consortium


def _read_document(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise FileFormatError(f"{path}: has more than {_MAX_BYTES:,} bytes")
        return tomllib.loads(data.decode("utf-8-sig"))
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be read: {error.strerror}") from error
    # Errors of TOML and of UTF-8 are ValueErrors, and so is that of an integer with many digits.
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"{path}: not TOML: {error}") from error
