"""Agents with promises of their own: in processes, in a shared planning, and after a loss."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from corn.covariance import Horizon
from corn.distributed.journal import epsilon_after
from corn.distributed.planning import PlanningRequest, plan_together
from corn.distributed.recovery import replan
from corn.distributed.settings import RunSettings
from corn.distributed.storage import read_rows
from corn.learn.schedule import Constant
from corn.plan import Plan, fingerprint, make_plan, verify_plan
from corn.privacy import ClippedQuery, PrivacyBudget, gaussian
from corn.privacy.floats import set_aside
from corn.topology import load_network

from .harness import finished, run_processes
from .threads import run_in_threads

EPSILONS, DELTAS = (1.0, 8.0, 4.0, 8.0), (1e-6, 1e-5, 1e-5, 1e-5)
STEPS = 12
BUDGET = PrivacyBudget(EPSILONS, DELTAS, num_steps=STEPS, clip=0.1)
NETWORK = load_network("ring:4", mixing="gossip")


@pytest.mark.slow
def test_every_process_reports_its_own_promise(tmp_path: Path) -> None:
    """Each agent's table has the ε that its own noise spends, at its own δ.

    Where agents may replan, the ledger counts the largest precision that a new plan may have.
    """
    made = make_plan(NETWORK, BUDGET)
    settings = RunSettings(
        Constant(0.2), timeout=30, evaluate_at=(0, STEPS), batch_size=16, on_dropout="stop"
    )
    results = finished(run_processes(made, tmp_path, settings))
    guarantees = verify_plan(made).guarantees
    assert sorted(results) == [0, 1, 2, 3]
    spent = {}
    for agent in results:
        last = read_rows(tmp_path / "private" / f"agent-{agent}" / "metrics.csv")[STEPS]
        spent[agent] = float(last["epsilon"])
        assert last["delta"] == DELTAS[agent]
        assert last["central_ratio"] == pytest.approx(made.central_ratio)
        assert spent[agent] == pytest.approx(guarantees[agent].epsilon, rel=1e-12)
        assert 0 < spent[agent] <= EPSILONS[agent]
    # Counted at a lenient agent's δ, the strict agent's ε would be another.
    lenient = epsilon_after(BUDGET.of_agent(1), guarantees[0].precision, STEPS)
    assert lenient != pytest.approx(spent[0], rel=1e-3)


def test_agents_agree_on_promises_that_they_plan_together() -> None:
    request = PlanningRequest(BUDGET, Horizon(4))
    graph = NETWORK.graph
    results = run_in_threads(
        4, lambda rendezvous: plan_together(rendezvous, request, graph.neighbors(rendezvous.agent))
    )
    plans = [result for result in results if isinstance(result, Plan)]
    assert len(plans) == 4, results
    assert len({fingerprint(own) for own in plans}) == 1
    assert plans[0].budget == BUDGET
    assert verify_plan(plans[0]).passed


def spend(query: ClippedQuery, precisions: Sequence[float], delta: float) -> float:
    """Return ε of steps one by one; a sample counts with the least noise of each of its passes."""
    length = query.steps_per_pass or 1
    starts = range(0, len(precisions), length)
    total = sum(max(precisions[start : start + length]) for start in starts)
    return gaussian.epsilon_from(query.sensitivity * math.sqrt(total), delta)


@pytest.mark.parametrize("survivors", [(0, 1, 2), (1, 2, 3)])
def test_survivors_keep_their_own_promises(survivors: tuple[int, ...]) -> None:
    made, steps_left = make_plan(NETWORK, BUDGET), 5
    again = replan(made, survivors, steps_left=steps_left)
    assert verify_plan(again).passed
    ideal = set_aside(BUDGET)
    before, after = made.precision_caps, again.precision_caps
    for place, agent in enumerate(survivors):
        assert after[place] <= before[agent] * (1 + 1e-9)
        own = ideal.of_agent(agent)
        steps = [before[agent]] * (STEPS - steps_left) + [after[place]] * steps_left
        assert spend(own.query, steps, own.promise.delta) <= own.promise.epsilon * (1 + 1e-9)
        assert again.budget.of_agent(place).promise.delta == DELTAS[agent]


def test_passes_of_survivors_spend_no_more_than_was_planned() -> None:
    """A new plan in the middle of a pass continues it, and keeps the precision of its steps."""
    budget = PrivacyBudget(
        (1.0, 8.0, 4.0, 8.0),
        1e-5,
        num_steps=20,
        clip=0.1,
        unit="sample",
        batch_size=4,
        sampling="passes",
        samples_per_agent=(28, 30, 9, 12),
    )
    made = make_plan(NETWORK, budget)
    steps_done = 9
    again = replan(made, (0, 1, 2), steps_left=20 - steps_done)
    ideal = set_aside(budget)
    for place, agent in enumerate((0, 1, 2)):
        own = ideal.of_agent(agent)
        steps = [made.precision_caps[agent]] * steps_done
        steps += [again.precision_caps[place]] * (20 - steps_done)
        assert spend(own.query, steps, own.promise.delta) <= own.promise.epsilon * (1 + 1e-9)
    lengths = [own.query.steps_per_pass for own in map(again.budget.of_agent, range(3))]
    assert lengths == [7, 7, 2]
