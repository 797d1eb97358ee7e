"""Files that differ in one row have training samples that differ in one: accounting counts on it.

An attacker who knows two candidate files and sees the sum of clipped gradients tells them apart if
that sum depends on more rows than one.
"""

import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from PIL import Image
from pyarrow import parquet

from corn.errors import FileFormatError
from corn.learn.batches import Batch
from corn.learn.file_data import FileWorkload
from corn.learn.partition import (
    Split,
    deal_by_coins,
    split_by_coins,
    split_samples,
    toss_coins,
)
from corn.learn.problem import TrainingProblem
from corn.privacy import PrivacyBudget

Row: TypeAlias = tuple[int, int, str]
CLASSES = ("no", "perhaps", "yes")
# Few values, so that many rows are equal.
ROWS = st.tuples(st.integers(0, 2), st.integers(0, 1), st.sampled_from(CLASSES))
CHANGES: dict[str, Callable[[list[Row], Row], list[Row]]] = {
    "remove": lambda rows, _: rows[1:],
    "add": lambda rows, new: [rows[0], new, *rows[1:]],
    "replace": lambda rows, new: [*rows[:2], new, *rows[3:]],
    "relabel": lambda rows, new: [*rows[:2], (*rows[2][:2], new[2]), *rows[3:]],
    "reorder": lambda rows, _: rows[::-1],
}
# The most samples that may leave and join the parts of the split.
MOVED = {"remove": (1, 0), "add": (0, 1), "replace": (1, 1), "relabel": (1, 1), "reorder": (0, 0)}


def write_table(folder: Path, rows: list[Row]) -> FileWorkload:
    path = folder / "agent-0.csv"
    path.write_text("\n".join(["age,dose,ill", *(",".join(map(str, row)) for row in rows)]))
    return FileWorkload(path, "ill", classes=CLASSES)


def write_images(folder: Path, rows: list[Row]) -> FileWorkload:
    """Write images by class, so that a new label moves an image to another place in the order."""
    for number, (first, second, label) in enumerate(rows):
        path = folder / "agent-0" / label / f"{number:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.array([[first, second]], np.uint8) * 80).save(path)
    return FileWorkload(folder / "agent-0", classes=CLASSES)


WRITERS = {"table": write_table, "images": write_images}


def build(kind: str, rows: list[Row], *, is_dealt_out: bool) -> TrainingProblem:
    with tempfile.TemporaryDirectory() as folder:
        workload = WRITERS[kind](Path(folder), rows)
        if is_dealt_out:
            return workload.build(2)
        own = Path(str(workload.data).replace("agent-0", "agent-{agent}"))
        return FileWorkload(own, workload.target, classes=CLASSES).build(5, [0])


def list_members(problem: TrainingProblem) -> Counter[tuple[str, bytes, int]]:
    """Return how often each sample is in each part of the split, and with each agent."""
    data = problem.data
    parts = dict(problem.parts)
    for agent, (first, end) in enumerate(zip(data.offsets, data.offsets[1:], strict=False)):
        parts[f"agent {agent}"] = data.inputs[first:end], data.targets[first:end]
    return Counter(
        (part, sample.numpy().tobytes(), int(target))
        for part, (inputs, targets) in parts.items()
        for sample, target in zip(inputs, targets, strict=True)
    )


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("is_dealt_out", [False, True], ids=["own file", "dealt out"])
@settings(max_examples=12, deadline=None)
@given(rows=st.lists(ROWS, min_size=12, max_size=25), new=ROWS)
def test_a_changed_row_moves_no_other(
    kind: str, is_dealt_out: bool, rows: list[Row], new: Row
) -> None:
    try:
        before = list_members(build(kind, rows, is_dealt_out=is_dealt_out))
        after = {
            name: list_members(build(kind, change(rows, new), is_dealt_out=is_dealt_out))
            for name, change in CHANGES.items()
        }
    except FileFormatError:
        reject()  # nobody may be left without a row to train on
    for name, found in after.items():
        left, joined = (before - found).total(), (found - before).total()
        assert left <= MOVED[name][0], name
        assert left - joined == MOVED[name][0] - MOVED[name][1], name


def test_equal_multisets_give_equal_tensors() -> None:
    """Where a row stands in a file tells nothing about training: not even the order of a sum."""
    rows = [(k % 3, k % 2, CLASSES[k % 3]) for k in range(40)]
    first, second = (build("table", own, is_dealt_out=True).data for own in (rows, rows[::-1]))
    assert torch.equal(first.inputs, second.inputs)
    assert first.offsets == second.offsets


def sum_clipped(problem: TrainingProblem) -> torch.Tensor:
    """Return the sum of all training samples' gradients at the first model, each clipped to 1."""
    data, task = problem.data, problem.task
    weights = torch.ones(1, len(data.targets), dtype=torch.float64)
    batch = Batch(task.prepare(data.inputs)[None], data.targets[None], weights, is_average=False)
    start = task.initialize(0).float().view(1, 1, -1)
    clip = torch.ones(1, dtype=torch.float64)
    return task.gradient(start, batch, sample_clip=clip).values.flatten()


