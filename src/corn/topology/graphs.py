"""Graphs of agents: specs such as ``er:n=20,p=0.2`` or ``grid:4x5``, checks, spanning trees."""

from __future__ import annotations

import csv
import math
import random
import re
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from numbers import Integral
from typing import Any, TypeAlias, TypeVar

import networkx as nx

from corn.checks import require, require_count, require_in_range, require_length
from corn.errors import (
    CornWarning,
    InfeasibleError,
    InvalidArgumentError,
    list_some,
    make_printable,
)
from corn.parsing import MAX_DIGITS, quote
from corn.topology.files import SUFFIXES

Graph: TypeAlias = nx.Graph
"""Agents 0 … n−1 and the undirected links between them."""

_Item = TypeVar("_Item")

_LONGEST_NAME = 100
_SEARCHES = 20  # for the centre of a graph


def check_graph(graph: nx.Graph) -> Graph:
    """Return a copy of ``graph`` with agents 0 … n−1, or raise if agents cannot learn on it.

    Integer labels must be 0 … n−1 already. Other labels are numbered in the order of the graph and
    kept as the node attribute ``name``, see ``check_names``. Edge weights are not used.
    """
    nodes = list(graph.nodes)
    require(len(nodes) > 0, "the graph", "of at least one agent", "none")
    advice = "agents send messages both ways"
    require(not graph.is_directed(), "the graph", "undirected", "directed links", advice=advice)
    loops = list_some(sorted(str(node) for node in nx.nodes_with_selfloops(graph)))
    advice = "the mixing weights decide what an agent keeps for itself"
    require(not loops, "the graph", "without self-loops", f"one at {loops}", advice=advice)
    # NumPy's integers too: numbers that are taken for names would be given out in another order.
    if all(isinstance(node, Integral) for node in nodes):
        # Gaps are refused, not closed: agent 7 of the file must be agent 7 of the run, its keys and
        # its data.
        missing = list_some(sorted(set(range(len(nodes))) - set(nodes)))
        rule, advice = f"numbered 0 … {len(nodes) - 1}", "number them without gaps, or use names"
        require(not missing, "agents", rule, f"no {missing}", advice=advice)
        number_of = {node: int(node) for node in nodes}
        given = {int(node): name for node, name in graph.nodes(data="name") if name is not None}
    else:
        number_of = {node: agent for agent, node in enumerate(nodes)}
        given = dict(enumerate(nodes))
    numbered: Graph = nx.empty_graph(len(nodes))
    numbered.add_edges_from((number_of[u], number_of[v]) for u, v in graph.edges())
    # A name that is the agent's number would be wrong when survivors are numbered anew.
    names = {agent: name for agent, name in check_names(given).items() if name != str(agent)}
    nx.set_node_attributes(numbered, names, "name")
    if not nx.is_connected(numbered):
        # The smallest part is the most likely mistake: an agent without a link, and not the rest.
        smallest = min((sorted(part) for part in nx.connected_components(numbered)), key=len)
        cut_off = list_some(name_of(numbered, agent) for agent in smallest)
        raise InfeasibleError(
            f"the graph must be connected, found a part cut off from the rest: {cut_off}; "
            "add links, or train each part separately"
        )
    return numbered


def name_of(graph: Graph, agent: int) -> str:
    """Return the name that an agent has in the graph's file, or its number."""
    return str(graph.nodes[agent].get("name", agent))


def check_names(names: Mapping[int, object]) -> dict[int, str]:
    """Return the names of agents as text, or raise if one could be taken for another.

    A name is one line of at most 100 printable characters. No two agents have the same one, and one
    that is a number must be the agent's own: so an agent can be called by either.
    """
    checked: dict[int, str] = {}
    owners: dict[str, int] = {}
    for agent, given in names.items():
        name = _normalise(str(given))
        whose = f"the name of agent {agent}"
        shown = make_printable(name, limit=_LONGEST_NAME)
        rule = f"one line of 1 to {_LONGEST_NAME} printable characters"
        require(bool(name) and name == shown, whose, rule, repr(shown))
        is_own = not name.isdecimal() or name == str(agent)
        advice = "number all agents from 0, or add a letter to the name"
        require(is_own, whose, "no number but its own", repr(name), advice=advice)
        first = owners.setdefault(name, agent)
        require(first == agent, whose, f"another than that of agent {first}", repr(name))
        checked[agent] = name
    return checked


