"""Releases of the library, for attackers, made by the code that agents run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray

from corn.covariance import Decomposition
from corn.learn.perturbation import DrawnNoise
from corn.learn.step import AgentStepper
from corn.learn.tasks.protocol import Gradients
from corn.noise import NoiseSource, SecureSource, draw_all_shares, draw_share, simulated_keys
from corn.plan import Plan
from corn.privacy import ClippedQuery
from tests.oracles.low_order_bits import Array
from tests.oracles.message_parts import draw_mask

NONCE = bytes(range(32))
Floats: TypeAlias = NDArray[np.floating[Any]]
Release: TypeAlias = Callable[[Plan, int, Array, NoiseSource, int, "Sent"], Floats]
"""See :func:`release`."""


@dataclass(frozen=True, eq=False)
class Sent:
    """The public part of a message x − η s: the model x (shape (d,) or a number) and η."""

    model: Any = 0.0
    step_size: float = 0.25

    def recover(self, message: Floats) -> Array:
        """Return the value s that was released, up to rounding."""
        model = np.asarray(self.model, np.float64)
        return np.asarray((model - message.astype(np.float64)) / self.step_size, np.float64)


@dataclass(frozen=True, eq=False)
class GivenNoise:
    """Noise that is known, on a grid, in the place of an agent's share."""

    values: torch.Tensor
    grid: float

    @property
    def plan(self) -> Any:
        return self

    def take(self, _: int) -> DrawnNoise:
        given: Any = self
        return DrawnNoise(given, 0, self.values)


def take_half_step(
    gradient: torch.Tensor,
    noise: torch.Tensor,
    model: torch.Tensor,
    *,
    clip: float,
    grid: float,
    step_size: float,
    **options: Any,
) -> tuple[torch.Tensor, AgentStepper]:
    """Return the message of a known gradient with known noise, by the code that agents run."""
    stepper = AgentStepper(ClippedQuery(clip), lambda step: step, **options)
    given: Any = GivenNoise(noise, grid)
    stepper.begin(0, given, model)
    stepper.clip(Gradients(gradient.clone().view(1, 1, -1)))
    return stepper.release_half_step(step_size=step_size), stepper


def release(
    plan: Plan, agent: int, gradient: Array, source: NoiseSource, step: int, sent: Sent
) -> Floats:
    """Make the agent's message at a step, by the code that agents run.

    The gradient is clipped already: any number of copies of one may stand in a row, for an attacker
    that draws many messages at once.
    """
    dtype = np.dtype(plan.dtype)
    at: Any = {"source": source, "nonce": NONCE, "step": step, "stop": len(gradient)}
    noise = torch.from_numpy(draw_share(plan.decomposition, agent, **at))
    message, _ = take_half_step(
        torch.from_numpy(gradient.astype(dtype)),
        noise,
        torch.from_numpy(np.broadcast_to(sent.model, gradient.shape).astype(dtype)),
        clip=1e6,
        grid=plan.grid,
        step_size=sent.step_size,
    )
    return np.asarray(message.numpy())


def read_noise(drawn: DrawnNoise) -> bytes:
    """Return all that an agent adds to its gradient in a step: noise, and masks if it has them."""
    own, values = drawn.share, drawn.values.numpy()
    plan = own.plan
    if not plan.decomposition.is_masked:
        return values.tobytes()
    mask = draw_mask(
        plan.decomposition,
        own.agent,
        source=own.source,
        nonce=own.nonce,
        step=drawn.step,
        size=len(values),
        bits=plan.mask_bits,
    )
    return values.tobytes() + mask.tobytes()


@final
class Observer:
    """An eavesdropper or insider that observes all messages and knows all gradients but one.

    It reproduces the noise of its own seeds, and predicts the rest of the agent's noise by
    regression on the others' noise. ``noise_std`` is that of the residual, 1/√[(R^(I))⁻¹]_jj, on
    which the promise rests.
    """

    def __init__(self, plan: Plan, agent: int, insider: int | None = None) -> None:
        coalition = () if insider is None else (insider,)
        self._plan, self._agent, n = plan, agent, plan.num_agents
        self._others = [i for i in range(n) if i not in (agent, *coalition)]
        honest = [agent, *self._others]
        hidden = plan.decomposition.hidden_from(coalition)[np.ix_(honest, honest)]
        precision = np.linalg.inv(hidden)[0]
        self._regression = -precision[1:] / precision[0]
        self.noise_std = float(precision[0] ** -0.5)
        self._known = _reproducible_part(plan.decomposition, coalition)

    def predict(self, source: NoiseSource, step: int, num_parameters: int) -> Array:
        """Return the expectation of the agent's noise at a step, shape (d,)."""
        if not self._plan.decomposition.seed_groups:
            return np.zeros(num_parameters)
        at: Any = {"source": source, "nonce": NONCE, "step": step, "stop": num_parameters}
        everything = draw_all_shares(self._plan.decomposition, **at)
        known = draw_all_shares(self._known, **at)
        hidden = everything[self._others] - known[self._others]
        return np.asarray(known[self._agent] + self._regression @ hidden, np.float64)


def _reproducible_part(decomposition: Decomposition, coalition: tuple[int, ...]) -> Decomposition:
    """Return the noise of the coalition's groups; other groups keep their numbers with weight 0."""
    groups = zip(decomposition.seed_groups, decomposition.factors, strict=True)
    factors = tuple(
        factor if set(group) & set(coalition) else np.zeros_like(factor) for group, factor in groups
    )
    return Decomposition(np.zeros(decomposition.num_agents), decomposition.seed_groups, factors)


def stream_weights(decomposition: Decomposition, agent: int) -> list[float]:
    """List the public weights of the streams that the agent draws."""
    groups = zip(decomposition.seed_groups, decomposition.factors, strict=True)
    rows = [factor[group.index(agent)] for group, factor in groups if agent in group]
    own = np.sqrt(decomposition.private_variance[agent])
    return [float(weight) for weight in np.concatenate([[own], *rows]) if weight != 0]


@dataclass(frozen=True, eq=False)
class OwnReleases:
    """Releases drawn with the attacker's own keys; see ``DrawReleases``."""

    plan: Plan
    agent: int
    sent: Sent
    release: Release = release

    def __call__(self, gradient: Array, num: int, seed: int) -> Array:
        source = SecureSource(simulated_keys(self.plan.decomposition, seed=seed))
        model = np.tile(np.broadcast_to(self.sent.model, gradient.shape), num)
        copies = Sent(model, self.sent.step_size)
        message = self.release(self.plan, self.agent, np.tile(gradient, num), source, 0, copies)
        return copies.recover(message).reshape(num, -1)
