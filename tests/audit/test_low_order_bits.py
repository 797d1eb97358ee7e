"""Low-order bits of messages leak no more than the promise allows."""

from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest, norm

from corn.covariance import DEFAULT_THREAT, MechanismName, ThreatModel
from corn.plan import FloatType, Plan, make_plan
from corn.privacy import PrivacyBudget
from corn.topology import load_network
from tests.oracles.deployed_release import OwnReleases, Sent, stream_weights
from tests.oracles.low_order_bits import Array, DrawReleases, FloatAttacker, Pair

CLIP, STEP_SIZE = 0.1, 0.25
OTHERS_KEYS = 10**6
STREAM_WEIGHTS = (0.61, 1.46, 0.5, 0.73, 0.17, 1.35, 1.07, 0.37, 1.23, 0.55, 0.43, 0.46, 0.81, 1.31)


def opposite_gradients(d: int, seed: int, dtype: Any) -> Pair:
    """Draw two clipped gradients as far apart as the promise allows."""
    g = np.random.default_rng(seed).standard_normal(d)
    g = (g * CLIP / np.linalg.norm(g)).astype(dtype).astype(np.float64)
    return g, -g


def count_right(
    attacker: FloatAttacker, draw: DrawReleases, pairs: list[Pair], num_each: int
) -> int:
    """Count right decisions about ``num_each`` messages of each gradient of each pair."""
    right = 0
    for number, pair in enumerate(pairs):
        for truth in (0, 1):
            released = draw(pair[truth], num_each, OTHERS_KEYS + 2 * number + truth)
            right += int(((attacker.score(pair, released) > 0) == truth).sum())
    return right


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("weights", [(2.2355698,), STREAM_WEIGHTS], ids=["one", "many"])
def test_the_attacker_beats_a_plain_sum(dtype: Any, weights: tuple[float, ...]) -> None:
    """Otherwise a weak attacker would let the tests below pass."""

    def draw(gradient: Array, num: int, seed: int) -> Array:
        generator, shape = np.random.default_rng(seed), (num, len(gradient))
        total = np.zeros(shape, dtype)
        for weight in weights:
            total += generator.standard_normal(shape, dtype) * dtype(weight)
        return np.asarray(total + gradient.astype(dtype), np.float64)

    pairs = [opposite_gradients(1000, seed, dtype) for seed in range(12)]
    std = float(np.linalg.norm(weights))
    public = [float(dtype(weight)) for weight in weights]
    attacker = FloatAttacker(draw, pairs[:2], noise_std=std, weights=public, num_messages=60)
    assert count_right(attacker, draw, pairs[2:], 10) > 0.95 * 200


@pytest.mark.parametrize("grid", [2.0**-6, 2.0**-3])
def test_on_a_grid_the_attacker_equals_the_best_test_for_ideal_noise(grid: float) -> None:
    """The noise is so small that the best test is right four times in five."""
    std = CLIP / norm.ppf(0.8)

    def draw(gradient: Array, num: int, seed: int) -> Array:
        noise = np.random.default_rng(seed).normal(0, std, (num, len(gradient)))
        rounded: Array = grid * std * np.rint((gradient + noise) / (grid * std))
        return rounded

    pairs = [opposite_gradients(100, seed, np.float64) for seed in range(12)]
    attacker = FloatAttacker(draw, pairs[:2], noise_std=std, weights=(std,), num_messages=300)
    right = count_right(attacker, draw, pairs[2:], 100)
    assert binomtest(right, 2000, 0.8).pvalue > 1e-4
    assert not attacker.views


def make_small_plan(mechanism: MechanismName, threat: ThreatModel, dtype: FloatType) -> Plan:
    budget = PrivacyBudget(10, 1e-5, num_steps=500, clip=CLIP)
    network = load_network("ring:5", mixing="gossip")
    return make_plan(network, budget, mechanism=mechanism, threat=threat, dtype=dtype)


@pytest.mark.parametrize(
    ("mechanism", "threat", "message_type", "model_scale"),
    [
        ("ldp", ThreatModel(), "float32", 0.0),
        ("ldp", ThreatModel(), "float64", 0.0),
        ("corn", DEFAULT_THREAT, "float32", 0.1),
        ("corn", DEFAULT_THREAT, "float64", 0.0),
    ],
    ids=["one-float32", "one-float64", "many-float32-moved", "many-float64"],
)
def test_messages_leak_no_more_than_promised(
    mechanism: MechanismName, threat: ThreatModel, message_type: FloatType, model_scale: float
) -> None:
    plan = make_small_plan(mechanism, threat, message_type)
    pairs = [opposite_gradients(1000, seed, message_type) for seed in range(12)]
    model = np.random.default_rng(0).normal(0, model_scale, 1000).astype(message_type)
    draw = OwnReleases(plan, 0, Sent(model.astype(np.float64), STEP_SIZE))
    attacker = FloatAttacker(
        draw,
        pairs[:2],
        noise_std=float(np.sqrt(plan.decomposition.covariance[0, 0])),
        weights=stream_weights(plan.decomposition, 0),
        model=model.astype(np.float64),
        step_size=STEP_SIZE,
        num_messages=60,
    )
    mu = plan.budget.query.sensitivity * np.sqrt(plan.precision_caps.max())
    right = count_right(attacker, draw, pairs[2:], 10)
    found = binomtest(right, 200, float(norm.cdf(mu / 2)), alternative="greater")
    assert found.pvalue > 1e-4, f"{right} of 200"
