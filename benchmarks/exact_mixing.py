"""Time, messages and bytes of a step: exact sums and gossip between agents, beside gloo.

Run ``python benchmarks/exact_mixing.py [--agents 8|20 ...] [--size N ...] [--delay MS] [--steps N]
[--turns N] [--json]``. Agents on a random graph, each a process with one thread, release d numbers
in every step, with noise against one insider on seeds of pairs. Gradients are given, so that a step
is clipping, noise, masks, messages and the new model. Exact sums and gossip take turns in the same
processes over the same sealed links, and so does ``all_reduce`` of gloo on d float32 numbers, which
is neither private nor sealed. Times are the best of the turns, as other programs disturb some; work
is the processor time of one agent. Time and messages of exact sums include the closing sum, an
empty message up and down each link of the tree, in each turn.

With ``--delay`` every link passes through a proxy that hands bytes on after so many milliseconds,
as many as arrive. It delays no connection of gloo, which is left out then.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import socket
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as gloo
from torch import Tensor

from corn.distributed import RunSettings
from corn.distributed.exchange import Exchange
from corn.distributed.membership import Membership
from corn.distributed.recovery import ActivePlan
from corn.distributed.rendezvous import host_store
from corn.distributed.rounds import TrainingRounds
from corn.distributed.summing import integer_type
from corn.learn.perturbation import NoiseShare
from corn.learn.schedule import Constant
from corn.learn.step import AgentStepper
from corn.learn.sweep import Interruption
from corn.learn.tasks.protocol import Gradients
from corn.plan import Plan, load_plan, make_plan, save_plan
from corn.privacy import PrivacyBudget
from corn.threads import limit_threads
from corn.topology import Mixing, load_network
from corn.transport import Address
from distributed_speed import Nobody, NoReturns, connect, meet
from tests.distributed.rehearsal import make_public_credentials, make_public_source

GRAPHS = {8: "er:n=8,p=0.5,seed=1", 20: "er:n=20,p=0.2,seed=1"}
GLOO = "gloo all_reduce, float32, not private"
MIXINGS: tuple[Mixing, ...] = ("sum", "gossip")


@dataclass(frozen=True)
class Job:
    """The work of each process.

    Attributes:
        ports: where agents listen, and where proxies listen for each; none without a delay.
    """

    folder: Path
    num_parameters: int
    steps: int
    turns: int
    port: int
    gloo_port: int
    ports: tuple[tuple[int, int], ...]

    def addresses(self, agent: int) -> tuple[Address, Address] | tuple[None, None]:
        """Return where an agent listens, and where others reach it."""
        if not self.ports:
            return None, None
        listen, advertise = self.ports[agent]
        return ("127.0.0.1", listen), ("127.0.0.1", advertise)


def run_agent(agent: int, job: Job, results: Any) -> None:
    """Run all kinds of steps in turns, and report times and traffic."""
    limit_threads()
    plans: dict[str, Plan] = {mixing: load_plan(job.folder / mixing) for mixing in MIXINGS}
    num_agents = plans["sum"].num_agents
    listen, advertise = job.addresses(agent)
    rendezvous = meet(agent, job.port, num_agents=num_agents, listen=listen, advertise=advertise)
    start = torch.zeros(job.num_parameters)
    # One gradient at all models.
    gradient = torch.randn(len(start), generator=torch.Generator().manual_seed(agent))
    exchange = connect(rendezvous, plans["gossip"], start)
    kinds: tuple[str, ...] = MIXINGS
    if not job.ports:
        kinds += (GLOO,)
        gloo.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{job.gloo_port}",
            rank=agent,
            world_size=num_agents,
            timeout=timedelta(seconds=300),
        )
    found: dict[str, list[tuple[float, ...]]] = {kind: [] for kind in kinds}
    order = deque(kinds)
    for _ in range(job.turns):
        order.rotate()
        for kind in order:
            rendezvous.agree(f"turn-{kind}-{len(found[kind])}", "")
            before = count_traffic(exchange)
            began, worked = time.perf_counter(), time.process_time()
            if kind == GLOO:
                for _ in range(job.steps):
                    gloo.all_reduce(start.clone())
            else:
                steps = make_rounds(agent, plans[kind], exchange, start, job)
                for stepper in steps.run(Interruption()):
                    stepper.compute(lambda _: Gradients(gradient.clone().view(1, 1, -1)))
            wall, work = time.perf_counter() - began, time.process_time() - worked
            traffic = count_traffic(exchange) - before
            found[kind].append((wall / job.steps, work / job.steps, *(traffic / job.steps)))
    rendezvous.agree("over", "")
    exchange.close()
    if GLOO in kinds:
        gloo.destroy_process_group()
    results.put(found)


def count_traffic(exchange: Exchange) -> Any:
    """Return messages and bytes that this agent has sent."""
    own = exchange.traffic.values()
    return np.array([sum(t.messages_sent for t in own), sum(t.bytes_sent for t in own)])


def make_rounds(
    agent: int, plan: Plan, exchange: Exchange, start: Tensor, job: Job
) -> TrainingRounds:
    """Return one agent's steps under a plan."""
    exchange.dtype = integer_type(plan.mask_bits) if plan.network.mixing == "sum" else torch.float32
    source = make_public_source(plan.decomposition, agent, seed=0)

    def activate(plan: Plan, members: tuple[int, ...]) -> ActivePlan:
        noise = NoiseShare(plan, agent, source, nonce=bytes(32), num_parameters=len(start))
        return ActivePlan(plan, members, noise)

    nobody: Any = Nobody()
    returns: Any = NoReturns()
    return TrainingRounds(
        plan,
        RunSettings(Constant(0.01), num_steps=job.steps, timeout=120, evaluate_at=()),
        agent=agent,
        activate=activate,
        stepper=AgentStepper(plan.budget.query, lambda step: step),
        exchange=exchange,
        returns=returns,
        membership=Membership(plan.network.graph, agent),
        journal=nobody,
        first_step=0,
        last_step=job.steps,
        parameters=start.clone(),
    )


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
                reader, onward = await asyncio.open_connection("127.0.0.1", port)
                await asyncio.gather(
                    relay(ours, onward), relay(reader, back), return_exceptions=True
                )

            return serve_one

        servers = [
            await asyncio.start_server(connect_to(port), "127.0.0.1", proxy)
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
    num_agents: int, num_parameters: int, *, steps: int, turns: int, delay: float
) -> dict[str, dict[str, float]]:
    """Return milliseconds, messages and megabytes of a step for each kind."""
    budget = PrivacyBudget(10, 1e-5, num_steps=5000, clip=0.1)
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as name:
        for mixing in MIXINGS:
            network = load_network(GRAPHS[num_agents], mixing=mixing)
            save_plan(make_plan(network, budget, cooldown_steps=0), Path(name) / mixing)
        store = host_store(("127.0.0.1", 0), make_public_credentials(0, 0, num_agents))
        gloo_port, *rest = find_ports(1 + (2 * num_agents if delay else 0))
        pairs = tuple(zip(rest[::2], rest[1::2], strict=True))
        job = Job(Path(name), num_parameters, steps, turns, store.port, gloo_port, pairs)
        results = context.Queue()
        crew = [
            context.Process(target=run_agent, args=(a, job, results)) for a in range(num_agents)
        ]
        proxies = context.Process(target=run_proxies, args=(pairs, delay), daemon=True)
        proxies.start()
        for process in crew:
            process.start()
        reports = [results.get(timeout=1200) for _ in crew]
        for process in crew:
            process.join()
        proxies.terminate()
        proxies.join()
    table = {}
    for kind in reports[0]:
        # Shape (agents, turns, columns). All agents end a step together, and each works by itself.
        own = np.array([found[kind] for found in reports])
        wall, work = own[..., :2].min(axis=1).T
        messages, sent = own[..., 2:].mean(axis=1).T
        table[kind] = {
            "ms": 1000 * float(wall.mean()),
            "work ms": 1000 * float(work.mean()),
            "messages": float(messages.sum()),
            "MB": float(sent.sum()) / 1e6,
        }
    return table


