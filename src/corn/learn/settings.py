"""Settings of a sweep: steps, batches, seeds, mixing, precision, device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch

from corn.checks import require, require_choice, require_count
from corn.covariance.objective import check_momentum
from corn.errors import InvalidArgumentError
from corn.learn.optimizers import OptimizerFactory

NoiseKeys: TypeAlias = Literal["none", "seed", "secret"]

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class SweepSettings:
    """Settings that all runs of a sweep share.

    Attributes:
        num_steps: T.
        batch_size: samples per mini-batch; None for each agent's whole data.
        seeds: seeds of batches, noise and initial models; every trial is run once per seed.
        cooldown_steps: steps after the last that only mix, without new gradients or privacy cost.
        dtype: ``float32`` or ``float64``.
        device: the torch device to compute on.
        noise_keys: the source of noise. ``none``: fast streams of the seed, which all mechanisms
            share. ``seed``: keys derived from the seed, with which agents draw the same bits.
            ``secret``: new keys, which are discarded after the run. Only ``secret`` protects
            anyone.
        momentum: β in [0, 1): agents step along m ← β m + (1 − β) · release, which post-processes
            releases.
        optimizer: makes the optimizer of torch that steps along the averaged release, with the step
            size as its learning rate; only for exact sums, and with ``momentum`` 0. None is a plain
            step, or one with ``momentum``.
    """

    num_steps: int
    batch_size: int | None = 128
    seeds: tuple[int, ...] = (0,)
    cooldown_steps: int = 0
    dtype: str = "float32"
    device: str = "cpu"
    noise_keys: NoiseKeys = "none"
    momentum: float = 0.0
    optimizer: OptimizerFactory | None = None

    def __post_init__(self) -> None:
        # The record is frozen. Plain integers, because NumPy's do not become JSON.
        seeds = tuple(require_count("seeds", seed, least=0) for seed in self.seeds)
        object.__setattr__(self, "seeds", seeds)
        require_count("num_steps", self.num_steps)
        require_count("cooldown_steps", self.cooldown_steps, least=0)
        check_momentum(self.momentum)
        if self.optimizer is not None and self.momentum:
            raise InvalidArgumentError(
                f"momentum must be 0 with an optimizer, found {self.momentum}: give it to the "
                "optimizer, which has its own"
            )
        if self.batch_size is not None:
            require_count("batch_size", self.batch_size, advice="None is the whole data")
        is_unique = len(set(seeds)) == len(seeds) > 0
        require(is_unique, "seeds", "one or more different numbers", seeds)
        require_choice("dtype", self.dtype, _DTYPES)
        require_choice("noise_keys", self.noise_keys, get_args(NoiseKeys))
        if self.noise_keys == "secret" and len(self.seeds) > 1:
            raise InvalidArgumentError(
                f"seeds must be one for a run with secret keys (secure=True), found "
                f"{len(self.seeds)}: every run on the same data would spend the budget once more"
            )
        # The only reliable test of a device, and it fails before hours of work, not in the middle.
        try:
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as error:
            raise InvalidArgumentError(
                f"device must be available to torch, found {self.device!r}: try cpu"
            ) from error

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch type."""
        return _DTYPES[self.dtype]
