"""How fast a design is: against one eigendecomposition of its size, and against cvxpy.

    .venv/bin/python benchmarks/design_speed.py [--large] [--patient]

Everything runs with one compute thread. ``--large`` adds n = 5000, with its peak memory in arrays
of n×n: some minutes and about 2 GB. The paper's formulation at n = 40 takes cvxpy many minutes, and
is run only with ``--patient``.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import networkx as nx
import numpy as np
import scipy.linalg

from corn.checks import FloatArray
from corn.covariance import (
    EAVESDROPPER,
    Corn,
    Design,
    Horizon,
    design,
    dual,
)
from corn.threads import limit_threads
from corn.topology.mixing import sparse_mixing_matrix

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.oracles.sdp import Sdp

DUAL = Corn()


def weigh(graph: nx.Graph) -> FloatArray:
    """Return the Metropolis weights of a graph, which may have parts."""
    return np.asarray(
        sparse_mixing_matrix(nx.convert_node_labels_to_integers(graph)).toarray(), np.float64
    )


def solve(W: FloatArray, horizon: float, mechanism: Corn | Sdp = DUAL) -> Design:
    """Design against an eavesdropper, who needs no search over seeds."""
    return design(W, 1.0, mechanism=mechanism, objective=Horizon(horizon), threat=EAVESDROPPER)


def median_seconds(run: Callable[[], object], *, repeats: int) -> float:
    run()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def small() -> None:
    print("\nn = 20, Erdős–Rényi p = 0.2 (target: under 10 ms)")
    W = weigh(nx.gnp_random_graph(20, 0.2, seed=1))
    for horizon in (1, 1000):
        run = partial(solve, W, horizon)
        seconds = median_seconds(run, repeats=21)
        print(f"  horizon {horizon:5d}  {1e3 * seconds:6.1f} ms")


def against_eigh(n: int) -> None:
    """Time the whole design, objective and final checks included, in units of one eigh."""
    print(f"\nn = {n}, in units of one scipy.linalg.eigh (targets: 20 at gap 1e-6, 10 at 1e-3)")
    print(f"  {'network':12s} {'horizon':>7s} {'eigh':>8s} {'1e-3':>7s} {'1e-6':>7s}  iterations")
    networks = {
        "random": nx.gnp_random_graph(n, 20 / n, seed=1),
        "scale-free": nx.barabasi_albert_graph(n, 2, seed=1),
        "geometric": nx.random_geometric_graph(n, 2.5 / n**0.5, seed=1),
        "grid": nx.grid_2d_graph(25, n // 25),
    }
    for name, graph in networks.items():
        W = weigh(graph)
        for horizon in (1, 1000):
            _print_ratios(name, W, horizon)


def _print_ratios(name: str, W: FloatArray, horizon: float) -> None:
    A = Horizon(horizon).matrix(W)
    eigh = median_seconds(lambda: scipy.linalg.eigh(A, driver="evd"), repeats=5)
    results: list[Design] = []

    def run(tolerance: float) -> None:
        dual.TOLERANCE = tolerance
        results.append(solve(W, horizon))

    loose = median_seconds(lambda: run(1e-3), repeats=3) / eigh
    loose_iterations = results[-1].iterations
    tight = median_seconds(lambda: run(1e-6), repeats=3) / eigh
    print(
        f"  {name:12s} {horizon:7g} {eigh:7.3f}s {loose:7.1f} {tight:7.1f}"
        f"  {loose_iterations}, {results[-1].iterations}  ({results[-1].status})",
        flush=True,
    )


def against_cvxpy(*, patient: bool) -> None:
    """Same tolerance for all; value and gap are of the returned, exactly private covariance."""
    print("\nagainst cvxpy, horizon 1000, tolerance 1e-6")
    print(
        f"  {'n':>3s} {'solver':16s} {'seconds':>9s} {'slower by':>9s} {'value':>12s} {'gap':>8s}"
    )
    for n in (10, 20, 40):
        W = weigh(nx.gnp_random_graph(n, 0.3, seed=2))
        dual = partial(solve, W, 1000)
        reference = median_seconds(dual, repeats=11)
        _print_solver(n, "dual", dual(), reference, reference)
        for name, program in PROGRAMS.items():
            if n == 40 and program.formulation == "paper" and not patient:
                print(f"  {n:3d} {name:16s}  (--patient)")
                continue
            start = time.perf_counter()
            result = solve(W, 1000, program)
            _print_solver(n, name, result, time.perf_counter() - start, reference)


PROGRAMS = {"clarabel single": Sdp("single"), "clarabel paper": Sdp("paper")}


def _print_solver(n: int, name: str, result: Design, seconds: float, reference: float) -> None:
    ratio = seconds / reference
    print(
        f"  {n:3d} {name:16s} {seconds:9.4f} {ratio:8.0f}× {result.value:12.6f} {result.gap:8.1e}",
        flush=True,
    )


def large(n: int = 5000) -> None:
    print(f"\nn = {n}: time, and peak memory in arrays of n×n (target: at most 10)")
    W = weigh(nx.gnp_random_graph(n, 20 / n, seed=1))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    result = solve(W, 1000)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    arrays = 1024 * peak / (8 * n**2)
    print(f"  {seconds:.0f} s, {result.iterations} iterations, gap {result.gap:.1e}")
    print(f"  peak {peak / 2**20:.2f} GB = {arrays:.1f} arrays (before: {before / 2**20:.2f} GB)")


def main() -> None:
    limit_threads()
    small()
    against_eigh(1000)
    against_cvxpy(patient="--patient" in sys.argv[1:])
    if "--large" in sys.argv[1:]:
        large()


if __name__ == "__main__":
    main()
