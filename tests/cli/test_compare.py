"""``corn compare`` on small networks: mechanisms, adversaries and ways to share seeds."""

import json
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corn.cli.options import MixingOptions, ThreatOptions
from corn.covariance import (
    DEFAULT_THREAT,
    ONE_STEP,
    Corn,
    Horizon,
    Ldp,
    ThreatModel,
    default_objective,
    design,
)
from corn.plan import make_plan
from corn.privacy import PrivacyBudget
from corn.topology import load_network

from .commands import Runner

COMPARE = ["compare", "--graph", "ring:8", "--epsilon", 10, "--steps", 500]
GOSSIP = [*COMPARE, "--mixing", "gossip"]
PAPERS = ("--horizon", 1)


def read_rows(text: str) -> dict[tuple[str, int], Any]:
    """Return the rows of a comparison by mechanism and number of insiders."""
    facts = json.loads(text)
    return {(row["mechanism"], row["max_colluders"]): row for row in facts["rows"]}


def test_entry_points_share_their_defaults() -> None:
    assert ThreatOptions().make_if_given() is None
    assert ThreatModel(1, "auto") == DEFAULT_THREAT
    assert Corn.default_threat == Ldp.default_threat == DEFAULT_THREAT
    assert signature(make_plan).parameters["threat"].default is None
    default = default_objective(120)
    assert MixingOptions().choose_horizon("gossip", 120) == default == Horizon(24, 0.1, 0.95)
    assert MixingOptions(horizon=1).choose_horizon("gossip", 500) == ONE_STEP
    exact = load_network("ring:6", mixing="sum")
    assert MixingOptions().choose_objective(exact, 120) == replace(default, momentum=0)
    assert make_plan(exact, PrivacyBudget(1, 1e-5, num_steps=120, clip=1)).momentum == 0
    assert signature(make_plan).parameters["cooldown_steps"].default is None
    assert MixingOptions().cooldown is None


def test_exact_sums_have_the_least_noise_against_each_number_of_insiders(corn: Runner) -> None:
    rows = read_rows(corn(*COMPARE, "--colluders", "0,1,2", "--json").stdout)
    for count in (0, 1, 2):
        row = rows["corn", count]
        assert row["central_ratio"] == pytest.approx(8 / (8 - count))
        assert row["gap"] < 1e-9
        assert row["max_masks"] > 0
    assert rows["ldp", 1]["central_ratio"] == pytest.approx(8)
    assert rows["central", 0]["central_ratio"] == pytest.approx(1)


def test_mechanisms_are_ordered_by_their_noise(corn: Runner, tmp_path: Path) -> None:
    options = ["--colluders", "0", *PAPERS, "--json", "--plot", tmp_path / "c.png"]
    rows = read_rows(corn("compare", "--graph", "grid:4x5", *options).stdout)
    assert (tmp_path / "c.png").stat().st_size > 10_000
    values = [rows[name, q]["value"] for name, q in (("corn", 0), ("decor", 0), ("ldp", 1))]
    assert values == sorted(values)
    budget = PrivacyBudget(10, 1e-5, 5000, 0.1)
    grid = load_network("grid:4x5", mixing="gossip")
    least = design(grid, budget, objective=ONE_STEP, threat=ThreatModel(0))
    assert rows["corn", 0]["value"] == pytest.approx(least.value, rel=1e-9)
    assert rows["ldp", 1]["ratio_to_ldp"] == 1


@pytest.mark.parametrize("mixing", ["sum", "gossip"])
def test_rows_are_grouped_by_the_adversary_that_they_hold_against(
    corn: Runner, mixing: str
) -> None:
    arguments = ["compare", "--graph", "ring:6", "--steps", 50, "--mixing", mixing]
    rows = read_rows(corn(*arguments, "--json").stdout)
    insider, eavesdropper = [("corn", 1), ("ldp", 1)], [("corn", 0), ("decor", 0), ("zero-sum", 0)]
    assert list(rows) == [*insider, *eavesdropper, ("central", 0), ("none", 0)]
    assert "one insider" in rows["corn", 1]["adversary"]
    assert rows["corn", 0]["adversary"] == rows["decor", 0]["adversary"]
    # CorN against one insider needs more noise than DECOR against none; like for like, less.
    corn_alone, decor, corn_one = (
        rows[key]["value"] for key in (("corn", 0), ("decor", 0), ("corn", 1))
    )
    assert corn_alone <= decor < corn_one
    text = corn(*arguments).stdout
    for words in ("holds against", "one insider", "any insiders", "eavesdropper", "nobody"):
        assert words in text


