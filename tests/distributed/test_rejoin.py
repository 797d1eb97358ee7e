"""Agents that were lost take part again, and no noise is released twice."""

import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from corn.distributed.launcher import AgentProcesses
from corn.distributed.results import RunStatus
from corn.distributed.settings import RunSettings
from corn.learn.schedule import Constant
from corn.noise import Site

from . import ledger_script
from .harness import Fault, failures, finished, restart, run_processes, send_signal, small_plan

NUM_STEPS = 160
SETTINGS = RunSettings(
    Constant(0.2), batch_size=16, timeout=30, evaluate_at=(0,), num_steps=NUM_STEPS
)


class Comeback:
    """Kills an agent at a step and starts it again once it is gone, several times.

    Agents go slowly until it has returned for the last time.
    """

    def __init__(self, agent: int, steps: list[int], brake: Path) -> None:
        self.agent, self.steps, self.brake = agent, steps, brake
        self.num_restarts, self.is_down = 0, False
        brake.touch()

    def __call__(self, processes: AgentProcesses) -> None:
        agent = self.agent
        if self.is_down and agent in processes.results:
            self.is_down = False
            self.num_restarts += 1
            processes.states.pop(agent)  # that of the process which was killed
            restart(processes, agent)
        progress = processes.states.get(agent)
        if self.is_down or progress is None:
            return
        if not self.steps:
            self.brake.unlink(missing_ok=True)
            return
        others = [own.step for who, own in processes.states.items() if who != agent]
        if min(progress.step, max(others, default=0)) >= self.steps[0]:
            self.steps.pop(0)
            self.is_down = True
            send_signal(processes, agent, signal.SIGKILL)


# Of twice as many steps as are run: each crash wastes some reserved releases.
PLAN = small_plan("grid:2x3", 2 * NUM_STEPS, mixing="sum")


@pytest.mark.slow
@pytest.mark.parametrize(("agent", "steps"), [(PLAN.network.tree.root, [3, 9]), (5, [3])])
def test_an_agent_returns_to_exact_sums_with_the_bits_of_the_others(
    agent: int, steps: list[int], tmp_path: Path
) -> None:
    comeback = Comeback(agent, [*steps], tmp_path / "brake")
    results = run_processes(PLAN, tmp_path, SETTINGS, brake=comeback.brake, on_poll=comeback)
    assert failures(results) == {}
    assert comeback.num_restarts == len(steps)
    for own in results.values():
        assert (own.num_steps, own.lost, own.cut_links) == (NUM_STEPS, {}, {})
        assert own.status is RunStatus.COMPLETE
    notes = "\n".join(results[3].notes)
    assert notes.count(f"agent {agent} took part again from step") == len(steps)
    assert results[agent].first_step > steps[-1]
    assert len({read_last_model(tmp_path, own).tobytes() for own in range(6)}) == 1
    ledger_script.check(2 * NUM_STEPS, [tmp_path / "keys"])


@pytest.mark.slow
def test_an_agent_returns_by_the_calls_of_neighbours_that_only_connect_outward(
    tmp_path: Path,
) -> None:
    # Both neighbours of agent 1 in the ring only connect outward.
    outward = Site(accepts=False)
    comeback = Comeback(1, [3], tmp_path / "brake")
    results = run_processes(
        small_plan("ring:4", 2 * NUM_STEPS, mixing="sum"),
        tmp_path,
        SETTINGS,
        sites=[outward, Site(), outward, Site()],
        brake=comeback.brake,
        on_poll=comeback,
    )
    assert failures(results) == {}
    assert comeback.num_restarts == 1
    for own in results.values():
        assert (own.num_steps, own.lost, own.cut_links) == (NUM_STEPS, {}, {})
    assert results[1].first_step > 3
    assert len({read_last_model(tmp_path, own).tobytes() for own in range(4)}) == 1


def test_nobody_returns_to_a_run_under_gossip(tmp_path: Path) -> None:
    brake = tmp_path / "brake"
    brake.touch()

    def come_back(processes: AgentProcesses) -> None:
        if 2 in processes.results and brake.exists():
            brake.unlink()
            restart(processes, 2)

    results = run_processes(
        small_plan("ring:4", 30),
        tmp_path,
        replace(SETTINGS, num_steps=30),
        faults=[Fault(2, 3)],
        brake=brake,
        on_poll=come_back,
    )
    assert failures(results) == {2: "error"}
    failure = results[2].failure
    assert failure is not None
    assert "--rejoin needs exact sums" in failure.message
    assert all(own.lost.keys() == {2} for own in finished(results).values())


def read_last_model(out: Path, agent: int) -> np.ndarray:
    return np.fromfile(
        out / "shared" / f"agent-{agent}" / "models" / f"step-{NUM_STEPS}.bin", np.float32
    )


@pytest.mark.slow
def test_an_agent_with_other_terms_is_not_let_in(tmp_path: Path) -> None:
    brake = tmp_path / "brake"
    brake.touch()

    def come_with_others(processes: AgentProcesses) -> None:
        if 2 not in processes.results or not brake.exists():
            return
        if failures(processes.results)[2] != "ended":
            brake.unlink()
            return
        own = processes._configs[2]
        other = replace(own.settings, schedule=Constant(0.3))
        processes._configs[2] = replace(own, settings=other)
        restart(processes, 2)

    results = run_processes(
        PLAN,
        tmp_path,
        SETTINGS,
        faults=[Fault(2, 5)],
        brake=brake,
        on_poll=come_with_others,
    )
    assert failures(results) == {2: "error"}
    failure = results[2].failure
    assert failure is not None
    assert "agents differ in step sizes: agent 2 has Constant(" in failure.message
    assert "0.3" in failure.message
    assert all(own.lost.keys() == {2} for own in finished(results).values())
