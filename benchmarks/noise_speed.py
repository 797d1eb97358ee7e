"""Speed of drawing noise on one core: the secure stream against NumPy and its own keystream.

Run ``python benchmarks/noise_speed.py``. Candidates take turns and the best time of each counts, so
that a busy machine slows all of them equally and the ratios stay the same.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable
from unittest import mock

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from corn.checks import FloatArray
from corn.covariance.decomposition import Decomposition
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
    find_compiled,
    simulated_keys,
    stream,
)
from corn.noise.normals import VALUES_PER_BLOCK, WORDS_PER_BLOCK
from corn.threads import limit_threads

NUM_VALUES = 1 << 20
NUM_AGENTS = 20
NONCE = bytes(32)


def best_seconds(candidates: dict[str, Callable[[], object]], num_turns: int) -> dict[str, float]:
    """Return the least time of each candidate, measured in turns."""
    best = dict.fromkeys(candidates, float("inf"))
    for _ in range(num_turns):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def fill_by_numpy(source: NoiseSource, out: FloatArray, address: StreamAddress) -> None:
    """Fill as if Numba were not installed."""
    with mock.patch.object(stream, "find_compiled", return_value=None):
        source.fill(out, address)


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
            "secure stream by NumPy": lambda: fill_by_numpy(secure, out, address),
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


def main() -> None:
    limit_threads()
    if find_compiled() is None:
        print("Numba does not work here: NumPy draws everything", file=sys.stderr)
    rates = measure_streams()
    results = {
        "million values/s": rates,
        "ratio to NumPy": {name: rate / rates["numpy SFC64"] for name, rate in rates.items()},
    }
    for name, decomposition in make_designs().items():
        for num_coordinates in (100, 10**5, 10**6):
            title = f"ms/step, n={NUM_AGENTS}, d={num_coordinates}, {name}"
            results[title] = measure_shares(decomposition, num_coordinates)
    if "--json" in sys.argv:
        print(json.dumps(results, indent=1))
        return
    for title, row in results.items():
        print(title)
        for name, value in row.items():
            print(f"    {name:<24}{value:10.2f}")


if __name__ == "__main__":
    main()
