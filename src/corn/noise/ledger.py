"""The release ledger: no noise is released twice, and no plan is released more than it allows.

Two messages with the same noise and other data differ by a noise-free gradient, and the privacy of
a plan holds for T releases and no more. So before the message of a step leaves, the step is
reserved in a file that survives a crash. A restart takes a new nonce, under which all noise is new,
and counts every reserved step as released. (A ledger restored from a backup has no record of later
releases: the nonce still keeps noise from being used twice, but the count is then wrong. Never copy
a ledger.)

The file has three pages of fixed size. The first page names the plan and the agent and never
changes. Entry number k, the whole state of the ledger, is written to the second or the third page
in turn, so that the entry before it is still there if that write is torn by a crash. Hence

- one entry unreadable: the other is taken, plus a full block of releases, which is the most that
  the lost one can have added;
- both unreadable, the first page unreadable, or another size (a crash never changes it): refused.

Every page is text with a checksum. Checksums detect accidents, not forgery: a person who may write
the file can also write a valid one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

from corn.checks import require_count
from corn.errors import CornError, FileFormatError, InvalidArgumentError, make_printable
from corn.noise.address import NONCE_BYTES, check_fingerprint, check_nonce, encode_fields

# The most steps that one durable write reserves, and so the most releases that a crash can cost.
STEPS_PER_BLOCK = 64
# A disk writes pages of this size: a torn write of one entry cannot damage the other.
PAGE_BYTES = 4096
FILE_BYTES = 3 * PAGE_BYTES

_BLOCKS_PER_PLAN = 50
_MAX_QUOTED = 120

_PATTERN = re.compile(
    rb"entry (\d+) run ([0-9a-f]{64}) settled (\d+) released (\d+) reserved (\d+) to (\d+)\n"
)


class BudgetSpentError(CornError):
    """Every release that the plan allows was made, or may have been: stop, and keep the model."""


@dataclass(frozen=True)
class LedgerEntry:
    """The state of a ledger.

    Attributes:
        number: the number of this entry, from 0.
        nonce: the nonce of the latest run, in hexadecimal.
        settled: the releases of all runs before it.
        released: the releases of this run before its reserved block.
        first_step: the first step of the reserved block.
        stop_step: the step after its last one.
    """

    number: int
    nonce: str
    settled: int = 0
    released: int = 0
    first_step: int = 0
    stop_step: int = 0

    @property
    def spent(self) -> int:
        """The releases that may have been made: all before the block, and all that it reserves."""
        return self.settled + self.released + self.stop_step - self.first_step

    def format(self) -> str:
        """Return the entry as a line of text."""
        return (
            f"entry {self.number} run {self.nonce} settled {self.settled} "
            f"released {self.released} reserved {self.first_step} to {self.stop_step}\n"
        )


@final
class ReleaseLedger:
    """A count of one agent's releases under one plan; open it with :meth:`open`, in one process.

    ``reserved_before`` is the number of releases that the previous run had reserved when it
    crashed. All of them count, though it may not have made them.

    >>> from tempfile import TemporaryDirectory
    >>> plan = {"plan_fingerprint": bytes(32), "agent": 0, "max_releases": 100}
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder) / "agent-0.ledger"
    ...     with ReleaseLedger.open(path, **plan) as ledger:
    ...         ledger.reserve(0)  # now, and only now, may the message of step 0 leave
    ...     ReleaseLedger.open(path, **plan).remaining
    99
    """

    def __init__(
        self, path: Path, descriptor: int, *, header: str, entry: LedgerEntry, max_releases: int
    ) -> None:
        self._path, self._descriptor, self._header = path, descriptor, header
        self._entry, self._max_releases = entry, max_releases
        self._released = self._next_step = 0
        self._process, self._lock = os.getpid(), threading.Lock()
        self._failure = ""
        self.reserved_before = 0

    @classmethod
    def open(
        cls, path: Path, *, plan_fingerprint: bytes, agent: int, max_releases: int
    ) -> ReleaseLedger:
        """Open a ledger, or create it, and begin a run under a nonce never used before.

        Raises:
            FileFormatError: the file is damaged, or is another plan's or agent's.
            CornError: another process has it open, or it cannot be written.
        """
        header = _make_header(plan_fingerprint, agent, max_releases)
        with _explain_failure(path, "cannot be opened"):
            if not path.exists():
                _create(path, header)
            descriptor = os.open(path, os.O_RDWR)
        try:
            # Locked before it is read: two processes that both read the same count would both
            # release what remains.
            _lock(descriptor, path)
            entry, lost = _read_entry(
                os.pread(descriptor, FILE_BYTES + 1, 0), header=header, name=str(path)
            )
            ledger = cls(path, descriptor, header=header, entry=entry, max_releases=max_releases)
            ledger.reserved_before = entry.stop_step - entry.first_step + lost
            ledger._start_run(settled=min(entry.spent + lost, max_releases))
        except BaseException:
            os.close(descriptor)
            raise
        return ledger

    @property
    def nonce(self) -> bytes:
        """This run's nonce, 32 bytes: this agent's contribution to :func:`agree_on_nonce`."""
        return bytes.fromhex(self._entry.nonce)

    @property
    def remaining(self) -> int:
        """The number of releases that the plan still allows."""
        return self._max_releases - self._entry.settled - self._released

    def __repr__(self) -> str:
        return f"ReleaseLedger({self.remaining} of {self._max_releases} releases remain)"

    def reserve(self, step: int) -> int:
        """Reserve a step's release durably; the message may leave once this has returned.

        Return the number of the release, from 0. No two releases under the plan have the same, in
        whichever runs they are: after a crash, numbers that were reserved are skipped.

        Steps of a run increase, and may skip. One in 64 calls waits for the disk (more of them
        under plans of fewer than 3200 releases; see ``steps_per_block``). The release counts even
        if the message is not sent after all.

        Raises:
            BudgetSpentError: nothing remains.
            CornError: the reservation could not be written; nothing may be released.
        """
        with self._lock:
            self._check_usable()
            if step < self._next_step:
                raise InvalidArgumentError(
                    f"step must be at least {self._next_step}, found {step}: its noise may have "
                    "been released; to go back, take a new nonce with renew_nonce()"
                )
            if self.remaining == 0:
                raise BudgetSpentError(
                    f"{self._path}: all {self._max_releases} releases of the plan are spent"
                )
            # On the disk before the message leaves: after a crash a release that the file does not
            # count could be made again.
            if step >= self._entry.stop_step:
                stop = step + min(steps_per_block(self._max_releases), self.remaining)
                self._write(released=self._released, first_step=step, stop_step=stop)
            number = self._entry.settled + self._released
            self._next_step = step + 1
            self._released += 1
            return number

    def renew_nonce(self) -> bytes:
        """End this run and begin another under a new nonce, whose steps start at 0 again."""
        with self._lock:
            self._check_usable()
            self._start_run(settled=self._entry.settled + self._released)
            return self.nonce

    def close(self) -> None:
        """End the run and give back reserved steps that were not released; idempotent."""
        with self._lock:
            if self._descriptor < 0:
                return
            try:
                # Neither after a failed write, when the file's content is unknown, nor in a fork,
                # while its parent goes on counting.
                if not self._failure and self._process == os.getpid():
                    self._write(released=self._released, first_step=0, stop_step=0)
            finally:
                os.close(self._descriptor)
                self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _start_run(self, *, settled: int) -> None:
        nonce = secrets.token_hex(NONCE_BYTES)
        self._write(nonce=nonce, settled=settled, released=0, first_step=0, stop_step=0)
        self._released = self._next_step = 0

    def _write(self, **changes: Any) -> None:
        entry = replace(self._entry, number=self._entry.number + 1, **changes)
        page = _format_page(entry.format(), header=self._header)
        try:
            _write_durably(self._descriptor, page, at=PAGE_BYTES * (1 + entry.number % 2))
        except OSError as error:
            # The content of the disk is now unknown: only opening the ledger again shows it.
            self._failure = error.strerror or "unknown error"
            raise CornError(f"{self._path}: cannot be written: {self._failure}") from error
        self._entry = entry

    def _check_usable(self) -> None:
        if self._descriptor < 0:
            raise InvalidArgumentError(f"{self._path}: this ledger is closed")
        if self._failure:
            raise CornError(f"{self._path}: a write failed ({self._failure}): open it again")
        if self._process != os.getpid():
            # A forked copy would count for itself and release the same steps.
            raise InvalidArgumentError(f"{self._path}: this ledger belongs to another process")


def count_remaining(path: Path, *, plan_fingerprint: bytes, agent: int, max_releases: int) -> int:
    """Return how many releases remain, without starting a run: all if there is no ledger yet.

    While an agent runs, its whole last block counts as released.
    """
    header = _make_header(plan_fingerprint, agent, max_releases)
    if not path.exists():
        return max_releases
    with _explain_failure(path, "cannot be read"):
        entry, lost = _read_entry(path.read_bytes(), header=header, name=str(path))
    return max(max_releases - entry.spent - lost, 0)


def agree_on_nonce(nonces: Mapping[int, bytes], *, plan_fingerprint: bytes) -> bytes:
    """Return the nonce of a run from those of all agents' ledgers: equal for equal contributions.

    It is new if any one of them is, so an agent that contributes a new one needs to trust no other:
    contribute a new one (:meth:`ReleaseLedger.renew_nonce`) every time agents agree.
    """
    parts = [part for agent in sorted(nonces) for part in (agent, check_nonce(nonces[agent]))]
    data = encode_fields("run nonce", check_fingerprint(plan_fingerprint), *parts)
    return hashlib.blake2b(data, digest_size=NONCE_BYTES).digest()


def steps_per_block(max_releases: int) -> int:
    """Return how many steps one durable write reserves: a crash must leave most of a short plan.

    >>> steps_per_block(60), steps_per_block(1000), steps_per_block(100_000)
    (1, 20, 64)
    """
    return min(STEPS_PER_BLOCK, max(1, max_releases // _BLOCKS_PER_PLAN))


def _make_header(plan_fingerprint: bytes, agent: int, max_releases: int) -> str:
    """Return the text of the first page, which binds the ledger to a plan and an agent."""
    check_fingerprint(plan_fingerprint)
    require_count("agent", agent, least=0)
    require_count("max_releases", max_releases, least=0)
    return (
        f"CorN release ledger 1. Never copy or edit it.\n"
        f"plan {plan_fingerprint.hex()} agent {agent} limit {max_releases}\n"
    )


@contextlib.contextmanager
def _explain_failure(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FileFormatError(f"{path}: {what}: {error.strerror}") from error


def _create(path: Path, header: str) -> None:
    """Write a ledger without releases, whole or not at all, and never over another."""
    entries = [LedgerEntry(number, "0" * 64).format() for number in (0, 1)]
    content = b"".join(_format_page(text, header=header) for text in (header, *entries))
    # Written under another name first: under its own, a ledger is always whole. A link, unlike a
    # rename, fails if another process was faster and has perhaps released already.
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        _write_durably(descriptor, content, at=0)
        with contextlib.suppress(FileExistsError):
            os.link(name, path)
    finally:
        os.close(descriptor)
        os.unlink(name)
    # The name is durable only once the folder is: else a crash could remove the ledger.
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CornError(f"{path}: another process has this ledger open") from None


def _write_durably(descriptor: int, data: bytes, *, at: int) -> None:
    written = 0
    while written < len(data):
        written += os.pwrite(descriptor, data[written:], at + written)
    os.fsync(descriptor)


def _format_page(text: str, *, header: str) -> bytes:
    """Return a page of the file; its checksum covers the header, so it fits no other ledger."""
    checksum = hashlib.blake2b(encode_fields(header, text), digest_size=16).hexdigest()
    return f"{text}{checksum}\n".encode().ljust(PAGE_BYTES, b"\n")


def _read_entry(data: bytes, *, header: str, name: str) -> tuple[LedgerEntry, int]:
    """Return the latest readable entry, and how many releases an unreadable one may have added.

    Raises:
        FileFormatError: it is another plan's or agent's, or damaged beyond what a crash does.
    """
    pages = [data[at : at + PAGE_BYTES] for at in range(0, len(data), PAGE_BYTES)]
    if len(data) != FILE_BYTES or pages[0] != _format_page(header, header=header):
        raise FileFormatError(_explain_refusal(data, header, name))
    found = [_parse_page(page, header) for page in pages[1:]]
    entries = [
        entry for at, entry in enumerate(found) if entry is not None and entry.number % 2 == at
    ]
    # A crash leaves consecutive entries. Others were put together from two files.
    if not entries or (len(entries) == 2 and abs(entries[0].number - entries[1].number) != 1):
        raise FileFormatError(_explain_refusal(data, header, name))
    latest = max(entries, key=lambda entry: entry.number)
    return latest, 0 if len(entries) == 2 else STEPS_PER_BLOCK


def _parse_page(page: bytes, header: str) -> LedgerEntry | None:
    match = _PATTERN.match(page)
    if match is None or page != _format_page(match[0].decode(), header=header):
        return None
    number, settled, released, first, stop = (int(match[group]) for group in (1, 3, 4, 5, 6))
    return LedgerEntry(number, match[2].decode(), settled, released, first, stop)


def _explain_refusal(data: bytes, header: str, name: str) -> str:
    lines = data[:PAGE_BYTES].decode("latin-1").splitlines(keepends=True)
    found = "".join(lines[:2])
    if data[:PAGE_BYTES] == _format_page(found, header=found) and found != header:
        asked, other = header.splitlines()[1], make_printable(lines[1], limit=_MAX_QUOTED)
        return f"{name}: the release ledger of {other}, not of {asked}"
    return (
        f"{name}: damaged, or not a release ledger. The releases under this plan cannot be "
        "counted, so no more may be made: make a new plan"
    )
