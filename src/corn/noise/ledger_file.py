"""The release ledger's file: three pages of fixed size, a first one and two that take turns.

The first page names the plan and the agent and never changes. Entry number k, the whole state of
the ledger, is written to the page whose turn it is, so that the entry before is still there if that
write is torn by a crash. Hence

- one entry unreadable: the other is taken, plus a full block of releases, which is the most that
  the lost one can have added;
- both unreadable, the first page unreadable, or another size (a crash never changes it): refused.

Every page is text with a checksum. Checksums find accidents, not a forger: whoever may write the
file may write another.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from corn.errors import FileFormatError, make_printable
from corn.noise.encoding import encode_fields

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


def steps_per_block(max_releases: int) -> int:
    """How many steps one durable write reserves: a crash must leave most of a short plan.

    >>> steps_per_block(60), steps_per_block(1000), steps_per_block(100_000)
    (1, 20, 64)
    """
    return min(STEPS_PER_BLOCK, max(1, max_releases // _BLOCKS_PER_PLAN))


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
