"""A SuperLink and SuperNodes as processes: releases recomputed from keys, and processes killed.

Flower starts a process for each message: all that a client knows of earlier rounds is in its
ledger.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from corn.engines import decode_hello
from corn.errors import CornError
from corn.noise import load_identity, load_roster
from corn.noise.ledger import read_history
from corn.plan import load_plan, make_plan, save_plan
from corn.privacy import PrivacyBudget
from corn.topology import load_network
from tests.contracts.engines import make_sites
from tests.oracles import masked_message

# More releases are allowed than there are rounds, so that ledgers count and do not end the run.
N, D, ROUNDS = 2, 20_000, 2
BUDGET = PrivacyBudget(20, 1e-5, num_steps=5, clip=20)
ROOT = Path(__file__).parents[1]
PROJECT = """
[project]
name = "noise"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "corn"
[tool.flwr.app.components]
serverapp = "app:server"
clientapp = "app:client"
"""
NOISE_APP = """
from tests.test_flower_deployment import make_client, make_server
client = make_client()
server = make_server()
"""
CONSORTIUM_APP = """
import os
from pathlib import Path
from flwr.serverapp import ServerApp
from corn.flower import make_client_app, train_consortium
client = make_client_app()
server = ServerApp()
folder = Path(os.environ["CORN_TEST_FOLDER"])
@server.main()
def main(grid, context):
    train_consortium(grid, folder / "sites" / "made" / "consortium.toml", folder / "out")
    (folder / "done").touch()
