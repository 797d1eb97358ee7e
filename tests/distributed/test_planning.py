"""Agents that know only their neighbours make the same plan."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from corn.covariance import Horizon
from corn.distributed.planning import PlanningRequest, plan_together, read_request
from corn.distributed.rendezvous import (
    HandshakeError,
    Rendezvous,
)
from corn.errors import CornError, FileFormatError, InvalidArgumentError, PublicError
from corn.plan import Plan, fingerprint, make_plan, verify_plan
from corn.privacy import PrivacyBudget
from corn.topology import load_network
from corn.transport import MemoryStore

from .threads import make_rendezvous, run_in_threads

REQUEST = PlanningRequest(PrivacyBudget(10, 1e-5, num_steps=50, clip=0.1), Horizon(10))
GRAPH = load_network("er:n=5,p=0.5,seed=2", mixing="gossip").graph


def test_all_agents_make_the_plan_of_a_central_planner() -> None:
    results = run_in_threads(
        5, lambda rendezvous: plan_together(rendezvous, REQUEST, GRAPH.neighbors(rendezvous.agent))
    )
    plans = [result for result in results if isinstance(result, Plan)]
    assert len(plans) == 5, results
    central = make_plan(
        load_network(GRAPH),
        REQUEST.budget,
        threat=REQUEST.threat,
        objective=REQUEST.objective,
    )
    assert {fingerprint(plan) for plan in plans} == {fingerprint(central)}
    assert verify_plan(plans[0]).passed


@pytest.mark.parametrize("neighbours", [[0], [2], [-1], [1, 7]])
def test_neighbours_that_cannot_be_linked_are_refused_at_once(neighbours: list[int]) -> None:
    own = make_rendezvous(0, 2, MemoryStore())
    with pytest.raises(InvalidArgumentError, match="neighbours must be other agents of 0 … 1"):
        plan_together(own, REQUEST, neighbours)
    own.close()


@pytest.mark.parametrize(
    ("neighbours", "error", "message"),
    [
        ({0: [1], 1: [0], 2: [3], 3: [2]}, CornError, "connected"),
        ({0: [1], 1: [0, 2], 2: [1, 3], 3: [2]}, HandshakeError, "agent 3 has"),
        ({0: [1], 1: [0], 2: [1, 3], 3: [2]}, PublicError, "agents 2 and 1 do not agree on a link"),
    ],
)
def test_networks_and_requests_that_do_not_fit_are_reported(
    neighbours: dict[int, list[int]], error: type[CornError], message: str
) -> None:
    def run(rendezvous: Rendezvous) -> object:
        own = REQUEST
        if rendezvous.agent == 3 and error is HandshakeError:
            own = replace(REQUEST, mechanism="ldp")
        return plan_together(rendezvous, own, neighbours[rendezvous.agent])

    for result in run_in_threads(4, run):
        assert isinstance(result, error), result
        assert message in str(result)


def test_a_request_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "request.json"
    path.write_text(REQUEST.to_text(), encoding="utf-8")
    assert read_request(path) == REQUEST
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(FileFormatError, match="not a request for a plan"):
        read_request(path)
    with pytest.raises(FileFormatError, match="no such file"):
        read_request(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mechanism": "magic"}, "mechanism cannot be 'magic'"),
        ({"dtype": "float8"}, "dtype cannot be 'float8'"),
        ({"objective": {"length": 5}}, "objective: 'disagreement_weight' is missing"),
        ({"budget": 5}, "budget must be a JSON object, found 5"),
        ({"threat": {**asdict(REQUEST.threat), "max_colluders": True}}, "max_colluders cannot be"),
        ({"budget": {**asdict(REQUEST.budget), "epsilon": -1}}, "epsilon must be positive"),
    ],
)
def test_invalid_requests_are_refused(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "request.json"
    path.write_text(json.dumps(json.loads(REQUEST.to_text()) | change), encoding="utf-8")
    with pytest.raises(FileFormatError, match=f"not a request for a plan: {message}"):
        read_request(path)