def look_up_agents(
    names: Sequence[str], given: str | Iterable[object], *, argument: str = "agent"
) -> list[int]:
    """Return the numbers of agents, each given by its name or its number, each of them once.

    In a text they are separated by commas, and a name with a comma is in double quotes.

    >>> look_up_agents(["north", "Hill, south", "2"], '2, "Hill, south"')
    [2, 1]
    """
    if isinstance(given, str):
        # Names have printable characters only, and the reader accepts one line only.
        rule = "one line of agents with commas between them"
        require(given.isprintable(), argument, rule, quote(given))
        given = next(csv.reader([given], skipinitialspace=True), [])
    places = {_normalise(name): agent for agent, name in enumerate(names)}
    # A name that is a number is the agent's own.
    places |= {str(agent): agent for agent in range(len(names))}
    named = [name for name in names if not name.isdecimal()]
    rule = f"{'a name or ' if named else ''}a number of an agent, 0 … {len(names) - 1}"
    advice = f"names are {list_some(named)}" if named else ""
    found: dict[int, object] = {}
    for one in given:
        text = _normalise(str(one)).strip()
        require(text in places, argument, rule, quote(text), advice=advice)
        agent = places[text]
        is_new = agent not in found
        twice = f"{found.setdefault(agent, one)!r} and {one!r}"
        require(is_new, argument, "a different agent each time", twice)
    return list(found)


def list_by_agent(
    names: Sequence[str], given: Sequence[_Item] | Mapping[Any, _Item], *, argument: str
) -> list[_Item]:
    """Return one item for each agent, in their order, of a list or of a mapping from labels."""
    if not isinstance(given, Mapping):
        require_length(argument, len(given), len(names), per="agent")
        return list(given)
    owners = look_up_agents(names, given, argument=f"a key of {argument}")
    items = dict(zip(owners, given.values(), strict=True))
    missing = list_some(label_agent(names, i) for i in range(len(names)) if i not in items)
    if missing:
        raise InvalidArgumentError(
            f"{argument} must have a key for every agent, found none for agent {missing}"
        )
    return [items[agent] for agent in range(len(names))]


def label_agent(names: Sequence[str], agent: int) -> str:
    """Return the number of an agent, and its name in brackets if it has one."""
    number = str(agent)
    name = names[agent] if agent < len(names) else number
    return number if name == number else f"{number} ({name})"


def add_names(text: str, names: Sequence[str]) -> str:
    """Return a text with the name of each agent after its number.

    Errors and notes have numbers where they are made. Who shows them to people adds the names.

    >>> add_names("agents 0, 2: agent 1 is lost", ["north", "south", "2"])
    'agents 0 (north), 2: agent 1 (south) is lost'
    """

    def label(found: re.Match[str]) -> str:
        return found[1] + ", ".join(label_agent(names, int(k)) for k in found[2].split(", "))

    # Not those that have a name already.
    numbers = r"\d{1,9}(?!\d| \()"
    return re.sub(rf"\b(agents? )({numbers}(?:, {numbers})*)", label, text)


def _normalise(name: str) -> str:
    # Composed: terminals and file systems differ in how they write é, and people cannot see it.
    return unicodedata.normalize("NFC", name)


@dataclass(frozen=True)
class SpanningTree:
    """A tree on the links that reaches every agent; ``parents`` are next towards the root.

    The root, which has the whole sum first, is its own parent.
    """

    root: int
    parents: dict[int, int]

    @cached_property
    def children(self) -> dict[int, tuple[int, ...]]:
        """The agents whose parent an agent is, in increasing order."""
        found: dict[int, list[int]] = {agent: [] for agent in self.parents}
        for agent, parent in sorted(self.parents.items()):
            if agent != self.root:
                found[parent].append(agent)
        return {agent: tuple(own) for agent, own in found.items()}

    @cached_property
    def depth(self) -> int:
        """The number of hops from the farthest agent to the root."""
        tree = nx.from_edgelist(self.parents.items())
        hops = nx.single_source_shortest_path_length(tree, self.root)
        return int(max(hops.values()))

    def rename(self, names: Sequence[int]) -> SpanningTree:
        """Return the tree with ``names[k]`` in the place of agent k."""
        parents = {names[agent]: names[parent] for agent, parent in self.parents.items()}
        return SpanningTree(names[self.root], parents)

    @property
    def num_messages(self) -> int:
        """The number of messages per step: one up and one down each link of the tree."""
        return 2 * (len(self.parents) - 1)


def find_tree(graph: Graph) -> SpanningTree:
    """Return a tree of shortest paths to a central agent, the same for everybody."""
    root = _find_centre(graph)
    hops = nx.single_source_shortest_path_length(graph, root)
    # The parent with the lowest number: the order of a graph's links must not matter.
    nearer = {agent: [j for j in graph[agent] if hops[j] < hops[agent]] for agent in sorted(graph)}
    return SpanningTree(root, {agent: min(found, default=root) for agent, found in nearer.items()})


