"""Random histories of losses and returns break nothing that must hold."""

from pathlib import Path

import pytest

from corn.topology import Mixing
from tests.oracles.loss_histories import run_history, run_processes_history


@pytest.mark.slow
@pytest.mark.parametrize("mixing", ["sum", "gossip"])
@pytest.mark.parametrize("seed", [100, 153, 157, 2224])
def test_agents_in_threads_agree_and_release_nothing_twice(
    seed: int, mixing: Mixing, tmp_path: Path
) -> None:
    record = run_history(seed, tmp_path, mixing)
    assert record.problems == []
    assert record.events["end"] > 0


@pytest.mark.slow
def test_agents_in_processes_agree_and_release_nothing_twice(tmp_path: Path) -> None:
    record = run_processes_history(170, tmp_path)
    assert record.problems == []
    assert record.events["end"] > 0
