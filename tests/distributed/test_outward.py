"""Agents that only connect outward take part where one end of each link accepts."""

import socket
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from corn.distributed import AgentResult, RunSettings, join, run_agent
from corn.distributed.keyring import load_credentials, make_keys
from corn.distributed.results import RunStatus
from corn.errors import InfeasibleError
from corn.learn import Constant
from corn.noise import Site, load_roster, save_roster
from corn.plan import Plan
from corn.transport import Listener

from .harness import small_plan


def choose_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def run_sites(
    plan: Plan, sites: Sequence[Site], store: tuple[str, int], folder: Path
) -> list[AgentResult | BaseException]:
    """Return what each agent's run returns or raises, with agents in threads."""
    make_keys(folder / "keys", plan.num_agents)
    roster = load_roster(folder / "keys" / "roster.json")
    save_roster(replace(roster, sites=tuple(sites)), folder / "keys" / "roster.json")
    found: list[AgentResult | BaseException] = [RuntimeError("an agent hangs")] * len(sites)
    torch.manual_seed(0)
    model = nn.Linear(2, 2)

    def run(agent: int) -> None:
        keys = folder / "keys"
        try:
            credentials = load_credentials(keys, agent, plan.num_agents)
            found[agent] = run_agent(
                plan,
                rendezvous=join(credentials, store=store, timeout=20.0, keys=keys),
                model=model,
                loss=nn.functional.cross_entropy,
                dataset=TensorDataset(torch.ones(4, 2), torch.zeros(4, dtype=torch.long)),
                settings=RunSettings(Constant(0.5), timeout=20.0, evaluate_at=(0,)),
            )
        except BaseException as error:  # noqa: BLE001
            found[agent] = error

    threads = [threading.Thread(target=run, args=(agent,)) for agent in range(len(sites))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def count_ports(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the port of each listener that opens one."""
    ports: list[int] = []
    begin = Listener.__init__

    def record(self: Listener, *arguments: object) -> None:
        begin(self, *arguments)  # type: ignore[arg-type]
        ports.extend([self.port] if self.port else [])

    monkeypatch.setattr(Listener, "__init__", record)
    return ports


OUTWARD = Site(accepts=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_five_sites_that_only_connect_outward_train_around_one_open_port(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = count_ports(monkeypatch)
    port = choose_port()
    written = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    plan = small_plan("star:6", 5, mixing="sum")
    found = run_sites(plan, [Site(address=written), *[OUTWARD] * 5], (host, port), tmp_path)
    assert [getattr(own, "status", own) for own in found] == [RunStatus.COMPLETE] * 6
    assert ports == [port]


def test_a_mixed_graph_trains_and_its_first_accepting_agent_opens_the_store(
    tmp_path: Path,
) -> None:
    # In ring:4 agents 0 and 2 are no neighbours, and connect to 1 and 3.
    plan = small_plan("ring:4", 5, mixing="sum")
    sites = [OUTWARD, Site(), OUTWARD, Site()]
    found = run_sites(plan, sites, ("127.0.0.1", choose_port()), tmp_path)
    assert [getattr(own, "status", own) for own in found] == [RunStatus.COMPLETE] * 4


def test_agents_refuse_a_graph_with_a_link_that_neither_end_accepts(tmp_path: Path) -> None:
    plan = small_plan("ring:4", 5, mixing="sum")
    sites = [Site(), OUTWARD, OUTWARD, Site()]
    found = run_sites(plan, sites, ("127.0.0.1", choose_port()), tmp_path)
    assert any(isinstance(own, InfeasibleError) for own in found)
    assert not any(isinstance(own, AgentResult) for own in found)
