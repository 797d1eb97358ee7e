"""Crashes and damaged files never let noise be released twice, nor too often."""

import contextlib
import errno
import os
import random
import re
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corn.errors import CornError, FileFormatError, InvalidArgumentError
from corn.noise import BudgetSpentError, ReleaseLedger, agree_on_nonce, read_ledger
from corn.noise.ledger_file import FILE_BYTES, PAGE_BYTES, STEPS_PER_BLOCK, format_page
from corn.privacy import PrivacyBudget
from corn.privacy.composition import PlanTerms
from corn.privacy.floats import set_aside

PLAN = bytes(32)
ENTRY = re.compile(
    rb"entry (\d+) run \w{64} settled (\d+) released (\d+) reserved (\d+) to (\d+) precision "
)


def make_terms(limit: int = 200, **changes: Any) -> PlanTerms:
    return PlanTerms(PrivacyBudget(1, 1e-5, num_steps=limit, clip=0.1, **changes), 1)


def open_ledger(path: Path, limit: int = 200, **changes: Any) -> ReleaseLedger:
    plan = {"plan_fingerprint": PLAN, "agent": 3, "terms": make_terms(limit), "precision": 0.01}
    return ReleaseLedger.open(path, **(plan | changes))  # type: ignore[arg-type]


def count_remaining(path: Path) -> int:
    expense = read_ledger(path).expense
    return expense.terms.budget.num_steps - expense.num_releases


def reserve(ledger: ReleaseLedger, first: int, stop: int) -> set[tuple[bytes, int]]:
    """Reserve a range of steps and return the (nonce, step) pairs that may be released."""
    for step in range(first, stop):
        ledger.reserve(step)
    return {(ledger.nonce, step) for step in range(first, stop)}


def read_spent(data: bytes) -> int:
    """Return the count of a ledger's latest entry, read without the code that wrote it."""
    entries = [tuple(map(int, numbers)) for numbers in ENTRY.findall(data)]
    _, settled, released, first, stop = max(entries)
    return settled + released + stop - first


@contextlib.contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_clean_stop_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    nonces = set()
    for run in range(5):
        with open_ledger(path) as ledger:
            assert ledger.remaining == 200 - 7 * run
            nonces.add(ledger.nonce)
            reserve(ledger, 0, 7)
            assert ledger.remaining == 200 - 7 * (run + 1)
            assert "of 200 releases remain" in repr(ledger)
    assert len(nonces) == 5
    assert count_remaining(path) == 165


def test_a_crash_costs_at_most_a_block(tmp_path: Path) -> None:
    path, crashed = tmp_path / "ledger", tmp_path / "crashed"
    with open_ledger(path) as ledger:
        for step in range(130):
            ledger.reserve(step)
            # What a crash right now would leave, with the step's message on its way.
            crashed.write_bytes(path.read_bytes())
            with open_ledger(crashed) as restarted:
                assert restarted.nonce != ledger.nonce
                used = 200 - restarted.remaining
                assert step + 1 <= used < step + 1 + STEPS_PER_BLOCK


def test_a_ledger_allows_exactly_the_releases_of_the_plan(tmp_path: Path) -> None:
    with open_ledger(tmp_path / "ledger", limit=100) as ledger:
        reserve(ledger, 0, 100)
        assert ledger.remaining == 0
        with pytest.raises(BudgetSpentError, match="all 100 releases of the plan are spent"):
            ledger.reserve(100)
    with open_ledger(tmp_path / "ledger", limit=100) as ledger, pytest.raises(BudgetSpentError):
        ledger.reserve(0)


def test_steps_increase_and_may_skip(tmp_path: Path) -> None:
    with open_ledger(tmp_path / "ledger") as ledger:
        for step in (5, 6, 60, 69, 1000, 1001):
            ledger.reserve(step)
            for earlier in (step, 5, 0, -1):
                with pytest.raises(InvalidArgumentError, match=f"at least {step + 1}, found"):
                    ledger.reserve(earlier)
        assert ledger.remaining == 200 - 6
    with open_ledger(tmp_path / "ledger") as ledger:
        assert ledger.remaining == 200 - 6


