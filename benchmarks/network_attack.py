"""Attacks on the network of a run, at random: does the attacker ever achieve more than a loss?

Run ``python benchmarks/network_attack.py [--interventions N] [--first-seed N]``. Four agents train
over links that pass through an attacker's proxies, as does their connection to the store. The
attacker flips, cuts, replays, swaps, delays, floods, inserts or truncates bytes once, at a random
place. Each run is compared with one that loses the same links at the same rounds and has no
attacker: all models must be equal to the bit, no agent may hang or crash. Exit code 1 otherwise.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

from corn.covariance import ThreatModel
from corn.plan import make_plan
from corn.privacy import PrivacyBudget
from corn.threads import limit_threads
from corn.topology import load_network

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.oracles.network_attack import Intervention, judge


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--interventions", type=int, default=200)
    parser.add_argument("--first-seed", type=int, default=0)
    options = parser.parse_args()
    limit_threads()
    budget = PrivacyBudget(10, 1e-5, num_steps=12, clip=0.1)
    # Under gossip, where the rounds in which links are lost decide the models.
    network = load_network("ring:4", mixing="gossip")
    plan = make_plan(network, budget, mechanism="ldp", threat=ThreatModel(), cooldown_steps=2)
    outcomes, broken = Counter[str](), []
    for seed in range(options.first_seed, options.first_seed + options.interventions):
        intervention = Intervention.draw(seed, plan.num_agents)
        with tempfile.TemporaryDirectory() as folder:
            try:
                outcome = judge(plan, intervention, Path(folder))
            except AssertionError as error:
                outcome = "broken"
                broken.append(f"seed {seed}: {error}")
        where = "store" if intervention.target < 0 else "link"
        outcomes[f"{where}, {outcome}"] += 1
        if seed % 20 == 19:
            print(f"{seed + 1 - options.first_seed}: {dict(outcomes)}", flush=True)
    for name, count in sorted(outcomes.items()):
        print(f"{name}: {count}")
    print("\n".join(broken))
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