def test_ldp_is_measured_by_the_best_against_the_same_insiders(corn: Runner) -> None:
    rows = read_rows(corn("compare", "--graph", "complete:2", "--horizon", 1, "--json").stdout)
    # One insider of two knows the only seed, so that LDP is optimal against it.
    assert rows["ldp", 1]["gap"] < 1e-3


@pytest.mark.parametrize("command", ["compare", "plan"])
def test_a_single_agent_has_no_insiders_to_fear(corn: Runner, tmp_path: Path, command: str) -> None:
    options = ["--out", tmp_path / "plan.corn", "--json"]
    if command == "compare":
        options = ["--mechanism", "corn", "--json"]
    facts = json.loads(corn(command, "--graph", "complete:1", *options).stdout)
    assert "insider" not in json.dumps(facts)


def test_a_covariance_of_ones_own_is_one_more_row(corn: Runner, tmp_path: Path) -> None:
    np.save(tmp_path / "R.npy", 2 * np.eye(8) - 1 / 8)
    options = ["--mechanism", f"corn,mine={tmp_path / 'R.npy'}", "--colluders", 0, "--json"]
    rows = read_rows(corn(*GOSSIP, *options).stdout)
    assert rows["mine", 0]["value"] > rows["corn", 0]["value"]


@pytest.mark.parametrize(
    ("options", "exit_code", "message"),
    [
        (["--colluders", "9", "--seeds", "pairs"], 1, "must be at most 7 of 8"),
        (["--colluders", "many"], 1, "whole numbers separated by commas, found 'many'"),
        (["--seeds", "friends"], 1, "seeds must be one of"),
        (["--mechanism", "magic"], 1, "found 'magic'"),
        (["--mechanism", "ldp,ldp"], 1, "different names, found ldp twice"),
        (["--horizon", "0.5"], 2, "--horizon"),
    ],
)
def test_bad_options(corn: Runner, options: list[str], exit_code: int, message: str) -> None:
    outcome = corn(*COMPARE, *options)
    assert outcome.exit_code == exit_code
    assert message in " ".join(outcome.stderr.split())


@pytest.mark.parametrize("mixing", ["gossip", "sum"])
def test_disagreement_is_printed_for_gossip_and_noted_if_it_is_large(
    corn: Runner, tmp_path: Path, mixing: str
) -> None:
    network = ("--graph", "ring:12", "--steps", 30, "--mixing", mixing, "--colluders", 0)
    commands: list[tuple[object, ...]] = [
        ("compare", *network),
        ("plan", *network, "--out", tmp_path / "plan.corn"),
        ("train", *network, "--task", "breast-cancer", "--step-size", 0.1, "--mechanism", "corn"),
    ]
    for command in commands:
        outcome = corn(*command)
        assert outcome.exit_code == 0, outcome.stderr
        assert ("κ" in outcome.stdout) == (mixing == "gossip")
        notes = [line for line in outcome.stderr.splitlines() if "κ" in line]
        assert len(notes) == (mixing == "gossip")
        assert all("--gossip chebyshev:" in note and "--mixing sum" in note for note in notes)
    facts = json.loads(corn(*commands[1], "--json").stdout)
    assert (facts["disagreement_ratio"] > 0.35) == (mixing == "gossip")


def test_the_network_is_measured_where_gossip_mixes(corn: Runner) -> None:
    def measure(*options: str) -> Any:
        arguments = ("compare", "--graph", "path:5", "--mixing", "gossip", "--mechanism", "ldp")
        return json.loads(corn(*arguments, *options, "--json").stdout)

    three = measure("--gossip", "3")
    assert three["num_links"] == 4
    assert measure("--gossip", "chebyshev:3")["mixing_time"] < three["mixing_time"]
    assert three["mixing_time"] < measure()["mixing_time"]


def test_warnings_become_one_note(corn: Runner) -> None:
    outcome = corn("compare", "--graph", "er:n=20,p=0.12", "--mechanism", "ldp")
    assert outcome.exit_code == 0
    assert outcome.stderr.startswith("note: ")
    assert outcome.stderr.count("rarely connected") == 1
