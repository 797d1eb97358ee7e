"""What an agent sends depends on its data through the clipped gradient and noise, added first."""

import numpy as np
import pytest
import torch

from corn.distributed.half_step import HalfStep
from corn.learn.batches import Batch
from corn.learn.tasks.protocol import Gradients
from corn.privacy import ClippedQuery

D, CLIP, STEP_SIZE = 2000, 0.1, 1e-4


class Given:
    """A task whose gradient is known, and its batches, which do not matter."""

    def __init__(self, gradient: torch.Tensor) -> None:
        self._gradient = gradient

    def draw(self, step: int) -> Batch:
        nothing = torch.zeros(1, step + 1)
        return Batch(nothing, nothing, nothing, is_average=True)

    def gradient(self, *_: object, sample_clip: object = None) -> Gradients:
        assert sample_clip is None
        return Gradients(self._gradient.clone().view(1, 1, -1))


def send(gradient: torch.Tensor, noise: torch.Tensor | None, model: torch.Tensor) -> torch.Tensor:
    task = Given(gradient)
    half = HalfStep(task, task, ClippedQuery(CLIP))  # type: ignore[arg-type]
    return half.take(model, noise, step=0, step_size=STEP_SIZE)[0]


def test_noise_is_added_before_anything_is_rounded_on_the_scale_of_the_model() -> None:
    """A step that is far below the last place of the model's numbers."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(D, generator=generator)
    model = torch.full((D,), 1.5)
    # Just above half a last place: rounded by itself each coordinate would move by a whole one.
    gradient = torch.full((D,), 0.505 * float(np.spacing(np.float32(1.5))) / STEP_SIZE)
    assert gradient.norm() < CLIP
    released = gradient + noise
    expected = torch.sub(model, released, alpha=STEP_SIZE)
    assert torch.equal(send(gradient, noise, model), expected)
    moved = (send(gradient, None, model) - send(-gradient, None, model)).double().norm()
    assert moved > 1.5 * STEP_SIZE * 2 * gradient.norm()  # as it must not before noise is added


def test_long_gradients_are_clipped_once() -> None:
    gradient = torch.linspace(-3, 5, D)
    found = -send(gradient, None, torch.zeros(D)) / STEP_SIZE
    torch.testing.assert_close(found, gradient * CLIP / gradient.norm(), rtol=3e-6, atol=1e-9)
    assert float(found.double().norm()) == pytest.approx(CLIP, rel=3e-6)
