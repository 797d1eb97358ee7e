"""Worker processes compute with one thread each."""

import os
import subprocess
import sys

import pytest
import threadpoolctl

from corn.threads import own_threads

REPORT = """
import json, os, sys
{before}
from corn.threads import limit_threads
limit_threads()
import numpy, scipy.linalg, torch, threadpoolctl
numpy.ones((300, 300)) @ numpy.ones((300, 300))
pools = [pool["num_threads"] for pool in threadpoolctl.threadpool_info()]
sys.exit(0 if pools and set(pools) == {{1}} and torch.get_num_threads() == 1 else 1)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "before", ["", "import numpy, torch"], ids=["loads later", "loaded before"]
)
def test_libraries_loaded_before_or_after_use_one_thread(before: str) -> None:
    code = REPORT.format(before=before)
    environment = {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2", "PATH": ""}
    process = subprocess.run([sys.executable, "-c", code], check=False, env=environment)
    assert process.returncode == 0


def threads_in_use(_: int) -> set[int]:
    import numpy as np

    np.linalg.eigvalsh(np.eye(50))
    return {pool["num_threads"] for pool in threadpoolctl.threadpool_info()}


def test_one_thread_inside_a_block() -> None:
    code = (
        "import numpy, threadpoolctl; from corn.threads import one_thread\n"
        "count = lambda: max(p['num_threads'] for p in threadpoolctl.threadpool_info())\n"
        "before = count()\n"
        "with one_thread(): inside = count()\n"
        "assert (inside, count(), before) == (1, 2, 2), (inside, count(), before)"
    )
    environment = {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2", "PATH": ""}
    process = subprocess.run([sys.executable, "-c", code], check=False, env=environment)
    assert process.returncode == 0


@pytest.mark.parametrize(("num_threads", "expected"), [(None, 1), ("2", 2)])
def test_training_uses_one_thread_unless_the_environment_sets_a_number(
    num_threads: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    for name in [name for name in os.environ if name.endswith("_NUM_THREADS")]:
        monkeypatch.delenv(name)
    if num_threads is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", num_threads)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with own_threads():
            assert torch.get_num_threads() == expected
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_this_test_process_uses_one_thread() -> None:
    assert threads_in_use(0) == {1}
