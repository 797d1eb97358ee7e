"""Downloads from a local server: resumed, checked, and refused if the content is wrong."""

import gzip
import hashlib
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from corn.errors import FileFormatError
from corn.learn import datasets
from corn.learn.datasets import (
    DownloadableDataset,
    DownloadError,
    RemoteFile,
    fetch_dataset,
    is_cached,
)

CONTENT = {"plain": b"0123456789" * 50_000, "packed": b"some other content " * 10_000}
SERVED = {"plain": CONTENT["plain"], "packed.gz": gzip.compress(CONTENT["packed"])}


class Server(http.server.ThreadingHTTPServer):
    """A server of two files that can break off, ignore ranges, or send wrong content."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.served = dict(SERVED)
        self.break_after: int | None = None
        self.knows_ranges = True
        self.ranges: list[str] = []

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
        start, status = 0, 200
        if "Range" in self.headers and self.server.knows_ranges:
            self.server.ranges.append(self.headers["Range"])
            start, status = int(self.headers["Range"][6:-1]), 206
            if start >= len(content):
                self.send_error(416)
                return
        body = content[start:]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: self.server.break_after])

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
def toy(monkeypatch: pytest.MonkeyPatch) -> DownloadableDataset:
    files = tuple(
        RemoteFile(name, hashlib.sha256(CONTENT[name.removesuffix(".gz")]).hexdigest())
        for name in SERVED
    )
    dataset = DownloadableDataset("toy", "idx", files, ("http://unused/",), "digits", "a toy")
    monkeypatch.setitem(datasets.DOWNLOADABLE, "toy", dataset)
    return dataset


def test_fetches_checks_and_reports_progress(
    server: Server, toy: DownloadableDataset, tmp_path: Path
) -> None:
    seen: list[tuple[str, int, int | None]] = []
    fetch_dataset(
        "toy",
        directory=tmp_path,
        base_urls=[server.url],
        on_progress=lambda *news: seen.append(news),
    )
    assert is_cached(toy, directory=tmp_path)
    assert (tmp_path / "toy" / "plain").read_bytes() == CONTENT["plain"]
    assert (seen[-1][1], seen[-1][0]) == (len(SERVED["packed.gz"]), "packed.gz")
    assert ("plain", 500_000, 500_000) in seen


def test_a_cached_file_is_not_downloaded_again(server: Server, tmp_path: Path) -> None:
    first = fetch_dataset("toy", directory=tmp_path, base_urls=[server.url])
    server.served.clear()  # from now on every request is answered by 404, and fails
    assert fetch_dataset("toy", directory=tmp_path, base_urls=[server.url]) == first


@pytest.mark.parametrize("knows_ranges", [True, False])
def test_an_interrupted_download_resumes(
    server: Server, tmp_path: Path, knows_ranges: bool
) -> None:
    server.break_after, server.knows_ranges = 200_000, knows_ranges
    with pytest.raises(DownloadError, match=r"200000 of 500000 bytes.*run the same command again"):
        fetch_dataset("toy", directory=tmp_path, base_urls=[server.url])
    assert (tmp_path / "toy" / "plain.part").stat().st_size == 200_000
    server.break_after = None
    fetch_dataset("toy", directory=tmp_path, base_urls=[server.url])
    assert (tmp_path / "toy" / "plain").read_bytes() == CONTENT["plain"]
    assert server.ranges == (["bytes=200000-"] if knows_ranges else [])


def test_a_complete_part_is_accepted(server: Server, tmp_path: Path) -> None:
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "plain.part").write_bytes(CONTENT["plain"])
    fetch_dataset("toy", directory=tmp_path, base_urls=[server.url])
    assert (tmp_path / "toy" / "plain").read_bytes() == CONTENT["plain"]


def test_wrong_content_is_refused_and_not_resumed(server: Server, tmp_path: Path) -> None:
    server.served["plain"] = b"something else"
    with pytest.raises(FileFormatError, match="sha256 of plain must be"):
        fetch_dataset("toy", directory=tmp_path, base_urls=[server.url])
    assert list((tmp_path / "toy").iterdir()) == []
    server.served["plain"], server.served["packed.gz"] = SERVED["plain"], SERVED["packed.gz"][:-9]
    with pytest.raises(FileFormatError, match="not a complete gzip file"):
        fetch_dataset("toy", directory=tmp_path, base_urls=[server.url])


def test_the_next_server_is_tried_after_a_404(server: Server, tmp_path: Path) -> None:
    wrong = server.url.replace("files", "nothing")
    fetch_dataset("toy", directory=tmp_path, base_urls=[wrong, server.url])
    with pytest.raises(DownloadError, match=r"answered 404.*corn data import"):
        fetch_dataset("toy", directory=tmp_path / "other", base_urls=[wrong])


def test_the_next_server_is_tried_after_wrong_content(server: Server, tmp_path: Path) -> None:
    server.served["wrong/plain"] = b"<html>please log in</html>"
    places = [server.url + "wrong/", server.url]
    fetch_dataset("toy", directory=tmp_path, base_urls=places)
    assert (tmp_path / "toy" / "plain").read_bytes() == CONTENT["plain"]


def test_an_unreachable_server_is_a_download_error(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="refused"):
        fetch_dataset("toy", directory=tmp_path, base_urls=["http://127.0.0.1:1/"])
    with pytest.raises(DownloadError, match="unknown url type"):
        fetch_dataset("toy", directory=tmp_path, base_urls=["mirror.example"])
