"""The release ledger: no noise is released twice, and no plan is released more than it allows.

Two messages with the same noise and other data differ by a noise-free gradient, and the privacy of
a plan holds for T releases and no more. So before the message of a step leaves, the step is
reserved in a file that survives a crash. A restart takes a new nonce, under which all noise is new,
and counts every reserved step as released. (A ledger restored from a backup has no record of later
releases: never copy one.) Where samples are taken in passes, the ledger also keeps the secret of
their orders and a digest of the data: see :meth:`ReleaseLedger.make_choices`.

**The file** has three pages of text with checksums. The first page names the plan, the agent and
the terms of the promise (:class:`~corn.privacy.composition.PlanTerms`), and never changes. An
entry, the whole state of the ledger, is written to the second and the third page, one after the
other: the second write begins when the first is on the disk. So at any moment one of them is whole,
and once both are written, neither can be lost or put back to an earlier one without the other
telling. Hence

- pages with entries k and k + 1, or one page unreadable: a crash came between or during the two
  writes, and the newest entry is taken. No release was made under an entry that is not on both;
- both unreadable, entries further apart (a part of the file was restored), the first page
  unreadable, or another size (a crash never changes it): refused.

Checksums detect accidents, not forgery.

**The history** of an agent's releases is all ledgers beside its keys: ``ReleaseHistory`` adds up
what all plans of the agent cost together. A key's file lists the plans that it was used with, so a
ledger that was deleted or left behind is noticed: its releases still count, and the total is then
unknown. What cannot be noticed is stated in ``docs/privacy.md``.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

from corn.checks import require, require_count
from corn.errors import CornError, FileFormatError, InvalidArgumentError, make_printable
from corn.files import require_private
from corn.noise.choices import SecretChoices
from corn.noise.keys import SECRET_BYTES, Secret, list_used_plans
from corn.noise.stream import NONCE_BYTES, check_fingerprint, check_nonce, encode_fields
from corn.privacy import Unit
from corn.privacy.composition import Expense, PlanTerms, TotalLoss, compose_expenses

# A disk writes pages of this size: a torn write of one entry cannot damage the other.
PAGE_BYTES = 4096
FILE_BYTES = 3 * PAGE_BYTES
_ENTRY_PAGES = (1, 2)

LOST_COUNT = (
    "Its releases cannot be counted, so no more may be made under this plan. They still count: a "
    "new plan or key for the same data adds to them, and the total is then unknown; the ledgers "
    "that are left give a lower bound"
)
"""What the loss of a ledger means, for every message that reports one."""


_TITLE = "CorN release ledger"
_FORMAT = 5
_HEADER_PATTERN = re.compile(
    rf"{_TITLE} {_FORMAT}\. Never copy or edit it\.\n"
    r"plan ([0-9a-f]{64}) agent (\d{1,9}) limit (\d+)\nterms (.+)\n"
)


@dataclass(frozen=True)
class LedgerEntry:
    """The state of a ledger.

    Attributes:
        number: the number of this entry, from 0.
        nonce: the nonce of the latest run, in hexadecimal.
        released: the releases of all runs before the reserved block.
        first_step: the first step of the reserved block.
        stop_step: the step after its last one, and after all that the run has released.
        precision: the largest [R⁻¹]_ii under which any of the releases was made.
        furthest: the step after the last one that any run has reserved.
        data: a keyed digest of the data that the present pass began with, in hexadecimal.
        secret: the secret from which the orders of passes and the key of ``data`` follow.
    """

    number: int
    secret: Secret
    nonce: str = field(repr=False)
    released: int = 0
    first_step: int = 0
    stop_step: int = 0
    precision: float = 0.0
    furthest: int = 0
    data: str = field(default="", repr=False)

    @property
    def spent(self) -> int:
        """The releases that may have been made: all before the block, and all that it reserves."""
        return self.released + self.stop_step - self.first_step

    def format(self) -> str:
        """Return the entry as a line of JSON, which has every float exactly."""
        return json.dumps(vars(self) | {"secret": self.secret.reveal().hex()}) + "\n"


@dataclass(frozen=True)
class LedgerRecord:
    """The releases by one ledger, read without opening it; there may have been fewer.

    Without a readable entry it ``is_known`` to be False, and all releases that the plan allows
    count. A ledger that ``is_running`` is open in a process that may add releases.
    """

    path: Path
    plan: str
    expense: Expense
    is_known: bool
    is_running: bool


def read_ledger(path: Path) -> LedgerRecord:
    """Read a ledger, whether or not a process has it open: then its whole last block counts.

    Raises:
        FileFormatError: there is no such file, or its first page is damaged.
    """
    with explain_failure(path, "cannot be read"):
        # Asked before and after: a run that ends meanwhile has released more than was read.
        was_running = is_open(path)
        data = path.read_bytes()
        is_running = was_running or is_open(path)
    header = _read_header(data)
    match = _HEADER_PATTERN.fullmatch(header)
    if match is None:
        raise FileFormatError(_explain_refusal(data, header, str(path)))
    try:
        terms = PlanTerms.from_text(match[4])
    except InvalidArgumentError as error:
        raise FileFormatError(f"{path}: its terms cannot be read: {error}; {LOST_COUNT}") from error
    limit = terms.budget.num_steps
    expense = Expense(terms, terms.precision_cap, limit)
    found = _find_entry(data, header)
    if found is not None:
        entry, _ = found
        expense = Expense(terms, entry.precision, min(entry.spent, limit))
    return LedgerRecord(path, match[1], expense, is_known=found is not None, is_running=is_running)


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
    # Under its own name a ledger is always whole. A link, unlike a rename, fails if another process
    # was faster and has perhaps released already.
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
    # The text is ASCII, so that decoding as Latin-1 changes nothing.
    text = page.decode("latin-1").partition("\n")[0] + "\n"
    if page != format_page(text, header=header):
        return None
    fields = json.loads(text)
    return LedgerEntry(**fields | {"secret": Secret(bytes.fromhex(fields["secret"]))})


def _read_header(data: bytes) -> str:
    """Return the text of the first page if its checksum is right, or an empty text."""
    lines = data[:PAGE_BYTES].decode("latin-1").rstrip("\n").splitlines(keepends=True)
    # The last line is the checksum.
    found = "".join(lines[:-1])
    return found if data[:PAGE_BYTES] == format_page(found, header=found) else ""


def _explain_refusal(data: bytes, header: str, name: str) -> str:
    found = _read_header(data)
    if _HEADER_PATTERN.fullmatch(found) and found != header:
        asked, other = (make_printable(text.splitlines()[1]) for text in (header, found))
        if asked == other:
            return f"{name}: the release ledger of {other}, but under other terms"
        return (
            f"{name}: the release ledger of {other}, not of {asked}: each plan needs a file of its "
            "own"
        )
    if found.startswith(_TITLE):
        return (
            f"{name}: a release ledger of another version of CorN, which this one cannot read. "
            f"{LOST_COUNT}"
        )
    return f"{name}: damaged, or not a release ledger. {LOST_COUNT}"


LAST_STEP = 10**15
"""The last step that a ledger reserves: no plan has more, and nobody else may name a later one."""

STEPS_PER_BLOCK = 64
"""The most steps that one durable write reserves, and so the most releases that a crash costs."""

_BLOCKS_PER_PLAN = 50
_DERIVATION = b"corn/ledger/1"


class BudgetSpentError(CornError):
    """Every release that the plan allows was made, or may have been: stop, and keep the model.

    Attributes:
        public_reason: the reason as other agents may know it; the message names the ledger's file.
    """

    public_reason = "all releases that its plan allows were made"


@final
class ReleaseLedger:
    """A count of one agent's releases under one plan; open it with :meth:`open`, in one process.

    ``reserved_before`` is the number of releases that the previous run had reserved when it
    crashed. All of them count, though it may not have made them. ``first_free_step`` comes after
    all steps that earlier runs reserved. An agent that comes back to a run whose nonce it has used
    before must not release an earlier one. ``num_skipped`` is the number of releases that this run
    gives up to begin a new pass.

    >>> from tempfile import TemporaryDirectory
    >>> from corn.privacy import PrivacyBudget
    >>> terms = PlanTerms(PrivacyBudget(1, 1e-5, num_steps=100, clip=0.1), max_colluders=1)
    >>> plan = {"plan_fingerprint": bytes(32), "agent": 0, "terms": terms, "precision": 0.01}
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder) / "agent-0.ledger"
    ...     with ReleaseLedger.open(path, **plan) as ledger:
    ...         _ = ledger.reserve(0)  # now, and only now, may the message of step 0 leave
    ...     ReleaseLedger.open(path, **plan).remaining
    99
    """

    def __init__(
        self,
        path: Path,
        descriptor: int,
        *,
        header: str,
        terms: PlanTerms,
        entry: LedgerEntry,
        newest_page: int,
    ) -> None:
        self._path = path
        self._descriptor = descriptor
        self._header = header
        self._terms = terms
        self._max_releases = terms.budget.num_steps
        self._entry = entry
        self._newest_page = newest_page
        self._block = steps_per_block(self._max_releases)
        self._knows_data = terms.budget.query.steps_per_pass is None
        self._released = min(entry.spent, self._max_releases)
        self._next_step = 0
        self._has_released = False
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._failure = ""
        self.reserved_before = entry.stop_step - entry.first_step
        self.first_free_step = entry.furthest
        self.num_skipped = 0

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        plan_fingerprint: bytes,
        agent: int,
        terms: PlanTerms,
        precision: float,
        continues: bool = False,
    ) -> ReleaseLedger:
        """Open a ledger, or create it, and begin a run under a nonce never used before.

        ``precision`` is the largest [R⁻¹]_ii under which this run may release; of all runs, the
        largest is kept. With ``continues`` it goes on with the latest run, under its nonce, after
        all steps that it has reserved: for a process that lives for one release.

        Raises:
            FileFormatError: the file is damaged, is another plan's or agent's, or can be used by
                others than its owner.
            CornError: another process has it open, or it cannot be written.
        """
        check_fingerprint(plan_fingerprint)
        require_count("agent", agent, least=0)
        header = (
            f"{_TITLE} {_FORMAT}. Never copy or edit it.\n"
            f"plan {plan_fingerprint.hex()} agent {agent} limit {terms.budget.num_steps}\n"
            f"terms {terms.to_text()}\n"
        )
        with explain_failure(path, "cannot be opened"):
            if not path.exists():
                create_ledger(path, header)
            descriptor = os.open(path, os.O_RDWR)
        try:
            # It has nonces, which with the keys give the noise, and the secret of the orders.
            require_private(path)
            # Locked before it is read: two processes that both read the same count would both
            # release what remains.
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CornError(
                    f"{path}: another run has this ledger open, in this process or in another one: "
                    "end it, or close() its loader"
                ) from None
            data = os.pread(descriptor, FILE_BYTES + 1, 0)
            entry, page = read_entry(data, header=header, name=str(path))
            entry = replace(entry, precision=max(entry.precision, precision))
            ledger = cls(
                path, descriptor, header=header, terms=terms, entry=entry, newest_page=page
            )
            if continues:
                ledger._next_step = ledger._entry.stop_step
                ledger._has_released = ledger._next_step > 0
                # The process may end after one release: more than that would be lost.
                ledger._block = 1
            else:
                nonce = secrets.token_hex(NONCE_BYTES)
                ledger._write(nonce=nonce, released=ledger._released, first_step=0, stop_step=0)
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
        return self._max_releases - self._released

    @property
    def precision(self) -> float:
        """The largest [R⁻¹]_ii under which any run of this ledger may have released."""
        return self._entry.precision

    @property
    def expense(self) -> Expense:
        """All releases under the plan so far, of this run and of earlier ones."""
        return Expense(self._terms, self.precision, self._released)

    @property
    def next_step(self) -> int:
        """The first step that this run may still release."""
        return self._next_step

    def __repr__(self) -> str:
        return f"ReleaseLedger({self.remaining} of {self._max_releases} releases remain)"

    def make_choices(self, data: bytes | None) -> SecretChoices:
        """Return secret coins for this run, and the secret orders of passes through its data.

        In a pass a sample may be in one batch only. So a run with other data than the present pass
        began with begins a new pass: it skips the numbers that are left of the present one, and
        they count as spent from the first release on. Then every pass has one data set and one
        order, and no sample is in more batches than passes are counted. ``data`` is a digest of all
        samples in their order; None is taken for other data.

        Raises:
            BudgetSpentError: releases remain, but none after the present pass.
            InvalidArgumentError: this run has released already.
        """
        with self._lock:
            self._check_usable()
            require(
                not self._has_released, "make_choices", "called before the first release", "one"
            )
            length = self._terms.budget.query.steps_per_pass
            if length is not None:
                self._choose_pass(data, length)
            self._knows_data = True
            orders = self._derive("orders of passes")
            return SecretChoices(coins=Secret.random(), orders=Secret(orders))

    def _choose_pass(self, data: bytes | None, length: int) -> None:
        # Keyed, so that the digest is of no use to anybody who guesses the data.
        found = secrets.token_bytes(SECRET_BYTES)
        if data is not None:
            found = self._derive("data of a pass", data)
        if found.hex() == self._entry.data:
            return
        skipped = min(-self._released % length, self.remaining)
        if skipped and skipped == self.remaining:
            raise BudgetSpentError(
                f"{self._path}: {skipped} of {self._max_releases} releases remain, all in a pass "
                "that an earlier run began with other data: only that data may be used for them"
            )
        self.num_skipped += skipped
        # Written with the first reservation: a run that is refused before it costs nothing.
        self._released += skipped
        self._entry = replace(self._entry, data=found.hex())

    def reserve(self, step: int) -> int:
        """Reserve a step's release durably; the message may leave once this has returned.

        Return the number of the release, from 0. No two releases under the plan have the same, in
        whichever runs they are: after a crash, numbers that were reserved are skipped.

        Steps of a run increase to ``LAST_STEP`` at most, and may skip. One in 64 calls waits for
        the disk (more of them under plans of fewer than 3200 releases; see ``steps_per_block``).
        The release counts even if the message is not sent after all.

        Raises:
            BudgetSpentError: nothing remains.
            CornError: the reservation could not be written; nothing may be released.
        """
        with self._lock:
            self._check_usable()
            if step < self._next_step:
                raise InvalidArgumentError(
                    f"step must be at least {self._next_step}, found {step}: its noise may have "
                    "been released; to go back, open the ledger again"
                )
            require_count("step", step, least=0, most=LAST_STEP)
            # Otherwise the release could be of other data than the rest of its pass.
            if not self._knows_data:
                raise InvalidArgumentError(
                    "make_choices must be called before the first release in passes"
                )
            if self.remaining == 0:
                raise BudgetSpentError(
                    f"{self._path}: all {self._max_releases} releases of the plan are spent"
                )
            # On the disk before the message leaves: after a crash a release that the file does not
            # count could be made again.
            if step >= self._entry.stop_step:
                stop = step + min(self._block, self.remaining)
                self._write(
                    released=self._released,
                    first_step=step,
                    stop_step=stop,
                    furthest=max(stop, self._entry.furthest),
                )
            self._next_step = step + 1
            self._has_released = True
            self._released += 1
            return self._released - 1

    def join_run(self, step: int) -> None:
        """Take part from a step on in a run under way, whose nonce this ledger did not choose.

        Raises:
            InvalidArgumentError: the step may have been released before, under the same nonce.
        """
        with self._lock:
            # Whoever names the nonce may name that of any run. Only new steps are safe under all.
            if step < self.first_free_step:
                raise InvalidArgumentError(
                    f"step must be at least {self.first_free_step}, found {step}: earlier steps "
                    "may have been released under the nonce of this run"
                )
            require_count("step", step, least=0, most=LAST_STEP)
            self._next_step = max(step, self._next_step)

    def close(self) -> None:
        """End the run and give back reserved steps that were not released; idempotent."""
        with self._lock:
            if self._descriptor < 0:
                return
            try:
                # Neither after a failed write, when the file's content is unknown, nor in a fork,
                # while its parent goes on counting. A run without a release leaves no trace.
                is_own = not self._failure and self._process == os.getpid()
                if is_own and self._entry.stop_step > self._entry.first_step:
                    step = self._next_step
                    self._write(released=self._released, first_step=step, stop_step=step)
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

    def _derive(self, *fields: str | bytes) -> bytes:
        """Return bytes that follow from the ledger's secret, for one purpose."""
        return hashlib.blake2b(
            encode_fields(*fields),
            key=self._entry.secret.reveal(),
            digest_size=SECRET_BYTES,
            person=_DERIVATION,
        ).digest()

    def _write(self, **changes: Any) -> None:
        entry = replace(self._entry, number=self._entry.number + 1, **changes)
        content = format_page(entry.format(), header=self._header)
        # The page with the newest entry is written last, once the other is on the disk: a crash can
        # tear one page only.
        (other_page,) = set(_ENTRY_PAGES) - {self._newest_page}
        try:
            for page in (other_page, self._newest_page):
                write_durably(self._descriptor, content, at=PAGE_BYTES * page)
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


