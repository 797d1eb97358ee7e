"""Agents find the store, and every failure to do so is one clear line."""

import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from corn.distributed.handshake import announcing_failure
from corn.distributed.rendezvous import (
    Rendezvous,
    StoppedBeforeStartError,
    host_store,
    join,
    join_store,
)
from corn.errors import CornError, InvalidArgumentError
from corn.learn.monitor import Interruption

from .threads import run_in_threads


def test_waiting_for_a_store_can_be_interrupted() -> None:
    """No program listens at one address, and none answers at the other."""
    for host in ("127.0.0.1", "192.0.2.1"):
        interruption, began = Interruption(), time.monotonic()
        threading.Timer(0.2, setattr, (interruption, "requested", True)).start()
        with pytest.raises(StoppedBeforeStartError, match=r"^agent 3: interrupted"):
            join(store=(host, 1), agent=3, num_agents=4, timeout=20, interruption=interruption)
        assert time.monotonic() - began < 10


def test_a_rendezvous_serves_one_run() -> None:
    def run(rendezvous: Rendezvous) -> None:
        rendezvous.barrier("hello")
        rendezvous.barrier("hello")

    (result,) = run_in_threads(1, run)
    assert isinstance(result, InvalidArgumentError)
    assert "this rendezvous has served a run" in str(result)


def test_the_host_of_the_store_leaves_last() -> None:
    def run(rendezvous: Rendezvous) -> None:
        own = Rendezvous(
            rendezvous.store,
            rendezvous.agent,
            3,
            timeout=5,
            address="",
            is_host=rendezvous.agent == 0,
        )
        time.sleep(0.2 * rendezvous.agent)
        with announcing_failure(own):
            raise CornError("no")

    began = time.monotonic()
    assert [str(result) for result in run_in_threads(3, run)] == ["no"] * 3
    assert 0.4 <= time.monotonic() - began < 4


def test_a_port_in_use_and_a_missing_store_are_reported_in_one_line() -> None:
    store = host_store("127.0.0.1", 0, timeout=1)
    with pytest.raises(CornError, match="no store can be opened there: the port is taken"):
        host_store("127.0.0.1", store.port, timeout=1)
    with pytest.raises(CornError, match=r"no store found at 127\.0\.0\.1:1 within 0.5 s"):
        join_store("127.0.0.1", 1, timeout=0.5)


def test_a_port_of_another_program_is_not_waited_for_beyond_the_time_out() -> None:
    """The program accepts connections and never answers."""
    other = socket.create_server(("127.0.0.1", 0))
    host, port = other.getsockname()
    other.detach()
    with pytest.raises(CornError, match=r"the program at .* does not answer as a store"):
        join_store(host, port, timeout=0.5)
    interruption = Interruption()
    threading.Timer(0.2, setattr, (interruption, "requested", True)).start()
    with pytest.raises(StoppedBeforeStartError):
        join_store(host, port, timeout=20, interruption=interruption)
    with pytest.raises(CornError, match=r"^agent 0: .*the port is taken"):
        join(store=(host, port), agent=0, num_agents=4, timeout=1)


def test_the_store_listens_at_its_address_only() -> None:
    store = host_store("127.0.0.1", 0, timeout=1)
    socket.create_connection(("127.0.0.1", store.port), timeout=1).close()
    for elsewhere in ("127.0.0.2", "::1"):
        with pytest.raises(OSError, match=r"refused|Cannot assign"):
            socket.create_connection((elsewhere, store.port), timeout=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"MASTER_PORT": None}, "MASTER_PORT is not set"),
        ({"RANK": "x"}, "RANK must be a number, found 'x'"),
    ],
)
def test_a_wrong_torchrun_environment_is_reported_in_one_line(
    changes: dict[str, str | None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in {**there, **changes}.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    with pytest.raises(CornError, match=message):
        join(timeout=1)


def test_rank_0_reports_a_missing_rank_in_one_line() -> None:
    """Torch times out first: a process that left its thread there would be aborted."""
    code = (
        "from corn.distributed import join\n"
        "from corn.errors import CornError\n"
        "try: join(timeout=1)\n"
        "except CornError as error: print(error)"
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    there = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | there,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "not all agents came within 1 s" in done.stdout


def test_an_agent_number_beyond_the_last_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="agent must be from 0 to 3, found 7"):
        join(store=("127.0.0.1", 1), agent=7, num_agents=4)


def test_a_rendezvous_needs_torchrun_or_an_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(CornError, match="RANK is not set: start agents with torchrun"):
        join()
    with pytest.raises(CornError, match="must be given with a store"):
        join(store=("127.0.0.1", 1))


def test_an_agent_advertises_its_address_on_the_route_to_the_store() -> None:
    store = host_store("127.0.0.1", 0, timeout=1)
    where = ("127.0.0.1", store.port)
    found = join(store=where, agent=0, num_agents=2, timeout=5, opens_store=False)
    assert (found.agent, found.num_agents, found.address) == (0, 2, "127.0.0.1")
