"""``corn design``, ``corn compare`` and ``corn threat`` on small networks."""

import json
from dataclasses import replace
from inspect import signature
from pathlib import Path

import networkx as nx
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
)
from corn.plan import make_plan
from corn.privacy import PrivacyBudget
from corn.topology import load_network

from .commands import Runner

DESIGN = ["design", "--mixing", "gossip", "--graph", "ring:8", "--epsilon", 10, "--steps", 500]
ALL_ENERGY = ("--disagreement-weight", 1, "--momentum", 0)


def read(text: str) -> dict:  # type: ignore[type-arg]
    facts: dict = json.loads(text)  # type: ignore[type-arg]
    return facts


def test_design_for_one_step_is_the_papers_value(corn: Runner) -> None:
    options = ["--horizon", 1, "--colluders", 0, "--json"]
    facts = read(corn("design", "--graph", "ring:20", *options).stdout)
    assert facts["normalized_value"] == pytest.approx(4.6025201, rel=1e-6)
    assert facts["normalized_lower_bound"] <= facts["normalized_value"]
    assert facts["gap"] <= 1e-6
    cap = min(facts["precision_caps"])
    assert facts["value"] * cap == pytest.approx(facts["normalized_value"])


def test_the_default_horizon_is_a_fifth_of_the_run(corn: Runner) -> None:
    facts = read(corn(*DESIGN, "--json").stdout)
    assert facts["objective"] == "horizon of 100 steps, disagreement weighted by 0.1, momentum 0.97"
    again = read(corn(*DESIGN, "--horizon", 100, "--json").stdout)
    assert again["value"] == facts["value"]


def test_entry_points_share_their_defaults() -> None:
    assert ThreatOptions().make() == DEFAULT_THREAT == ThreatModel(1, "auto")
    assert Corn.default_threat == Ldp.default_threat == DEFAULT_THREAT
    assert signature(make_plan).parameters["threat"].default is None
    ring = load_network("ring:6", mixing="gossip")
    default = default_objective(120)
    assert MixingOptions().choose_objective(ring, 120) == default == Horizon(24, 0.1, 0.95)
    assert MixingOptions(horizon=1).choose_objective(ring, 500) == ONE_STEP
    exact = load_network("ring:6", mixing="sum")
    assert MixingOptions().choose_objective(exact, 120) == replace(default, momentum=0)
    assert make_plan(exact, PrivacyBudget(1, 1e-5, num_steps=120, clip=1)).momentum == 0
    assert signature(make_plan).parameters["cooldown_steps"].default is None
    assert MixingOptions().cooldown_steps is None


def test_the_default_adversary_is_one_insider_with_pair_seeds(corn: Runner) -> None:
    facts = read(corn(*DESIGN, "--json").stdout)
    assert (facts["max_colluders"], facts["seeds"]) == (1, "pairs")
    eavesdropper = read(corn(*DESIGN, "--colluders", 0, "--json").stdout)
    assert (eavesdropper["max_colluders"], eavesdropper["seeds"]) == (0, "global")
    assert eavesdropper["value"] < facts["value"]


@pytest.mark.parametrize(
    ("options", "adversary"), [([], "one insider"), (["--colluders", 0], "knows no seed")]
)
def test_table_names_promise_and_adversary(
    corn: Runner, options: list[object], adversary: str
) -> None:
    text = " ".join(corn(*DESIGN, *options).stdout.split())
    for words in ("one agent's whole data set", adversary, "σ_mix²"):
        assert words in text


def test_design_against_insiders(corn: Runner) -> None:
    facts = read(corn(*DESIGN, "--colluders", 1, "--seeds", "pairs", "--json").stdout)
    assert facts["num_coalitions"] == 8
    assert facts["max_streams"] == 5  # of 8: three pairs of each agent died out
    assert "one insider" in facts["adversary"]
    common = read(
        corn(
            *DESIGN, "--colluders", 1, "--seeds", "edges", "--private-noise", "common", "--json"
        ).stdout
    )
    assert common["value"] >= facts["lower_bound"]


