"""The state of an agent is one small private file, and a stale one is recognised."""

import json
import time
from functools import partial
from pathlib import Path

import pytest

from corn.distributed.journal import epsilon_after, round_up_releases
from corn.distributed.status import STATE_NAME, judge_condition, read_states, write_state
from corn.distributed.storage import make_folders
from corn.errors import FileFormatError
from corn.privacy import PrivacyBudget

from .monitored import make_state


def test_a_state_comes_back_from_its_private_file(tmp_path: Path) -> None:
    folders = make_folders(tmp_path, 2)
    path = folders.private / STATE_NAME
    for state in (make_state(), make_state(test_loss=None, lost={})):
        write_state(path, state)
        assert read_states(tmp_path) == {2: state}
    # It has times, and is not shared.
    assert path.stat().st_mode & 0o777 == 0o600
    assert not [found for found in folders.shared.rglob("*") if found.is_file()]


def test_a_state_without_news_is_stale_and_one_that_ended_is_not() -> None:
    old = time.time() - 130
    assert judge_condition(make_state()) == ("training", False)
    assert judge_condition(make_state(updated=old)) == ("stale: no news for 130 s", True)
    assert judge_condition(make_state(updated=old, phase="complete")) == ("complete", False)
    assert judge_condition(make_state(phase="failed")) == ("failed", True)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"agent": 1}', json.dumps({"agent": "<script>"})]
)
def test_a_damaged_state_is_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "private" / "agent-0" / "state.json"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(FileFormatError, match=r"state\.json"):
        read_states(tmp_path)


def test_a_line_names_the_unit_of_epsilon() -> None:
    line = make_state(epsilon=3.21001).describe()
    for part in ("step 120 of 400", "at most 3.21001 of 10 (unit sample, δ = 1e-05"):
        assert part in line
    assert "simulated" not in line
    assert "simulated ε spent at most" in make_state(simulation="labels decide").describe()


@pytest.mark.parametrize("num_steps", [1, 7, 100, 4001])
def test_the_epsilon_of_a_state_is_never_below_that_of_its_releases(num_steps: int) -> None:
    budget = PrivacyBudget(8, 1e-5, num_steps=num_steps, clip=0.1)
    epsilon = partial(epsilon_after, budget, 0.9 * budget.precision_cap)
    for releases in {0, 1, num_steps // 3, num_steps - 1, num_steps}:
        rounded = round_up_releases(releases, num_steps)
        assert releases <= rounded <= num_steps
        assert epsilon(rounded) >= epsilon(releases)
    assert epsilon(round_up_releases(0, num_steps)) == 0
    assert len({round_up_releases(k, num_steps) for k in range(num_steps)}) <= 21
