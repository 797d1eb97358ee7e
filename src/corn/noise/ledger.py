"""The release ledger: no noise is released twice, and no plan is released more than it allows.

Two messages with the same noise and other data differ by a noise-free gradient, and the privacy of
a plan holds for T releases and no more. So before the message of a step leaves, the step is
reserved in a file that survives a crash. A restart takes a new nonce, under which all noise is new,
and counts every reserved step as released. (A ledger restored from a backup has no record of later
releases: the count is then wrong, and an agent that comes back to a run could release a step again.
Never copy a ledger.)

Where samples are taken in passes, the ledger also keeps the secret of their orders and a digest of
the data, so that new keys or other data cannot put a sample into two batches of one pass.

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

from corn.checks import require, require_count
from corn.errors import CornError, InvalidArgumentError
from corn.files import require_private
from corn.noise.address import NONCE_BYTES, check_fingerprint, check_nonce, encode_fields
from corn.noise.choices import SecretChoices
from corn.noise.keys import SECRET_BYTES, Secret
from corn.noise.ledger_file import (
    FILE_BYTES,
    NO_NONCE,
    LedgerEntry,
    create_ledger,
    explain_failure,
    lock_ledger,
    make_header,
    read_entry,
    write_entry,
)
from corn.privacy.composition import Expense, PlanTerms

LAST_STEP = 10**15
"""The last step that a ledger reserves: no plan has more, and nobody else may name a later one."""

STEPS_PER_BLOCK = 64
"""The most steps that one durable write reserves, and so the most releases that a crash costs."""

_BLOCKS_PER_PLAN = 50
_DERIVATION = b"corn/ledger/1"


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
        self._path, self._descriptor, self._header = path, descriptor, header
        self._terms, self._max_releases = terms, terms.budget.num_steps
        self._entry, self._newest_page = entry, newest_page
        self._block = steps_per_block(self._max_releases)
        self._knows_data = terms.budget.query.steps_per_pass is None
        self._released = self._next_step = 0
        self._process, self._lock = os.getpid(), threading.Lock()
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

        Args:
            path: of the file.
            plan_fingerprint: of the plan.
            agent: its number under the plan.
            terms: of the plan for this agent.
            precision: the largest [R⁻¹]_ii under which this run may release; of all runs, the
                largest is kept.
            continues: go on with the latest run, under its nonce, after all steps that it has
                reserved: for a process that lives for one release.

        Raises:
            FileFormatError: the file is damaged, is another plan's or agent's, or can be used by
                others than its owner.
            CornError: another process has it open, or it cannot be written.
        """
        header = make_header(plan_fingerprint, agent, terms)
        with explain_failure(path, "cannot be opened"):
            if not path.exists():
                create_ledger(path, header)
            descriptor = os.open(path, os.O_RDWR)
        try:
            # It has nonces, which with the keys give the noise, and the secret of the orders.
            require_private(path)
            # Locked before it is read: two processes that both read the same count would both
            # release what remains.
            lock_ledger(descriptor, path)
            data = os.pread(descriptor, FILE_BYTES + 1, 0)
            entry, page = read_entry(data, header=header, name=str(path))
            entry = replace(entry, precision=max(entry.precision, precision))
            ledger = cls(
                path, descriptor, header=header, terms=terms, entry=entry, newest_page=page
            )
            if continues:
                ledger._continue_run()
            else:
                ledger._start_run(settled=min(entry.spent, terms.budget.num_steps))
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

    @property
    def expense(self) -> Expense:
        """All releases under the plan so far, of this run and of earlier ones."""
        return Expense(self._terms, self.precision, self._max_releases - self.remaining)

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
        order, and no sample is in more batches than passes are counted.

        Args:
            data: a digest of all samples in their order; None if there is none, which is taken for
                other data. It matters under sampling in passes only.

        Raises:
            BudgetSpentError: releases remain, but none after the present pass.
            InvalidArgumentError: this run has released already.
        """
        with self._lock:
            self._check_usable()
            require(not self._released, "make_choices", "called before the first release", "one")
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
        settled = self._entry.settled
        skipped = min(-settled % length, self.remaining)
        if skipped and skipped == self.remaining:
            raise BudgetSpentError(
                f"{self._path}: {skipped} of {self._max_releases} releases remain, all in a pass "
                "that an earlier run began with other data: only that data may be used for them"
            )
        self.num_skipped += skipped
        # Written with the first reservation: a run that is refused before it costs nothing.
        self._entry = replace(self._entry, settled=settled + skipped, data=found.hex())

    def keep_nonce(self, nonce: bytes) -> None:
        """Keep the nonce that all agents agreed on for this run, from the next durable write on.

        Raises:
            InvalidArgumentError: an earlier release of the run was under another one.
        """
        agreed = check_nonce(nonce).hex()
        with self._lock:
            if self._entry.agreed not in (NO_NONCE, agreed):
                raise InvalidArgumentError("nonce must be the same for all releases of a run")
            self._entry = replace(self._entry, agreed=agreed)

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
                    "been released; to go back, take a new nonce with renew_nonce()"
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
            require_count("step", step, least=0, most=LAST_STEP)
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

    def _start_run(self, *, settled: int) -> None:
        self._write(
            nonce=secrets.token_hex(NONCE_BYTES),
            agreed=NO_NONCE,
            settled=settled,
            released=0,
            first_step=0,
            stop_step=0,
        )
        self._released = self._next_step = 0

    def _continue_run(self) -> None:
        entry = self._entry
        self._released = entry.released + self.reserved_before
        self._next_step = entry.stop_step
        # The process may end after one release: more than that would be lost.
        self._block = 1

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
        try:
            write_entry(self._descriptor, entry, header=self._header, newest_page=self._newest_page)
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
