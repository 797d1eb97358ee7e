"""Soak of a run: agents are killed, suspended and started again at random, for as long as given.

Run ``python benchmarks/soak.py [--minutes N] [--agents N] [--seed N] [--out FOLDER]``. Agents on a
random graph train with sealed links. Every few seconds one of them is killed (SIGKILL), suspended
for less than the time-out or for longer, or told to stop and started again. Agents that ended
return to the run. Afterwards the ledgers and a record of every release are checked, without CorN's
own code:

- no agent released noise of the same run and step twice;
- no agent released more often than its plan allows, nor more than its ledger counts;
- steps went on all the time: no hang.

Exit code 1 if any of this is violated.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from corn.distributed.keyring import load_credentials, make_keys
from corn.distributed.launcher import AgentProcesses
from corn.distributed.settings import AgentConfig, RunSettings
from corn.learn.perturbation import DrawnNoise, NoiseShare
from corn.learn.problem import TrainingProblem
from corn.learn.schedule import Constant
from corn.learn.workloads import Workload
from corn.plan import make_plan, save_plan
from corn.privacy import PrivacyBudget
from corn.topology import load_network
from corn.transport import StoreHost

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.distributed.harness import restart, send_signal

NUM_STEPS, TIMEOUT = 400_000, 12.0
LEDGER_SCRIPT = Path(__file__).parent.parent / "tests" / "distributed" / "ledger_script.py"


@dataclass(frozen=True)
class RecordingWorkload(Workload):
    """A workload whose agents write down the nonce and step of every noise that they release."""

    record: str = ""
    pause: float = 0.0

    def build(self, num_agents: int, agents: Sequence[int] | None = None) -> TrainingProblem:
        """Return the problem, and let this process record its releases from now on."""
        take, path, pause = NoiseShare.take, self.record, self.pause
        # Plans for survivors number their agents anew.
        (agent,) = agents or ()
        # A stack of every thread, where agents stand still.
        stacks = os.open(f"{path}-stacks-{os.getpid()}", os.O_WRONLY | os.O_CREAT, 0o600)
        faulthandler.register(signal.SIGUSR1, stacks)

        def record(share: NoiseShare, step: int) -> DrawnNoise:
            line = f"{agent} {share.nonce.hex()} {step}\n"
            with Path(path).open("a", encoding="ascii") as stream:
                stream.write(line)  # short enough to be written at once
            time.sleep(pause)
            return take(share, step)

        setattr(NoiseShare, "take", record)  # noqa: B010
        return super().build(num_agents, agents)


class Disturber:
    """Disturbs agents at random, and starts those again that ended."""

    def __init__(self, processes: AgentProcesses, num_agents: int, seed: int) -> None:
        self._processes, self._num_agents = processes, num_agents
        self._random, self.events = random.Random(seed), Counter[str]()
        self._restart_at: dict[int, float] = {}
        self._wake_at: dict[int, float] = {}
        self._next = 0.0
        self.ends: Counter[str] = Counter()

    def act(self) -> None:
        """Do what is due now."""
        now, draw = time.monotonic(), self._random
        for agent, result in list(self._processes.results.items()):
            if agent not in self._restart_at:
                failure = result.failure
                self.ends[str(failure.kind if failure else result.status)] += 1
                if failure is not None and failure.message:
                    print(f"agent {agent}: {failure.message}", flush=True)
                self._restart_at[agent] = now + draw.uniform(0.2, 6)
            elif now >= self._restart_at[agent]:
                del self._restart_at[agent]
                self.events["restart"] += 1
                restart(self._processes, agent)
        for agent, when in list(self._wake_at.items()):
            if now >= when:
                del self._wake_at[agent]
                send_signal(self._processes, agent, signal.SIGCONT)
        progress = self._processes.states
        if now < self._next or len(progress) < self._num_agents:
            return  # nothing is disturbed before all have begun
        self._next = now + draw.uniform(3, 15)
        usual = median(own.step for own in progress.values())
        behind = {agent for agent, own in progress.items() if own.step < usual - 100}
        busy = self._restart_at.keys() | self._wake_at.keys() | behind
        calm = [agent for agent in range(self._num_agents) if agent not in busy]
        # At least half of the agents are left alone, so that there is a run to return to.
        if len(busy) >= self._num_agents // 2 or not calm:
            return
        agent = draw.choice(calm)
        event = draw.choice(["kill", "kill", "short pause", "long pause"])
        self.events[event] += 1
        if event == "kill":
            send_signal(self._processes, agent, signal.SIGKILL)
        else:
            seconds = draw.uniform(0.2, 2) if event == "short pause" else draw.uniform(14, 25)
            self._wake_at[agent] = now + seconds
            send_signal(self._processes, agent, signal.SIGSTOP)

    def wake_all(self) -> None:
        """Let suspended agents go on."""
        for agent in self._wake_at:
            send_signal(self._processes, agent, signal.SIGCONT)


def run(folder: Path, options: argparse.Namespace) -> tuple[Disturber, float, int]:
    """Run and disturb; return the disturber, the longest time without a step, and the last step."""
    n = options.agents
    budget = PrivacyBudget(10, 1e-5, num_steps=NUM_STEPS, clip=0.1)
    plan = make_plan(load_network(f"er:n={n},p=0.5,seed=1", mixing="sum"), budget)
    save_plan(plan, folder / "plan.corn")
    make_keys(folder / "keys", n)
    settings = RunSettings(
        Constant(0.01),
        batch_size=16,
        timeout=TIMEOUT,
        evaluate_at=(0,),
    )
    store = StoreHost(("127.0.0.1", 0), load_credentials(folder / "keys", 0, n))
    workload = RecordingWorkload(
        "breast-cancer", record=str(folder / "releases"), pause=options.pause
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
    disturber = Disturber(processes, n, options.seed)
    end = time.monotonic() + 60 * options.minutes
    last_step, last_change, longest = 0, time.monotonic(), 0.0
    next_report, has_dumped = time.monotonic() + 60, False
    try:
        processes.start()
        while time.monotonic() < end:
            processes.poll(0.05)
            disturber.act()
            step = max((own.step for own in processes.states.values()), default=0)
            now = time.monotonic()
            if step > last_step:
                last_step, last_change = step, now
            longest = max(longest, now - last_change)
            if now > last_change + 3 * TIMEOUT and not has_dumped:
                has_dumped = True
                print(f"no step since {last_step}: stacks are dumped", flush=True)
                for agent in range(n):
                    send_signal(processes, agent, signal.SIGUSR1)
            if now > next_report:
                next_report = now + 60
                print(f"step {last_step}, {dict(disturber.events)}", flush=True)
        disturber.wake_all()
        processes.request_stop()
        while processes.is_running and time.monotonic() < end + 60:
            processes.poll(0.05)
    finally:
        processes.close()
    return disturber, longest, last_step


def check(folder: Path, num_agents: int) -> list[str]:
    """Return what went wrong with the releases."""
    problems = []
    lines = (folder / "releases").read_text(encoding="ascii").splitlines()
    releases = Counter(lines)
    problems += [f"released twice: {line}" for line, count in releases.items() if count > 1]
    made = Counter(int(line.split()[0]) for line in lines)
    done = subprocess.run(
        [sys.executable, LEDGER_SCRIPT, str(NUM_STEPS), folder / "keys"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        problems.append(done.stderr.strip())
    counted = {int(a): int(c) for a, c in re.findall(r"agent (\d+): \[(\d+)\]", done.stdout)}
    for agent in range(num_agents):
        print(f"agent {agent}: {made[agent]} releases, {counted.get(agent)} in its ledger")
        if made[agent] > counted.get(agent, 0):
            problems.append(f"agent {agent} released more often than its ledger counts")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to sleep in every step")
    parser.add_argument("--out", type=Path, default=None, help="keep the files here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.out or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        disturber, longest, last_step = run(folder, options)
        print(f"{options.minutes:g} minutes, {last_step} steps, events {dict(disturber.events)}")
        print(f"ends of processes: {dict(disturber.ends)}")
        print(f"longest time without a step: {longest:.1f} s")
        problems = check(folder, options.agents)
        # A step may wait for two agents that are suspended one after the other, and for one that
        # returns.
        if longest > 8 * TIMEOUT:
            problems.append(f"no step for {longest:.0f} s")
    for problem in problems[:20]:
        print(problem)
    print("violated" if problems else "kept")
    sys.exit(bool(problems))


if __name__ == "__main__":
    # Agents cannot import classes of a main script, so it runs as a module.
    import soak

    soak.main()
