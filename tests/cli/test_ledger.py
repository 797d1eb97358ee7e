"""``corn keys ledger`` adds up releases, and ``corn launch`` keeps to a limit on them."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from corn.distributed.keyring import make_keys
from corn.noise import ReleaseLedger, record_use
from corn.noise.ledger import ledger_path
from corn.plan import save_plan
from corn.privacy import PrivacyBudget, gaussian
from corn.privacy.composition import PlanTerms
from corn.privacy.floats import set_aside
from tests.distributed.harness import small_plan

from .commands import Runner


def release(
    folder: Path,
    number: int,
    *,
    agent: int = 0,
    count: int = 20,
    colluders: int = 1,
    **changes: Any,
) -> PrivacyBudget:
    """Release under a plan of this number, at the cap of its budget."""
    options = {"epsilon": 2, "delta": 1e-5, "num_steps": 20, "clip": 0.1} | changes
    budget, plan = PrivacyBudget(**options), bytes([number]) * 32
    ledger = ReleaseLedger.open(
        ledger_path(folder, agent, plan.hex()),
        plan_fingerprint=plan,
        agent=agent,
        terms=PlanTerms(budget, colluders),
        precision=set_aside(budget).precision_cap,
    )
    with ledger:
        record_use(folder / f"agent-{agent}.key", plan)
        for step in range(count):
            ledger.reserve(step)
    return budget


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", 2)
    return tmp_path / "keys"


def test_gaussian_plans_are_added_up_in_squares(corn: Runner, keys: Path) -> None:
    one = release(keys, 1)
    two = release(keys, 2, epsilon=3, colluders=0)
    release(keys, 1, agent=1, count=5)
    outcome = corn("keys", "ledger", keys, "--json")
    assert outcome.exit_code == 0, outcome.stderr
    first, second = json.loads(outcome.stdout)["agents"]
    assert [plan["releases"] for plan in first["plans"]] == [20, 20]
    assert [plan["plan"] for plan in first["plans"]] == ["01" * 32, "02" * 32]
    assert first["plans"][1]["epsilon"] == pytest.approx(3, rel=1e-3)
    mu = math.hypot(set_aside(one).mu, set_aside(two).mu)
    assert first["total"]["epsilon"] == pytest.approx(gaussian.epsilon_from(mu, 1e-5), rel=0.01)
    assert first["total"]["epsilon"] > gaussian.epsilon_from(mu, 1e-5)
    assert (first["total"]["unit"], first["total"]["max_colluders"]) == ("agent", 0)
    assert first["total"] == first["agent_total"]
    assert second["total"]["epsilon"] < 2
    (shown,) = json.loads(corn("keys", "ledger", keys, "--agent", 1, "--json").stdout)["agents"]
    assert shown == second


def test_people_read_units_adversaries_and_what_is_not_promised(corn: Runner, keys: Path) -> None:
    release(keys, 1)
    release(keys, 2, count=7, unit="sample", batch_size=10, sampling="poisson", sampling_rate=0.1)
    outcome = corn("keys", "ledger", keys, "--agent", 0)
    assert outcome.exit_code == 0, outcome.stderr
    text = " ".join(outcome.stdout.replace("│", " ").split())
    assert "7 of 20" in text
    assert "one sample of one agent" in text
    assert "its mini-batch gradient is clipped once to 0.1" in text
    assert "an eavesdropper together with one insider" in outcome.stderr
    assert "promises nothing for an agent's whole data" in outcome.stderr
    assert "other folders are not counted" in outcome.stderr


def test_no_output_shows_what_a_ledger_hides(corn: Runner, keys: Path) -> None:
    release(keys, 1)
    (path,) = keys.glob("*.ledger")
    texts = set(re.findall(r"[0-9a-f]{64}", path.read_text()))
    hidden = texts - {"01" * 32, "00" * 32}
    assert len(hidden) == 2  # the nonce of the run, and the secret of the orders
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[5000] ^= 1
    for content in (whole, bytes(damaged), whole[:-1], b"x" + whole[1:]):
        path.write_bytes(content)
        for options in ((), ("--json",)):
            outcome = corn("keys", "ledger", keys, *options)
            assert not any(text in outcome.stdout + outcome.stderr for text in hidden)


def test_a_lost_ledger_is_an_error_after_what_is_known(corn: Runner, keys: Path) -> None:
    release(keys, 1)
    release(keys, 2)
    ledger_path(keys, 0, "02" * 32).unlink()
    outcome = corn("keys", "ledger", keys)
    assert outcome.exit_code == 1
    assert outcome.stdout.count("at least 1.99") == 2  # the total, and that of the whole data
    assert "the largest total" not in outcome.stderr
    assert "still count" in outcome.stderr.splitlines()[-1]
    facts = json.loads(corn("keys", "ledger", keys, "--json").stdout)["agents"][0]
    assert facts["is_lower_bound"]
    assert len(facts["problems"]) == 1


def test_wrong_arguments_are_explained(corn: Runner, keys: Path, tmp_path: Path) -> None:
    for arguments, message in (
        ([tmp_path / "none"], "is not a folder of keys and ledgers"),
        ([tmp_path], "has no agent's key or ledger"),
        ([keys, "--agent", 5], "--agent must be a number of an agent, 0 … 1, found '5'"),
        ([keys, "--delta", 0], "delta must be in (0, 1), found 0.0"),
    ):
        outcome = corn("keys", "ledger", *arguments)
        assert (outcome.exit_code, outcome.stderr.count("\n")) == (1, 1)
        assert message in outcome.stderr


@pytest.mark.slow
def test_a_launch_states_the_total_and_keeps_to_the_limit(corn: Runner, tmp_path: Path) -> None:
    for name, steps in (("first", 5), ("second", 6)):
        save_plan(small_plan("complete:2", steps), tmp_path / f"{name}.corn")
    keys = tmp_path / "keys"

    def launch(name: str, *limit: object) -> Any:
        plan, out = tmp_path / f"{name}.corn", tmp_path / name
        task = ("--task", "breast-cancer", "--out", out, "--keys", keys)
        return corn("launch", plan, *task, *limit)

    first = launch("first", "--require", "unit=agent", "--require", "total-epsilon=12")
    assert first.exit_code == 0, first.stderr
    assert (
        "before this run: ε = 0; this run by itself, if it makes all steps: at most ε = 9.99"
        in first.stderr
    )
    second = launch("second", "--require", "unit=agent", "--require", "total-epsilon=12")
    assert second.exit_code == 1
    assert "the total would exceed the limit of ε = 12 on all releases" in second.stderr
    known = json.loads(corn("keys", "ledger", keys, "--json").stdout)["agents"]
    assert [[plan["releases"] for plan in own["plans"]] for own in known] in (
        [[5, 0], [5, 0]],
        [[0, 5], [0, 5]],
    )
    again = launch("second", "--require", "unit=agent", "--require", "total-epsilon=16")
    assert again.exit_code == 0, again.stderr
    # Results that are published say nothing of what else the data was used for.
    run = json.loads((tmp_path / "second/shared/run.json").read_text(encoding="utf-8"))
    assert not {"require", "other_keys"} & set(run["configuration"])
    assert "15." not in json.dumps(run["notes"] + [run["promise"], run["agents"]])
