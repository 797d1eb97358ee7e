"""Fetch a data set once: resumable, checked against its pinned content, with a progress bar."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from corn.errors import CornError, FileFormatError
from corn.learn.datasets.cache import cache_directory, cached_path, check_content
from corn.learn.datasets.catalogue import RemoteFile, find_downloadable

_CHUNK_BYTES = 1 << 16
_TIMEOUT_SECONDS = 30
_RANGE_NOT_SATISFIABLE = 416


class DownloadError(CornError):
    """A file could not be fetched; what has arrived so far is kept and resumed next time."""


ByteCounter: TypeAlias = Callable[[str, int, int | None], None]
"""What shows how far a download is: (file, bytes arrived, total or None if not known)."""


def fetch_dataset(
    name: str,
    *,
    directory: Path | str | None = None,
    base_urls: Sequence[str] | None = None,
    on_progress: ByteCounter | None = None,
) -> Path:
    """Download the files of a data set that are not in the cache yet; return their directory.

    Each file is checked against the SHA-256 of its decompressed content before it gets its name, so
    what is in the cache is right. An interrupted download goes on where it stopped.

    Args:
        name: ``a9a`` or ``mnist``.
        directory: the cache; see :func:`corn.learn.datasets.cache.cache_directory`.
        base_urls: other places to try, instead of the official ones.
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
    partial = target.with_name(target.name + ".part")
    failures: list[str] = []
    wrong: FileFormatError | None = None
    for base_url in base_urls:
        try:
            _transfer(f"{base_url.rstrip('/')}/{file.name}", partial, on_progress)
            _accept(partial, target, file)
        except DownloadError as error:
            failures.append(str(error))
        except FileFormatError as error:
            # A login page instead of the file, say: another place may have the real one.
            wrong = error
        else:
            return
    if wrong is not None:
        raise wrong
    raise DownloadError(
        "; ".join(failures) + ". What arrived is kept: run the same command again to resume, or "
        "bring the files by other means with: corn data import"
    )


def _accept(partial: Path, target: Path, file: RemoteFile) -> None:
    try:
        check_content(partial, file)
    except FileFormatError:
        # A wrong file would be "resumed" for ever.
        partial.unlink()
        raise
    partial.replace(target)


def _transfer(url: str, partial: Path, on_progress: ByteCounter | None) -> None:
    """Append what is missing to ``partial``, or start over where the server cannot resume."""
    have = partial.stat().st_size if partial.is_file() else 0
    try:
        with _open(url, have) as response:
            resumed = have > 0 and response.status == http.HTTPStatus.PARTIAL_CONTENT
            _receive(response, partial, have if resumed else 0, on_progress)
    except urllib.error.HTTPError as error:
        # Nothing is missing; the checksum decides whether that is so.
        if error.code == _RANGE_NOT_SATISFIABLE and have > 0:
            return
        raise DownloadError(f"{url}: the server answered {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
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
    total = None if length is None else have + int(length)
    with partial.open("ab" if have else "wb") as stream:
        while chunk := response.read(_CHUNK_BYTES):
            stream.write(chunk)
            have += len(chunk)
            if on_progress:
                on_progress(partial.name.removesuffix(".part"), have, total)
    if total is not None and have < total:
        raise DownloadError(f"{response.url}: the connection ended after {have} of {total} bytes")
