"""Tasks from any ``torch.nn.Module`` with any loss, and a small convolutional network."""

from __future__ import annotations

import hashlib
import warnings
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from corn.checks import require
from corn.errors import CornWarning
from corn.learn.batches import Batch
from corn.learn.tasks.differentiation import Looped, Vectorised
from corn.learn.tasks.flat_module import FlatModule, MeanLoss, explained, tensor_bytes
from corn.learn.tasks.protocol import Gradients, Scores


@final
class ModuleTask:
    """The user's own model and loss as a task.

    Parameters with ``requires_grad`` False are constants: they get no gradient and no noise. All
    models, and all samples where each is clipped, are differentiated together by ``torch.func``. A
    module that ``torch.func`` cannot vectorise, such as one that branches on the values of its
    data, runs one model (and one sample) at a time, with a ``CornWarning``.

    Args:
        model: any module without state beyond its parameters. Batch normalisation is refused: its
            statistics mix samples, so clipping a sample's gradient does not bound its influence.
            Dropout is refused: its random draws could not be repeated from a seed.
        loss: (outputs, targets) → the **mean** loss over a batch, as in ``torch.nn.functional``.
            Where samples are clipped, it is called with one sample at a time. It must not keep
            state between calls.
        input_shape: the shape of one sample for the model; by default its shape in the data.
        reset: draw new initial parameters for each seed, by each layer's ``reset_parameters``;
            otherwise all runs start from the model's present parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: MeanLoss,
        *,
        input_shape: tuple[int, ...] | None = None,
        reset: bool = False,
    ) -> None:
        self._module, self._name = FlatModule(model, loss), type(model).__name__
        self._input_shape, self._reset = input_shape, reset
        self._runner: Vectorised | Looped | None = None

    @property
    def num_parameters(self) -> int:
        """See ``Task``; frozen parameters do not count."""
        return self._module.num_parameters

    def prepare(self, inputs: Tensor) -> Tensor:
        """Return samples in the model's input shape."""
        return inputs if self._input_shape is None else inputs.view(-1, *self._input_shape)

    def initialize(self, seed: int) -> Tensor:
        """Return the model's own parameters, or new ones for the seed."""
        return self._module.initialize(seed if self._reset else None)

    def gradient(
        self, parameters: Tensor, batch: Batch, *, sample_clip: Tensor | None = None
    ) -> Gradients:
        """See ``Task``."""
        # All cells' samples in a row, for the rehearsal and for error messages.
        inputs, targets = batch.inputs.flatten(0, 1), batch.targets.flatten(0, 1)
        with explained(inputs, targets):
            runner = self._choose_runner(parameters[0, 0], inputs, targets)
            if sample_clip is None:
                return runner.gradient(parameters, batch)
            return runner.clipped_gradient(parameters, batch, sample_clip)

    def evaluate(self, parameters: Tensor, inputs: Tensor, targets: Tensor) -> Scores:
        """See ``Task``; with accuracy if outputs score classes and targets are classes."""
        with explained(inputs, targets), torch.no_grad():
            runner = self._choose_runner(parameters[0], inputs, targets)
            return runner.evaluate(parameters, inputs, targets)

    def describe(self) -> str:
        """See ``Task``."""
        return f"{self._name} with {self.num_parameters} parameters"

    def fingerprint(self) -> bytes:
        """Return a hash of layers, loss and constants, so that checkpoints fit this model alone."""
        digest = hashlib.sha256(self._module.describe().encode())
        for tensor in self._module.constants():
            digest.update(tensor_bytes(tensor))
        return digest.digest()

    def _choose_runner(
        self, vector: Tensor, inputs: Tensor, targets: Tensor
    ) -> Vectorised | Looped:
        """Return the runner, chosen once by trying a few samples."""
        # On real samples, because shapes and types of inputs decide which layers run.
        if self._runner is None:
            kept = self._module.rehearse(vector, inputs, targets)
            self._runner = Vectorised(self._module, elements_per_sample=kept)
            reason = _find_obstacle(self._runner, vector, inputs, targets)
            if reason is not None:
                self._runner = Looped(self._module)
                warnings.warn(
                    f"{self._name} runs one model and one sample at a time, which is many times "
                    f"slower: torch.func cannot vectorise it ({reason})",
                    CornWarning,
                    stacklevel=2,
                )
        return self._runner


def _find_obstacle(
    runner: Vectorised, vector: Tensor, inputs: Tensor, targets: Tensor
) -> str | None:
    """Return the error of a module that runs alone but not vectorised; None if it runs."""
    X, y = inputs[:2].unsqueeze(0), targets[:2].unsqueeze(0)
    # One cell with two models and two samples: every ``vmap`` has something to batch.
    models = vector.expand(1, 2, -1)
    batch = Batch(X, y, vector.new_full(y.shape[:2], 1 / len(X[0])), is_average=True)
    # All three uses are tried: batching rules exist for some layers and transforms only.
    try:
        runner.gradient(models, batch)
        runner.clipped_gradient(models, batch, vector.new_ones(2))
        runner.evaluate(models[0], X[0], y[0])
    except RuntimeError as error:
        return str(error).strip().split("\n")[0][:120]
    return None


def small_cnn(image_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return two convolutions with pooling and a linear layer: 9,098 parameters for 28×28.

    ``image_shape`` is (height, width), or (channels, height, width).
    """
    # A grey image gets one channel; one with channels loses the extra 1.
    channels, height, width = (1, *image_shape)[-3:]
    require(min(height, width) >= 4, "image_shape", "at least 4×4", f"{height}×{width}")
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * (height // 4) * (width // 4), num_classes),
    )


def small_cnn_task(image_shape: tuple[int, ...], num_classes: int) -> ModuleTask:
    """Return the small network with cross-entropy; each seed draws its own initial parameters."""
    model, shape = small_cnn(image_shape, num_classes), (1, *image_shape)[-3:]
    return ModuleTask(model, functional.cross_entropy, input_shape=shape, reset=True)