"""


class Deployment:
    """A SuperLink with a database and SuperNodes, each in a session of its own."""

    def __init__(self, folder: Path, app: str) -> None:
        self.folder, self.log, self.port = folder, folder / "log", find_port()
        (folder / "app").mkdir()
        (folder / "home").mkdir()
        (folder / "app" / "pyproject.toml").write_text(PROJECT)
        (folder / "app" / "app.py").write_text(app)
        (folder / "home" / "config.toml").write_text(
            '[superlink]\ndefault = "test"\n'
            f'[superlink.test]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        )
        self.programs = Path(sys.executable).parent
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.environment = {
            **os.environ,
            "CORN_TEST_FOLDER": str(folder),
            "FLWR_HOME": str(folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "PATH": os.pathsep.join([str(self.programs), os.environ.get("PATH", "")]),
            "PYTHONPATH": os.pathsep.join(paths),
        }
        self.processes: list[subprocess.Popen[bytes]] = []
        self.deadline = time.monotonic() + 900

    def start(self, program: str, *options: str) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as out:
            # Processes that this one starts inherit the file and its lock: see ``close``.
            fcntl.flock(out, fcntl.LOCK_SH)
            process = subprocess.Popen(
                [self.programs / program, "--insecure", *options],
                env=self.environment,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def start_superlink(self) -> subprocess.Popen[bytes]:
        # Ports of the old interfaces too, which are opened all the same.
        old = ("--control-api-address", "--fleet-api-address")
        process = self.start(
            "flower-superlink",
            "--disable-runtime-dependency-installation",
            *("--port", str(self.port), "--database", str(self.folder / "superlink.db")),
            *(word for name in old for word in (name, f"127.0.0.1:{find_port()}")),
        )
        self.wait_until(lambda: answers(self.port))
        return process

    def start_supernode(self, site: Path, *options: str) -> subprocess.Popen[bytes]:
        return self.start(
            "flower-supernode",
            *("--superlink", f"127.0.0.1:{self.port}", "--port", str(find_port())),
            *("--node-config", f'corn="{site}"', *options),
        )

    def submit(self) -> None:
        command = [str(self.programs / "flwr"), "run", str(self.folder / "app"), "test"]
        subprocess.run(command, env=self.environment, capture_output=True, check=True)

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """Kill a process and all that it started."""
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self.processes.remove(process)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait, or raise if the deployment has failed."""
        while not condition():
            is_over = any(each.poll() is not None for each in self.processes)
            is_over = is_over or time.monotonic() > self.deadline
            assert not is_over, self.log.read_text()[-3000:]
            time.sleep(0.2)

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        # Flower's processes end once their parents have: until then they hold the lock of the log.
        with self.log.open() as left:
            for _ in range(300):
                try:
                    fcntl.flock(left, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    time.sleep(0.1)
                else:
                    return
        pytest.fail("processes of the deployment are left")


def find_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def answers(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def deploy(tmp_path: Path) -> Iterator[Callable[[str], Deployment]]:
    pytest.importorskip("flwr.app")
    made: list[Deployment] = []

    def make(app: str) -> Deployment:
        made.append(Deployment(tmp_path, app))
        return made[0]

    yield make
    made[0].close()


def count_releases(site: Path, agent: int) -> int:
    return sum(each.num_releases for each in read_history([site], agent).expenses)


def make_client() -> Any:
    """Return a client app that answers with the server's model, and keeps what it sends."""
    from flwr.clientapp import ClientApp

    from corn.flower import CornMod

    folder = Path(os.environ["CORN_TEST_FOLDER"])

    def keep(message: Any, context: Any, call_next: Any) -> Any:
        reply = call_next(message, context)
        config = message.content.config_records.get("config")
        if config is not None:
            name = f"{config['server-round']}-{Path(context.node_config['corn']).name}.npz"
            np.savez(
                folder / name,
                integers=reply.content["arrays"]["integers"].numpy(),
                offset_seed=np.frombuffer(reply.content["corn"]["offset-seed"], np.uint8),
                hellos=[each.hex() for each in config["corn.hellos"]],
                process=os.getpid(),
            )
        return reply

    app = ClientApp(mods=[keep, CornMod()])
    app.train()(answer)
    return app


def answer(message: Any, _: object) -> Any:
    """Return the server's model, so that the next one is noise alone."""
    from flwr.app import Message, MetricRecord, RecordDict

    metrics = MetricRecord({"num-examples": 1})
    content = RecordDict({"arrays": message.content["arrays"], "metrics": metrics})
    return Message(content, reply_to=message)


def make_server() -> Any:
    """Return a server app that keeps the model of every round."""
    from flwr.app import Array, ArrayRecord
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg

    from corn.flower import CornStrategy

    folder, app = Path(os.environ["CORN_TEST_FOLDER"]), ServerApp()

    def keep(number: int, arrays: Any) -> None:
        np.save(folder / f"model-{number}.npy", arrays["weights"].numpy())

    def main(grid: Any, _: object) -> None:
        strategy = CornStrategy(FedAvg(fraction_evaluate=0.0), folder / "plan.corn")
        arrays = ArrayRecord({"weights": Array(np.zeros(D))})
        try:
            strategy.start(grid, arrays, num_rounds=ROUNDS, evaluate_fn=keep)
        except CornError as error:
            (folder / "error").write_text(str(error))
            raise
        (folder / "done").touch()

    app.main()(main)
    return app


def run_noise_app(deployment: Deployment, *options: str) -> None:
    """Run the app with a site for each SuperNode, which has these options."""
    folder = deployment.folder
    plan = make_plan(load_network(f"complete:{N}", mixing="sum"), BUDGET)
    save_plan(plan, folder / "plan.corn")
    make_sites(folder / "sites", plan, [str(agent) for agent in range(N)])
    deployment.start_superlink()
    for agent in range(N):
        deployment.start_supernode(folder / "sites" / str(agent), *options)
    deployment.submit()


@pytest.mark.slow
def test_every_release_of_a_deployment_follows_from_keys_and_has_the_noise_of_the_plan(
    deploy: Callable[[str], Deployment], tmp_path: Path
) -> None:
    deployment = deploy(NOISE_APP)
    run_noise_app(deployment)
    deployment.wait_until((tmp_path / "done").exists)
    check_releases(tmp_path)


@pytest.mark.slow
def test_a_supernode_that_trusts_signers_runs_no_app_that_they_have_not_signed(
    deploy: Callable[[str], Deployment], tmp_path: Path
) -> None:
    public = ed25519.Ed25519PrivateKey.generate().public_key()
    key = public.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    (tmp_path / "trusted.yaml").write_text(f"fpk_reviewer: '{key.decode()}'\n")
    deployment = deploy(NOISE_APP)
    run_noise_app(deployment, "--trusted-entities", str(tmp_path / "trusted.yaml"))
    deployment.wait_until((tmp_path / "error").exists)
    assert "could not be verified" in (tmp_path / "error").read_text()
    assert not list(tmp_path.glob("sites/*/*.ledger"))


def check_releases(folder: Path) -> None:
    """Compare all that was sent and computed with keys, ledgers and the plan."""
    plan, sites = load_plan(folder / "plan.corn"), folder / "sites"
    public_keys = dict(enumerate(load_roster(sites / "all" / "roster.json").public_keys))
    model, noises, processes = np.zeros(D), [], set()
    for number in range(1, ROUNDS + 1):
        total, average = np.zeros(D, np.uint16), np.zeros(D)
        for agent in range(N):
            with np.load(folder / f"{number}-{agent}.npz") as kept:
                sent, seed = kept["integers"], kept["offset_seed"].tobytes()
                hellos = [decode_hello(bytes.fromhex(each)) for each in kept["hellos"].tolist()]
                processes.add(int(kept["process"]))
            secret = load_identity(sites / str(agent) / f"agent-{agent}.key").secret.reveal()
            at = masked_message.Round(plan, plan, {each.agent: each.nonce for each in hellos})
            noise = masked_message.draw_private_noise(at, agent, secret, D)
            mask = masked_message.draw_mask(at, agent, secret, public_keys, D)
            expected = masked_message.recompute_message(at, noise, mask=mask, offset_seed=seed)
            np.testing.assert_array_equal(sent, expected)
            noises.append(noise)
            total += sent
            average -= masked_message.draw_offset(seed, D)
        average = (average + total.view(np.int16)) * plan.grid / N
        after = np.load(folder / f"model-{number}.npy")
        np.testing.assert_allclose(after - model, average, rtol=0, atol=1e-9)
        model = after
        # A trusted server's noise on the average has σ_LDP/n, and one client may be curious.
        # ε and δ lose a part to floating point, and the grid adds its rounding: below 1 %.
        server = BUDGET.independent_noise_std**2 / N**2
        assert average.var() / server == pytest.approx(N / (N - 1), rel=0.01 + 6 * (2 / D) ** 0.5)
    assert len(processes) == N * ROUNDS, "every message has a process of its own"
    for noise in noises:
        assert noise.var() == pytest.approx(at.private_variance, rel=6 * (2 / D) ** 0.5)
    for first, second in combinations(noises, 2):
        assert abs(np.corrcoef(first, second)[0, 1]) < 6 / D**0.5
    assert [count_releases(sites / str(agent), agent) for agent in range(N)] == [ROUNDS] * N


STEPS = 10


def make_three_hospitals(folder: Path) -> None:
    """Make the folders of the three small hospitals, under a plan of few steps."""
    example = runpy.run_path(str(ROOT / "examples" / "six_hospitals.py"))
    example["write_files"](folder / "made")
    file = folder / "made" / "consortium.toml"
    head, *sites = re.split(r"(?=\[\[sites\]\])", file.read_text(encoding="utf-8"))
    head = head.replace("complete:6", "complete:3").replace("steps = 100", f"steps = {STEPS}")
    file.write_text(head.replace("epsilon = 1", "epsilon = 8") + "".join(sites[3:]))
    example["make_folders"](folder, ["0", "1", "2"])


@pytest.mark.slow
def test_rows_of_a_deployment_stay_protected_while_a_supernode_and_the_superlink_are_killed(
    deploy: Callable[[str], Deployment], tmp_path: Path
) -> None:
    """Unit sample. The SuperNode comes back as a new node, and the SuperLink with its database."""
    make_three_hospitals(tmp_path / "sites")
    sites = [tmp_path / "sites" / str(agent) for agent in range(3)]

    def count() -> list[int]:
        return [count_releases(site, agent) for agent, site in enumerate(sites)]

    deployment = deploy(CONSORTIUM_APP)
    superlink = deployment.start_superlink()
    nodes = [deployment.start_supernode(site) for site in sites]
    deployment.submit()
    deployment.wait_until(lambda: min(count()) >= 2)
    deployment.kill(nodes[2])
    left_out = count()[2]
    # The others have spent a void round, and go on without it.
    deployment.wait_until(lambda: min(count()[:2]) >= left_out + 2)
    deployment.start_supernode(sites[2])
    deployment.wait_until(lambda: count()[2] > left_out)
    deployment.kill(superlink)
    kept = np.load(tmp_path / "out" / "parameters.npy")
    spent = count()
    assert max(spent) < STEPS
    assert not (tmp_path / "done").exists()
    deployment.start_superlink()
    deployment.submit()
    deployment.wait_until((tmp_path / "done").exists)
    final = count()
    assert max(final) == STEPS
    assert all(before <= after <= STEPS for before, after in zip(spent, final, strict=True))
    # The first model is zero: the last one follows from the one that was kept.
    model = np.load(tmp_path / "out" / "parameters.npy")
    assert 0 < np.linalg.norm(model - kept) < np.linalg.norm(model)
    command = [sys.executable, "-m", "corn", "predict", str(tmp_path / "out")]
    data = str(tmp_path / "sites" / "made" / "public.csv")
    environment = deployment.environment
    done = subprocess.run(
        [*command, data, "--json"], env=environment, capture_output=True, check=True
    )
    result, _ = json.JSONDecoder().raw_decode(done.stdout.decode())
    assert result["promise"]["unit"] == "sample"
    assert result["promise"]["simulation"] == ""
    assert result["scores"]["accuracy"] > 0.6


@pytest.mark.slow
def test_six_hospitals_of_one_consortium_file_run_in_the_simulation_engine(tmp_path: Path) -> None:
    """Sizes from 9000 to 40, text, dates and missing values."""
    pytest.importorskip("ray", reason="needs Flower's simulation engine: make engines")
    example = str(ROOT / "examples" / "flower_hospitals.py")
    done = subprocess.run(
        [sys.executable, example, str(tmp_path)], capture_output=True, check=False, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    promise, accuracy = done.stdout.splitlines()[-2:]
    assert promise.startswith("ε = 1, δ = 1e-06 for one sample")
    # Ten simulated runs have 0.834 ± 0.001.
    assert float(accuracy.split()[-1]) > 0.82
    sites = tmp_path / "sites"
    assert [count_releases(sites / str(agent), agent) for agent in range(6)] == [100] * 6
