"""The dual against jax_privacy's dense strategy optimiser, which solves the same problem.

A strategy matrix C with unit columns and workload B has error Tr(BᵀB (CᵀC)⁻¹): the design problem
with A = BᵀB, R = (CᵀC)⁻¹ and b = 1. jax_privacy 2.0.0 runs L-BFGS on CᵀC. It has no certificate, so
here it is told the lower bound that the dual found and stops at the same gap; that favours it.

It wants its own environment::

    python3 -m venv /tmp/jaxenv
    /tmp/jaxenv/bin/pip install jax-privacy==2.0.0 networkx threadpoolctl
    OMP_NUM_THREADS=1 PYTHONPATH=src /tmp/jaxenv/bin/python benchmarks/design_vs_jax_privacy.py
"""

from __future__ import annotations

import importlib
import math
import sys
import time
from typing import Any

import networkx as nx
import numpy as np

from corn.checks import FloatArray
from corn.covariance import EAVESDROPPER, Corn, Design, Horizon, design
from corn.threads import limit_threads

_MAX_STEPS = 20_000
_MAX_SECONDS = 120.0


def metropolis(graph: nx.Graph) -> FloatArray:
    adjacency = nx.to_numpy_array(graph, weight=None)
    degrees = adjacency.sum(axis=1)
    W = adjacency / (1 + np.maximum.outer(degrees, degrees))
    return np.asarray(W + np.diag(1 - W.sum(axis=1)))


def workload(A: FloatArray) -> FloatArray:
    """Return B with BᵀB = A."""
    w, U = np.linalg.eigh(A)
    return np.asarray(np.sqrt(np.maximum(w, 0))[:, None] * U.T)


def run_jax(dense: Any, A: FloatArray, bound: float, tolerance: float) -> tuple[float, float, int]:
    """Return seconds, value and steps until the gap or the limits; compilation is left out."""
    jax = importlib.import_module("jax")
    n, start, seconds, loss, steps = len(A), math.nan, 0.0, math.nan, 0

    def stop(info: Any) -> bool:
        nonlocal start, seconds, loss, steps
        loss, steps = n * float(info.loss), info.step + 1
        if info.step == 1:  # the first two steps compile, for two kinds of state
            start = time.perf_counter()
        seconds = time.perf_counter() - start
        return seconds > _MAX_SECONDS or loss <= (1 + tolerance) * bound

    with jax.enable_x64():
        B = jax.numpy.array(workload(A))
        dense.optimize(n, A=B, max_optimizer_steps=_MAX_STEPS, callback=stop)
    return seconds, loss, steps


def time_design(W: FloatArray, horizon: float, tolerance: float) -> tuple[float, Design]:
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        result = design(
            W,
            1.0,
            mechanism=Corn(math.inf, tolerance=tolerance),
            objective=Horizon(horizon),
            threat=EAVESDROPPER,
        )
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)[2], result


def main() -> None:
    try:
        dense = importlib.import_module("jax_privacy.matrix_factorization.dense")
    except ImportError:
        sys.exit("jax_privacy is not installed here: see the head of this file")
    limit_threads()
    print(f"jax_privacy stops at the gap, or after {_MAX_SECONDS:.0f} s or {_MAX_STEPS} steps\n")
    print(
        f"{'n':>4s} {'horizon':>7s} {'gap':>6s} | {'dual s':>8s} {'it':>3s} {'value':>12s} |"
        f" {'jax s':>8s} {'steps':>6s} {'value':>12s} {'gap':>8s} | slower by"
    )
    for n in (64, 128, 256, 512):
        # Connected: with an isolated agent the first-order method does not get there in time.
        W = metropolis(nx.connected_watts_strogatz_graph(n, 8, 0.3, seed=1))
        for horizon in (1, 1000):
            A = Horizon(horizon).matrix(W)
            for tolerance in (1e-3, 1e-6):
                ours, result = time_design(W, horizon, tolerance)
                _, certified = time_design(W, horizon, 1e-9)
                theirs, value, steps = run_jax(dense, A, certified.lower_bound, tolerance)
                print(
                    f"{n:4d} {horizon:7d} {tolerance:6.0e} | {ours:8.4f} {result.iterations:3d}"
                    f" {result.value:12.6f} | {theirs:8.3f} {steps:6d} {value:12.6f}"
                    f" {value / certified.lower_bound - 1:8.1e} | {theirs / ours:.0f}×",
                    flush=True,
                )


if __name__ == "__main__":
    main()
