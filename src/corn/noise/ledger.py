"""The release ledger: no noise is released twice, and no plan is released more than it allows.

Two messages with the same noise and other data differ by a noise-free gradient, and the privacy of
a plan holds for T releases and no more. So before the message of a step leaves, the step is
reserved in a file that survives a crash. A restart takes a new nonce, under which all noise is new,
and counts every reserved step as released. (A ledger restored from a backup has no record of later
releases: never copy one.) Where samples are taken in passes, the ledger also keeps the secret of
their orders and a digest of the data: see :meth:`ReleaseLedger.make_choices`.

**The file** has two pages of text with checksums. Each is an entry, the whole state of the ledger.
An entry is written to one page and then to the other: the second write begins when the first is on
the disk. So one of them is always whole, and neither can be put back to an earlier one unnoticed:

- entries k and k + 1, or one page unreadable: a crash came between or during the two writes, and
  the newest entry is taken. No release was made under an entry that is not on both;
- both unreadable, entries further apart (a part of the file was restored), or another size (a crash
  never changes it): refused. Checksums detect accidents, not forgery.

**The history** of an agent's releases is all ledgers beside its keys. A key's file lists the plans
that it was used with, so a lost ledger is noticed, and the total is then unknown
(``docs/privacy.md``).
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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self, final

from corn.checks import require, require_count
from corn.errors import CornError, FileFormatError, InvalidArgumentError
from corn.files import require_private
from corn.noise.choices import SecretChoices
from corn.noise.keys import SECRET_BYTES, Secret, list_used_plans
from corn.noise.stream import NONCE_BYTES, check_fingerprint, check_nonce, encode_fields
from corn.parsing import build
from corn.privacy import Unit
from corn.privacy.composition import Expense, PlanTerms, TotalLoss, compose_expenses

# A disk writes pages of this size: a torn write of one entry cannot damage the other.
PAGE_BYTES = 4096
FILE_BYTES = 2 * PAGE_BYTES

# What the loss of a ledger means, for every message that reports one.
LOST_COUNT = (
    "Its releases cannot be counted, so no more may be made under this plan. They still count: a "
    "new plan or key for the same data adds to them, and the total is then unknown; the ledgers "
    "that are left give a lower bound"
)
_NAME = "CorN release ledger "
_TITLE = f"{_NAME}6. Never copy or edit it."


@dataclass(frozen=True)
class LedgerEntry:
    """The state of a ledger.

    ``released`` counts all releases that may have been made by any run, the last ``reserved`` of
    which the latest run has reserved without reporting them made. Its steps end before
    ``stop_step``, those of all runs before ``furthest``. ``precision`` is the largest [R⁻¹]_ii
    under which any was made. ``data`` is a keyed digest of the data that the present pass began
    with; this key and the orders of passes follow from ``secret``. Bytes are in hexadecimal.
    """

    plan: str
    agent: int
    terms: PlanTerms
    secret: str = field(repr=False)
    nonce: str = field(repr=False)
    number: int = 0
    released: int = 0
    reserved: int = 0
    stop_step: int = 0
    precision: float = 0.0
    furthest: int = 0
    data: str = field(default="", repr=False)

    def follows(self, earlier: LedgerEntry) -> bool:
        """Return whether an entry of the same ledger is the same, or the one before."""
        mine, other = ((e.plan, e.agent, e.terms, e.secret) for e in (self, earlier))
        return self == earlier or (mine == other and self.number == earlier.number + 1)


@dataclass(frozen=True)
class LedgerRecord:
    """The releases by one ledger, read without opening it; there may have been fewer.

    A ledger that ``is_running`` is open in a process that may add releases.
    """

    path: Path
    plan: str
    expense: Expense
    is_running: bool


def read_ledger(path: Path) -> LedgerRecord:
    """Read a ledger, whether or not a process has it open: then its whole last block counts."""
    with explain_failure(path, "cannot be read"):
        # Asked before and after: a run that ends meanwhile has released more than was read.
        was_running = is_open(path)
        data = path.read_bytes()
        is_running = was_running or is_open(path)
    entry, _ = parse_ledger(data, path)
    releases = min(entry.released, entry.terms.budget.num_steps)
    expense = Expense(entry.terms, entry.precision, releases)
    return LedgerRecord(path, entry.plan, expense, is_running)


def is_open(path: Path) -> bool:
    """Return whether a process has a ledger open."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@contextlib.contextmanager
def explain_failure(path: Path, what: str) -> Iterator[None]:
    """Name the file in a failure of the system."""
    try:
        yield
    except OSError as error:
        raise FileFormatError(f"{path}: {what}: {error.strerror}") from error


