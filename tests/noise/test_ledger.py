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
from corn.noise import ledger as ledger_module
from corn.noise.ledger import FILE_BYTES, LAST_STEP, PAGE_BYTES, STEPS_PER_BLOCK
from corn.privacy import PrivacyBudget
from corn.privacy.composition import PlanTerms

PLAN = bytes(32)
ENTRY = re.compile(rb'"number": (\d+), "released": (\d+), ')


@pytest.fixture(autouse=True, scope="module")
def private_copies() -> Iterator[None]:
    """Let copies of ledgers be private, as ledgers are."""
    before = os.umask(0o077)
    yield
    os.umask(before)


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
    return max(tuple(map(int, numbers)) for numbers in ENTRY.findall(data))[1]


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


@pytest.mark.parametrize("failing", ["pwrite", "fsync", "limit", "second fsync"])
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
        elif failing == "second fsync":
            calls = iter([os.fsync, _fail])
            patch.setattr(os, "fsync", lambda descriptor: next(calls)(descriptor))
        else:
            patch.setattr(os, "pwrite", _write_half(os.pwrite))
        with pytest.raises(CornError, match=r"ledger: cannot be written: (No space|File too)"):
            ledger.reserve(64)
    # The disk has space again, but its content is not known.
    with pytest.raises(CornError, match="a write failed"):
        ledger.reserve(64)
    ledger.close()
    with open_ledger(path) as ledger:
        assert 200 - 64 - STEPS_PER_BLOCK <= ledger.remaining <= 200 - 64


