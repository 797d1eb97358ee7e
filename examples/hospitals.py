"""Six hospitals decide how to share noise before they train together.

Run with ``.venv/bin/python examples/hospitals.py``. It prints what the privacy budget asks of each
hospital alone, what drawing noise jointly saves, what one curious hospital changes, and then makes
a plan and checks it the way every hospital would. Takes a few seconds.
"""

import tempfile
from pathlib import Path

import networkx as nx

import corn


def main() -> None:
    """Decide, plan and verify."""
    links = [
        ("Oslo", "Bergen"),
        ("Bergen", "Trondheim"),
        ("Trondheim", "Oslo"),
        ("Oslo", "Uppsala"),
        ("Uppsala", "Turku"),
        ("Turku", "Tartu"),
        ("Tartu", "Uppsala"),
    ]
    network = corn.load_network(nx.Graph(links))
    budget = corn.PrivacyBudget(epsilon=5, delta=1e-5, num_steps=1000, clip=0.1)
    print(budget.describe())
    print(f"alone, each hospital adds noise of std {budget.independent_noise_std:.3f}\n")

    alone = corn.design(
        network.mixing_matrix,
        budget.precision_cap,
        mechanism="ldp",
        objective=corn.Horizon(200),
    )
    for insiders, seeds in ((0, "global"), (1, "global"), (1, "pairs")):
        together = corn.design(
            network.mixing_matrix,
            budget.precision_cap,
            objective=corn.Horizon(200),
            threat=corn.ThreatModel(insiders, seeds),
        )
        share = together.value / alone.value
        print(f"{insiders} curious, {seeds} seeds: {share:.1%} of the noise energy remains")

    plan = corn.make_plan(network, budget)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.corn"
        corn.save_plan(plan, path)
        found = corn.verify_plan(corn.load_plan(path))
    print(f"\n{plan.describe()}")
    print(f"verified: {found.passed}, at most {found.gap:.2%} above the best noise for these seeds")
    for guarantee in found.guarantees:
        name = network.graph.nodes[guarantee.agent]["name"]
        print(
            f"  {name:10s} ε = {guarantee.epsilon:.4f}, worst against {guarantee.worst_coalition}"
        )


if __name__ == "__main__":
    main()
