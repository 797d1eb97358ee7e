"""A script of an Opacus user: four clinics train one model, and no server sees their data.

Run with ``.venv/bin/python examples/opacus_user.py``. The lines marked with "was" replace those of
Opacus; model, optimizer and loop stay as they were. The loader of all samples is distributed over
the clinics. In each step every clinic releases a noisy gradient, and Adam steps along the exact
average of all releases. The script prints the test accuracy, the spent ε and the guarantee.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import corn  # was: from opacus import PrivacyEngine

EPOCHS, DELTA = 8, 1e-5


def main() -> None:
    images, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    targets = torch.tensor(labels)
    train = TensorDataset(inputs[:1440], targets[:1440])
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * 16, 10),
    )
    model, optimizer, loader = corn.make_private(  # was: engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.02),
        data_loader=DataLoader(train, batch_size=240),
        target_epsilon=8,
        target_delta=DELTA,
        epochs=EPOCHS,
        max_grad_norm=1.0,
        network="ring:4",  # was: nothing
    )
    for _ in range(EPOCHS):
        for batch, classes in loader:
            optimizer.zero_grad()
            # was: loss = nn.functional.cross_entropy(model(batch), classes)
            losses = nn.functional.cross_entropy(model(batch), classes, reduction="none")
            optimizer.mean(losses).backward()  # was: loss.backward()
            optimizer.step()
    with torch.no_grad():
        accuracy = (model(inputs[1440:]).argmax(dim=1) == targets[1440:]).double().mean()
    print(f"test accuracy {accuracy:.3f}")
    print(f"ε spent {optimizer.get_epsilon(DELTA)}")  # was: engine.get_epsilon(DELTA)
    print(optimizer.privacy)


if __name__ == "__main__":
    main()
