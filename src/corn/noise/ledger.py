"""The release ledger: no noise is released twice, and no more often than the plan allows.

Two messages with the same noise and other data differ by a noise-free gradient, and the privacy of
a plan holds for T releases and no more. So before a step's message leaves, the step is reserved in
a file that survives a crash; a restart takes a new nonce, under which all noise is new, and counts
every reserved step as released. (A ledger restored from a backup forgets releases: the nonce still
keeps noise from being used twice, but the count is then wrong. Never copy a ledger.)
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

from corn.errors import CornError, FileFormatError, InvalidArgumentError, make_printable
from corn.noise.address import NONCE_BYTES, check_fingerprint, check_nonce, encode_fields

STEPS_PER_BLOCK = 64
"""How many steps one durable write reserves at most, and so the most that a crash can cost."""

_BLOCKS_PER_PLAN = 50
_MAX_QUOTED = 120

PAGE_BYTES = 4096
"""A page of the disk: a write that is torn damages no other."""

FILE_BYTES = 3 * PAGE_BYTES

_PATTERN = re.compile(
    rb"entry (\d+) run ([0-9a-f]{64}) settled (\d+) released (\d+) reserved (\d+) to (\d+)\n"
)


class BudgetSpentError(CornError):
    """Every release the plan allows has been made, or may have been: stop, and keep the model."""


@dataclass(frozen=True)
class LedgerEntry:
    """The state of a ledger.

    Attributes:
        number: counts entries, from 0.
        nonce: of the latest run, in hexadecimal.
        settled: releases of the runs before it.
        released: releases of this run before its reserved block.
        first_step: the reserved block is the steps from this one …
        stop_step: … to before this one.
    """

    number: int
    nonce: str
    settled: int = 0
    released: int = 0
    first_step: int = 0
    stop_step: int = 0

    @property
    def spent(self) -> int:
        """Releases that may have been made: all those before, and all that are reserved."""
        return self.settled + self.released + self.stop_step - self.first_step

    def format(self) -> str:
        """The entry as a line of text."""
        return (
            f"entry {self.number} run {self.nonce} settled {self.settled} "
            f"released {self.released} reserved {self.first_step} to {self.stop_step}\n"
        )


@final
class ReleaseLedger:
    """What one agent has released under one plan; open it with :meth:`open`, in one process.

    ``reserved_before`` is how many releases the run before had reserved when it crashed: all of
    them count, though it may not have made them.

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
        """Open a ledger, or start it, and begin a run under a nonce never used before.

        Raises:
            FileFormatError: the file is damaged, or is another plan's or agent's.
            CornError: another process has it open, or it cannot be written.
        """
        header = _check_header(plan_fingerprint, agent, max_releases)
        with _explain_failure(path, "cannot be opened"):
            if not path.exists():
                _create(path, format_new(header))
            descriptor = os.open(path, os.O_RDWR)
        try:
            _lock(descriptor, path)
            entry, lost = read_entry(
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
        """This run's nonce, 32 bytes: what this agent brings to :func:`agree_on_nonce`."""
        return bytes.fromhex(self._entry.nonce)

    @property
    def remaining(self) -> int:
        """How many more releases the plan allows."""
        return self._max_releases - self._entry.settled - self._released

    def __repr__(self) -> str:
        return f"ReleaseLedger({self.remaining} of {self._max_releases} releases remain)"

    def reserve(self, step: int) -> None:
        """Reserve a step's release durably; the message may leave once this has returned.

        Steps of a run increase, and may skip. One in 64 calls waits for the disk (more of
        them under plans of fewer than 3200 releases; see ``steps_per_block``). The release counts
        even if the message is not sent after all.

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
            if step >= self._entry.stop_step:
                stop = step + min(steps_per_block(self._max_releases), self.remaining)
                self._write(released=self._released, first_step=step, stop_step=stop)
            self._next_step = step + 1
            self._released += 1

    def renew_nonce(self) -> bytes:
        """End this run and begin another, whose steps start anew under a new nonce."""
        with self._lock:
            self._check_usable()
            self._start_run(settled=self._entry.settled + self._released)
            return self.nonce

    def close(self) -> None:
        """End the run and give back what was reserved but not released; twice is once."""
        with self._lock:
            if self._descriptor < 0:
                return
            try:
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
        page = format_page(entry.format(), header=self._header)
        try:
            _write_durably(self._descriptor, page, at=position_of(entry))
        except OSError as error:
            # What the disk holds now is unknown: only opening the ledger anew can find out.
            self._failure = error.strerror or "unknown error"
            raise CornError(f"{self._path}: cannot be written: {self._failure}") from error
        self._entry = entry

    def _check_usable(self) -> None:
        if self._descriptor < 0:
            raise InvalidArgumentError(f"{self._path}: this ledger is closed")
        if self._failure:
            raise CornError(f"{self._path}: a write failed ({self._failure}): open it anew")
        if self._process != os.getpid():
            # A forked copy would count for itself and release the same steps.
            raise InvalidArgumentError(f"{self._path}: this ledger belongs to another process")


def count_remaining(path: Path, *, plan_fingerprint: bytes, agent: int, max_releases: int) -> int:
    """How many releases remain, without starting a run: all of them if there is no ledger yet.

    While an agent runs this counts its whole last block as released.
    """
    header = _check_header(plan_fingerprint, agent, max_releases)
    if not path.exists():
        return max_releases
    with _explain_failure(path, "cannot be read"):
        entry, lost = read_entry(path.read_bytes(), header=header, name=str(path))
    return max(max_releases - entry.spent - lost, 0)


def agree_on_nonce(nonces: Mapping[int, bytes], *, plan_fingerprint: bytes) -> bytes:
    """The nonce of a run, from the one each agent's ledger brings: equal for all who saw the same.

    It is new if any one of them is, so an agent that brings its own needs to trust no other: bring
    a new one (:meth:`ReleaseLedger.renew_nonce`) every time agents agree.
    """
    parts = [part for agent in sorted(nonces) for part in (agent, check_nonce(nonces[agent]))]
    data = encode_fields("run nonce", check_fingerprint(plan_fingerprint), *parts)
    return hashlib.blake2b(data, digest_size=NONCE_BYTES).digest()


def steps_per_block(max_releases: int) -> int:
    """How many steps one durable write reserves: a crash must leave most of a short plan.

    >>> steps_per_block(60), steps_per_block(1000), steps_per_block(100_000)
    (1, 20, 64)
    """
    return min(STEPS_PER_BLOCK, max(1, max_releases // _BLOCKS_PER_PLAN))


def _check_header(plan_fingerprint: bytes, agent: int, max_releases: int) -> str:
    check_fingerprint(plan_fingerprint)
    for name, value in (("agent", agent), ("max_releases", max_releases)):
        if value < 0:
            raise InvalidArgumentError(f"{name} must be at least 0, found {value}")
    return format_header(plan_fingerprint, agent, max_releases)


@contextlib.contextmanager
def _explain_failure(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FileFormatError(f"{path}: {what}: {error.strerror}") from error


def _create(path: Path, content: bytes) -> None:
    # Written under another name first: under its own, a ledger is always whole.
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        _write_durably(descriptor, content, at=0)
        with contextlib.suppress(FileExistsError):
            os.link(name, path)
    finally:
        os.close(descriptor)
        os.unlink(name)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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


def format_header(plan_fingerprint: bytes, agent: int, max_releases: int) -> str:
    """The text of the first page, which binds the ledger to a plan and an agent."""
    return (
        f"CorN release ledger 1. Never copy or edit it.\n"
        f"plan {plan_fingerprint.hex()} agent {agent} limit {max_releases}\n"
    )


def format_page(text: str, *, header: str) -> bytes:
    """A page of the file; its checksum covers the header too, so it fits no other ledger."""
    checksum = hashlib.blake2b(encode_fields(header, text), digest_size=16).hexdigest()
    return f"{text}{checksum}\n".encode().ljust(PAGE_BYTES, b"\n")


def format_new(header: str) -> bytes:
    """A ledger in which nothing was released."""
    entries = [LedgerEntry(number, "0" * 64).format() for number in (0, 1)]
    return b"".join(format_page(text, header=header) for text in (header, *entries))


def position_of(entry: LedgerEntry) -> int:
    """Where in the file an entry goes."""
    return PAGE_BYTES * (1 + entry.number % 2)


def read_entry(data: bytes, *, header: str, name: str) -> tuple[LedgerEntry, int]:
    """The latest entry that can be read, and how many releases one that cannot may have added.

    Raises:
        FileFormatError: it is another plan's or agent's, or damaged beyond what a crash does.
    """
    pages = [data[at : at + PAGE_BYTES] for at in range(0, len(data), PAGE_BYTES)]
    if len(data) != FILE_BYTES or pages[0] != format_page(header, header=header):
        raise FileFormatError(_explain_refusal(data, header, name))
    found = [_parse_page(page, header) for page in pages[1:]]
    entries = [
        entry for at, entry in enumerate(found) if entry is not None and entry.number % 2 == at
    ]
    if not entries or (len(entries) == 2 and abs(entries[0].number - entries[1].number) != 1):
        raise FileFormatError(_explain_refusal(data, header, name))
    latest = max(entries, key=lambda entry: entry.number)
    return latest, 0 if len(entries) == 2 else STEPS_PER_BLOCK


def _parse_page(page: bytes, header: str) -> LedgerEntry | None:
    match = _PATTERN.match(page)
    if match is None or page != format_page(match[0].decode(), header=header):
        return None
    number, settled, released, first, stop = (int(match[group]) for group in (1, 3, 4, 5, 6))
    return LedgerEntry(number, match[2].decode(), settled, released, first, stop)


def _explain_refusal(data: bytes, header: str, name: str) -> str:
    lines = data[:PAGE_BYTES].decode("latin-1").splitlines(keepends=True)
    found = "".join(lines[:2])
    if data[:PAGE_BYTES] == format_page(found, header=found) and found != header:
        asked, other = header.splitlines()[1], make_printable(lines[1], limit=_MAX_QUOTED)
        return f"{name}: the release ledger of {other}, not of {asked}"
    return (
        f"{name}: damaged, or not a release ledger. What was released under this plan cannot be "
        "known, so nothing more may be: make a new plan"
    )
