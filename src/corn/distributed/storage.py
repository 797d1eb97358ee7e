"""Files of a run: a folder to publish, a private one, models, tables and checkpoints.

Nothing that is computed from private data without noise is in the shared folder.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from corn.distributed.rejoin import decode_state, encode_state
from corn.errors import FileFormatError
from corn.files import writing_whole
from corn.learn.metrics import COLUMNS, SHARED_COLUMNS, Row
from corn.plan import Plan, fingerprint

_HEAD = b"corn checkpoint 4\n"
_DIGEST_BYTES = 32
# Names among the tensors of a checkpoint.
_MODEL, _OWNER, _RELEASES = "model", "plan, agent and step", "releases"
_TEXT_COLUMNS = ("mechanism", "step_size", "unit")


@dataclass(frozen=True)
class Folders:
    """The folders of a run or an agent: ``shared`` may be published, ``private`` must not be."""

    shared: Path
    private: Path

    @classmethod
    def of_run(cls, out: Path) -> Folders:
        """Return the two folders in the folder of a run."""
        return cls(out / "shared", out / "private")

    def of_agent(self, agent: int) -> Folders:
        """Return one agent's part of both."""
        name = f"agent-{agent}"
        return Folders(self.shared / name, self.private / name)

    def make(self) -> None:
        """Make both folders; only the owner can open the private one, even if it existed before."""
        # The mode of mkdir counts for new folders only.
        with naming_failure(self.private):
            self.private.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.private.chmod(0o700)
        with naming_failure(self.shared):
            self.shared.mkdir(parents=True, exist_ok=True)


def make_folders(out: Path, agent: int) -> Folders:
    """Make the folders of a run and those of one of its agents, and return the latter."""
    run = Folders.of_run(out)
    run.make()
    own = run.of_agent(agent)
    own.make()
    return own


@contextmanager
def naming_failure(path: Path) -> Iterator[None]:
    """Name a file or folder in a failure to use it."""
    try:
        yield
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be used: {error.strerror}") from error


def read_model(folder: Path, step: int, plan: Plan, num_parameters: int | None = None) -> Tensor:
    """Return the model that an agent shared after a step."""
    path = folder / "models" / f"step-{step}.bin"
    with naming_failure(path):
        values = np.fromfile(path, dtype=plan.dtype)
    # A power failure may cut a file short.
    if num_parameters not in (None, len(values)):
        raise FileFormatError(f"{path}: has {len(values)} parameters, not {num_parameters}")
    return torch.from_numpy(values)


def read_rows(path: Path) -> dict[int, Row]:
    """Return an agent's measurements by step; empty if it was lost before it had any."""
    if not path.exists():
        return {}
    try:
        with path.open(newline="", encoding="utf-8") as stream:
            table = csv.DictReader(stream)
            if tuple(table.fieldnames or ()) not in (COLUMNS, SHARED_COLUMNS):
                raise FileFormatError(f"{path}: not a table of measurements")
            rows: list[Row] = [{name: _parse(name, row[name]) for name in row} for row in table]
    # The type error is for a line with more or fewer cells.
    except (OSError, TypeError, ValueError, csv.Error) as error:
        why = f"not a table of measurements, or cut short: {error}"
        raise FileFormatError(f"{path}: {why}") from error
    return {int(row["step"]): row for row in rows}


def _parse(name: str, text: str) -> str | float:
    if name in _TEXT_COLUMNS:
        return text
    return int(text) if name in ("seed", "step") else float("nan" if text == "" else text)


