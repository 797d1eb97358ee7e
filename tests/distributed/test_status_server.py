"""The status server shows public numbers only, and strangers cannot stall it."""

import json
import os
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

import pytest

from corn.distributed.status import Status, render_metrics, serving_status
from corn.errors import CornError

from .monitored import make_state

SAMPLE = re.compile(
    r'([a-z_]+)\{([a-z_]+="(?:[^"\\\n]|\\["\\n])*"(?:,[a-z_]+="(?:[^"\\\n]|\\["\\n])*")*)\} (\S+)'
)


@contextmanager
def serve(status: Status) -> Iterator[int]:
    with serving_status(("127.0.0.1", 0), status) as (host, port):
        assert host == "127.0.0.1"
        yield port


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with closing(error):
            return error.code, error.read().decode()


def make_status() -> Status:
    return Status(2, make_state())


def test_health_follows_the_agent() -> None:
    status = Status(2)
    for state, code, phase in [
        (None, 200, "starting"),
        (make_state(), 200, "training"),
        (make_state(updated=time.time() - 121), 503, "training"),
        (make_state(phase="failed"), 503, "failed"),
        (make_state(phase="complete", updated=time.time() - 1000), 200, "complete"),
    ]:
        status.newest = state
        with serve(status) as port:
            found, body = get(port, "/healthz")
        assert (found, json.loads(body)["phase"]) == (code, phase)
        assert bool(json.loads(body)["problem"]) == (code == 503)


def test_metrics_are_samples_with_names_types_and_labels() -> None:
    lines = render_metrics(make_status()).splitlines()
    samples: dict[str, tuple[str, float]] = {}
    for line in lines:
        if not line.startswith("#"):
            match = SAMPLE.fullmatch(line)
            assert match is not None, line
            samples[match[1]] = match[2], float(match[3])
    typed = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    described = {line.split()[2] for line in lines if line.startswith("# HELP")}
    assert samples.keys() == typed == described
    assert samples["corn_step"][1] == 120
    assert samples["corn_releases_left"][1] == 280
    assert samples["corn_lost_at_step"][0] == 'agent="2",lost="1"'
    labels, spent = samples["corn_epsilon_spent"]
    assert spent == 3.21
    assert 'unit="sample"' in labels
    assert "one insider" in labels
    assert r"gradient is \"clipped\"" in labels


def test_metrics_before_training_names_and_simulations() -> None:
    before = render_metrics(Status(4, names=("A", "B", "<b>C", "D", 'E"')))
    assert r'corn_info{agent="4",agent_name="E\""' in before
    assert "corn_epsilon_spent" not in before
    simulated = Status(2, make_state(simulation="labels decide"))
    assert 'simulation="labels decide"' in render_metrics(simulated)


def test_other_paths_are_refused() -> None:
    with serve(make_status()) as port:
        assert get(port, "/nothing")[0] == 404
        assert get(port, "/healthz")[0] == 200


def test_a_client_that_asks_for_nothing_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corn.distributed.status._StatusHandler.timeout", 0.2)
    with (
        serve(make_status()) as port,
        socket.create_connection(("127.0.0.1", port), timeout=20) as connection,
    ):
        connection.sendall(b"GET / HTTP/1.1\r\nHost: loc")
        assert get(port, "/healthz")[0] == 200
        assert connection.recv(1) == b""


def test_a_flood_of_garbage_neither_ends_nor_stalls_it() -> None:
    stop = threading.Event()

    def flood(port: int) -> None:
        while not stop.is_set():
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as connection:
                connection.sendall(os.urandom(3000))

    with serve(make_status()) as port:
        threads = [threading.Thread(target=flood, args=(port,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            assert [get(port, "/healthz")[0] for _ in range(3)] == [200] * 3
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert get(port, "/metrics")[0] == 200


def test_an_address_in_use_is_one_line() -> None:
    with serve(make_status()) as port, pytest.raises(CornError, match="cannot be served: "):
        serving_status(("127.0.0.1", port), make_status()).__enter__()
    with pytest.raises(CornError, match="cannot be served: "):
        serving_status(("127.0.0.1", 1 << 16), make_status()).__enter__()
    with pytest.raises(CornError, match="cannot be served: "):
        serving_status(("a..b", 9100), make_status()).__enter__()
