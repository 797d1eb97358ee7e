"""Directories of real data sets on machines that have them; never part of the repository."""

from pathlib import Path

import pytest

SHARED_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"

needs_a9a = pytest.mark.skipif(
    not (SHARED_DATA / "a9a").is_dir(), reason="no real a9a beside the repository"
)
needs_mnist = pytest.mark.skipif(
    not (SHARED_DATA / "mnist").is_dir(), reason="no real MNIST beside the repository"
)
