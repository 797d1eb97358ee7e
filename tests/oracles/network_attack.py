"""An attacker on the network: proxies between agents, and at the store, that meddle with bytes.

A run through the attacker's proxies is compared with a run that loses the same links at the same
rounds and has no attacker. Both draw public noise from a seed, so that models must be equal to the
bit.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from corn.distributed import AgentResult, Rendezvous, RunSettings, run_agent
from corn.distributed.exchange import Exchange, Received, StepStopped
from corn.distributed.rendezvous import join_store
from corn.errors import CornError
from corn.learn import Constant
from corn.plan import Plan
from corn.transport import Link, LinkError, Listener, StoreHost
from tests.distributed.rehearsal import rehearsing
from tests.distributed.threads import make_credentials

KINDS = ("flip", "cut", "replay", "swap", "delay", "flood", "insert", "truncate")
SECONDS_OF_DELAY = 0.3
# An agent that was suspended for half a time-out leaves the run. Busy machines suspend processes
# for seconds, so the time-out is far above that. A run without an attacker waits for nothing.
_TIMEOUT, _CALM_TIMEOUT = 20.0, 120.0
Failures = dict[tuple[int, int], tuple[int, int]]
"""The round (step, mixing round) in which an agent (first) lost its link to a peer (second)."""


@dataclass(frozen=True)
class Intervention:
    """What the attacker does, once.

    Attributes:
        kind: see ``KINDS``.
        target: the agent whose port is attacked; -1 for the store.
        connection: the number of the connection to that port.
        direction: 0 to the target, 1 from it.
        after: the number of bytes in that direction after which it happens.
        seed: of everything else.
    """

    kind: str
    target: int
    connection: int
    direction: int
    after: int
    seed: int

    @classmethod
    def draw(cls, seed: int, num_agents: int) -> Intervention:
        """Return a random intervention."""
        own = random.Random(seed)
        target = own.choice([-1, *range(num_agents - 1)])
        return cls(
            own.choice(KINDS),
            target,
            own.randrange(2),
            own.randrange(2),
            # In the handshake, at the start, or anywhere in the training.
            own.choice([0, own.randrange(130), own.randrange(600), own.randrange(3000)]),
            own.randrange(10**6),
        )


class Proxy:
    """A port of the attacker, who forwards to a target and meddles once."""

    def __init__(self, target: tuple[str, int], intervention: Intervention | None) -> None:
        self._target, self._intervention = target, intervention
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._server.getsockname()
        self._lines: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.has_acted = False
        self._start(self._accept)

    def close(self) -> None:
        """Close the port and all connections."""
        for line in [self._server, *self._lines]:
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)
        for line in [self._server, *self._lines]:
            line.close()

    def _start(self, function: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=function, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        number = 0
        while True:
            try:
                line, _ = self._server.accept()
                self._lines.append(line)
                onward = socket.create_connection(self._target, timeout=5)
                # The attacker cuts no connection because agents are silent for a while.
                onward.settimeout(None)
                self._lines.append(onward)
            except OSError:
                return
            for direction, (source, sink) in enumerate([(line, onward), (onward, line)]):
                self._start(self._relay, source, sink, number, direction)
            number += 1

    def _relay(self, source: socket.socket, sink: socket.socket, number: int, way: int) -> None:
        passed, earlier, plan = 0, b"", self._intervention
        with suppress(OSError):
            while data := source.recv(1 << 16):
                passed += len(data)
                is_here = plan is not None and (plan.connection, plan.direction) == (number, way)
                if plan is not None and is_here and not self.has_acted and passed > plan.after:
                    self.has_acted = True
                    data = self._meddle(plan, data, earlier)
                    sink.sendall(data)
                    if plan.kind in ("cut", "truncate"):
                        break
                else:
                    sink.sendall(data)
                earlier = data
        for line in (source, sink):
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)

    def _meddle(self, plan: Intervention, data: bytes, earlier: bytes) -> bytes:
        own = random.Random(plan.seed)
        at = own.randrange(len(data))
        if plan.kind == "delay":
            time.sleep(SECONDS_OF_DELAY)
        return {
            "flip": data[:at] + bytes([data[at] ^ own.randrange(1, 256)]) + data[at + 1 :],
            "cut": b"",
            "truncate": data[:at],
            "replay": data + (earlier or data),
            "swap": data[at:] + data[:at] if at else data[::-1],
            "delay": data,
            "flood": data + own.randbytes(1 << 20),
            "insert": data[:at] + own.randbytes(own.randrange(1, 100)) + data[at:],
        }[plan.kind]


def samples_of(agent: int) -> TensorDataset:
    inputs = torch.randn(20, 5, generator=torch.Generator().manual_seed(agent))
    return TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())


class Strangers:
    """Threads that connect to ports and send garbage, silence or half a greeting, all the time."""

    def __init__(self) -> None:
        self._is_over = threading.Event()
        self._threads: list[threading.Thread] = []
        self.num_connections = 0

    def disturb(self, address: tuple[str, int]) -> None:
        """Begin to disturb a port."""
        thread = threading.Thread(target=self._pester, args=(address,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def stop(self) -> None:
        """Leave all ports alone."""
        self._is_over.set()
        for thread in self._threads:
            thread.join(10)

    def _pester(self, address: tuple[str, int]) -> None:
        own, lines = random.Random(address[1]), list[socket.socket]()
        while not self._is_over.wait(0.01):
            with suppress(OSError):
                lines.append(socket.create_connection(address, timeout=1))
                self.num_connections += 1
                lines[-1].sendall(
                    own.choice(
                        [b"", b"GET / HTTP/1.1\r\n\r\n", b"CorN\x01\x02", own.randbytes(4096)]
                    )
                )
            while len(lines) > 100:
                lines.pop(0).close()
        for line in lines:
            line.close()


def run_network(
    plan: Plan,
    out: Path,
    intervention: Intervention | None,
    *,
    timeout: float | None = None,
    strangers: Strangers | None = None,
) -> tuple[list[AgentResult | BaseException], bool]:
    """Run all agents in threads, through the attacker's proxies; return how each ended.

    Also return whether the attacker came to act. ``strangers`` disturb every open port.
    """
    n = plan.num_agents
    if timeout is None:
        timeout = _CALM_TIMEOUT if intervention is None else _TIMEOUT
    results: list[Any] = [None] * n
    proxies: list[Proxy] = []

    def place(target: int, address: tuple[str, int]) -> tuple[str, int]:
        """Return the attacker's address for a port."""
        if strangers is not None:
            strangers.disturb(address)
        is_attacked = intervention is not None and intervention.target == target
        proxies.append(Proxy(address, intervention if is_attacked else None))
        return proxies[-1].address

    with ExitStack() as stack:
        # All attacks meet the same noise, so that their models can be compared.
        stack.enter_context(rehearsing(7))
        credentials = [make_credentials(agent, n) for agent in range(n)]
        store = StoreHost(("127.0.0.1", 0), credentials[0])
        stack.callback(store.close)
        where = place(-1, ("127.0.0.1", store.port))

        def run(agent: int) -> None:
            try:
                listener = Listener(("127.0.0.1", 0), credentials[agent])
                rendezvous = Rendezvous(
                    join_store(where, credentials[agent], timeout=timeout),
                    credentials[agent],
                    listener=listener,
                    address=place(agent, ("127.0.0.1", listener.port)),
                    bound=("127.0.0.1", listener.port),
                    timeout=timeout,
                )
                results[agent] = train(plan, rendezvous, out / f"agent-{agent}", timeout)
            except BaseException as error:  # noqa: BLE001
                results[agent] = error

        threads = [threading.Thread(target=run, args=(agent,)) for agent in range(n)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20 * _TIMEOUT)
            assert not thread.is_alive(), f"an agent hangs: {intervention}"
        for proxy in proxies:
            proxy.close()
    return results, any(proxy.has_acted for proxy in proxies)


