"""One agent with its own model and data: checks, agreement, training and results."""

import shutil
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from corn.covariance import ThreatModel
from corn.distributed import AgentResult, Rendezvous, Reports, RunSettings, rounds, run_agent
from corn.distributed.exchange import Exchange
from corn.distributed.keyring import make_keys, open_ledger, share_group_seeds
from corn.distributed.messages import Header
from corn.distributed.rendezvous import (
    AbsentError,
    HandshakeError,
    RefusalError,
)
from corn.distributed.results import RunStatus, StopReason
from corn.distributed.status import AgentState
from corn.distributed.storage import Folders, list_checkpoints, read_model, read_rows
from corn.errors import CornError, FileFormatError, InvalidArgumentError, StoppedByUserError
from corn.learn import Constant
from corn.learn.step import take_half_step
from corn.learn.sweep import Interruption
from corn.learn.tasks import MeanLoss
from corn.plan import Plan, verify_plan
from corn.transport import Link, LinkError, LinkOpener, open_links

from .harness import small_plan
from .threads import run_in_threads

PLAN = small_plan("ring:3", 12, mechanism="ldp", threat=ThreatModel())
RING = small_plan("ring:4", 12, mechanism="decor", threat=ThreatModel())


def samples_of(agent: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(agent)
    inputs = torch.randn(40, 5, generator=generator)
    return TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())


def train(
    rendezvous: Rendezvous,
    folder: Path,
    *,
    seed: int = 0,
    plan: Plan = PLAN,
    step_size: float = 0.5,
    loss: MeanLoss = nn.functional.cross_entropy,
    reports: Reports | None = None,
    **options: Any,
) -> AgentResult:
    """Train one agent in a folder; with seed 0 from a model of zeros."""
    model = nn.Linear(5, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.1 * seed)
    rendezvous.keys = folder / "keys"
    return run_agent(
        plan,
        rendezvous=rendezvous,
        model=model,
        loss=loss,
        dataset=DataLoader(samples_of(rendezvous.agent), batch_size=10),
        test=samples_of(7),
        out=folder,
        settings=RunSettings(Constant(step_size), evaluate_at=(0, 6), **{"timeout": 30, **options}),
        reports=reports,
    )


def train_all(
    folder: Path, *, plan: Plan = PLAN, seconds: float = 20.0, **options: Any
) -> list[AgentResult | BaseException]:
    """Train all agents of a plan in threads, with keys in the folder."""
    make_keys(folder / "keys", plan.num_agents)
    return run_in_threads(
        plan.num_agents,
        lambda rendezvous: train(rendezvous, folder, plan=plan, **options),
        timeout=seconds,
    )


def test_an_agent_runs_with_a_module_and_a_data_loader(tmp_path: Path) -> None:
    results = train_all(tmp_path)
    for number, result in enumerate(results):
        assert isinstance(result, AgentResult), result
        assert (result.status, result.num_steps) == (RunStatus.COMPLETE, 12)
        assert [row["step"] for row in result.rows] == [0, 6, 12]
        assert result.rows[-1]["epsilon"] == pytest.approx(10, rel=1e-6)
        assert float(result.rows[-1]["epsilon"]) <= 10 * (1 + 1e-9)
        folders = Folders.of_run(tmp_path).of_agent(number)
        assert sorted(read_rows(folders.private / "metrics.csv")) == [0, 6, 12]
        shared = read_rows(folders.shared / "metrics.csv")
        assert sorted(shared) == [0, 6, 12]
        # What a script measures on may be its owner's too.
        assert float(result.rows[-1]["test_loss"]) > 0
        for row in (shared[12], result.measured):
            assert np.isnan(float(row["test_loss"]))
        torch.testing.assert_close(read_model(folders.shared, 12, PLAN), result.parameters)


