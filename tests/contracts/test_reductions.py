"""The contract of every reduction: same bits, void steps, restarts, and a complete ledger."""

from pathlib import Path

import numpy as np
import pytest

from corn.distributed.keyring import make_keys
from corn.errors import CornError
from corn.noise.ledger import read_history

from .reductions import (
    REDUCTIONS,
    SIZE,
    Loss,
    N,
    Run,
    T,
    measure_distance,
    simulate,
)

NO_LEDGER = "a simulation has no ledger: its ε is no promise"
ONE_TENSOR = "the agents of a simulation are one tensor, of which none can be lost"
NO_SURVIVORS = "a lost rank ends the process group of torch.distributed, and all ranks with it"

pytestmark = pytest.mark.slow


@pytest.fixture(params=REDUCTIONS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def run(name: str) -> Run:
    return REDUCTIONS[name]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", N)
    return tmp_path / "keys"


def count_releases(folder: Path) -> list[int]:
    """Return the releases that the ledger of each agent has counted."""
    found = []
    for agent in range(N):
        site = folder / f"site-{agent}"
        history = read_history([site if site.exists() else folder], agent)
        assert not history.problems
        found.append(sum(each.num_releases for each in history.expenses))
    return found


def skip_without(name: str, **reasons: str) -> None:
    reason = reasons.get(name.replace(".", "_"))
    if reason:
        pytest.skip(reason)


def test_all_agents_have_the_bits_of_the_simulation(run: Run, folder: Path) -> None:
    """Noise and masks follow from the public keys of a simulation, in place of the agents' own."""
    expected = simulate(folder, 3, public=True)[0]
    found = run(folder, 3, public=True)
    assert sorted(found) == list(range(N))
    for model in found.values():
        np.testing.assert_array_equal(model, expected)
    assert measure_distance(expected) == pytest.approx(3, abs=0.1)


def test_a_step_without_an_agent_is_void_and_counted_and_the_others_go_on(
    name: str, run: Run, folder: Path
) -> None:
    skip_without(name, simulation=ONE_TENSOR, torch_distributed=NO_SURVIVORS)
    models = run(folder, T, lose=Loss(2, 1))
    assert sorted(models) == [0, 1, 3]
    first, *others = models.values()
    for other in others:
        np.testing.assert_array_equal(other, first)
    # One step of all agents with the mean gradient 1, a void one, and the rest of the others'.
    others_mean = (0.7 + 0.9 + 1.3) / 3
    assert measure_distance(first) == pytest.approx(1 + (T - 2) * others_mean, abs=0.3)
    released = count_releases(folder)
    assert [released[agent] for agent in (0, 1, 3)] == [T] * 3
    assert released[2] <= 2


def test_agents_that_start_again_go_on_with_new_noise(name: str, run: Run, folder: Path) -> None:
    skip_without(name, simulation=NO_LEDGER)
    first = run(folder, 2)[0]
    assert count_releases(folder) == [2] * N
    second = run(folder, 2)[0]
    assert count_releases(folder) == [4] * N
    for model in (first, second):
        # Seven standard deviations of the noise, which is secret here; one step is a distance of 1.
        assert measure_distance(model) == pytest.approx(2, abs=0.25)
    assert (first != second).all()


def test_a_spent_budget_gives_nothing(name: str, run: Run, folder: Path) -> None:
    skip_without(name, simulation=NO_LEDGER)
    run(folder, T)
    assert count_releases(folder) == [T] * N
    if name == "peers":  # agents refuse to start, where engines end with the model of the start
        with pytest.raises(CornError):
            run(folder, T)
    else:
        for model in run(folder, T).values():
            np.testing.assert_array_equal(model, np.zeros(SIZE))
    assert count_releases(folder) == [T] * N
