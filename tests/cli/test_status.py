"""``corn status`` shows the agents of a run under way, and names stale states."""

import json
import re
import time
from pathlib import Path

import pytest

from corn.distributed.status import STATE_NAME, write_state
from corn.distributed.storage import make_folders
from tests.distributed.monitored import make_state

from .commands import Runner


@pytest.fixture
def files(tmp_path: Path) -> dict[int, Path]:
    """Make a run with two running agents out of five."""
    made = {agent: make_folders(tmp_path, agent).private / STATE_NAME for agent in (0, 2)}
    for agent, path in made.items():
        write_state(path, make_state(agent=agent))
    return made


@pytest.mark.usefixtures("files")
def test_a_run_under_way_is_a_table(corn: Runner, tmp_path: Path) -> None:
    outcome = corn("status", tmp_path)
    assert outcome.exit_code == 0, outcome.stderr
    for text in ("120/400", "3.21", "one sample", "one insider", "0, 4", "training"):
        assert text in outcome.stdout


def test_stale_states_are_named_and_exit_with_1(
    corn: Runner, tmp_path: Path, files: dict[int, Path]
) -> None:
    write_state(files[2], make_state(updated=time.time() - 300))
    outcome = corn("status", tmp_path, "--json")
    assert outcome.exit_code == 1
    conditions = {own["agent"]: own["condition"] for own in json.loads(outcome.stdout)["agents"]}
    # Seconds pass between writing the state and reading it.
    found = re.match(r"stale: no news for (\d+) s", conditions[2])
    assert found is not None
    assert 300 <= int(found[1]) < 900


def test_an_agent_that_failed_is_an_alarm_and_one_that_is_done_is_not(
    corn: Runner, tmp_path: Path, files: dict[int, Path]
) -> None:
    for phase, code in (("partial", 0), ("complete", 0), ("failed", 1)):
        for agent, path in files.items():
            write_state(path, make_state(agent=agent, phase=phase))
        assert corn("status", tmp_path).exit_code == code
