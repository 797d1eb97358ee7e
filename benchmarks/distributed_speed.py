"""Time, messages and bytes of a step of agents as processes: exact sums, gossip, gloo.

Run ``python benchmarks/distributed_speed.py [--agents 8|20 ...] [--size N ...] [--delay MS]
[--batch N] [--kinds NAME ...] [--steps N] [--turns N]``. Agents on a random
graph, each a process with one thread, take turns with all kinds of steps, in changing order, over
the same sealed links. So does ``all_reduce`` of gloo on d float32 numbers, which is neither private
nor sealed. Gradients are given, so that a step is clipping, noise, masks, messages and the new
model; with ``--batch`` a network of about d parameters computes them.

The time is the median over turns, and work is the processor time of one agent, which other programs
disturb less. A private step is compared with the same step without noise, if that is measured too:
turn by turn, with the quartiles. A turn of exact sums includes the closing sum.

With ``--delay`` every link passes through a proxy that hands bytes on after so many milliseconds,
as many as arrive. It delays no connection of gloo, which is left out then.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import multiprocessing
import queue
import socket
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as gloo
from torch import Tensor, nn

from corn.covariance import MechanismName, ThreatModel
from corn.distributed import Rendezvous, RunSettings
from corn.distributed.exchange import Exchange
from corn.distributed.membership import Membership
from corn.distributed.messages import NewsKeys, message_limit
from corn.distributed.recovery import ActivePlan
from corn.distributed.rendezvous import join
from corn.distributed.rounds import TrainingRounds
from corn.distributed.summing import integer_type
from corn.learn.batches import AgentData, BatchSampler, SeededChoices
from corn.learn.perturbation import NoiseShare
from corn.learn.schedule import Constant
from corn.learn.step import (
    AgentStepper,
    StepStatistics,
    clip_factors,
    gradient_norms,
    no_statistics,
)
from corn.learn.sweep import Interruption
from corn.learn.tasks import ModuleTask
from corn.learn.tasks.protocol import Gradients
from corn.noise.masks import WORDS, is_possible, read_total
from corn.plan import Plan, load_plan, make_plan, save_plan
from corn.privacy import PrivacyBudget
from corn.threads import limit_threads
from corn.topology import Mixing, load_network
from corn.transport import StoreHost, open_links

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.distributed.rehearsal import make_public_credentials, make_public_source

GRAPHS = {8: "er:n=8,p=0.5,seed=1", 20: "er:n=20,p=0.2,seed=1"}
FEATURES, CLASSES, NUM_SAMPLES = 256, 10, 2048
GLOO = "gloo"
PLAIN = ", no noise"
KINDS: dict[str, tuple[Mixing, MechanismName, ThreatModel]] = {
    "sum": ("sum", "corn", ThreatModel(1)),
    "gossip": ("gossip", "corn", ThreatModel(1, "pairs")),
    "gossip, seeds of links": ("gossip", "corn", ThreatModel(1, "edges")),
    "gossip, decor": ("gossip", "decor", ThreatModel()),
    "gossip, ldp": ("gossip", "ldp", ThreatModel()),
}
CHOICES = (*KINDS, "sum" + PLAIN, "gossip" + PLAIN, GLOO)


@dataclass(frozen=True)
class Job:
    """The work of each process.

    Attributes:
        ports: where each agent listens, and where others reach it; none without a delay.
    """

    folder: Path
    kinds: tuple[str, ...]
    num_agents: int
    size: int
    batch: int
    steps: int
    turns: int
    store: int
    gloo: int
    ports: tuple[tuple[int, int], ...]


class Silence:
    """No noise."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def prepare(self, step: int) -> None:
        """Draw nothing."""


