"""Data sets by name: a catalogue with a cache, downloads, loaders and stand-ins."""

from corn.learn.datasets.catalogue import (
    CACHE_VARIABLE,
    DOWNLOADABLE,
    EMBEDDED,
    cache_directory,
    cached_path,
    import_dataset,
    is_cached,
)
from corn.learn.datasets.download import DownloadError, fetch_dataset
from corn.learn.datasets.loading import Dataset, load_dataset

__all__ = [
    "CACHE_VARIABLE",
    "DOWNLOADABLE",
    "EMBEDDED",
    "Dataset",
    "DownloadError",
    "cache_directory",
    "cached_path",
    "fetch_dataset",
    "import_dataset",
    "is_cached",
    "load_dataset",
]
