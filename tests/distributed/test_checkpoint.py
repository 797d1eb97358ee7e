"""A checkpoint is whole, this agent's and this plan's, or it is refused by name."""

import errno
import os
from pathlib import Path

import pytest
import torch

from corn.distributed.checkpoint import (
    Checkpoint,
    forget_after,
    list_steps,
    load_checkpoint,
    save_checkpoint,
)
from corn.distributed.folders import Folders
from corn.errors import CornError, FileFormatError

PLAN = b"p" * 32


def save(folder: Path, step: int, *, agent: int = 2) -> None:
    parameters = torch.arange(5, dtype=torch.float32) + step
    checkpoint = Checkpoint(parameters, num_releases=step + 7)
    save_checkpoint(folder, plan_fingerprint=PLAN, agent=agent, step=step, checkpoint=checkpoint)


def load(folder: Path, step: int, *, agent: int = 2, plan: bytes = PLAN) -> Checkpoint:
    return load_checkpoint(
        folder, plan_fingerprint=plan, agent=agent, step=step, dtype=torch.float32
    )


def test_what_is_saved_comes_back_and_the_newest_few_are_kept(tmp_path: Path) -> None:
    for step in (0, 10, 20, 100, 110):
        save(tmp_path, step)
    assert list_steps(tmp_path) == {20, 100, 110}
    found = load(tmp_path, 110)
    assert found.parameters.tolist() == [110, 111, 112, 113, 114]
    assert found.num_releases == 117


def test_later_steps_are_forgotten(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)
    models = tmp_path / "shared" / "models"
    models.mkdir(parents=True)
    for step in (10, 20):
        (models / f"step-{step}.bin").touch()
    assert forget_after(Folders(tmp_path / "shared", tmp_path), 10) == 3
    assert list_steps(tmp_path) == {10}
    assert [path.name for path in models.iterdir()] == ["step-10.bin"]


def test_damage_is_found_wherever_it_is(tmp_path: Path) -> None:
    save(tmp_path, 10)
    path = tmp_path / "checkpoint-10.corn"
    whole = path.read_bytes()
    for position in (0, 20, 40, 60, len(whole) - 1):
        damaged = bytearray(whole)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(FileFormatError, match=r"agent 2: .*not a checkpoint, or a damaged one"):
            load(tmp_path, 10)
    path.write_bytes(whole[:-4])
    with pytest.raises(FileFormatError, match="damaged"):
        load(tmp_path, 10)


def test_another_agents_or_plans_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 10)
    for other in ({"agent": 3}, {"plan": b"q" * 32}):
        with pytest.raises(FileFormatError, match="of another plan, agent or step"):
            load(tmp_path, 10, **other)
    with pytest.raises(FileFormatError, match=r"agent 2: .*cannot be read: No such file"):
        load(tmp_path, 11)


def test_a_rehearsal_is_never_gone_on_from_in_earnest(tmp_path: Path) -> None:
    where = {"plan_fingerprint": PLAN, "agent": 2, "step": 10}
    checkpoint = Checkpoint(torch.zeros(5), 10)
    save_checkpoint(tmp_path, checkpoint=checkpoint, is_rehearsal=True, **where)  # type: ignore[arg-type]
    with pytest.raises(FileFormatError, match="of a rehearsal, which protects nothing"):
        load(tmp_path, 10)
    again = load_checkpoint(tmp_path, dtype=torch.float32, is_rehearsal=True, **where)  # type: ignore[arg-type]
    assert len(again.parameters) == 5


def test_a_full_disk_is_one_line_and_spoils_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 10)

    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(CornError, match=r"agent 2: .*20\.corn: cannot be written: No space"):
        save(tmp_path, 20)
    assert list_steps(tmp_path) == {10}
    assert load(tmp_path, 10).parameters[0] == 10
