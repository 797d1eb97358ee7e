"""Graph specs: one line of text for a graph, such as ``er:n=20,p=0.2,seed=1`` or ``grid:4x5``."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass

from corn.errors import InvalidArgumentError
from corn.topology.files import SUFFIXES
from corn.topology.generators import GENERATORS
from corn.topology.graphs import Graph
from corn.topology.mixing import MAX_AGENTS

_MOST_LINKS = 10**7


@dataclass(frozen=True)
class GraphSpec:
    """The name of a generator and all its parameters; ``str`` gives the spec that reads the same.

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
        """Generate the graph; one that would take hours, or all memory, is refused beforehand."""
        num_agents, num_links = self._estimate_size()
        if num_agents > MAX_AGENTS:
            raise InvalidArgumentError(
                f"{self}: a graph can have at most {MAX_AGENTS:,} agents, found "
                f"{num_agents:,.0f}: its mixing matrix would take {num_agents**2 * 8e-9:.3g} GB"
            )
        if num_links > _MOST_LINKS:
            raise InvalidArgumentError(
                f"{self}: a graph can have at most {_MOST_LINKS:,} links, found about "
                f"{num_links:.3g}: choose fewer agents or fewer links for each"
            )
        return GENERATORS[self.kind](**dict(self.parameters))

    def _estimate_size(self) -> tuple[float, float]:
        """Return the numbers of agents and links, roughly, from the parameters alone."""
        given = dict(self.parameters)
        n = float(given.get("n", given.get("rows", 1) * given.get("columns", 1)))
        if "clique" in given:
            clique = float(given["clique"])
            return 2 * clique + given["bridge"], clique * clique
        share = {"er": given.get("p", 0.0), "complete": 1.0}.get(self.kind, 0.0)
        if self.kind == "geometric":
            share = min(1.0, math.pi * float(given["radius"]) ** 2)
        return n, share * n * n / 2 + n * float(given.get("degree", 2)) / 2

    def __str__(self) -> str:
        values = ",".join(f"{name}={value}" for name, value in self.parameters)
        return f"{self.kind}:{values}" if values else self.kind


def describe_kind(kind: str) -> str:
    """The parameters of a kind of graph, as a spec would have them: ``er:n=…,p=…,seed=0``."""
    parts = [
        f"{p.name}={'…' if p.default is p.empty else p.default}" for p in _parameters(kind).values()
    ]
    return f"{kind}:{','.join(parts)}" if parts else kind


def _parameters(kind: str) -> dict[str, inspect.Parameter]:
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
            name, value = next(unnamed, ""), field
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
    try:
        return kind(text)
    except ValueError as error:
        what = "a whole number" if kind is int else "a number"
        raise InvalidArgumentError(
            f"bad graph {spec}: {name} must be {what}, found {text!r}"
        ) from error
