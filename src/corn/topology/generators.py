"""Graphs by name: generators, and specs such as ``er:n=20,p=0.2,seed=1`` or ``grid:4x5``.

Every generator takes numbers and returns agents 0 … n−1 and their links.
"""

from __future__ import annotations

import inspect
import math
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import networkx as nx

from corn.checks import require_count, require_in_range, require_positive
from corn.errors import CornWarning, InfeasibleError, InvalidArgumentError
from corn.parsing import MAX_DIGITS, quote
from corn.topology.files import SUFFIXES
from corn.topology.graphs import Graph

# Draws of a random graph before it is given up as never connected.
_MAX_TRIES = 1000
# Generating more takes networkx minutes and several GB.
_MOST_AGENTS = 200_000
_MOST_LINKS = 10**7
# Agents above which only the links that exist are drawn, not a number for every pair.
_MOST_DRAWN_BY_PAIRS = 5000


def erdos_renyi(n: int, p: float, seed: int = 0) -> Graph:
    """Return a graph in which each link exists with probability p; drawn again until connected.

    A ``CornWarning`` is given below p = ln(n)/n, where most draws are disconnected.
    """
    require_count("n", n)
    require_in_range("p", p, 0, 1)
    threshold = math.log(n) / n
    if p < threshold:
        warnings.warn(
            f"p={p:g} is below ln(n)/n = {threshold:.3g}, where a random graph of {n} agents is "
            "rarely connected; the graph drawn is not typical of this p",
            CornWarning,
            stacklevel=2,
        )
    draw = nx.gnp_random_graph if n <= _MOST_DRAWN_BY_PAIRS else nx.fast_gnp_random_graph
    return _draw_until_connected(
        lambda source: draw(n, p, seed=source),
        seed,
        f"an Erdős–Rényi graph with n={n}, p={p:g}",
        f"raise p above ln(n)/n = {threshold:.3g}",
    )


def ring(n: int) -> Graph:
    """Return a cycle of n ≥ 3 agents."""
    require_count("n", n, least=3)
    return nx.cycle_graph(n)


def path(n: int) -> Graph:
    """Return n agents in a line."""
    require_count("n", n)
    return nx.path_graph(n)


def star(n: int) -> Graph:
    """Return a star: agent 0 linked with n−1 others."""
    require_count("n", n)
    return nx.star_graph(n - 1)


def complete(n: int) -> Graph:
    """Return a graph in which every pair is linked."""
    require_count("n", n)
    return nx.complete_graph(n)


def grid(rows: int, columns: int) -> Graph:
    """Return a rectangle of rows × columns agents, each linked to those beside, above and below."""
    require_count("rows", rows)
    require_count("columns", columns)
    return nx.convert_node_labels_to_integers(nx.grid_2d_graph(rows, columns))


def torus(rows: int, columns: int) -> Graph:
    """Return a grid whose opposite sides are joined; at least 3 × 3, so that no link is doubled."""
    require_count("rows", rows, least=3)
    require_count("columns", columns, least=3)
    return nx.convert_node_labels_to_integers(nx.grid_2d_graph(rows, columns, periodic=True))


def hypercube(n: int) -> Graph:
    """Return a cube in k dimensions: n = 2^k agents, linked if their numbers differ in one bit."""
    if n < 1 or n & (n - 1):
        raise InvalidArgumentError(f"n must be a power of two for a hypercube, found {n}")
    graph: Graph = nx.empty_graph(n)
    graph.add_edges_from((i, i ^ (1 << bit)) for i in range(n) for bit in range(n.bit_length() - 1))
    return graph


def exponential(n: int) -> Graph:
    """Return a graph with agent i linked to i ± 1, i ± 2, i ± 4, … (mod n)."""
    return nx.Graph(directed_exponential(n))


def regular(n: int, degree: int, seed: int = 0) -> Graph:
    """Return a random graph in which all agents have one degree; drawn again until connected."""
    require_count("n", n)
    if not 0 <= degree < n or n * degree % 2:
        raise InvalidArgumentError(
            f"degree must be in [0, n) with n·degree even, found n={n}, degree={degree}"
        )
    return _draw_until_connected(
        lambda source: nx.random_regular_graph(degree, n, seed=source),
        seed,
        f"a regular graph with n={n}, degree={degree}",
        "raise degree to 2 or more",
    )


