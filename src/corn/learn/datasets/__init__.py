"""Data sets by name: a cache, downloads, the two file formats, stand-ins, splits."""

from corn.learn.datasets.cache import (
    CACHE_VARIABLE,
    cache_directory,
    cached_path,
    import_dataset,
    is_cached,
)
from corn.learn.datasets.catalogue import DOWNLOADABLE, EMBEDDED
from corn.learn.datasets.download import DownloadError, fetch_dataset
from corn.learn.datasets.loading import Dataset, load_dataset
from corn.learn.datasets.splits import Split, split_samples

__all__ = [
    "CACHE_VARIABLE",
    "DOWNLOADABLE",
    "EMBEDDED",
    "Dataset",
    "DownloadError",
    "Split",
    "cache_directory",
    "cached_path",
    "fetch_dataset",
    "import_dataset",
    "is_cached",
    "load_dataset",
    "split_samples",
]
