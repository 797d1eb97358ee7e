"""Small networks of real agent processes, with faults injected on the way."""

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from corn.covariance import DEFAULT_THREAT, MechanismName, ThreatModel
from corn.distributed.keyring import load_credentials, make_keys
from corn.distributed.launcher import AgentProcesses, preloaded_context
from corn.distributed.results import AgentResult, FailureKind
from corn.distributed.settings import AgentConfig, RunSettings
from corn.learn.perturbation import DrawnNoise, NoiseShare
from corn.learn.problem import TrainingProblem
from corn.learn.schedule import Constant
from corn.learn.workloads import Workload
from corn.noise import Site, load_roster, save_roster
from corn.plan import Plan, make_plan, save_plan
from corn.privacy import PrivacyBudget
from corn.topology import ONE_ROUND, Gossip, Mixing, load_network
from corn.transport import StoreHost

from .rehearsal import rehearsing, sharing_batches

_REPLACED = ExitStack()
WORKLOAD = Workload("breast-cancer", partition="iid")
SECONDS_PER_BRAKED_STEP = 0.3
SECONDS_UNTIL_HANG = 120.0


def small_plan(
    graph: str = "ring:4",
    num_steps: int = 2000,
    *,
    mechanism: MechanismName = "corn",
    threat: ThreatModel = DEFAULT_THREAT,
    gossip: Gossip = ONE_ROUND,
    cooldown_steps: int | None = None,
    mixing: Mixing = "gossip",
) -> Plan:
    budget = PrivacyBudget(10, 1e-5, num_steps=num_steps, clip=0.1)
    return make_plan(
        load_network(graph, gossip=gossip, mixing=mixing),
        budget,
        mechanism=mechanism,
        threat=threat,
        cooldown_steps=cooldown_steps,
    )


@dataclass(frozen=True)
class Fault:
    """A signal that an agent sends to itself when it draws its noise at a step, or at a later one.

    A signal sent by the test could arrive steps later, or after the end, on a busy machine.
    """

    agent: int
    step: int
    signal: int = signal.SIGKILL


@dataclass(frozen=True)
class DisturbedWorkload(Workload):
    """A workload whose agent sends itself the signals of its faults, and slows down on demand."""

    faults: tuple[Fault, ...] = ()
    brake: Path | None = None
    rehearsal: tuple[int, Plan] | None = None

    def build(self, num_agents: int, agents: Sequence[int] | None = None) -> TrainingProblem:
        faults, brake, take = list(self.faults), self.brake, NoiseShare.take

        def disturb(share: NoiseShare, step: int) -> DrawnNoise:
            if brake is not None and brake.exists():
                time.sleep(SECONDS_PER_BRAKED_STEP)
            if faults and step >= faults[0].step:
                os.kill(os.getpid(), faults.pop(0).signal)
            return take(share, step)

        setattr(NoiseShare, "take", disturb)  # noqa: B010
        if self.rehearsal is not None:
            seed, plan = self.rehearsal
            # For the rest of the process.
            _REPLACED.enter_context(rehearsing(seed))
            everyone = super().build(num_agents)
            _REPLACED.enter_context(sharing_batches(plan, everyone, agents or ()))
        return super().build(num_agents, agents)


def run_processes(
    plan: Plan,
    out: Path,
    settings: RunSettings | Mapping[int, RunSettings] | None = None,
    *,
    faults: Sequence[Fault] = (),
    brake: Path | None = None,
    workload: Workload | Mapping[int, Workload] = WORKLOAD,
    plans: Mapping[int, Path] | None = None,
    keys: Path | None = None,
    sites: Sequence[Site] | None = None,
    agents: Sequence[int] | None = None,
    on_poll: Callable[[AgentProcesses], None] | None = None,
    rehearsal_seed: int | None = None,
    seconds: float = SECONDS_UNTIL_HANG,
) -> dict[int, AgentResult]:
    """Run a plan to its end in processes; fail if that takes longer than so many seconds.

    While a file named ``brake`` exists, agents take several steps a second only: a test holds a run
    until something has happened, however busy the machine is.
    """
    out.mkdir(parents=True, exist_ok=True)
    save_plan(plan, out / "plan.corn")
    folder = keys or out / "keys"
    make_keys(folder, plan.num_agents)
    roster = load_roster(folder / "roster.json")
    if sites is not None:
        roster = replace(roster, sites=tuple(sites))
        save_roster(roster, folder / "roster.json")
    host = load_credentials(folder, roster.store_host, plan.num_agents)
    store = StoreHost(("127.0.0.1", 0), host)
    processes = AgentProcesses(
        {
            agent: AgentConfig(
                workload=DisturbedWorkload(
                    **vars(workload if isinstance(workload, Workload) else workload[agent]),
                    faults=tuple(fault for fault in faults if fault.agent == agent),
                    brake=brake,
                    rehearsal=None if rehearsal_seed is None else (rehearsal_seed, plan),
                ),
                settings=choose(settings, agent),
                out=out,
                source=(plans or {}).get(agent, out / "plan.corn"),
                keys=folder,
                agent=agent,
                num_agents=plan.num_agents,
                store=("127.0.0.1", store.port),
                opens_store=False,
            )
            for agent in (range(plan.num_agents) if agents is None else agents)
        }
    )
    deadline = time.monotonic() + seconds
    try:
        processes.start()
        while processes.is_running:
            assert time.monotonic() < deadline, f"hangs: {processes.states}, {processes.results}"
            processes.poll(0.02)
            if on_poll:
                on_poll(processes)
        return dict(sorted(processes.results.items()))
    finally:
        processes.close()


