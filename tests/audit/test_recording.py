"""Messages of real agents, recorded and audited."""

import multiprocessing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from corn.audit import View, audit_plan
from corn.audit.checks import (
    check_messages,
    check_noise,
    check_sums,
    list_masked,
    uniform_p_value,
)
from corn.audit.run import AuditedRun
from corn.audit.views import StreamWeights
from corn.checks import FloatArray
from corn.errors import CornError, InvalidArgumentError
from corn.learn.step import AgentStepper, ClippedGradients
from corn.noise import draw_share
from corn.noise.masks import MaskWords
from corn.plan import Plan
from corn.topology import Mixing
from corn.topology.graphs import SpanningTree
from tests.audit.agent_threads import record_threads
from tests.audit.plans import agent_plan, sample_plan
from tests.audit.recording import ProcessRun, RecordedRun, _read_releases, _serve
from tests.audit.test_exact_sums import draw_no_offset, turn_sign
from tests.oracles.message_parts import MessageParts, draw_mask, mask_release


def test_processes_release_no_more_than_their_ledgers_allow() -> None:
    short = agent_plan(num_steps=3)
    with pytest.raises(InvalidArgumentError, match="releases must be at most 3 through processes"):
        ProcessRun(short, num_trials=100, num_releases=4)


@pytest.mark.slow
@pytest.mark.parametrize("mixing", ["gossip", "sum"])
def test_messages_of_real_processes_are_tight(mixing: Mixing) -> None:
    """An insider's keys reproduce its part of the noise in two runs with different nonces."""
    plan = agent_plan(graph="complete:3", mixing=mixing)
    seen = ProcessRun(plan, num_trials=4000, num_releases=4)
    report = audit_plan(plan, run=seen)
    assert not report.violated, (report.problems, [one.excess for one in report.findings])
    for one in report.findings:
        assert len(one.view.coalition) == 1
        assert one.ratio >= 0.95
        assert abs(one.mu.estimate / one.exact_mu - 1) < 0.05
    assert (report.messages is not None) == (mixing == "sum")
    if mixing == "sum":
        # Two insiders cut agent 0 off, whose noise alone is left of that of two agents.
        report = audit_plan(plan, view=View((1, 2)), run=seen)
        assert [one.verdict for one in report.findings] == ["violated"]
        assert report.findings[0].ratio == pytest.approx(2**0.5, rel=0.05)
        assert report.problems == (), "the program does what the plan says"


# Faults of exact sums, planted into the code that agents run.


