"""Journals of agents keep private numbers apart, and are merged to one result of the run."""

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from corn.covariance import ThreatModel
from corn.distributed.journal import Journal
from corn.distributed.launcher import LaunchResult, merge_results
from corn.distributed.messages import Kind
from corn.distributed.results import AgentResult, Failure, RunStatus
from corn.distributed.settings import RunSettings
from corn.distributed.status import AgentState
from corn.distributed.storage import Folders, make_folders, read_rows
from corn.errors import FileFormatError
from corn.learn import Constant
from corn.learn.batches import AgentData
from corn.learn.metrics import COLUMNS, PRIVATE_COLUMNS, SHARED_COLUMNS, Result
from corn.learn.problem import TrainingProblem
from corn.learn.step import StepStatistics
from corn.learn.tasks import ModuleTask

from .harness import require_private, small_plan
from .threads import make_membership

PLAN = small_plan("ring:3", 12, mechanism="ldp", threat=ThreatModel())
SETTINGS = RunSettings(Constant(0.5), evaluate_at=(0, 6))
SAMPLES = torch.eye(4), torch.tensor([0, 1, 0, 1])
TASK = ModuleTask(nn.Linear(4, 2), nn.functional.cross_entropy)
PROBLEM = TrainingProblem(
    TASK,
    AgentData.from_parts([SAMPLES] * 3),
    {"test": SAMPLES},
    public_parts=("validation", "test"),
)


RESULTS = {agent: AgentResult(agent, RunStatus.COMPLETE) for agent in range(3)}


def make_journal(
    out: Path,
    agent: int,
    *,
    is_public: bool = True,
    ledger: object = None,
    on_state: Callable[[AgentState], None] | None = None,
) -> Journal:
    run = SimpleNamespace(
        plan=PLAN,
        settings=SETTINGS,
        agent=agent,
        first_step=0,
        ledger=ledger or FakeLedger(),
        folders=make_folders(out, agent),
        stepper=SimpleNamespace(save=dict),
        exchange=SimpleNamespace(
            membership=make_membership(PLAN.network.graph, agent),
            traffic={},
        ),
    )
    problem = replace(PROBLEM, public_parts=("test",) if is_public else ())
    parts = {"train": SAMPLES, "test": SAMPLES}
    return Journal(run, problem, parts, on_state)  # type: ignore[arg-type]


@dataclass
class FakeLedger:
    """A ledger as far as a journal reads it."""

    remaining: int = 12
    precision: float = float(PLAN.precision_caps[0])


def write_files(out: Path, agent: int, last_step: int, *, is_public: bool = True) -> None:
    """Write an agent's files up to a step; its model and norms are its number."""
    ledger = FakeLedger()
    journal = make_journal(out, agent, is_public=is_public, ledger=ledger)
    model = torch.full((TASK.num_parameters,), float(agent))
    journal.record_start(0, model)
    norms = StepStatistics(*(torch.full((1, 1), float(agent)) for _ in range(3)))
    for step in range(1, last_step + 1):
        ledger.remaining -= 1
        journal.record_step(step, model, norms)


def merge(out: Path, ends: tuple[int, int, int]) -> Result:
    for agent, last_step in enumerate(ends):
        write_files(out, agent, last_step)
    results = RESULTS | {1: AgentResult(1, RunStatus.COMPLETE, notes=("said so",))}
    run = Folders.of_run(out)
    return merge_results(PLAN, PROBLEM, results, run, SETTINGS)


@pytest.mark.parametrize(
    ("ends", "status", "num_steps"),
    [((12, 12, 12), "complete", 12), ((12, 6, 12), "complete", 12), ((6, 6, 6), "interrupted", 6)],
    ids=["all", "one lost", "stopped"],
)
def test_the_status_follows_from_the_steps_done(
    ends: tuple[int, int, int], status: str, num_steps: int, tmp_path: Path
) -> None:
    result = merge(tmp_path, ends)
    assert (result.status, result.num_steps) == (status, num_steps)
    assert [row["step"] for row in result.rows] == [
        step for step in (0, 6, 12) if step <= max(ends)
    ]
    assert result.notes == ("agent 1: said so",)


def test_files_that_were_cut_short_are_named(tmp_path: Path) -> None:
    merge(tmp_path, (6, 6, 6))
    shared = Folders.of_run(tmp_path).of_agent(1).shared
    table = (shared / "metrics.csv").read_text(encoding="utf-8")
    for damaged in (table[:-30], table + "x,y\n", table.rstrip() + ",1\n"):
        (shared / "metrics.csv").write_text(damaged, encoding="utf-8")
        with pytest.raises(FileFormatError, match="not a table of measurements, or cut short"):
            read_rows(shared / "metrics.csv")
    (shared / "metrics.csv").write_text(table + "\n", encoding="utf-8")
    assert sorted(read_rows(shared / "metrics.csv")) == [0, 6]
    model = shared / "models" / "step-6.bin"
    model.write_bytes(model.read_bytes()[:-4])
    with pytest.raises(FileFormatError, match=r"step-6\.bin: has 9 parameters, not 10"):
        merge_results(PLAN, PROBLEM, RESULTS, Folders.of_run(tmp_path), SETTINGS)


