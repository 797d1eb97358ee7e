"""Models by name, and models from a function in the user's own file."""

from __future__ import annotations

import inspect
import math
from typing import Any, get_args

import torch
from torch import nn
from torch.nn import functional

from corn.checks import require_choice
from corn.errors import FileFormatError, InvalidArgumentError
from corn.files import load_function
from corn.learn.names import ModelName
from corn.learn.tasks import (
    LinearClassifier,
    ModuleTask,
    ShallowNetwork,
    Task,
    small_cnn_task,
)

# The paper's network has this many hidden units.
_HIDDEN = 32
_MODEL_SEED = 0
_SIGNATURE = "make_model(input_shape, num_outputs), or without arguments"


def make_named_task(
    model: str,
    input_shape: tuple[int, ...],
    num_classes: int | None,
    *,
    is_image: bool = False,
    l2: float = 1e-4,
    of: str = "this data",
) -> Task:
    """Return a task for samples of a shape.

    Args:
        model: ``linear``, ``network`` (32 hidden units), ``cnn``, or ``FILE.py:FUNCTION``.
        input_shape: the shape of one sample.
        num_classes: the number of classes; None for numbers to predict, with squared loss.
        is_image: whether a sample is an image: (height, width) or with channels first.
        l2: the penalty λ of linear classifiers.
        of: the data, for errors.
    """
    if model.endswith(".py") or ".py:" in model:
        # Images have their channels first, as torch expects them.
        shape = (1, *input_shape) if is_image and len(input_shape) == 2 else input_shape
        return _load_task(model, shape, num_classes)
    require_choice("model", model, get_args(ModelName), advice="or FILE.py:FUNCTION")
    num_features = math.prod(input_shape)
    if model == "cnn":
        if not is_image or num_classes is None:
            raise InvalidArgumentError(
                f"model must be linear or network for {of}, which has no images with classes, "
                "found 'cnn'"
            )
        return small_cnn_task(input_shape, num_classes)
    if num_classes is None:
        return _make_regression(model, num_features)
    if model == "linear":
        return LinearClassifier(num_features, num_classes, l2=l2)
    return ShallowNetwork(num_features, num_classes, num_hidden=_HIDDEN)


def flattens_inputs(model: str, num_classes: int | None) -> bool:
    """Return whether a model takes samples as flat vectors: all that are written out here."""
    return num_classes is not None and model in ("linear", "network")


def _make_regression(model: str, num_features: int) -> Task:
    output = nn.Linear(num_features if model == "linear" else _HIDDEN, 1)
    # Flattening makes one number per sample out of one row per sample, as targets are.
    layers: list[nn.Module] = [nn.Flatten(), output, nn.Flatten(0)]
    if model == "network":
        layers[1:1] = [nn.Linear(num_features, _HIDDEN), nn.ReLU()]
    else:
        # Least squares is convex: zero is a start that does not depend on a seed.
        nn.init.zeros_(output.weight)
        nn.init.zeros_(output.bias)
    # A linear model keeps its zeros; a network needs new random weights for each seed.
    return ModuleTask(nn.Sequential(*layers), functional.mse_loss, reset=model == "network")


def _load_task(spec: str, input_shape: tuple[int, ...], num_classes: int | None) -> Task:
    """Return the task of a user's function, which returns a module, or a module and its loss."""
    make = load_function(spec)
    num_outputs = 1 if num_classes is None else num_classes
    # Agents must start from one model, so it is drawn from a public seed.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_MODEL_SEED)
        made: Any = _call(make, spec, input_shape, num_outputs)
    usual = functional.mse_loss if num_classes is None else functional.cross_entropy
    model, loss = made if isinstance(made, tuple) and len(made) == 2 else (made, usual)
    if not isinstance(model, nn.Module) or not callable(loss):
        raise FileFormatError(
            f"{spec}: must return a torch.nn.Module, or a pair of it and its loss, found "
            f"{type(made).__name__}"
        )
    return ModuleTask(model, loss, input_shape=input_shape)


def _call(make: Any, spec: str, input_shape: tuple[int, ...], num_outputs: int) -> Any:
    signature = inspect.signature(make)
    arguments: tuple[object, ...] = (input_shape, num_outputs) if signature.parameters else ()
    try:
        # Bound before the call: a ``TypeError`` raised inside the user's function is not about its
        # arguments, and must not be reported as such.
        signature.bind(*arguments)
    except TypeError as error:
        raise FileFormatError(f"{spec}: must be a function {_SIGNATURE}: {error}") from error
    return make(*arguments)
