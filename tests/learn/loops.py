"""What tests of private loops share: data of four agents, a model, forbidden changes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from corn.learn.own_loop import PrivateTraining

M, RATE = 12, 0.05
FACTORIES: list[Callable[..., Optimizer]] = [
    partial(SGD, lr=RATE, momentum=0.9),
    partial(Adam, lr=RATE),
    partial(AdamW, lr=RATE, weight_decay=0.1),
]


def make_parts() -> list[tuple[Tensor, Tensor]]:
    numbers = torch.Generator().manual_seed(0)
    return [
        (torch.randn(M, 5, generator=numbers), torch.randint(0, 3, (M,), generator=numbers))
        for _ in range(4)
    ]


def loaders(batch_size: int = M) -> list[DataLoader[Any]]:
    return [DataLoader(TensorDataset(*part), batch_size=batch_size) for part in make_parts()]


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def read(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# What a loop may do between a batch and its step that no noise would cover.
@torch.no_grad()
def write_data(private: PrivateTraining, inputs: Tensor) -> None:
    private.module[2].bias.copy_(inputs.mean(dim=0)[:3])  # type: ignore[index]


def add_to_momentum(private: PrivateTraining, inputs: Tensor) -> None:
    for own in private.optimizer.state.values():
        own["momentum_buffer"].add_(inputs.mean())


def change_decay(private: PrivateTraining, inputs: Tensor) -> None:
    private.optimizer.param_groups[0]["weight_decay"] = float(inputs.detach().mean())