def test_all_must_start_from_the_same_model(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", 3)
    results = run_in_threads(
        3, lambda rendezvous: train(rendezvous, tmp_path, seed=int(rendezvous.agent == 2))
    )
    for number, result in enumerate(results):
        assert isinstance(result, HandshakeError)
        assert "agents differ in the initial parameters: agent 2 has" in str(result)
        assert str(result).startswith(f"agent {number}: agents differ")


def test_a_run_that_cannot_be_resumed_leaves_its_files(tmp_path: Path) -> None:
    train_all(tmp_path, num_steps=6)
    shutil.rmtree(tmp_path / "private" / "agent-2")
    before = sorted(tmp_path.glob("*/agent-[01]/**/*"))
    for result in train_all(tmp_path, resume=True):
        assert isinstance(result, HandshakeError), result
        assert "no step but the first has a checkpoint of every agent: agent 2 " in str(result)
    assert sorted(tmp_path.glob("*/agent-[01]/**/*")) == before


def test_a_run_is_not_resumed_under_a_ledger_that_has_not_counted_its_releases(
    tmp_path: Path,
) -> None:
    """With a moved plan and new keys beside it, ε would come out too small."""
    train_all(tmp_path, num_steps=6)
    shutil.move(tmp_path / "keys", tmp_path / "first keys")
    for result in train_all(tmp_path, resume=True):
        assert "after 6 releases, but the ledger beside the key counts 0" in str(result)
    shutil.rmtree(tmp_path / "keys")
    shutil.move(tmp_path / "first keys", tmp_path / "keys")
    for result in train_all(tmp_path, resume=True):
        assert isinstance(result, AgentResult), result
        assert result.rows[-1]["epsilon"] == pytest.approx(10, rel=1e-6)


def test_a_run_does_not_replace_another(tmp_path: Path) -> None:
    train_all(tmp_path, num_steps=6)
    before = sorted(tmp_path.glob("*/agent-*/**/*"))
    for result in train_all(tmp_path, num_steps=6):
        assert "has a run that came to step 6 of 12: continue it with --resume" in str(result)
    assert sorted(tmp_path.glob("*/agent-*/**/*")) == before


def test_all_must_have_the_same_frozen_parameters_and_loss(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", 2)
    plan = small_plan("path:2", 12, mechanism="ldp", threat=ThreatModel())

    def run(rendezvous: Rendezvous, what: str) -> AgentResult:
        rendezvous.keys = tmp_path / "keys"
        frozen, trained = nn.Linear(5, 4).requires_grad_(requires_grad=False), nn.Linear(4, 2)
        with torch.no_grad():
            for parameter in (*frozen.parameters(), *trained.parameters()):
                parameter.fill_(0.1)
            frozen.bias.add_(rendezvous.agent if what == "constants" else 0)
        smoothing = 0.1 * rendezvous.agent if what == "loss" else 0.0
        return run_agent(
            plan,
            rendezvous=rendezvous,
            model=nn.Sequential(frozen, trained),
            loss=partial(nn.functional.cross_entropy, label_smoothing=smoothing),
            dataset=samples_of(rendezvous.agent),
            test=DataLoader(samples_of(7)),
            settings=RunSettings(evaluate_at=(0,)),
        )

    for what in ("constants", "loss"):
        for result in run_in_threads(2, partial(run, what=what)):
            assert isinstance(result, HandshakeError), result
            assert "agents differ in the model: agent 1 has" in str(result)
    for result in run_in_threads(2, partial(run, what="nothing")):
        assert isinstance(result, AgentResult), result
        assert float(result.rows[-1]["test_loss"]) > 0


def test_a_spent_budget_is_explained_by_a_crashed_run(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", 3)
    with open_ledger(tmp_path / "keys", 1, PLAN, precision=float(PLAN.precision_caps[0])) as ledger:
        for step in range(12):
            ledger.reserve(step)
        (path,) = (tmp_path / "keys").glob("*.ledger")
        crashed = path.read_bytes()
    path.write_bytes(crashed)
    for result in train_all(tmp_path):
        assert "its budget is spent" in str(result)


def test_a_run_ends_early_where_one_ledger_allows_fewer_steps(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", 3)
    with open_ledger(tmp_path / "keys", 1, PLAN, precision=float(PLAN.precision_caps[0])) as ledger:
        for step in range(5):
            ledger.reserve(step)
    for result in train_all(tmp_path):
        assert isinstance(result, AgentResult), result
        assert (result.status, result.num_steps) == (RunStatus.INTERRUPTED, 7)
        assert result.stop.reason is StopReason.BUDGET_SPENT
        assert result.to_json()["stop_reason"] == "budget spent"


@pytest.mark.slow
def test_an_agent_that_dies_before_links_are_open_is_named_by_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the path 0 – 1 – 2 – 3, agents 2 and 3 wait for neighbours that wait themselves."""
    plan = small_plan("path:4", 12, mechanism="ldp", threat=ThreatModel())
    make_keys(tmp_path / "keys", 4)

    def die(opener: LinkOpener, neighbours: Any, **options: Any) -> dict[int, Link]:
        if opener._credentials.agent == 0:
            raise SystemExit  # as if killed: publishes nothing
        return open_links(opener, neighbours, **options)

    monkeypatch.setattr("corn.distributed.agent.open_links", die)
    _, *others = train_all(tmp_path, plan=plan, timeout=7, seconds=7)
    for result in others:
        assert isinstance(result, AbsentError | LinkError | RefusalError), result
        assert "agent 0" in str(result)


def test_an_agent_can_be_interrupted_while_another_never_opens_its_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening a link notices no signal until the time-out, so no agent begins it alone."""
    make_keys(tmp_path / "keys", 3)

    def stand_still(rendezvous: Rendezvous, *others: Any, **options: Any) -> Any:
        if rendezvous.agent == 2:
            raise SystemExit  # as if killed: publishes nothing
        rendezvous.interruption = Interruption()
        threading.Timer(0.3, setattr, (rendezvous.interruption, "requested", True)).start()
        return share_group_seeds(rendezvous, *others, **options)

    monkeypatch.setattr("corn.distributed.agent.share_group_seeds", stand_still)
    began = time.monotonic()
    results = train_all(tmp_path, timeout=50, seconds=50)
    assert time.monotonic() - began < 30
    for number, result in enumerate(results[:2]):
        # By its own signal, or by the other's, of which it hears at once.
        assert isinstance(result, StoppedByUserError | RefusalError), result
        assert str(result).startswith(f"agent {number}: ")
        assert "interrupted before the first step" in str(result)


def test_a_run_that_diverged_resumes_from_a_checkpoint_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One agent leaves, as its model diverged; here that stops the others."""
    n, plan = 6, small_plan("path:6", 40, mechanism="ldp", threat=ThreatModel())
    make_keys(tmp_path / "keys", n)
    diverges = threading.local()

    def diverge(parameters: Tensor, *given: Any, **options: Any) -> Tensor:
        half = take_half_step(parameters, *given, **options)
        diverges.step = getattr(diverges, "step", 0) + 1
        return half * torch.inf if getattr(diverges, "at", 99) <= diverges.step else half

    monkeypatch.setattr("corn.learn.step.take_half_step", diverge)

    def run(rendezvous: Rendezvous, resume: bool) -> AgentResult:
        diverges.at = 3 if rendezvous.agent == 0 and not resume else 99
        options: Any = {"timeout": 20, "checkpoint_every": 1, "on_dropout": "stop"}
        return train(rendezvous, tmp_path, plan=plan, resume=resume, **options)

    for result in run_in_threads(n, partial(run, resume=False)):
        assert isinstance(result, AgentResult), result
        diverged, lost = StopReason.DIVERGED, StopReason.LOSS
        assert result.stop.reason is (diverged if result.agent == 0 else lost)
        assert result.stop.agent == 0
    for result in run_in_threads(n, partial(run, resume=True)):
        assert isinstance(result, AgentResult), result
        assert result.first_step > 0
        assert result.stop.reason is not StopReason.DIVERGED


def test_under_replan_the_cap_is_reported(tmp_path: Path) -> None:
    """New plans give an agent other noise, so its ε under the first plan is not a bound."""
    plan = small_plan("star:4", 12, mechanism="decor", threat=ThreatModel())
    assert min(own.epsilon for own in verify_plan(plan).guarantees) < 9
    results = train_all(tmp_path, plan=plan, on_dropout="replan")
    for result in results:
        assert isinstance(result, AgentResult), result
        assert result.rows[-1]["epsilon"] == pytest.approx(10, rel=1e-6)


def test_every_message_of_a_run_is_made_of_multiples_of_the_grid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off the grid, the low-order bits of a message would depend on the gradient."""
    make_keys(tmp_path / "keys", 4)
    sent: dict[int, list[Tensor]] = {agent: [] for agent in range(4)}
    start = Exchange.start

    def record(self: Exchange, header: Header, parameters: Tensor) -> None:
        sent[header.sender].append(parameters.clone())
        start(self, header, parameters)

    monkeypatch.setattr(Exchange, "start", record)
    results = train_all(tmp_path, plan=RING)
    assert all(isinstance(result, AgentResult) for result in results)
    # The first message is x − (1 − β)s/2 for a public x of 0 and β = 0.5, without rounding.
    assert RING.momentum == 0.5
    for messages in sent.values():
        multiples = messages[0].double() * -4 / RING.grid
        assert torch.equal(multiples, multiples.round())
        assert len(set(multiples.tolist())) > 5


def test_only_the_owner_learns_of_gradients_that_are_not_finite(tmp_path: Path) -> None:
    """A neighbour that learnt of them would have an oracle on the data."""
    make_keys(tmp_path / "keys", 3)

    def run(rendezvous: Rendezvous) -> AgentResult:
        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            mean = nn.functional.cross_entropy(outputs, targets)
            return mean * torch.inf if rendezvous.agent == 1 else mean

        return train(rendezvous, tmp_path, loss=loss)

    for result in run_in_threads(3, run):
        assert isinstance(result, AgentResult), result
        assert (result.status, result.notes) == (RunStatus.COMPLETE, ())
        assert result.stop.reason is StopReason.NONE
        assert torch.isfinite(result.parameters).all()
        told = " ".join(result.private_notes)
        assert ("gradients were not finite at step 0" in told) == (result.agent == 1)
        own = Folders.of_run(tmp_path).of_agent(result.agent)
        shared = "".join(path.read_text() for path in own.shared.rglob("*.*v"))
        assert "finite" not in shared


def test_models_that_diverge_stop_all_agents_and_are_not_saved(tmp_path: Path) -> None:
    results = train_all(tmp_path, step_size=3e38, checkpoint_every=1)
    for result in results:
        assert isinstance(result, AgentResult), result
        assert result.status is RunStatus.INTERRUPTED
        assert result.stop.reason is StopReason.DIVERGED
        # Not of the model that diverged: a run goes on from before it.
        kept = list_checkpoints(Folders.of_run(tmp_path).of_agent(result.agent).private)
        assert max(kept) < result.num_steps
        # The last model that could be sent to others is kept.
        assert torch.isfinite(result.parameters).all()


def test_survivors_stop_where_no_new_plan_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> Plan:
        raise InvalidArgumentError("epsilon must be positive, found 0.0")

    monkeypatch.setattr(rounds, "replan", fail)
    for result in lose_one("replan", tmp_path):
        assert isinstance(result, AgentResult), result
        assert result.status is RunStatus.INTERRUPTED
        assert (result.stop.agent, result.stop.reason) == (2, StopReason.LOSS)
        assert result.notes[-1].endswith(": epsilon must be positive, found 0.0")


@pytest.mark.parametrize("policy", ["replan", "stop"])
def test_the_rest_follow_the_policy_when_one_crashes(policy: str, tmp_path: Path) -> None:
    """The loss is noticed at step 1, and the agent opposite may have begun it, or not."""
    for result in lose_one(policy, tmp_path):
        assert isinstance(result, AgentResult), result
        assert set(result.lost) == {2}
        assert result.lost[2] <= 1
        notes = "\n".join(result.notes)
        if policy == "stop":
            assert result.num_steps in (2, 3)
            assert result.status is RunStatus.INTERRUPTED
            assert (result.stop.agent, result.stop.reason) == (2, StopReason.LOSS)
        else:
            assert (result.num_steps, result.status) == (12, RunStatus.PARTIAL)
            assert "was left out without agent 2" in notes
        assert ("for 3 agents from step" in notes) == (policy == "replan")


def lose_one(
    policy: str | None, tmp_path: Path, plan: Plan = RING
) -> list[AgentResult | BaseException]:
    """Return how the other three end when agent 2 of a ring crashes after its first step."""
    make_keys(tmp_path / "keys", 4)

    def crash(state: AgentState) -> None:
        if state.step == 1:
            raise CornError("crash")

    def run(rendezvous: Rendezvous) -> AgentResult:
        reports = Reports(on_state=crash if rendezvous.agent == 2 else None)
        return train(rendezvous, tmp_path, plan=plan, on_dropout=policy, reports=reports)

    results = run_in_threads(4, run)
    assert str(results.pop(2)) == "agent 2: crash"
    return results


def test_a_wrong_number_of_agents_and_missing_files_are_reported(tmp_path: Path) -> None:
    (result,) = run_in_threads(1, lambda rendezvous: train(rendezvous, tmp_path))
    assert isinstance(result, InvalidArgumentError)
    assert str(result) == "agent 0: the plan is for 3 agents, found 1 in this run"
    (tmp_path / "metrics.csv").write_text("nonsense\n", encoding="utf-8")
    with pytest.raises(FileFormatError, match="not a table of measurements"):
        read_rows(tmp_path / "metrics.csv")
    with pytest.raises(FileFormatError, match="cannot be used"):
        read_model(tmp_path, 3, PLAN)
    assert read_rows(tmp_path / "none.csv") == {}
