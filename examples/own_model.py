"""Eight clinics train their own model on digits that never leave each clinic.

Run ``.venv/bin/python examples/own_model.py``. The script makes a plan that holds against one
curious clinic, and trains a small network with the plan, with noise that every clinic draws alone,
and without noise. It prints the plan's promise, the test accuracies and the spent ε. Privacy is at
the sample level: each image's gradient is clipped. It takes about ten seconds.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import corn
from corn.learn import partition_samples
from corn.privacy import round_up

NUM_CLINICS, NUM_STEPS, BATCH = 8, 60, 60


def main() -> None:
    """Make a plan, train with it and with two alternatives, and compare the results."""
    images, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(images / 16, dtype=torch.float32)
    targets = torch.tensor(labels)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(1)).numpy()
    train, test = order[:1440], order[1440:]
    parts = partition_samples("iid", labels[train], NUM_CLINICS, seed=1)
    datasets = [(inputs[train[part]], targets[train[part]]) for part in parts]

    budget = corn.PrivacyBudget(
        epsilon=8,
        delta=1e-5,
        num_steps=NUM_STEPS,
        clip=1.0,
        unit="sample",
        batch_size=BATCH,
        # The rate of Poisson sampling follows from the batch size and the smallest data set.
        samples_per_agent=min(len(part) for part in parts),
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
    # Secret keys, so that these models keep the promise. The others are for comparison, with noise
    # from a public seed.
    private = corn.train(plan, **common, secure=True).last_rows[0]
    ldp = corn.design(network, budget, mechanism="ldp")
    local = corn.train(network, budget, ldp, **common).last_rows[0]
    non_private = corn.train(network, **common).last_rows[0]
    rows = {"planned": private, "noise drawn alone": local, "no noise": non_private}
    for name, row in rows.items():
        print(f"{name:18s} test accuracy {row['test_accuracy']:.3f}")
    print(f"ε spent: {round_up(float(private['epsilon']))} at δ = {budget.delta:g}")


if __name__ == "__main__":
    main()