class PlainStepper:
    """Steps of an agent without privacy: clip and step in single precision."""

    num_broken = 0
    statistics = no_statistics()

    def __init__(self, batches: BatchSampler) -> None:
        self._batches = batches

    def begin(self, step: int, noise: Silence, parameters: Tensor) -> None:
        """Begin a step of the network."""
        self._plan = noise.plan
        self.parameters, self.batch = parameters, self._batches.draw(step)

    @torch.no_grad()
    def differentiate(self, task: ModuleTask) -> None:
        """Compute the gradient of a task, and clip it."""
        self.clip(task.gradient(self.parameters.view(1, 1, -1), self.batch))

    @torch.no_grad()
    def clip(self, found: Gradients) -> None:
        """Clip the gradient."""
        self._gradient = found.values.view(-1)
        norm = gradient_norms(self._gradient)
        self._gradient.mul_(clip_factors(norm, self._plan.budget.clip))

    def release_half_step(self, *, step_size: float, **_: object) -> Tensor:
        """Return the message, as ``AgentStepper`` does."""
        return torch.sub(self.parameters, self._gradient, alpha=step_size, out=self._gradient)

    def release_masked(self, **_: object) -> Any:
        """Return the clipped gradient in integers, as ``AgentStepper`` does."""
        units = self._gradient.mul_(1 / self._plan.grid).round_()
        bits = self._plan.mask_bits
        return units.to(integer_type(bits)).numpy().view(WORDS[bits])

    def finish(self, total: Any, *, step_size: float) -> Tensor:
        """Return the step along the average."""
        plan = self._plan
        average = read_total(
            total, num_agents=plan.num_agents, grid=plan.grid, offset=None, dtype=np.float32
        )
        if not is_possible(total, plan.largest_sum):
            raise RuntimeError("a sum of clipped gradients is too large")
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


class Work:
    """An agent's gradients: given, or of a network with two hidden layers."""

    def __init__(self, agent: int, num_agents: int, size: int, batch: int) -> None:
        generator = torch.Generator().manual_seed(agent)
        inputs = torch.randn(NUM_SAMPLES, FEATURES, generator=generator)
        labels = torch.randint(CLASSES, (NUM_SAMPLES,), generator=generator)
        data = AgentData(inputs, labels, (0, NUM_SAMPLES))
        choices = [SeededChoices(agent)]
        self.batches = BatchSampler(data, batch_size=batch or 1, choices=choices)
        self._task = make_task(size) if batch else None
        self.start = torch.zeros(size)
        self._given = torch.randn(size, generator=generator)
        self.keys = make_keys(agent, num_agents)
        if self._task is not None:
            self.start = self._task.initialize(0).float()

    def differentiate(self, stepper: Any) -> None:
        """Let a stepper have its gradient."""
        if self._task is None:
            stepper.clip(Gradients(self._given.clone().view(1, 1, -1)))
        else:
            stepper.differentiate(self._task)


def make_task(size: int) -> ModuleTask:
    """Return a network with two hidden layers and about so many parameters."""
    sides = FEATURES + CLASSES + 2
    width = round((math.sqrt(sides**2 + 4 * size) - sides) / 2)
    torch.manual_seed(0)
    layers = (nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
    return ModuleTask(
        nn.Sequential(*layers, nn.Linear(width, CLASSES)), nn.functional.cross_entropy
    )


def make_keys(agent: int, num_agents: int) -> NewsKeys:
    """Return the keys that sign an agent's news."""
    return NewsKeys(make_public_credentials(0, agent, num_agents), bytes(32))


def run_agent(agent: int, job: Job, results: Any) -> None:
    """Run all kinds of steps in turns, and report times and traffic."""
    limit_threads()
    work = Work(agent, job.num_agents, job.size, job.batch)
    rendezvous, exchange = meet(agent, job, work.start)
    if GLOO in job.kinds:
        gloo.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{job.gloo}",
            rank=agent,
            world_size=job.num_agents,
            timeout=timedelta(seconds=600),
        )
    plans = {kind: load_plan(job.folder / kind) for kind in job.kinds if kind != GLOO}
    found: dict[str, list[tuple[float, ...]]] = {kind: [] for kind in job.kinds}
    order = deque(job.kinds)
    # The first turn warms up: links, buffers and code.
    for turn in range(job.turns + 1):
        order.rotate()
        for kind in order:
            rendezvous.agree(f"turn-{kind}-{turn}", "")
            before = count_traffic(exchange)
            began, worked = time.perf_counter(), time.process_time()
            if kind == GLOO:
                for _ in range(job.steps):
                    gloo.all_reduce(work.start.clone())
            else:
                run_steps(agent, plans[kind], exchange, work, job, is_private=PLAIN not in kind)
            seconds = time.perf_counter() - began, time.process_time() - worked
            traffic = count_traffic(exchange) - before
            if turn:
                found[kind].append(tuple(each / job.steps for each in (*seconds, *traffic)))
    rendezvous.agree("over", "")
    exchange.close()
    if GLOO in job.kinds:
        gloo.destroy_process_group()
    results.put((len(work.start), found))


