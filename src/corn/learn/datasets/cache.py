"""Where data sets are kept on this machine, and whether what is there is what it should be."""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import sys
import zlib
from pathlib import Path
from typing import IO, cast

from corn.errors import FileFormatError
from corn.learn.datasets.catalogue import DownloadableDataset, RemoteFile, find_downloadable

CACHE_VARIABLE = "CORN_DATA"
"""The environment variable that names another cache directory."""

_CHUNK_BYTES = 1 << 20
_GZIP_MAGIC = b"\x1f\x8b"


def cache_directory(directory: Path | str | None = None) -> Path:
    """The directory given, else the one ``CORN_DATA`` names, else the platform's cache for users.

    It need not exist yet.

    >>> cache_directory("/data").name
    'data'
    """
    if directory is not None:
        return Path(directory).expanduser()
    if os.environ.get(CACHE_VARIABLE):
        return Path(os.environ[CACHE_VARIABLE]).expanduser()
    return _platform_cache() / "corn"


def _platform_cache() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def cached_path(name: str, file: RemoteFile, *, directory: Path | str | None = None) -> Path:
    """Where a file of data set ``name`` is, or would be, in the cache."""
    return cache_directory(directory) / name / file.name


def is_cached(dataset: DownloadableDataset, *, directory: Path | str | None = None) -> bool:
    """Whether every file is there; whether it is right was checked when it was put there."""
    paths = (cached_path(dataset.name, file, directory=directory) for file in dataset.files)
    return all(path.is_file() for path in paths)


def open_content(path: Path) -> IO[bytes]:
    """Open a file for reading its decompressed content; its first bytes say if it is compressed."""
    with path.open("rb") as stream:
        is_compressed = stream.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    return cast("IO[bytes]", gzip.open(path)) if is_compressed else path.open("rb")


def content_sha256(path: Path) -> str:
    """The SHA-256 of a file's decompressed content, in hexadecimal."""
    digest = hashlib.sha256()
    try:
        with open_content(path) as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise FileFormatError(f"{path}: not a complete gzip file ({error})") from error
    return digest.hexdigest()


def check_content(path: Path, file: RemoteFile) -> None:
    """Raise ``FileFormatError`` unless the decompressed content is the one the catalogue pins."""
    found = content_sha256(path)
    if found != file.sha256:
        raise FileFormatError(
            f"{path}: the sha256 of {file.name} must be {file.sha256[:16]}…, found {found[:16]}…: "
            "the file is damaged or another version; get it again"
        )


def import_dataset(name: str, path: Path | str, *, directory: Path | str | None = None) -> Path:
    """Copy a data set's files from a local directory into the cache, after checking each.

    A file may be compressed or not, whatever the catalogue's name says. Nothing is copied unless
    all files are there and right. Returns the directory they are in now.
    """
    dataset = find_downloadable(name)
    found = {file: _find_file(Path(path), file) for file in dataset.files}
    for file, source in found.items():
        check_content(source, file)
    for file, source in found.items():
        target = cached_path(name, file, directory=directory)
        target.parent.mkdir(parents=True, exist_ok=True)
        _copy(source, target)
    return cache_directory(directory) / name


def _find_file(path: Path, file: RemoteFile) -> Path:
    plain = file.name.removesuffix(".gz")
    names = (file.name, plain, f"{plain}.gz", plain.replace("-idx", ".idx"))
    places = (path, path / "raw")
    for candidate in (place / name for place in places for name in names):
        if candidate.is_file():
            return candidate
    raise FileFormatError(
        f"{path}: must be a directory with a file {file.name}, compressed or not; found none"
    )


def _copy(source: Path, target: Path) -> None:
    # Written beside the target and renamed, so that an interrupted copy is never taken for a file.
    partial = target.with_name(target.name + ".copy")
    shutil.copyfile(source, partial)
    partial.replace(target)
