"""Test accuracy against ε with independent noise, CorN, a trusted server and no noise.

Runs ``corn train`` on the embedded digits for each ε, and draws the figure of the README:

    .venv/bin/python benchmarks/accuracy_by_epsilon.py --out docs/images

The unit is one sample: 12 agents with about 100 samples each, δ = 1e-5, batches of 16 by Poisson
sampling, 300 steps. CorN's noise holds against an eavesdropper together with one insider. Step
sizes are chosen for each method and ε, which is counted as free because the digits are public.
Takes about three minutes on one core.
"""

import argparse
import csv
import json
import subprocess
import sys
from pathlib import Path

from matplotlib.figure import Figure

from corn.report.style import MECHANISM_COLOURS, LineEnd, label_ends, save_figure

EPSILONS = (0.25, 0.5, 1, 2, 4)
NAMES = {
    "none": "no noise",
    "central": "trusted server",
    "corn": "CorN, no server",
    "ldp": "each agent’s noise alone",
}
COMMAND = (
    "train --task digits --graph er:n=12,p=0.4,seed=1 --unit sample --batch-size 16 --clip 1 "
    "--steps 300 --mechanism ldp,corn,central,none"
)


def measure(epsilon: float, runs: int) -> list[dict[str, object]]:
    """Return one row for each mechanism: mean accuracy and half of its 95 % interval."""
    arguments = [*COMMAND.split(), "--epsilon", str(epsilon), "--runs", str(runs), "--json"]
    process = subprocess.run(
        [sys.executable, "-m", "corn", *arguments], capture_output=True, text=True, check=True
    )
    found = json.loads(process.stdout)["mechanisms"]
    return [
        {
            "mechanism": name,
            "epsilon": epsilon,
            "accuracy": found[name]["test_accuracy_of_average"],
            "half_width_95": found[name]["intervals"].get("test_accuracy_of_average"),
            "step_size": found[name]["step_size"],
            "runs": runs,
        }
        for name in NAMES
    ]


def draw(rows: list[dict[str, str]]) -> Figure:
    """Draw one line for each mechanism, named at its end, with intervals as bands."""
    figure = Figure(figsize=(7.2, 3.7), layout="constrained")
    axes = figure.subplots()
    ends = []
    for name, label in NAMES.items():
        own = [row for row in rows if row["mechanism"] == name]
        x = [float(row["epsilon"]) for row in own]
        y = [float(row["accuracy"]) for row in own]
        width = [float(row["half_width_95"]) for row in own]
        colour = MECHANISM_COLOURS[name]
        strong = name == "corn"
        axes.plot(x, y, color=colour, linewidth=2.6 if strong else 1.7)
        low = [a - b for a, b in zip(y, width, strict=True)]
        high = [a + b for a, b in zip(y, width, strict=True)]
        axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        ends.append(LineEnd(label, y[-1], colour))
    axes.set_xscale("log")
    axes.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
    axes.minorticks_off()
    axes.set(ylim=(0, 1), xlim=(EPSILONS[0], EPSILONS[-1]))
    axes.set_xlabel("ε of one sample: more private to the left")
    axes.set_ylabel("test accuracy")
    axes.spines[["top", "right"]].set_visible(False)
    label_ends(axes, ends)
    return figure


def main() -> None:
    """Measure unless the table exists, and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--draw-only", action="store_true", help="draw the table that exists")
    options = parser.parse_args()
    table = options.out / "accuracy.csv"
    if not options.draw_only:
        rows = [row for epsilon in EPSILONS for row in measure(epsilon, options.runs)]
        with table.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    with table.open(encoding="utf-8") as file:
        save_figure(draw(list(csv.DictReader(file))), options.out / "accuracy.png")


if __name__ == "__main__":
    main()
