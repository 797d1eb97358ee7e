"""Progress of designs: lines where there is no terminal, and Ctrl-C keeps the best design."""

import json
from pathlib import Path

import pytest

from corn.cli import output
from corn.covariance.low_rank import DesignProgress

from .commands import Runner

GRAPH = ["--mixing", "gossip", "--graph", "ring:26", "--steps", 100]


def test_lines_are_written_where_there_is_no_terminal(
    corn: Runner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.corn"
    assert "evaluation" not in corn("plan", *GRAPH, "--seeds", "edges", "--out", plan).stderr
    monkeypatch.setattr(output, "_SECONDS_BETWEEN_LINES", 0.0)
    lines = corn("plan", *GRAPH, "--seeds", "edges", "--out", plan).stderr.splitlines()
    assert lines[0].startswith("designing the noise: evaluation 1 of at most 500")
    assert any("% above the optimum for its seeds" in line for line in lines)


def test_ctrl_c_keeps_the_best_design(
    corn: Runner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupt(progress: DesignProgress) -> str:
        if progress.evaluations == 10:
            raise KeyboardInterrupt
        return ""

    monkeypatch.setattr(output, "describe_progress", interrupt)
    outcome = corn("plan", *GRAPH, "--out", tmp_path / "plan.corn", "--json")
    assert outcome.exit_code == 130
    assert json.loads(outcome.stdout)["status"] == "interrupted"
    assert "it keeps its promise to every agent" in outcome.stderr
    monkeypatch.undo()
    assert json.loads(corn("verify", tmp_path / "plan.corn", "--json").stdout)["passed"]
