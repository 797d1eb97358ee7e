"""Noise in simulations: new at every step, of the right covariance, shared by mechanisms."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from corn.covariance import Decomposition
from corn.learn.perturbation import JointNoise, KeyedNoise, symmetric_root

from .problems import make_mechanism

MECHANISM_NAMES = [make_mechanism(name) for name in ("corn", "ldp")]
SHARES = [method.noise for method in MECHANISM_NAMES if isinstance(method.noise, Decomposition)]
COVARIANCES = [shares.covariance for shares in SHARES]


def joint(num_parameters: int, *seeds: int, dtype: torch.dtype = torch.float64) -> JointNoise:
    return JointNoise(SHARES, seeds=seeds, num_parameters=num_parameters, dtype=dtype)


def keyed(num_parameters: int, *seeds: int) -> KeyedNoise:
    return KeyedNoise(SHARES, seeds=seeds, num_parameters=num_parameters)


def secret(num_parameters: int, *seeds: int) -> KeyedNoise:
    return KeyedNoise(SHARES, seeds=seeds, num_parameters=num_parameters, is_secret=True)


def joint_float32(num_parameters: int, *seeds: int) -> JointNoise:
    return joint(num_parameters, *seeds, dtype=torch.float32)


@pytest.mark.parametrize("make", [joint, joint_float32, keyed, secret])
def test_noise_has_its_covariance_across_agents_and_none_across_coordinates(
    make: Callable[..., JointNoise | KeyedNoise],
) -> None:
    noise = make(20_000, 3).draw(0)
    dtype = torch.float32 if make is joint_float32 else torch.float64
    assert (noise.shape, noise.dtype) == ((1, 6, 2, 20_000), dtype)
    for index, R in enumerate(COVARIANCES):
        v = noise[0, :, index].double().numpy()
        np.testing.assert_allclose(v @ v.T / 20_000, R, atol=0.05 * R.diagonal().max())
        shifted = v[:, 1:] @ v[:, :-1].T / 20_000
        np.testing.assert_allclose(shifted, 0, atol=0.05 * R.diagonal().max())


@pytest.mark.parametrize("make", [joint, keyed, secret])
def test_no_step_or_seed_repeats_the_noise_of_another(
    make: Callable[..., JointNoise | KeyedNoise],
) -> None:
    noise = make(50, 1, 2)
    draws = torch.stack([noise.draw(step).clone() for step in range(20)]).transpose(0, 1)
    vectors = draws.flatten(0, 1).flatten(1)
    similarity = torch.corrcoef(vectors) - torch.eye(len(vectors))
    assert similarity.abs().max() < 0.5


def test_a_step_drawn_twice_gives_the_same_noise() -> None:
    noise, again = joint(10, 5), joint(10, 5)
    noise.draw(0)
    assert torch.equal(noise.draw(7), again.draw(7))


def test_secret_noise_is_new_in_every_run() -> None:
    """A result whose noise could be drawn again from the seed would protect nobody."""
    assert torch.equal(keyed(10, 5).draw(0), keyed(10, 5).draw(0))
    first, second = secret(10, 5).draw(0), secret(10, 5).draw(0)
    assert not torch.isclose(first, second).any()


def test_mechanisms_share_standard_normals() -> None:
    """R_1^{-1/2} v_1 = R_2^{-1/2} v_2: common random numbers."""
    v = joint(30, 0).draw(4)[0].numpy()
    whitened = [np.linalg.solve(symmetric_root(R), v[:, k]) for k, R in enumerate(COVARIANCES)]
    np.testing.assert_allclose(whitened[0], whitened[1], atol=1e-8)