def test_saved_designs_can_be_accounted_for(corn: Runner, tmp_path: Path) -> None:
    design = [*DESIGN, "--colluders", 0]
    corn(*design, "--out", tmp_path / "R.npy", "--plot", tmp_path / "R.png")
    assert (tmp_path / "R.png").stat().st_size > 10_000
    facts = read(
        corn("account", "--covariance", tmp_path / "R.npy", "--steps", 500, "--json").stdout
    )
    assert facts["worst_epsilon"] == pytest.approx(10, rel=1e-6)
    assert facts["worst_epsilon"] <= 10 * (1 + 1e-9)
    corn(*design, "--out", tmp_path / "design.json")
    saved = read((tmp_path / "design.json").read_text())
    np.testing.assert_allclose(saved["covariance"], np.load(tmp_path / "R.npy"))
    assert saved["budget"]["epsilon"] == 10
    assert len(saved["decomposition"]["private_variance"]) == 8


def test_an_objective_from_a_file(corn: Runner, tmp_path: Path) -> None:
    np.save(tmp_path / "A.npy", np.eye(8))
    facts = read(corn(*DESIGN, "--objective", tmp_path / "A.npy", "--json").stdout)
    assert facts["normalized_value"] == pytest.approx(8)


@pytest.mark.parametrize("mechanism", ["ldp", "decor", "zero-sum", "central", "none"])
def test_every_mechanism_has_a_design(corn: Runner, mechanism: str) -> None:
    facts = read(corn(*DESIGN, "--mechanism", mechanism, "--json").stdout)
    assert facts["mechanism"] == mechanism
    assert ("nobody" in facts["adversary"]) == (mechanism in ("central", "none"))
    assert ("one insider" in facts["adversary"]) == (mechanism == "ldp")


@pytest.mark.parametrize(
    ("options", "exit_code", "message"),
    [
        (["--out", "design.txt"], 1, "must end in .json or .npy"),
        (["--max-noise-std", "0.001"], 1, "--max-noise-std must be at least"),
        (["--colluders", "9", "--seeds", "pairs"], 1, "--colluders must be at most 7 of 8"),
        (["--mechanism", "decor", "--colluders", "1"], 1, "against an eavesdropper only"),
        (["--mechanism", "ldp", "--drop-cost", "0.1"], 1, "apply to mechanism 'corn' only"),
        (["--mechanism", "ldp", "--solver", "dual"], 1, "apply to mechanism 'corn' only"),
        (["--mechanism", "ldp", "--max-noise-std", "9"], 1, "--max-noise-std limits correlated"),
        (["--solver", "dual"], 1, "--colluders 0"),
        (["--solver", "closed-form", "--tolerance", "0.1"], 1, "--tolerance does not apply"),
        (["--seeds", "friends"], 1, "seeds must be one of"),
        (["--mechanism", "magic"], 2, "--mechanism"),
        (["--horizon", "0.5"], 2, "--horizon"),
    ],
)
def test_bad_options(corn: Runner, options: list[str], exit_code: int, message: str) -> None:
    outcome = corn(*DESIGN, *options)
    assert outcome.exit_code == exit_code
    assert message in " ".join(outcome.stderr.split())


@pytest.mark.parametrize("solver", ["dual", "closed-form", "first-order"])
def test_every_solver_finds_the_same_design(corn: Runner, solver: str) -> None:
    options = ["--graph", "ring:5", "--colluders", 0, "--horizon", 10, "--json"]
    facts = read(corn("design", *options, "--solver", solver).stdout)
    assert facts["solver"] == solver
    assert facts["value"] == pytest.approx(read(corn("design", *options).stdout)["value"], rel=1e-3)


def test_common_private_noise_converges_on_a_ladder(corn: Runner, tmp_path: Path) -> None:
    links = tmp_path / "ladder.edges"
    links.write_text("\n".join(f"{i} {j}" for i, j in nx.ladder_graph(5).edges))
    threat = ["--colluders", 1, "--seeds", "edges", "--private-noise", "common"]
    facts = read(
        corn("design", "--graph", links, *threat, "--horizon", 50, *ALL_ENERGY, "--json").stdout
    )
    assert facts["status"] == "optimal"
    assert facts["gap"] <= 1e-3
    assert facts["normalized_value"] == pytest.approx(22.3123, rel=1e-3)


def test_seeds_without_use_are_pointed_out(corn: Runner) -> None:
    outcome = corn(*DESIGN, "--seeds", "global", "--colluders", 1)
    assert "try --seeds pairs" in outcome.stderr


