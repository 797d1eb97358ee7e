"""Keys are in private files only: not in outputs, logs, arguments, environments or dumps."""

import base64
import ctypes
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from corn.distributed.keyring import (
    load_credentials,
    make_keys,
    require_private_keys,
)
from corn.distributed.launcher import protect_process
from corn.errors import FileFormatError
from corn.learn.step import AgentStepper
from corn.noise import load_identity, load_roster
from corn.plan import save_plan

from .harness import Forked, require_private, run_corn, small_plan

NUM_AGENTS = 2


def find_secrets(keys: Path) -> list[bytes]:
    """Return the private keys of all agents and the secrets that pairs of them share."""
    roster = load_roster(keys / "roster.json")
    identities = [load_identity(keys / f"agent-{a}.key") for a in range(roster.num_agents)]
    pairs = [own.agree(roster.public_key(a)) for own in identities for a in range(NUM_AGENTS)]
    return [secret.reveal() for secret in [own.secret for own in identities] + pairs]


def find_leaks(secrets: Iterable[bytes], places: dict[str, bytes]) -> list[str]:
    """Return the places that contain a secret as bytes, or as Python or a tool would print it."""
    forms = [
        form
        for secret in secrets
        for form in (
            secret,
            secret.hex().encode(),
            secret.hex().upper().encode(),
            base64.b64encode(secret).rstrip(b"="),
            repr(secret)[2:-1].encode(),
            str(list(secret)).encode(),
        )
    ]
    return [name for name, content in places.items() if any(form in content for form in forms)]


def read_all(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_plan(small_plan("path:2", 12), tmp_path / "plan.corn")
    make_keys(tmp_path / "keys", NUM_AGENTS)
    return tmp_path


@pytest.fixture
def options() -> list[str]:
    """Return the options of agents by themselves, without their numbers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["agent", "plan.corn", "--task", "breast-cancer"]
    options += ["--store", f"127.0.0.1:{port}", "--timeout", "60"]
    return [*options, "--json", "--agent"]


ENVIRONMENT = {**os.environ, "CORN_KEYS": "keys"}


@pytest.mark.slow
def test_nothing_that_agents_write_or_show_contains_a_key(folder: Path, options: list[str]) -> None:
    other = Forked(folder, run_corn, *options, "0", environment=ENVIRONMENT)
    command = [sys.executable, "-m", "corn", *options, "1"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=folder, env=ENVIRONMENT, stdout=pipe, stderr=pipe
    ) as process:
        system = Path(f"/proc/{process.pid}")
        shown = {name: (system / name).read_bytes() for name in ("cmdline", "environ")}
        shown["stdout"], shown["stderr"] = process.communicate(timeout=120)
    assert (process.returncode, other.wait()) == (0, 0), shown
    secrets = find_secrets(folder / "keys")
    places = shown | read_all(folder / "out") | read_outputs(folder)
    log = (folder / "out" / "private" / "agent-1" / "log").read_text()
    assert "starts at step 0" in log
    assert "complete: step" in log
    require_private(folder / "out" / "private")
    assert find_leaks(secrets, places) == []
    # The search finds what it looks for: keys are in their files.
    assert len(find_leaks(secrets, read_all(folder / "keys"))) == NUM_AGENTS


def read_outputs(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("std*-*")}


def run_broken_corn(*arguments: str) -> None:
    """Fail with an unexpected error in the middle of a run, as a fault in the software would."""
    release = AgentStepper.release_half_step

    def fail(self: AgentStepper, **options: Any) -> Any:
        if self.step == 5:
            raise RuntimeError("broken")
        return release(self, **options)

    setattr(AgentStepper, "release_half_step", fail)  # noqa: B010
    run_corn(*arguments)


@pytest.mark.slow
def test_no_key_is_in_the_traceback_of_an_unexpected_error(
    folder: Path, options: list[str]
) -> None:
    agents = [
        Forked(folder, run_broken_corn, *options, str(agent), environment=ENVIRONMENT)
        for agent in range(NUM_AGENTS)
    ]
    assert [own.wait() for own in agents] == [1, 1]
    assert "RuntimeError: broken" in agents[0].stderr
    places = read_outputs(folder) | read_all(folder / "out")
    assert find_leaks(find_secrets(folder / "keys"), places) == []
    state = json.loads((folder / "out" / "private" / "agent-0" / "state.json").read_text())
    assert state["phase"] == "failed"
    log = (folder / "out" / "private" / "agent-0" / "log").read_text()
    assert "private, do not publish: RuntimeError" in log


@pytest.mark.parametrize(
    ("name", "mode", "advice"),
    [
        (".", 0o755, "chmod 700 "),
        (".", 0o710, "chmod 700 "),
        ("agent-0.key", 0o640, "chmod 600 "),
        ("agent-0-0123456789abcdef.ledger", 0o604, "chmod 600 "),
    ],
)
def test_keys_that_others_may_use_are_refused_with_the_command(
    folder: Path, name: str, mode: int, advice: str
) -> None:
    keys = folder / "keys"
    (keys / "agent-0-0123456789abcdef.ledger").touch(mode=0o600)
    load_credentials(keys, 0, NUM_AGENTS)
    (keys / name).chmod(mode)
    with pytest.raises(FileFormatError, match=rf"mode {mode:04o}; restrict it .* {advice}"):
        load_credentials(keys, 0, NUM_AGENTS)


def test_the_files_of_other_agents_do_not_matter(folder: Path) -> None:
    (folder / "keys" / "agent-1.key").chmod(0o644)
    require_private_keys(folder / "keys", 0)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems only disable core dumps")
def test_a_protected_process_cannot_be_dumped(tmp_path: Path) -> None:
    process = Forked(tmp_path, protect_and_print)
    assert process.wait() == 0
    assert process.stdout.splitlines() == ["0 0 0"]


def protect_and_print() -> None:
    protect_process()
    get_dumpable = 3
    limits = resource.getrlimit(resource.RLIMIT_CORE)
    print(ctypes.CDLL(None).prctl(get_dumpable), *limits)  # noqa: T201