def meet(agent: int, job: Job, start: Tensor) -> tuple[Rendezvous, Exchange]:
    """Return an agent at the store, and its links; keys are public, which changes no time."""
    listen, advertise = job.ports[agent] if job.ports else (None, None)
    rendezvous = join(
        make_public_credentials(0, agent, job.num_agents),
        store=("127.0.0.1", job.store),
        timeout=600,
        opens_store=False,
        listen=None if listen is None else ("127.0.0.1", listen),
        advertise=None if advertise is None else ("127.0.0.1", advertise),
    )
    limit = message_limit(job.num_agents, job.num_agents**2, start.nbytes)
    opener = rendezvous.make_opener(rendezvous.meeting, max_bytes=limit)
    graph = load_network(GRAPHS[job.num_agents]).graph
    links = open_links(opener, graph.neighbors(agent), timeout=600, check=rendezvous.check)
    membership = Membership(graph, agent, make_keys(agent, job.num_agents))
    exchange = Exchange(links, membership, dtype=start.dtype, timeout=600)
    return rendezvous, exchange


def count_traffic(exchange: Exchange) -> Any:
    """Return messages and bytes that this agent has sent."""
    own = exchange.traffic.values()
    return np.array([sum(t.messages_sent for t in own), sum(t.bytes_sent for t in own)])


def run_steps(
    agent: int, plan: Plan, exchange: Exchange, work: Work, job: Job, *, is_private: bool
) -> None:
    """Run one agent's steps of a turn."""
    start = work.start

    def activate(plan: Plan, members: tuple[int, ...]) -> ActivePlan:
        noise: Any = Silence(plan)
        if is_private:
            source = make_public_source(plan.decomposition, agent, seed=0)
            noise = NoiseShare(plan, agent, source, nonce=bytes(32), num_parameters=len(start))
        return ActivePlan(plan, members, noise)

    stepper: Any = PlainStepper(work.batches)
    if is_private:
        stepper = AgentStepper(plan.budget.query, lambda step: step, work.batches)
    is_sum = plan.network.mixing == "sum"
    exchange.dtype = integer_type(plan.mask_bits) if is_sum else start.dtype
    exchange.membership = Membership(plan.network.graph, agent, work.keys)
    nobody: Any = Nobody()
    returns: Any = NoReturns()
    run: Any = SimpleNamespace(
        plan=plan,
        settings=RunSettings(Constant(0.01), num_steps=job.steps, timeout=600, evaluate_at=()),
        activate=activate,
        stepper=stepper,
        exchange=exchange,
        returns=returns,
        first_step=0,
        last_step=job.steps,
        admission=None,
    )
    rounds = TrainingRounds(run, nobody, start.clone())
    for each in rounds.run(Interruption()):
        work.differentiate(each)