def restart(processes: AgentProcesses, agent: int) -> None:
    """Start an agent again that has ended, to return to the run."""
    processes.results.pop(agent)
    config = replace(processes._configs[agent], rejoins=True)
    processes._configs[agent] = config
    with preloaded_context() as context:
        processes._start_one(context, agent, config)


def send_signal(processes: AgentProcesses, agent: int, number: int) -> None:
    """Send a signal to an agent's process, as a fault would."""
    pid = processes._processes[agent].pid
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


class Forked:
    """A function in a process that begins with everything imported.

    It is forked from the process that forks agents. A new Python would import torch for seconds.

    Args:
        folder: where it runs, and where its outputs are kept.
        function: of some module, called with ``arguments``.
        environment: replaces that of this process.
    """

    def __init__(
        self,
        folder: Path,
        function: Callable[..., object],
        *arguments: str,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        number = len(list(folder.glob("stdout-*")))
        self._outputs = [folder / f"{name}-{number}" for name in ("stdout", "stderr")]
        for path in self._outputs:
            path.touch()
        options = dict(os.environ if environment is None else environment)
        with preloaded_context() as context:
            self.process = context.Process(
                target=_run_in,
                args=(folder, self._outputs, options, function, arguments),
                daemon=True,
            )
            self.process.start()

    @property
    def stdout(self) -> str:
        """What it has printed so far."""
        return self._outputs[0].read_text(encoding="utf-8")

    @property
    def stderr(self) -> str:
        """What it has written to stderr so far."""
        return self._outputs[1].read_text(encoding="utf-8")

    def send_signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def wait_for(self, text: str) -> None:
        """Wait until it has written a text to stderr."""
        deadline = time.monotonic() + SECONDS_UNTIL_HANG
        while text not in self.stderr:
            assert self.process.is_alive(), self.stderr
            assert time.monotonic() < deadline, self.stderr
            time.sleep(0.02)

    def wait(self) -> int | None:
        """Return its exit code once it has ended."""
        self.process.join(SECONDS_UNTIL_HANG)
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def _run_in(
    folder: Path,
    outputs: Sequence[Path],
    environment: Mapping[str, str],
    function: Callable[..., object],
    arguments: Sequence[str],
) -> None:
    for number, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        function(*arguments)
    except Exception:  # noqa: BLE001
        # Shown as at the end of a program; the end of a forked process would show it otherwise.
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


def run_corn(*arguments: str) -> None:
    """Run a command of ``corn``."""
    from corn.cli import run_command

    sys.argv = ["corn", *arguments]
    run_command()


def choose(settings: RunSettings | Mapping[int, RunSettings] | None, agent: int) -> RunSettings:
    if settings is None:
        return RunSettings(Constant(0.2), timeout=30, evaluate_at=(0,), batch_size=16)
    return settings if isinstance(settings, RunSettings) else settings[agent]


def finished(results: Mapping[int, AgentResult]) -> dict[int, AgentResult]:
    """Return the results of agents that did not fail."""
    return {agent: own for agent, own in results.items() if own.failure is None}


def failures(results: Mapping[int, AgentResult]) -> dict[int, FailureKind]:
    """Return the kinds of failure of agents that failed."""
    return {agent: own.failure.kind for agent, own in results.items() if own.failure is not None}


def require_private(folder: Path) -> None:
    """Fail unless only the owner of a folder can read it and everything in it."""
    found = [folder, *folder.rglob("*")]
    assert len(found) > 1
    for path in found:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    return read_process_state(pid) not in ("", "Z")


def is_suspended(pid: int) -> bool:
    """Return whether a signal has suspended a process."""
    return read_process_state(pid) == "T"


def read_process_state(pid: int) -> str:
    """Return the letter by which the system names a process's state; empty if there is none."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return ""
    return status.rpartition(")")[2].split()[0]