def test_a_neighbour_whose_link_broke_is_no_longer_linked(tmp_path: Path) -> None:
    states: list[AgentState] = []
    journal = make_journal(tmp_path, 0, on_state=states.append)
    journal._run.exchange.membership.note(Kind.CUT, 3, 2)
    journal.record_start(0, torch.zeros(TASK.num_parameters))
    assert states[-1].neighbours == (1,)
    assert states[-1].lost == {}


def test_a_lost_agent_counts_until_its_loss(tmp_path: Path) -> None:
    result = merge(tmp_path, (12, 2, 6))
    # The model of each agent is its number: agents 0 and 2 at step 6, agent 0 alone at step 12.
    assert [float(row["consensus_distance"]) > 0 for row in result.rows] == [True, True, False]
    spent = [float(row["epsilon"]) for row in result.rows]
    assert 0 == spent[0] < spent[1] < spent[2] <= 10 * (1 + 1e-9)
    assert result.parameters[0, 0].eq(0).all()
    assert result.parameters[0, 1:].isnan().all()


def test_private_files_are_not_read(tmp_path: Path) -> None:
    for agent in range(3):
        write_files(tmp_path, agent, 12)
    shutil.rmtree(tmp_path / "private")
    run = Folders.of_run(tmp_path)
    for is_public in (True, False):
        problem = replace(PROBLEM, public_parts=PROBLEM.public_parts if is_public else ())
        result = merge_results(PLAN, problem, RESULTS, run, SETTINGS)
        for row in result.rows:
            assert all(math.isnan(float(row[name])) for name in PRIVATE_COLUMNS)
            assert math.isnan(float(row["test_loss"])) == (not is_public)
            assert float(row["consensus_distance"]) > 0


@pytest.mark.parametrize("is_public", [True, False])
def test_an_agent_shares_scores_on_public_data_only(is_public: bool, tmp_path: Path) -> None:
    write_files(tmp_path, 1, 12, is_public=is_public)
    folders = Folders.of_run(tmp_path).of_agent(1)
    own = read_rows(folders.private / "metrics.csv")[12]
    shared = read_rows(folders.shared / "metrics.csv")[12]
    assert tuple(own) == COLUMNS
    assert tuple(shared) == SHARED_COLUMNS
    assert shared["epsilon"] == own["epsilon"]
    assert (shared["test_loss"] == own["test_loss"]) == is_public
    assert math.isnan(float(shared["test_loss"])) == (not is_public)
    require_private(tmp_path / "private")


@pytest.mark.parametrize(
    ("own", "is_lost", "status", "merged"),
    [
        (RunStatus.COMPLETE, False, RunStatus.COMPLETE, "complete"),
        (RunStatus.PARTIAL, True, RunStatus.PARTIAL, "complete"),
        (RunStatus.INTERRUPTED, True, RunStatus.INTERRUPTED, "interrupted"),
        (RunStatus.INTERRUPTED, False, RunStatus.INTERRUPTED, "interrupted"),
    ],
)
def test_a_launch_without_some_agents_is_not_complete(
    own: RunStatus, is_lost: bool, status: RunStatus, merged: str, tmp_path: Path
) -> None:
    """Agent 2 has measured the last step even where the others had to stop before it."""
    for agent in range(3):
        write_files(tmp_path, agent, 12)
    agents = {agent: AgentResult(agent, own, lost={2: 7} if is_lost else {}) for agent in range(3)}
    if is_lost:
        agents[2] = AgentResult(2, RunStatus.FAILED, failure=Failure("ended"))
    folders = Folders.of_run(tmp_path)
    result = merge_results(PLAN, PROBLEM, agents, folders, SETTINGS)
    launched = LaunchResult(PLAN, PROBLEM, agents, result, folders, tmp_path)
    assert (launched.status, result.status) == (status, merged)


def test_private_notes_go_to_the_owner_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = make_journal(tmp_path, 1)
    with caplog.at_level("INFO", "corn"):
        journal.note("went on without agent 2")
        journal.note_privately("its data has 3 outliers")
    assert journal.notes == ["went on without agent 2"]
    assert [getattr(record, "is_private", None) for record in caplog.records] == [False, True]
    assert journal.private_notes == ["its data has 3 outliers"]
