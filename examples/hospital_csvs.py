"""Four hospitals train one model on CSV files that stay with them, each in a process of its own.

Run with ``.venv/bin/python examples/hospital_csvs.py``. The script writes a file of patients for
each hospital, public bounds of the columns and a public file of test patients. ``corn plan`` and
``corn launch`` do the rest: every process opens its own file only. It prints what may be published:
the promise for one patient, the spent ε, and the accuracy on the public file.
"""

import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer

from corn.privacy.rounding import round_up

NUM_HOSPITALS, NUM_TEST = 4, 119
# What the instrument can measure, from its manual: never the least and largest value in the data.
LIMITS = """radius 40  texture 50  perimeter 260  area 2500  smoothness 0.25  compactness 1.2
concavity 1.3  concave_points 0.3  symmetry 0.7  fractal_dimension 0.2"""


def write_rows(path: Path, header: list[str], rows: list[list[object]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])


def write_files(folder: Path) -> None:
    """Write the files that hospitals would have."""
    patients = load_breast_cancer()
    limits = LIMITS.split()
    names = [name.replace(" ", "_") for name in patients.feature_names]
    bounds = [
        [name, 0, float(most) / 5 if "error" in name else most]
        for name in names
        for measure, most in zip(limits[::2], limits[1::2], strict=True)
        if measure in name
    ]
    write_rows(folder / "bounds.csv", ["column", "least", "most"], bounds)
    diagnoses = np.array(["malignant", "benign"])[patients.target]
    order = np.random.default_rng(0).permutation(len(diagnoses))
    files = {"public": order[:NUM_TEST]}
    for hospital, rows in enumerate(np.array_split(order[NUM_TEST:], NUM_HOSPITALS)):
        files[f"agent-{hospital}"] = rows
    for name, rows in files.items():
        table = [[*patients.data[row], diagnoses[row]] for row in rows]
        write_rows(folder / f"{name}.csv", [*names, "diagnosis"], table)


def run(command: str, folder: Path) -> None:
    words = [sys.executable, "-m", "corn", *command.split()]
    subprocess.run(words, cwd=folder, check=True, capture_output=True)


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    write_files(folder)
    unit = "--unit sample --batch-size 30 --samples-per-agent 80 --clip 1 --epsilon 5"
    run(f"plan --graph ring:{NUM_HOSPITALS} --steps 40 {unit} --out plan.corn", folder)
    data = "--data agent-{agent}.csv --target diagnosis --classes benign,malignant"
    public = "--bounds bounds.csv --test-data public.csv"
    run(f"launch plan.corn {data} {public} --step-size 3 --out run", folder)
    facts = json.loads((folder / "run" / "shared" / "run.json").read_text(encoding="utf-8"))
    print(f"{facts['promise']}, against {facts['adversary']}")
    print(f"ε spent {round_up(facts['measured']['epsilon'])}")
    print(f"accuracy on the public file {facts['measured']['test_accuracy']:.3f}")


if __name__ == "__main__":
    main()
