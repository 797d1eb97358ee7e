"""Six hospitals with 9000 to 40 patients train one model from one public consortium file.

Run with ``.venv/bin/python examples/six_hospitals.py FOLDER``. The script writes the consortium
file and one CSV file for each hospital, with text, dates, missing values and a few wrong entries,
as hospitals have them. It prints the commands that make the plan, check a hospital and run all on
this machine; ``docs/tutorials/hospitals.md`` explains them.
"""

import csv
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

SIZES = {"north": 9000, "south": 3000, "east": 1200, "west": 400, "lake": 120, "hill": 40}
WARDS = ("surgery", "medicine", "emergency")
CONSORTIUM = """# Everything here is public, and agreed upon before anybody looks at data.
graph = "complete:6"
store = "127.0.0.1:29500"

[data]
target = "readmitted"
classes = ["no", "yes"]
id = "patient"              # one row per patient is checked

[data.columns]
age = { bounds = [0, 110], missing = 60 }
glucose = { bounds = [40, 400], missing = 100 }
ward = { categories = ["surgery", "medicine", "emergency"] }
admitted = { kind = "date", bounds = [2018-01-01, 2024-12-31], missing = 2021-07-01 }
smoker = { kind = "boolean", missing = false }

[promise]
epsilon = 1
delta = 1e-6
unit = "sample"             # one row, which is one patient
colluders = 1

[training]
steps = 100
batch-size = 128            # at a hospital of average size; all sample at one rate
step-size = 2.0
clip = 1.0
test-data = "public.csv"
"""


def draw_patients(count: int, rng: np.random.Generator, first: int) -> list[list[object]]:
    """Return rows in which the outcome depends on age, glucose, ward and smoking."""
    rows: list[list[object]] = []
    for number in range(count):
        age, glucose = rng.normal(60, 18), rng.normal(120, 40)
        ward, smoker = WARDS[rng.integers(3)], rng.random() < 0.3
        day = np.datetime64("2018-01-01") + int(rng.integers(2500))
        score = (age - 60) / 18 + (glucose - 120) / 40 + (ward == "emergency") + smoker - 0.6
        ill = score + rng.logistic(0, 0.4) > 0
        gone = rng.random(3) < 0.05
        rows.append(
            [
                f"P{first + number:06}",
                "" if gone[0] else round(float(np.clip(age, 0, 130))),
                "NA" if gone[1] else round(float(glucose), 1),
                "dermatology" if rng.random() < 0.02 else ward,
                "" if gone[2] else str(day),
                "yes" if smoker else "no",
                "yes" if ill else "no",
            ]
        )
    return rows


def write_files(folder: Path) -> None:
    """Write the consortium file, the public test patients, and the file of each hospital."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    sites = [
        f'\n[[sites]]\nname = "{name}"\nsamples = {size}\naddress = "127.0.0.1:{29600 + agent}"\n'
        for agent, (name, size) in enumerate(SIZES.items())
    ]
    (folder / "consortium.toml").write_text(CONSORTIUM + "".join(sites), encoding="utf-8")
    header = ["patient", "age", "glucose", "ward", "admitted", "smoker", "readmitted"]
    first = 0
    for name, size in {**SIZES, "public": 2000}.items():
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([header, *draw_patients(size, rng, first)])
        first += size


def make_folders(folder: Path, names: Sequence[str]) -> Path:
    """Make a plan, and a folder for each site behind an engine; return the consortium file.

    At real sites everybody makes an own key, and puts the file, its plan and the roster beside it.
    """
    from corn import make_plan, save_plan
    from corn.distributed import make_keys
    from corn.learn import load_consortium

    made = folder / "made"
    if not made.exists():
        write_files(made)
    agreed = load_consortium(made / "consortium.toml")
    plan = make_plan(agreed.load_network(), agreed.make_budget(), threat=agreed.make_threat())
    save_plan(plan, agreed.plan_path)
    make_keys(folder / "all", len(names))
    for agent, (name, site) in enumerate(zip(names, agreed.sites, strict=True)):
        own = folder / name
        own.mkdir(mode=0o700)
        copy_public_files(folder, own)
        (folder / "all" / f"agent-{agent}.key").rename(own / f"agent-{agent}.key")
        shutil.copy(made / f"{site.name}.csv", own / "data.csv")
    return agreed.path


def copy_public_files(folder: Path, own: Path) -> None:
    """Copy what all parties have: consortium file, plan, public test data and roster."""
    for name in ("consortium.toml", "consortium.corn", "public.csv"):
        shutil.copy(folder / "made" / name, own)
    shutil.copy(folder / "all" / "roster.json", own)


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    write_files(target)
    print(f"corn plan {target}/consortium.toml")
    print(f"corn check {target}/consortium.toml --agent lake --data {target}/lake.csv --keys KEYS")
    print(f"corn launch {target}/consortium.toml --data '{target}/{{site}}.csv' --out {target}/run")
