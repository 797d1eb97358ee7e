"""Downloads of data sets: resumed after an interruption, and checked against pinned content."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from corn.errors import CornError, FileFormatError
from corn.learn.datasets.catalogue import (
    RemoteFile,
    cache_directory,
    cached_path,
    check_content,
    find_downloadable,
)

_CHUNK_BYTES = 1 << 16
_TIMEOUT_SECONDS = 30
_RANGE_NOT_SATISFIABLE = 416


class DownloadError(CornError):
    """A download that failed. The bytes that arrived are kept, and the next attempt resumes."""


ByteCounter: TypeAlias = Callable[[str, int, int | None], None]
"""A callback for progress: (file, bytes arrived, total or None if unknown)."""


def fetch_dataset(
    name: str,
    *,
    directory: Path | str | None = None,
    base_urls: Sequence[str] | None = None,
    on_progress: ByteCounter | None = None,
) -> Path:
    """Download the files of a data set that are not in the cache yet; return their directory.

    Each file is checked against the SHA-256 of its decompressed content before it gets its name, so
    every file in the cache is correct. An interrupted download resumes where it stopped.

    Args:
        name: ``a9a`` or ``mnist``.
        directory: the cache; see :func:`corn.learn.datasets.catalogue.cache_directory`.
        base_urls: servers to try instead of those of the catalogue.
        on_progress: called as bytes arrive.
    """
    dataset = find_downloadable(name)
    for file in dataset.files:
        target = cached_path(name, file, directory=directory)
        if not target.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            _fetch_file(file, target, base_urls or dataset.base_urls, on_progress)
    return cache_directory(directory) / name


def _fetch_file(
    file: RemoteFile, target: Path, base_urls: Sequence[str], on_progress: ByteCounter | None
) -> None:
    # Beside the target, so that the rename is atomic.
    partial = target.with_name(target.name + ".part")
    failures: list[str] = []
    wrong: FileFormatError | None = None
    for base_url in base_urls:
        try:
            _transfer(f"{base_url.rstrip('/')}/{file.name}", partial, on_progress)
            check_content(partial, file)
        except DownloadError as error:
            failures.append(str(error))
        except FileFormatError as error:
            # The server sent something else, such as a login page. The next attempt must not
            # resume it, and another server may have the right file.
            partial.unlink()
            wrong = error
        else:
            partial.replace(target)
            return
    if wrong is not None:
        raise wrong
    raise DownloadError(
        "; ".join(failures) + ". The bytes that arrived are kept: run the same command again to "
        "resume, or copy the files from elsewhere with: corn data import"
    )


def _transfer(url: str, partial: Path, on_progress: ByteCounter | None) -> None:
    """Append the missing bytes to ``partial``, or start over where the server cannot resume."""
    # A server that ignores the range sends the whole file with status 200, which must replace the
    # bytes that arrived and not follow them.
    have = partial.stat().st_size if partial.is_file() else 0
    try:
        with _open(url, have) as response:
            resumed = have > 0 and response.status == http.HTTPStatus.PARTIAL_CONTENT
            _receive(response, partial, have if resumed else 0, on_progress)
    except urllib.error.HTTPError as error:
        # The server has no bytes beyond those that arrived; the checksum decides if they are right.
        if error.code == _RANGE_NOT_SATISFIABLE and have > 0:
            return
        raise DownloadError(f"{url}: the server answered {error.code} {error.reason}") from error
    # urllib raises ``ValueError`` for an address that is none.
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise DownloadError(f"{url}: {reason}") from error


@contextmanager
def _open(url: str, have: int) -> Any:
    request = urllib.request.Request(url)  # noqa: S310  # URLs are the catalogue's or the caller's
    if have:
        request.add_header("Range", f"bytes={have}-")
    with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:  # noqa: S310
        yield response


def _receive(response: Any, partial: Path, have: int, on_progress: ByteCounter | None) -> None:
    length = response.headers.get("Content-Length")
    # Of a resumed transfer the header counts the remaining bytes only.
    total = None if length is None else have + int(length)
    with partial.open("ab" if have else "wb") as stream:
        while chunk := response.read(_CHUNK_BYTES):
            stream.write(chunk)
            have += len(chunk)
            if on_progress:
                on_progress(partial.name.removesuffix(".part"), have, total)
    # A connection that breaks off ends the stream without an error.
    if total is not None and have < total:
        raise DownloadError(f"{response.url}: the connection ended after {have} of {total} bytes")
