"""Options that list numbers: one value for all agents or one for each, or several to try."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias, TypeVar

import typer

from corn.errors import InvalidArgumentError
from corn.privacy.budget import read_promises
from corn.privacy.rounding import write_exactly
from corn.topology import Network, name_of

PerAgent: TypeAlias = float | tuple[float, ...]
Given = TypeVar("Given")

_TABLE_SUFFIX = ".csv"


def normalise_epsilon(text: str | None) -> str | None:
    """Return the canonical text of ε, or raise before any work."""
    if text is None or _is_table(text):
        return text
    return _normalise_numbers(text, also=f", or a {_TABLE_SUFFIX} file with a line for each agent")


def normalise_delta(text: str) -> str:
    """Return the canonical text of δ, or raise before any work."""
    return _normalise_numbers(text)


def parse_per_agent(text: str) -> PerAgent:
    """Return the number for all agents, or the numbers of each.

    >>> parse_per_agent("10"), parse_per_agent("1,8")
    (10.0, (1.0, 8.0))
    """
    numbers = tuple(float(part) for part in text.split(","))
    return numbers if "," in text else numbers[0]


def format_per_agent(value: PerAgent) -> str:
    """Return the text that ``parse_per_agent`` reads as this value.

    >>> format_per_agent((1.0, 0.1)), format_per_agent(1e-5)
    ('1,0.1', '1e-05')
    """
    numbers = value if isinstance(value, tuple) else (value,)
    return ",".join(map(write_exactly, numbers))


def find_promises(epsilon: str, delta: str, network: Network | None) -> tuple[PerAgent, PerAgent]:
    """Return ε and δ of the options; a table gives both, by the names of agents, or ε alone."""
    count = None if network is None else network.num_agents
    if not _is_table(epsilon):
        epsilons = require_one_each("--epsilon", parse_per_agent(epsilon), count)
        return epsilons, require_one_each("--delta", parse_per_agent(delta), count)
    names = None if network is None else list_names(network)
    epsilons, deltas = read_promises(Path(epsilon), names)
    return epsilons, parse_per_agent(delta) if deltas is None else deltas


def require_one_each(option: str, values: Given, num_agents: int | None) -> Given:
    """Return the values of an option if they are one for all agents, or one for each.

    >>> require_one_each("--epsilon", (1.0, 8.0), 3)
    Traceback (most recent call last):
    ...
    corn.errors.InvalidArgumentError: --epsilon must be one number, or 3 for 3 agents, found 2
    """
    if isinstance(values, tuple) and num_agents is not None and len(values) != num_agents:
        raise InvalidArgumentError(
            f"{option} must be one number, or {num_agents} for {num_agents} agents, "
            f"found {len(values)}"
        )
    return values


def list_names(network: Network) -> Sequence[str]:
    """Return the name of each agent in the file of its graph, or its number."""
    return [name_of(network.graph, agent) for agent in range(network.num_agents)]


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


def parse_samples(text: str | None) -> int | tuple[int, ...] | None:
    """Return the number of samples of an agent, or of each agent, or None if not given.

    >>> parse_samples("2800"), parse_samples("2800,1400")
    (2800, (2800, 1400))
    """
    if text is None:
        return None
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise InvalidArgumentError(
            "--samples-per-agent must be a whole number, or one for each agent separated by "
            f"commas, found {text!r}: try 2800"
        ) from error
    return counts if "," in text else counts[0]


def _is_table(text: str) -> bool:
    # A name that ends in .csv is meant as a file even if it is missing, so that the error says so.
    return Path(text).suffix == _TABLE_SUFFIX or Path(text).is_file()


def _normalise_numbers(text: str, *, also: str = "") -> str:
    try:
        return format_per_agent(parse_per_agent(text))
    except ValueError as error:
        raise typer.BadParameter(
            f"must be a number, or one for each agent separated by commas{also}, found {text!r}"
        ) from error
