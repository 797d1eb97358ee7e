"""Random histories of losses and returns, and what must hold in each of them.

Agents run in threads of one process, or in processes. A history draws a graph and some faults:
agents that die at a piece of one of their messages, which some neighbours still get; the root among
them; two at the same step; agents that stand still for less or for more than the time-out; links
that are cut; agents that are asked to stop. With exact sums, agents that were lost return, and may
be lost again. In every history

- nobody hangs;
- with exact sums, agents under one plan have the same model after every step that they apply, to
  the bit; with gossip, agents that are linked end at the same step;
- agents that are linked draw noise for a step by the same plan;
- no agent draws noise for the same step of the same run twice, nor the same noise twice, and its
  ledger counts every release.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from corn.covariance import Horizon
from corn.distributed import Reports, RunSettings, messages, rounds, run_agent, summing
from corn.distributed.exchange import Exchange
from corn.distributed.keyring import load_credentials, make_keys
from corn.distributed.launcher import AgentProcesses
from corn.distributed.messages import PIECE_BYTES, Header
from corn.distributed.rejoin import RejoinError, load_addresses
from corn.distributed.results import AgentResult, StopReason
from corn.distributed.rounds import TrainingRounds
from corn.distributed.settings import AgentConfig
from corn.distributed.storage import Folders
from corn.distributed.summing import digest_model
from corn.learn import Constant
from corn.learn.perturbation import DrawnNoise, NoiseShare
from corn.learn.problem import TrainingProblem
from corn.learn.step import AgentStepper
from corn.learn.sweep import Interruption
from corn.learn.workloads import Workload
from corn.plan import Plan, make_plan, save_plan
from corn.privacy import PrivacyBudget
from corn.topology import ONE_ROUND, Gossip, Mixing, Network, load_network
from corn.transport import LinkError, MemoryStore, StoreHost
from tests.distributed import ledger_script
from tests.distributed.harness import is_suspended, restart, send_signal
from tests.distributed.threads import make_identities, make_rendezvous
from tests.oracles.deployed_release import read_noise

NUM_STEPS, TIMEOUT, SECONDS_UNTIL_HANG = 40, 2.5, 120.0
GRAPHS = ("ring:4", "complete:4", "path:5", "ring:5", "grid:2x3", "ring:6", "star:5", "ring:7")
KINDS = ("kill", "kill root", "kill two", "short pause", "long pause", "cut link", "leave")
GOSSIPS = (ONE_ROUND, ONE_ROUND, Gossip(3), Gossip(2, "chebyshev"))
_HERE = threading.local()


class Crash(Exception):  # noqa: N818
    """An agent dies here."""


@dataclass(frozen=True)
class Fault:
    """A fault of an agent, at one of its messages from a step on.

    Attributes:
        agent: at fault.
        kind: one of ``KINDS``.
        step: at which it happens.
        message: how many messages later.
        receivers: the neighbours that still get the message, or whose link is cut.
    """

    agent: int
    kind: str
    step: int
    message: int
    receivers: tuple[int, ...]


def draw_faults(plan: Plan, dice: random.Random) -> list[Fault]:
    """Return the faults of a history, which leave some agents alone."""
    n, root = plan.num_agents, plan.network.tree.root
    faults = []
    for _ in range(dice.choice([1, 2, 2, 3])):
        # Some at the end, and most so early that agents can return.
        kind, step = dice.choice(KINDS), dice.randrange(1, dice.choice([15, 25, NUM_STEPS]))
        agents = [root] if kind == "kill root" else dice.sample(range(n), 1 + (kind == "kill two"))
        for agent in agents:
            some = tuple(dice.sample(range(n), dice.randrange(n)))
            faults.append(Fault(agent, kind, step, dice.randrange(4), some))
    return faults


@dataclass
class Record:
    """What agents did in a history."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    # By plan and step: the models after it, and who had them.
    models: dict[tuple[bytes, int], dict[bytes, list[int]]] = field(default_factory=dict)
    # By step and agent: the plan by which it is released, and its members.
    plans: dict[int, dict[int, tuple[bytes, tuple[int, ...]]]] = field(default_factory=dict)
    draws: Counter[tuple[int, bytes, int]] = field(default_factory=Counter)
    noise: Counter[bytes] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    refusals: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@contextmanager