def create_ledger(path: Path, entry: LedgerEntry) -> None:
    """Write a ledger without releases, whole or not at all, and never over another."""
    # Under its own name a ledger is always whole. A link, unlike a rename, fails if another process
    # was faster and has perhaps released already.
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        write_durably(descriptor, 2 * _seal_page(json.dumps(asdict(entry))), at=0)
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


def _seal_page(text: str) -> bytes:
    """Return a page of the file: a title, an entry as JSON, and their checksum."""
    checksum = hashlib.blake2b(encode_fields(_TITLE, text), digest_size=16).hexdigest()
    return f"{_TITLE}\n{text}\n{checksum}\n".encode().ljust(PAGE_BYTES, b"\n")


def parse_ledger(data: bytes, path: Path) -> tuple[LedgerEntry, int]:
    """Return the newest entry, and a page that has it, unless damaged beyond what a crash does."""
    pages = (_parse_page(data[:PAGE_BYTES]), _parse_page(data[PAGE_BYTES:]))
    found = sorted(
        ((entry, page) for page, entry in enumerate(pages) if entry is not None),
        key=lambda each: each[0].number,
    )
    # A crash leaves the same entry twice, or two consecutive ones. Others were put together from
    # two versions of the file, and a still newer one may be lost.
    if len(data) == FILE_BYTES and found and found[-1][0].follows(found[0][0]):
        return found[-1]
    why = "damaged, or not a release ledger"
    if data.startswith(_NAME.encode()) and not data.startswith(_TITLE.encode()):
        why = "a release ledger of another version of CorN, which this one cannot read"
    raise FileFormatError(f"{path}: {why}. {LOST_COUNT}")


def _parse_page(page: bytes) -> LedgerEntry | None:
    # The text is ASCII, so that decoding as Latin-1 changes nothing.
    lines = page.decode("latin-1").split("\n")
    if len(lines) < 2 or page != _seal_page(lines[1]):
        return None
    fields = json.loads(lines[1])
    try:
        return LedgerEntry(**fields | {"terms": build(PlanTerms, fields["terms"], "the terms")})
    except InvalidArgumentError:
        return None


def _require_owner(path: Path, found: LedgerEntry, asked: LedgerEntry) -> None:
    if (found.plan, found.agent, found.terms) != (asked.plan, asked.agent, asked.terms):
        raise FileFormatError(
            f"{path}: the release ledger of agent {found.agent} under plan {found.plan}, not of "
            f"agent {asked.agent} under plan {asked.plan} with its terms"
        )


LAST_STEP = 10**15  # that a ledger reserves: no plan has more
STEPS_PER_BLOCK = 64  # the most that one durable write reserves, and so that a crash costs
_BLOCKS_PER_PLAN = 50
_DERIVATION = b"corn/ledger/1"


class BudgetSpentError(CornError):
    """Every release that the plan allows was made, or may have been: stop, and keep the model.

    ``public_reason`` is the reason as other agents may know it; the message names a file.
    """

    public_reason = "all releases that its plan allows were made"


