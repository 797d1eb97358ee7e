"""Mechanisms of the user's own: scaled to the caps, checked, and refused where they cannot hold."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corn.checks import FloatArray
from corn.covariance import (
    EAVESDROPPER,
    ONE_STEP,
    Corn,
    Decor,
    DesignProblem,
    OwnMechanism,
    ThreatModel,
    design,
    read_mechanism,
    read_mechanisms,
)
from corn.errors import CornError, InfeasibleError
from corn.plan import load_plan, make_plan, save_plan, verify_plan
from corn.privacy import PrivacyBudget
from corn.topology import load_network
from tests.covariance.networks import is_private

NETWORK = load_network("ring:5", mixing="gossip")
CAPS = np.array([1.0, 4.0, 1.0, 2.0, 1.0])
SHAPE = 100 * (np.eye(5) + 3 * (np.eye(5) - 1 / 5))


@pytest.mark.parametrize("factor", [1e-3, 1.0, 1e3])
def test_only_the_shape_counts(factor: float) -> None:
    found = design(NETWORK, CAPS, mechanism=OwnMechanism(factor * SHAPE), objective=ONE_STEP)
    assert is_private(found.covariance, CAPS)
    assert not is_private(found.covariance * (1 - 1e-6), CAPS), "the budget is used up"
    ratio = found.covariance / SHAPE
    np.testing.assert_allclose(ratio, ratio[0, 0])
    assert found.status == "given"
    assert found.gap >= 0
    assert found.threat == EAVESDROPPER


def test_a_rule_sees_the_network_and_the_caps() -> None:
    """DECOR's covariance as a rule of one's own is DECOR."""
    decor = design(NETWORK, 1.0, mechanism=Decor(), objective=ONE_STEP)

    def rule(problem: DesignProblem) -> FloatArray:
        np.testing.assert_array_equal(problem.mixing_matrix, NETWORK.step_matrix)
        np.testing.assert_array_equal(problem.precision_caps, np.ones(5))
        np.testing.assert_array_equal(
            problem.objective_matrix, ONE_STEP.matrix(NETWORK.step_matrix)
        )
        assert problem.graph.number_of_edges() == 5
        problem.objective_matrix[:] = 0  # a copy: the design is judged by the caller's objective
        return decor.covariance

    found = design(NETWORK, 1.0, mechanism=rule, objective=ONE_STEP)
    assert found.value == pytest.approx(decor.value)


def test_names_records_and_functions_stand_side_by_side() -> None:
    def mine(problem: DesignProblem) -> FloatArray:
        return np.eye(problem.num_agents)

    assert list(read_mechanisms([mine, "ldp", Corn(), OwnMechanism(SHAPE, "other")])) == [
        *("mine", "ldp", "corn", "other")
    ]
    assert list(read_mechanisms({"long": Corn(), "short": Corn(max_noise_std=5.0)})) == [
        *("long", "short")
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("magic", "corn, decor, ldp, zero-sum, central, none, unclipped.*found 'magic'"),
        (["ldp,decor,corn,mine=R.npy"], "must be NAME=R.npy.*found 'ldp,decor,corn,mine=R.npy'"),
        ([Corn(), "corn"], "different names, found corn twice: give a mapping"),
        ([OwnMechanism(SHAPE, "ldp")], "a new name for one of your own, found 'ldp'"),
        ([3.0], "a function of a design problem, found 3.0"),
        ([], "at least one, found none"),
    ],
)
def test_names_that_are_unknown_or_not_different_are_refused(given: Any, message: str) -> None:
    with pytest.raises(CornError, match=message):
        read_mechanisms(given)


def test_independent_noise_holds_against_insiders() -> None:
    own = OwnMechanism(np.diag([1.0, 2.0, 3.0, 4.0, 5.0]))
    found = design(NETWORK, 1.0, mechanism=own, objective=ONE_STEP, threat=ThreatModel(1))
    assert found.decomposition.seed_groups == ()
    assert found.threat.max_colluders == 1
    shape = OwnMechanism(SHAPE)
    with pytest.raises(CornError, match="holds against an eavesdropper only"):
        design(NETWORK, 1.0, mechanism=shape, objective=ONE_STEP, threat=ThreatModel(1))


def test_plans_of_own_mechanisms_are_verified_from_their_file(tmp_path: Path) -> None:
    budget = PrivacyBudget(3, 1e-5, num_steps=10, clip=0.1)
    save_plan(make_plan(NETWORK, budget, mechanism=OwnMechanism(SHAPE)), tmp_path / "p.corn")
    plan = load_plan(tmp_path / "p.corn")
    found = verify_plan(plan)
    assert found.passed, found.problems
    assert all(own.epsilon <= 3 for own in found.guarantees)
    assert plan.mechanism == "own"
    assert plan.threat.max_colluders == 0


def test_files_and_functions(tmp_path: Path) -> None:
    np.save(tmp_path / "R.npy", SHAPE)
    np.savetxt(tmp_path / "R.csv", SHAPE, delimiter=",")
    (tmp_path / "rule.py").write_text(
        "import numpy as np\ndef shape(problem):\n    return 5 * np.eye(problem.num_agents) - 1\n"
    )
    values = set()
    for source in ("R.npy", "R.csv", "rule.py:shape"):
        own = read_mechanism(f"mine={tmp_path / source}")
        assert isinstance(own, OwnMechanism)
        assert own.label == "mine"
        made = design(NETWORK, 1.0, mechanism=own, objective=ONE_STEP) if "R." in source else None
        values |= {round(made.value, 9)} if made else set()
    assert len(values) == 1


@pytest.mark.parametrize(
    ("spec", "content", "message"),
    [
        ("=R.npy", b"", "must be NAME="),
        ("mine=", b"", "must be NAME="),
        ("mine=none.npy", None, "none.npy: no such file"),
        ("mine=R.txt", b"", "accepted are .csv, .npy"),
        ("mine=R.npy", b"nonsense", "not a matrix of numbers"),
        ("mine=f.py:g", b"def h(): pass\n", "must define a function 'g'"),
        ("mine=f.py:g", b"def g(:\n", "line 1"),
        ("mine=f.py", b"", "accepted are .csv, .npy"),
    ],
)
def test_broken_sources_are_named(
    spec: str, content: bytes | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = spec.partition("=")[2].partition(":")[0]
    if content is not None and name:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CornError, match=message):
        read_mechanism(spec)


def test_covariances_without_privacy_are_refused() -> None:
    zero_sum, skew = OwnMechanism(np.eye(5) - 1 / 5), OwnMechanism(np.triu(np.ones((5, 5))))
    with pytest.raises(InfeasibleError, match="singular"):
        design(NETWORK, 1.0, mechanism=zero_sum, objective=ONE_STEP)
    with pytest.raises(CornError):
        design(NETWORK, 1.0, mechanism=OwnMechanism(np.eye(4)), objective=ONE_STEP)
    with pytest.raises(CornError, match="symmetric"):
        design(NETWORK, 1.0, mechanism=skew, objective=ONE_STEP)
