"""A choice of noise for six hospitals that train one model together.

Run with ``.venv/bin/python examples/hospitals.py``. The script prints the noise that each hospital
needs with independent noise, the savings of joint noise, and the effect of one curious hospital. It
then makes a plan and verifies it as every hospital would. Takes a few seconds.
"""

import tempfile
from pathlib import Path

import networkx as nx

import corn
from corn.privacy import round_up


def main() -> None:
    """Compare noise designs, make a plan and verify it."""
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
    print(f"independent noise: std {budget.independent_noise_std:.3f} per hospital\n")

    independent = corn.design(network, budget, mechanism="ldp")
    print(f"independent noise: {independent.central_ratio:.2f} × a trusted server's variance")
    for num_insiders in range(3):
        joint = corn.design(network, budget, threat=corn.ThreatModel(num_insiders))
        print(f"against {num_insiders} insiders: {joint.central_ratio:.2f} ×")

    plan = corn.make_plan(network, budget)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.corn"
        corn.save_plan(plan, path)
        found = corn.verify_plan(corn.load_plan(path))
    print(f"\n{plan.describe()}")
    print(f"verified: {found.passed}, at most {found.gap:.2%} above the optimum for these seeds")
    for guarantee in found.guarantees:
        insiders = ", ".join(network.agent_names[agent] for agent in guarantee.worst_coalition)
        print(f"  {guarantee.name:10s} ε = {round_up(guarantee.epsilon)}, worst against {insiders}")


if __name__ == "__main__":
    main()