def main() -> None:
    """Measure and print one table for each number of parameters."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agents", type=int, nargs="+", choices=GRAPHS, default=[8, 20])
    parser.add_argument("--size", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--delay", type=float, default=0.0, help="milliseconds per hop")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    limit_threads()
    results = []
    for n, d in itertools.product(options.agents, options.size):
        kinds = measure(n, d, steps=options.steps, turns=options.turns, delay=options.delay / 1000)
        results.append({"agents": n, "d": d, "delay ms": options.delay, "kinds": kinds})
        if not options.json:
            show(n, d, options.delay, kinds)
    if options.json:
        print(json.dumps(results, indent=1))


def show(num_agents: int, d: int, delay: float, table: dict[str, dict[str, float]]) -> None:
    """Print a table of one number of agents and parameters."""
    network = load_network(GRAPHS[num_agents], mixing="sum")
    print(
        f"d = {d:,}, {num_agents} agents on {GRAPHS[num_agents]}, tree of depth "
        f"{network.tree.depth}, {delay:g} ms of delay per hop; × is over exact sums"
    )
    print(f"    {'':<40}{'ms':>8}{'×':>7}{'work ms':>9}{'×':>7}{'messages':>10}{'MB':>8}{'×':>7}")
    for kind, row in table.items():
        ratios = {name: row[name] / table["sum"][name] for name in ("ms", "work ms", "MB")}
        sent = f"{row['messages']:10.1f}{row['MB']:8.2f}{ratios['MB']:7.2f}"
        print(
            f"    {kind:<40}{row['ms']:8.1f}{ratios['ms']:7.2f}{row['work ms']:9.1f}"
            f"{ratios['work ms']:7.2f}{'' if kind == GLOO else sent}",
            flush=True,
        )


if __name__ == "__main__":
    main()