def small_world(n: int, degree: int, p: float, seed: int = 0) -> Graph:
    """Return a Watts–Strogatz graph: a ring lattice, each link rewired with probability p."""
    require_count("degree", degree, least=2)
    require_count("n", n, least=degree + 1)
    require_in_range("p", p, 0, 1)
    return _draw_until_connected(
        lambda source: nx.watts_strogatz_graph(n, degree, p, seed=source),
        seed,
        f"a small world with n={n}, degree={degree}, p={p:g}",
        "raise degree or lower p",
    )


def geometric(n: int, radius: float, seed: int = 0) -> Graph:
    """Return agents at random points of the unit square, linked if closer than ``radius``."""
    require_count("n", n)
    require_positive("radius", radius)
    return _draw_until_connected(
        lambda source: nx.random_geometric_graph(n, radius, seed=source),
        seed,
        f"a geometric graph with n={n}, radius={radius:g}",
        f"raise radius above {math.sqrt(math.log(n + 1) / (math.pi * n)):.3g}",
    )


def karate() -> Graph:
    """Return Zachary's karate club: 34 people linked if they met outside it, without weights."""
    # Without the weights that networkx has for it: a generated graph has links only.
    club = nx.karate_club_graph()
    graph: Graph = nx.empty_graph(club.number_of_nodes())
    graph.add_edges_from(club.edges())
    return graph


def directed_ring(n: int) -> Graph:
    """Return a directed cycle: agent i sends to i+1 (mod n)."""
    require_count("n", n, least=2)
    return nx.cycle_graph(n, create_using=nx.DiGraph)


def directed_exponential(n: int) -> Graph:
    """Return a directed graph in which agent i sends to i+1, i+2, i+4, … (mod n)."""
    require_count("n", n, least=2)
    graph: Graph = nx.empty_graph(n, create_using=nx.DiGraph)
    # Powers of two below n: a message reaches every agent in about log₂ n hops.
    hops = [1 << k for k in range((n - 1).bit_length())]
    graph.add_edges_from((i, (i + hop) % n) for i in range(n) for hop in hops)
    return graph


GENERATORS: dict[str, Callable[..., Graph]] = {
    "er": erdos_renyi,
    "ring": ring,
    "path": path,
    "star": star,
    "complete": complete,
    "grid": grid,
    "torus": torus,
    "hypercube": hypercube,
    "exponential": exponential,
    "regular": regular,
    "small-world": small_world,
    "geometric": geometric,
    "karate": karate,
    "directed-ring": directed_ring,
    "directed-exponential": directed_exponential,
}
"""The generators by their names in a graph spec, whose parameters are those of the function."""


