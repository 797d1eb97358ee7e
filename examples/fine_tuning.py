"""Five clinics fine-tune a small transformer by LoRA; the rest of it neither moves nor travels.

Run with ``.venv-frameworks/bin/python examples/fine_tuning.py`` after ``make frameworks``, which
installs ``transformers`` and ``peft``. A vision transformer is trained on public images of the
digits 0 to 4. The clinics have images of 5 to 9, and train adapters of rank 4 and a new output
layer: only these parameters get noise and are sent. The script prints the accuracy before and
after, how many parameters are trained, and the guarantee.
"""

import torch
from peft import LoraConfig, get_peft_model
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import ViTConfig, ViTForImageClassification

import corn

EPOCHS, BATCH, DELTA, RATE = 15, 120, 1e-5, 0.01


def load_data() -> tuple[TensorDataset, TensorDataset, tuple[Tensor, Tensor]]:
    """Return public samples, and private ones to train and to test with."""
    images, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    targets = torch.tensor(labels)
    is_public = targets < 5
    own, classes = inputs[~is_public], targets[~is_public] - 5
    public = TensorDataset(inputs[is_public], targets[is_public])
    return public, TensorDataset(own[:720], classes[:720]), (own[720:], classes[720:])


def make_model(public: TensorDataset, seed: int = 0) -> nn.Module:
    """Return a transformer that was trained on public samples, with new adapters."""
    torch.manual_seed(seed)
    shape = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 5}
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = ViTForImageClassification(ViTConfig(**shape, **size, intermediate_size=64))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    for _ in range(100):  # public data: no privacy is spent
        inputs, targets = public.tensors
        loss = nn.functional.cross_entropy(model(inputs).logits, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.classifier = nn.Linear(32, 5)
    layers = ["q_proj", "v_proj", "fc1", "fc2"]
    return get_peft_model(
        model, LoraConfig(r=4, target_modules=layers, modules_to_save=["classifier"])
    )


def measure_accuracy(model: nn.Module, test: tuple[Tensor, Tensor]) -> float:
    with torch.no_grad():
        return float((model(test[0]).logits.argmax(dim=1) == test[1]).double().mean())


def train(model: nn.Module, data: TensorDataset, **options: object) -> torch.optim.Optimizer:
    """Train the adapters privately; return the optimizer, which knows the ε spent."""
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer, loader = corn.make_private(
        module=model,
        optimizer=torch.optim.Adam(trained, lr=RATE),
        data_loader=DataLoader(data, batch_size=BATCH),
        target_epsilon=3,
        target_delta=DELTA,
        epochs=EPOCHS,
        max_grad_norm=1.0,
        network="complete:5",
        **options,
    )
    for _ in range(EPOCHS):
        for images, classes in loader:
            logits = model(images).logits
            losses = nn.functional.cross_entropy(logits, classes, reduction="none")
            optimizer.mean(losses).backward()
            optimizer.step()  # raises if a frozen parameter has moved
    return optimizer


def main() -> None:
    public, private, test = load_data()
    model = make_model(public)
    print(f"accuracy on new digits before: {measure_accuracy(model, test):.3f}")
    optimizer = train(model, private)
    print(f"accuracy on new digits after:  {measure_accuracy(model, test):.3f}")
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    print(f"{count} of {total} parameters trained and sent; ε spent {optimizer.get_epsilon(DELTA)}")
    print(optimizer.privacy)


if __name__ == "__main__":
    main()
