"""Run small networks of real agent processes, and do things to them on the way."""

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from corn.covariance import DEFAULT_THREAT, MechanismName, ThreatModel
from corn.distributed.child import Order
from corn.distributed.keyring import make_keys
from corn.distributed.launcher import Crew, Outcome
from corn.distributed.meeting import host_store
from corn.distributed.settings import RunSettings
from corn.learn.schedule import Constant
from corn.learn.workloads import Workload
from corn.plan import Plan, make_plan, save_plan
from corn.privacy import PrivacyBudget
from corn.topology import load_network

WORKLOAD = Workload("breast-cancer", partition="iid")


def small_plan(
    graph: str = "ring:4",
    num_steps: int = 2000,
    *,
    mechanism: MechanismName = "corn",
    threat: ThreatModel = DEFAULT_THREAT,
) -> Plan:
    budget = PrivacyBudget(10, 1e-5, num_steps=num_steps, clip=0.1)
    return make_plan(load_network(graph), budget, mechanism=mechanism, threat=threat)


@dataclass(frozen=True)
class Deed:
    """Something done to an agent as soon as it has come to a step."""

    agent: int
    step: int
    signal: int = signal.SIGKILL


def run_processes(
    plan: Plan,
    out: Path,
    settings: RunSettings | Mapping[int, RunSettings] | None = None,
    *,
    deeds: Sequence[Deed] = (),
    workload: Workload | Mapping[int, Workload] = WORKLOAD,
    plans: Mapping[int, Path] | None = None,
    keys: Path | None = None,
    agents: Sequence[int] | None = None,
    on_look: Callable[[Crew], None] | None = None,
    seconds: float = 120,
) -> Outcome:
    """Run a plan to its end in processes; fail if that takes longer than so many seconds."""
    out.mkdir(parents=True, exist_ok=True)
    save_plan(plan, out / "plan.corn")
    folder = keys or out / "keys"
    make_keys(folder, plan.num_agents)
    store = host_store("127.0.0.1", 0, timeout=20)
    crew = Crew(
        [
            Order(
                agent,
                plan.num_agents,
                (plans or {}).get(agent, out / "plan.corn"),
                None,
                (),
                workload if isinstance(workload, Workload) else workload[agent],
                choose(settings, agent),
                folder,
                out,
                ("127.0.0.1", store.port),
            )
            for agent in (range(plan.num_agents) if agents is None else agents)
        ]
    )
    return watch(crew, deeds, on_look, seconds)


def watch(
    crew: Crew,
    deeds: Sequence[Deed] = (),
    on_look: Callable[[Crew], None] | None = None,
    seconds: float = 120,
) -> Outcome:
    left, deadline = list(deeds), time.monotonic() + seconds
    try:
        crew.start()
        while crew.is_running:
            assert time.monotonic() < deadline, f"hangs: {crew.progress}, {crew.describe_ends()}"
            crew.look(0.02)
            for deed in list(left):
                progress = crew.progress.get(deed.agent)
                if progress is not None and progress.step >= deed.step:
                    crew.send_signal(deed.agent, deed.signal)
                    left.remove(deed)
            if on_look:
                on_look(crew)
        return crew.outcome(was_interrupted=False)
    finally:
        crew.end()


def choose(settings: RunSettings | Mapping[int, RunSettings] | None, agent: int) -> RunSettings:
    if settings is None:
        return RunSettings(Constant(0.2), timeout=10, evaluate_at=(0,), batch_size=16)
    return settings if isinstance(settings, RunSettings) else settings[agent]


def notes_of(outcome: Outcome, agent: int) -> str:
    return "\n".join(outcome.finished[agent]["notes"])


def require_private(folder: Path) -> None:
    """Fail unless a folder and all in it are for their owner's eyes only."""
    found = [folder, *folder.rglob("*")]
    assert len(found) > 1
    for path in found:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that ended and that nobody has asked about does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
