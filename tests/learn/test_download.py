"""Downloads from a local server: checked, and refused if the content is wrong."""

import gzip
import hashlib
import http.server
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from corn.errors import FileFormatError
from corn.learn import datasets
from corn.learn.datasets import DownloadableDataset, fetch_dataset, is_cached

CONTENT = {"plain": b"0123456789" * 50_000, "packed": b"some other content " * 10_000}
SERVED = {"plain": CONTENT["plain"], "packed.gz": gzip.compress(CONTENT["packed"])}


class Server(http.server.ThreadingHTTPServer):
    """A server of two files that can break off, or send wrong content."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.served = dict(SERVED)
        self.break_after: int | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/files/"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        content = self.server.served.get(self.path.removeprefix("/files/"))
        if content is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: self.server.break_after])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch, server: Server) -> DownloadableDataset:
    files = {name: hashlib.sha256(CONTENT[name.removesuffix(".gz")]).hexdigest() for name in SERVED}
    dataset = DownloadableDataset("toy", files, server.url)
    monkeypatch.setitem(datasets.DOWNLOADABLE, "toy", dataset)
    return dataset


def test_a_data_set_is_fetched_once(
    server: Server, toy: DownloadableDataset, tmp_path: Path
) -> None:
    place = fetch_dataset("toy", directory=tmp_path)
    assert is_cached(toy, directory=tmp_path)
    assert (place / "plain").read_bytes() == CONTENT["plain"]
    server.served.clear()  # from now on every request is answered by 404, and fails
    assert fetch_dataset("toy", directory=tmp_path) == place


@pytest.mark.parametrize(
    ("name", "content", "break_after", "message"),
    [
        ("plain", b"something else", None, "sha256 of plain must be"),
        ("packed.gz", SERVED["packed.gz"][:-9], None, "corn data get toy FOLDER"),
        ("plain", None, None, r"404.*corn data get toy FOLDER"),
        ("plain", SERVED["plain"], 200_000, "plain"),
    ],
)
def test_wrong_content_leaves_no_file(
    server: Server,
    tmp_path: Path,
    name: str,
    content: bytes | None,
    break_after: int | None,
    message: str,
) -> None:
    server.break_after = break_after
    server.served = {**SERVED, name: content} if content else {}
    with pytest.raises(FileFormatError, match=message):
        fetch_dataset("toy", directory=tmp_path)
    assert {path.name for path in (tmp_path / "toy").iterdir()} <= {"plain"} - {name}


def test_an_unreachable_server_is_a_download_error(
    monkeypatch: pytest.MonkeyPatch, toy: DownloadableDataset, tmp_path: Path
) -> None:
    absent = replace(toy, url="http://127.0.0.1:1/")
    monkeypatch.setitem(datasets.DOWNLOADABLE, "toy", absent)
    with pytest.raises(FileFormatError, match="corn data get toy FOLDER"):
        fetch_dataset("toy", directory=tmp_path)
