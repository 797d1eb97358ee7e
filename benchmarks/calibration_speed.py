"""Time of calibrating the noise of a budget under Poisson sampling.

Run ``python benchmarks/calibration_speed.py``. For every combination of sampling rate, number of
steps and ε it prints the CPU seconds that ``PrivacyBudget.precision_cap`` takes, the noise
multiplier, and how far the accounted ε is below the target.
"""

from __future__ import annotations

import itertools
import math
import time

from corn.privacy import PrivacyBudget, account_precision

RATES = (1e-3, 1e-2, 0.1, 0.5)
STEPS = (100, 1000, 10_000, 100_000)
EPSILONS = (0.05, 0.5, 1.0, 10.0)
DELTA = 1e-5


def main() -> None:
    print(f"{'rate':>6} {'steps':>7} {'ε':>5} {'seconds':>8} {'multiplier':>11} {'slack':>8}")
    slowest = 0.0
    for rate, steps, epsilon in itertools.product(RATES, STEPS, EPSILONS):
        budget = PrivacyBudget(
            epsilon, DELTA, steps, 1.0, unit="sample", batch_size=1, sampling_rate=rate
        )
        begin = time.process_time()
        cap = budget.precision_cap
        seconds = time.process_time() - begin
        spent = account_precision([cap], budget.query, num_steps=steps).worst_epsilon(DELTA)
        slack = 1 - spent / epsilon
        slowest = max(slowest, seconds)
        print(
            f"{rate:6g} {steps:7d} {epsilon:5g} {seconds:8.2f} {1 / math.sqrt(cap):11.4f} "
            f"{slack:8.1e}"
        )
    print(f"slowest: {slowest:.2f} s")


if __name__ == "__main__":
    main()
