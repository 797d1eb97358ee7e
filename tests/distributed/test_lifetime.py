"""An owner's limit on all plans together is kept before anything is released."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from corn.covariance import ThreatModel
from corn.distributed import (
    AgentResult,
    Lifetime,
    LifetimeSpentError,
    LifetimeTotal,
    Rendezvous,
    Reports,
    RunSettings,
    run_agent,
)
from corn.distributed.launcher import foresee_total
from corn.distributed.startup.keyring import make_keys, open_ledger
from corn.distributed.startup.start_errors import RefusalError
from corn.errors import InvalidArgumentError
from corn.learn import Constant
from corn.noise import compose_history, read_history
from corn.plan import Plan, make_plan
from corn.privacy import PrivacyBudget
from corn.topology import load_network

from .harness import small_plan
from .threads import run_in_threads

FIRST = small_plan("complete:2", 6, mechanism="ldp", threat=ThreatModel())
SECOND = small_plan("complete:2", 9, mechanism="ldp")
BOTH = 15.5  # ε of both plans, each of which promises 10


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


def test_the_total_is_told_before_the_first_release(folder: Path) -> None:
    told: dict[int, tuple[LifetimeTotal, list[int]]] = {}

    def run(place: Rendezvous) -> AgentResult:
        agent = place.agent

        def note(total: LifetimeTotal) -> None:
            told[agent] = total, sorted(count_releases(folder, agent))

        limit = Lifetime(BOTH)
        return train(place, folder, SECOND, reports=Reports(on_total=note), lifetime=limit)

    results = run_in_threads(2, run)
    for agent, result in enumerate(results):
        assert isinstance(result, AgentResult), result
        total, releases = told[agent]
        assert releases == [0, 6]
        assert result.lifetime == total
        assert total.before.epsilon == pytest.approx(10, rel=1e-3)
        assert total.added.epsilon == pytest.approx(10, rel=1e-3)
        # It is known in advance, and holds against the weaker of both adversaries.
        after = compose_history(read_history([folder / "keys"], agent), 1e-5).total
        assert total.after == after
        assert 15 < after.epsilon < BOTH
        assert after.max_colluders == 0
        assert "before this run: ε = 9.99" in total.describe()
        assert "against an eavesdropper who sees every message" in total.describe()
        assert "lifetime" not in result.to_json()


def test_nothing_is_released_beyond_the_limit_and_others_get_no_number(folder: Path) -> None:
    def run(place: Rendezvous) -> AgentResult:
        return train(place, folder, SECOND, lifetime=Lifetime(12 if place.agent == 1 else None))

    first, second = run_in_threads(2, run)
    assert isinstance(second, LifetimeSpentError)
    assert "agent 1: refuses to start, as the total would exceed the limit of ε = 12" in str(second)
    assert "total after it: at most ε = 15" in str(second)
    assert isinstance(first, RefusalError)
    assert "agent 1 refused: its owner's limit on all releases does not allow" in str(first)
    assert not any(digit in str(first).partition("refused:")[2] for digit in "0123456789")
    assert [sorted(count_releases(folder, agent)) for agent in (0, 1)] == [[0, 6], [0, 6]]
    # Fewer steps fit the limit.
    for result in run_in_threads(
        2, lambda place: train(place, folder, SECOND, num_steps=2, lifetime=Lifetime(12))
    ):
        assert isinstance(result, AgentResult), result


def test_ledgers_of_other_keys_count_if_they_are_named(folder: Path) -> None:
    make_keys(folder / "new", 2)
    other = Lifetime(12, other_keys=(folder / "keys",))
    for result in run_in_threads(
        2, lambda place: train(place, folder, SECOND, keys="new", lifetime=other)
    ):
        assert isinstance(result, LifetimeSpentError | RefusalError), result


def test_no_limit_can_be_kept_while_a_ledger_is_lost(folder: Path) -> None:
    for path in (folder / "keys").glob("agent-1-*.ledger"):
        path.unlink()
    results = run_in_threads(2, lambda place: train(place, folder, SECOND, lifetime=Lifetime(1000)))
    assert "cannot be kept while the total is unknown" in str(results[1])
    # Without a limit a run starts, and states that the total is more than it can tell.
    results = run_in_threads(2, lambda place: train(place, folder, SECOND))
    totals = [result.lifetime for result in results if isinstance(result, AgentResult)]
    assert len(totals) == 2
    assert [total.describe().count("at least") for total in totals if total] == [0, 2]


def test_a_plan_that_runs_elsewhere_counts_in_full(folder: Path) -> None:
    third = small_plan("complete:2", 12, mechanism="ldp")
    with open_ledger(folder / "keys", 1, third, precision=1.0):
        results = run_in_threads(
            2, lambda place: train(place, folder, SECOND, lifetime=Lifetime(BOTH))
        )
        assert "the total would exceed the limit" in str(results[1])


def test_the_launcher_bounds_the_totals_of_all_agents(folder: Path) -> None:
    total = foresee_total(
        SECOND, range(2), RunSettings(), keys=folder / "keys", lifetime=Lifetime()
    )
    assert total.before.epsilon == pytest.approx(10, rel=1e-3)
    assert 15 < total.after.epsilon < BOTH
    again = foresee_total(FIRST, range(2), RunSettings(), keys=folder / "keys", lifetime=Lifetime())
    assert (again.added.epsilon, again.before) == (0, again.after)


def test_a_folder_under_two_names_counts_once_and_a_missing_one_is_named_once(
    folder: Path,
) -> None:
    again, missing = folder / "keys" / ".." / "keys", folder / "mistyped"
    total, repeated, unknown = (
        foresee_total(
            *(FIRST, range(2), RunSettings()),
            keys=folder / "keys",
            lifetime=Lifetime(other_keys=other),
        )
        for other in ((), (again,), (missing,))
    )
    assert repeated == total
    assert unknown.problems == (f"{missing}: is not a folder of keys and ledgers",)


@pytest.mark.parametrize("wrong", [{"epsilon": 0}, {"epsilon": -1}, {"delta": 0}, {"delta": 2}])
def test_a_limit_must_be_positive(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidArgumentError, match="lifetime"):
        Lifetime(**wrong)  # type: ignore[arg-type]


def test_ledgers_beside_the_keys_that_do_not_count_are_named(folder: Path) -> None:
    shutil.copytree(folder / "keys", folder / "old.keys")

    def foresee(lifetime: Lifetime) -> LifetimeTotal:
        keys = folder / "keys"
        return foresee_total(SECOND, range(2), RunSettings(), keys=keys, lifetime=lifetime)

    total = foresee(Lifetime())
    assert total.uncounted == (folder / "old.keys",)
    assert "not counted are the ledgers in old.keys" in total.describe()
    counted = foresee(Lifetime(other_keys=(folder / "old.keys",)))
    assert counted.uncounted == ()
    assert counted.before.epsilon > total.before.epsilon


def test_a_plan_for_samples_ends_what_is_promised_for_the_agent(folder: Path) -> None:
    sampled = PrivacyBudget(
        1, 1e-5, num_steps=5, clip=1, unit="sample", batch_size=5, sampling="every-step"
    )
    plan = make_plan(load_network("complete:2"), sampled, mechanism="ldp")
    total = foresee_total(plan, range(2), RunSettings(), keys=folder / "keys", lifetime=Lifetime())
    assert (total.drops_agent, total.after.unit) == (True, "sample")
    assert "nothing is promised for the agent's whole data any more" in total.describe()
    # The plan before protects an agent, and each sample as well.
    assert total.before.epsilon == pytest.approx(10, rel=1e-3)