def watching(
    record: Record, faults: list[Fault], down: set[int], piece_bytes: int
) -> Iterator[None]:
    """Inject faults, and record every release and every model."""
    send = Exchange.send_piece
    take, finish = NoiseShare.take, TrainingRounds._finish_step
    begin = TrainingRounds._begin

    def note_plan(self: TrainingRounds) -> Iterator[AgentStepper]:
        with record.lock:
            found = record.plans.setdefault(self.step, {})
            found[_HERE.agent] = self._active.prefix, self._active.members
        return begin(self)

    def draw(self: NoiseShare, step: int) -> DrawnNoise:
        # A step takes a moment while somebody is to return, so that the run does not end before.
        time.sleep(0.05 if down else 0.002)
        drawn, agent = take(self, step), _HERE.agent
        with record.lock:
            record.draws[agent, self.nonce, step] += 1
            record.noise[read_noise(drawn)] += 1
        return drawn

    def note(self: TrainingRounds, parameters: Tensor, statistics: Any) -> None:
        place = self._active.prefix, self.step
        with record.lock:
            found = record.models.setdefault(place, {})
            found.setdefault(digest_model(parameters), []).append(_HERE.agent)
        finish(self, parameters, statistics)

    def disturb(
        self: Exchange, peers: Iterable[int], header: Header, values: Tensor, number: int
    ) -> None:
        inject(self, peers, header, values, number)
        send(self, peers, header, values, number)

    def inject(
        self: Exchange, peers: Iterable[int], header: Header, values: Tensor, number: int
    ) -> None:
        fault = _find_fault(faults, header)
        if fault is None:
            return
        with record.lock:
            record.events[fault.kind] += 1
        if fault.kind == "leave":
            _HERE.interruption.requested = True
        elif "pause" in fault.kind:
            with self._lock:  # as in a process that is suspended, there are no heartbeats
                time.sleep(TIMEOUT * (1.6 if fault.kind == "long pause" else 0.2))
        elif fault.kind == "cut link":
            for peer in set(fault.receivers[:1]) & set(self.neighbours):
                self._links[peer].close()
        else:
            send(self, set(peers) & set(fault.receivers), header, values, number)
            for link in self._links.values():
                with suppress(LinkError):  # the other end may die at the same time
                    link.wait_sent(1)
            raise Crash

    with (
        mock.patch.object(NoiseShare, "take", draw),
        mock.patch.object(TrainingRounds, "_finish_step", note),
        mock.patch.object(TrainingRounds, "_begin", note_plan),
        mock.patch.object(rounds, "_SECONDS_TO_GATHER", 0.05),
        mock.patch.object(Exchange, "send_piece", disturb),
        mock.patch.object(messages, "PIECE_BYTES", piece_bytes),
        mock.patch.object(summing, "PIECE_BYTES", piece_bytes),
    ):
        yield


def _find_fault(faults: list[Fault], header: Header) -> Fault | None:
    """Return the fault that happens at this message, once."""
    for fault in faults:
        if fault.agent == header.sender and header.step >= fault.step:
            _HERE.passed = getattr(_HERE, "passed", 0) + 1
            if _HERE.passed > fault.message:
                _HERE.passed = 0
                faults.remove(fault)
                return fault
            return None
    return None


