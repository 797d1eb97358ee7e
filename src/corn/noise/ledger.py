"""The release ledger: no noise is released twice, and no plan is released more than it allows.

Two messages with the same noise and other data differ by a noise-free gradient, and the privacy of
a plan holds for T releases and no more. So before the message of a step leaves, the step is
reserved in a file that survives a crash. A restart takes a new nonce, under which all noise is new,
and counts every reserved step as released. (A ledger restored from a backup has no record of later
releases: the count is then wrong, and an agent that comes back to a run could release a step again.
Never copy a ledger.)

The file (:mod:`corn.noise.ledger_file`) also has the terms of the promise, from which
:mod:`corn.noise.history` adds up what all plans of an agent cost together.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

from corn.errors import CornError, InvalidArgumentError
from corn.noise.address import NONCE_BYTES, check_fingerprint, check_nonce, encode_fields
from corn.noise.ledger_file import (
    FILE_BYTES,
    PAGE_BYTES,
    STEPS_PER_BLOCK,
    LedgerEntry,
    create_ledger,
    explain_failure,
    format_page,
    lock_ledger,
    make_header,
    read_entry,
    write_durably,
)
from corn.privacy.composition import PlanTerms

_BLOCKS_PER_PLAN = 50


class BudgetSpentError(CornError):
    """Every release that the plan allows was made, or may have been: stop, and keep the model.

    Attributes:
        public_reason: what other agents may know; the message names the ledger's file.
    """

    public_reason = "all releases that its plan allows were made"


@final
class ReleaseLedger:
    """A count of one agent's releases under one plan; open it with :meth:`open`, in one process.

    ``reserved_before`` is the number of releases that the previous run had reserved when it
    crashed. All of them count, though it may not have made them. ``first_free_step`` comes after
    all steps that earlier runs reserved. An agent that comes back to a run whose nonce it has used
    before must not release an earlier one.

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
        self, path: Path, descriptor: int, *, header: str, entry: LedgerEntry, max_releases: int
    ) -> None:
        self._path, self._descriptor, self._header = path, descriptor, header
        self._entry, self._max_releases = entry, max_releases
        self._released = self._next_step = 0
        self._process, self._lock = os.getpid(), threading.Lock()
        self._failure = ""
        self.reserved_before = self.first_free_step = 0

    @classmethod
    def open(
        cls, path: Path, *, plan_fingerprint: bytes, agent: int, terms: PlanTerms, precision: float
    ) -> ReleaseLedger:
        """Open a ledger, or create it, and begin a run under a nonce never used before.

        Args:
            path: of the file.
            plan_fingerprint: of the plan.
            agent: its number under the plan.
            terms: of the plan for this agent.
            precision: the largest [R⁻¹]_ii under which this run may release; of all runs, the
                largest is kept.

        Raises:
            FileFormatError: the file is damaged, or is another plan's or agent's.
            CornError: another process has it open, or it cannot be written.
        """
        header = make_header(plan_fingerprint, agent, terms)
        max_releases = terms.budget.num_steps
        with explain_failure(path, "cannot be opened"):
            if not path.exists():
                create_ledger(path, header)
            descriptor = os.open(path, os.O_RDWR)
        try:
            # Locked before it is read: two processes that both read the same count would both
            # release what remains.
            lock_ledger(descriptor, path)
            entry, lost = read_entry(
                os.pread(descriptor, FILE_BYTES + 1, 0), header=header, name=str(path)
            )
            ledger = cls(path, descriptor, header=header, entry=entry, max_releases=max_releases)
            ledger.reserved_before = entry.stop_step - entry.first_step + lost
            # Steps may skip, so a lost entry may have reserved any step of the plan.
            ledger.first_free_step = max(entry.furthest, max_releases if lost else 0)
            # Written again: the entry that replaces a lost one hides that there was one.
            ledger._start_run(
                settled=min(entry.spent + lost, max_releases),
                precision=max(entry.precision, precision),
                furthest=ledger.first_free_step,
            )
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

    @property
    def precision(self) -> float:
        """The largest [R⁻¹]_ii under which any run of this ledger may have released."""
        return self._entry.precision

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
                self._write(
                    released=self._released,
                    first_step=step,
                    stop_step=stop,
                    furthest=max(stop, self._entry.furthest),
                )
            number = self._entry.settled + self._released
            self._next_step = step + 1
            self._released += 1
            return number

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
            self._next_step = max(step, self._next_step)

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

    def _start_run(self, *, settled: int, **changes: Any) -> None:
        nonce = secrets.token_hex(NONCE_BYTES)
        self._write(nonce=nonce, settled=settled, released=0, first_step=0, stop_step=0, **changes)
        self._released = self._next_step = 0

    def _write(self, **changes: Any) -> None:
        entry = replace(self._entry, number=self._entry.number + 1, **changes)
        page = format_page(entry.format(), header=self._header)
        try:
            write_durably(self._descriptor, page, at=PAGE_BYTES * (1 + entry.number % 2))
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
