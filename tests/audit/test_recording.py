"""Messages of real agents, recorded and audited."""

import multiprocessing

import numpy as np
import pytest

from corn.audit import AuditSettings, View, audit_plan
from corn.audit.auditing import suggest_releases
from corn.audit.recording import ProcessObservation, RecordedRun, _read_releases, _serve
from corn.errors import CornError, InvalidArgumentError
from tests.audit.plans import agent_plan


def test_processes_release_no_more_than_their_ledgers_allow() -> None:
    short = agent_plan(num_steps=3)
    assert suggest_releases(short, "processes") == 3
    assert suggest_releases(short, "shares") == 4, "keys alone have no ledger"
    with pytest.raises(InvalidArgumentError, match="releases must be at most 3 through processes"):
        ProcessObservation(short, num_trials=100, num_releases=4)


@pytest.mark.slow
def test_messages_of_real_processes_are_tight() -> None:
    """An insider's keys reproduce its part of the noise in two runs with different nonces."""
    plan = agent_plan(graph="complete:3")
    report = audit_plan(plan, settings=AuditSettings("processes", num_trials=2000))
    assert not report.violated, (report.problems, [one.excess for one in report.findings])
    for one in report.findings:
        assert len(one.view.coalition) == 1
        assert abs(one.mu.estimate / one.exact_mu - 1) < 0.1


@pytest.mark.parametrize("num_steps", [4, 400])
def test_releases_are_read_off_messages(num_steps: int) -> None:
    """With momentum, which longer runs have by default, and without it."""
    plan = agent_plan(num_steps=num_steps)
    assert (plan.momentum > 0) == (num_steps == 400)
    generator = np.random.default_rng(0)
    released = generator.standard_normal((4, plan.num_agents, 6))
    model = memory = np.zeros(released.shape[1:])
    messages = []
    for s in released:
        memory = plan.momentum * memory + (1 - plan.momentum) * s
        messages.append(model - 2.0**-4 * memory)
        model = plan.network.step_matrix @ messages[-1]
    found = _read_releases(plan, RecordedRun(np.stack(messages), bytes(32)))
    assert np.allclose(found, released)


def test_a_process_ends_when_the_audit_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a run it notices this only when it answers."""

    runs = []

    def fail(*_: object) -> None:
        runs.append(1)
        raise CornError("the store is gone")

    monkeypatch.setattr("corn.audit.recording.run_workload", fail)
    own, theirs = multiprocessing.Pipe()
    own.send("order")
    own.close()
    _serve(theirs)
    theirs.close()
    assert len(runs) == 1, "the process took no order, so its end shows nothing"


def test_seeds_of_larger_groups_stay_in_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = agent_plan(0, "global", graph="complete:3")
    run = RecordedRun(np.zeros((1, 3, 200)), bytes(32))
    monkeypatch.setattr("corn.audit.recording.AgentPool", _pool_of(run))
    with pytest.raises(Exception, match="view must be eavesdropper for processes"):
        audit_plan(
            plan,
            view=View((1,)),
            settings=AuditSettings("processes", num_trials=200, num_releases=2),
        )


def _pool_of(run: RecordedRun) -> type:
    class Pool:
        def __init__(self, num_agents: int) -> None:
            assert num_agents == 3

        def run(self, *_: object, **__: object) -> RecordedRun:
            return run

        def __enter__(self) -> "Pool":
            return self

        def __exit__(self, *_: object) -> None:
            pass

    return Pool