def run_history(seed: int, folder: Path, mixing: Mixing = "sum") -> Record:
    """Run one history; return what happened, and every violation."""
    dice, record = random.Random(seed), Record()
    budget = PrivacyBudget(10, 1e-5, num_steps=NUM_STEPS, clip=0.1)
    momentum = Horizon(3, momentum=dice.choice([0.0, 0.7]))
    gossip = ONE_ROUND if mixing == "sum" else dice.choice(GOSSIPS)
    network = load_network(dice.choice(GRAPHS), mixing=mixing, gossip=gossip)
    plan = make_plan(network, budget, objective=momentum)
    n, store = plan.num_agents, MemoryStore()
    faults = draw_faults(plan, dice)
    comebacks = {agent: dice.choice([0, 1, 2, 3]) for agent in range(n)}
    if mixing == "gossip":
        comebacks = dict.fromkeys(range(n), 0)
    delays = {agent: dice.uniform(0, 0.3) for agent in range(n)}
    make_keys(folder / "keys", n)
    make_identities(n)
    down: set[int] = set()
    results: list[Any] = [None] * n

    def run(agent: int) -> None:
        _HERE.agent = agent
        for number in range(comebacks[agent] + 1):
            try:
                results[agent] = _train(plan, agent, store, folder, rejoins=number > 0)
            except Crash as error:
                results[agent] = error
            except RejoinError as error:
                results[agent] = error
                with record.lock:
                    record.events["no return"] += 1
                    record.refusals.append(str(error))
            except BaseException as error:  # noqa: BLE001 - it is a violation
                results[agent] = error
                record.problems.append("".join(traceback.format_exception(error)[-6:]))
                return
            finally:
                down.discard(agent)
            if isinstance(results[agent], AgentResult):
                with record.lock:
                    record.events["return"] += number > 0
                return
            if number < comebacks[agent]:
                down.add(agent)
                time.sleep(delays[agent])

    threads = [threading.Thread(target=run, args=(agent,), daemon=True) for agent in range(n)]
    # A model has 16 bytes. Some histories send it in four pieces.
    with watching(record, faults, down, piece_bytes=dice.choice([4, PIECE_BYTES])):
        for thread in threads:
            thread.start()
        end = time.monotonic() + SECONDS_UNTIL_HANG
        for thread in threads:
            thread.join(max(end - time.monotonic(), 0))
    hanging = [agent for agent, thread in enumerate(threads) if thread.is_alive()]
    if hanging:
        record.problems.append(f"agents {hanging} hang")
        return record
    record.problems += check(record, results, folder, network)
    return record


def _train(
    plan: Plan, agent: int, store: MemoryStore, folder: Path, *, rejoins: bool
) -> AgentResult:
    _HERE.interruption = Interruption()
    generator = torch.Generator().manual_seed(agent)
    inputs = torch.randn(20, 3, generator=generator)
    folders = Folders.of_run(folder).of_agent(agent)
    earlier, _ = load_addresses(folders.private) if rejoins else (None, {})
    rendezvous = make_rendezvous(
        agent, plan.num_agents, store, timeout=3.0 if rejoins else 30.0, address=earlier
    )
    rendezvous.keys = folder / "keys"
    rendezvous.rejoins = rejoins
    model = nn.Linear(3, 2)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return run_agent(
        plan,
        rendezvous=rendezvous,
        model=model,
        loss=nn.functional.cross_entropy,
        dataset=TensorDataset(inputs, (inputs.sum(dim=1) > 0).long()),
        out=folder,
        settings=RunSettings(Constant(0.5), evaluate_at=(0,), timeout=TIMEOUT, batch_size=10),
        reports=Reports(interruption=_HERE.interruption),
    )


