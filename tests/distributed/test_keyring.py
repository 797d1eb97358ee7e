"""Keys come from the agent's own files, and seeds of larger groups reach their members only."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from corn.covariance import ThreatModel
from corn.distributed import RunSettings, join
from corn.distributed.keyring import (
    load_credentials,
    make_keys,
    make_source,
    open_ledger,
    share_group_seeds,
)
from corn.distributed.rendezvous import Rendezvous
from corn.errors import CornError, FileFormatError, InvalidArgumentError
from corn.noise import (
    ReleaseLedger,
    draw_share,
    generate_identity,
    list_used_plans,
    load_identity,
    load_roster,
    read_history,
    save_identity,
)
from corn.plan import Plan, fingerprint, verify_plan

from .harness import small_plan
from .threads import run_in_threads

NONCE = b"n" * 32


def test_a_group_shares_a_seed_through_the_store(tmp_path: Path) -> None:
    plan = small_plan("complete:4", 10, threat=ThreatModel(0))
    groups = plan.decomposition.seed_groups
    assert [len(group) for group in groups] == [4]
    make_keys(tmp_path, 4)

    def run(rendezvous: Rendezvous) -> tuple[dict[int, bytes], np.ndarray]:
        seeds = share_group_seeds(rendezvous, plan, run_nonce=NONCE)
        source = make_source(rendezvous.credentials, plan, (0, 1, 2, 3), seeds)
        where = {"source": source, "nonce": NONCE, "step": 3, "stop": 2000}
        share = draw_share(plan.decomposition, rendezvous.agent, **where)  # type: ignore[arg-type]
        found = {number: seed.reveal() for number, seed in seeds.items()}
        for number, seed in found.items():
            if groups[number][0] != rendezvous.agent:
                (word,) = rendezvous.store.get([f"seeds/{groups[number][0]}"])
                assert word is not None
                assert seed not in word  # it is sealed
        return found, share

    results = run_in_threads(4, run)
    assert all(isinstance(result, tuple) for result in results), results
    for agent, (seeds, _) in enumerate(results):  # type: ignore[misc]
        assert set(seeds) == {k for k, group in enumerate(groups) if agent in group}
        for number, seed in seeds.items():
            assert seed == results[groups[number][0]][0][number]  # type: ignore[index]
    shares = np.stack([share for _, share in results])  # type: ignore[misc]
    correlation = np.corrcoef(shares)
    R = plan.decomposition.covariance
    expected = R / np.sqrt(np.outer(np.diag(R), np.diag(R)))
    np.testing.assert_allclose(correlation, expected, atol=0.1)


def test_survivors_keep_the_keys_of_their_numbers_in_the_roster(tmp_path: Path) -> None:
    """A new plan renumbers agents; shared noise cancels only if pairs find each other's keys."""
    make_keys(tmp_path, 4)
    members = (0, 2, 3)
    plan = small_plan("ring:3", 10)

    def draw(agent: int) -> np.ndarray:
        source = make_source(load_credentials(tmp_path, agent, 4), plan, members)
        own = members.index(agent)
        return draw_share(plan.decomposition, own, source=source, nonce=NONCE, step=1, stop=20_000)

    found = np.cov(np.stack([draw(agent) for agent in members]))
    R = plan.decomposition.covariance
    np.testing.assert_allclose(found, R, atol=0.05 * R.max())


def test_keys_are_made_once(tmp_path: Path) -> None:
    assert make_keys(tmp_path, 3)
    roster = load_roster(tmp_path / "roster.json")
    assert not make_keys(tmp_path, 3)
    assert load_roster(tmp_path / "roster.json") == roster
    assert load_credentials(tmp_path, 2, 3).identity.public_key == roster.public_key(2)


def test_no_keys_are_made_where_agents_have_keys(tmp_path: Path) -> None:
    save_identity(generate_identity(), tmp_path / "agent-2.key")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(FileFormatError, match=r"roster\.json: is missing: .* corn keys roster"):
        make_keys(tmp_path, 3)
    assert sorted(tmp_path.iterdir()) == before


def test_missing_and_wrong_keys_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"none: cannot"):
        load_credentials(tmp_path / "none", 2, 3)
    make_keys(tmp_path, 3)
    with pytest.raises(FileFormatError, match=r"roster\.json: of 3 agents, the plan has"):
        load_credentials(tmp_path, 2, 4)
    (tmp_path / "agent-1.key").unlink()
    with pytest.raises(FileFormatError, match=r"agent-1\.key: cannot be read"):
        load_credentials(tmp_path, 1, 3)
    (tmp_path / "agent-2.key").rename(tmp_path / "agent-1.key")
    with pytest.raises(InvalidArgumentError, match="this identity is not agent 1's"):
        load_credentials(tmp_path, 1, 3)


