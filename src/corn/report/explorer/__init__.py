"""The explorer: one page in which a browser designs noise and shows what insiders learn.

The scripts beside this module are the page's sources. Those of ``CORE`` compute, without a browser;
a test compares their numbers with those of this package. Those of ``VIEW`` draw.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources

import jinja2
import numpy as np

from corn.errors import InvalidArgumentError
from corn.report.plots import place_agents
from corn.topology import Network, load_network
from corn.version import __version__

CORE = (
    "gaussian",
    "matrices",
    "networks",
    "designs",
    "minimise",
    "insiders",
    "sampling",
    "promises",
    "exports",
    "tasks",
)
VIEW = ("workers", "drawing", "settings", "outputs", "page")
MOST_AGENTS = 40
"""The most agents for which a browser designs noise against an insider in seconds."""

GRAPHS = (
    "er:n=20,p=0.2,seed=1",
    "ring:8",
    "ring:20",
    "path:6",
    "star:8",
    "complete:6",
    "grid:4x5",
    "torus:4x5",
    "hypercube:16",
    "small-world:n=16,degree=4,p=0.2,seed=1",
    "barbell:clique=6,bridge=2",
    "er:n=12,p=0.4,seed=1",
    "karate",
    "er:n=40,p=0.15,seed=1",
)
"""The graphs to choose from; the first one is shown unless another one is given."""

_MARGIN = 7.0  # of a picture 100 wide, for agents and their names


def write_page(network: Network | None = None) -> str:
    """Return the page as HTML; it shows ``network`` first, of at most 40 agents."""
    graphs = [_describe(load_network(spec)) for spec in GRAPHS]
    if network is not None:
        _check(network)
        graphs.insert(0, _describe(network))
    # Agents' and files' names could otherwise end the script element.
    data = json.dumps(graphs, ensure_ascii=True).replace("<", "\\u003c")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(_read("page.html")).render(
        style=_read("style.css"),
        graphs=data,
        core=read_scripts(CORE),
        view=read_scripts(VIEW),
        version=__version__,
    )


def read_scripts(names: Sequence[str]) -> str:
    """Return the sources of scripts, one after the other."""
    return "\n".join(_read(f"{name}.js") for name in names)


def _read(name: str) -> str:
    return resources.files("corn.report.explorer").joinpath(name).read_text("utf-8")


def _check(network: Network) -> None:
    n = network.num_agents
    if not 2 <= n <= MOST_AGENTS:
        raise InvalidArgumentError(
            f"{network.source}: the explorer is for 2 to {MOST_AGENTS} agents, found {n}: corn "
            "compare is for larger networks"
        )
    # The scripts compute Metropolis weights from links, and know no others.
    if network.graph.is_directed() or network.weights != "metropolis":
        raise InvalidArgumentError(
            f"{network.source}: the explorer is for links in both directions with Metropolis "
            f"weights, found {network.weights} weights: corn compare takes any"
        )


def _describe(network: Network) -> dict[str, object]:
    """Return the links of a network and places for its agents in a square of 100 × 100."""
    places = place_agents(network.graph)
    found = np.array([places[agent] for agent in range(network.num_agents)], dtype=np.float64)
    found -= found.min(axis=0)
    # A path may have no height: its agents lie in the middle, not at 0/0.
    span = np.where(found.max(axis=0) > 0, found.max(axis=0), 1.0)
    centred = np.where(found.max(axis=0) > 1e-9, found / span, 0.5)
    scaled = _MARGIN + centred * (100 - 2 * _MARGIN)
    return {
        "source": network.source,
        "links": sorted([int(min(link)), int(max(link))] for link in network.graph.edges),
        "places": scaled.round(1).tolist(),
    }