def check(record: Record, results: Sequence[Any], folder: Path, network: Network) -> list[str]:
    """Return every violation of what must hold."""
    problems = []
    allowed = {StopReason.NONE, StopReason.LOSS}
    if record.events["leave"]:
        allowed.add(StopReason.INTERRUPTED)
    for agent, own in enumerate(results):
        if isinstance(own, AgentResult):
            record.events["end"] += 1
            if own.stop.reason not in allowed:
                problems.append(f"agent {agent} stopped: {own.stop}")
        elif not isinstance(own, Crash | RejoinError):
            problems.append(f"agent {agent} failed: {own!r}")
    for first, second in network.graph.edges:
        ends = [results[first], results[second]]
        if all(isinstance(own, AgentResult) for own in ends):
            missing = {*ends[0].lost, *ends[0].cut_links, *ends[1].lost, *ends[1].cut_links}
            if not missing & {first, second} and ends[0].num_steps != ends[1].num_steps:
                problems.append(f"agents {first} and {second} end at different steps")
    for step, plans in record.plans.items():
        for (one, (plan, members)), (other, (its_plan, its_members)) in combinations(
            plans.items(), 2
        ):
            if plan != its_plan and one in its_members and other in members:
                problems.append(f"agents {one} and {other} have different plans at step {step}")
    for (plan, step), models in record.models.items():
        if len(models) > 1 and network.mixing == "sum":
            problems.append(f"step {step} of plan {plan.hex()}: models of {list(models.values())}")
    problems += [f"drawn twice: {place}" for place, count in record.draws.items() if count > 1]
    if any(count > 1 for count in record.noise.values()):
        problems.append("the same noise twice")
    try:
        counted = ledger_script.check(NUM_STEPS, [folder / "keys"])
    except SystemExit as error:
        return [*problems, str(error)]
    made = Counter(agent for agent, _, _ in record.draws)
    for agent, count in made.items():
        if count > counted[agent][-1]:
            problems.append(
                f"agent {agent} released {count} times, its ledger says {counted[agent]}"
            )
    return problems


@dataclass(frozen=True)
class DisturbedTask(Workload):
    """A workload whose agent injects its faults into its own process, and records what it does.

    Attributes:
        faults: of all agents.
        record: the folder for records, in which a file ``brake`` slows all agents down.
    """

    faults: tuple[Fault, ...] = ()
    record: str = ""

    def build(self, num_agents: int, agents: Sequence[int] | None = None) -> TrainingProblem:
        """Return the problem; disturb and record this process from now on."""
        take, finish, send = NoiseShare.take, TrainingRounds._finish_step, Exchange.send_piece
        folder, faults, passed = Path(self.record), list(self.faults), Counter[Fault]()

        def draw(share: NoiseShare, step: int) -> DrawnNoise:
            time.sleep(0.2 if (folder / "brake").exists() else 0.01)
            drawn = take(share, step)
            _append(folder / "noise", hashlib.sha256(read_noise(drawn)).hexdigest())
            return drawn

        def note(rounds: TrainingRounds, parameters: Tensor, statistics: Any) -> None:
            prefix, digest = rounds._active.prefix.hex(), digest_model(parameters).hex()
            _append(folder / "models", f"{prefix} {rounds.step} {digest}")
            _append(folder / "draws", f"{rounds._run.agent} {rounds.step}")
            finish(rounds, parameters, statistics)

        def disturb(
            exchange: Exchange, peers: Iterable[int], header: Header, values: Tensor, number: int
        ) -> None:
            for fault in list(faults):
                if fault.agent != header.sender or header.step < fault.step:
                    continue
                passed[fault] += 1
                if passed[fault] <= fault.message:
                    continue
                faults.remove(fault)
                # Once in a history, not once in each process of the agent.
                done = folder / f"done-{self.faults.index(fault)}"
                if done.exists():
                    continue
                done.touch()
                if fault.kind == "leave":
                    continue
                if fault.kind == "cut link":
                    for peer in set(fault.receivers[:1]) & set(exchange.neighbours):
                        exchange._links[peer].close()
                elif "pause" in fault.kind:
                    os.kill(os.getpid(), signal.SIGSTOP)
                else:
                    os.kill(os.getpid(), signal.SIGKILL)
            send(exchange, peers, header, values, number)

        for owner, name, function in (
            (NoiseShare, "take", draw),
            (TrainingRounds, "_finish_step", note),
            (Exchange, "send_piece", disturb),
        ):
            setattr(owner, name, function)
        return super().build(num_agents, agents)


def _append(path: Path, line: str) -> None:
    with path.open("a", encoding="ascii") as stream:
        stream.write(line + "\n")  # short enough to be written at once


