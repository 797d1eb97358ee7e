"""Optimizers of torch that step along releases: by name, by run, by schedule, and their state."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils._pytree import tree_map

from corn.checks import require
from corn.errors import InvalidArgumentError
from corn.learn.schedule import OptimizerName
from corn.topology import Network

HyperParameters: TypeAlias = list[dict[str, Any]]
"""The values of each group of an optimizer's ``param_groups``, without its parameters."""

ScheduleFactory: TypeAlias = Callable[[Optimizer], LRScheduler]
"""(optimizer) → a scheduler of torch that follows the number of the step alone."""

OptimizerFactory: TypeAlias = Callable[[list[nn.Parameter]], Optimizer]
"""(parameters) → an optimizer of torch, such as ``torch.optim.Adam``."""

# None is the step of Algorithm 1, with its own momentum.
NAMED_OPTIMIZERS: dict[OptimizerName, OptimizerFactory | None] = {
    "sgd": None,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


@final
class RunOptimizers:
    """One optimizer for each run of a sweep, on its model as one vector (seeds, 1, trials, d)."""

    def __init__(self, factory: OptimizerFactory, parameters: Tensor) -> None:
        seeds, _, trials, _ = parameters.shape
        self._runs = [
            (seed, trial, *_make_one(factory, parameters[seed, 0, trial]))
            for seed, trial in itertools.product(range(seeds), range(trials))
        ]

    def step(
        self, parameters: Tensor, released: Tensor, step_sizes: Sequence[float], alive: Tensor
    ) -> Tensor:
        """Return all models after a step along the averaged releases, of the runs ``alive``."""
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


def require_exact_sums(network: Network) -> None:
    """Raise for gossip."""
    if network.mixing != "sum":
        # Each would divide by moments of its own releases, and shared noise would not cancel.
        raise InvalidArgumentError(
            f"optimizer needs exact sums, found mixing {network.mixing!r}: choose mixing='sum'"
        )


def require_one_gradient(optimizer: Optimizer) -> None:
    """Raise for an optimizer that asks for several gradients in a step: each would be a release."""
    takes_one = not isinstance(optimizer, torch.optim.LBFGS)
    require(takes_one, "optimizer", "one that takes one gradient for a step", "LBFGS")


def read_learning_rate(factory: OptimizerFactory) -> float:
    """Return the learning rate of the optimizers that a factory makes."""
    return float(_make_one(factory, torch.zeros(1))[1].param_groups[0]["lr"])


def _make_one(factory: OptimizerFactory, start: Tensor) -> tuple[nn.Parameter, Optimizer]:
    parameter = nn.Parameter(start.clone())
    rule = "a function that returns an optimizer of torch for the parameters that it gets"
    advice = "such as torch.optim.Adam itself"
    require(callable(factory), "optimizer", rule, repr(factory), advice=advice)
    optimizer = factory([parameter])
    is_own = list(map(id, _list_parameters(optimizer))) == [id(parameter)]
    require(is_own, "optimizer", rule, f"{type(optimizer).__name__} with other parameters")
    require_one_gradient(optimizer)
    return parameter, optimizer


def save_state(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return what an optimizer keeps between steps: its state and the numbers of its groups."""
    saved: dict[str, Tensor] = {}
    for place, parameter in enumerate(_list_parameters(optimizer)):
        for name, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                saved[f"tensor {place} {name}"] = value.detach().clone()
            elif value is not None:
                saved[f"number {place} {name}"] = _as_tensor(value)
    for place, group in enumerate(optimizer.param_groups):
        numbers = {name: own for name, own in group.items() if isinstance(own, int | float)}
        saved |= {f"group {place} {name}": _as_tensor(own) for name, own in numbers.items()}
    return saved


def restore_state(optimizer: Optimizer, saved: Mapping[str, Tensor]) -> Any:
    """Return the state to give to an optimizer, and set the numbers of its groups."""
    state = type(optimizer.state)(dict)
    parameters = _list_parameters(optimizer)
    for key, value in saved.items():
        kind, number, name = (*key.split(" ", 2), "", "")[:3]
        groups: list[Any] = optimizer.param_groups
        places = len({"group": groups, "tensor": parameters, "number": parameters}.get(kind, ()))
        # int() raises for thousands of digits.
        place = int(number) if number.isdecimal() and len(number) < 10 else -1
        shapes = [torch.Size()]
        if kind == "tensor" and place < places:
            shapes.append(parameters[place].shape)
        if not 0 <= place < places or value.shape not in shapes or name == "params":
            raise InvalidArgumentError("the optimizer's state is that of other parameters")
        if kind == "group":
            optimizer.param_groups[place][name] = value.item()
        else:
            state[parameters[place]][name] = value if kind == "tensor" else value.item()
    return state


def _list_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [own for group in optimizer.param_groups for own in group["params"]]


def _as_tensor(value: bool | int | float) -> Tensor:
    # Not float32, in which Python's numbers would lose digits.
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


def tabulate_schedule(
    optimizer: Optimizer, factory: ScheduleFactory, num_steps: int
) -> list[HyperParameters]:
    """Return the hyperparameters of each step, before any measurement could change them."""
    # A stand-in: a scheduler replaces methods of its optimizer, and warns without its steps.
    groups: Any = [{**own, "params": [torch.zeros(1)]} for own in copy_groups(optimizer)]
    stand_in = _StandIn(groups, optimizer.defaults)
    scheduler = factory(stand_in)
    is_own = getattr(scheduler, "optimizer", None) is stand_in
    is_own = is_own and not isinstance(scheduler, ReduceLROnPlateau)
    rule = "a scheduler of torch for the given optimizer, by step numbers alone"
    require(is_own, "schedule", rule, type(scheduler).__name__)
    table = []
    for _ in range(num_steps):
        table.append(copy_groups(stand_in))
        stand_in.step()
        scheduler.step()
    return table


class _StandIn(Optimizer):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing."""


def copy_groups(optimizer: Optimizer) -> HyperParameters:
    """Return a copy of the values of each group."""
    return [
        {name: _copy_value(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def copy_rule(optimizer: Optimizer) -> Any:
    """Return the identities of the parameters of each group, and copies of settings and state."""
    held = [list(map(id, group["params"])) for group in optimizer.param_groups]
    # Not by parameter: dictionaries of tensors cannot be compared.
    states = [dict(optimizer.state.get(own, {})) for own in _list_parameters(optimizer)]
    return held, copy_groups(optimizer), len(optimizer.state), tree_map(_copy_value, states)


def _copy_value(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.copy(value)
