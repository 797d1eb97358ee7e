"""Speed of drawing noise on one core: the secure stream against NumPy and its own keystream.

Run ``python benchmarks/noise_speed.py [--step]``.

With ``--step``: the parts of a private step of exact sums with a million parameters, without its
messages, over the same step without noise.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from corn.covariance.decomposition import Decomposition
from corn.distributed.summing import digest_model
from corn.learn.perturbation import NoiseShare
from corn.learn.step import AgentStepper
from corn.noise import (
    NoiseSource,
    Owner,
    Secret,
    SecureSource,
    SimulationSource,
    StreamAddress,
    draw_all_shares,
    draw_share,
    factor_covariance,
    simulated_keys,
)
from corn.noise.masks import WORDS, make_message
from corn.noise.normals import VALUES_PER_BLOCK, WORDS_PER_BLOCK
from corn.plan import make_plan
from corn.privacy import PrivacyBudget
from corn.threads import limit_threads
from corn.topology import load_network
from distributed_speed import GRAPHS, PlainStepper, Silence, Work
from measuring import best_seconds, print_times
from tests.distributed.rehearsal import make_public_source

NUM_VALUES = 1 << 20
NUM_AGENTS = 20
NONCE = bytes(32)


def measure_streams() -> dict[str, float]:
    """Return million values per second of NumPy's fastest generator, streams and keystreams."""
    owner = Owner((0,))
    address = StreamAddress(owner, NONCE, step=0)
    secure, simulation = SecureSource({owner: Secret(bytes(32))}), SimulationSource(0)
    generator = np.random.Generator(np.random.SFC64(0))
    out = np.empty(NUM_VALUES)
    zeros = bytes(NUM_VALUES // VALUES_PER_BLOCK * WORDS_PER_BLOCK * 4)
    keystream = bytearray(len(zeros) + 16)

    def encrypt(cipher: Cipher[modes.GCM] | Cipher[None]) -> None:
        cipher.encryptor().update_into(zeros, keystream)

    seconds = best_seconds(
        {
            "numpy SFC64": lambda: generator.standard_normal(out=out),
            "secure stream": lambda: secure.fill(out, address),
            "simulation stream": lambda: simulation.fill(out, address),
            "raw AES-128-GCM": lambda: encrypt(
                Cipher(algorithms.AES(bytes(16)), modes.GCM(bytes(12)))
            ),
            "raw ChaCha20": lambda: encrypt(
                Cipher(algorithms.ChaCha20(bytes(32), bytes(16)), None)
            ),
        },
        num_turns=40,
    )
    return {name: NUM_VALUES / value / 1e6 for name, value in seconds.items()}


def make_designs() -> dict[str, Decomposition]:
    """Return a dense covariance from one seed of all agents, and from a seed per pair."""
    A = np.random.default_rng(0).standard_normal((NUM_AGENTS, 2 * NUM_AGENTS))
    everyone = tuple(range(NUM_AGENTS))
    pairs = tuple(itertools.combinations(everyone, 2))
    return {
        "one group": Decomposition(
            np.zeros(NUM_AGENTS), (everyone,), (factor_covariance(A @ A.T),)
        ),
        "pair seeds": Decomposition(
            np.ones(NUM_AGENTS), pairs, (np.array([[1.0], [-1.0]]),) * len(pairs)
        ),
    }


def measure_shares(decomposition: Decomposition, num_coordinates: int) -> dict[str, float]:
    """Return milliseconds per step: the agent with the most streams alone, and all agents."""
    secure = SecureSource(simulated_keys(decomposition, seed=0))
    busiest = int(np.argmax(decomposition.count_streams()))

    def draw_one() -> None:
        draw_share(decomposition, busiest, source=secure, nonce=NONCE, step=0, stop=num_coordinates)

    def draw_all(source: NoiseSource) -> None:
        draw_all_shares(decomposition, source=source, nonce=NONCE, step=0, stop=num_coordinates)

    seconds = best_seconds(
        {
            "busiest agent": draw_one,
            "all agents, secure": lambda: draw_all(secure),
            "all agents, simulation": lambda: draw_all(SimulationSource(0)),
        },
        num_turns=3,
    )
    return {name: 1000 * value for name, value in seconds.items()}


def measure_private_step(num_agents: int) -> dict[str, float]:
    """Return milliseconds of all parts of a step but its messages, and ratios."""
    network = load_network(GRAPHS[num_agents], mixing="sum")
    budget = PrivacyBudget(10, 1e-5, num_steps=5000, clip=0.1)
    plan = make_plan(network, budget, cooldown_steps=0)
    noise, bits = plan.decomposition, plan.mask_bits
    work = Work(0, 1, 10**6, 128)
    size = len(work.start)
    source = make_public_source(noise, 0, seed=0)
    share = NoiseShare(plan, 0, source, nonce=NONCE, num_parameters=size)
    plain = PlainStepper(work.batches)
    private = AgentStepper(budget.query, lambda step: step, work.batches)
    steps = itertools.count()
    total = np.zeros(size, WORDS[bits])

    def take_step(stepper: Any, noise: Any) -> None:
        step = next(steps)
        stepper.begin(step, noise, work.start)
        work.differentiate(stepper)
        stepper.release_masked(observe=False)
        stepper.finish(total, step_size=0.01)
        digest_model(work.start)

    gradient = np.zeros(size, np.float32)
    at: dict[str, Any] = {
        "noise": noise,
        "agent": 0,
        "source": source,
        "nonce": NONCE,
        "step": 0,
        "offset": (NONCE, 0),
        "grid": plan.grid,
        "bits": bits,
    }
    seconds = best_seconds(
        {
            "step without noise": lambda: take_step(plain, Silence(plan)),
            "private step": lambda: take_step(private, share),
            "noise, rounding and masks": lambda: make_message(gradient, 1.0, **at),
            "digest of the model": lambda: digest_model(work.start),
        },
        num_turns=150,
    )
    milliseconds = {name: 1000 * value for name, value in seconds.items()}
    without = milliseconds["step without noise"]
    return {
        **milliseconds,
        "private step over one without noise (×)": milliseconds["private step"] / without,
    }


def main() -> None:
    limit_threads()
    results = {}
    if "--step" in sys.argv:
        for num_agents in GRAPHS:
            title = f"ms of a private step, n={num_agents}, d=10⁶, batch 128"
            results[title] = measure_private_step(num_agents)
    else:
        rates = measure_streams()
        results["million values/s"] = rates
        results["ratio to NumPy"] = {
            name: rate / rates["numpy SFC64"] for name, rate in rates.items()
        }
        for name, decomposition in make_designs().items():
            for num_coordinates in (100, 10**5, 10**6):
                title = f"ms/step, n={NUM_AGENTS}, d={num_coordinates}, {name}"
                results[title] = measure_shares(decomposition, num_coordinates)
    for title, row in results.items():
        print_times(title, row)


if __name__ == "__main__":
    main()