@dataclass(frozen=True)
class CheckpointFolder:
    """The checkpoints of one agent under one plan, in its private folder.

    A checkpoint has a model, the number of releases by then, and what momentum or optimizer keep.
    Noise is never restored: steps that are run again draw new noise, by the ledger.
    """

    folder: Path
    plan: Plan
    agent: int

    def path_of(self, step: int) -> Path:
        """Return the file of the checkpoint after ``step`` steps."""
        return self.folder / f"checkpoint-{step}.corn"

    def save(
        self,
        step: int,
        parameters: Tensor,
        num_releases: int,
        state: Mapping[str, Tensor],
        *,
        num_kept: int = 3,
    ) -> None:
        """Write a checkpoint and keep the newest few; a crash while writing leaves those before."""
        # With its owner, so that no file is taken for another's.
        owner, releases = self._name_owner(step), torch.tensor(num_releases)
        tensors = {_MODEL: parameters, _OWNER: owner, _RELEASES: releases, **state}
        content = _HEAD + encode_state(tensors)
        target = self.path_of(step)
        with naming_failure(target), writing_whole(target, durable=True, is_private=True) as file:
            # The digest finds damage.
            file.write_bytes(content + hashlib.sha256(content).digest())
        # Agents save at different moments: several must be kept for all to have one in common.
        for old in sorted(list_checkpoints(self.folder))[:-num_kept]:
            self.path_of(old).unlink(missing_ok=True)

    def load(self, step: int) -> tuple[Tensor, int, dict[str, Tensor]]:
        """Return model, number of releases and state; raise unless this plan, agent and step's."""
        path = self.path_of(step)
        with naming_failure(path):
            data = path.read_bytes()
        content, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
        if not content.startswith(_HEAD) or hashlib.sha256(content).digest() != digest:
            why = f"{path}: not a checkpoint, or a damaged one: remove it to continue from another"
            raise FileFormatError(why)
        state = decode_state(memoryview(content)[len(_HEAD) :])
        if not torch.equal(state.pop(_OWNER), self._name_owner(step)):
            raise FileFormatError(f"{path}: of another plan, agent or step")
        return state.pop(_MODEL), int(state.pop(_RELEASES)), state

    def find(
        self, *, num_parameters: int, num_releases: int, resume: bool, rejoins: bool = False
    ) -> set[int]:
        """Return the steps from which this agent can continue; a damaged checkpoint is an error.

        Without ``resume`` a run begins anew, but not over one that came further. A checkpoint that
        counts more releases than the ledger, ``num_releases``, shows that an older ledger was
        restored.
        """
        steps = list_checkpoints(self.folder)
        if not resume and not rejoins:
            # A new run in the same folder would replace models for which budget was spent.
            if any(steps):
                planned = self.plan.budget.num_steps
                advice = "continue it with --resume, or give another folder with --out"
                if max(steps) == planned:
                    advice = "make a new plan, which adds to the total, and another folder (--out)"
                raise FileFormatError(
                    f"{self.folder}: has a run that came to step {max(steps)} of {planned}: "
                    f"{advice}"
                )
            return set()
        for step in steps:
            parameters, counted, _ = self.load(step)
            path = self.path_of(step)
            if len(parameters) != num_parameters:
                why = f"{path}: has {len(parameters)} parameters, the model {num_parameters}"
                raise FileFormatError(why)
            # With a ledger that has not counted those releases, ε would come out too small.
            if counted > num_releases:
                raise FileFormatError(
                    f"{path}: was made after {counted} releases, but the ledger beside the key "
                    f"counts {num_releases}: it is that of another run (--keys), or an older copy "
                    "of it, which must not be used"
                )
        return set() if rejoins else steps

    def _name_owner(self, step: int) -> Tensor:
        return torch.tensor([*fingerprint(self.plan), self.agent, step])


def list_checkpoints(folder: Path) -> set[int]:
    """Return the steps after which there is a checkpoint, readable or not."""
    paths = folder.glob("checkpoint-*.corn")
    found = {(path.name, step) for path in paths for step in _find_step(path)}
    # A copy under another name is no checkpoint.
    return {step for name, step in found if name == f"checkpoint-{step}.corn"}


def _find_step(path: Path) -> list[int]:
    """Return the step in the name of a file, if there is one."""
    text = path.stem.rpartition("-")[2]
    return [int(text)] if text.isdecimal() else []


def forget_after(folders: Folders, step: int) -> int:
    """Remove checkpoints and models of later steps, which are run anew; return how many files."""
    # Files of both runs side by side would be merged to one table of measurements.
    found = [*folders.private.glob("checkpoint-*.corn"), *folders.shared.glob("models/step-*.bin")]
    later = [path for path in found if any(number > step for number in _find_step(path))]
    for path in later:
        path.unlink(missing_ok=True)
    return len(later)