def run_processes_history(seed: int, folder: Path) -> Record:
    """Run one history with agents in processes, which are killed and suspended in earnest."""
    dice, record = random.Random(seed), Record()
    budget = PrivacyBudget(10, 1e-5, num_steps=NUM_STEPS, clip=0.1)
    network = load_network(dice.choice(GRAPHS), mixing="sum")
    plan = make_plan(network, budget, objective=Horizon(3, momentum=0.7))
    n, faults = plan.num_agents, draw_faults(plan, dice)
    save_plan(plan, folder / "plan.corn")
    make_keys(folder / "keys", n)
    settings = RunSettings(Constant(0.2), evaluate_at=(0,), timeout=2 * TIMEOUT, batch_size=16)
    store = StoreHost(("127.0.0.1", 0), load_credentials(folder / "keys", 0, n))
    workload = DisturbedTask(
        "breast-cancer", partition="iid", faults=tuple(faults), record=str(folder)
    )
    processes = AgentProcesses(
        {
            agent: AgentConfig(
                workload=workload,
                settings=settings,
                out=folder / "out",
                source=folder / "plan.corn",
                keys=folder / "keys",
                agent=agent,
                num_agents=n,
                store=("127.0.0.1", store.port),
                opens_store=False,
            )
            for agent in range(n)
        }
    )
    comebacks = {agent: dice.choice([0, 1, 2, 3]) for agent in range(n)}
    pauses = {fault.agent: fault.kind for fault in faults if "pause" in fault.kind}
    wake_at: dict[int, float] = {}
    end = time.monotonic() + SECONDS_UNTIL_HANG
    try:
        processes.start()
        while processes.is_running and time.monotonic() < end:
            processes.poll(0.02)
            now = time.monotonic()
            for agent, kind in pauses.items():
                pid = processes._processes[agent].pid
                if pid is not None and is_suspended(pid):
                    share = 1.6 if kind == "long pause" else 0.2
                    if now > wake_at.setdefault(agent, now + share * settings.timeout):
                        send_signal(processes, agent, signal.SIGCONT)
                else:
                    wake_at.pop(agent, None)
            for agent, own in list(processes.results.items()):
                if own.failure is not None and comebacks[agent] and processes.is_running:
                    comebacks[agent] -= 1
                    (folder / "brake").touch()
                    record.events["restart"] += 1
                    restart(processes, agent)
                    processes.states.pop(agent, None)
            # Slow until those that were started again take part.
            if all(agent in processes.states or agent in processes.results for agent in range(n)):
                (folder / "brake").unlink(missing_ok=True)
        if processes.is_running:
            record.problems.append(f"hangs: {processes.states}")
    finally:
        processes.close()
    record.events.update(faults[int(path.name[5:])].kind for path in folder.glob("done-*"))
    record.problems += _check_files(record, processes.results, folder)
    return record


def _check_files(record: Record, results: Mapping[int, AgentResult], folder: Path) -> list[str]:
    problems = []
    for agent, own in results.items():
        if own.failure is None:
            record.events["end"] += 1
            record.events["return"] += own.first_step > 0
            if own.stop.reason not in (StopReason.NONE, StopReason.LOSS):
                problems.append(f"agent {agent} stopped: {own.stop}")
        elif own.failure.kind == "error":
            record.refusals.append(own.failure.message)
            if "cannot return to the run" not in own.failure.message:
                problems.append(f"agent {agent} failed: {own.failure.message}")
    models: dict[str, set[str]] = {}
    for line in (folder / "models").read_text(encoding="ascii").splitlines():
        place, _, digest = line.rpartition(" ")
        models.setdefault(place, set()).add(digest)
    problems += [f"{place}: several models" for place, found in models.items() if len(found) > 1]
    for name in ("noise", "draws"):
        lines = Counter((folder / name).read_text(encoding="ascii").splitlines())
        problems += [f"{name} twice: {line}" for line, count in lines.items() if count > 1]
    try:
        ledger_script.check(NUM_STEPS, [folder / "keys"])
    except SystemExit as error:
        problems.append(str(error))
    return problems
