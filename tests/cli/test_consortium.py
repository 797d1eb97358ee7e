"""One public file makes the plan, checks every site and runs all of them."""

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from corn.distributed import AgentConfig
from corn.distributed.keyring import open_ledger
from corn.errors import CornError
from corn.noise import Site, load_roster
from corn.parsing import format_address
from corn.plan import load_plan

from .commands import Runner

SITES = {"north": 200, "south": 60, "hill": 12}
TEXT = """
graph = "complete:3"
store = "127.0.0.1:{store}"
[data]
target = "ill"
classes = ["no", "yes"]
id = "person"
[data.columns]
age = {{ bounds = [0, 100], missing = 50 }}
ward = {{ categories = ["a", "b"] }}
[promise]
epsilon = 8
[training]
steps = 4
batch-size = 10
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture
def folder(tmp_path: Path, corn: Runner, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of all sites, the plan and the keys."""
    monkeypatch.chdir(tmp_path)
    text = TEXT.format(store=free_port())
    for site, samples in SITES.items():
        text += f'[[sites]]\nname = "{site}"\nsamples = {samples}\n'
        text += f'address = "127.0.0.1:{free_port()}"\n'
        rows = [
            f"{site}{row},{row % 90 if row % 7 else ''},{'abz'[row % 3]},{('no', 'yes')[row % 2]}"
            for row in range(samples)
        ]
        (tmp_path / f"{site}.csv").write_text("\n".join(["person,age,ward,ill", *rows]) + "\n")
    (tmp_path / "consortium.toml").write_text(text)
    outcome = corn("plan", "consortium.toml", "--json")
    assert outcome.exit_code == 0, outcome.stderr
    corn("keys", "make", "keys", "--agents", 3)
    corn("keys", "roster", "keys", "--out", "keys/roster.json")
    return tmp_path


def check(corn: Runner, site: str, *more: object) -> Any:
    return corn(
        "check",
        "consortium.toml",
        "--agent",
        site,
        "--data",
        f"{site}.csv",
        "--keys",
        "keys",
        *more,
    )


def test_the_plan_states_the_rate_of_all_sizes(corn: Runner, folder: Path) -> None:
    facts = json.loads(corn("plan", "consortium.toml", "--json").stdout)
    mean = 0.72 * sum(SITES.values()) / 3
    assert facts["mean_training_samples"] == pytest.approx(mean)
    assert facts["sampling_rate"] == pytest.approx(10 / mean)
    assert [own["site"] for own in facts["sites"]] == list(SITES)
    assert (folder / "consortium.corn").exists()
    assert corn("plan", "consortium.toml", "--steps", 3).exit_code == 2


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_all_sites_run_from_the_file_and_their_data(corn: Runner) -> None:
    outcome = corn("launch", "consortium.toml", "--keys", "keys", "--data", "{site}.csv", "--json")
    assert outcome.exit_code == 0, outcome.stderr
    assert json.loads(outcome.stdout)["simulation"] == ""
    assert corn("launch", "consortium.toml", "--data", "a.csv", "--target", "ill").exit_code == 2
    # The ledgers now show that the plan was used.
    report = json.loads(check(corn, "hill", "--json").stdout)
    assert {own["name"]: own["status"] for own in report["findings"]}["ledger"] == "warning"


@pytest.mark.usefixtures("folder")
def test_training_takes_the_file(corn: Runner) -> None:
    outcome = corn("train", "--plan", "consortium.toml", "--data", "{site}.csv", "--json")
    assert outcome.exit_code == 0, outcome.stderr
    assert json.loads(outcome.stdout)["num_steps"] == 4


def test_every_site_passes_and_one_page_has_all(corn: Runner, folder: Path) -> None:
    for site in SITES:
        outcome = check(corn, site, "--out", f"{site}.json")
        assert outcome.exit_code == 0, outcome.stderr
        # As an editor on Windows saves it.
        text = (folder / "consortium.toml").read_text(encoding="utf-8-sig")
        (folder / "consortium.toml").write_text(text, encoding="utf-8-sig", newline="\r\n")
    names = [f"{site}.json" for site in SITES]
    outcome = corn("check", "consortium.toml", *names)
    assert outcome.exit_code == 0, outcome.stderr
    assert all(site in outcome.stdout for site in SITES)
    # A missing site, and another plan, stop the run.
    assert corn("check", "consortium.toml", *names[:2]).exit_code == 1
    other = json.loads((folder / "hill.json").read_text()) | {"plan": "00"}
    (folder / "hill.json").write_text(json.dumps(other))
    outcome = corn("check", "consortium.toml", *names)
    assert outcome.exit_code == 1
    assert "plan" in outcome.stderr


