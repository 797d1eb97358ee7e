"""How a sweep is run: steps, batches, seeds, mixing, precision, device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch

from corn.errors import InvalidArgumentError

NoiseKeys: TypeAlias = Literal["none", "seed", "secret"]

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class SweepSettings:
    """How to run, the same for all runs of a sweep.

    Attributes:
        num_steps: T.
        batch_size: samples a mini-batch; None for each agent's whole data.
        seeds: of batches, noise and initial models: one run of every trial for each.
        gossip_rounds: mixing rounds a step.
        cooldown_rounds: mixing rounds after the last step, without new gradients or privacy cost.
        dtype: ``float32`` or ``float64``.
        device: where to compute, as torch names it.
        noise_keys: what noise is drawn from. ``none``: fast streams of the seed, which all
            mechanisms share. ``seed``: keys that follow from the seed, with which agents draw the
            same in every bit. ``secret``: new keys, which are forgotten after the run. Only the
            last protects anyone.
    """

    num_steps: int
    batch_size: int | None = 128
    seeds: tuple[int, ...] = (0,)
    gossip_rounds: int = 1
    cooldown_rounds: int = 0
    dtype: str = "float32"
    device: str = "cpu"
    noise_keys: NoiseKeys = "none"

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
        if self.noise_keys not in get_args(NoiseKeys):
            raise InvalidArgumentError(
                f"noise_keys must be 'none', 'seed' or 'secret', found {self.noise_keys!r}"
            )
        if self.noise_keys == "secret" and len(self.seeds) > 1:
            raise InvalidArgumentError(
                f"a run with secret keys (secure=True) takes one seed, found {len(self.seeds)}: "
                "every run on the same data would spend the budget once more"
            )
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
