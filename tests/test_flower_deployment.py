"""A SuperLink and two SuperNodes as processes: every release is recomputed from the keys.

Clients have nothing to train, so that the server's model is noise alone. Flower starts a process
for each message: all that a client knows of earlier rounds is in its ledger.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corn.distributed import make_keys
from corn.flower import CornMod, CornStrategy
from corn.noise import load_identity, load_roster
from corn.noise.ledger import read_ledger
from corn.plan import load_plan, make_plan, save_plan
from corn.privacy import PrivacyBudget
from corn.topology import load_network
from tests.oracles import masked_message

# More releases are allowed than there are rounds, so that ledgers count and do not end the run.
N, D, ROUNDS = 2, 20_000, 2
BUDGET = PrivacyBudget(20, 1e-5, num_steps=5, clip=20)
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
APP = """
from tests.test_flower_deployment import make_client, make_server
client = make_client()
server = make_server()
"""


def make_client() -> Any:
    """Return a client app that answers with the server's model, and keeps what it sends."""
    from flwr.clientapp import ClientApp

    folder = Path(os.environ["CORN_TEST_FOLDER"])

    def keep(message: Any, context: Any, call_next: Any) -> Any:
        reply = call_next(message, context)
        config = message.content.config_records.get("config")
        if config is not None:
            name = f"{config['server-round']}-{context.node_config['partition-id']}.npz"
            np.savez(
                folder / name,
                integers=reply.content["arrays"]["integers"].numpy(),
                offset_seed=np.frombuffer(reply.content["corn"]["offset-seed"], np.uint8),
                nonces=config["corn.nonces"],
                process=os.getpid(),
            )
        return reply

    # The server's process makes this app too, and has no keys.
    keys = Path(os.environ.get("CORN_TEST_KEYS", folder))
    app = ClientApp(mods=[keep, CornMod(folder / "plan.corn", keys)])
    app.train()(answer)
    return app


def answer(message: Any, _: object) -> Any:
    from flwr.app import Message, MetricRecord, RecordDict

    metrics = MetricRecord({"num-examples": 1})
    content = RecordDict({"arrays": message.content["arrays"], "metrics": metrics})
    return Message(content, reply_to=message)


def make_server() -> Any:
    """Return a server app that keeps the model of every round."""
    from flwr.app import Array, ArrayRecord
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg

    folder, app = Path(os.environ["CORN_TEST_FOLDER"]), ServerApp()

    def keep(number: int, arrays: Any) -> None:
        np.save(folder / f"model-{number}.npy", arrays["weights"].numpy())

    def main(grid: Any, _: object) -> None:
        strategy = CornStrategy(FedAvg(fraction_evaluate=0.0), folder / "plan.corn")
        arrays = ArrayRecord({"weights": Array(np.zeros(D))})
        strategy.start(grid, arrays, num_rounds=ROUNDS, evaluate_fn=keep)
        (folder / "done").touch()

    app.main()(main)
    return app


def deploy(folder: Path, *, seconds: float = 500) -> None:
    """Run the app in a deployment, each client with a folder of its own for its keys."""
    app, home, log = folder / "app", folder / "home", folder / "log"
    app.mkdir()
    home.mkdir()
    (app / "pyproject.toml").write_text(PROJECT)
    (app / "app.py").write_text(APP)
    port = find_port()
    address = f"127.0.0.1:{port}"
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "test"\n[superlink.test]\naddress = "{address}"\ninsecure = true\n'
    )
    programs = Path(sys.executable).parent
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "CORN_TEST_FOLDER": str(folder),
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "PATH": os.pathsep.join([str(programs), os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join(paths),
    }
    processes: list[subprocess.Popen[bytes]] = []

    def start(program: str, *options: str, **variables: str) -> None:
        with log.open("ab") as out:
            # Processes that this one starts inherit the file and its lock: see ``wait_for_rest``.
            fcntl.flock(out, fcntl.LOCK_SH)
            processes.append(
                subprocess.Popen(
                    [programs / program, "--insecure", *options],
                    env={**environment, **variables},
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                )
            )

    deadline = time.monotonic() + seconds
    try:
        # Ports of the old interfaces too, which are opened all the same.
        old = ("--control-api-address", "--fleet-api-address")
        start(
            "flower-superlink",
            "--disable-runtime-dependency-installation",
            *("--port", str(port)),
            *(word for name in old for word in (name, f"127.0.0.1:{find_port()}")),
        )
        for agent in range(N):
            start(
                "flower-supernode",
                *("--superlink", address, "--port", str(find_port())),
                *("--node-config", f"partition-id={agent}"),
                CORN_TEST_KEYS=str(folder / f"keys-{agent}"),
            )
        while not answers(port):
            wait(deadline, processes, log)
        submit = [str(programs / "flwr"), "run", str(app), "test"]
        subprocess.run(submit, env=environment, capture_output=True, check=True)
        while not (folder / "done").exists():
            wait(deadline, processes, log)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        for process in processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        wait_for_rest(log)


def wait_for_rest(log: Path) -> None:
    """Wait until nobody writes to the log: Flower's processes end once their parents have."""
    with log.open() as left:
        for _ in range(200):
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


def wait(deadline: float, processes: list[subprocess.Popen[bytes]], log: Path) -> None:
    """Wait a moment, or raise if the deployment has failed."""
    is_over = time.monotonic() > deadline or any(each.poll() is not None for each in processes)
    assert not is_over, log.read_text()[-2000:]
    time.sleep(0.2)


@pytest.mark.slow
def test_every_release_of_a_deployment_follows_from_keys_and_has_the_noise_of_the_plan(
    tmp_path: Path,
) -> None:
    pytest.importorskip("flwr.app")
    plan = make_plan(load_network(f"complete:{N}", mixing="sum"), BUDGET)
    save_plan(plan, tmp_path / "plan.corn")
    make_keys(tmp_path / "keys", N)
    for agent in range(N):
        (tmp_path / f"keys-{agent}").mkdir(mode=0o700)
        for name in ("roster.json", f"agent-{agent}.key"):
            shutil.copy2(tmp_path / "keys" / name, tmp_path / f"keys-{agent}" / name)
    deploy(tmp_path)
    check_deployment(tmp_path)


def check_deployment(folder: Path) -> None:
    """Compare all that was sent and computed with keys, ledgers and the plan."""
    plan, roster = load_plan(folder / "plan.corn"), load_roster(folder / "keys" / "roster.json")
    public_keys = dict(enumerate(roster.public_keys))
    model, noises, processes = np.zeros(D), [], set()
    for number in range(1, ROUNDS + 1):
        total, average = np.zeros(D, np.uint16), np.zeros(D)
        for agent in range(N):
            with np.load(folder / f"{number}-{agent}.npz") as kept:
                sent, seed = kept["integers"], kept["offset_seed"].tobytes()
                nonces = dict(enumerate(map(bytes.fromhex, kept["nonces"].tolist())))
                processes.add(int(kept["process"]))
            secret = load_identity(folder / f"keys-{agent}" / f"agent-{agent}.key").secret.reveal()
            at = masked_message.Round(plan, plan, nonces, number)
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
    for agent in range(N):
        (ledger,) = folder.glob(f"keys-{agent}/agent-{agent}-*.ledger")
        assert read_ledger(ledger).expense.num_releases == ROUNDS
