"""Accuracy on MNIST where agents are killed during training, next to runs without losses.

    OMP_NUM_THREADS=1 python benchmarks/lost_agents.py --data-dir DATA [--out FILE]

Ten agents, each a process, train a network; ε = 1 protects one sample. Agents are killed (SIGKILL)
when the others have passed a part of the steps, and do not return. The survivors make a new plan
for themselves and go on. FILE has every run.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np

from corn.distributed.keyring import load_credentials, make_keys
from corn.distributed.launcher import AgentProcesses
from corn.distributed.results import AgentResult
from corn.distributed.settings import AgentConfig, RunSettings
from corn.learn import Constant, Workload
from corn.plan import make_plan, save_plan
from corn.privacy import PrivacyBudget
from corn.threads import limit_threads
from corn.topology import Mixing, load_network
from corn.transport import StoreHost
from measuring import append_runs, describe, format_table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.distributed.harness import send_signal

_GRAPH, _AGENTS, _NUM_STEPS, _RATE = "er:n=10,p=0.5,seed=1", 10, 120, 1 / 20
_SEEDS = (10, 11, 12)
# That of benchmarks/peers.py, which validation accuracy chose for a similar run.
_STEP_SIZE, _MIXINGS = 4.0, get_args(Mixing)
# Killed processes close their connections at once; only a busy machine comes near this.
_TIMEOUT = 120.0
# The part of the steps after which each agent is killed.
_LOSSES: Mapping[str, Mapping[int, float]] = {
    "none": {},
    "one at 50 %": {3: 0.5},
    "three at 25 %, 50 % and 75 %": {3: 0.25, 5: 0.5, 8: 0.75},
    "five at 50 %": {1: 0.5, 3: 0.5, 5: 0.5, 7: 0.5, 8: 0.5},
}


class Score(NamedTuple):
    """One run: the accuracy of the survivors' models, and the steps of the losses."""

    mixing: str
    losses: str
    seed: int
    accuracy: float
    finished: int
    steps: int
    lost: str
    largest_epsilon: float


def run(
    folder: Path, data: Path | None, mixing: Mixing, losses: Mapping[int, float], seed: int
) -> dict[int, AgentResult]:
    """Run all agents, kill those that are to be lost, and return the results."""
    plan_path = folder / "plan.corn"
    samples = Workload("mnist", model="network", partition="iid", l2=0.0, seed=1, directory=data)
    budget = PrivacyBudget(
        1.0,
        1e-5,
        _NUM_STEPS,
        clip=1.0,
        unit="sample",
        batch_size=round(_RATE * min(samples.build(_AGENTS).data.sizes)),
        sampling_rate=_RATE,
    )
    save_plan(make_plan(load_network(_GRAPH, mixing=mixing), budget), plan_path)
    make_keys(folder / "keys", _AGENTS)
    settings = RunSettings(
        Constant(_STEP_SIZE),
        seed=seed,
        timeout=_TIMEOUT,
        evaluate_at=(_NUM_STEPS,),
    )
    store = StoreHost(("127.0.0.1", 0), load_credentials(folder / "keys", 0, _AGENTS))
    processes = AgentProcesses(
        {
            agent: AgentConfig(
                workload=samples,
                settings=settings,
                out=folder / "out",
                source=plan_path,
                keys=folder / "keys",
                agent=agent,
                num_agents=_AGENTS,
                store=("127.0.0.1", store.port),
                opens_store=False,
            )
            for agent in range(_AGENTS)
        }
    )
    waiting = dict(losses)
    try:
        processes.start()
        while processes.is_running:
            processes.poll(0.02)
            step = max((own.step for own in processes.states.values()), default=0)
            for agent, part in list(waiting.items()):
                if step >= part * _NUM_STEPS:
                    del waiting[agent]
                    send_signal(processes, agent, signal.SIGKILL)
    finally:
        processes.close()
        store.close()
    return processes.results


def summarise(mixing: Mixing, losses: str, seed: int, results: Mapping[int, AgentResult]) -> Score:
    """Return the mean accuracy of the agents that finished, and what the run went through."""
    finished = [own for own in results.values() if own.failure is None]
    lost = {agent: step for own in finished for agent, step in own.lost.items()}
    return Score(
        mixing,
        losses,
        seed,
        sum(float(own.measured["test_accuracy"]) for own in finished) / len(finished),
        len(finished),
        min(own.num_steps for own in finished),
        " ".join(f"{agent}:{lost[agent]}" for agent in sorted(lost)),
        max(float(own.measured["epsilon"]) for own in finished),
    )


def tabulate(scores: Sequence[Score]) -> str:
    """Return a Markdown table of accuracies, and of paired differences to runs without losses."""
    groups: dict[tuple[str, str], list[Score]] = {}
    for score in scores:
        groups.setdefault((score.mixing, score.losses), []).append(score)
    rows = [["mixing", "agents killed", "test accuracy", "difference to no losses", "ε"]]
    for (mixing, losses), own in groups.items():
        usual = [one.accuracy for one in groups[mixing, "none"]]
        accuracies = np.array([one.accuracy for one in own])
        gap = describe(accuracies - usual, "+") if losses != "none" else ""
        epsilon = max(one.largest_epsilon for one in own)
        rows.append([mixing, losses, describe(accuracies), gap, f"{epsilon:.4g}"])
    return format_table(rows)


def main() -> None:
    """Run every case, write every run and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data-dir", type=Path, help="directory of data sets, with mnist")
    parser.add_argument("--out", type=Path, default=Path("docs/results/lost-agents.csv"))
    arguments = parser.parse_args()
    limit_threads()
    arguments.out.unlink(missing_ok=True)
    scores: list[Score] = []
    for mixing in _MIXINGS:
        for losses, places in _LOSSES.items():
            for seed in _SEEDS:
                with tempfile.TemporaryDirectory() as folder:
                    results = run(Path(folder), arguments.data_dir, mixing, places, seed)
                scores.append(summarise(mixing, losses, seed, results))
                append_runs(arguments.out, Score._fields, scores[-1:])
                print(scores[-1], flush=True)
    print(tabulate(scores))


if __name__ == "__main__":
    main()