def test_compare_names_the_adversary_of_each_row(corn: Runner) -> None:
    facts = read(corn("compare", "--graph", "ring:5", "--horizon", 1, "--json").stdout)
    (row,) = facts["objectives"].values()
    insiders = {name: "one insider" in cells["adversary"] for name, cells in row.items()}
    assert {name for name, holds in insiders.items() if holds} == {"corn", "ldp"}
    assert "one insider" in facts["adversary"]
    table = corn("compare", "--graph", "ring:5", "--horizon", 1).stdout
    for words in ("holds against", "one insider", "any insiders", "eavesdropper", "nobody"):
        assert words in table


def test_compare_groups_rows_by_adversary(corn: Runner, tmp_path: Path) -> None:
    arguments = ["compare", "--graph", "ring:6", "--steps", 50, "--plot", tmp_path / "c.svg"]
    arguments += ALL_ENERGY
    facts = read(corn(*arguments, "--json").stdout)
    row = facts["objectives"]["horizon of 10 steps"]
    insider, eavesdropper = ["ldp", "corn one-step", "corn"], ["zero-sum", "decor"]
    assert list(row) == [*insider, *eavesdropper, "corn eavesdropper", "central", "none"]
    # CorN against one insider needs more noise than DECOR against none; like for like, less.
    assert row["corn eavesdropper"]["value"] < row["decor"]["value"] < row["corn"]["value"]
    assert row["corn eavesdropper"]["adversary"] == row["decor"]["adversary"]
    alone = read(corn(*arguments, "--json", "--colluders", 0).stdout)
    assert "corn eavesdropper" not in alone["objectives"]["horizon of 10 steps"]


def test_compare_measures_ldp_by_the_best_against_the_same_insiders(corn: Runner) -> None:
    arguments = ["compare", "--graph", "complete:2", "--horizon", 1]
    (line,) = (row for row in corn(*arguments).stdout.splitlines() if "LDP (ind" in row)
    # One insider of two knows the only seed, so that LDP is optimal against it.
    assert "%" not in line


@pytest.mark.parametrize("command", ["compare", "plan"])
def test_a_single_agent_has_no_insiders_to_fear(corn: Runner, tmp_path: Path, command: str) -> None:
    options = ["--out", tmp_path / "plan.corn"] if command == "plan" else []
    facts = read(corn(command, "--graph", "complete:1", *options, "--json").stdout)
    assert "insider" not in json.dumps(facts)


def test_compare_orders_the_mechanisms(corn: Runner, tmp_path: Path) -> None:
    options = ["--colluders", 0, *ALL_ENERGY, "--json", "--plot", tmp_path / "c.png"]
    facts = read(corn("compare", "--graph", "grid:4x5", *options).stdout)
    assert (tmp_path / "c.png").stat().st_size > 10_000
    for row in facts["objectives"].values():
        assert row["corn"]["value"] <= row["decor"]["value"] <= row["ldp"]["value"] * (1 + 1e-9)
        assert row["ldp"]["ratio_to_ldp"] == 1
        assert row["central"]["ratio_to_central"] == 1
        assert row["corn"]["ratio_to_central"] > 1
    accumulated = facts["objectives"]["horizon of 1000 steps"]
    assert accumulated["corn one-step"]["value"] > 2 * accumulated["corn"]["value"]
    cap = PrivacyBudget(10, 1e-5, 5000, 0.1).precision_cap
    assert accumulated["corn"]["value"] * cap == pytest.approx(91.316469, rel=1e-6)
    assert "DECOR" in corn("compare", "--graph", "ring:5", "--horizon", 1).stdout


def test_threat_marks_seeds_that_are_no_better_than_ldp(corn: Runner) -> None:
    arguments = [
        "threat",
        "--mixing",
        "gossip",
        "--graph",
        "ring:6",
        "--steps",
        500,
        "--seeds",
        "groups:2,pairs",
    ]
    facts = read(corn(*arguments, "--colluders", "0,1", "--json").stdout)
    rows = {(row["seeds"], row["max_colluders"]): row for row in facts["rows"]}
    assert rows["groups:2", 1]["remark"] == "2 disjoint groups with one insider: no better than LDP"
    assert not rows["groups:2", 0]["worthless"]
    assert rows["pairs", 1]["ratio_to_ldp"] < 0.5
    text = corn(*arguments, "--colluders", "1").stdout
    assert "no better than LDP" in " ".join(text.split()).replace("│ ", "")


def test_threat_refuses_a_list_that_it_cannot_read(corn: Runner) -> None:
    outcome = corn("threat", "--graph", "ring:6", "--colluders", "many")
    assert outcome.exit_code == 1
    assert "whole numbers separated by commas, found 'many'" in outcome.stderr
