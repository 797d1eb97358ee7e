"""The file of a release ledger: three pages of text with checksums.

The first page names the plan, the agent and the terms of the promise
(:class:`~corn.privacy.composition.PlanTerms`), and never changes. An entry, the whole state of the
ledger, is written to the second and the third page, one after the other: the second write begins
when the first is on the disk. So at any moment one of them is whole, and once both are written,
neither can be lost or put back to an earlier one without the other telling. Hence

- pages with entries k and k + 1, or one page unreadable: a crash came between or during the two
  writes, and the newest entry is taken. No release was made under an entry that is not on both;
- both unreadable, entries further apart (a part of the file was restored), the first page
  unreadable, or another size (a crash never changes it): refused.

Checksums detect accidents, not forgery: a person who may write the file can also write a valid one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from corn.checks import require_count
from corn.errors import CornError, FileFormatError, InvalidArgumentError, make_printable
from corn.noise.address import NONCE_BYTES, check_fingerprint, encode_fields
from corn.noise.keys import Secret
from corn.privacy.composition import Expense, PlanTerms

# A disk writes pages of this size: a torn write of one entry cannot damage the other.
PAGE_BYTES = 4096
FILE_BYTES = 3 * PAGE_BYTES
NO_NONCE = "0" * (2 * NONCE_BYTES)
_ENTRY_PAGES = (1, 2)

LOST_COUNT = (
    "Its releases cannot be counted, so no more may be made under this plan. They still count: a "
    "new plan or key for the same data adds to them, and the total is then unknown; the ledgers "
    "that are left give a lower bound"
)
"""What the loss of a ledger means, for every message that reports one."""


_TITLE = "CorN release ledger"
_FORMAT = 4
_HEADER_PATTERN = re.compile(
    rf"{_TITLE} {_FORMAT}\. Never copy or edit it\.\n"
    r"plan ([0-9a-f]{64}) agent (\d{1,9}) limit (\d+)\nterms (.+)\n"
)
_ENTRY_PATTERN = re.compile(
    rb"entry (\d+) run ([0-9a-f]{64}) settled (\d+) released (\d+) reserved (\d+) to (\d+) "
    rb"precision (inf|0x[01]\.[0-9a-f]+p[+-]\d+) furthest (\d+) agreed ([0-9a-f]{64}) "
    rb"data ([0-9a-f]{64}) secret ([0-9a-f]{64})\n"
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
        stop_step: the step after its last one, and after all that the run has released.
        precision: the largest [R⁻¹]_ii under which any of the releases was made.
        furthest: the step after the last one that any run has reserved.
        agreed: the nonce that all agents agreed on for the latest run, if the ledger was told.
        data: a keyed digest of the data that the present pass began with.
        secret: from which the orders of passes and the key of ``data`` follow.
    """

    number: int
    secret: Secret
    nonce: str = field(repr=False)
    settled: int = 0
    released: int = 0
    first_step: int = 0
    stop_step: int = 0
    precision: float = 0.0
    furthest: int = 0
    agreed: str = field(default=NO_NONCE, repr=False)
    data: str = field(default=NO_NONCE, repr=False)

    @property
    def spent(self) -> int:
        """The releases that may have been made: all before the block, and all that it reserves."""
        return self.settled + self.released + self.stop_step - self.first_step

    def format(self) -> str:
        """Return the entry as a line of text."""
        return (
            f"entry {self.number} run {self.nonce} settled {self.settled} "
            f"released {self.released} reserved {self.first_step} to {self.stop_step} "
            f"precision {self.precision.hex()} furthest {self.furthest} agreed {self.agreed} "
            f"data {self.data} secret {self.secret.reveal().hex()}\n"
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
    entry, _ = found
    return LedgerContent(plan, agent, Expense(terms, entry.precision, min(entry.spent, limit)))


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
    # A nonce that nobody knows: there is no run that anybody could go on with.
    entry = LedgerEntry(0, Secret.random(), secrets.token_hex(NONCE_BYTES)).format()
    content = b"".join(format_page(text, header=header) for text in (header, entry, entry))
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


def write_entry(descriptor: int, entry: LedgerEntry, *, header: str, newest_page: int) -> None:
    """Write an entry to both pages, that with the newest entry before it last."""
    content = format_page(entry.format(), header=header)
    # The second write begins when the first is on the disk, so that a crash can tear one page only.
    (other_page,) = set(_ENTRY_PAGES) - {newest_page}
    for page in (other_page, newest_page):
        write_durably(descriptor, content, at=PAGE_BYTES * page)


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
    """Return the newest entry, and the number of a page that has it.

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
    pages = {page: data[PAGE_BYTES * page : PAGE_BYTES * (page + 1)] for page in _ENTRY_PAGES}
    parsed = ((_parse_page(content, header), page) for page, content in pages.items())
    found = sorted(
        ((entry, page) for entry, page in parsed if entry is not None),
        key=lambda each: each[0].number,
    )
    if len(data) != FILE_BYTES or not found:
        return None
    oldest, newest = found[0][0], found[-1][0]
    # A crash leaves the same entry twice, or two consecutive ones. Others were put together from
    # two versions of the file, and a still newer one may be lost.
    is_mixed = newest.number - oldest.number > 1
    if is_mixed or (newest.number == oldest.number and newest != oldest):
        return None
    return found[-1]


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
        agreed=match[9].decode(),
        data=match[10].decode(),
        secret=Secret(bytes.fromhex(match[11].decode())),
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
