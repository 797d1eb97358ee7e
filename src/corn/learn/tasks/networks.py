"""Models to start from: a small convolutional network for images."""

from __future__ import annotations

from torch import nn
from torch.nn import functional

from corn.errors import InvalidArgumentError
from corn.learn.tasks.module import ModuleTask


def small_cnn(image_shape: tuple[int, int], num_classes: int) -> nn.Module:
    """Two convolutions with pooling and one linear layer; 9,098 parameters on MNIST's 28×28."""
    height, width = image_shape
    if min(image_shape) < 4:
        raise InvalidArgumentError(f"image_shape must be at least 4×4, found {height}×{width}")
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * (height // 4) * (width // 4), num_classes),
    )


def small_cnn_task(image_shape: tuple[int, int], num_classes: int) -> ModuleTask:
    """The small convolutional network with cross-entropy, drawn anew for each seed."""
    model = small_cnn(image_shape, num_classes)
    return ModuleTask(model, functional.cross_entropy, input_shape=(1, *image_shape), reset=True)
