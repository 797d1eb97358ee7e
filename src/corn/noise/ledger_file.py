"""The file of a release ledger: three pages of text with checksums.

The first page names the plan, the agent and the terms of the promise
(:class:`~corn.privacy.composition.PlanTerms`), and never changes. Entry number k, the whole state
of the ledger, is written to the second or the third page in turn, so that the entry before it is
still there if that write is torn by a crash. Hence

- one entry unreadable: the other is taken, plus a full block of releases, which is the most that
  the lost one can have added; which steps it reserved is unknown, so the agent returns to no run;
- both unreadable, the first page unreadable, or another size (a crash never changes it): refused.

Checksums detect accidents, not forgery: a person who may write the file can also write a valid one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from corn.checks import require_count
from corn.errors import CornError, FileFormatError, InvalidArgumentError, make_printable
from corn.noise.address import check_fingerprint, encode_fields
from corn.privacy.composition import Expense, PlanTerms

# The most steps that one durable write reserves, and so the most releases that a crash can cost.
STEPS_PER_BLOCK = 64
# A disk writes pages of this size: a torn write of one entry cannot damage the other.
PAGE_BYTES = 4096
FILE_BYTES = 3 * PAGE_BYTES

LOST_COUNT = (
    "Its releases cannot be counted, so no more may be made under this plan. They still count: a "
    "new plan or key for the same data adds to them, and the total is then unknown; the ledgers "
    "that are left give a lower bound"
)
"""What the loss of a ledger means, for every message that reports one."""


_TITLE = "CorN release ledger"
_FORMAT = 3
_HEADER_PATTERN = re.compile(
    rf"{_TITLE} {_FORMAT}\. Never copy or edit it\.\n"
    r"plan ([0-9a-f]{64}) agent (\d{1,9}) limit (\d+)\nterms (.+)\n"
)
_ENTRY_PATTERN = re.compile(
    rb"entry (\d+) run ([0-9a-f]{64}) settled (\d+) released (\d+) reserved (\d+) to (\d+) "
    rb"precision (inf|0x[01]\.[0-9a-f]+p[+-]\d+) furthest (\d+)\n"
)


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
        precision: the largest [R⁻¹]_ii under which any of the releases was made.
        furthest: the step after the last one that any run has reserved.
    """

    number: int
    nonce: str
    settled: int = 0
    released: int = 0
    first_step: int = 0
    stop_step: int = 0
    precision: float = 0.0
    furthest: int = 0

    @property
    def spent(self) -> int:
        """The releases that may have been made: all before the block, and all that it reserves."""
        return self.settled + self.released + self.stop_step - self.first_step

    def format(self) -> str:
        """Return the entry as a line of text."""
        return (
            f"entry {self.number} run {self.nonce} settled {self.settled} "
            f"released {self.released} reserved {self.first_step} to {self.stop_step} "
            f"precision {self.precision.hex()} furthest {self.furthest}\n"
        )


@dataclass(frozen=True)
class LedgerContent:
    """The content of a ledger's file, read without opening the ledger.

    Attributes:
        plan: the plan's fingerprint, in hexadecimal.
        agent: the agent's number under it.
        expense: its releases, of which there may have been fewer.
        is_known: False if no entry can be read; then all releases that the plan allows count.
    """

    plan: str
    agent: int
    expense: Expense
    is_known: bool = True


def read_ledger(path: Path) -> LedgerContent:
    """Read a ledger that nobody needs to have open; the plan is not needed.

    While an agent runs, its whole last block counts as released.

    Raises:
        FileFormatError: there is no such file, or its first page is damaged.
    """
    with explain_failure(path, "cannot be read"):
        data = path.read_bytes()
    header = _read_header(data)
    match = _HEADER_PATTERN.fullmatch(header)
    if match is None:
        raise FileFormatError(_explain_refusal(data, header, str(path)))
    try:
        terms = PlanTerms.from_text(match[4])
    except InvalidArgumentError as error:
        raise FileFormatError(f"{path}: its terms cannot be read: {error}; {LOST_COUNT}") from error
    limit, plan, agent = terms.budget.num_steps, match[1], int(match[2])
    found = _find_entry(data, header)
    if found is None:
        return LedgerContent(
            plan, agent, Expense(terms, terms.precision_cap, limit), is_known=False
        )
    entry, lost = found
    return LedgerContent(
        plan, agent, Expense(terms, entry.precision, min(entry.spent + lost, limit))
    )


def is_open(path: Path) -> bool:
    """Return whether a process has a ledger open."""
    with explain_failure(path, "cannot be read"):
        descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def make_header(plan_fingerprint: bytes, agent: int, terms: PlanTerms) -> str:
    """Return the text of the first page, which binds the ledger to a plan and an agent."""
    check_fingerprint(plan_fingerprint)
    require_count("agent", agent, least=0)
    return (
        f"{_TITLE} {_FORMAT}. Never copy or edit it.\n"
        f"plan {plan_fingerprint.hex()} agent {agent} limit {terms.budget.num_steps}\n"
        f"terms {terms.to_text()}\n"
    )