def test_skipping_never_wastes_the_budget(tmp_path: Path) -> None:
    with open_ledger(tmp_path / "ledger", limit=10) as ledger:
        for step in range(0, 1000, 100):
            ledger.reserve(step)
        with pytest.raises(BudgetSpentError):
            ledger.reserve(1000)


def test_a_renewed_nonce_restarts_steps(tmp_path: Path) -> None:
    with open_ledger(tmp_path / "ledger") as ledger:
        released = reserve(ledger, 0, 10)
        first = ledger.nonce
        assert ledger.renew_nonce() == ledger.nonce != first
        more = reserve(ledger, 0, 10)
        assert not released & more
        assert ledger.remaining == 180


def test_one_durable_write_per_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with open_ledger(tmp_path / "ledger", limit=10_000) as ledger:
        # The new file, its folder, and the run.
        assert len(synced) == 3
        reserve(ledger, 0, 6400)
        assert len(synced) == 3 + 100


@pytest.mark.parametrize("failing", ["pwrite", "fsync", "limit"])
def test_a_full_disk_stops_releases_until_the_ledger_is_reopened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    path = tmp_path / "ledger"
    ledger = open_ledger(path)
    reserve(ledger, 0, 64)
    with monkeypatch.context() as patch, contextlib.ExitStack() as stack:
        if failing == "limit":
            stack.enter_context(file_size_limit(100))
        elif failing == "fsync":
            patch.setattr(os, "fsync", _fail)
        else:
            patch.setattr(os, "pwrite", _write_half(os.pwrite))
        with pytest.raises(CornError, match=r"ledger: cannot be written: (No space|File too)"):
            ledger.reserve(64)
    # The disk has space again, but its content is not known.
    with pytest.raises(CornError, match="a write failed"):
        ledger.reserve(64)
    with pytest.raises(CornError, match="a write failed"):
        ledger.renew_nonce()
    ledger.close()
    with open_ledger(path) as ledger:
        assert 200 - 64 - 2 * STEPS_PER_BLOCK <= ledger.remaining <= 200 - 64


