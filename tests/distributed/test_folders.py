"""What may be handed out and what is private are in different folders, whoever made these."""

from pathlib import Path

import pytest
import torch
from torch import nn

from corn.distributed.folders import Folders, make_folders
from corn.distributed.recording import Account, Measuring, Recorder
from corn.errors import CornError
from corn.learn import Constant
from corn.learn.tasks import ModuleTask

from .harness import require_private, small_plan

PLAN = small_plan("ring:3", 12)
SAMPLES = torch.eye(4), torch.tensor([0, 1, 0, 1])


def test_folders_that_were_there_are_closed_to_others(tmp_path: Path) -> None:
    (tmp_path / "private/agent-1").mkdir(mode=0o755, parents=True)
    folders = make_folders(tmp_path, 1, is_rehearsal=False)
    assert folders == Folders(tmp_path / "shared/agent-1", tmp_path / "private/agent-1")
    assert folders.shared.is_dir()
    require_private(tmp_path / "private")


def test_a_rehearsal_shares_nothing(tmp_path: Path) -> None:
    folders = make_folders(tmp_path, 1, is_rehearsal=True)
    assert folders.shared == tmp_path / "private/rehearsal/agent-1"
    assert [path.name for path in tmp_path.iterdir()] == ["private"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "private").write_text("in the way", encoding="utf-8")
    with pytest.raises(CornError, match=r"private: cannot be made: File exists"):
        make_folders(tmp_path, 1, is_rehearsal=False)


def test_private_notes_are_told_and_written_to_the_owner_alone(tmp_path: Path) -> None:
    told: list[tuple[str, str]] = []
    recorder = Recorder(
        1,
        PLAN.mechanism,
        Constant(0.5),
        Account(PLAN.budget, PLAN.precision_cap),
        Measuring(
            ModuleTask(nn.Linear(4, 2), nn.functional.cross_entropy),
            {"train": SAMPLES},
            frozenset({0}),
        ),
        seed=0,
        folders=make_folders(tmp_path, 1, is_rehearsal=False),
        checkpoint_every=100,
        plan_fingerprint=bytes(32),
        count_releases=lambda: 0,
        describe_traffic=lambda: (2, 0),
        on_note=lambda text: told.append(("all", text)),
        on_private_note=lambda text: told.append(("owner", text)),
    )
    recorder.note("went on without agent 2")
    recorder.note_privately("its data has 3 outliers")
    recorder.note_privately("its data has\n4 outliers")
    assert recorder.notes == ["went on without agent 2"]
    assert [who for who, _ in told] == ["all", "owner", "owner"]
    written = (tmp_path / "private/agent-1/notes.txt").read_text(encoding="utf-8")
    assert written == "its data has 3 outliers\nits data has 4 outliers\n"
    require_private(tmp_path / "private")
