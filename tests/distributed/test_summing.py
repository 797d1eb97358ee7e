"""Agents as processes with exact sums: one model, a trusted server's noise, stops for all."""

from pathlib import Path

import pytest

from corn.covariance import ThreatModel

from .harness import small_plan
from .test_simulation_match import compare


@pytest.mark.parametrize(
    "threat",
    [ThreatModel(1, "pairs"), ThreatModel(1, "leave-one-out"), ThreatModel()],
    ids=["pairs", "groups", "global"],
)
def test_four_processes_match_the_simulation(threat: ThreatModel, tmp_path: Path) -> None:
    compare(small_plan("ring:4", 15, threat=threat, mixing="sum"), tmp_path)
