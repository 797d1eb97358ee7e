"""Shared and private files are apart, and a checkpoint is whole and the agent's own, or refused."""

import errno
import os
from pathlib import Path

import pytest
import torch

from corn.distributed.storage import (
    CheckpointFolder,
    Folders,
    forget_after,
    list_checkpoints,
    make_folders,
)
from corn.errors import CornError, FileFormatError
from corn.plan import Plan

from .harness import require_private, small_plan

PLAN = small_plan("ring:3", 12)
OTHER = small_plan("ring:3", 13)


def test_existing_folders_are_closed_to_others(tmp_path: Path) -> None:
    (tmp_path / "private/agent-1").mkdir(mode=0o755, parents=True)
    folders = make_folders(tmp_path, 1)
    assert folders == Folders(tmp_path / "shared/agent-1", tmp_path / "private/agent-1")
    assert folders.shared.is_dir()
    require_private(tmp_path / "private")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "private").write_text("in the way", encoding="utf-8")
    with pytest.raises(CornError, match=r"private: cannot be used: File exists"):
        make_folders(tmp_path, 1)


def save(folder: Path, step: int) -> None:
    parameters = torch.arange(5, dtype=torch.float32) + step
    CheckpointFolder(folder, PLAN, 2).save(step, parameters, step + 7, {})


def load(folder: Path, step: int, *, agent: int = 2, plan: Plan = PLAN) -> torch.Tensor:
    return CheckpointFolder(folder, plan, agent).load(step)[0]


def test_a_checkpoint_is_loaded_as_saved_and_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (0, 10, 20, 100, 110):
        save(tmp_path, step)
    assert list_checkpoints(tmp_path) == {20, 100, 110}
    parameters, num_releases, _ = CheckpointFolder(tmp_path, PLAN, 2).load(110)
    assert parameters.tolist() == [110, 111, 112, 113, 114]
    assert num_releases == 117


def test_copies_under_other_names_are_no_checkpoints(tmp_path: Path) -> None:
    save(tmp_path, 10)
    for name in ("checkpoint-before-update-2026.corn", "checkpoint-a-3000.corn"):
        (tmp_path / name).write_bytes(b"")
    assert list_checkpoints(tmp_path) == {10}


def test_the_state_of_an_optimizer_is_saved_with_the_model(tmp_path: Path) -> None:
    state = {"memory": torch.arange(5.0), "number 0 step": torch.tensor(3)}
    save_to = CheckpointFolder(tmp_path, PLAN, 2)
    save_to.save(3, torch.ones(5), 3, state)
    parameters, _, found = save_to.load(3)
    assert parameters.tolist() == [1] * 5
    assert {name: own.tolist() for name, own in found.items()} == {
        "memory": [0, 1, 2, 3, 4],
        "number 0 step": 3,
    }


def test_files_of_later_steps_are_removed(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)
    models = tmp_path / "shared" / "models"
    models.mkdir(parents=True)
    for step in (10, 20):
        (models / f"step-{step}.bin").touch()
    assert forget_after(Folders(tmp_path / "shared", tmp_path), 10) == 3
    assert list_checkpoints(tmp_path) == {10}
    assert [path.name for path in models.iterdir()] == ["step-10.bin"]


def test_damage_is_found_at_every_position(tmp_path: Path) -> None:
    save(tmp_path, 10)
    path = tmp_path / "checkpoint-10.corn"
    whole = path.read_bytes()
    for position in (0, 20, 40, 60, len(whole) - 1):
        damaged = bytearray(whole)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(FileFormatError, match=r"10\.corn: not a checkpoint, or a damaged one"):
            load(tmp_path, 10)
    path.write_bytes(whole[:-4])
    with pytest.raises(FileFormatError, match="damaged"):
        load(tmp_path, 10)


def test_a_checkpoint_of_another_agent_or_plan_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 10)
    for agent, plan in ((3, PLAN), (2, OTHER)):
        with pytest.raises(FileFormatError, match="of another plan, agent or step"):
            load(tmp_path, 10, agent=agent, plan=plan)
    with pytest.raises(FileFormatError, match=r"11\.corn: cannot be used: No such file"):
        load(tmp_path, 11)


def test_a_run_resumes_only_with_its_own_model_and_ledger(tmp_path: Path) -> None:
    save(tmp_path, 10)  # five parameters, after 17 releases
    checkpoints = CheckpointFolder(tmp_path, PLAN, 2)
    assert checkpoints.find(num_parameters=5, num_releases=17, resume=True) == {10}
    for parameters, releases in ((6, 17), (5, 16)):
        # An agent that rejoins a run needs no checkpoint, but those it has must fit its ledger.
        for rejoins in (False, True):
            with pytest.raises(FileFormatError, match=r"checkpoint-10\.corn"):
                checkpoints.find(
                    num_parameters=parameters,
                    num_releases=releases,
                    resume=not rejoins,
                    rejoins=rejoins,
                )
    assert not checkpoints.find(num_parameters=5, num_releases=17, resume=False, rejoins=True)


def test_a_full_disk_is_one_line_and_keeps_earlier_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 10)

    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(CornError, match=r"20\.corn: cannot be used: No space"):
        save(tmp_path, 20)
    assert list_checkpoints(tmp_path) == {10}
    assert load(tmp_path, 10)[0] == 10
