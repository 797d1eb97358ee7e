"""Any defect of a file gives an error of one printable line."""

from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from pyarrow.csv import write_csv

from corn.covariance import Horizon
from corn.distributed.planning import PlanningRequest, read_request
from corn.learn.consortium import load_consortium
from corn.learn.file_data import FileWorkload
from corn.noise import (
    Roster,
    generate_identity,
    load_identity,
    load_roster,
    save_identity,
    save_roster,
)
from corn.plan import load_plan, make_plan, save_plan
from corn.privacy import PrivacyBudget
from corn.topology import load_network

from .mutations import find_complaint, is_clear, mutate

BUDGET = PrivacyBudget(3, 1e-5, num_steps=100, clip=0.1)
NETWORK = load_network("ring:4")
NASTY = "\x1b[2J\u202e" + "x" * 1000


def write_roster(path: Path) -> None:
    save_roster(Roster(tuple(generate_identity().public_key for _ in range(3))), path)


def write_request(path: Path) -> None:
    path.write_text(PlanningRequest(BUDGET, Horizon(5)).to_text())


CONSORTIUM = """
graph = "complete:3"
[data]
target = "ill"
classes = ["no", "yes"]
[data.columns]
age = { bounds = [0, 100], missing = 50 }
ward = { categories = ["a", "b"] }
day = { kind = "date", bounds = [2020-01-01, 2021-01-01] }
[promise]
epsilon = 8
[training]
steps = 4
batch-size = 10
[[sites]]
name = "north"
samples = 200
[[sites]]
name = "south"
samples = 20
[[sites]]
name = "hill"
samples = 20
accepts = false
"""
TABLE = {"age": list(range(20)), "dose": [1.5 * k for k in range(20)], "ill": ["no", "yes"] * 10}


def read_samples(path: Path) -> object:
    return FileWorkload(path, "ill", held_out=0).build(1)


FILES: dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]] = {
    "a.corn": (lambda path: save_plan(make_plan(NETWORK, BUDGET), path), load_plan),
    "roster.json": (write_roster, load_roster),
    "agent-0.key": (lambda path: save_identity(generate_identity(), path), load_identity),
    "request.json": (write_request, read_request),
    "consortium.toml": (lambda path: path.write_text(CONSORTIUM), load_consortium),
    "a.csv": (lambda path: write_csv(pa.table(TABLE), path), read_samples),
    "a.parquet": (lambda path: parquet.write_table(pa.table(TABLE), path), read_samples),
    "g.edges": (lambda path: path.write_text("0 1\n1 2\n2 0\n"), load_network),
    "g.csv": (
        lambda path: np.savetxt(path, NETWORK.mixing_matrix, delimiter=","),
        load_network,
    ),
    "g.npy": (lambda path: np.save(path, NETWORK.mixing_matrix), load_network),
}


@pytest.mark.filterwarnings("ignore:the graph has edge weights")
@pytest.mark.parametrize("name", FILES)
def test_damaged_files_give_errors_not_crashes(name: str, tmp_path: Path) -> None:
    write, read = FILES[name]
    path = tmp_path / name
    write(path)
    assert find_complaint(read, path) is None
    sound = path.read_bytes()
    for seed in range(100):
        path.write_bytes(mutate(sound, Random(seed)))
        error = find_complaint(read, path)
        assert error is None or is_clear(error), (seed, error)


def make_npy(header: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(64)


def make_header(shape: str) -> str:
    return f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}}}\n"


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (make_header("(1000000, 1000000)"), "greater than file size"),
        (make_header("(9999999999999, 9999999999999)"), "not a matrix of numbers"),
        (make_header("(-1, 4)"), "negative dimensions"),
        ("(" * 5000, "not a matrix of numbers"),
    ],
)
def test_sizes_claimed_by_npy_headers_are_checked(
    header: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "g.npy"
    path.write_bytes(make_npy(header))
    error = find_complaint(load_network, path)
    assert error is not None
    assert message in str(error)
    assert is_clear(error)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("g.edges", f"a b\n{NASTY} {NASTY}\n", "without self-loops, found one at \\x1b[2J"),
        ("g.edges", f"a b c d {NASTY}\n", "two labels, found 'a b c d"),
        ("g.edges", f"a b {NASTY}\n", "an edge is two labels, found 'a b \\x1b"),
    ],
)
def test_errors_state_the_defect_of_a_graph(
    name: str, content: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    error = find_complaint(load_network, tmp_path / name)
    assert error is not None
    assert message in str(error)
    assert is_clear(error)


def test_numbers_too_long_to_read_are_no_names(tmp_path: Path) -> None:
    (tmp_path / "g.edges").write_text(f"0 {'9' * 5000}\n")
    error = find_complaint(load_network, tmp_path / "g.edges")
    assert error is not None
    assert "the name of agent 1 must be one line of 1 to 100" in str(error)
    assert is_clear(error)
