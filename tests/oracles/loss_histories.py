"""Random histories of losses and returns under exact sums, and what must hold in each of them.

Agents run in threads of one process. A history draws a graph and some faults: agents that die at
one of their messages, which some neighbours still get; the root among them; two at the same step;
agents that stand still for less or for more than the time-out; links that are cut. Agents that were
lost return, and may be lost again. In every history

- nobody hangs;
- agents under one plan have the same model after every step that they apply, to the bit;
- no agent draws noise for the same step of the same run twice, nor the same noise twice, and its
  ledger counts every release.
"""

from __future__ import annotations

import random
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from corn.covariance import Horizon
from corn.distributed import RunSettings, run_agent
from corn.distributed.dropout.rejoin import RejoinError, load_addresses
from corn.distributed.records.results import AgentResult
from corn.distributed.records.storage import Folders
from corn.distributed.startup.keyring import DrawnNoise, NoiseShare, make_keys
from corn.distributed.steps.exchange import Exchange
from corn.distributed.steps.messages import Header, StopReason
from corn.distributed.steps.rounds import LostError, TrainingRounds
from corn.distributed.steps.summing import digest_model
from corn.learn import Constant
from corn.plan import Plan, make_plan
from corn.privacy import PrivacyBudget
from corn.topology import load_network
from corn.transport import LinkError, MemoryStore
from tests.distributed import ledger_script
from tests.distributed.threads import make_identities, make_rendezvous

NUM_STEPS, TIMEOUT, SECONDS_UNTIL_HANG = 40, 2.5, 120.0
GRAPHS = ("ring:4", "complete:4", "path:5", "ring:5", "grid:2x3", "ring:6", "star:5", "ring:7")
KINDS = ("kill", "kill root", "kill two", "short pause", "long pause", "cut link")
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
        kind, step = dice.choice(KINDS), dice.randrange(1, NUM_STEPS)
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
    draws: Counter[tuple[int, bytes, int]] = field(default_factory=Counter)
    noise: Counter[bytes] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    refusals: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@contextmanager
def watching(record: Record, faults: list[Fault], down: set[int]) -> Iterator[None]:
    """Inject faults, and record every release and every model."""
    send, take, finish = Exchange.send, NoiseShare.take, TrainingRounds._finish_step

    def draw(self: NoiseShare, step: int) -> DrawnNoise:
        # A step takes a moment while somebody is to return, so that the run does not end before.
        time.sleep(0.05 if down else 0.002)
        drawn, agent = take(self, step), _HERE.agent
        with record.lock:
            record.draws[agent, self._nonce, step] += 1
            record.noise[drawn.values.numpy().tobytes() + drawn.mask.tobytes()] += 1
        return drawn

    def note(self: TrainingRounds, parameters: Tensor, statistics: Any) -> None:
        place = self._plans.active.prefix, self.step
        with record.lock:
            found = record.models.setdefault(place, {})
            found.setdefault(digest_model(parameters), []).append(_HERE.agent)
        finish(self, parameters, statistics)

    def disturb(self: Exchange, peers: Iterable[int], header: Header, values: Tensor) -> None:
        fault = _find_fault(faults, header)
        if fault is None:
            send(self, peers, header, values)
            return
        with record.lock:
            record.events[fault.kind] += 1
        if "pause" in fault.kind:
            with self._lock:  # as in a process that is suspended, there are no heartbeats
                time.sleep(TIMEOUT * (1.6 if fault.kind == "long pause" else 0.2))
            send(self, peers, header, values)
        elif fault.kind == "cut link":
            for peer in set(fault.receivers[:1]) & set(self.neighbours):
                self.link(peer).close()
            send(self, peers, header, values)
        else:
            send(self, [peer for peer in peers if peer in fault.receivers], header, values)
            for link in self._links.values():
                with suppress(LinkError):  # the other end may die at the same time
                    link.wait_sent(1)
            raise Crash

    with (
        mock.patch.object(NoiseShare, "take", draw),
        mock.patch.object(TrainingRounds, "_finish_step", note),
        mock.patch.object(Exchange, "send", disturb),
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


def run_history(seed: int, folder: Path) -> Record:
    """Run one history; return what happened, and every violation."""
    dice, record = random.Random(seed), Record()
    budget = PrivacyBudget(10, 1e-5, num_steps=NUM_STEPS, clip=0.1)
    momentum = Horizon(3, momentum=dice.choice([0.0, 0.7]))
    network = load_network(dice.choice(GRAPHS), mixing="sum")
    plan = make_plan(network, budget, objective=momentum)
    n, store = plan.num_agents, MemoryStore()
    faults = draw_faults(plan, dice)
    comebacks = {agent: dice.choice([0, 1, 2]) for agent in range(n)}
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
            except (Crash, LostError) as error:
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
    with watching(record, faults, down):
        for thread in threads:
            thread.start()
        end = time.monotonic() + SECONDS_UNTIL_HANG
        for thread in threads:
            thread.join(max(end - time.monotonic(), 0))
    hanging = [agent for agent, thread in enumerate(threads) if thread.is_alive()]
    if hanging:
        record.problems.append(f"agents {hanging} hang")
        return record
    record.problems += check(record, results, folder)
    return record


def _train(
    plan: Plan, agent: int, store: MemoryStore, folder: Path, *, rejoins: bool
) -> AgentResult:
    generator = torch.Generator().manual_seed(agent)
    inputs = torch.randn(20, 3, generator=generator)
    folders = Folders.of_run(folder).of_agent(agent)
    earlier, _ = load_addresses(folders.private) if rejoins else (None, {})
    rendezvous = make_rendezvous(
        agent, plan.num_agents, store, timeout=3.0 if rejoins else 30.0, address=earlier
    )
    rendezvous.keys = folder / "keys"
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
        rejoins=rejoins,
    )


def check(record: Record, results: Sequence[Any], folder: Path) -> list[str]:
    """Return every violation of what must hold."""
    problems = []
    for agent, own in enumerate(results):
        if isinstance(own, AgentResult):
            record.events["end"] += 1
            if own.stop.reason not in (StopReason.NONE, StopReason.LOSS):
                problems.append(f"agent {agent} stopped: {own.stop}")
        elif not isinstance(own, Crash | LostError | RejoinError):
            problems.append(f"agent {agent} failed: {own!r}")
    for (plan, step), models in record.models.items():
        if len(models) > 1:
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