@dataclass(frozen=True)
class GraphSpec:
    """The name of a generator and all its parameters; ``str`` returns an equivalent spec.

    >>> str(GraphSpec.parse("er:20,0.2"))
    'er:n=20,p=0.2,seed=0'
    >>> GraphSpec.parse("grid:4x5").build().number_of_nodes()
    20
    """

    kind: str
    parameters: tuple[tuple[str, int | float], ...] = ()

    @classmethod
    def parse(cls, text: str) -> GraphSpec:
        """Read ``kind``, ``kind:20``, ``kind:4x5`` or ``kind:name=value,…``.

        Values without a name are taken in the order of the generator's parameters.
        """
        kind, _, rest = text.strip().partition(":")
        if kind not in GENERATORS:
            raise InvalidArgumentError(
                f"unknown graph {text!r}: accepted are {', '.join(GENERATORS)} "
                f"(for example er:n=20,p=0.2,seed=1 or grid:4x5), or a file ({', '.join(SUFFIXES)})"
            )
        return cls(kind, _read_parameters(kind, rest))

    def build(self) -> Graph:
        """Return the graph; one that would take hours, or all memory, is refused beforehand."""
        # Before anything is built: networkx would take hours, or all memory, before it failed.
        num_agents, num_links = self._estimate_size()
        if num_agents > _MOST_AGENTS:
            raise InvalidArgumentError(
                f"{self}: a graph can have at most {_MOST_AGENTS:,} agents, found {num_agents:,.0f}"
            )
        if num_links > _MOST_LINKS:
            raise InvalidArgumentError(
                f"{self}: a graph can have at most {_MOST_LINKS:,} links, found about "
                f"{num_links:.3g}: choose fewer agents or fewer links per agent"
            )
        return GENERATORS[self.kind](**dict(self.parameters))

    def _estimate_size(self) -> tuple[float, float]:
        """Return approximate numbers of agents and links, from the parameters alone."""
        given = dict(self.parameters)
        n = float(given.get("n", given.get("rows", 1) * given.get("columns", 1)))
        # The expected share of all pairs that are linked; sparse kinds count by their degree.
        share = {"er": given.get("p", 0.0), "complete": 1.0}.get(self.kind, 0.0)
        if self.kind == "geometric":
            # Bounded first, as the square of a large number overflows.
            share = min(1.0, math.pi * min(abs(given["radius"]), 1.0) ** 2)
        return n, share * n * n / 2 + n * float(given.get("degree", 2)) / 2

    def __str__(self) -> str:
        values = ",".join(f"{name}={value}" for name, value in self.parameters)
        return f"{self.kind}:{values}" if values else self.kind


def describe_kind(kind: str) -> str:
    """Return the parameters of a kind of graph in the form of a spec: ``er:n=…,p=…,seed=0``."""
    parts = [
        f"{p.name}={'…' if p.default is p.empty else p.default}" for p in _parameters(kind).values()
    ]
    return f"{kind}:{','.join(parts)}" if parts else kind


def _draw_until_connected(
    draw: Callable[[random.Random], Graph], seed: int, what: str, advice: str
) -> Graph:
    # One generator for all tries: the first draw equals networkx's own for this seed.
    source = random.Random(seed)
    for _ in range(_MAX_TRIES):
        graph = draw(source)
        if nx.is_connected(graph):
            return graph
    raise InfeasibleError(f"{what} was disconnected in {_MAX_TRIES} draws: {advice}")


def _parameters(kind: str) -> dict[str, inspect.Parameter]:
    # The functions' signatures are the syntax of specs, so a new generator needs no parser.
    return dict(inspect.signature(GENERATORS[kind], eval_str=True).parameters)


def _read_parameters(kind: str, text: str) -> tuple[tuple[str, int | float], ...]:
    expected = _parameters(kind)
    # Only a grid's size is written 4x5; its two numbers are then two unnamed values.
    fields = (text.replace("x", ",") if "rows" in expected else text).split(",") if text else []
    unnamed = iter(expected)
    found: dict[str, int | float] = {}
    for field in fields:
        name, equals, value = field.partition("=")
        if not equals:
            name = next(unnamed, "")
            value = field
        name = name.strip()
        if name not in expected or name in found:
            raise InvalidArgumentError(
                f"bad graph {kind}:{text}: cannot place {field!r}; "
                f"accepted is {describe_kind(kind)}"
            )
        found[name] = _read_number(value, expected[name].annotation, f"{kind}:{text}", name)
    missing = [n for n, p in expected.items() if n not in found and p.default is p.empty]
    if missing:
        raise InvalidArgumentError(
            f"bad graph {kind}{':' if text else ''}{text}: {', '.join(missing)} missing; "
            f"accepted is {describe_kind(kind)}"
        )
    return tuple((name, found.get(name, p.default)) for name, p in expected.items())


def _read_number(text: str, kind: type[int] | type[float], spec: str, name: str) -> int | float:
    # Longer ones overflow when they become floats.
    if kind is int and len(text) > MAX_DIGITS:
        raise InvalidArgumentError(
            f"bad graph {quote(spec)}: {name} must have at most {MAX_DIGITS} digits, found "
            f"{quote(text)}"
        )
    try:
        return kind(text)
    except ValueError as error:
        what = "a whole number" if kind is int else "a number"
        raise InvalidArgumentError(
            f"bad graph {spec}: {name} must be {what}, found {text!r}"
        ) from error
