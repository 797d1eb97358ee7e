"""Eight clinics train a model of their own on digits that each keeps to itself.

Run with ``.venv/bin/python examples/own_model.py``. It makes a plan that holds against one curious
clinic, trains a small network with it and without noise, and prints the accuracy that each reaches
and what the plan promises. Sample-level privacy: each image's gradient is clipped. Takes about ten
seconds.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import corn
from corn.learn import partition_iid

NUM_CLINICS, NUM_STEPS, BATCH = 8, 60, 60


def main() -> None:
    """Plan, train, compare."""
    images, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(images / 16, dtype=torch.float32)
    targets = torch.tensor(labels)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(1)).numpy()
    train, test = order[:1440], order[1440:]
    parts = partition_iid(labels[train], NUM_CLINICS, seed=1)
    datasets = [(inputs[train[part]], targets[train[part]]) for part in parts]

    budget = corn.PrivacyBudget(
        epsilon=8, delta=1e-5, num_steps=NUM_STEPS, clip=1.0, unit="sample", batch_size=BATCH
    )
    network = corn.load_network(f"ring:{NUM_CLINICS}")
    plan = corn.make_plan(network, budget)
    print(plan.describe())

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    common = {
        "model": model,
        "loss": nn.functional.cross_entropy,
        "datasets": datasets,
        "test": (inputs[test], targets[test]),
        "step_size": 0.5,
        "num_steps": NUM_STEPS,
        "batch_size": BATCH,
    }
    private = corn.train(plan, **common).last_rows[0]
    alone = corn.design(network, budget, mechanism="ldp")
    local = corn.train(network, budget, alone, **common).last_rows[0]
    open_ = corn.train(network, **common).last_rows[0]
    for name, row in (("planned", private), ("noise drawn alone", local), ("no noise", open_)):
        print(f"{name:18s} test accuracy {row['test_accuracy']:.3f}")
    print(f"ε spent: {private['epsilon']:.3f} at δ = {budget.delta:g}")


if __name__ == "__main__":
    main()
