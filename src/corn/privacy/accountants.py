"""The three ways to count privacy, by name: each turns any two of (μ, ε, δ) into the third."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from corn.errors import InvalidArgumentError
from corn.privacy import gaussian, paper, renyi

Accounting: TypeAlias = Literal["gdp", "rdp", "paper"]


@dataclass(frozen=True)
class Accountant:
    """Three functions that agree with each other, and what to call them.

    ``mu_from`` rounds down, so that ``epsilon_from(mu_from(ε, δ), δ)`` is never above ε.
    """

    description: str
    delta_from: Callable[[float, float], float]
    epsilon_from: Callable[[float, float], float]
    mu_from: Callable[[float, float], float]


ACCOUNTANTS: dict[Accounting, Accountant] = {
    "gdp": Accountant(
        "exact Gaussian DP", gaussian.delta_from, gaussian.epsilon_from, gaussian.mu_from
    ),
    "rdp": Accountant("Rényi DP, Theorem 2", renyi.delta_from, renyi.epsilon_from, renyi.mu_from),
    "paper": Accountant(
        "the paper's eq. (13b)", paper.delta_from, paper.epsilon_from, paper.mu_from
    ),
}
"""``gdp`` is exact, ``rdp`` a bound above it, ``paper`` a looser one that is not always proved."""


def find_accountant(accounting: Accounting) -> Accountant:
    """Return the accountant of that name."""
    if accounting not in ACCOUNTANTS:
        names = ", ".join(repr(name) for name in ACCOUNTANTS)
        raise InvalidArgumentError(f"accounting must be one of {names}, found {accounting!r}")
    return ACCOUNTANTS[accounting]