def open_for(folder: Path, plan: Plan, agent: int = 1) -> ReleaseLedger:
    return open_ledger(folder, agent, plan, precision=float(plan.precision_caps[0]))


def test_the_ledger_belongs_to_key_and_plan(tmp_path: Path) -> None:
    plan, other = small_plan("ring:4", 10), small_plan("ring:4", 11)
    make_keys(tmp_path, 4)
    with open_for(tmp_path, plan) as ledger:
        ledger.reserve(0)
        with pytest.raises(CornError, match=r"another run has this ledger"):
            open_for(tmp_path, plan)
    with open_for(tmp_path, plan) as ledger, open_for(tmp_path, other) as fresh:
        assert (ledger.remaining, fresh.remaining) == (9, 11)
    used = [fingerprint(own).hex() for own in (plan, other)]
    assert list_used_plans(tmp_path / "agent-1.key") == tuple(used)


def test_a_lost_ledger_is_not_replaced_by_an_empty_one(tmp_path: Path) -> None:
    plan = small_plan("ring:4", 10)
    make_keys(tmp_path / "keys", 4)
    with open_for(tmp_path / "keys", plan) as ledger:
        ledger.reserve(0)
    # A key that is copied to another host tells that its ledger was left behind.
    (tmp_path / "copy").mkdir()
    shutil.copy(tmp_path / "keys/agent-1.key", tmp_path / "copy")
    next((tmp_path / "keys").glob("*.ledger")).unlink()
    for folder in (tmp_path / "keys", tmp_path / "copy"):
        with pytest.raises(
            FileFormatError, match=r"is missing.*still count.*total is then unknown"
        ):
            open_for(folder, plan)
        assert not list(folder.glob("*.ledger"))
        history = read_history([folder], 1)
        assert (history.records, len(history.problems)) == ((), 1)


def test_a_crash_before_the_key_records_its_use_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = small_plan("ring:4", 10)
    make_keys(tmp_path, 4)
    key = tmp_path / "agent-1.key"
    unused = key.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("corn.distributed.keyring.record_use", _crash)
        with pytest.raises(OSError, match="crash"):
            open_for(tmp_path, plan)
    # Nothing of the line, a part of it, or all of it is on the disk.
    line = f"plan {fingerprint(plan).hex()}\n".encode()
    for written in (b"", line[:3], line[:40], line[:-1], line):
        key.write_bytes(unused + written)
        load_identity(key)
        with open_for(tmp_path, plan) as ledger:
            assert ledger.remaining == 10
        assert key.read_bytes() == unused + line


def test_every_later_total_counts_the_least_noise_that_a_run_may_have_had(tmp_path: Path) -> None:
    """A run that may make new plans for survivors releases with any noise up to the cap."""
    plan = small_plan("star:4", 12, mechanism="decor", threat=ThreatModel())
    make_keys(tmp_path, 4)
    agent = int(np.argmin([own.precision for own in verify_plan(plan).guarantees]))
    planned = verify_plan(plan).guarantees[agent].precision
    cap = float(plan.precision_caps[agent])
    assert planned < 0.9 * cap
    counted = []
    for policy in ("stop", "replan", "stop"):
        precision = RunSettings(on_dropout=policy).precision_of(plan, agent, planned)
        with open_ledger(tmp_path, agent, plan, precision=precision) as ledger:
            ledger.reserve(0)
            counted.append(ledger.expense)
        assert read_history([tmp_path], agent).expenses == (counted[-1],)
    assert [own.precision for own in counted] == [planned, cap, cap]
    assert [own.num_releases for own in counted] == [1, 2, 3]


def _crash(*_: object) -> None:
    raise OSError("crash")


def test_an_agent_is_found_by_its_name_in_the_roster(tmp_path: Path) -> None:
    make_keys(tmp_path, 3, ("Oslo", "Rome", "Kyiv"))
    assert load_credentials(str(tmp_path), "Rome", 3).agent == 1
    assert load_credentials(tmp_path, "2", 3).agent == 2
    with pytest.raises(InvalidArgumentError, match="names are Oslo, Rome, Kyiv"):
        load_credentials(tmp_path, "Rom", 3)


def test_a_folder_of_another_key_has_no_ledger_for_this_one(tmp_path: Path) -> None:
    """A plan could be released again under the ledger that the first run had missed."""
    for folder in ("hospital", "other"):
        make_keys(tmp_path / folder, 2)
    own = load_credentials(tmp_path / "hospital", 1, 2)
    with pytest.raises(InvalidArgumentError, match="the folder of the key in use"):
        join(own, store=("127.0.0.1", 9), keys=tmp_path / "other")
