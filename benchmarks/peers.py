"""CorN next to its peers, each in an environment of its own, on the same graph, data, ε and seeds.

    OMP_NUM_THREADS=1 python benchmarks/peers.py --data-dir DATA --out FOLDER \
        --python opacus=PY jax_privacy=PY flower=PY whisper=PY decor=PY \
        --code whisper=CHECKOUT decor=CHECKOUT

``PY`` is the interpreter of an environment with the peer: ``opacus==1.6.0``;
``jax-privacy==2.0.0``; ``flwr==1.41.0`` and ``dp-accounting``; ``cvxpy igraph`` for the code of
WhisperDSGD (github.com/arodio/WhisperDSGD), and ``networkx matplotlib pandas scipy`` for that of
DECOR (github.com/elfirdoussilab1/DECOR), whose checkouts ``--code`` names. A peer without an
interpreter is left out. The folder has what was exchanged with the peers, and ``peers.csv`` with
every run.

Every peer gets the same rows, clip, steps and initial models, and calibrates its noise with its own
accountant. WhisperDSGD and DECOR run as designs: their code computes the covariance of the noise,
with which CorN trains, because their own loops take one sample at a time. WhisperDSGD asks for the
licensed solver MOSEK; Clarabel solves the same problem here. Opacus trains on the pooled rows. In
Flower 20 client apps send their messages within one process.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from corn.covariance import (
    EAVESDROPPER,
    Corn,
    Horizon,
    default_objective,
    design,
)
from corn.learn import (
    Constant,
    Mechanism,
    SweepSettings,
    Trial,
    Workload,
    make_mechanisms,
    run_sweep,
)
from corn.learn.workloads import select_agents
from corn.privacy import PrivacyBudget
from corn.threads import limit_threads
from corn.topology import Network, choose_cooldown, load_network
from measuring import append_runs
from when_correlation_pays import tune_step_sizes

_GRAPH, _AGENTS, _DELTA, _CLIP = "er:n=20,p=0.2,seed=1", 20, 1e-5, 1.0
_TUNING_SEEDS, _SEEDS = (100, 101), (10, 11, 12, 13, 14)
# 30 of 2520 rows of an agent in a step, on average.
_BATCH, _RATE = 30, 1 / 84


class Case(NamedTuple):
    """A promise for one sample or for an agent's whole data, and a model."""

    unit: str
    epsilon: float
    model: str

    @property
    def num_steps(self) -> int:
        """More steps of unit agent gain little, and Flower's take long."""
        return 120 if self.unit == "sample" else 20


_CASES = (
    Case("sample", 0.3, "linear"),
    Case("sample", 1.0, "linear"),
    Case("sample", 0.3, "network"),
    Case("agent", 8.0, "linear"),
)


class Score(NamedTuple):
    """One run of one peer: CPU seconds of the whole run, and the traffic of one step."""

    unit: str
    epsilon: float
    model: str
    peer: str
    seed: int
    accuracy: float
    step_size: float
    seconds: float
    messages: float
    bytes: float


class Row(NamedTuple):
    """A method that CorN trains: its network and mechanism, and how it updates models."""

    peer: str
    network: Network
    mechanism: Mechanism
    momentum: float = 0.0
    cooldown_steps: int = 0
    # An agent that trains by itself.
    agent: int | None = None


