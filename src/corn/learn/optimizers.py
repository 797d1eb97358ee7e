"""Optimizers of torch on the averaged release, as with a trusted server: for exact sums.

The average is public, and the same at all agents, so that whatever an optimizer makes of it and of
earlier averages is post-processing, and the same everywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from corn.checks import require
from corn.errors import InvalidArgumentError
from corn.topology import Network

OptimizerFactory: TypeAlias = Callable[[list[nn.Parameter]], Optimizer]
"""(parameters) → an optimizer of torch, such as ``torch.optim.Adam``."""

OptimizerName: TypeAlias = Literal["sgd", "adam", "adamw"]

NAMED_OPTIMIZERS: dict[OptimizerName, OptimizerFactory | None] = {
    "sgd": None,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
"""Optimizers by name; None is the step of Algorithm 1, with its own momentum."""


# int() raises for thousands of digits.
_MAX_DIGITS = 10


@final
class RunOptimizers:
    """One optimizer for each run of a sweep, each on the parameters of its model as one vector.

    Args:
        factory: makes an optimizer; step sizes of the sweep replace its learning rate.
        parameters: the models, shape (seeds, 1, trials, d).
    """

    def __init__(self, factory: OptimizerFactory, parameters: Tensor) -> None:
        seeds, _, trials, _ = parameters.shape
        self._runs = [
            (seed, trial, *_make_one(factory, parameters[seed, 0, trial]))
            for seed, trial in itertools.product(range(seeds), range(trials))
        ]

    def step(
        self, parameters: Tensor, released: Tensor, step_sizes: Sequence[float], alive: Tensor
    ) -> Tensor:
        """Return all models after a step along the averaged releases, of the runs that continue.

        Args:
            parameters: shape (seeds, 1, trials, d).
            released: of the same shape.
            step_sizes: of each trial.
            alive: shape (seeds, trials).
        """
        updated = parameters.clone()
        for seed, trial, parameter, optimizer in self._runs:
            if not alive[seed, trial]:
                continue
            own = updated[seed, 0, trial]
            parameter.data.copy_(own)
            parameter.grad = released[seed, 0, trial]
            for group in optimizer.param_groups:
                group["lr"] = step_sizes[trial]
            optimizer.step()
            own.copy_(parameter.data)
        return updated

    def save(self) -> list[dict[str, Any]]:
        """Return the state of each optimizer: moments and counts of steps."""
        return [optimizer.state_dict() for *_, optimizer in self._runs]

    def restore(self, states: list[dict[str, Any]]) -> None:
        """Continue from saved states."""
        for (*_, optimizer), state in zip(self._runs, states, strict=True):
            optimizer.load_state_dict(state)


def save_state(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return what an optimizer keeps between steps: its state and the numbers of its groups.

    >>> parameter = nn.Parameter(torch.ones(2))
    >>> first, second = (torch.optim.SGD([parameter], lr=lr, momentum=0.9) for lr in (0.1, 0.2))
    >>> parameter.grad = torch.ones(2)
    >>> first.step()
    >>> second.state = restore_state(second, save_state(first))
    >>> second.state[parameter]["momentum_buffer"].tolist(), second.param_groups[0]["lr"]
    ([1.0, 1.0], 0.1)
    """
    saved: dict[str, Tensor] = {}
    for place, parameter in enumerate(_list_parameters(optimizer)):
        for name, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                saved[f"tensor {place} {name}"] = value.detach().clone()
            elif value is not None:
                saved[f"number {place} {name}"] = torch.tensor(value, dtype=_type_of(value))
    for place, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if isinstance(value, int | float):
                saved[f"group {place} {name}"] = torch.tensor(value, dtype=_type_of(value))
    return saved


def restore_state(optimizer: Optimizer, saved: Mapping[str, Tensor]) -> Any:
    """Return the state to give to an optimizer, and set the numbers of its groups.

    Raises:
        InvalidArgumentError: the state is of other parameters.
    """
    state = type(optimizer.state)(dict)
    parameters = _list_parameters(optimizer)
    for key, value in saved.items():
        kind, number, name = (*key.split(" ", 2), "", "")[:3]
        place = int(number) if number.isdecimal() and len(number) < _MAX_DIGITS else -1
        known = optimizer.param_groups if kind == "group" else parameters
        fits = 0 <= place < len(known) and kind in ("tensor", "number", "group")
        if kind == "tensor" and fits:
            fits = value.dim() == 0 or value.shape == parameters[place].shape
        else:
            fits = fits and value.dim() == 0
        if not fits or name == "params":
            raise InvalidArgumentError("the optimizer's state is that of other parameters")
        if kind == "group":
            optimizer.param_groups[place][name] = value.item()
        else:
            state[parameters[place]][name] = value if kind == "tensor" else value.item()
    return state


def _list_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [own for group in optimizer.param_groups for own in group["params"]]


def _type_of(value: bool | int | float) -> torch.dtype:
    if isinstance(value, bool):
        return torch.bool
    return torch.int64 if isinstance(value, int) else torch.float64


def require_exact_sums(network: Network) -> None:
    """Raise for gossip, in which each agent would keep moments of its own releases."""
    if network.mixing != "sum":
        raise InvalidArgumentError(
            f"optimizer needs exact sums, found mixing {network.mixing!r}: each agent would divide "
            "by the second moment of its own noisy releases, and noise that agents share would "
            "cancel no more; choose mixing='sum', or leave out optimizer"
        )


def require_one_gradient(optimizer: Optimizer) -> None:
    """Raise for an optimizer that asks for several gradients in a step."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidArgumentError(
            "optimizer must take one gradient for a step, found LBFGS, which asks for several: "
            "each would be a release; use SGD"
        )


def read_learning_rate(factory: OptimizerFactory) -> float:
    """Return the learning rate of the optimizers that a factory makes.

    >>> read_learning_rate(torch.optim.Adam)
    0.001
    """
    return float(_make_one(factory, torch.zeros(1))[1].param_groups[0]["lr"])


def describe_optimizer(factory: OptimizerFactory | None) -> str:
    """Return class and settings of the optimizers that a factory makes, without learning rate."""
    if factory is None:
        return ""
    _, optimizer = _make_one(factory, torch.zeros(1))
    kind, (group,) = type(optimizer), optimizer.param_groups
    values = {name: group[name] for name in sorted(group) if name not in ("params", "lr")}
    return f"{kind.__module__}.{kind.__qualname__} {values}"


def _make_one(factory: OptimizerFactory, start: Tensor) -> tuple[nn.Parameter, Optimizer]:
    parameter = nn.Parameter(start.clone())
    optimizer = factory([parameter])
    rule = "a function of a list of parameters that returns an optimizer of torch for them"
    require(isinstance(optimizer, Optimizer), "optimizer", rule, type(optimizer).__name__)
    held = [own for group in optimizer.param_groups for own in group["params"]]
    require(
        len(held) == 1 and held[0] is parameter and "lr" in optimizer.param_groups[0],
        "optimizer",
        rule,
        f"{type(optimizer).__name__} with other parameters, or without a learning rate",
    )
    require_one_gradient(optimizer)
    return parameter, optimizer