def train(plan: Plan, rendezvous: Rendezvous, out: Path, timeout: float) -> AgentResult:
    model = nn.Linear(5, 2)
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.1)
    return run_agent(
        plan,
        rendezvous=rendezvous,
        model=model,
        loss=nn.functional.cross_entropy,
        dataset=samples_of(rendezvous.agent),
        out=out,
        settings=RunSettings(Constant(0.5), timeout=timeout, evaluate_at=(0,), batch_size=5),
    )


@contextmanager
def recording_failures(found: Failures) -> Iterator[None]:
    """Note in which round each end of a link loses it."""
    finish = Exchange.finish

    def record(self: Exchange, number: int) -> dict[int, Tensor]:
        try:
            return finish(self, number)
        except StepStopped as stopped:
            header = self._own
            assert header is not None
            for peer in stopped.dropouts:
                found.setdefault((header.sender, peer), (header.step, header.mixing_round))
            raise

    with mock.patch.object(Exchange, "finish", record):
        yield


@contextmanager
def repeating_failures(planned: Failures) -> Iterator[None]:
    """Let links fail in the rounds in which they failed before, and in no other."""
    receive = Exchange.receive

    def repeat(self: Exchange, peer: int, *given: Any, **options: Any) -> Received:
        header = self._own
        assert header is not None
        if planned.get((header.sender, peer)) == (header.step, header.mixing_round):
            raise LinkError("as before")
        return receive(self, peer, *given, **options)

    # The other end loses the link in its own round, not because this end closed it.
    with (
        mock.patch.object(Exchange, "receive", repeat),
        mock.patch.object(Exchange, "drop", _forget),
    ):
        yield


def _forget(self: Exchange, peer: int) -> None:
    if peer in self._links:
        link: Link = self._links.pop(peer)
        self._closed[peer] = link.traffic


def judge(plan: Plan, intervention: Intervention, folder: Path) -> str:
    """Attack a run and return how it went; fail if the attacker achieved more than a loss.

    ``unharmed``: the run went as without the attacker. ``lost``: links were lost, and the models
    are those of a run that lost the same links. ``not started``: agents reported a failure before
    the first step. ``not reached``: the attacker had no occasion to act.
    """
    failures: Failures = {}
    with recording_failures(failures):
        results, has_acted = run_network(plan, folder / "attacked", intervention)
    crashed = [own for own in results if not isinstance(own, AgentResult | CornError)]
    assert not crashed, (intervention, crashed)
    if any(isinstance(own, CornError) for own in results):
        # Before the first step an agent may refuse; after it no honest agent fails.
        assert not any(isinstance(own, AgentResult) for own in results), (intervention, results)
        return "not started"
    with repeating_failures(failures):
        expected, _ = run_network(plan, folder / "reference", None)
    for own, reference in zip(results, expected, strict=True):
        assert isinstance(own, AgentResult)
        assert isinstance(reference, AgentResult), reference
        assert own.num_steps == reference.num_steps == plan.budget.num_steps
        assert torch.equal(own.parameters, reference.parameters), (intervention, failures)
    if not has_acted:
        return "not reached"
    return "lost" if failures else "unharmed"
