"""How a sweep is run: steps, batches, seeds, mixing, precision, device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from corn.errors import InvalidArgumentError

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class SweepSettings:
    """How to run, the same for all runs of a sweep.

    Attributes:
        num_steps: T.
        batch_size: samples a mini-batch; None for each agent's whole data.
        seeds: of batches, noise and initial models: one run of every variant for each.
        gossip_rounds: mixing rounds a step.
        cooldown_rounds: mixing rounds after the last step, without new gradients or privacy cost.
        dtype: ``float32`` or ``float64``.
        device: where to compute, as torch names it.
        secure_noise: draw, bit for bit, what agents with simulated keys would; otherwise, much
            faster, noise of the same distribution that all mechanisms share.
    """

    num_steps: int
    batch_size: int | None = 128
    seeds: tuple[int, ...] = (0,)
    gossip_rounds: int = 1
    cooldown_rounds: int = 0
    dtype: str = "float32"
    device: str = "cpu"
    secure_noise: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "seeds", tuple(int(seed) for seed in self.seeds))
        for name, least in (("num_steps", 1), ("gossip_rounds", 1), ("cooldown_rounds", 0)):
            if getattr(self, name) < least:
                raise InvalidArgumentError(
                    f"{name} must be at least {least}, found {getattr(self, name)}"
                )
        if self.batch_size is not None and self.batch_size < 1:
            raise InvalidArgumentError(f"batch_size must be at least 1, found {self.batch_size}")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            raise InvalidArgumentError(
                f"seeds must be different numbers ≥ 0 and at least one, found {self.seeds}"
            )
        if self.dtype not in _DTYPES:
            raise InvalidArgumentError(f"dtype must be float32 or float64, found {self.dtype!r}")
        try:
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as error:
            raise InvalidArgumentError(
                f"device must be one that torch has here, found {self.device!r}: try cpu"
            ) from error

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type as torch names it."""
        return _DTYPES[self.dtype]
