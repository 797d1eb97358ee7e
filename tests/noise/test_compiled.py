"""Compiled code is used only if it gives the known bits; otherwise no noise is drawn."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from corn.errors import CornError
from corn.noise import normals
from tests.noise.test_stream import KNOWN_DIGEST
from tests.oracles.normals import sum_normals


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    normals.load_compiled.cache_clear()
    yield
    normals.load_compiled.cache_clear()


def test_the_known_bits_are_those_of_numpy() -> None:
    """All that a digest is of, by the reference and by single operations of NumPy."""

    def write_half_step(out: Any, model: Any, gradient: Any, noise: Any, *given: float) -> None:
        factor, grid, step_size = given
        released = np.rint((gradient.astype(np.float64) * factor + noise) / grid) * grid
        out[:] = model - out.dtype.type(step_size) * released.astype(out.dtype)

    def read(offset: Any, size: int) -> Any:
        return (offset[0, :size] >> np.uint32(8)) / 2**24

    def write_message(
        out: Any, gradient: Any, words: Any, weights: Any, offset: Any, masks: Any, *given: Any
    ) -> None:
        num_added, factor, grid = given
        noise, size = np.empty((words.shape[1], 2, normals.PAIRS_PER_BLOCK)), len(out)
        sum_normals(words, weights, noise)
        noisy = gradient.astype(np.float64) * factor + noise.ravel()[:size]
        units = np.rint(noisy / grid + read(offset, size)).astype(np.int64)
        signs = np.where(np.arange(len(masks)) < num_added, 1, -1)
        out[:] = (units + (signs[:, None] * masks[:, :size]).sum(axis=0)).astype(out.dtype)

    def write_average(out: Any, total: Any, offset: Any, num_agents: int, scale: float) -> None:
        out[:] = (total.astype(np.float64) - num_agents * read(offset, len(out))) * scale

    def sum_squares(out: Any, values: Any) -> None:
        squares = (values.astype(np.float64) ** 2).reshape(len(out), -1, 64)
        # One by one, as NumPy's own sums take another order.
        out[:] = np.add.accumulate(np.add.accumulate(squares, axis=1)[:, -1], axis=1)[:, -1]

    reference = SimpleNamespace(
        sum_blocks=lambda words, _start, *rest: sum_normals(words, *rest),
        write_half_step=write_half_step,
        write_message=write_message,
        write_average=write_average,
        sum_squares=sum_squares,
    )
    assert normals.digest_known(reference) == normals.KNOWN_DIGEST
    assert normals.digest_known(normals.load_compiled()) == normals.KNOWN_DIGEST


@pytest.mark.parametrize(
    "name", ["sum_blocks", "write_half_step", "write_message", "write_average", "sum_squares"]
)
def test_code_with_other_bits_is_not_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def miss_one(*given: NDArray[Any], **options: bool) -> None:
        getattr(real, name)(*given, **options)
        out = given[-1 if name == "sum_blocks" else 0].reshape(-1)
        out[-1] = np.nextafter(out[-1], 9) if out.dtype.kind == "f" else out[-1] + 1

    real = normals.load_compiled()
    normals.load_compiled.cache_clear()
    stand_in = SimpleNamespace(**{**vars(real), name: miss_one})
    monkeypatch.setattr("importlib.import_module", lambda _name: stand_in)
    with pytest.raises(CornError, match="does not give the known numbers"):
        normals.load_compiled()


def test_a_broken_installation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_name: str) -> None:
        raise OSError("libllvmlite.so is missing")

    monkeypatch.setattr("importlib.import_module", fail)
    with pytest.raises(CornError, match="libllvmlite"):
        normals.load_compiled()


def find_elsewhere(tmp_path: Path, *, first: str = "", then: str = "", **environment: str) -> str:
    code = first + "from corn.noise import load_compiled; print(bool(load_compiled()))" + then
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={
            "NUMBA_CACHE_DIR": str(tmp_path),
            "PYTHONPATH": os.pathsep.join(sys.path),
            **environment,
        },
        capture_output=True,
        text=True,
    )
    return result.stdout + result.stderr


@pytest.mark.slow
def test_machine_code_gives_the_same_bits_on_any_processor(tmp_path: Path) -> None:
    """The cache is filled for another processor by other constants, and then damaged."""
    other = "from corn.noise import normals; normals.SINE = (3.0, *normals.SINE[1:]); "
    # As if Numba did not know the constants by which a loop was compiled.
    forget = (
        "from numba.core.caching import IndexDataCacheFile as Cache; "
        "Cache.load = lambda own, key: own._load_data("
        "next(name for known, name in own._load_index().items() if known[0] == key[0])); "
    )
    for first in (other, forget):
        found = find_elsewhere(tmp_path, first=first, NUMBA_CPU_NAME="generic")
        assert "CornError: no noise can be drawn, as compiled code" in found
        assert "True" not in found
    kept = [*tmp_path.rglob("*.nbi"), *tmp_path.rglob("*.nbc")]
    assert {path.suffix for path in kept} == {".nbi", ".nbc"}
    for path in kept:
        path.write_bytes(path.read_bytes()[:10])
    draw = (
        "; import tests.noise.test_stream as t; print(t.digest(t.draw(t.SOURCES[0], stop=1<<20)))"
    )
    found = find_elsewhere(tmp_path, then=draw, NUMBA_CPU_NAME="generic")
    assert found.split() == ["True", KNOWN_DIGEST]


def test_numba_with_its_compiler_disabled_draws_nothing(tmp_path: Path) -> None:
    output = find_elsewhere(tmp_path, NUMBA_DISABLE_JIT="1")
    assert "True" not in output
    assert "CornError: no noise can be drawn" in output
    assert "compiler is disabled" in output