def _find_centre(graph: Graph) -> int:
    """Return an agent from which the farthest one is as near as a few searches show.

    Each begins at the agent that is farthest from the best candidate so far.
    """
    farthest: dict[int, int] = dict.fromkeys(graph, 0)
    best = candidate = min(graph)
    fewest = len(graph)
    for _ in range(_SEARCHES):
        hops = nx.single_source_shortest_path_length(graph, candidate)
        most = max(hops.values())
        if most < fewest:
            best = candidate
            fewest = most
        far = min(agent for agent in graph if hops[agent] == most)
        for agent, distance in nx.single_source_shortest_path_length(graph, far).items():
            farthest[agent] = max(farthest[agent], distance)
        candidate = min(graph, key=lambda agent: (farthest[agent], agent))
        # No agent can be better than its distance to those that were tried.
        if farthest[candidate] >= fewest:
            break
    return int(best)


def opens_link(agent: int, peer: int, accepts: Sequence[bool]) -> bool:
    """Return whether an agent connects to its neighbour, and not the neighbour to it.

    The end that accepts is connected to. If both do, the higher number connects to the lower one.
    """
    if not (accepts[agent] or accepts[peer]):
        _refuse([(agent, peer)])
    return agent > peer if accepts[agent] and accepts[peer] else accepts[peer]


def list_connections(graph: Graph, accepts: Sequence[bool]) -> list[tuple[int, int]]:
    """Return (connecting, accepting) agents of each link; raise for all where neither accepts."""
    links = sorted({(min(link), max(link)) for link in graph.edges})
    closed = [link for link in links if not any(accepts[end] for end in link)]
    if closed:
        _refuse(closed)
    return sorted((b, a) if opens_link(b, a, accepts) else (a, b) for a, b in links)


def _refuse(links: Sequence[tuple[int, int]]) -> None:
    named = ", ".join(f"{a}–{b}" for a, b in links)
    raise InfeasibleError(
        f"one end of each link must accept connections, found none at the links {named}: let one "
        "of the two agents accept in the roster, choose a graph without these links, or run under "
        "a server of Flower or NVIDIA FLARE, to which all agents connect outward"
    )


# Draws of a random graph before it is given up as never connected.
_MAX_TRIES = 1000
# Generating more takes networkx minutes and several GB.
_MOST_AGENTS = 200_000
_MOST_LINKS = 10**7
# Agents above which only the links that exist are drawn, not a number for every pair.
_MOST_DRAWN_BY_PAIRS = 5000


def erdos_renyi(n: int, p: float, seed: int) -> Graph:
    """Return a graph in which each link exists with probability p; drawn again until connected.

    A ``CornWarning`` is given below p = ln(n)/n, where most draws are disconnected.
    """
    require_in_range("p", p, 0, 1)
    threshold = math.log(n) / n
    if p < threshold:
        warnings.warn(
            f"p={p:g} is below ln(n)/n = {threshold:.3g}, where a random graph of {n} agents is "
            "rarely connected; the graph drawn is not typical of this p",
            CornWarning,
            stacklevel=2,
        )
    generate = nx.gnp_random_graph if n <= _MOST_DRAWN_BY_PAIRS else nx.fast_gnp_random_graph
    advice = f"raise p above ln(n)/n = {threshold:.3g}"
    return _draw_until_connected(partial(generate, n, p), seed, advice)


def grid(rows: int, columns: int, *, periodic: bool = False) -> Graph:
    """Return a rectangle of linked agents; with ``periodic`` opposite sides are joined."""
    return nx.convert_node_labels_to_integers(nx.grid_2d_graph(rows, columns, periodic=periodic))


def hypercube(n: int) -> Graph:
    """Return a cube in k dimensions: n = 2^k agents, linked if their numbers differ in one bit."""
    require(n & (n - 1) == 0, "n", "a power of two for a hypercube", n)
    graph: Graph = nx.empty_graph(n)
    graph.add_edges_from((i, i ^ (1 << bit)) for i in range(n) for bit in range(n.bit_length() - 1))
    return graph


def exponential(n: int) -> Graph:
    """Return a graph with agent i linked to i ± 1, i ± 2, i ± 4, … (mod n)."""
    graph: Graph = nx.empty_graph(n)
    # Powers of two below n: a message reaches every agent in about log₂ n hops.
    hops = [1 << k for k in range((n - 1).bit_length())]
    graph.add_edges_from((i, (i + hop) % n) for i in range(n) for hop in hops)
    return graph


