"""The container's entry point, run without a container."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from corn.distributed.keyring import make_keys
from corn.noise import load_identity, load_roster

ENTRY_POINT = Path(__file__).parents[2] / "deploy" / "entrypoint.sh"
# Stands for an agent: shows its arguments and mode of its keys, and ends as it is told to.
STUB = """#!/bin/sh
if [ "$1" != agent ]; then exec {python} -m corn "$@"; fi
mkdir -p {out}
trap 'echo stopped >> {out}/arguments; exit 130' TERM
printf '%s\\n' "$@" > {out}/arguments
[ -z "${{STUB_WAITS:-}}" ] || {{ sleep 30 2> /dev/null & wait $!; }}
exit "${{STUB_CODE:-0}}"
"""


class Container:
    """Folders and an environment as a container has them."""

    def __init__(self, folder: Path, agent: int) -> None:
        self.public, self.keys = folder / "public", folder / f"keys-{agent}"
        self.out, self.programs = folder / f"out-{agent}", folder / f"bin-{agent}"
        self.public.mkdir(exist_ok=True)
        self.programs.mkdir()
        stub = self.programs / "corn"
        stub.write_text(STUB.format(python=sys.executable, out=self.out))
        stub.chmod(0o755)
        self.environment = {
            **os.environ,
            "PATH": f"{self.programs}:{os.environ['PATH']}",
            "CORN_AGENT": str(agent),
            "CORN_AGENTS": "2",
            "CORN_KEYS": str(self.keys),
            "CORN_OUT": str(self.out),
            "CORN_PUBLIC": str(self.public),
            "CORN_PLAN": "plan.corn",
            "CORN_OPTIONS": str(ENTRY_POINT.with_name("agent.options")),
            "CORN_ADVERTISE": f"agent-{agent}:29600",
            "CORN_WAIT": "60",
        }

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["/bin/sh", str(ENTRY_POINT), *arguments],
            env=self.environment | environment,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, **environment: str) -> tuple[int, str]:
        process = self.start(*arguments, **environment)
        _, errors = process.communicate(timeout=120)
        return process.returncode, errors

    @property
    def arguments(self) -> list[str]:
        path = self.out / "arguments"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def containers(tmp_path: Path) -> list[Container]:
    return [Container(tmp_path, agent) for agent in range(2)]


@pytest.mark.slow
def test_agents_make_keys_wait_for_the_roster_and_run(containers: list[Container]) -> None:
    agents = [own.start("agent", "--resume") for own in containers]
    code, errors = containers[0].run("roster")
    assert code == 0, errors
    for own, process in zip(containers, agents, strict=True):
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        assert own.arguments[:3] == ["agent", "plan.corn", "--task"]
        assert own.arguments[-1] == "--resume"
        assert (own.keys.stat().st_mode & 0o777) == 0o700
        roster = load_roster(own.keys / "roster.json")
        agent = int(own.environment["CORN_AGENT"])
        key = own.keys / f"agent-{agent}.key"
        assert roster.public_key(agent) == load_identity(key).public_key
        assert own.arguments[own.arguments.index("--advertise") + 1] == f"agent-{agent}:29600"
        assert (own.out / "done").exists()
    # Private keys stay in the folder of their agent.
    assert {path.name for path in containers[0].public.iterdir()} == {
        "agent-0.pub",
        "agent-1.pub",
        "roster.json",
    }


def wait_until_started(own: Container) -> None:
    deadline = time.monotonic() + 60
    while "--advertise" not in own.arguments:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def ready(containers: list[Container]) -> Container:
    """Return a container whose keys and roster are there."""
    own = containers[0]
    make_keys(own.keys, 2)
    (own.public / "agent-0.pub").touch()
    return own


def test_a_signal_reaches_the_agent_and_its_exit_code_comes_back(ready: Container) -> None:
    process = ready.start(STUB_WAITS="yes")
    wait_until_started(ready)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert ready.arguments[-1] == "stopped"
    assert not (ready.out / "done").exists()


def test_a_failure_is_passed_on_and_a_complete_run_is_not_started_again(ready: Container) -> None:
    assert ready.run(STUB_CODE="1")[0] == 1
    assert not (ready.out / "done").exists()
    assert ready.run()[0] == 0
    (ready.out / "arguments").unlink()
    process = ready.start()
    assert process.stderr is not None
    assert "the run is complete; remove" in process.stderr.readline()
    process.kill()
    process.communicate(timeout=60)
    assert ready.arguments == []


def test_an_agent_that_was_in_the_run_returns_or_resumes(ready: Container) -> None:
    assert ready.run(STUB_CODE="1")[0] == 1
    assert "--rejoin" not in ready.arguments
    private = ready.out / "private" / "agent-0"
    private.mkdir(parents=True)
    (private / "addresses.json").touch()
    ready.run(STUB_CODE="1")
    assert ready.arguments[-1] == "--rejoin"
    ready.run(STUB_CODE="1", CORN_AGAIN="--resume")
    assert ready.arguments[-1] == "--resume"
    ready.run("agent", "--resume", STUB_CODE="1")
    assert "--rejoin" not in ready.arguments


def test_a_roster_that_the_agent_holds_is_not_replaced(ready: Container) -> None:
    """Whoever can write to the public folder cannot change whom an agent trusts."""
    before = (ready.keys / "roster.json").read_bytes()
    (ready.public / "roster.json").write_text("another")
    assert ready.run()[0] == 0
    assert (ready.keys / "roster.json").read_bytes() == before


def test_the_number_is_that_at_the_end_of_the_name_of_the_host(ready: Container) -> None:
    hostname = ready.programs / "hostname"
    hostname.write_text("#!/bin/sh\necho corn-agent-0\n")
    hostname.chmod(0o755)
    assert ready.run(CORN_AGENT="", CORN_ADVERTISE="")[0] == 0
    place = ready.arguments.index("--agent")
    assert ready.arguments[place + 1] == "0"
    assert ready.arguments[ready.arguments.index("--advertise") + 1] == "corn-agent-0:29600"
    hostname.write_text("#!/bin/sh\necho laptop\n")
    code, errors = ready.run(CORN_AGENT="")
    assert (code, errors) == (1, "corn: the number of the agent is unknown: set CORN_AGENT\n")


def test_a_roster_that_does_not_come_is_one_line(ready: Container) -> None:
    (ready.keys / "roster.json").unlink()
    code, errors = ready.run(CORN_WAIT="1")
    assert code == 1
    assert errors == f"corn: {ready.public}/roster.json: is not there after 1 s\n"


@pytest.mark.slow
def test_other_commands_are_those_of_corn(ready: Container) -> None:
    code, errors = ready.run("verify", str(ready.out / "none"))
    assert (code, errors) == (1, f"corn: {ready.out / 'none'}: no such file\n")
