"""Any ``torch.nn.Module`` with any loss as a task."""

from __future__ import annotations

import hashlib
import warnings
from typing import final

import torch
from torch import Tensor, nn

from corn.errors import CornWarning
from corn.learn.batches import Batch
from corn.learn.tasks.flat_module import FlatModule, Loss, explained
from corn.learn.tasks.looped import Looped
from corn.learn.tasks.protocol import Gradients, Scores
from corn.learn.tasks.vectorised import Vectorised


@final
class ModuleTask:
    """The user's own model and loss.

    Parameters with ``requires_grad`` False stay as they are: they get no gradient and no noise. All
    models, and all samples where each is clipped, are differentiated together by ``torch.func``. A
    module that it cannot vectorise, such as one that decides by the values of its data, runs one
    model (and one sample) at a time instead, with a ``CornWarning`` that says so.

    Args:
        model: any module without state beyond its parameters. Batch normalisation is refused: its
            statistics mix samples, which no clipping bounds. So is dropout, whose randomness could
            not be repeated from a seed.
        loss: (outputs, targets) → the **mean** loss over a batch, as in ``torch.nn.functional``.
        input_shape: the shape of a sample as the model wants it; by default as the data has it.
        reset: draw new initial parameters for each seed, by each layer's ``reset_parameters``;
            otherwise all start from the model's present parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
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
        """Give samples the shape that the model wants."""
        return inputs if self._input_shape is None else inputs.view(-1, *self._input_shape)

    def initialize(self, seed: int) -> Tensor:
        """The model's own parameters, or drawn anew for the seed."""
        return self._module.initialize(seed if self._reset else None)

    def gradient(
        self, parameters: Tensor, batch: Batch, *, sample_clip: Tensor | None = None
    ) -> Gradients:
        """See ``Task``."""
        inputs, targets = batch.inputs.flatten(0, 1), batch.targets.flatten(0, 1)
        with explained(inputs, targets):
            runner = self._choose_runner(parameters[0, 0], inputs, targets)
            if sample_clip is None:
                return runner.gradient(parameters, batch)
            return runner.clipped_gradient(parameters, batch, sample_clip)

    def evaluate(self, parameters: Tensor, inputs: Tensor, targets: Tensor) -> Scores:
        """See ``Task``; accuracy where outputs are scores of classes and targets are classes."""
        with explained(inputs, targets), torch.no_grad():
            runner = self._choose_runner(parameters[0], inputs, targets)
            return runner.evaluate(parameters, inputs, targets)

    def describe(self) -> str:
        """See ``Task``."""
        return f"{self._name} with {self.num_parameters} parameters"

    def fingerprint(self) -> bytes:
        """Of layers, loss and constants, so that a checkpoint of another model is not taken."""
        digest = hashlib.sha256(self._module.describe().encode())
        for tensor in self._module.constants():
            flat = tensor.detach().cpu().contiguous().flatten()
            digest.update(flat.view(torch.uint8).numpy().tobytes())
        return digest.digest()

    def _choose_runner(
        self, vector: Tensor, inputs: Tensor, targets: Tensor
    ) -> Vectorised | Looped:
        """Settled once, on a few samples."""
        if self._runner is None:
            kept = self._module.rehearse(vector, inputs, targets)
            self._runner = Vectorised(self._module, elements_a_sample=kept)
            reason = _find_obstacle(self._runner, vector, inputs, targets)
            if reason is not None:
                self._runner = Looped(self._module)
                warnings.warn(
                    f"{self._name} runs one model and one sample at a time, many times slower: "
                    f"torch.func cannot vectorise it ({reason})",
                    CornWarning,
                    stacklevel=2,
                )
        return self._runner


def _find_obstacle(
    runner: Vectorised, vector: Tensor, inputs: Tensor, targets: Tensor
) -> str | None:
    """Why a module that runs alone does not run vectorised; None if it does."""
    X, y = inputs[:2].unsqueeze(0), targets[:2].unsqueeze(0)
    models = vector.expand(1, 2, -1)
    batch = Batch(X, y, vector.new_full(y.shape[:2], 1 / len(X[0])), is_average=True)
    try:
        runner.gradient(models, batch)
        runner.clipped_gradient(models, batch, vector.new_ones(2))
        runner.evaluate(models[0], X[0], y[0])
    except RuntimeError as error:
        return str(error).strip().split("\n")[0][:120]
    return None
