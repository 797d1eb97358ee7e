"""A script of an Opacus user, changed in six lines: no server sees the data of four clinics.

Run with ``.venv/bin/python examples/opacus_user.py``. The lines marked with "was" replace those of
Opacus. Model and optimizer stay as they were; the loop has one loss for each sample. The plan,
which ``corn plan`` could also have made, states network and budget. Each clinic has a loader of its
own samples, trains on them, and exchanges noisy models with its neighbours. The script prints the
test accuracy, the spent ε and the guarantee.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import corn  # was: from opacus import PrivacyEngine

EPOCHS, BATCH, DELTA = 8, 60, 1e-5


def make_plan() -> corn.Plan:
    """Return the public plan of all clinics: one sample of a clinic is protected."""
    budget = corn.PrivacyBudget(
        epsilon=8,
        delta=DELTA,
        num_steps=EPOCHS * 6,  # six batches are a pass over a clinic's samples
        clip=1.0,
        unit="sample",
        batch_size=BATCH,
        samples_per_agent=360,
    )
    return corn.make_plan(corn.load_network("ring:4"), budget)


def main() -> None:
    images, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    targets = torch.tensor(labels)
    clinics = [TensorDataset(inputs[k:1440:4], targets[k:1440:4]) for k in range(4)]
    loader = [DataLoader(own, batch_size=BATCH) for own in clinics]  # was: one for all samples
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * 16, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

    # was: make_private(module=…, …, noise_multiplier=1.0, max_grad_norm=1.0) of a PrivacyEngine
    options = {"module": model, "optimizer": optimizer, "data_loader": loader, "secure": True}
    model, optimizer, loader = corn.make_private(make_plan(), **options)

    for _ in range(EPOCHS):
        for batch, classes in loader:
            optimizer.zero_grad()
            # was: loss = nn.functional.cross_entropy(model(batch), classes)
            losses = nn.functional.cross_entropy(model(batch), classes, reduction="none")
            optimizer.backward(losses)  # was: loss.backward()
            optimizer.step()

    with torch.no_grad():
        accuracy = (model(inputs[1440:]).argmax(dim=1) == targets[1440:]).double().mean()
    print(f"test accuracy {accuracy:.3f}")
    print(f"ε spent {optimizer.get_epsilon(DELTA)}")  # was: engine.get_epsilon(DELTA)
    print(optimizer.privacy)


if __name__ == "__main__":
    main()
