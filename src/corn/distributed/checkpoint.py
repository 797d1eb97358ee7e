"""One agent's checkpoints: its model after a step, whole or not there, the newest few kept.

The model is public: a mixture of messages that have been sent. With it goes how many releases the
ledger had counted, so that no run goes on from it with a ledger that has not. The noise of steps
that are run again is new, by the ledger; it is never restored from here.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from corn.distributed.folders import Folders
from corn.errors import CornError, FileFormatError
from corn.files import writing_whole

_NAME = re.compile(r"checkpoint-(\d+)\.corn")
_IN_EARNEST, _REHEARSAL = b"corn checkpoint 2\n", b"corn rehearsal checkpoint 2\n"
_DIGEST_BYTES, _NUMBER_BYTES = 32, 8


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model, and how many releases its agent had made by then, restarts included."""

    parameters: Tensor
    num_releases: int


def save_checkpoint(
    folder: Path,
    *,
    plan_fingerprint: bytes,
    agent: int,
    step: int,
    checkpoint: Checkpoint,
    is_rehearsal: bool = False,
    num_kept: int = 3,
) -> None:
    """Write the model after ``step`` steps; a crash while writing leaves the ones before."""
    head = _kind(is_rehearsal) + plan_fingerprint + _place(agent, step)
    parameters = checkpoint.parameters.cpu().numpy().tobytes()
    content = head + _number(checkpoint.num_releases) + parameters
    target = folder / f"checkpoint-{step}.corn"
    try:
        with writing_whole(target, durable=True, is_private=True) as partial:
            partial.write_bytes(content + hashlib.sha256(content).digest())
    except OSError as error:
        raise CornError(f"agent {agent}: {target}: cannot be written: {error.strerror}") from error
    for old in sorted(list_steps(folder))[:-num_kept]:
        (folder / f"checkpoint-{old}.corn").unlink(missing_ok=True)


def load_checkpoint(
    folder: Path,
    *,
    plan_fingerprint: bytes,
    agent: int,
    step: int,
    dtype: torch.dtype,
    is_rehearsal: bool = False,
) -> Checkpoint:
    """Read the model after ``step`` steps; damaged, or another plan's or agent's, is refused.

    So is a rehearsal's in a run in earnest: no privacy covers it, and all later models follow it.
    """
    path = folder / f"checkpoint-{step}.corn"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FileFormatError(f"agent {agent}: {path}: cannot be read: {error.strerror}") from error
    content, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    is_whole = hashlib.sha256(content).digest() == digest
    if not content.startswith((_IN_EARNEST, _REHEARSAL)) or not is_whole:
        raise FileFormatError(
            f"agent {agent}: {path}: not a checkpoint, or a damaged one: remove it to go on from "
            "another"
        )
    if not content.startswith(_kind(is_rehearsal)):
        found = "a run in earnest" if is_rehearsal else "a rehearsal, which protects nothing"
        raise FileFormatError(f"agent {agent}: {path}: of {found}: use another folder")
    head = _kind(is_rehearsal) + plan_fingerprint + _place(agent, step)
    if not content.startswith(head):
        raise FileFormatError(f"agent {agent}: {path}: of another plan, agent or step")
    name = "float32" if dtype == torch.float32 else "float64"
    start = len(head) + _NUMBER_BYTES
    parameters = torch.from_numpy(np.frombuffer(content, dtype=name, offset=start).copy())
    return Checkpoint(parameters, int.from_bytes(content[len(head) : start], "big"))


def list_steps(folder: Path) -> set[int]:
    """The steps after which there is a checkpoint, readable or not."""
    found = (_NAME.fullmatch(path.name) for path in folder.glob("checkpoint-*.corn"))
    return {int(match[1]) for match in found if match}


def find_paid(folder: Path) -> set[int]:
    """The steps after which there is a checkpoint that is not a rehearsal's."""
    return {
        step
        for step in list_steps(folder)
        if not (folder / f"checkpoint-{step}.corn").read_bytes().startswith(_REHEARSAL)
    }


def forget_after(folders: Folders, step: int) -> int:
    """Remove checkpoints and models of later steps, which are done anew; say how many files."""
    num_removed = 0
    for path in (
        *folders.private.glob("checkpoint-*.corn"),
        *folders.shared.glob("models/step-*.bin"),
    ):
        number = path.stem.rpartition("-")[2]
        if number.isdecimal() and int(number) > step:
            path.unlink(missing_ok=True)
            num_removed += 1
    return num_removed


def _kind(is_rehearsal: bool) -> bytes:
    return _REHEARSAL if is_rehearsal else _IN_EARNEST


def _place(agent: int, step: int) -> bytes:
    return _number(agent) + _number(step)


def _number(value: int) -> bytes:
    return value.to_bytes(_NUMBER_BYTES, "big")