def run_proxies(ports: tuple[tuple[int, int], ...], delay: float) -> None:
    """Hand on what arrives at the second port of each pair to the first after a delay."""

    async def relay(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        loop, arrived = asyncio.get_running_loop(), asyncio.Queue[tuple[float, bytes]]()

        async def hand_on() -> None:
            while True:
                when, data = await arrived.get()
                await asyncio.sleep(when - loop.time())
                if not data:
                    break
                sink.write(data)
                await sink.drain()
            sink.close()

        writer = asyncio.create_task(hand_on())
        data = b"-"
        while data:
            data = await source.read(1 << 20)
            arrived.put_nowait((loop.time() + delay, data))
        await writer

    async def serve() -> None:
        def connect_to(port: int) -> Any:
            async def serve_one(ours: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
                reader, onward = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
                await asyncio.gather(
                    relay(ours, onward), relay(reader, back), return_exceptions=True
                )

            return serve_one

        servers = [
            await asyncio.start_server(connect_to(port), "127.0.0.1", proxy, limit=1 << 20)
            for port, proxy in ports
        ]
        await asyncio.gather(*(server.serve_forever() for server in servers))

    asyncio.run(serve())


def find_ports(count: int) -> list[int]:
    """Return ports that are free now."""
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    return ports


def measure(
    num_agents: int,
    size: int,
    kinds: list[str],
    *,
    batch: int,
    steps: int,
    turns: int,
    delay: float,
) -> dict[str, Any]:
    """Return the length of the model, and figures of a step for each kind."""
    budget = PrivacyBudget(10, 1e-5, num_steps=5000, clip=0.1)
    context = multiprocessing.get_context("forkserver")
    # Libraries are loaded once, not by every process.
    context.set_forkserver_preload(["corn.noise.compiled", "torch.distributed"])
    chosen = tuple(kind for kind in dict.fromkeys(kinds) if not delay or kind != GLOO)
    with tempfile.TemporaryDirectory() as name:
        for kind in chosen:
            if kind != GLOO:
                mixing, mechanism, threat = KINDS[kind.removesuffix(PLAIN)]
                network = load_network(GRAPHS[num_agents], mixing=mixing)
                # Without a cool-down, whose messages would count as those of steps.
                plan = make_plan(
                    network, budget, mechanism=mechanism, threat=threat, cooldown_steps=0
                )
                save_plan(plan, Path(name) / kind)
        store = StoreHost(("127.0.0.1", 0), make_public_credentials(0, 0, num_agents))
        gloo_port, *rest = find_ports(1 + (2 * num_agents if delay else 0))
        ports = tuple(zip(rest[::2], rest[1::2], strict=True))
        job = Job(
            Path(name),
            chosen,
            num_agents,
            size,
            batch,
            steps,
            turns,
            store.port,
            gloo_port,
            ports,
        )
        results = context.Queue()
        crew = [
            context.Process(target=run_agent, args=(a, job, results)) for a in range(num_agents)
        ]
        proxies = context.Process(target=run_proxies, args=(ports, delay))
        everyone = [proxies, *crew]
        try:
            for process in everyone:
                process.start()
            reports = collect(results, crew)
            for process in crew:
                process.join()
        finally:
            for process in everyone:
                process.terminate()
    length, _ = reports[0]
    # Shape (agents, turns, columns).
    times = {kind: np.array([found[kind] for _, found in reports]) for kind in chosen}
    table = {}
    for kind, own in times.items():
        plain = ("sum" if kind.startswith("sum") else "gossip") + PLAIN
        table[kind] = summarize(own, times.get(plain) if kind in KINDS else None)
    return {"agents": num_agents, "d": length, "delay ms": 1000 * delay, "kinds": table}


def collect(results: Any, crew: list[Any]) -> list[Any]:
    """Return the report of each process; raise where one has died, as others wait for it."""
    reports: list[Any] = []
    while len(reports) < len(crew):
        try:
            reports.append(results.get(timeout=2))
        except queue.Empty:
            died = [a for a, process in enumerate(crew) if process.exitcode not in (None, 0)]
            if died:
                raise RuntimeError(f"agents {died} died") from None
    return reports


def summarize(own: Any, plain: Any) -> dict[str, Any]:
    """Return the figures of one kind, from an array of shape (agents, turns, columns)."""
    # All agents take a step together, but each works by itself.
    ms, work_ms = np.median(1000 * own[..., :2].mean(axis=0), axis=0).tolist()
    messages, sent = own[..., 2:].mean(axis=1).sum(axis=0).tolist()
    row = {"ms": ms, "work ms": work_ms, "messages": messages, "MB": sent / 1e6}
    if plain is not None:
        ratios = own[..., :2].mean(axis=0) / plain[..., :2].mean(axis=0)
        wall, work = np.quantile(ratios, (0.25, 0.5, 0.75), axis=0).T.tolist()
        row |= {"over no noise": wall, "work over no noise": work}
    return row


def main() -> None:
    """Measure and print one table for each number of agents and parameters."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agents", type=int, nargs="+", choices=GRAPHS, default=[8, 20])
    parser.add_argument("--size", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--delay", type=float, default=0.0, help="milliseconds per hop")
    parser.add_argument("--batch", type=int, default=0, help="of a network; 0: given gradients")
    parser.add_argument(
        "--kinds", nargs="+", choices=CHOICES, default=["sum", "gossip", GLOO], metavar="NAME"
    )
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    limit_threads()
    for n, d in itertools.product(options.agents, options.size):
        show(
            measure(
                n,
                d,
                options.kinds,
                batch=options.batch,
                steps=options.steps,
                turns=options.turns,
                delay=options.delay / 1000,
            )
        )


def show(found: dict[str, Any]) -> None:
    """Print a table of one number of agents and parameters."""
    graph = GRAPHS[found["agents"]]
    print(
        f"d = {found['d']:,}, {found['agents']} agents on {graph}, tree of depth "
        f"{load_network(graph, mixing='sum').tree.depth}, {found['delay ms']:g} ms per hop"
    )
    print(f"    {'':<26}{'ms':>8}{'work ms':>9}{'messages':>10}{'MB':>8}")
    for kind, row in found["kinds"].items():
        line = f"    {kind:<26}{row['ms']:8.1f}{row['work ms']:9.1f}"
        if kind != GLOO:
            line += f"{row['messages']:10.1f}{row['MB']:8.2f}"
        for name in ("over no noise", "work over no noise"):
            if name in row:
                low, middle, high = row[name]
                line += f"   {name}: {middle:.2f} × ({low:.2f}–{high:.2f})"
        print(line, flush=True)


if __name__ == "__main__":
    main()