@final
class ReleaseLedger:
    """A count of one agent's releases under one plan; open it with :meth:`open`, in one process.

    ``next_step`` is the first step that this run may still release. ``first_free_step`` comes after
    all steps that earlier runs reserved: an agent that comes back to a run whose nonce it has used
    before must not release an earlier one. ``num_skipped`` is the number of releases that this run
    gives up to begin a new pass.
    """

    def __init__(self, path: Path, descriptor: int, entry: LedgerEntry, newest_page: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self._terms = entry.terms
        self._max_releases = entry.terms.budget.num_steps
        self._entry = entry
        self._newest_page = newest_page
        # A crash must leave most of a short plan.
        self._block = min(STEPS_PER_BLOCK, max(1, self._max_releases // _BLOCKS_PER_PLAN))
        self._knows_data = entry.terms.budget.query.steps_per_pass is None
        self._released = min(entry.released, self._max_releases)
        self.next_step = 0
        self._has_released = False
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._failure = ""
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
        """
        plan = check_fingerprint(plan_fingerprint).hex()
        require_count("agent", agent, least=0)
        # A nonce that nobody knows: there is no run that anybody could go on with.
        secret, nonce = (secrets.token_hex(size) for size in (SECRET_BYTES, NONCE_BYTES))
        new = LedgerEntry(plan, agent, terms, secret, nonce)
        with explain_failure(path, "cannot be opened"):
            if not path.exists():
                create_ledger(path, new)
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
            entry, page = parse_ledger(os.pread(descriptor, FILE_BYTES + 1, 0), path)
            _require_owner(path, entry, new)
            entry = replace(entry, precision=max(entry.precision, precision))
            ledger = cls(path, descriptor, entry, page)
            if continues:
                ledger.next_step = ledger._entry.stop_step
                ledger._has_released = ledger.next_step > 0
                # The process may end after one release: more than that would be lost.
                ledger._block = 1
            else:
                nonce = secrets.token_hex(NONCE_BYTES)
                ledger._write(nonce=nonce, reserved=0, stop_step=0)
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

    def __repr__(self) -> str:
        return f"ReleaseLedger({self.remaining} of {self._max_releases} releases remain)"

    def make_choices(self, data: bytes | None) -> SecretChoices:
        """Return secret coins for this run, and the secret orders of passes through its data.

        In a pass a sample may be in one batch only. So a run with other data than the present pass
        began with begins a new pass: it skips the numbers that are left of the present one, and
        they count as spent from the first release on. Then every pass has one data set and one
        order, and no sample is in more batches than passes are counted. ``data`` is a digest of all
        samples in their order; None is taken for other data. Raises ``BudgetSpentError`` if
        releases remain, but none after the present pass.
        """
        with self._lock:
            self._check_usable()
            rule = "called before the first release"
            require(not self._has_released, "make_choices", rule, "one")
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
        the disk. The release counts even if the message is not sent.
        Raises ``BudgetSpentError`` if nothing remains.
        """
        with self._lock:
            self._check_usable()
            advice = "its noise may have been released; to go back, open the ledger again"
            require_count("step", step, least=self.next_step, most=LAST_STEP, advice=advice)
            # Otherwise the release could be of other data than the rest of its pass.
            require(self._knows_data, "make_choices", "called before releases in passes", "none")
            if self.remaining == 0:
                raise BudgetSpentError(
                    f"{self._path}: all {self._max_releases} releases of the plan are spent"
                )
            # On the disk before the message leaves: after a crash a release that the file does not
            # count could be made again.
            if step >= self._entry.stop_step:
                reserved = min(self._block, self.remaining)
                self._write(
                    released=self._released + reserved,
                    reserved=reserved,
                    stop_step=step + reserved,
                    furthest=max(step + reserved, self._entry.furthest),
                )
            self.next_step = step + 1
            self._has_released = True
            self._released += 1
            return self._released - 1

    def join_run(self, step: int) -> None:
        """Take part from a step on in a run under way, whose nonce this ledger did not choose."""
        with self._lock:
            # Whoever names the nonce may name that of any run. Only new steps are safe under all.
            advice = "earlier steps may have been released under the nonce of this run"
            require_count("step", step, least=self.first_free_step, most=LAST_STEP, advice=advice)
            self.next_step = max(step, self.next_step)

    def close(self) -> None:
        """End the run and give back reserved steps that were not released; idempotent."""
        with self._lock:
            if self._descriptor < 0:
                return
            try:
                # Neither after a failed write, when the file's content is unknown, nor in a fork,
                # while its parent goes on counting. A run without a release leaves no trace.
                is_own = not self._failure and self._process == os.getpid()
                if is_own and self._entry.reserved:
                    self._write(released=self._released, reserved=0, stop_step=self.next_step)
            finally:
                os.close(self._descriptor)
                self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _derive(self, *fields: str | bytes) -> bytes:
        """Return bytes that follow from the ledger's secret, for one purpose."""
        return hashlib.blake2b(
            encode_fields(*fields),
            key=bytes.fromhex(self._entry.secret),
            digest_size=SECRET_BYTES,
            person=_DERIVATION,
        ).digest()

    def _write(self, **changes: Any) -> None:
        entry = replace(self._entry, number=self._entry.number + 1, **changes)
        content = _seal_page(json.dumps(asdict(entry)))
        # The page with the newest entry is written last, once the other is on the disk: a crash can
        # tear one page only.
        try:
            for page in (1 - self._newest_page, self._newest_page):
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
        """Return the privacy of all releases together at δ; see ``compose_expenses``."""
        return compose_expenses(self.expenses, delta, unit=unit)


def ledger_path(folder: Path, agent: int, plan: str) -> Path:
    """Return where an agent's ledger under a plan lies, by the plan's fingerprint."""
    # One ledger per plan: a budget is one plan's, and releases under another do not count to it.
    return folder / f"agent-{agent}-{plan[:16]}.ledger"


def find_agents(folder: Path) -> list[int]:
    """Return the agents that have a key or a ledger in a folder, of which there must be some."""
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
        key = folder / f"agent-{agent}.key"
        # Ledgers may be kept after their key was destroyed.
        used = list_used_plans(key) if key.exists() else ()
        expected = (ledger_path(folder, agent, plan) for plan in used)
        problems += [explain_missing(path) for path in expected if not path.exists()]
    return ReleaseHistory(agent, tuple(records), tuple(problems))


def explain_missing(path: Path) -> str:
    """Return why a plan whose ledger is gone cannot be used again, and what that does."""
    return f"{path}: is missing, although the key beside it was used with this plan. {LOST_COUNT}"
