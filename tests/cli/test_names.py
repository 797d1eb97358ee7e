"""Agents are called by the labels of the user's graph wherever a command names one."""

import re
from pathlib import Path

import networkx as nx
import numpy as np
import pytest

from corn import PrivacyBudget, load_network, load_plan, make_plan, save_plan
from corn.distributed.keyring import make_keys
from corn.distributed.status import STATE_NAME, write_state
from corn.distributed.storage import make_folders
from corn.errors import FileFormatError, InvalidArgumentError
from corn.learn.consortium import load_consortium
from corn.noise import load_roster
from tests.distributed.monitored import make_state

from .commands import Runner
from .test_consortium import TEXT

NAMES = ["St Mary", "Lyon, north", "<b>Zürich</b>", "a/b"]
BUDGET = PrivacyBudget((1, 4, 4, 4), 1e-5, num_steps=20, clip=1)


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    network = load_network(nx.relabel_nodes(nx.cycle_graph(4), dict(enumerate(NAMES))))
    save_plan(make_plan(network, BUDGET), tmp_path / "plan.corn")
    return tmp_path / "plan.corn"


def test_a_plan_keeps_names_in_its_fingerprint(plan: Path) -> None:
    assert load_plan(plan).network.agent_names == NAMES
    text = plan.read_text(encoding="utf-8")
    plan.write_text(text.replace("St Mary", "St Jude"), encoding="utf-8")
    with pytest.raises(FileFormatError):
        load_plan(plan)


def test_guarantees_are_shown_by_name(corn: Runner, plan: Path) -> None:
    outcome = corn("verify", plan, "--coalition", '"Lyon, north",a/b', "--agent", "St Mary")
    assert outcome.exit_code == 0, outcome.stderr
    assert "│ 0 (St Mary) " in outcome.stdout
    assert "insiders 1 (Lyon, north), 3 (a/b)" in outcome.stdout
    wrong = corn("verify", plan, "--agent", "st. mary")
    assert wrong.exit_code == 1
    assert wrong.stderr.splitlines()[-1].endswith(
        "found 'st. mary': names are St Mary, Lyon, north, <b>Zürich</b>, a/b"
    )


def test_keys_and_rosters_have_names(corn: Runner, plan: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    for name in NAMES:
        assert corn("keys", "make", keys, plan, "--agent", name).exit_code == 0
    assert sorted(path.name for path in keys.glob("*.key")) == [f"agent-{i}.key" for i in range(4)]
    assert corn("keys", "roster", keys, plan, "--out", keys / "roster.json").exit_code == 0
    roster = load_roster(keys / "roster.json")
    assert roster.names == NAMES
    assert corn("keys", "rotate", keys, "--agent", "a/b").exit_code == 0
    rotated = load_roster(keys / "roster.json")
    changed = [a != b for a, b in zip(roster.public_keys, rotated.public_keys, strict=True)]
    assert changed == [False, False, False, True]
    ledger = corn("keys", "ledger", keys, "--agent", "St Mary")
    assert "│ St Mary │" in ledger.stdout
    unknown = corn("keys", "make", tmp_path / "new", "--agent", "St Mary")
    assert unknown.exit_code == 2
    assert "add the plan" in unknown.stderr


def test_a_roster_with_other_names_is_refused(plan: Path, tmp_path: Path) -> None:
    names = load_plan(plan).network.agent_names
    make_keys(tmp_path / "keys", 4, [names[1], names[0], *names[2:]])
    roster = load_roster(tmp_path / "keys" / "roster.json")
    with pytest.raises(InvalidArgumentError, match="'Lyon, north' and 'St Mary' for agent 0"):
        roster.require_names(names)
    roster.require_names([str(agent) for agent in range(4)])


def test_the_status_has_names(corn: Runner, tmp_path: Path) -> None:
    state = make_state(names=("A", "B", "C", "D", "E"))
    write_state(make_folders(tmp_path, 2).private / STATE_NAME, state)
    outcome = corn("status", tmp_path)
    assert re.search(r"│ C .*│ +A, E │ +B │", outcome.stdout)


def test_names_stand_for_files(corn: Runner, tmp_path: Path) -> None:
    graph = nx.path_graph(["north", "south", "hill"])
    nx.write_edgelist(graph, tmp_path / "g.edges", data=False)
    for site in graph:
        rows = [f"{row % 5},{row % 2}" for row in range(30)]
        (tmp_path / f"{site}.csv").write_text("\n".join(["x,y", *rows]) + "\n")
    options = ("--graph", tmp_path / "g.edges", "--target", "y", "--steps", 2, "--mechanism")
    data = ("ldp", "--batch-size", 4, "--data")
    assert corn("train", *options, *data, tmp_path / "{site}.csv").exit_code == 0
    (tmp_path / "g.edges").write_text("../north south\nsouth hill\n")
    refused = corn("train", *options, *data, tmp_path / "{site}.csv")
    assert refused.exit_code == 1
    assert "use {agent}, as the name" in refused.stderr


def test_a_graph_with_names_says_which_site_has_which_links(tmp_path: Path) -> None:
    (tmp_path / "g.edges").write_text("hill north\nnorth south\n")
    text = TEXT.format(store=29500).replace('"complete:3"', f'"{tmp_path / "g.edges"}"')
    for site in ("north", "south", "hill"):
        text += f'[[sites]]\nname = "{site}"\nsamples = 50\n'
    path = tmp_path / "consortium.toml"
    path.write_text(text)
    network = load_consortium(path).load_network()
    assert network.agent_names == ["north", "south", "hill"]
    assert sorted(map(sorted, network.graph.edges)) == [[0, 1], [0, 2]]
    linked = nx.to_numpy_array(network.graph, nodelist=range(3)) + np.eye(3)
    assert np.array_equal(network.mixing_matrix > 0, linked)
    path.write_text(text.replace('name = "hill"', 'name = "lake"'))
    with pytest.raises(FileFormatError, match=r"an agent of graph must be .* found 'hill'"):
        load_consortium(path)