def run_peer(
    name: str, folder: Path, arguments: argparse.Namespace, job: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Run a program in the environment of its peer; None if none was named."""
    python = dict(arguments.python).get(name)
    if python is None:
        print(f"{name}: left out, no --python {name}=PATH", flush=True)
        return None
    own = {**job, "code": dict(arguments.code).get(name, "")}
    (folder / "job.json").write_text(json.dumps(own), encoding="utf-8")
    program = Path(__file__).resolve().parent / "peer_programs.py"
    process = subprocess.run(
        [python, "-W", "ignore", str(program), name, str(folder.resolve())],
        capture_output=True,
        text=True,
        check=False,
        # Packages must not be found in the present folder.
        cwd=folder,
    )
    if process.returncode:
        sys.exit(f"{name} failed: {process.stderr.strip()[-2000:]}")
    found: dict[str, Any] = json.loads(process.stdout.strip().splitlines()[-1])
    return found


class Comparison:
    """Runs of CorN and of its peers on MNIST."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._folder: Path = arguments.out
        self._gossip = load_network(_GRAPH, mixing="gossip")
        self._sum = load_network(_GRAPH, mixing="sum")
        self._objective = default_objective(_CASES[0].num_steps)
        self._problems = {
            model: Workload(
                "mnist",
                model=model,
                partition="iid",
                l2=0.0,
                seed=1,
                directory=arguments.data_dir,
            ).build(_AGENTS)
            for model in ("linear", "network")
        }

    def run(self) -> Iterator[Score]:
        """Yield every run."""
        self._write_data()
        self._compare_designs()
        for case in _CASES:
            yield from self._run_case(case)

    def _write_data(self) -> None:
        data = self._problems["linear"].data
        X, y = self._problems["linear"].parts["test"]
        np.savez(
            self._folder / "data.npz",
            inputs=data.inputs.numpy().astype(np.float32),
            targets=data.targets.numpy(),
            offsets=np.array(data.offsets),
            test_inputs=X.numpy().astype(np.float32),
            test_targets=y.numpy(),
        )
        for model, problem in self._problems.items():
            for seed in _SEEDS:
                task: Any = problem.task
                module = task.to_module(task.initialize(seed))
                arrays = {name: value.numpy() for name, value in module.state_dict().items()}
                np.savez(self._folder / f"{model}-{seed}.npz", **arrays)
        W = self._gossip.sparse_matrix.toarray()
        A = self._objective.matrix(W)
        np.savez(self._folder / "design.npz", W=W, A=A)

    def _compare_designs(self) -> None:
        """Print the value of Tr(A R) and the CPU time, for CorN and for jax_privacy."""
        A = np.load(self._folder / "design.npz")["A"]
        found = run_peer("jax_privacy", self._folder, self._arguments, {"num_steps": 2000})
        start = time.process_time()
        ours = design(
            self._gossip,
            1.0,
            mechanism=Corn(max_noise_std=math.inf),
            objective=self._objective,
            threat=EAVESDROPPER,
        )
        seconds = time.process_time() - start
        value = float(np.trace(A @ ours.covariance))
        print(f"design: corn {value:.6g} in {seconds:.3f} s, at least {ours.lower_bound:.6g}")
        if found is not None:
            print(f"design: jax_privacy {found['value']:.6g} in {found['seconds']:.3f} s")

    def _run_case(self, case: Case) -> Iterator[Score]:
        usual: dict[str, Any] = {
            "epsilon": case.epsilon,
            "delta": _DELTA,
            "num_steps": case.num_steps,
            "clip": _CLIP,
        }
        job = usual | {"agents": _AGENTS, "batch_size": _BATCH, "model": case.model}
        if case.unit == "agent":
            rows = self._make_rows(PrivacyBudget(**usual, adjacency="add-remove"))
        else:
            rows = [*self._make_rows_of_samples(usual), *self._make_rows_of_code(usual, job)]
        step_sizes: dict[str, float] = {}
        for row in rows:
            if row.peer not in step_sizes:
                step_sizes[row.peer] = self._tune(row, case)
            yield from self._train_row(row, case, step_sizes[row.peer])
        name, peer = "opacus", "Opacus"
        if case.unit == "agent":
            name, peer = "flower", "Flower, SecAgg+ and central DP"
        size = step_sizes["trusted server"]
        found = run_peer(
            name, self._folder, self._arguments, {**job, "seeds": _SEEDS, "step_size": size}
        )
        if found is None:
            return
        print(peer, {name: value for name, value in found.items() if name != "runs"}, flush=True)
        traffic = found["messages"], found["bytes"]
        for seed, (accuracy, seconds) in zip(_SEEDS, found["runs"], strict=True):
            yield Score(*case, peer, seed, accuracy, size, seconds, *traffic)

    def _make_rows(self, budget: PrivacyBudget) -> list[Row]:
        """Return what CorN trains under a promise of either unit."""
        objective = default_objective(budget.num_steps)
        names = ["corn", "decor"]
        corn, decor = make_mechanisms(names, self._gossip, budget, objective=objective)
        names = ["none", "central", "corn", "ldp"]
        none, central, sums, ldp = make_mechanisms(names, self._sum, budget, objective=objective)
        # Momentum and a last mixing process what was released, and cost no privacy.
        after = objective.momentum, choose_cooldown(self._gossip, budget.num_steps)
        return [
            Row("no noise", self._sum, none),
            Row("trusted server", self._sum, central),
            Row("CorN, exact sums", self._sum, sums),
            Row("CorN, gossip", self._gossip, corn, *after),
            Row("DECOR's rule", self._gossip, decor, *after),
            Row("LDP, exact sums", self._sum, ldp),
        ]

    def _make_rows_of_samples(self, usual: Mapping[str, Any]) -> Iterator[Row]:
        """Yield what CorN trains under a promise for one sample."""
        budget = PrivacyBudget(
            **usual,
            unit="sample",
            adjacency="add-remove",
            batch_size=_BATCH,
            sampling_rate=_RATE,
        )
        yield from self._make_rows(budget)
        (one_step,) = make_mechanisms(
            ["corn"], self._gossip, budget, objective=Horizon(), threat=EAVESDROPPER
        )
        yield Row("WhisperDSGD's rule", self._gossip, one_step)
        network = load_network("complete:1", mixing="sum")
        for agent in range(0, _AGENTS, _AGENTS // len(_SEEDS)):
            yield Row("alone", network, Mechanism.central(budget, 1), agent=agent)

    def _make_rows_of_code(self, usual: Mapping[str, Any], job: Mapping[str, Any]) -> Iterator[Row]:
        """Yield the noise of the authors' code: replace one, and count a sample at every step."""
        budget = PrivacyBudget(
            **usual, unit="sample", batch_size=_BATCH, sampling="every-step", accounting="rdp"
        )
        for name, peer in (("whisper", "WhisperDSGD's code"), ("decor", "DECOR's code")):
            found = run_peer(name, self._folder, self._arguments, job)
            if found is not None:
                print(peer, found, flush=True)
                spec = f"{name}-code={self._folder / name}.npy"
                (made,) = make_mechanisms([spec], self._gossip, budget, objective=self._objective)
                yield Row(peer, self._gossip, made)

    def _tune(self, row: Row, case: Case) -> float:
        def measure(wanted: Sequence[tuple[int, float]]) -> list[float]:
            sizes = [size for _, size in wanted]
            found, _ = self._train(row, case, sizes, "validation", _TUNING_SEEDS)
            return [float(np.nan_to_num(np.mean(own), nan=-1.0)) for own in found]

        (size,) = tune_step_sizes(measure, [1.0])
        return size

    def _train_row(self, row: Row, case: Case, size: float) -> Iterator[Score]:
        seeds: tuple[int, ...] = _SEEDS
        if row.agent is not None:
            # One seed for each agent, so that there are as many runs of agents alone.
            seeds = (_SEEDS[row.agent * len(_SEEDS) // _AGENTS],)
        (accuracies,), seconds = self._train(row, case, [size], "test", seeds)
        traffic = self._count_traffic(row, case.model)
        for seed, accuracy in zip(seeds, accuracies, strict=True):
            yield Score(*case, row.peer, seed, accuracy, size, seconds / len(seeds), *traffic)

    def _count_traffic(self, row: Row, model: str) -> tuple[float, float]:
        """Return messages and bytes of values per step, of all agents."""
        d = self._problems[model].task.num_parameters
        if row.agent is not None or row.peer in ("no noise", "trusted server"):
            return 0.0, 0.0
        if row.network.mixing == "sum":
            # Up and down a tree, with two bytes for each value.
            messages = 2 * (_AGENTS - 1)
            return messages, 2.0 * d * messages
        messages = self._gossip.sparse_matrix.nnz - _AGENTS
        return messages, 4.0 * d * messages

    def _train(
        self, row: Row, case: Case, sizes: Sequence[float], part: str, seeds: Sequence[int]
    ) -> tuple[list[list[float]], float]:
        """Return the accuracies of each step size by seed, and the CPU seconds of all."""
        problem = self._problems[case.model]
        if row.agent is not None:
            problem = select_agents(problem, [row.agent])
        start = time.process_time()
        result = run_sweep(
            replace(problem, parts={part: problem.parts[part]}),
            row.network,
            [Trial(row.mechanism, Constant(size)) for size in sizes],
            settings=SweepSettings(
                num_steps=case.num_steps,
                batch_size=_BATCH,
                seeds=tuple(seeds),
                momentum=row.momentum,
                cooldown_steps=row.cooldown_steps,
            ),
            evaluate_at=[case.num_steps],
            max_train_samples=100,
            show_progress=False,
        )
        seconds = time.process_time() - start
        found = {
            (float(own["step_size"]), int(own["seed"])): float(own[f"{part}_accuracy"])
            for own in result.last_rows
        }
        return [[found.get((size, seed), math.nan) for seed in seeds] for size in sizes], seconds


def main() -> None:
    """Compare, and write every run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data-dir", type=Path, help="directory of data sets, with mnist")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    pairs: Any = {"nargs": "+", "default": [], "type": lambda text: text.split("=", 1)}
    parser.add_argument("--python", metavar="PEER=PATH", help="interpreters of peers", **pairs)
    parser.add_argument("--code", metavar="PEER=FOLDER", help="checkouts of peers", **pairs)
    arguments = parser.parse_args()
    limit_threads()
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "peers.csv"
    comparison = Comparison(arguments)
    path.unlink(missing_ok=True)
    for score in comparison.run():
        append_runs(path, Score._fields, [score])
    print(path)


if __name__ == "__main__":
    main()
