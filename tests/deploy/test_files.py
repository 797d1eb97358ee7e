"""Files of a deployment are valid, run without root, and keep keys in volumes of their own."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_conventions import options_of

DEPLOY = Path(__file__).parents[2] / "deploy"
ROOT = DEPLOY.parent
NUM_AGENTS = 8
PORTS = {"store": 29500, "messages": 29600, "status": 9100}


def read_compose() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())
    return found


def read_kubernetes() -> dict[str, dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    documents = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    return {document["kind"]: document for document in documents}


def run(*command: str | Path, cwd: Path | None = None) -> None:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""


def find_tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def test_the_dockerfile_has_no_findings_of_hadolint() -> None:
    run(find_tool("hadolint"), DEPLOY / "Dockerfile")


def test_the_image_runs_without_root_and_copies_files_that_exist() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    (user,) = re.findall(r"^USER (\S+)", text, flags=re.MULTILINE)
    assert user.split(":")[0] not in ("0", "root")
    for line in re.findall(r"^COPY (?!--from)(.+)$", text, flags=re.MULTILINE):
        *sources, _ = [word for word in line.split() if not word.startswith("--")]
        assert all((ROOT / source).exists() for source in sources), line
    exposed = re.findall(r"^EXPOSE (.+)$", text, flags=re.MULTILINE)[0].split()
    assert {int(port) for port in exposed} == set(PORTS.values())


def test_the_image_contains_no_file_but_those_named() -> None:
    """Keys and results beside the sources must not be sent to the builder."""
    lines = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"


def test_the_entry_point_has_no_findings_of_shellcheck() -> None:
    run(find_tool("shellcheck"), DEPLOY / "entrypoint.sh")


def test_compose_runs_eight_agents_with_volumes_of_their_own() -> None:
    document = read_compose()
    agents = {name: own for name, own in document["services"].items() if name != "roster"}
    assert set(agents) == {f"agent-{number}" for number in range(NUM_AGENTS)}
    for number in range(NUM_AGENTS):
        own = agents[f"agent-{number}"]
        assert own["hostname"] == f"agent-{number}"
        targets = dict(each.split(":")[:2] for each in own["volumes"] if "$" not in each)
        assert targets[f"keys-{number}"] == "/var/lib/corn/keys"
        assert targets[f"out-{number}"] == "/var/lib/corn/out"
        assert f"${{CORN_SITES:-./data}}/agent-{number}:/data:ro" in own["volumes"]
        # A volume of keys is mounted by its own agent only, and by no roster.
        others = [
            volume
            for name, service in document["services"].items()
            for volume in service["volumes"]
            if name != f"agent-{number}"
        ]
        private = (f"keys-{number}:", f"out-{number}:", f"${{CORN_SITES:-./data}}/agent-{number}:")
        assert not any(volume.startswith(private) for volume in others)
        assert own["cap_drop"] == ["ALL"]
        assert own["read_only"] is True
        # Ports are opened to this machine only.
        assert all(port.startswith("127.0.0.1:") for port in own.get("ports", []))
    declared = set(document["volumes"])
    assert declared == {"public"} | {f"{kind}-{a}" for kind in ("keys", "out") for a in range(8)}


def test_docker_reads_the_compose_file() -> None:
    docker = find_tool("docker")
    if subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("docker has no compose plugin")
    run(docker, "compose", "--file", DEPLOY / "docker-compose.yml", "config", "--quiet")


def test_kubernetes_accepts_every_document() -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for document in read_kubernetes().values():
        validate.validate(document, "1.31", strict=True)


def test_the_stateful_set_has_eight_agents_with_claims_and_without_root() -> None:
    documents = read_kubernetes()
    spec = documents["StatefulSet"]["spec"]
    pod, service = spec["template"]["spec"], documents["Service"]["spec"]
    assert (spec["replicas"], spec["serviceName"]) == (
        NUM_AGENTS,
        documents["Service"]["metadata"]["name"],
    )
    assert service["clusterIP"] == "None"
    assert pod["securityContext"]["runAsNonRoot"] is True
    # Without it, each start would open the keys to the group, and the agent would refuse them.
    assert pod["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
    (container,) = pod["containers"]
    assert {own["name"]: own["port"] for own in service["ports"]} == PORTS
    assert {own["name"]: own["containerPort"] for own in container["ports"]} == PORTS
    environment = {own["name"]: own.get("value", "") for own in container["env"]}
    (claim,) = spec["volumeClaimTemplates"]
    mounts = {own["name"]: own["mountPath"] for own in container["volumeMounts"]}
    for name in ("CORN_KEYS", "CORN_OUT"):
        # In a folder below the mount, whose mode the agent can choose.
        assert Path(mounts[claim["metadata"]["name"]]) in Path(environment[name]).parents
    assert "Secret" not in documents


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    analyze = find_tool("systemd-analyze")
    text = (DEPLOY / "corn-agent@.service").read_text()
    assert "LimitCORE=0" in text
    assert "User=corn" in text
    # The command must exist where the unit is checked.
    unit = tmp_path / "corn-agent@.service"
    unit.write_text(text.replace("/opt/corn/bin/corn", "/bin/true"))
    run(analyze, "verify", "corn-agent@3.service", cwd=tmp_path)


def test_the_options_in_the_file_exist() -> None:
    lines = (DEPLOY / "agent.options").read_text().splitlines()
    pairs = [line.split() for line in lines if line and not line.startswith("#")]
    options = {name.removeprefix("--"): value for name, value in pairs}
    known = {max(option.opts, key=len).removeprefix("--") for option in options_of("agent")}
    assert set(options) <= known
    assert options["store"].endswith(f":{PORTS['store']}")
    assert options["listen"].endswith(f":{PORTS['messages']}")
    assert options["status"].endswith(f":{PORTS['status']}")


@pytest.mark.parametrize("path", sorted(DEPLOY.iterdir()), ids=lambda path: path.name)
def test_no_file_contains_a_secret(path: Path) -> None:
    assert not re.search(r"[0-9a-f]{64}|PRIVATE KEY|password", path.read_text())
