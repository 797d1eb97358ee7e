"""Six sites in network namespaces, with one open port and three commands for each site."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cli.commands import Runner

ROOT = Path(__file__).parent.parent.parent
SITES = ("north", "south", "east", "west", "lake", "hill")
PORT = 29500
# Both commands of a site in one process, as imports take seconds in each. All sites check at the
# same time, so that ports can be tried, and train when all have checked.
COMMANDS = """
import sys
import time
from pathlib import Path

from corn.cli import run_command

site, num_sites = sys.argv[1], int(sys.argv[2])
common = ["consortium.toml", "--agent", site, "--data", "data.csv", "--keys", "keys"]


def run(*arguments):
    sys.argv = ["corn", *arguments]
    try:
        run_command()
    except SystemExit as end:
        if end.code:
            raise


run("check", *common, "--wait", "15", "--out", f"{site}.json")
end = time.monotonic() + 120
while len(list(Path("..").glob("*/*.json"))) < num_sites and time.monotonic() < end:
    time.sleep(0.05)
run("agent", *common, "--out", "run")
"""


def run(*command: str, cwd: Path | None = None, host: int | None = None) -> str:
    """Run a command, in the namespace of a host if one is given, and return its output."""
    inside = [] if host is None else ["ip", "netns", "exec", f"corn6-{host}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}"}
    process = subprocess.run(
        [*inside, *command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, (command, process.stdout, process.stderr)
    return process.stdout + process.stderr


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Make a network of six hosts on one bridge; yield their addresses."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need iproute2 and root")
    probe = subprocess.run(["ip", "netns", "add", "corn6-net"], capture_output=True, check=False)
    if probe.returncode != 0:
        pytest.skip("this machine cannot make network namespaces")
    addresses = [f"10.88.0.{10 + host}" for host in range(len(SITES))]
    try:
        run("ip", "-n", "corn6-net", "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", "corn6-net", "link", "set", "bridge", "up")
        for host, address in enumerate(addresses):
            name, port = f"corn6-{host}", f"port{host}"
            run("ip", "netns", "add", name)
            pair = ("type", "veth", "peer", "name", port, "netns", "corn6-net")
            run("ip", "link", "add", "eth0", "netns", name, *pair)
            run("ip", "-n", "corn6-net", "link", "set", port, "master", "bridge", "up")
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                run("ip", "-n", name, "link", "set", device, "up")
        yield addresses
    finally:
        for name in ("net", *range(len(SITES))):
            subprocess.run(
                ["ip", "netns", "del", f"corn6-{name}"], capture_output=True, check=False
            )


@pytest.mark.slow
def test_five_sites_that_only_connect_outward_train_with_one_open_port(
    hosts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def corn(*arguments: str, cwd: Path = tmp_path) -> str:
        """Run a command that needs no host in this process, which has imported everything."""
        monkeypatch.chdir(cwd)
        outcome = Runner(monkeypatch, capsys)(*arguments)
        assert outcome.exit_code == 0, (arguments, outcome)
        return outcome.stdout + outcome.stderr

    example = str(ROOT / "examples" / "six_hospitals.py")
    monkeypatch.setattr(sys, "argv", [example, str(tmp_path / "made")])
    runpy.run_path(example, run_name="__main__")
    text = (tmp_path / "made" / "consortium.toml").read_text(encoding="utf-8")
    # The first site accepts connections, and the others only connect outward.
    text = re.sub(r'address = ".*"', "accepts = false", text)
    text = text.replace("accepts = false", f'address = "{hosts[0]}:{PORT}"', 1)
    text = re.sub(r'store = ".*"', f'store = "{hosts[0]}:{PORT}"', text)
    text = text.replace('graph = "complete:6"', 'graph = "star:6"').replace(
        "steps = 100", "steps = 20"
    )
    # One person writes the file and makes the plan.
    public = tmp_path / "public"
    public.mkdir()
    (public / "consortium.toml").write_text(text, encoding="utf-8")
    shutil.copy(tmp_path / "made" / "public.csv", public)
    corn("plan", "consortium.toml", cwd=public)
    folders = [tmp_path / "sites" / site for site in SITES]
    for host, folder in enumerate(folders):
        shutil.copytree(public, folder)
        shutil.copy(tmp_path / "made" / f"{SITES[host]}.csv", folder / "data.csv")

    # Command 1 of each site. Public keys go to one person, who sends the roster back.
    collected = tmp_path / "collected"
    collected.mkdir()
    for host, folder in enumerate(folders):
        corn("keys", "make", "keys", "--agent", str(host), cwd=folder)
        shutil.copy(folder / "keys" / f"agent-{host}.pub", collected)
    roster = collected / "roster.json"
    corn("keys", "roster", str(collected), str(public / "consortium.toml"), "--out", str(roster))
    for folder in folders:
        shutil.copy(roster, folder / "keys")

    def check_and_train(host: int) -> str:
        """Commands 2 and 3."""
        command = (sys.executable, "-c", COMMANDS, SITES[host], str(len(SITES)))
        return run(*command, cwd=folders[host], host=host)

    with ThreadPoolExecutor(len(SITES)) as pool:
        list(pool.map(check_and_train, range(len(SITES))))
    results = [str(folder / f"{site}.json") for site, folder in zip(SITES, folders, strict=True)]
    page = corn("check", str(public / "consortium.toml"), *results)
    assert "problem" not in page
    assert "warning" not in page
    models = {
        (folder / "run" / "shared" / f"agent-{host}" / "model.pt").read_bytes()
        for host, folder in enumerate(folders)
    }
    assert len(models) == 1
    predicted = corn("predict", "run", "public.csv", "--json", cwd=folders[4])
    result, _ = json.JSONDecoder().raw_decode(predicted)
    assert result["promise"]["epsilon"] == 1
    assert result["promise"]["simulation"] == ""
    # About half of the public patients are in each class.
    assert result["scores"]["accuracy"] > 0.7