def _fail(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def _write_half(pwrite: Any) -> Any:
    def write(descriptor: int, data: bytes, at: int) -> int:
        if len(data) < PAGE_BYTES:
            _fail()
        return int(pwrite(descriptor, data[: len(data) // 50], at))

    return write


def test_a_second_process_cannot_open_the_ledger(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    code = (
        "import sys, pathlib; from corn.noise.ledger import ReleaseLedger\n"
        "from corn.privacy.composition import PlanTerms\n"
        "from corn.privacy import PrivacyBudget\n"
        "terms = PlanTerms(PrivacyBudget(1, 1e-5, num_steps=200, clip=0.1), 1)\n"
        "ReleaseLedger.open(pathlib.Path(sys.argv[1]), plan_fingerprint=bytes(32), agent=3,"
        " terms=terms, precision=0.01)"
    )
    with open_ledger(path) as ledger:
        with pytest.raises(CornError, match="another run has this ledger open"):
            open_ledger(path)
        other = subprocess.run(
            [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False
        )
        assert "another run has this ledger open" in other.stderr
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


@pytest.mark.parametrize("change", [{"plan_fingerprint": b"\x01" * 32}, {"agent": 4}])
def test_another_plans_or_agents_ledger_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    open_ledger(tmp_path / "ledger").close()
    with pytest.raises(FileFormatError, match=f"agent 3 under plan {'00' * 32}, not of agent"):
        open_ledger(tmp_path / "ledger", **change)


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
    page, at = data.draw(st.integers(0, 1)), data.draw(st.integers(0, 999) | st.integers(0, 4095))
    changed = bytearray(used_ledger)
    changed[page * PAGE_BYTES + at] ^= data.draw(st.integers(1, 255))
    path = tmp_path_factory.mktemp("changed") / "ledger"
    path.write_bytes(changed)
    # The other page has the same entry: nothing is lost.
    for _ in range(2):
        with open_ledger(path) as ledger:
            assert ledger.remaining == 100


@pytest.mark.parametrize("size", [0, 1, 150, 4095, 4096, 5000, FILE_BYTES - 1])
def test_a_cut_ledger_is_refused(used_ledger: bytes, tmp_path: Path, size: int) -> None:
    path = tmp_path / "ledger"
    path.write_bytes(used_ledger[:size])
    with pytest.raises(FileFormatError, match=r"damaged.*still count"):
        open_ledger(path)
    assert path.read_bytes() == used_ledger[:size]


def test_a_longer_or_doubly_damaged_ledger_is_refused(used_ledger: bytes, tmp_path: Path) -> None:
    both = bytearray(used_ledger)
    both[300] ^= 1
    both[PAGE_BYTES + 300] ^= 1
    for content in (used_ledger + b"\n", bytes(both), bytes(FILE_BYTES), os.urandom(9999)):
        path = tmp_path / "ledger"
        path.write_bytes(content)
        with pytest.raises(FileFormatError, match="damaged"):
            open_ledger(path)
        with pytest.raises(FileFormatError, match="the total is then unknown"):
            read_ledger(path)


def test_pages_of_two_versions_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    with open_ledger(path) as ledger:
        early = path.read_bytes()
        reserve(ledger, 0, 200)
        late = path.read_bytes()
    path.write_bytes(late[:PAGE_BYTES] + early[PAGE_BYTES:])
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
                break
        ending = dice.choice(["close", "crash", "torn"])
        if ending == "close":
            ledger.close()
        content = bytearray(path.read_bytes())
        ledger.close()
        if ending == "torn":
            page, length = dice.randrange(2), dice.randrange(1, 500)
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
            page = dice.randrange(2) * PAGE_BYTES
            content[page : page + 50] = os.urandom(50)
        path = tmp_path / f"crash {life}"
        path.write_bytes(content)
    assert released


@pytest.mark.parametrize("page", [0, 1])
def test_a_page_that_is_put_back_does_not_bring_back_releases(tmp_path: Path, page: int) -> None:
    """The attack: a page of the file gets its content of an earlier moment."""
    path, changed = tmp_path / "ledger", tmp_path / "changed"
    earlier: list[bytes] = []
    with open_ledger(path, limit=1000) as ledger:
        for step in range(100):
            ledger.reserve(step)
            content = path.read_bytes()
            earlier.append(content[page * PAGE_BYTES :][:PAGE_BYTES])
            for old in dict.fromkeys(earlier):
                mixed = bytearray(content)
                mixed[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] = old
                changed.write_bytes(mixed)
                with contextlib.suppress(FileFormatError), open_ledger(changed, 1000) as restored:
                    assert restored.remaining <= ledger.remaining
                    assert restored.first_free_step > step


class CrashError(Exception):
    """The end of a process, or a power failure."""


def crash_at(monkeypatch: pytest.MonkeyPatch, write: int, num_bytes: int) -> None:
    """Let a durable write, counted from 0, end in a crash that leaves so many bytes of it."""
    durably, count = ledger_module.write_durably, iter(range(10**9))

    def write_or_crash(descriptor: int, data: bytes, *, at: int) -> None:
        if next(count) == write:
            durably(descriptor, data[:num_bytes], at=at)
            raise CrashError
        durably(descriptor, data, at=at)

    monkeypatch.setattr(ledger_module, "write_durably", write_or_crash)


def release_until_crash(path: Path, write: int, torn: int) -> int:
    """Release up to five steps, crash at a write, and return how many were released."""
    released, ledger = 0, None
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(CrashError):
        crash_at(patch, write, torn)
        ledger = open_ledger(path, limit=100)
        for step in range(5):
            ledger.reserve(step)
            released += 1
    content = path.read_bytes()
    if ledger is not None:
        ledger.close()  # gives back the lock, as the end of a process does
    path.write_bytes(content)
    return released


@pytest.mark.parametrize("torn", [0, 1, 60, 400, PAGE_BYTES])
def test_a_crash_during_any_write_keeps_every_release_that_was_made(
    tmp_path: Path, torn: int
) -> None:
    """Kill or power loss before, within and between the writes of the two pages, twice in a row."""
    path, start = tmp_path / "ledger", tmp_path / "start"
    with open_ledger(start, limit=100) as ledger:
        reserve(ledger, 0, 4)
    # The writes of a life: two for the run, then two for each block of two steps.
    for first in range(8):
        for second in range(-1, 4):
            path.write_bytes(start.read_bytes())
            released = 4
            for write in (first, second):
                released += release_until_crash(path, write, torn)
                # Of a block of two steps, one or both may not have been made.
                assert 100 - released - 4 <= count_remaining(path) <= 100 - released
            with open_ledger(path, limit=100) as ledger:
                assert 100 - released - 4 <= ledger.remaining <= 100 - released


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
            ledger.reserve(0)
            crashed.write_bytes(path.read_bytes())
        with open_ledger(crashed, limit) as restarted:
            assert restarted.remaining == left
        path.unlink()


def test_a_ledger_states_the_terms_and_the_worst_noise_of_all_runs(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    for precision, worst in ((0.01, 0.01), (0.03, 0.03), (0.02, 0.03)):
        with open_ledger(path, precision=precision) as ledger:
            reserve(ledger, 0, 5)
            assert ledger.precision == worst
    found = read_ledger(path)
    assert found.plan == PLAN.hex()
    assert found.expense.terms == make_terms()
    assert (found.expense.precision, found.expense.num_releases) == (0.03, 15)


def test_other_terms_under_the_same_plan_are_refused(tmp_path: Path) -> None:
    open_ledger(tmp_path / "ledger").close()
    for terms in (make_terms(adjacency="add-remove"), make_terms(201)):
        with pytest.raises(FileFormatError, match="with its terms"):
            open_ledger(tmp_path / "ledger", terms=terms)


def test_a_ledger_of_another_version_is_not_called_a_new_start(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    path.write_bytes(
        b"CorN release ledger 5. Never copy or edit it.\n".ljust(3 * PAGE_BYTES, b"\n")
    )
    for read in (open_ledger, read_ledger):
        with pytest.raises(FileFormatError, match=r"another version.*still count.*unknown"):
            read(path)


@pytest.mark.parametrize("step", [True, LAST_STEP + 1, 2**70])
def test_steps_that_no_plan_has_are_refused_before_anything_is_written(
    tmp_path: Path, step: int
) -> None:
    with open_ledger(tmp_path / "ledger") as ledger:
        before = (tmp_path / "ledger").read_bytes()
        for call in (ledger.reserve, ledger.join_run):
            with pytest.raises(InvalidArgumentError, match="step must be"):
                call(step)
        assert (tmp_path / "ledger").read_bytes() == before
        assert ledger.reserve(LAST_STEP) == 0
    with open_ledger(tmp_path / "ledger") as ledger:
        assert ledger.remaining == 199


def test_a_ledger_that_others_may_use_is_refused(tmp_path: Path) -> None:
    """It contains the secret of the orders, as a key contains that of the noise."""
    path = tmp_path / "ledger"
    open_ledger(path).close()
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    with pytest.raises(FileFormatError, match="chmod 600"):
        open_ledger(path)


def test_a_run_goes_on_in_another_process_without_a_step_of_before(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    with open_ledger(path, 1000) as ledger:
        nonce = ledger.nonce
    released = 0
    for step in (1, 2, 7):
        with open_ledger(path, 1000, continues=True) as ledger:
            assert ledger.nonce == nonce
            assert ledger.next_step <= step
            ledger.reserve(step)
            released += 1
            for earlier in range(step + 1):
                with pytest.raises(InvalidArgumentError, match="its noise may have been released"):
                    ledger.reserve(earlier)
            # A crash now costs nothing, as one step was reserved.
            content = path.read_bytes()
        path.write_bytes(content)
    with open_ledger(path, 1000, continues=True, precision=0.5) as ledger:
        assert ledger.remaining == 1000 - released
        ledger.reserve(8)
        # What the own loop and get_epsilon state: all runs, and the least noise of any.
        assert (ledger.expense.precision, ledger.expense.num_releases) == (0.5, released + 1)
        assert ledger.expense == read_ledger(path).expense
    with open_ledger(path, 1000) as ledger:
        assert ledger.nonce != nonce
        assert (ledger.remaining, ledger.precision) == (996, 0.5)


def test_nobody_knows_a_nonce_to_go_on_with_in_a_new_ledger(tmp_path: Path) -> None:
    nonces = {open_ledger(tmp_path / name, continues=True).nonce for name in "abc"}
    assert len(nonces) == 3
    assert bytes(32) not in nonces


PASS, BATCH = 4, 2


def open_passes(path: Path, limit: int = 20) -> ReleaseLedger:
    budget = PrivacyBudget(
        1,
        1e-5,
        num_steps=limit,
        clip=0.1,
        unit="sample",
        batch_size=BATCH,
        sampling="passes",
        samples_per_agent=PASS * BATCH,
    )
    return open_ledger(path, terms=PlanTerms(budget, 1))


def take(path: Path, data: bytes | None, count: int) -> tuple[list[int], ReleaseLedger]:
    """Return the numbers of a run's releases, and the ledger, still open."""
    ledger = open_passes(path)
    ledger.make_choices(data)
    return [ledger.reserve(step) for step in range(count)], ledger


def test_a_run_with_other_data_begins_a_new_pass(tmp_path: Path) -> None:
    path, found = tmp_path / "ledger", []
    for data, count in ((b"a", 3), (b"a", 2), (b"b", 1), (b"b", 3), (b"a", 2), (None, 1)):
        numbers, ledger = take(path, data, count)
        assert ledger.remaining == 19 - numbers[-1]
        assert ledger.expense.num_releases == numbers[-1] + 1
        ledger.close()
        found.append((numbers, ledger.num_skipped))
    assert found == [
        ([0, 1, 2], 0),
        ([3, 4], 0),
        ([8], 3),
        ([9, 10, 11], 0),
        ([12, 13], 0),
        ([16], 2),
    ]
    # Unknown data is never the data of before, and the plan has no sixth pass.
    for data in (None, b"a"):
        with (
            open_passes(path) as ledger,
            pytest.raises(BudgetSpentError, match="3 of 20 releases remain, all in a pass"),
        ):
            ledger.make_choices(data)


def test_a_run_that_is_refused_before_it_releases_skips_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    take(path, b"a", 3)[1].close()
    for data in (b"b", None):
        with open_passes(path) as ledger:
            ledger.make_choices(data)
            assert (ledger.num_skipped, ledger.remaining) == (1, 16)
    assert take(path, b"a", 1)[0] == [3]


def test_choices_come_before_the_first_release(tmp_path: Path) -> None:
    _, ledger = take(tmp_path / "ledger", b"a", 1)
    with ledger, pytest.raises(InvalidArgumentError, match="before the first release"):
        ledger.make_choices(b"b")
    # A release without them could be of any data.
    with (
        open_passes(tmp_path / "ledger") as ledger,
        pytest.raises(InvalidArgumentError, match="make_choices must be called"),
    ):
        ledger.reserve(0)


def test_other_samplings_skip_nothing(tmp_path: Path) -> None:
    for data in (b"a", b"b", None):
        with open_ledger(tmp_path / "ledger") as ledger:
            ledger.make_choices(data)
            reserve(ledger, 0, 3)
            assert ledger.num_skipped == 0
    assert count_remaining(tmp_path / "ledger") == 191


def test_orders_are_those_of_the_ledger_and_coins_those_of_the_run(tmp_path: Path) -> None:
    made = []
    for name in ("one", "one", "two"):
        with open_passes(tmp_path / name) as ledger:
            made.append(ledger.make_choices(b"a"))
    orders = [tuple(each.draw_order(0, 0, size=30)) for each in made]
    assert orders[0] == orders[1] != orders[2]
    assert len({tuple(each.draw_coins(0, [30])) for each in made}) == 3


def test_no_text_shows_the_secret_of_a_ledger(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    _, ledger = take(path, b"a", 1)
    (secret,) = set(re.findall(rb'"secret": "([0-9a-f]{64})"', path.read_bytes()))
    (data,) = set(re.findall(rb'"data": "([0-9a-f]{64})"', path.read_bytes()))
    shown = f"{ledger!r} {ledger._entry!r} {ledger.make_choices.__doc__} {read_ledger(path)!r}"
    assert secret.decode() not in shown
    assert data.decode() not in shown
    ledger.close()


@pytest.mark.parametrize("seed", range(8))
def test_no_history_puts_a_sample_into_two_batches_of_a_pass(tmp_path: Path, seed: int) -> None:
    """Runs with data that grows, shrinks and is shuffled, which end, crash and tear pages."""
    dice, path, limit = random.Random(seed), tmp_path / "ledger", 60
    samples = list(range(8))
    uses: dict[int, list[int]] = {}
    for life in range(40):
        change = dice.choice(["none", "none", "grow", "shrink", "shuffle", "swap"])
        if change == "grow":
            samples = [*samples, max(samples) + 1]
        elif change == "shrink" and len(samples) > PASS * BATCH:
            samples = samples[1:]
        elif change == "shuffle":
            dice.shuffle(samples)
        elif change == "swap":
            samples[0], samples[1] = samples[1], samples[0]
        ledger = open_passes(path, limit)
        with contextlib.suppress(BudgetSpentError):
            data = None if dice.random() < 0.1 else str(samples).encode()
            choices = ledger.make_choices(data)
            for step in range(dice.randrange(6)):
                number, place = divmod(ledger.reserve(step), PASS)
                order = choices.draw_order(0, number, size=len(samples))
                batch = order[place * BATCH : (place + 1) * BATCH]
                used = uses.setdefault(number, [])
                used += [samples[row] for row in batch]
        if dice.random() < 0.5:
            ledger.close()
        content = bytearray(path.read_bytes())
        ledger.close()
        if dice.random() < 0.3:
            page = dice.randrange(2) * PAGE_BYTES
            content[page : page + 60] = os.urandom(60)
        path = tmp_path / f"crash {life}"
        path.write_bytes(content)
    assert len(uses) > 5
    assert max(uses) < limit / PASS
    for number, used in uses.items():
        assert len(used) == len(set(used)), number
