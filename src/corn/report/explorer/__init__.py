"""The explorer: one page that shows in a browser how much noise agents need, and at what cost.

The scripts beside this module are the page's sources. Those of ``CORE`` compute, without a browser;
a test compares their numbers with those of this package. Those of ``VIEW`` draw.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources

import jinja2

from corn.errors import InvalidArgumentError
from corn.topology import Network
from corn.version import __version__

CORE = ("gaussian", "sums", "gossip")
VIEW = ("drawing", "page")
MOST_AGENTS = 1000
"""The most agents that the page draws."""


def write_page(network: Network | None = None) -> str:
    """Return the page as HTML; it shows ``network`` first, of 3 to 1000 agents."""
    given = None
    if network is not None:
        n = network.num_agents
        if not 3 <= n <= MOST_AGENTS:
            raise InvalidArgumentError(
                f"{network.source}: the explorer is for 3 to {MOST_AGENTS} agents, found {n}: corn "
                "compare is for other networks"
            )
        given = {"source": network.source, "agents": n}
    # Names of files could otherwise end the script element.
    data = json.dumps(given, ensure_ascii=True).replace("<", "\\u003c")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(_read("page.html")).render(
        style=_read("style.css"),
        given=data,
        core=read_scripts(CORE),
        view=read_scripts(VIEW),
        version=__version__,
    )


def read_scripts(names: Sequence[str]) -> str:
    """Return the sources of scripts, one after the other."""
    return "\n".join(_read(f"{name}.js") for name in names)


def _read(name: str) -> str:
    return resources.files("corn.report.explorer").joinpath(name).read_text("utf-8")
