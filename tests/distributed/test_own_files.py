"""Agents on the users' own files: each owner learns what is wrong, and others only what is public.

The same five cases as in ``tests/cli/test_own_data.py``, for agents that see one file each.
"""

from pathlib import Path

import pytest

from corn.distributed.agent import run_workload
from corn.distributed.journal import Reports
from corn.distributed.keyring import make_keys
from corn.distributed.rendezvous import AbsentError, HandshakeError, RefusalError, Rendezvous
from corn.distributed.results import AgentResult
from corn.distributed.settings import AgentConfig, RunSettings
from corn.errors import FileFormatError
from corn.learn.file_data import FileWorkload
from corn.learn.schedule import Constant
from corn.plan import save_plan
from corn.transport import LinkError

from .harness import small_plan
from .threads import run_in_threads

N = 3
ROWS = [(k / 10, k % 4, "yes" if k % 3 else "no") for k in range(20)]
Rows = list[tuple[object, ...]]


def run_files(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    rows: Rows | None = None,
    header: str = "age,dose,ill",
    rejoins: bool = False,
) -> list[AgentResult | BaseException]:
    """Run three agents, of which agent 1 has a file of its own kind."""
    for agent in range(N):
        own = (rows or ROWS) if agent == 1 else ROWS
        lines = [header if agent == 1 else "age,dose,ill"]
        lines += [",".join(map(str, row)) for row in own]
        (folder / f"agent-{agent}.csv").write_text("\n".join(lines) + "\n")
    save_plan(small_plan("complete:3", 3), folder / "plan.corn")
    make_keys(folder / "keys", N)
    workload = FileWorkload(
        folder / "agent-{agent}.csv", "ill", classes=("no", "yes"), bounds={"": (0, 5)}
    )
    met: dict[int, Rendezvous] = {}

    def run(rendezvous: Rendezvous) -> AgentResult:
        if rejoins:
            rendezvous.timeout = 1.0
            rendezvous.rejoins = rendezvous.agent == 1
        met[rendezvous.agent], rendezvous.keys = rendezvous, folder / "keys"
        config = AgentConfig(
            workload=workload,
            settings=RunSettings(Constant(0.5), batch_size=4, timeout=20),
            out=folder / "out",
            source=folder / "plan.corn",
            keys=folder / "keys",
            agent=rendezvous.agent,
            num_agents=N,
            store=("127.0.0.1", 1),
        )
        return run_workload(config, Reports())[1]

    monkeypatch.setattr("corn.distributed.agent.join", lambda own, **_: met[own.agent])
    return run_in_threads(N, run)


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ([*ROWS[:4], (1, "", "no"), *ROWS], "column 'dose' has no value in row 5"),
        ([*ROWS[:4], (1, "high", "no"), *ROWS], "column 'dose' must have numbers, found 'high'"),
    ],
    ids=["missing value", "text"],
)
def test_only_the_owner_reads_what_is_wrong_with_a_value(
    rows: Rows, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, owner, last = run_files(tmp_path, monkeypatch, rows=rows)
    assert isinstance(owner, FileFormatError)
    assert f"{tmp_path / 'agent-1.csv'}: {line}" in str(owner)
    assert "\n" not in str(owner)
    for other in (first, last):
        assert isinstance(other, RefusalError), other
        assert not {"dose", "high", "row", "csv"} & set(str(other).replace(".", " ").split())


def test_an_odd_file_stops_nobody_and_its_owner_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A constant column outside its bounds, and one class, are private: refusals would tell."""
    results = run_files(tmp_path, monkeypatch, rows=[(age, 7, "yes") for age, _, _ in ROWS])
    line = "values outside public bounds"
    for agent, result in enumerate(results):
        assert isinstance(result, AgentResult), result
        told = [note for note in result.private_notes if line in note]
        assert len(told) == (agent == 1)
        assert line not in repr(result) + str(result.to_json())
    shared = [path for path in (tmp_path / "out/shared").rglob("*") if path.is_file()]
    assert shared
    assert not any(line.encode() in path.read_bytes() for path in shared)


def test_all_agents_read_which_columns_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for result in run_files(tmp_path, monkeypatch, header="age,weight,ill"):
        assert isinstance(result, HandshakeError), result
        assert "agents differ in the data: agent 1 has " in str(result)
        assert "\n" not in str(result)


@pytest.mark.slow
def test_an_agent_that_cannot_return_does_not_stop_others_at_their_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, owner, last = run_files(tmp_path, monkeypatch, rows=[(1, "high", "no")], rejoins=True)
    assert isinstance(owner, FileFormatError)
    for other in (first, last):
        assert isinstance(other, AbsentError | RefusalError), other
        assert "agent 1 refused" not in str(other)


def test_after_a_start_that_failed_no_agent_is_asked_to_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Service managers start an agent with --rejoin where it kept addresses of a run."""

    def fail(*_: object, **__: object) -> None:
        raise LinkError("no connection")

    monkeypatch.setattr("corn.distributed.agent.open_links", fail)
    for result in run_files(tmp_path, monkeypatch):
        assert isinstance(result, LinkError | RefusalError), result
    assert (tmp_path / "out/private/agent-1").is_dir()
    assert not list(tmp_path.rglob("addresses.json"))