def test_an_attacker_sees_one_clipped_gradient_of_an_added_row(tmp_path: Path) -> None:
    """Before, a row more shifted the sum by about the root of the number of swapped samples."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(600, 8)), rng.integers(0, 2, 600)
    columns = {**{f"x{k}": values for k, values in enumerate(x.T)}, "y": y}
    sums = []
    for count in (600, 599):
        table = pa.table({name: values[:count] for name, values in columns.items()})
        parquet.write_table(table, tmp_path / "agent-0.parquet")
        workload = FileWorkload(tmp_path / "agent-{agent}.parquet", "y", classes=("0", "1"))
        sums.append(sum_clipped(workload.build(4, [0])))
    assert float((sums[0] - sums[1]).norm()) <= 1 + 1e-6


def test_an_attacker_sees_two_clipped_gradients_of_a_relabelled_image(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    for number in range(120):
        path = tmp_path / "agent-0" / "ab"[number % 2] / f"{number:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (5, 5), np.uint8)).save(path)
    workload = FileWorkload(tmp_path / "agent-{agent}", classes=("a", "b"))
    before = sum_clipped(workload.build(4, [0]))
    for number in (0, 40, 80):
        old, new = (tmp_path / "agent-0" / label / f"{number:03}.png" for label in "ab")
        old.rename(new)
        assert float((sum_clipped(workload.build(4, [0])) - before).norm()) <= 2 + 1e-6
        new.rename(old)


def test_coins_are_uniform_and_independent_even_of_equal_rows() -> None:
    coins = toss_coins([b"same"] * 4000 + [b"%d" % k for k in range(4000)], seed=3)
    for half in (coins[:4000], coins[4000:]):
        # Five standard deviations of the number of rows below, of 4000.
        for bound in (0.2, 0.5, 0.9):
            margin = 5 * np.sqrt(bound * (1 - bound) / 4000)
            assert (half < bound).mean(axis=0) == pytest.approx(bound, abs=margin)
        # The product of two independent coins has the variance 1/144 about its mean.
        both = np.prod(half - 0.5, axis=1).mean()
        assert abs(both) < 5 * np.sqrt(1 / 144 / 4000)
    assert not np.intersect1d(coins, toss_coins([b"same"] * 4000, seed=4)).size


def test_parts_and_agents_by_coins_are_disjoint_and_complete() -> None:
    coins = toss_coins([b"%d" % k for k in range(500)], seed=0)
    split = split_by_coins(coins[:, 0], test_fraction=0.2)
    rows = np.concatenate([split.train, split.validation, split.test])
    assert sorted(rows.tolist()) == list(range(500))
    dealt = deal_by_coins(coins[:, 1], 7)
    assert sorted(np.concatenate(dealt).tolist()) == list(range(500))


@pytest.mark.parametrize(
    ("rows", "held_out", "message"),
    [(3, 0.99, "must have a row to train on"), (4, 0.0, "agent . of .* must get a row")],
)
def test_nobody_may_train_on_nothing(
    rows: int, held_out: float, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.csv"
    path.write_text("x,y\n" + "".join(f"{k},{k % 2}\n" for k in range(rows)))
    with pytest.raises(FileFormatError, match=rf"a\.csv: {message}"):
        FileWorkload(path, "y", held_out=held_out).build(20)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"classes": CLASSES}, ""),
        ({}, "the list of classes was read from the data"),
        ({"is_regression": True, "target": "dose"}, ""),
    ],
)
def test_a_problem_tells_why_it_is_a_simulation(
    options: dict[str, object], reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.csv"
    rows = [(k, k % 3, k % 3 if "target" in options else CLASSES[k % 3]) for k in range(60)]
    path.write_text("\n".join(["age,dose,ill", *(",".join(map(str, row)) for row in rows)]))
    workload = FileWorkload(path, **{"target": "ill", **options})  # type: ignore[arg-type]
    found = workload.build(2).simulation
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


def test_one_file_for_agents_with_different_promises_is_a_simulation(tmp_path: Path) -> None:
    path = tmp_path / "all.csv"
    path.write_text("x,y\n" + "".join(f"{k},{k % 2}\n" for k in range(60)))
    workload = FileWorkload(path, target="y", classes=("0", "1"))
    problem = workload.build(3)
    one = PrivacyBudget(1, 1e-5, num_steps=10, clip=1)
    several = PrivacyBudget((1, 2, 2), 1e-5, num_steps=10, clip=1)
    assert problem.judge(one).simulation == ""
    assert "different promises" in problem.judge(several).simulation


def test_a_split_by_places_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault of earlier versions, planted: one row less moves many others."""

    def by_places(coins: np.ndarray, *, test_fraction: float) -> Split:
        assert test_fraction == 0.2
        return split_samples(len(coins), seed=0)

    monkeypatch.setattr("corn.learn.file_data.split_by_coins", by_places)
    rows: list[Row] = [(k, k % 2, CLASSES[k % 3]) for k in range(200)]
    before = list_members(build("table", rows, is_dealt_out=False))
    after = list_members(build("table", rows[1:], is_dealt_out=False))
    assert (before - after).total() > 10
