"""How fast agents run as processes: a private step against the same step without noise.

Run ``python benchmarks/distributed_speed.py [--steps N] [--turns N] [--batch N] [--json]``. Eight
agents on a ring, each a process with one thread, train a network of d parameters. Kinds of noise
take turns in the same processes over the same links, in changing order; a turn's times are compared
with those of the steps without noise in the same turn, and the median over the turns is told, with
the quartiles. Beside the time between steps stands the processor time that all agents worked, which
other programs on the machine disturb less. Exact sums are compared with sums of clipped gradients,
as integers of 16 bits, without noise and masks. Also: how long 20 agents take from the command to
everyone's first step.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from corn.covariance import MechanismName, ThreatModel
from corn.distributed import Rendezvous, RunSettings, launch
from corn.distributed.exchange import Exchange
from corn.distributed.membership import Membership
from corn.distributed.messages import message_limit
from corn.distributed.recovery import ActivePlan
from corn.distributed.rendezvous import host_store, join
from corn.distributed.rounds import TrainingRounds
from corn.distributed.summing import integer_type
from corn.learn.batches import AgentData, BatchSampler, SeededChoices
from corn.learn.perturbation import DrawnNoise, NoiseShare
from corn.learn.schedule import Constant
from corn.learn.step import (
    AgentStepper,
    StepStatistics,
    clip_factors,
    gradient_norms,
    no_statistics,
    read_sum,
)
from corn.learn.sweep import Interruption
from corn.learn.tasks import ModuleTask, Task
from corn.learn.workloads import Workload
from corn.plan import Plan, load_plan, make_plan, save_plan
from corn.privacy import PrivacyBudget
from corn.threads import limit_threads
from corn.topology import load_network
from corn.transport import Address, Purpose, open_links
from tests.distributed.rehearsal import make_public_credentials, make_public_source

NUM_AGENTS, FEATURES, CLASSES = 8, 256, 10
NO_SUM_NOISE = "none, exact sums"
SUM = "corn, one insider, exact sums"
WIDTHS = {100_000: 228, 1_000_000: 878}
KINDS: dict[str, tuple[MechanismName, ThreatModel]] = {
    "ldp": ("ldp", ThreatModel()),
    "decor": ("decor", ThreatModel()),
    "corn, one insider, seeds of links": ("corn", ThreatModel(1, "edges")),
    "corn, one insider, seeds of pairs": ("corn", ThreatModel(1, "pairs")),
    SUM: ("corn", ThreatModel(1, "pairs")),
}


@dataclass(frozen=True)
class Job:
    """What each process does."""

    folder: Path
    kinds: tuple[str, ...]
    num_parameters: int
    batch: int
    steps: int
    turns: int
    port: int


class Silence:
    """No noise, and for exact sums an offset of zero."""

    def __init__(self, num_parameters: int = 0) -> None:
        self._offset = np.zeros(num_parameters)

    def prepare(self, step: int) -> None:
        """Draw nothing."""

    def take(self, step: int) -> DrawnNoise:  # noqa: ARG002
        """Return nothing."""
        return DrawnNoise(torch.empty(0), self._offset, np.empty(0, np.uint16))


class PlainStepper:
    """Steps of an agent without privacy: gradient, clip and step in single precision."""

    num_broken = 0
    statistics = no_statistics()

    def __init__(self, batches: BatchSampler, plan: Plan) -> None:
        self._batches, self._plan = batches, plan

    def begin(self, step: int, noise: Silence, parameters: Tensor) -> None:
        """Begin a step of the network."""
        self._offset = noise.take(step).offset
        self.parameters, self.batch = parameters, self._batches.draw(step)

    @torch.no_grad()
    def differentiate(self, task: Task) -> None:
        """Compute and clip the gradient."""
        self._gradient = task.gradient(self.parameters.view(1, 1, -1), self.batch).values.view(-1)
        norm = gradient_norms(self._gradient)
        self._gradient.mul_(clip_factors(norm, self._plan.budget.clip))

    def release_half_step(self, *, step_size: float, **_: object) -> Tensor:
        """Return the message, as ``AgentStepper`` does."""
        return torch.sub(self.parameters, self._gradient, alpha=step_size, out=self._gradient)

    def release_masked(self, **_: object) -> Any:
        """Return the clipped gradient in integers, as ``AgentStepper`` does."""
        units = self._gradient.mul_(1 / self._plan.grid)
        return units.round_().to(torch.int16).numpy().view(np.uint16)

    def finish(self, total: Any, *, step_size: float) -> Tensor:
        """Return the step along the average."""
        average = read_sum(total, self._plan, offset=self._offset, dtype=np.float32)
        return torch.sub(self.parameters, torch.from_numpy(average), alpha=step_size)


class NoReturns:
    """Nobody comes back."""

    def serve(self, *_: object) -> None:
        """There are no requests."""

    def hand_over(self, *_: object) -> None:
        """There is nobody to receive a model."""

    def reject(self, *_: object) -> None:
        """There are no requests."""

    def close(self) -> None:
        """Nothing was opened."""


class Nobody:
    """Journal that records nothing."""

    def record_step(self, step: int, parameters: Tensor, statistics: StepStatistics) -> None:
        """Nothing is written."""

    def stop_saving(self) -> None:
        """Models may be of no use."""

    def note(self, text: str) -> None:
        """Nothing may happen that an agent would note."""
        raise RuntimeError(text)

    def note_privately(self, text: str) -> None:
        """See ``note``."""
        raise RuntimeError(text)


def make_task(num_parameters: int) -> ModuleTask:
    """A network with two hidden layers and about so many parameters."""
    width = WIDTHS[num_parameters]
    torch.manual_seed(0)
    layers = (nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
    return ModuleTask(
        nn.Sequential(*layers, nn.Linear(width, CLASSES)), nn.functional.cross_entropy
    )


def run_agent(agent: int, job: Job, results: Any) -> None:
    limit_threads()
    rendezvous = meet(agent, job.port)
    task, plans = make_task(job.num_parameters), {k: load_plan(job.folder / k) for k in job.kinds}
    plan = plans[job.kinds[0]]
    generator = torch.Generator().manual_seed(agent)
    data = AgentData(
        torch.randn(2048, FEATURES, generator=generator),
        torch.randint(CLASSES, (2048,), generator=generator),
        (0, 2048),
    )
    choices = [SeededChoices(agent)]
    batches = BatchSampler(data, batch_size=job.batch, choices=choices)
    private = AgentStepper(plan.budget.query, lambda step: step, batches)
    plain: Any = PlainStepper(batches, plan)
    plain_sum: Any = PlainStepper(batches, plans[SUM])
    start = task.initialize(0).float()
    exchange = connect(rendezvous, plan, start)
    names = ("none", NO_SUM_NOISE, *job.kinds)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    order = deque(found)
    for _ in range(job.turns):
        order.rotate()
        for name in order:
            began, worked = time.perf_counter(), time.process_time()
            rules = {"none": plain, NO_SUM_NOISE: plain_sum}
            own = rules.get(name, private)
            in_force = plans[SUM] if name == NO_SUM_NOISE else plans.get(name, plan)
            is_sum = in_force.network.mixing == "sum"
            exchange.dtype = integer_type(in_force.mask_bits) if is_sum else start.dtype
            loop = make_loop(agent, in_force, name, own, exchange, start, job)
            for stepper in loop.run(Interruption()):
                stepper.differentiate(task)
            wall, work = time.perf_counter() - began, time.process_time() - worked
            found[name].append((wall / job.steps, work / job.steps))
    rendezvous.agree("over", "")
    exchange.close()
    results.put((found, len(start)))


def meet(
    agent: int,
    port: int,
    *,
    num_agents: int = NUM_AGENTS,
    listen: Address | None = None,
    advertise: Address | None = None,
) -> Rendezvous:
    """Return an agent at the store; keys are public, which changes no time."""
    return join(
        make_public_credentials(0, agent, num_agents),
        store=("127.0.0.1", port),
        timeout=120,
        opens_store=False,
        listen=listen,
        advertise=advertise,
    )


def connect(rendezvous: Rendezvous, plan: Plan, start: Tensor) -> Exchange:
    n = plan.num_agents
    opener = rendezvous.make_link_opener(
        Purpose.LINK, max_bytes=message_limit(n, n**2, start.nbytes)
    )
    neighbours = plan.network.graph.neighbors(rendezvous.agent)
    links = open_links(opener, neighbours, timeout=120, check=rendezvous.check_interruption)
    return Exchange(links, num_agents=n, dtype=start.dtype, timeout=120)


def make_loop(
    agent: int,
    plan: Plan,
    name: str,
    stepper: AgentStepper,
    exchange: Exchange,
    start: Tensor,
    job: Job,
) -> TrainingRounds:
    def activate(plan: Plan, members: tuple[int, ...]) -> ActivePlan:
        noise: Any = Silence(len(start))
        if name not in ("none", NO_SUM_NOISE):
            source = make_public_source(plan.decomposition, agent, seed=0)
            noise = NoiseShare(plan, agent, source, nonce=bytes(32), num_parameters=len(start))
        return ActivePlan(plan, members, noise)

    nobody: Any = Nobody()
    returns: Any = NoReturns()
    settings = RunSettings(Constant(0.01), num_steps=job.steps, timeout=120, evaluate_at=())
    return TrainingRounds(
        plan,
        settings,
        agent=agent,
        activate=activate,
        stepper=stepper,
        exchange=exchange,
        returns=returns,
        membership=Membership(plan.network.graph, agent),
        journal=nobody,
        first_step=0,
        last_step=job.steps,
        parameters=start.clone(),
    )


def measure_steps(
    num_parameters: int, kinds: list[str], batch: int, steps: int, turns: int
) -> dict[str, Any]:
    """Milliseconds a step for each kind of noise."""
    network = load_network(f"ring:{NUM_AGENTS}", mixing="gossip")
    budget = PrivacyBudget(10, 1e-5, num_steps=5000, clip=0.1)
    streams = {}
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as name:
        # Steps without noise mix by the first plan, and sum up by the plan of exact sums.
        for kind in dict.fromkeys(["ldp", *kinds, SUM]):
            mechanism, threat = KINDS[kind]
            # Without a cool-down, whose messages would count as those of steps.
            mixed = replace(network, mixing="sum" if kind == SUM else "gossip")
            plan = make_plan(mixed, budget, mechanism=mechanism, threat=threat, cooldown_steps=0)
            save_plan(plan, Path(name) / kind)
            streams[kind] = plan.decomposition.count_streams()[0]
        store = host_store(("127.0.0.1", 0), make_public_credentials(0, 0, NUM_AGENTS))
        job = Job(Path(name), tuple(streams), num_parameters, batch, steps, turns, store.port)
        results = context.Queue()
        crew = [
            context.Process(target=run_agent, args=(a, job, results)) for a in range(NUM_AGENTS)
        ]
        for process in crew:
            process.start()
        reports = [results.get(timeout=1200) for _ in crew]
        for process in crew:
            process.join()
    times = {kind: np.array([found[kind] for found, _ in reports]) for kind in reports[0][0]}
    _, d = reports[0]
    table = {
        kind: compare(own, times[NO_SUM_NOISE if "sums" in kind else "none"])
        for kind, own in times.items()
    }
    for kind, row in table.items():
        row["streams"] = streams.get(kind, 0)
    return {"d": d, "steps": table}


def compare(own: Any, plain: Any) -> dict[str, Any]:
    """Times of one kind of noise against those without, shape (agents, turns, wall and work)."""
    # All agents take a step together, but each works by itself.
    milliseconds, ratios = 1000 * own.mean(axis=0), own.mean(axis=0) / plain.mean(axis=0)
    quartiles = np.quantile(ratios, (0.25, 0.5, 0.75), axis=0).T.tolist()
    ms, work_ms = np.median(milliseconds, axis=0).tolist()
    return {"ms": ms, "ratio": quartiles[0], "work ms": work_ms, "work ratio": quartiles[1]}


def measure_start() -> dict[str, float]:
    """Seconds from the start of 20 agents to everyone's first step."""
    network = load_network("er:n=20,p=0.2,seed=1", mixing="gossip")
    budget = PrivacyBudget(10, 1e-5, num_steps=20, clip=0.1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan = make_plan(network, budget, mechanism="decor", threat=ThreatModel())
        save_plan(plan, folder / "plan.corn")
        settings = RunSettings(Constant(0.1), batch_size=32)
        launched = launch(
            folder / "plan.corn",
            Workload("breast-cancer"),
            out=folder,
            settings=settings,
            keys=folder / "keys",
        )
    return {"seconds": launched.seconds_to_start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--size", type=int, nargs="+", choices=WIDTHS, default=list(WIDTHS))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    limit_threads()
    results: dict[str, Any] = {"start of 20 agents": measure_start()}
    for size in options.size:
        results[f"d ≈ {size}"] = measure_steps(
            size, options.kinds, options.batch, options.steps, options.turns
        )
    if options.json:
        print(json.dumps(results, indent=1))
        return
    print(f"20 agents started in {results['start of 20 agents']['seconds']:.1f} s (target 10)")
    for size in options.size:
        own = results[f"d ≈ {size}"]
        print(f"d = {own['d']}, batches of {options.batch}, 8 agents on a ring")
        for kind, row in own["steps"].items():
            wall, work = (
                f"{row[name]:7.1f} ms {middle:5.2f} × ({low:.2f}–{high:.2f})"
                for name, (low, middle, high) in (
                    ("ms", row["ratio"]),
                    ("work ms", row["work ratio"]),
                )
            )
            print(f"    {kind:<36}{wall}, an agent worked {work}, {row['streams']} streams")


if __name__ == "__main__":
    main()