def regular(n: int, degree: int, seed: int) -> Graph:
    """Return a random graph in which all agents have one degree; drawn again until connected."""
    is_possible = 0 <= degree < n and n * degree % 2 == 0
    require(is_possible, "degree", "in [0, n) with n·degree even", f"n={n}, degree={degree}")
    draw = partial(nx.random_regular_graph, degree, n)
    return _draw_until_connected(draw, seed, "raise degree to 2 or more")


def _draw_until_connected(draw: Callable[..., Graph], seed: int, advice: str) -> Graph:
    # One generator for all tries: the first draw equals networkx's own for this seed.
    source = random.Random(seed)
    for _ in range(_MAX_TRIES):
        graph = draw(seed=source)
        if nx.is_connected(graph):
            return graph
    raise InfeasibleError(f"the random graph was disconnected in {_MAX_TRIES} draws: {advice}")


GENERATORS: dict[str, tuple[str, Callable[..., Graph]]] = {
    "er": ("n p seed", erdos_renyi),
    "ring": ("n", nx.cycle_graph),
    "path": ("n", nx.path_graph),
    "star": ("n", lambda n: nx.star_graph(n - 1)),
    "complete": ("n", nx.complete_graph),
    "grid": ("rows columns", grid),
    "torus": ("rows columns", partial(grid, periodic=True)),
    "hypercube": ("n", hypercube),
    "exponential": ("n", exponential),
    "regular": ("n degree seed", regular),
}
"""Names in a graph spec, with parameters: whole numbers but for ``p``; ``seed`` is 0 if missing."""

# Of agents in a row: fewer would link two agents twice, or an agent to itself.
_LEAST = {"ring": 3, "torus": 3, "exponential": 2}


@dataclass(frozen=True)
class GraphSpec:
    """The name of a generator and all its parameters; ``str`` returns an equivalent spec.

    >>> str(GraphSpec.parse("er:20,0.2")), str(GraphSpec.parse("grid:4x5"))
    ('er:n=20,p=0.2,seed=0', 'grid:rows=4,columns=5')
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
        given = dict(self.parameters)
        sizes = [name for name in ("n", "rows", "columns") if name in given]
        for name in sizes:
            require_count(name, given[name], least=_LEAST.get(self.kind, 1))
        n = math.prod(int(given[name]) for name in sizes)
        # The expected share of all pairs that are linked; sparse kinds count by their degree.
        share = {"er": given.get("p", 0.0), "complete": 1.0}.get(self.kind, 0.0)
        num_links = share * n * n / 2 + n * given.get("degree", 2) / 2
        if n > _MOST_AGENTS or num_links > _MOST_LINKS:
            raise InvalidArgumentError(
                f"{self}: a graph can have at most {_MOST_AGENTS:,} agents and {_MOST_LINKS:,} "
                f"links, found {n:,} agents and about {num_links:.3g} links"
            )
        return GENERATORS[self.kind][1](*given.values())

    def __str__(self) -> str:
        values = ",".join(f"{name}={value}" for name, value in self.parameters)
        return f"{self.kind}:{values}" if values else self.kind


def _read_parameters(kind: str, text: str) -> tuple[tuple[str, int | float], ...]:
    expected = GENERATORS[kind][0].split()
    # Only a grid's size is written 4x5; its two numbers are then two unnamed values.
    fields = (text.replace("x", ",") if "rows" in expected else text).split(",") if text else []
    unnamed = iter(expected)
    found: dict[str, int | float] = {}
    for field in fields:
        name, equals, value = field.partition("=")
        if not equals:
            name, value = next(unnamed, ""), field
        name = name.strip()
        if name not in expected or name in found:
            raise _bad_spec(kind, text, f"cannot place {field!r}")
        what = "a number" if name == "p" else "a whole number"
        try:
            found[name] = float(value) if name == "p" else int(value)
        except ValueError as error:
            raise _bad_spec(kind, text, f"{name} must be {what}, found {value!r}") from error
        # Longer ones overflow when they become floats.
        if name != "p" and len(value) > MAX_DIGITS:
            raise _bad_spec(kind, text, f"{name} must have at most {MAX_DIGITS} digits")
    missing = [name for name in expected if name not in found and name != "seed"]
    if missing:
        raise _bad_spec(kind, text, f"{', '.join(missing)} missing")
    return tuple((name, found.get(name, 0)) for name in expected)


def _bad_spec(kind: str, text: str, why: str) -> InvalidArgumentError:
    usual = [f"{name}={0 if name == 'seed' else '…'}" for name in GENERATORS[kind][0].split()]
    return InvalidArgumentError(
        f"bad graph {quote(f'{kind}:{text}')}: {why}; accepted is {kind}:{','.join(usual)}"
    )