@contextlib.contextmanager
def explain_failure(path: Path, what: str) -> Iterator[None]:
    """Name the file in a failure of the system."""
    try:
        yield
    except OSError as error:
        raise FileFormatError(f"{path}: {what}: {error.strerror}") from error


def create_ledger(path: Path, header: str) -> None:
    """Write a ledger without releases, whole or not at all, and never over another."""
    entries = [LedgerEntry(number, "0" * 64).format() for number in (0, 1)]
    content = b"".join(format_page(text, header=header) for text in (header, *entries))
    # Written under another name first: under its own, a ledger is always whole. A link, unlike a
    # rename, fails if another process was faster and has perhaps released already.
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        write_durably(descriptor, content, at=0)
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


def lock_ledger(descriptor: int, path: Path) -> None:
    """Lock an open ledger until it is closed, or raise if another process has it open."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CornError(f"{path}: another process has this ledger open") from None


def write_durably(descriptor: int, data: bytes, *, at: int) -> None:
    """Write to a file and wait until the disk has it."""
    written = 0
    while written < len(data):
        written += os.pwrite(descriptor, data[written:], at + written)
    os.fsync(descriptor)


def format_page(text: str, *, header: str) -> bytes:
    """Return a page of the file; its checksum covers the header, so it fits no other ledger."""
    checksum = hashlib.blake2b(encode_fields(header, text), digest_size=16).hexdigest()
    return f"{text}{checksum}\n".encode().ljust(PAGE_BYTES, b"\n")


def read_entry(data: bytes, *, header: str, name: str) -> tuple[LedgerEntry, int]:
    """Return the latest readable entry, and how many releases an unreadable one may have added.

    Raises:
        FileFormatError: it is another plan's or agent's, or damaged beyond what a crash does.
    """
    if data[:PAGE_BYTES] != format_page(header, header=header):
        raise FileFormatError(_explain_refusal(data, header, name))
    found = _find_entry(data, header)
    if found is None:
        raise FileFormatError(
            f"{name}: damaged. No more releases may be made under this plan, and all that it "
            "allows count as made; they still count under a new plan or key for the same data"
        )
    return found


def _find_entry(data: bytes, header: str) -> tuple[LedgerEntry, int] | None:
    """See ``read_entry``; None if damaged beyond what a crash does."""
    pages = [data[at : at + PAGE_BYTES] for at in (PAGE_BYTES, 2 * PAGE_BYTES)]
    found = [_parse_page(page, header) for page in pages]
    entries = [
        entry for at, entry in enumerate(found) if entry is not None and entry.number % 2 == at
    ]
    # A crash leaves consecutive entries. Others were put together from two files.
    is_torn = len(entries) == 2 and abs(entries[0].number - entries[1].number) != 1
    if len(data) != FILE_BYTES or not entries or is_torn:
        return None
    latest = max(entries, key=lambda entry: entry.number)
    return latest, 0 if len(entries) == 2 else STEPS_PER_BLOCK


def _parse_page(page: bytes, header: str) -> LedgerEntry | None:
    match = _ENTRY_PATTERN.match(page)
    if match is None or page != format_page(match[0].decode(), header=header):
        return None
    number, settled, released, first, stop = (int(match[group]) for group in (1, 3, 4, 5, 6))
    return LedgerEntry(
        number=number,
        nonce=match[2].decode(),
        settled=settled,
        released=released,
        first_step=first,
        stop_step=stop,
        precision=float.fromhex(match[7].decode()),
        furthest=int(match[8]),
    )


def _read_header(data: bytes) -> str:
    """Return the text of the first page if its checksum is right, or an empty text."""
    lines = data[:PAGE_BYTES].decode("latin-1").rstrip("\n").splitlines(keepends=True)
    # The last line is the checksum. The text is ASCII, so that decoding as Latin-1 changes nothing.
    found = "".join(lines[:-1])
    return found if data[:PAGE_BYTES] == format_page(found, header=found) else ""


def _explain_refusal(data: bytes, header: str, name: str) -> str:
    found = _read_header(data)
    if _HEADER_PATTERN.fullmatch(found) and found != header:
        asked, other = (make_printable(text.splitlines()[1]) for text in (header, found))
        if asked == other:
            return f"{name}: the release ledger of {other}, but under other terms"
        return f"{name}: the release ledger of {other}, not of {asked}"
    if found.startswith(_TITLE):
        return (
            f"{name}: a release ledger of another version of CorN, which this one cannot read. "
            f"{LOST_COUNT}"
        )
    return f"{name}: damaged, or not a release ledger. {LOST_COUNT}"
