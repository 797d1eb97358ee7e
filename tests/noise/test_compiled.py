"""Compiled code is used only if it gives NumPy's bits; without it NumPy is used."""

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from corn.checks import FloatArray
from corn.errors import CornWarning
from corn.noise import normals
from corn.noise.normals import Words
from tests.noise.test_stream import KNOWN_DIGEST

pytest.importorskip("numba")


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    normals.find_compiled.cache_clear()
    yield
    normals.find_compiled.cache_clear()


def test_compiled_code_is_found_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(normals.find_compiled(), ModuleType)


def test_without_numba_there_is_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert normals.find_compiled() is None


def test_code_with_other_bits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def miss_one(words: Words, weights: FloatArray, out: FloatArray) -> None:
        real(words, weights, out)
        out[-1, -1, -1] *= 1 + np.finfo(out.dtype).eps

    real = normals.find_compiled().sum_blocks  # type: ignore[union-attr]
    normals.find_compiled.cache_clear()
    stand_in = SimpleNamespace(sum_blocks=miss_one)
    monkeypatch.setattr("importlib.import_module", lambda _name: stand_in)
    with pytest.warns(CornWarning, match="its normals differ from NumPy's"):
        assert normals.find_compiled() is None


@pytest.mark.parametrize("name", ["write_fractions", "write_masked", "write_average"])
def test_code_with_other_sums_is_not_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def miss_one(out: NDArray[Any], *given: Any) -> None:
        getattr(real, name)(out, *given)
        out[-1] += out.dtype.type(1)

    real = normals.find_compiled()
    normals.find_compiled.cache_clear()
    stand_in = SimpleNamespace(**{**vars(real), name: miss_one})
    monkeypatch.setattr("importlib.import_module", lambda _name: stand_in)
    with pytest.warns(CornWarning, match=r"its (offsets|exact sums) differ from NumPy's"):
        assert normals.find_compiled() is None


def test_a_broken_installation_gives_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_name: str) -> None:
        raise OSError("libllvmlite.so is missing")

    monkeypatch.setattr("importlib.import_module", fail)
    with pytest.warns(CornWarning, match="by NumPy, several times as slowly.*libllvmlite"):
        assert normals.find_compiled() is None


def find_elsewhere(tmp_path: Path, *, first: str = "", then: str = "", **environment: str) -> str:
    code = first + "from corn.noise import find_compiled; print(bool(find_compiled()))" + then
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={
            "NUMBA_CACHE_DIR": str(tmp_path),
            "PYTHONPATH": os.pathsep.join(sys.path),
            **environment,
        },
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout + result.stderr


@pytest.mark.slow
def test_machine_code_gives_numpys_bits_on_any_processor_and_from_any_cache(tmp_path: Path) -> None:
    """One cache is filled for another processor, then read by newer constants, then damaged."""
    draw = (
        "; import tests.noise.test_stream as t; print(t.digest(t.draw(t.SOURCES[0], stop=1<<20)))"
    )
    found = find_elsewhere(tmp_path, then=draw, NUMBA_CPU_NAME="generic")
    assert found.split() == ["True", KNOWN_DIGEST]
    kept = [*tmp_path.rglob("*.nbi"), *tmp_path.rglob("*.nbc")]
    assert {path.suffix for path in kept} == {".nbi", ".nbc"}

    change = "from corn.noise import normals; normals.SINE = (3.0, *normals.SINE[1:]); "
    # As if Numba did not know the constants by which a loop was compiled.
    forget = (
        "from numba.core.caching import IndexDataCacheFile as Cache; "
        "Cache.load = lambda own, key: own._load_data("
        "next(name for known, name in own._load_index().items() if known[0] == key[0])); "
    )
    found = find_elsewhere(tmp_path, first=forget + change, NUMBA_CPU_NAME="generic")
    assert "its normals differ" in found
    assert "False" in found

    for path in kept:
        path.write_bytes(path.read_bytes()[:10])
    assert find_elsewhere(tmp_path, first=change, NUMBA_CPU_NAME="generic") == "True\n"


def test_numba_with_its_compiler_disabled_is_not_used(tmp_path: Path) -> None:
    output = find_elsewhere(tmp_path, NUMBA_DISABLE_JIT="1")
    assert "False" in output
    assert "compiler is disabled" in output
