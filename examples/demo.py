"""Six hospitals train one private model without a server: design, simulation, real processes.

``make demo`` runs this script, which takes about two minutes. It prints each command of CorN before
it runs it, so that you can repeat it, draws one figure, and ends with one line. Data are 1,797
handwritten digits that scikit-learn has.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from corn.report import MECHANISM_COLOURS, save_figure

PLAN = (
    "--graph er:n=6,p=0.5,seed=2 --unit sample --clip 1 --epsilon 3 --steps 100 "
    "--batch-size 60 --samples-per-agent 215"
)
TASK = "--task digits --model network --partition iid"
NAMES = {
    "none": "no noise, no privacy",
    "central": "a trusted server adds the noise",
    "plan": "CorN, exact sums",
    "processes": "the same, six processes (one run)",
    "gossip": "CorN, gossip (the paper)",
    "ldp": "independent noise",
}


def run(folder: Path, command: str, *, why: str) -> dict[str, Any]:
    """Print and run a command of CorN in a folder; return its JSON."""
    print(f"\n{why}\n$ corn {command}", flush=True)
    words = [sys.executable, "-m", "corn", *command.split(), "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        words, cwd=folder, env=environment, text=True, capture_output=True, check=False
    )
    if done.returncode != 0:
        sys.exit(done.stderr or f"corn ended with exit code {done.returncode}")
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def draw(accuracies: dict[str, float], path: Path) -> None:
    """Draw the test accuracy of each mechanism."""
    figure = Figure(figsize=(7.2, 3.4), layout="constrained")
    axes = figure.subplots()
    colours = [MECHANISM_COLOURS.get(name, MECHANISM_COLOURS["corn"]) for name in accuracies]
    bars = axes.barh([NAMES[name] for name in accuracies], accuracies.values(), color=colours)
    axes.bar_label(bars, [f"{value:.1%}" for value in accuracies.values()], padding=4, fontsize=9)
    axes.invert_yaxis()
    axes.set(xlim=(0, 1.1), xlabel="test accuracy (simulations: mean of eight runs)")
    title = "Handwritten digits, six agents: ε = 3, δ = 10⁻⁵ for one image (simulated)"
    axes.set_title(f"{title}\nCorN: against an eavesdropper and one insider", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)


def main() -> None:
    """Run the demonstration into ``out/demo``, or the folder that is given."""
    began = time.monotonic()
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "out/demo").resolve()
    # A folder for each demonstration: a second run must not resume the first.
    number = 1
    while (out / f"run-{number}").exists():
        number += 1
    folder = out / f"run-{number}"
    folder.mkdir(parents=True)

    planned = run(
        folder,
        f"plan {PLAN} --out plan.corn",
        why="1. Design the noise: a public plan that keeps ε = 3 for each image, against an "
        "eavesdropper together with one of the hospitals.",
    )
    print(
        f"   noise in the average model: {planned['central_ratio']:.2f} × a trusted server's; "
        "independent noise would have 6 ×"
    )
    simulated = run(
        folder,
        f"train --plan plan.corn {TASK} --mechanism ldp,central,none --runs 8",
        why="2. Simulate the plan next to independent noise, a trusted server and no noise.",
    )["mechanisms"]
    gossip = run(
        folder,
        f"train {PLAN} --mixing gossip {TASK} --mechanism corn --runs 8",
        why="   The paper's gossip instead of exact sums.",
    )["mechanisms"]
    launched = run(
        folder,
        f"launch plan.corn {TASK} --step-size {simulated['plan']['step_size']} --out run",
        why="3. Run it: six processes with keys of their own, which see only their own images "
        "and exchange encrypted, masked messages.",
    )
    measured = {**simulated, "gossip": gossip["corn"], "processes": launched["measured"]}
    accuracies = {name: measured[name]["test_accuracy"] for name in NAMES}
    print()
    for name, accuracy in accuracies.items():
        print(f"   {NAMES[name]:34s} {accuracy:6.1%} test accuracy")
    figure = folder / "accuracy.png"
    draw(accuracies, figure)
    print(
        f"\nSix processes without a server: {accuracies['processes']:.1%} test accuracy at ε = 3 "
        f"for one image; a trusted server: {accuracies['central']:.1%}; independent noise: "
        f"{accuracies['ldp']:.1%} ({time.monotonic() - began:.0f} s)"
    )
    print("The digits are public, so ε is simulated: on your own files it is a promise.")
    print(f"figure: {figure}\nresults of the processes: {folder / 'run' / 'shared'}")
    print("next: docs/get-started.md; every figure of the paper at reduced scale: make reproduce")


if __name__ == "__main__":
    main()
