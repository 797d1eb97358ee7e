"""Four clinics fine-tune a small transformer by adapters; the rest of it neither moves nor travels.

Run with ``.venv/bin/python examples/fine_tuning.py``. A transformer reads the rows of an image. It
is trained on public images of the digits 0 to 4. The clinics have images of 5 to 9, and train
adapters of rank 4 and a new output layer: only these parameters get noise and are sent. The script
prints the accuracy before and after, how many parameters are trained, and the guarantee.
"""

import copy

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import corn
from corn.privacy.rounding import round_up

WIDTH, RANK, STEPS, BATCH = 32, 4, 40, 60


class RowTransformer(nn.Module):
    """One encoder layer over the eight rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Linear(8, WIDTH)
        self.places = nn.Parameter(0.1 * torch.randn(8, WIDTH))
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8 * WIDTH, 5)

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores of five classes."""
        encoded = self.encoder(self.rows(images) + self.places)
        return self.head(encoded.flatten(1))


class Adapter(nn.Module):
    """A frozen linear layer plus a trained product of two thin matrices (LoRA)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(RANK, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the frozen layer, corrected."""
        return self.base(x) + x @ self.down.T @ self.up.T


def accuracy(model: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    with torch.no_grad():
        return float((model(data[0]).argmax(dim=1) == data[1]).double().mean())


def main() -> None:
    images, labels = load_digits(return_X_y=True)
    inputs, targets = (
        torch.tensor(images / 16, dtype=torch.float32).view(-1, 8, 8),
        torch.tensor(labels),
    )
    public, private = targets < 5, targets >= 5
    torch.manual_seed(0)
    model = RowTransformer()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    for _ in range(100):  # public data: no privacy is spent
        loss = nn.functional.cross_entropy(model(inputs[public]), targets[public])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    model.requires_grad_(False)
    model.encoder.linear1 = Adapter(model.encoder.linear1)
    model.encoder.linear2 = Adapter(model.encoder.linear2)
    model.head = nn.Linear(8 * WIDTH, 5)
    frozen = {n: copy.deepcopy(p) for n, p in model.named_parameters() if not p.requires_grad}
    trained = [p for p in model.parameters() if p.requires_grad]

    own, classes = inputs[private], targets[private] - 5
    test = own[720:], classes[720:]
    print(f"accuracy on new digits before: {accuracy(model, test):.3f}")
    budget = corn.PrivacyBudget(
        epsilon=8,
        delta=1e-5,
        num_steps=STEPS,
        clip=1,
        unit="sample",
        batch_size=BATCH,
        samples_per_agent=180,
    )
    model, optimizer, loader = corn.make_private(
        "ring:4",
        budget,
        module=model,
        optimizer=torch.optim.SGD(trained, lr=0.5, momentum=0.9),
        data_loader=[
            DataLoader(TensorDataset(own[k:720:4], classes[k:720:4]), batch_size=BATCH)
            for k in range(4)
        ],
        secure=True,
    )
    for _ in range(-(-STEPS * 4 // len(loader))):
        for batch, goals in loader:
            losses = nn.functional.cross_entropy(model(batch), goals, reduction="none")
            optimizer.backward(losses)
            optimizer.step()  # raises if a frozen parameter has moved
    count, total = sum(p.numel() for p in trained), sum(p.numel() for p in model.parameters())
    named = dict(model.named_parameters())
    assert all(torch.equal(named[n], before) for n, before in frozen.items())
    print(f"accuracy on new digits after:  {accuracy(model, test):.3f}")
    spent = round_up(optimizer.get_epsilon())
    print(f"{count} of {total} parameters trained and sent; ε spent {spent}")
    print(optimizer.privacy)


if __name__ == "__main__":
    main()