def test_what_is_shared_does_not_depend_on_data(corn: Runner, folder: Path) -> None:
    shared = []
    for rows in (SITES["hill"], 7):
        lines = (folder / "hill.csv").read_text().splitlines()[: rows + 1]
        (folder / "hill.csv").write_text("\n".join(lines) + "\n")
        report = json.loads(check(corn, "hill", "--out", "hill.json", "--json").stdout)
        assert "rows to train on" in report["private"]["data"]
        found = json.loads((folder / "hill.json").read_text())
        shared.append({name: value for name, value in found.items() if name != "time"})
    assert shared[0] == shared[1]


def test_a_start_that_failed_is_not_taken_for_releases(corn: Runner, folder: Path) -> None:
    open_ledger(folder / "keys", 2, load_plan(folder / "consortium.corn"), precision=1.0).close()
    findings = json.loads(check(corn, "hill", "--json").stdout)["findings"]
    assert {own["name"]: own["status"] for own in findings}["ledger"] == "ok"


def test_every_problem_is_listed(corn: Runner, folder: Path) -> None:
    lines = (folder / "hill.csv").read_text().splitlines()
    (folder / "hill.csv").write_text("\n".join([*lines, lines[-1], "x,old,a,no"]) + "\n")
    (folder / "keys" / "agent-2.key").unlink()
    (folder / "consortium.corn").unlink()
    outcome = check(corn, "hill", "--json")
    assert outcome.exit_code == 1
    report = json.loads(outcome.stdout)
    assert {own["name"] for own in report["findings"] if own["status"] == "problem"} == {
        "data",
        "plan",
        "keys",
    }
    assert "'person'" in report["private"]["data"]
    assert "'age'" in report["private"]["data"]


def test_a_taken_port_is_a_problem(corn: Runner, folder: Path) -> None:
    text = (folder / "consortium.toml").read_text()
    port = int(text.partition('store = "127.0.0.1:')[2].partition('"')[0])
    with socket.create_server(("127.0.0.1", port)):
        assert check(corn, "north").exit_code == 1
        # Another site reaches it.
        findings = json.loads(check(corn, "south", "--json").stdout)["findings"]
    assert any("and does" in own["text"] for own in findings)


def test_a_plan_of_another_file_is_refused(corn: Runner, folder: Path) -> None:
    path = folder / "consortium.toml"
    path.write_text(path.read_text().replace("epsilon = 8", "epsilon = 4"))
    outcome = corn("launch", path, "--data", "{site}.csv")
    assert outcome.exit_code == 1
    assert "promise" in outcome.stderr


def test_more_rows_than_the_plan_covers_are_a_problem(corn: Runner, folder: Path) -> None:
    rows = [f"p{row},40,a,no" for row in range(200 * SITES["hill"] + 20_000)]
    (folder / "hill.csv").write_text("\n".join(["person,age,ward,ill", *rows]) + "\n")
    outcome = check(corn, "hill", "--json")
    assert outcome.exit_code == 1
    report = json.loads(outcome.stdout)
    assert [own["name"] for own in report["findings"] if own["status"] == "problem"] == ["data"]
    assert "samples must be at most" in report["private"]["data"]


def test_the_roster_takes_addresses_of_the_consortium_file(corn: Runner, folder: Path) -> None:
    text = (folder / "consortium.toml").read_text()
    addresses = re.findall(r'address = "(.*)"', text)
    # The last site only connects outward.
    text = text.replace(f'address = "{addresses[2]}"', "accepts = false")
    (folder / "consortium.toml").write_text(text)
    outcome = corn("keys", "roster", "keys", "consortium.toml", "--out", "keys/roster.json")
    assert outcome.exit_code == 0, outcome.stderr
    sites = load_roster(folder / "keys" / "roster.json").sites
    assert sites == (
        Site(address=addresses[0], name="north"),
        Site(address=addresses[1], name="south"),
        Site(accepts=False, name="hill"),
    )


def test_others_are_told_the_address_of_the_file_where_the_roster_is_older(
    corn: Runner, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corn("keys", "roster", "keys", "consortium.toml", "--out", "keys/roster.json")
    text = (folder / "consortium.toml").read_text()
    moved = ("127.0.0.1", free_port())
    text = text.replace(re.findall(r'address = "(.*)"', text)[1], format_address(moved))
    (folder / "consortium.toml").write_text(text)
    found: list[AgentConfig] = []

    def run(config: AgentConfig, _: object) -> None:
        found.append(config)
        raise CornError("stop here")

    monkeypatch.setattr("corn.distributed.agent.run_workload", run)
    monkeypatch.setattr("corn.distributed.launcher.listen_for_signals", lambda: None)
    corn("agent", "consortium.toml", "--agent", "south", "--data", "south.csv", "--keys", "keys")
    assert found[0].advertise == found[0].listen == moved
