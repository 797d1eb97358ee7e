"""Agents that were lost, or that come late, take part again, and no noise is released twice."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from corn.distributed.processes import AgentProcesses
from corn.distributed.results import FailureKind, RunStatus
from corn.distributed.settings import RunSettings
from corn.learn.schedule import Constant

from . import ledger_script
from .harness import failures, finished, run_processes, small_plan

SETTINGS = RunSettings(Constant(0.2), batch_size=16, timeout=10, evaluate_at=(0,))
NUM_STEPS = 1000
# Long enough for an agent to return in time on a busy machine.
PAUSE = 0.009


class Comeback:
    """Kills an agent at a step and starts it again once it is gone, several times."""

    def __init__(self, agent: int, steps: list[int], signal: int = 9) -> None:
        self.agent, self.steps, self.signal = agent, steps, signal
        self.num_restarts, self.is_down = 0, False

    def __call__(self, processes: AgentProcesses) -> None:
        agent = self.agent
        if self.is_down and agent in processes.results:
            self.is_down = False
            self.num_restarts += 1
            processes.restart(agent)
        progress = processes.progress.get(agent)
        others = [own.step for who, own in processes.progress.items() if who != agent]
        if not self.steps or self.is_down or progress is None:
            return
        if min(progress.step, max(others, default=0)) >= self.steps[0]:
            self.steps.pop(0)
            self.is_down = True
            processes.send_signal(agent, self.signal)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["continue", "replan"])
def test_an_agent_that_is_killed_twice_returns_twice(policy: str, tmp_path: Path) -> None:
    plan = small_plan("ring:4", NUM_STEPS)
    settings = replace(SETTINGS, on_dropout=policy)  # type: ignore[arg-type]
    comeback = Comeback(2, [60, 350])
    results = run_processes(plan, tmp_path, settings, pause=PAUSE, on_poll=comeback, seconds=200)
    assert failures(results) == {}
    assert comeback.num_restarts == 2
    for own in results.values():
        assert (own.num_steps, own.lost, own.cut_links) == (NUM_STEPS, {}, {})
        assert own.status is RunStatus.COMPLETE
    notes = "\n".join(results[0].notes)
    assert notes.count("agent 2 takes part again from step") == 2
    assert results[2].first_step > 350
    # After the last return all agents run the plan of all again, and end in agreement.
    models = [torch.from_numpy(read_last_model(tmp_path, agent)) for agent in range(4)]
    for model in models[1:]:
        torch.testing.assert_close(model, models[0], rtol=0.05, atol=0.05)
    ledger_script.check(NUM_STEPS, [tmp_path / "keys"])


def read_last_model(out: Path, agent: int) -> np.ndarray:
    return np.fromfile(
        out / "shared" / f"agent-{agent}" / "models" / f"step-{NUM_STEPS}.bin", np.float32
    )


@pytest.mark.slow
def test_a_late_agent_joins_a_run_that_began_without_it(tmp_path: Path) -> None:
    plan = small_plan("ring:4", NUM_STEPS)
    settings = replace(SETTINGS, start_with=3, timeout=4)
    late = {"is_there": False}

    def come(processes: AgentProcesses) -> None:
        steps = [own.step for own in processes.progress.values()]
        if not late["is_there"] and len(steps) == 3 and min(steps) > 50:
            late["is_there"] = True
            processes.results[3] = None  # type: ignore[assignment]
            processes._configs[3] = replace(processes._configs[0], agent=3)
            processes._notes[3] = []
            processes.restart(3)
        own = processes.progress.get(3)
        if own is not None and own.step > 250:
            leave_and_return(processes)

    # A neighbour that returns later connects to the late agent too.
    leave_and_return = Comeback(2, [250])
    results = run_processes(
        plan, tmp_path, settings, agents=[0, 1, 2], pause=PAUSE, on_poll=come, seconds=150
    )
    assert failures(results) == {}
    assert set(results) == {0, 1, 2, 3}
    assert all(own.num_steps == NUM_STEPS for own in results.values())
    assert all(own.lost == {} for own in results.values())
    assert results[3].first_step > 50
    assert leave_and_return.num_restarts == 1
    assert all(own.cut_links == {} for own in results.values())


@pytest.mark.slow
def test_an_agent_with_other_terms_is_not_let_in(tmp_path: Path) -> None:
    plan = small_plan("ring:4", NUM_STEPS)
    tried = {"is_over": False}

    def come_with_other_settings(processes: AgentProcesses) -> None:
        if 2 in processes.results and not tried["is_over"]:
            tried["is_over"] = True
            own = processes._configs[2]
            other = replace(own.settings, schedule=Constant(0.3))
            processes._configs[2] = replace(own, settings=other)
            processes.restart(2)

    kill = Comeback(2, [100])

    def disturb(processes: AgentProcesses) -> None:
        if kill.steps:
            kill(processes)
        come_with_other_settings(processes)

    results = run_processes(plan, tmp_path, SETTINGS, pause=PAUSE, on_poll=disturb, seconds=120)
    assert failures(results) == {2: FailureKind.ERROR}
    failure = results[2].failure
    assert failure is not None
    assert "the terms of agent 2 differ from those of the run in step sizes" in failure.message
    assert all(own.lost.keys() == {2} for own in finished(results).values())
