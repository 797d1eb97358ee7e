"""An owner's requirements are met before anything is published or released."""

import logging
import math
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from corn.covariance import Horizon, ThreatModel
from corn.distributed import AgentResult, Rendezvous, Requirements, RunSettings, run_agent
from corn.distributed.agent import make_plan_together
from corn.distributed.keyring import make_keys, open_ledger
from corn.distributed.planning import PlanningRequest
from corn.distributed.recovery import replan
from corn.distributed.rendezvous import RefusalError, is_public
from corn.distributed.requirements import ReleaseTotal, RequirementError, compose_total
from corn.distributed.settings import AgentConfig
from corn.errors import InvalidArgumentError
from corn.learn import Constant, Workload
from corn.noise import read_history
from corn.plan import Plan, make_plan
from corn.privacy import PrivacyBudget, gaussian
from corn.topology import load_network

from .harness import small_plan
from .threads import run_in_threads

FIRST = small_plan("complete:2", 6, mechanism="ldp", threat=ThreatModel())
SECOND = small_plan("complete:2", 9, mechanism="ldp")
BOTH = 15.5  # ε of both plans, each of which promises 10
LIMIT = Requirements(unit="agent", total_epsilon=12)


def train(
    rendezvous: Rendezvous, folder: Path, plan: Plan, *, keys: str = "keys", **options: Any
) -> AgentResult:
    inputs = torch.randn(20, 3, generator=torch.Generator().manual_seed(rendezvous.agent))
    model = nn.Linear(3, 2)
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.1)
    rendezvous.keys = folder / keys
    return run_agent(
        plan,
        rendezvous=rendezvous,
        model=model,
        loss=nn.functional.cross_entropy,
        dataset=TensorDataset(inputs, (inputs.sum(dim=1) > 0).long()),
        settings=RunSettings(Constant(0.1), timeout=30, num_steps=options.pop("num_steps", None)),
        **options,
    )


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the keys of two agents that have run the first plan."""
    folder = tmp_path_factory.mktemp("used")
    make_keys(folder / "keys", 2)
    for result in run_in_threads(2, lambda place: train(place, folder, FIRST)):
        assert isinstance(result, AgentResult), result
    return folder


@pytest.fixture
def folder(used: Path, tmp_path: Path) -> Path:
    shutil.copytree(used / "keys", tmp_path / "keys")
    return tmp_path


def count_releases(folder: Path, agent: int) -> list[int]:
    return [expense.num_releases for expense in read_history([folder / "keys"], agent).expenses]


def test_the_total_is_told_before_the_first_release(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told: dict[int, tuple[logging.LogRecord, list[int]]] = {}

    def note(record: logging.LogRecord) -> None:
        if getattr(record, "event", "") == "total":
            agent = int(getattr(record, "agent", -1))
            told[agent] = record, sorted(count_releases(folder, agent))

    limit = Requirements(unit="agent", total_epsilon=BOTH)
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", note)
    monkeypatch.setattr(logging.getLogger("corn"), "handlers", [handler])
    caplog.set_level("INFO", "corn")
    results = run_in_threads(2, lambda place: train(place, folder, SECOND, requirements=limit))
    for agent, result in enumerate(results):
        assert isinstance(result, AgentResult), result
        record, releases = told[agent]
        assert releases == [0, 6]
        total = result.total
        assert total is not None
        assert (record.getMessage(), getattr(record, "is_private", None)) == (
            total.describe(),
            True,
        )
        assert total.before.epsilon == pytest.approx(10, rel=1e-3)
        assert total.added.epsilon == pytest.approx(10, rel=1e-3)
        # It is known in advance, and holds against the weaker of both adversaries.
        after = read_history([folder / "keys"], agent).compose(1e-5)
        assert total.after == after
        assert 15 < after.epsilon < BOTH
        assert after.max_colluders == 0
        assert "before this run: ε = 9.99" in total.describe()
        assert "against an eavesdropper who sees every message" in total.describe()
        assert "total" not in result.to_json()


def test_nothing_is_released_beyond_the_limit_and_others_get_no_number(folder: Path) -> None:
    def run(place: Rendezvous) -> AgentResult:
        return train(place, folder, SECOND, requirements=LIMIT if place.agent == 1 else None)

    first, second = run_in_threads(2, run)
    assert isinstance(second, RequirementError)
    assert "agent 1: refuses to start, as the total would exceed the limit of ε = 12" in str(second)
    assert "total after it: at most ε = 15" in str(second)
    assert isinstance(first, RefusalError)
    assert "agent 1 refused: RequirementError; only its owner sees" in str(first)
    assert not any(digit in str(first).partition("refused:")[2] for digit in "0123456789")
    assert [sorted(count_releases(folder, agent)) for agent in (0, 1)] == [[0, 6], [0, 6]]
    # Fewer steps fit the limit.
    for result in run_in_threads(
        2, lambda place: train(place, folder, SECOND, num_steps=2, requirements=LIMIT)
    ):
        assert isinstance(result, AgentResult), result


def test_ledgers_of_other_keys_count_if_they_are_named(folder: Path) -> None:
    make_keys(folder / "new", 2)
    other = replace(LIMIT, other_keys=(folder / "keys",))
    for result in run_in_threads(
        2, lambda place: train(place, folder, SECOND, keys="new", requirements=other)
    ):
        assert isinstance(result, RequirementError | RefusalError), result


def test_no_limit_can_be_kept_while_a_ledger_is_lost(folder: Path) -> None:
    for path in (folder / "keys").glob("agent-1-*.ledger"):
        path.unlink()
    results = run_in_threads(
        2,
        lambda place: train(place, folder, SECOND, requirements=replace(LIMIT, total_epsilon=1000)),
    )
    assert "cannot be kept while the total is unknown" in str(results[1])
    # Without a limit a run starts, and states that the total is more than it can tell.
    results = run_in_threads(2, lambda place: train(place, folder, SECOND))
    totals = [result.total for result in results if isinstance(result, AgentResult)]
    assert len(totals) == 2
    assert [total.describe().count("at least") for total in totals if total] == [0, 2]


def test_a_plan_that_runs_elsewhere_counts_in_full(folder: Path) -> None:
    third = small_plan("complete:2", 12, mechanism="ldp")
    with open_ledger(folder / "keys", 1, third, precision=1.0):
        results = run_in_threads(
            2,
            lambda place: train(
                place, folder, SECOND, requirements=replace(LIMIT, total_epsilon=BOTH)
            ),
        )
        assert "the total would exceed the limit" in str(results[1])


def foresee(folder: Path, plan: Plan, requirements: Requirements) -> ReleaseTotal:
    """Return the totals of agent 0 before it begins a run of a plan."""
    with open_ledger(folder / "keys", 0, plan, precision=float(plan.precision_caps[0])) as ledger:
        return compose_total(
            *(plan, 0),
            keys=folder / "keys",
            ledger=ledger,
            requirements=requirements,
            num_steps=plan.budget.num_steps,
        )


def test_a_run_adds_what_its_plan_still_allows(folder: Path) -> None:
    total = foresee(folder, SECOND, Requirements())
    assert total.before.epsilon == pytest.approx(10, rel=1e-3)
    assert 15 < total.after.epsilon < BOTH
    again = foresee(folder, FIRST, Requirements())
    assert (again.added.epsilon, again.before) == (0, again.after)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"epsilon": 0, "unit": "agent"}, "epsilon must be positive"),
        ({"total_epsilon": -1, "unit": "agent"}, "total-epsilon must be positive"),
        ({"delta": 0}, "delta must be in"),
        ({"delta": 2}, "delta must be in"),
        ({"unit": "person"}, "unit must be one of agent, sample"),
        ({"adjacency": "remove"}, "adjacency must be one of"),
        ({"insiders": -1}, "insiders must be"),
        ({"steps": 0}, "steps must be"),
        # A limit on ε means nothing without the data that it protects.
        ({"epsilon": 1}, "^epsilon needs a unit"),
        ({"total_epsilon": 1}, "^total-epsilon needs a unit"),
    ],
)
def test_requirements_must_have_a_meaning(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        Requirements(**wrong)


@pytest.mark.parametrize("texts", [["delta=1e-6"], ["unit=agent", "delta=1e-6", "steps=6"]])
def test_a_delta_that_would_require_nothing_is_refused(texts: list[str]) -> None:
    """Its owner would expect that a plan with δ = 0.9 is refused."""
    with pytest.raises(InvalidArgumentError, match="given with epsilon or total-epsilon"):
        Requirements.parse(texts)


def test_ledgers_in_other_folders_of_keys_count(folder: Path) -> None:
    shutil.copytree(folder / "keys", folder / "old.keys")
    total = foresee(folder, SECOND, Requirements())
    counted = foresee(folder, SECOND, Requirements(other_keys=(folder / "old.keys",)))
    assert counted.before.epsilon > total.before.epsilon


def test_a_plan_for_samples_ends_what_is_promised_for_the_agent(folder: Path) -> None:
    sampled = PrivacyBudget(
        1, 1e-5, num_steps=5, clip=1, unit="sample", batch_size=5, sampling="every-step"
    )
    plan = make_plan(load_network("complete:2", mixing="gossip"), sampled, mechanism="ldp")
    total = foresee(folder, plan, Requirements())
    assert (total.drops_agent, total.after.unit) == (True, "sample")
    assert "nothing is promised for the agent's whole data any more" in total.describe()
    # The plan before protects an agent, and each sample as well.
    assert total.before.epsilon == pytest.approx(10, rel=1e-3)


def make_small(delta: float = 1e-5, **fields: Any) -> Plan:
    budget = PrivacyBudget(fields.pop("epsilon", 1), delta, num_steps=6, clip=0.1, **fields)
    return make_plan(
        load_network("complete:2", mixing="gossip"), budget, mechanism="ldp", threat=ThreatModel(1)
    )


def test_the_owner_not_the_plan_chooses_delta(tmp_path: Path) -> None:
    """ε = 1 at δ = 0.9 is ε > 19 at δ = 10⁻⁵: neither limit of 1 may accept it."""
    plan = make_small(delta=0.9)
    make_keys(tmp_path / "keys", 2)
    for limit in ("epsilon", "total-epsilon"):
        required = Requirements.parse(["unit=agent", f"{limit}=1"])
        results = run_in_threads(
            2, partial(train, folder=tmp_path, plan=plan, requirements=required)
        )
        assert any(isinstance(result, RequirementError) for result in results), results
        assert all(isinstance(r, RequirementError | RefusalError) for r in results), results
    # An owner who accepts this δ gets what the plan promises.
    Requirements(unit="agent", epsilon=1, delta=0.9).check(plan, 0)


def test_epsilon_is_that_of_the_noise_at_the_owners_delta() -> None:
    """A plan with another δ is measured by its Gaussian, with the reserve for floats on top."""
    plan = make_small(delta=1e-4)
    budget = plan.budget
    mu = math.sqrt(float(plan.precision_caps[0]) * budget.num_steps) * budget.query.sensitivity
    ideal = gaussian.epsilon_from(mu, 1e-5)
    assert ideal > 1
    Requirements(unit="agent", epsilon=1.01 * ideal).check(plan, 0)
    with pytest.raises(RequirementError, match=r"epsilon must be at most .* at δ = 1e-05"):
        Requirements(unit="agent", epsilon=ideal).check(plan, 0)


@pytest.mark.parametrize(
    ("texts", "failure"),
    [
        (["unit=sample", "epsilon=1"], None),
        (["unit=agent", "epsilon=1", "adjacency=replace", "insiders=1", "steps=6"], None),
        (["adjacency=add-remove"], "adjacency must be add-remove, found replace"),
        (["insiders=2"], "insiders must be at least 2, found 1"),
        (["steps=5"], "steps must be at most 5, found 6"),
        (["unit=agent", "epsilon=0.9"], "epsilon must be at most 0.9"),
        (["unit=agent", "epsilon=1", "delta=1e-7"], "at δ = 1e-07, found ε = 1."),
        (["unit=agent", "epsilon=0.9", "steps=5"], "steps must be at most 5, found 6; epsilon"),
    ],
)
def test_each_requirement_is_checked(texts: list[str], failure: str | None) -> None:
    plan, required = make_small(), Requirements.parse(texts)
    request = PlanningRequest(plan.budget, Horizon(), plan.threat)
    for source in (plan, request):
        if failure is None:
            required.check(source, 1)
            continue
        with pytest.raises(RequirementError) as caught:
            required.check(source, 1)
        assert failure in str(caught.value)
        assert not is_public(caught.value)


def test_a_plan_for_samples_does_not_protect_the_agent() -> None:
    plan = make_small(unit="sample", batch_size=5, sampling="every-step")
    with pytest.raises(RequirementError, match="unit must be agent, found sample"):
        Requirements(unit="agent", epsilon=100).check(plan, 0)
    Requirements(unit="sample", epsilon=1).check(plan, 0)


def test_an_agent_is_judged_by_its_own_promise() -> None:
    plan, required = make_small(epsilon=(1, 3)), Requirements(unit="agent", epsilon=1)
    required.check(plan, 0)
    with pytest.raises(RequirementError, match="epsilon must be at most 1"):
        required.check(plan, 1)


def test_a_new_plan_after_a_loss_still_meets_the_requirements() -> None:
    """What was checked is the cap on each step, and no plan for survivors exceeds it."""
    plan = small_plan("complete:4", 20)
    for survivors in ((0, 1, 2), (1, 3)):
        later = replan(plan, survivors, steps_left=12)
        assert (later.precision_caps <= plan.precision_caps[list(survivors)]).all()
        assert later.threat.max_colluders == min(plan.threat.max_colluders, len(survivors) - 1)


def test_a_refused_plan_leaves_no_trace_and_tells_others_nothing(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", 2)
    before = sorted(tmp_path.rglob("*"))

    def run(place: Rendezvous) -> AgentResult:
        required = Requirements(steps=2) if place.agent == 1 else None
        out = tmp_path / "out" if place.agent == 1 else None
        return train(place, tmp_path, FIRST, requirements=required, out=out)

    first, second = run_in_threads(2, run)
    assert "agent 1: refuses to start" in str(second)
    assert "steps must be at most 2, found 6" in str(second)
    told = str(first).partition("refused:")[2]
    assert told == " RequirementError; only its owner sees the details"
    assert not list((tmp_path / "keys").glob("agent-1-*.ledger"))
    assert not (tmp_path / "out").exists()
    assert [path for path in before if not path.exists()] == []


def test_a_request_is_refused_before_an_agent_shows_its_links(tmp_path: Path) -> None:
    request = PlanningRequest(FIRST.budget, Horizon(), FIRST.threat)

    def run(place: Rendezvous) -> Plan:
        config = AgentConfig(
            request,
            Workload("breast-cancer"),
            RunSettings(),
            tmp_path / "out",
            agent=place.agent,
            num_agents=place.num_agents,
            store=("127.0.0.1", 1),
            keys=tmp_path / "keys",
            neighbours=(1 - place.agent,),
            requirements=Requirements(steps=2),
        )
        return make_plan_together(config, place, request)

    for result in run_in_threads(1, run):
        assert isinstance(result, RequirementError)
    assert not (tmp_path / "out").exists()


def test_earlier_plans_must_hold_against_the_insiders_that_are_required(folder: Path) -> None:
    """The first plan is against an eavesdropper, so no total holds against an insider."""
    required = Requirements(unit="agent", total_epsilon=100, insiders=1)
    results = run_in_threads(2, lambda place: train(place, folder, SECOND, requirements=required))
    assert any("must hold against 1 insiders" in str(result) for result in results)


def test_an_owner_is_warned_of_a_large_delta(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", 2)
    for delta, is_told in ((0.051, True), (0.049, False)):  # agents have 20 samples
        plan = make_small(delta=delta)
        results = run_in_threads(2, partial(train, folder=tmp_path, plan=plan))
        for result in results:
            assert isinstance(result, AgentResult), result
            assert any("more than one over" in n for n in result.private_notes) == is_told
            assert "more than one over" not in str(result.to_json())