def record_agents(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> ProcessRun:
    """Record agents in threads, whose code a test can change."""
    record_threads(monkeypatch)
    return ProcessRun(plan, num_trials=2000, num_releases=4)


def sum_plan(sampling: str | None = None) -> Plan:
    if sampling is None:
        return agent_plan(graph="path:4", mixing="sum", num_steps=4)
    return sample_plan(sampling, "replace", mixing="sum")


@pytest.mark.parametrize("sampling", [None, "passes"])
def test_recorded_messages_are_those_of_keys_and_data(
    sampling: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = sum_plan(sampling)
    seen = record_agents(plan, monkeypatch)
    assert seen.problems == []
    gradients = seen.gradients
    length = np.linalg.norm(gradients, axis=2)
    # In some steps the sample is not in the batch.
    contribution = plan.budget.query.contribution
    assert {round(own, 9) for own in (length / contribution).ravel().tolist()} <= {0.0, 1.0}
    assert length.max() > 0
    assert check_messages(seen, View((1,)), seed=0, alpha=1e-3).problems == ()
    # Uniform for each sign of the gradient's value: messages do not depend on it.
    for sign in (-1, 1):
        assert uniform_p_value(seen.messages[gradients * sign > 0]) > 1e-5


def reuse(*given: Any, step: int, **rest: Any) -> MaskWords:
    return draw_mask(*given, step=0 * step, **rest)


def draw_too_little(*given: Any, **rest: Any) -> FloatArray:
    drawn: FloatArray = draw_share(*given, **rest)
    return np.asarray(0.75**0.5 * drawn)


def round_apart(clipped: FloatArray, noise: FloatArray, *, grid: float, **rest: Any) -> MaskWords:
    return mask_release(np.rint(clipped / grid) * grid + noise, grid=grid, **rest)


def compose(**faults: Any) -> Any:
    """Return a stand-in for an agent's message: the same, of its single parts, some with faults."""
    parts = MessageParts(**faults)
    return lambda *given: parts.make_message(*given)


hand_over = AgentStepper.hand_over


def clip_nothing(self: AgentStepper, clipped: ClippedGradients) -> None:
    hand_over(self, replace(clipped, factors=torch.full_like(clipped.factors, 0.01)))


MESSAGE = "corn.learn.perturbation.DrawnNoise.make_message"


@pytest.mark.parametrize(
    ("where", "fault", "others"),
    [
        (MESSAGE, compose(draw_mask=reuse), {"uniform"}),
        (MESSAGE, compose(draw_mask=turn_sign), {"sums", "noise"}),
        (MESSAGE, compose(draw_offset=draw_no_offset), {"sums"}),
        (MESSAGE, compose(draw_share=draw_too_little), {"sums", "noise"}),
        (MESSAGE, compose(release=round_apart), set[str]()),
        ("corn.learn.step.AgentStepper.hand_over", clip_nothing, {"length"}),
    ],
)
def test_faults_of_agents_are_found(
    where: str, fault: Any, others: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them by comparison with what keys and data give, and most by another check too."""
    plan = sum_plan()
    monkeypatch.setattr(where, fault)
    seen = record_agents(plan, monkeypatch)
    assert any("are not those of its gradient, noise, offset" in one for one in seen.problems)
    streams = StreamWeights.of(plan.decomposition)
    R = streams.hidden(()) + np.eye(plan.num_agents) * plan.grid**2 / 12
    words = [uniform_p_value(words) for _, words in list_masked(seen, View(), 0)]
    found = {
        "uniform": min(words) * len(words) < 1e-3,
        "sums": bool(check_sums(seen, 1e-3)),
        "noise": bool(check_noise(seen.released, R, alpha=1e-3)),
        "length": float(np.abs(seen.add_canary(1).alternative).max())
        > 1.5 * float(np.abs(AuditedRun.add_canary(seen, 1).alternative).max()),
    }
    # At least: keys are new in each run, and what they leave may show in another check too.
    assert others <= {name for name, is_found in found.items() if is_found}


def test_a_step_that_some_agents_do_not_apply_shows_in_digests() -> None:
    tree = SpanningTree(0, {0: 0, 1: 0, 2: 1})
    models = {(step, agent): bytes([step]) for step in range(3) for agent in range(3)}
    words = np.zeros((2, 3, 2), np.uint16)
    assert RecordedRun(words, bytes(32), {}, models).check_agreement(tree) == []
    # Agent 2 applied the first step, which is void to the others.
    run = RecordedRun(words, bytes(32), {}, {**models, (1, 2): b"other"})
    assert "agents 2 have another model than the root after 1 steps" in run.check_agreement(tree)[0]


def test_totals_that_differ_are_found() -> None:
    tree = SpanningTree(0, {0: 0, 1: 0, 2: 1})
    words = np.arange(6, dtype=np.uint16).reshape(1, 3, 2)
    run = RecordedRun(words, bytes(32), {(0, 0): words[0, 0], (0, 1): words[0, 0] + np.uint16(1)})
    assert "agent 1 passed on another total" in run.check_agreement(tree)[0]
    # Partial sums (0, 1), (2, 3) and (4, 5), of which the first has the second, and that the third.
    assert run.read_words(tree).tolist() == [[[65534, 65534], [65534, 65534], [4, 5]]]


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

    monkeypatch.setattr("tests.audit.recording.run_workload", fail)
    own, theirs = multiprocessing.Pipe()
    own.send("order")
    own.close()
    _serve(theirs)
    theirs.close()
    assert len(runs) == 1, "the process took no order, so its end shows nothing"
