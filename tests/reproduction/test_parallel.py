"""Workers compute missing cells; they end when the process that started them does."""

import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import joblib
import pytest

from corn.errors import InvalidArgumentError, MissingExtraError
from corn.experiments import CellStore, list_cells, reproduce
from reproduction.cells import Cell, DesignCell
from reproduction.cells import compute_cells
from tests.distributed.harness import is_alive

from .scales import TINY

SLOW_CELLS = """
    import os, sys, time
    from pathlib import Path
    from reproduction.cells import CellStore, DesignCell
    from reproduction.cells import compute_cells

    class SlowCell(DesignCell):
        def compute(self):
            if self.horizon == 3:
                return {"one_step": 1.0}
            Path(self.graph, str(os.getpid())).touch()
            time.sleep(600)

    def interrupt(cell):
        while not list(directory.iterdir()):
            time.sleep(0.05)
        raise KeyboardInterrupt

    if __name__ == "__main__":
        directory, store = Path(sys.argv[1]), CellStore(Path(sys.argv[2]))
        cells = [SlowCell(str(directory), "ldp", float(h), 1.0) for h in sys.argv[3:]]
        compute_cells(cells, store, jobs=2, on_done=interrupt)
"""


def wait_until(is_true: Callable[[], bool], *, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [True, False])
def test_workers_end_with_the_process_that_started_them(tmp_path: Path, is_killed: bool) -> None:
    """The process is killed, or interrupted between two results, while a cell takes ten minutes."""
    script, marks = tmp_path / "slow.py", tmp_path / "marks"
    script.write_text(textwrap.dedent(SLOW_CELLS))
    marks.mkdir()
    horizons = ["1", "2"] if is_killed else ["1", "3"]
    arguments = [sys.executable, str(script), str(marks), str(tmp_path / "store"), *horizons]
    with subprocess.Popen(arguments, stderr=subprocess.DEVNULL) as process:
        try:
            if is_killed:
                wait_until(lambda: len(list(marks.iterdir())) == 2)
                process.kill()
            assert process.wait(120) != 0
        finally:
            process.kill()
    workers = [int(mark.name) for mark in marks.iterdir()]
    wait_until(lambda: not any(map(is_alive, workers)))


def test_two_processes_give_the_same_points_as_one(tmp_path: Path) -> None:
    one = reproduce(["fig1b"], TINY, store=CellStore(tmp_path / "one"), jobs=1)
    two = reproduce(["fig1b"], TINY, store=CellStore(tmp_path / "two"), jobs=2)
    assert one.panels == two.panels


def test_an_interruption_of_a_backend_that_cannot_stream_loses_one_batch_only(
    tmp_path: Path,
) -> None:
    store, cells = CellStore(tmp_path), list_cells(["fig1b"], TINY)
    cells = [cell for cell in cells if isinstance(cell, DesignCell) and cell.mechanism != "corn"]

    def interrupt(cell: Cell) -> None:
        del cell
        if len(list(tmp_path.iterdir())) >= 4:
            raise KeyboardInterrupt

    with (
        joblib.parallel_config(backend="multiprocessing"),
        pytest.raises(KeyboardInterrupt),
    ):
        compute_cells(cells, store, jobs=2, on_done=interrupt)
    assert sum(store.load(cell) is not None for cell in cells) == 4


def test_a_cluster_must_be_known_and_installed(tmp_path: Path) -> None:
    store = CellStore(tmp_path)
    with pytest.raises(InvalidArgumentError, match="cluster must be dask or ray"):
        compute_cells([], store, cluster="slurm")
    for kind in ("dask", "ray"):
        try:
            __import__({"dask": "distributed", "ray": "ray"}[kind])
        except ImportError:
            with pytest.raises(MissingExtraError, match=kind):
                compute_cells([], store, cluster=kind)
