"""All ledgers of an agent are added up, and those that are lost or damaged are named."""

from pathlib import Path

import pytest

from corn.errors import FileFormatError
from corn.noise import (
    ReleaseLedger,
    generate_identity,
    list_used_plans,
    load_identity,
    read_history,
    record_use,
    save_identity,
)
from corn.noise.ledger import find_agents, is_open, ledger_path
from corn.privacy import PrivacyBudget
from corn.privacy.composition import Expense, PlanTerms, compose_expenses

DELTA, AGENT = 1e-5, 3
PLANS = [bytes([number]) * 32 for number in range(3)]


def make_terms(num_steps: int = 50, colluders: int = 1) -> PlanTerms:
    return PlanTerms(PrivacyBudget(1, DELTA, num_steps=num_steps, clip=0.1), colluders)


def open_ledger(folder: Path, plan: bytes = PLANS[0], agent: int = AGENT) -> ReleaseLedger:
    return ReleaseLedger.open(
        ledger_path(folder, agent, plan.hex()),
        plan_fingerprint=plan,
        agent=agent,
        terms=make_terms(),
        precision=0.01,
    )


def release(folder: Path, plan: bytes, count: int, agent: int = AGENT) -> None:
    key = folder / f"agent-{agent}.key"
    if not key.exists():
        save_identity(generate_identity(), key)
    with open_ledger(folder, plan, agent) as ledger:
        record_use(key, plan)
        for step in range(count):
            ledger.reserve(step)


def test_releases_under_all_plans_and_keys_add_up(tmp_path: Path) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    release(folders[0], PLANS[0], 10)
    release(folders[0], PLANS[1], 20)
    release(folders[1], PLANS[0], 30)  # under other keys: noise of its own
    release(folders[1], PLANS[0], 50, agent=4)
    history = read_history(folders, AGENT)
    assert [expense.num_releases for expense in history.expenses] == [10, 20, 30]
    total = history.compose(DELTA)
    expected = [Expense(make_terms(), 0.01, count) for count in (10, 20, 30)]
    assert total == history.compose(DELTA, unit="agent") == compose_expenses(expected, DELTA)
    assert not history.problems
    assert [find_agents(folder) for folder in folders] == [[3], [3, 4]]
    assert "an eavesdropper together with one insider" in total.describe()
    without = read_history(folders, AGENT, without=history.records[0].path)
    assert without.records == history.records[1:]


def test_a_lost_or_damaged_ledger_makes_the_total_a_lower_bound(tmp_path: Path) -> None:
    release(tmp_path, PLANS[0], 10)
    release(tmp_path, PLANS[1], 20)
    paths = [ledger_path(tmp_path, AGENT, plan.hex()) for plan in PLANS[:2]]
    whole = paths[1].read_bytes()
    for damage in (whole[:-1][1:], b"", bytes(len(whole)), None):
        if damage is None:
            paths[1].unlink()
        else:
            paths[1].write_bytes(damage)
        history = read_history([tmp_path], AGENT)
        expected = compose_expenses([Expense(make_terms(), 0.01, 10)], 1e-5)
        assert history.compose(DELTA).epsilon == expected.epsilon
        (problem,) = history.problems
        assert "still count" in problem
        assert "the total is then unknown" in problem


def test_a_running_ledger_is_marked(tmp_path: Path) -> None:
    release(tmp_path, PLANS[0], 10)
    path = ledger_path(tmp_path, AGENT, PLANS[0].hex())
    assert not is_open(path)
    with open_ledger(tmp_path):
        assert is_open(path)
        assert read_history([tmp_path], AGENT).records[0].is_running
    assert not is_open(path)


def test_a_run_that_ends_while_its_ledger_is_read_counts_as_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its releases after the reading must not be left out."""
    release(tmp_path, PLANS[0], 10)
    ledger = open_ledger(tmp_path)

    def read_and_end(path: Path) -> bytes:
        content = read(path)
        ledger.reserve(0)
        ledger.close()
        return content

    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", read_and_end)
    assert read_history([tmp_path], AGENT).records[0].is_running


def test_a_key_with_too_many_plans_is_refused(tmp_path: Path) -> None:
    """Plans beyond the limit would be forgotten, and their lost ledgers unnoticed."""
    key = tmp_path / "agent-3.key"
    save_identity(generate_identity(), key)
    with key.open("ab") as file:
        file.write(
            b"plan "
            + b"0" * 64
            + b"\n"
            + b"".join(b"plan %064x\n" % number for number in range(1, 15_000))
        )
    with pytest.raises(FileFormatError, match="too many plans"):
        list_used_plans(key)


def test_a_key_remembers_the_plans_it_was_used_with(tmp_path: Path) -> None:
    key, identity = tmp_path / "agent-3.key", generate_identity()
    save_identity(identity, key)
    assert list_used_plans(key) == ()
    for plan in (*PLANS, *PLANS):
        record_use(key, plan)
    assert list_used_plans(key) == tuple(plan.hex() for plan in PLANS)
    assert load_identity(key).public_key == identity.public_key
    key.write_bytes(key.read_bytes().replace(b"plan ", b"plan\x00", 1))
    with pytest.raises(FileFormatError, match="not an identity of CorN, or a damaged one"):
        load_identity(key)
    key.unlink()
    with pytest.raises(FileFormatError, match="cannot be read"):
        record_use(key, PLANS[0])


def test_a_missing_folder_is_a_problem_and_a_repeated_one_counts_once(tmp_path: Path) -> None:
    """A mistyped folder must not pass for one without releases."""
    release(tmp_path, PLANS[0], 10)
    again = tmp_path / ".." / tmp_path.name
    history = read_history([tmp_path, again, tmp_path / "mistyped"], AGENT)
    assert len(history.records) == 1
    assert history.problems == (f"{tmp_path / 'mistyped'}: is not a folder of keys and ledgers",)
