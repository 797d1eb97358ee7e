"""Agreement of the model of ``corn advise`` with training: predicted excess next to test loss.

Run ``python benchmarks/advice_ranking.py [--task a9a] [--epsilon 0.1] [--settings 30x128,300x32]
[--runs 3] [--cache DIRECTORY]``. A setting is a number of steps and a batch size. Noise is CorN's
against an eavesdropper, on the network er:n=20,p=0.2,seed=1. Samples are clipped to ``--clip``, and
the step size is searched for. The last line has the rank correlation (Spearman's ρ) of the excess
that the model expects with the test loss.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from scipy.stats import spearmanr

from corn import learn
from corn.covariance import EAVESDROPPER, default_objective
from corn.plan.advice import TrainingScale, expect
from corn.topology import choose_cooldown, load_network

NETWORK = load_network("er:n=20,p=0.2,seed=1", mixing="gossip")
SETTINGS = "10x32,30x128,100x128,300x128,100x32,300x32,300x8,100x512"


def compare(
    problem: learn.TrainingProblem, scale: TrainingScale, num_steps: int, size: int, num_runs: int
) -> tuple[float, float]:
    """Print one setting; return its expected excess and its test loss."""
    budget = scale.make_budget(size, num_steps)
    [method] = learn.make_mechanisms(
        ["corn"], NETWORK, budget, objective=default_objective(num_steps), threat=EAVESDROPPER
    )
    assert method.noise is not None
    ratio = method.noise.total_variance * budget.precision_cap
    expected = expect(
        scale, size, num_steps, precision_cap=budget.precision_cap, central_ratio=ratio
    )
    settings = learn.SweepSettings(
        num_steps=num_steps,
        batch_size=size,
        seeds=tuple(range(num_runs)),
        cooldown_steps=choose_cooldown(NETWORK, num_steps),
    )
    tuning = learn.tune(problem, NETWORK, [method], settings=settings, evaluate_at=[num_steps])
    loss, accuracy = (tuning.score(f"test_{name}")["corn"] for name in ("loss", "accuracy"))
    print(
        f"T = {num_steps:5d}  B = {size:4d}  excess {expected.excess:.4f}  "
        f"test loss {loss:.4f} ± {tuning.interval('test_loss')['corn']:.4f}  "
        f"accuracy {accuracy:.4f}  step size {tuning.schedules['corn'].describe()} "
        f"(expected {expected.step_size:.2g})",
        flush=True,
    )
    return expected.excess, loss


def main() -> None:
    """Compare all settings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", default="a9a")
    parser.add_argument("--epsilon", type=float, default=0.1)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--settings", default=SETTINGS)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--cache", type=Path)
    given = parser.parse_args()
    problem = learn.Workload(
        given.task, model="linear", partition="iid", directory=given.cache
    ).build(20)
    scale = TrainingScale(
        num_agents=20,
        samples=min(problem.data.sizes),
        num_parameters=problem.task.num_parameters,
        epsilon=given.epsilon,
        delta=1e-5,
        clip=given.clip,
    )
    settings = [tuple(map(int, each.split("x"))) for each in given.settings.split(",")]
    found = [compare(problem, scale, steps, size, given.runs) for steps, size in settings]
    correlation = spearmanr(*zip(*found, strict=True)).statistic
    print(f"rank correlation {correlation:.2f}")


if __name__ == "__main__":
    main()