def agree_on_nonce(nonces: Mapping[int, bytes], *, plan_fingerprint: bytes) -> bytes:
    """Return the nonce of a run from those of all agents' ledgers: equal for equal contributions.

    It is new if any one of them is, so an agent that contributes a new one needs to trust no other:
    open the ledger again, for a new one, every time agents agree.
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


_AGENT_FILE = re.compile(r"agent-(\d{1,9})(?:-[0-9a-f]{16}\.ledger|\.key)")


@dataclass(frozen=True)
class ReleaseHistory:
    """All releases of one agent's data that are known, a record for each ledger.

    ``problems`` are folders and ledgers that are missing or cannot be read, each in a line. With
    any, the total of ``records`` is only a lower bound.
    """

    agent: int
    records: tuple[LedgerRecord, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def expenses(self) -> tuple[Expense, ...]:
        """The releases under each plan."""
        return tuple(record.expense for record in self.records)

    def compose(self, delta: float, *, unit: Unit | None = None) -> TotalLoss:
        """Return the privacy of all releases together at δ.

        It is for ``unit``, or else for the largest unit that every plan protects. Its ε is infinite
        for an agent's whole data if any plan protects only samples.
        """
        return compose_expenses(self.expenses, delta, unit=unit)


def ledger_path(folder: Path, agent: int, plan: str) -> Path:
    """Return where an agent's ledger under a plan lies, by the plan's fingerprint."""
    # One ledger per plan: a budget is one plan's, and releases under another do not count to it.
    return folder / f"agent-{agent}-{plan[:16]}.ledger"


def find_agents(folder: Path) -> list[int]:
    """Return the agents that have a key or a ledger in a folder.

    Raises:
        FileFormatError: there are none, or it is no folder.
    """
    if not folder.is_dir():
        raise FileFormatError(f"{folder}: is not a folder of keys and ledgers")
    matches = (_AGENT_FILE.fullmatch(path.name) for path in folder.iterdir())
    agents = sorted({int(match[1]) for match in matches if match is not None})
    if not agents:
        raise FileFormatError(f"{folder}: has no agent's key or ledger")
    return agents


def read_history(
    folders: Sequence[Path], agent: int, *, without: Path | None = None
) -> ReleaseHistory:
    """Read everything that an agent has released by the ledgers in some folders of keys.

    The agents of this number in all folders have the same data. A folder that is given twice counts
    once, and one that does not exist is a problem. The caller has the ledger ``without`` open.
    """
    records: list[LedgerRecord] = []
    problems: list[str] = []
    unique: dict[Path, Path] = {}
    for folder in folders:
        # The first name is kept, by which callers recognise their own ledger.
        unique.setdefault(folder.resolve(), folder)
    for folder in unique.values():
        # A wrong name must not pass for a folder without releases.
        if not folder.is_dir():
            problems.append(f"{folder}: is not a folder of keys and ledgers")
            continue
        for path in sorted(folder.glob(f"agent-{agent}-*.ledger")):
            if without is not None and path.resolve() == without.resolve():
                continue
            try:
                records.append(read_ledger(path))
            except FileFormatError as error:
                problems.append(str(error))
        problems += _find_missing(folder, agent)
    return ReleaseHistory(agent, tuple(records), tuple(problems))


def explain_missing(path: Path) -> str:
    """Return why a plan whose ledger is gone cannot be used again, and what that does."""
    return f"{path}: is missing, although the key beside it was used with this plan. {LOST_COUNT}"


def _find_missing(folder: Path, agent: int) -> Iterator[str]:
    key = folder / f"agent-{agent}.key"
    # Ledgers may be kept after their key was destroyed.
    if not key.exists():
        return
    for plan in list_used_plans(key):
        path = ledger_path(folder, agent, plan)
        if not path.exists():
            yield explain_missing(path)