def _fail(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def _write_half(pwrite: Any) -> Any:
    def write(descriptor: int, data: bytes, at: int) -> int:
        if len(data) < PAGE_BYTES:
            _fail()
        return int(pwrite(descriptor, data[: len(data) // 50], at))

    return write


def test_a_ledger_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="cannot be opened: No such file"):
        open_ledger(tmp_path / "missing" / "ledger")
    with file_size_limit(100), pytest.raises(FileFormatError, match="File too large"):
        open_ledger(tmp_path / "ledger")
    assert list(tmp_path.iterdir()) == []


def test_a_second_process_cannot_open_the_ledger(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    code = (
        "import sys, pathlib; from corn.noise.ledger import ReleaseLedger\n"
        "from corn.privacy.composition import PlanTerms\n"
        f"terms = PlanTerms.from_text({make_terms().to_text()!r})\n"
        "ReleaseLedger.open(pathlib.Path(sys.argv[1]), plan_fingerprint=bytes(32), agent=3,"
        " terms=terms, precision=0.01)"
    )
    with open_ledger(path) as ledger:
        with pytest.raises(CornError, match="another process has this ledger open"):
            open_ledger(path)
        other = subprocess.run(
            [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False
        )
        assert "another process has this ledger open" in other.stderr
        ledger.reserve(0)
    open_ledger(path).close()


def test_a_forked_copy_may_not_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_ledger(tmp_path / "ledger") as ledger:
        ledger.reserve(0)
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: -1)
            with pytest.raises(InvalidArgumentError, match="belongs to another process"):
                ledger.reserve(1)
        ledger.reserve(1)


def test_a_closed_ledger_releases_nothing(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path / "ledger")
    ledger.close()
    ledger.close()
    with pytest.raises(InvalidArgumentError, match="this ledger is closed"):
        ledger.reserve(0)


def test_threads_never_get_the_same_step(tmp_path: Path) -> None:
    granted: list[int] = []
    with open_ledger(tmp_path / "ledger", limit=1000) as ledger:

        def work() -> None:
            for step in range(300):
                with contextlib.suppress(InvalidArgumentError):
                    ledger.reserve(step)
                    granted.append(step)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(granted) == len(set(granted)) == 1000 - ledger.remaining


@pytest.mark.parametrize(
    "change", [{"plan_fingerprint": b"\x01" * 32}, {"agent": 4}, {"terms": make_terms(201)}]
)
def test_another_plans_or_agents_ledger_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    open_ledger(tmp_path / "ledger").close()
    with pytest.raises(FileFormatError, match=f"plan {'00' * 32} agent 3 limit 200, not of plan"):
        open_ledger(tmp_path / "ledger", **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plan_fingerprint": b"short"}, "plan_fingerprint must be 32 bytes, found 5 bytes"),
        ({"agent": -1}, "agent must be an integer of at least 0, found -1"),
    ],
)
def test_bad_arguments_leave_no_file(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        open_ledger(tmp_path / "ledger", **change)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def used_ledger(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return a ledger in the middle of a run: 100 releases, 128 reserved."""
    path = tmp_path_factory.mktemp("used") / "ledger"
    with open_ledger(path) as ledger:
        reserve(ledger, 0, 100)
        return path.read_bytes()


@settings(max_examples=150)
@given(data=st.data())
def test_a_changed_byte_is_counted_conservatively_or_refused(
    used_ledger: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    # Most of a page is padding: aim at its text as often.
    page, at = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 200) | st.integers(0, 4095))
    changed = bytearray(used_ledger)
    changed[page * PAGE_BYTES + at] ^= data.draw(st.integers(1, 255))
    path = tmp_path_factory.mktemp("changed") / "ledger"
    path.write_bytes(changed)
    if page == 0:
        with pytest.raises(FileFormatError, match="no more may be made under this plan"):
            open_ledger(path)
        return
    with open_ledger(path) as ledger:
        assert ledger.remaining <= 100
    with open_ledger(path) as ledger:
        assert ledger.remaining <= 100, "the damage is remembered once it has been repaired"


@pytest.mark.parametrize("size", [0, 1, 150, 4095, 4096, 5000, 8192, 8300, FILE_BYTES - 1])
def test_a_cut_ledger_is_refused(used_ledger: bytes, tmp_path: Path, size: int) -> None:
    path = tmp_path / "ledger"
    path.write_bytes(used_ledger[:size])
    with pytest.raises(FileFormatError, match=r"damaged.*still count"):
        open_ledger(path)
    assert path.read_bytes() == used_ledger[:size]


def test_a_longer_or_doubly_damaged_ledger_is_refused(used_ledger: bytes, tmp_path: Path) -> None:
    both = bytearray(used_ledger)
    both[PAGE_BYTES + 8] ^= 1
    both[2 * PAGE_BYTES + 8] ^= 1
    swapped = (
        used_ledger[:PAGE_BYTES]
        + used_ledger[2 * PAGE_BYTES :]
        + used_ledger[PAGE_BYTES : 2 * PAGE_BYTES]
    )
    for content in (used_ledger + b"\n", bytes(both), swapped, bytes(FILE_BYTES), os.urandom(9999)):
        path = tmp_path / "ledger"
        path.write_bytes(content)
        with pytest.raises(FileFormatError, match="damaged"):
            open_ledger(path)
        if content[:PAGE_BYTES] == used_ledger[:PAGE_BYTES]:
            found = read_ledger(path)
            assert (found.is_known, found.expense.num_releases) == (False, 200)
            assert found.expense.precision >= set_aside(make_terms().budget).precision_cap
        else:
            with pytest.raises(FileFormatError, match="the total is then unknown"):
                read_ledger(path)


def test_pages_of_two_versions_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    with open_ledger(path) as ledger:
        early = path.read_bytes()
        reserve(ledger, 0, 200)
        late = path.read_bytes()
    path.write_bytes(late[: 2 * PAGE_BYTES] + early[2 * PAGE_BYTES :])
    with pytest.raises(FileFormatError, match="damaged"):
        open_ledger(path)


@pytest.mark.parametrize("seed", range(8))
def test_crashes_tears_and_restarts_never_overspend(tmp_path: Path, seed: int) -> None:
    dice, path, limit = random.Random(seed), tmp_path / "ledger", 1500
    released: set[tuple[bytes, int]] = set()
    numbers_given = [-1]
    for life in range(40):
        ledger = open_ledger(path, limit)
        crash = tmp_path / f"crash {life}"
        for step in range(dice.randrange(150)):
            try:
                number = ledger.reserve(step)
            except BudgetSpentError:
                assert ledger.remaining == 0
                break
            # The batches of a release follow from its number, so none may come twice.
            assert numbers_given[-1] < number < limit
            numbers_given.append(number)
            assert (ledger.nonce, step) not in released
            released.add((ledger.nonce, step))
            if dice.random() < 0.01:
                ledger.renew_nonce()
                break
        ending = dice.choice(["close", "crash", "torn", "flipped"])
        if ending == "close":
            ledger.close()
        content = bytearray(path.read_bytes())
        ledger.close()
        numbers = [int(match[1]) for match in ENTRY.finditer(content)]
        # A torn write is that of the entry to come; a flipped bit may hit the newest as well.
        page = 1 + (1 + max(numbers)) % 2 if ending == "torn" else 1 + dice.randrange(2)
        if ending in ("torn", "flipped"):
            length = dice.randrange(1, 200)
            content[page * PAGE_BYTES : page * PAGE_BYTES + length] = os.urandom(length)
        crash.write_bytes(content)
        path = crash
        left = count_remaining(path)
        assert left <= limit - len(released)
    assert len(released) <= limit


@pytest.mark.parametrize("seed", range(8))
def test_no_step_is_released_twice_under_a_nonce_that_others_name(
    tmp_path: Path, seed: int
) -> None:
    """A sponsor may always name the same nonce and any step, whatever happens to the file."""
    dice, path, limit = random.Random(seed), tmp_path / "ledger", 1500
    released: set[int] = set()
    for life in range(25):
        ledger = open_ledger(path, limit)
        named = dice.choice([0, dice.randrange(limit), ledger.first_free_step])
        with contextlib.suppress(InvalidArgumentError, BudgetSpentError):
            ledger.join_run(named)
            for step in range(named, min(named + dice.randrange(1, 90), limit)):
                ledger.reserve(step)
                assert step not in released
                released.add(step)
        content = bytearray(path.read_bytes())
        ledger.close()
        if dice.random() < 0.1:
            page = (1 + dice.randrange(2)) * PAGE_BYTES
            content[page : page + 50] = os.urandom(50)
        path = tmp_path / f"crash {life}"
        path.write_bytes(content)
    assert released


def test_a_lost_entry_is_remembered_once_it_has_been_replaced(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    with open_ledger(path) as ledger:
        ledger.join_run(150)
        ledger.reserve(150)
        content = bytearray(path.read_bytes())
    newest = max(ENTRY.finditer(content), key=lambda match: int(match[1]))
    content[newest.start()] ^= 1
    path.write_bytes(content)
    for _ in range(3):
        with open_ledger(path) as ledger:
            assert ledger.first_free_step >= 151


@pytest.mark.slow
def test_killed_processes_never_reuse_noise_nor_overspend(tmp_path: Path) -> None:
    path, log, limit = tmp_path / "ledger", tmp_path / "log", 30_000
    script = Path(__file__).with_name("ledger_victim.py")
    arguments = [str(path), str(log), str(limit), "60", "1"]
    subprocess.run([sys.executable, str(script), *arguments], check=True, timeout=300)
    lines = log.read_text().splitlines()
    assert len(lines) == len(set(lines)), "a (nonce, step) was released twice"
    assert 1000 < len(lines) <= limit
    spent = read_spent(path.read_bytes())
    assert len(lines) <= spent <= limit
    with open_ledger(path, limit, agent=0) as ledger:
        assert ledger.remaining == limit - spent


def test_the_budget_holds_for_processes_killed_near_its_end(tmp_path: Path) -> None:
    path, log, limit = tmp_path / "ledger", tmp_path / "log", 1000
    script = Path(__file__).with_name("ledger_victim.py")
    arguments = [str(path), str(log), str(limit), "25", "2"]
    subprocess.run([sys.executable, str(script), *arguments], check=True, timeout=300)
    lines = log.read_text().splitlines()
    assert limit / 2 < len(lines) == len(set(lines)) <= limit
    assert len(lines) <= read_spent(path.read_bytes()) <= limit


def test_the_agreed_nonce_is_new_if_any_contribution_is() -> None:
    nonces = {agent: bytes([agent]) * 32 for agent in range(3)}
    agreed = agree_on_nonce(nonces, plan_fingerprint=PLAN)
    assert agreed == agree_on_nonce(dict(reversed(nonces.items())), plan_fingerprint=PLAN)
    others = [
        agree_on_nonce({**nonces, 1: b"\x09" * 32}, plan_fingerprint=PLAN),
        agree_on_nonce({0: nonces[1], 1: nonces[0], 2: nonces[2]}, plan_fingerprint=PLAN),
        agree_on_nonce({0: nonces[0], 1: nonces[1]}, plan_fingerprint=PLAN),
        agree_on_nonce(nonces, plan_fingerprint=b"\x01" * 32),
    ]
    assert len({agreed, *others}) == 5
    with pytest.raises(InvalidArgumentError, match="nonce must be 32 bytes"):
        agree_on_nonce({0: b"short"}, plan_fingerprint=PLAN)


def test_a_crash_leaves_most_of_a_short_plan(tmp_path: Path) -> None:
    path, crashed = tmp_path / "ledger", tmp_path / "crashed"
    for limit, left in ((60, 59), (1000, 980)):
        with open_ledger(path, limit) as ledger:
            assert ledger.reserved_before == 0
            ledger.reserve(0)
            crashed.write_bytes(path.read_bytes())
        with open_ledger(crashed, limit) as restarted:
            assert (restarted.remaining, restarted.reserved_before) == (left, limit - left)
        path.unlink()


def test_a_ledger_states_the_terms_and_the_worst_noise_of_all_runs(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    for precision, worst in ((0.01, 0.01), (0.03, 0.03), (0.02, 0.03)):
        with open_ledger(path, precision=precision) as ledger:
            reserve(ledger, 0, 5)
            assert ledger.precision == worst
    found = read_ledger(path)
    assert (found.plan, found.agent, found.is_known) == (PLAN.hex(), 3, True)
    assert found.expense.terms == make_terms()
    assert (found.expense.precision, found.expense.num_releases) == (0.03, 15)


def test_other_terms_under_the_same_plan_are_refused(tmp_path: Path) -> None:
    open_ledger(tmp_path / "ledger").close()
    with pytest.raises(FileFormatError, match="but under other terms"):
        open_ledger(tmp_path / "ledger", terms=make_terms(adjacency="add-remove"))


def test_a_ledger_of_another_version_is_not_called_a_new_start(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    text = f"CorN release ledger 1. Never copy or edit it.\nplan {PLAN.hex()} agent 3 limit 200\n"
    entry = f"entry 0 run {'0' * 64} settled 0 released 0 reserved 0 to 0\n"
    path.write_bytes(b"".join(format_page(page, header=text) for page in (text, entry, entry)))
    for read in (open_ledger, read_ledger):
        with pytest.raises(FileFormatError, match=r"another version.*still count.*unknown"):
            read(path)
