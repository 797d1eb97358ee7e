"""Trained models as others use them: named weights, preprocessing, classes and the promise."""

from __future__ import annotations

import io
import json
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast, get_type_hints

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from corn.checks import FloatArray, require
from corn.errors import FileFormatError, InvalidArgumentError, MissingExtraError, make_printable
from corn.files import write_file
from corn.learn.mechanism import Mechanism
from corn.learn.metrics import Quality, Result, measure_quality
from corn.learn.problem import TrainingProblem
from corn.learn.schema import read_schema
from corn.learn.tasks import Task
from corn.parsing import build_fields, parse_json
from corn.plan import Plan, fingerprint
from corn.privacy import PrivacyBudget
from corn.privacy.budget import Relation, describe_queries
from corn.privacy.rounding import round_up_range, write_exactly
from corn.version import __version__

MODEL_FILE = "model.pt"
_FORMAT = 1
_FORMAT_KEY = "corn_model"
_MAX_BYTES = 1 << 24
_DAMAGE = AttributeError, EOFError, LookupError, OverflowError, RuntimeError, TypeError, ValueError

OutputKind: TypeAlias = Literal["logit", "logits", "number", "own"]
"""``logit`` is that of the second of two classes, ``number`` is scaled as the target, and ``own``
is of a loss of the user's own."""

_LAYERS: dict[str, tuple[str, ...]] = {
    "Linear": ("in_features", "out_features"),
    "Conv2d": ("in_channels", "out_channels", "kernel_size", "stride", "padding"),
    "MaxPool2d": ("kernel_size", "stride", "padding"),
    "Flatten": ("start_dim", "end_dim"),
    "ReLU": (),
    "Tanh": (),
    "Sigmoid": (),
}


@dataclass(frozen=True)
class ModelPromise:
    """The promise about the data that a model was trained on.

    ``epsilon`` and ``delta`` are the largest that any agent was promised, ``epsilon_least`` the
    smallest; None without noise. ``unit`` is ``agent`` or ``sample``, ``protects`` that in words.
    ``clipping`` says what is clipped, how samples are drawn, and which data sets are neighbours;
    ``relation`` is the last of these by itself, see ``ClippedQuery``. ``plan`` is its fingerprint,
    and ``simulation`` says why ε is simulated, and no promise; both may be empty.
    """

    epsilon: float | None
    epsilon_least: float | None
    delta: float | None
    unit: str
    protects: str
    clipping: str
    relation: Relation | None
    adversary: str
    num_steps: int
    num_agents: int
    mechanism: str
    plan: str = ""
    simulation: str = ""

    @classmethod
    def of_plan(cls, plan: Plan, *, simulation: str = "") -> ModelPromise:
        """Return the promise of a plan to all its agents."""
        own = plan.threat.describe(), plan.num_agents, plan.mechanism
        return cls._of_budget(plan.budget, own, plan, simulation)

    @classmethod
    def of_result(
        cls, result: Result, mechanism: Mechanism | None = None, *, plan: Plan | None = None
    ) -> ModelPromise:
        """Return the promise of a result's mechanism, by default of its first trial."""
        one = mechanism or result.trials[0].mechanism
        own = one.against, result.parameters.shape[1], one.name
        if one.budget is not None:
            return cls._of_budget(one.budget, own, plan, result.simulation)
        nobody = None, None, None, "", "nobody", "", None, "nobody"
        return cls(*nobody, result.num_steps, *own[1:])

    @classmethod
    def _of_budget(
        cls, budget: PrivacyBudget, own: tuple[str, int, str], plan: Plan | None, simulation: str
    ) -> ModelPromise:
        adversary, num_agents, mechanism = own
        epsilons = [promise.epsilon for promise in budget.promises]
        return cls(
            epsilon=max(epsilons),
            epsilon_least=min(epsilons),
            delta=max(promise.delta for promise in budget.promises),
            unit=budget.unit,
            protects=budget.queries[0].protects,
            clipping=describe_queries(budget.queries),
            relation=budget.queries[0].relation,
            adversary=adversary,
            num_steps=budget.num_steps,
            num_agents=num_agents,
            mechanism=mechanism,
            plan="" if plan is None else fingerprint(plan).hex(),
            simulation=simulation,
        )

    @property
    def holds(self) -> bool:
        """Whether anybody is protected."""
        return self.epsilon is not None and not self.simulation

    def describe(self) -> str:
        """Return the promise in one line: ε, δ, unit, clipping, adversary and plan."""
        if self.epsilon is None:
            return "no noise: the model protects nobody"
        kind = "simulated, protects nobody: " if self.simulation else ""
        named = f"; plan {self.plan[:16]}" if self.plan else ""
        why = f"; {self.simulation}" if self.simulation else ""
        return (
            f"{kind}ε = {round_up_range([self.epsilon_least, self.epsilon])}, δ = "
            f"{write_exactly(self.delta or 0.0)} for {self.protects} ({self.clipping}), against "
            f"{self.adversary}{named}{why}"
        )


@dataclass(frozen=True, eq=False)
class TrainedModel:
    """A trained model with everything that its use needs.

    ``state_dict`` has weights by the names of a plain ``torch.nn.Module``, ``layers`` its layers as
    plain data; None for a class of the user's own. ``input_shape`` is that of one encoded sample,
    ``output`` the meaning of outputs, ``classes`` their names in order; None for numbers.
    ``preprocessing`` is the public schema by which a table becomes inputs, ``promise`` has ε, δ,
    unit, clipping, adversary and plan.
    """

    state_dict: Mapping[str, Tensor] = field(repr=False)
    layers: tuple[Mapping[str, object], ...] | None
    input_shape: tuple[int, ...]
    output: OutputKind
    classes: tuple[str, ...] | None
    preprocessing: Mapping[str, Any] | None
    promise: ModelPromise
    description: str

    @classmethod
    def from_problem(
        cls, problem: TrainingProblem, parameters: Tensor, promise: ModelPromise
    ) -> TrainedModel | None:
        """Return the model of a flat vector of parameters; None if its task predicts nothing."""
        if not hasattr(problem.task, "to_module"):
            return None
        module: nn.Module = problem.task.to_module(parameters.detach().cpu())
        schema = problem.schema
        shape = getattr(problem.task, "input_shape", None) or problem.data.inputs.shape[1:]
        first = next(module.children(), module)
        if isinstance(first, nn.Linear) and len(shape) > 1:
            shape = (first.in_features,)
        return cls.from_module(
            module,
            promise,
            input_shape=shape,
            output=_find_output(problem.task, module),
            classes=None if schema is None else schema.classes or None,
            preprocessing=None if schema is None else schema.to_json(),
            description=problem.task.describe(),
        )

    @classmethod
    def from_module(
        cls,
        module: nn.Module,
        promise: ModelPromise,
        *,
        input_shape: Sequence[int],
        output: OutputKind = "own",
        classes: Sequence[str] | None = None,
        preprocessing: Mapping[str, Any] | None = None,
        description: str = "",
    ) -> TrainedModel:
        """Return a module of the user's own with the promise under which it was trained.

        Args:
            module: the trained module, such as :func:`corn.learn.load_parameters` returns it.
            promise: such as ``ModelPromise.of_result(result)`` of :func:`corn.train`.
            input_shape: the shape of one sample.
            output: the kind of output, see ``OutputKind``; ``logits`` for cross-entropy.
            classes: their names; by default numbers, where outputs are logits.
            preprocessing: the public schema of files, if there is one.
            description: a description of the model; by default the module's class.
        """
        state = {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}
        if classes is None and output in ("logit", "logits"):
            count = 2 if output == "logit" else _count_outputs(module)
            classes = [str(number) for number in range(count)]
        return cls(
            state_dict=state,
            layers=_describe_layers(module),
            input_shape=tuple(input_shape),
            output=output,
            classes=None if classes is None else tuple(classes),
            preprocessing=preprocessing,
            promise=promise,
            description=description or type(module).__name__,
        )

    def describe(self) -> dict[str, Any]:
        """Return everything but the weights as plain data."""
        about = {own.name: getattr(self, own.name) for own in fields(self)}
        del about["state_dict"]
        return {
            **about,
            "promise": asdict(self.promise),
            "shapes": {name: tuple(value.shape) for name, value in self.state_dict.items()},
            "corn_version": __version__,
        }

    def save(self, path: Path, *, is_private: bool = False) -> None:
        """Write the model to a file that ``torch.load`` reads with ``weights_only=True``."""
        about = json.dumps(self.describe())
        content = {_FORMAT_KEY: _FORMAT, "about": about, "state_dict": dict(self.state_dict)}
        # Through memory: torch would write the name of the temporary file into the archive.
        stream = io.BytesIO()
        torch.save(content, stream)
        write_file(path, stream.getvalue(), is_private=is_private)

    def to_json(self) -> dict[str, Any]:
        """Return the whole model as plain data, weights as nested lists."""
        weights = {name: value.tolist() for name, value in self.state_dict.items()}
        return {"format": _FORMAT, **self.describe(), "weights": weights}

    def to_module(self) -> nn.Module:
        """Return a plain ``torch.nn.Module`` with the weights."""
        if self.layers is None:
            raise InvalidArgumentError(
                f"model must be made of the layers {', '.join(_LAYERS)}, found {self.description}: "
                "load its state_dict into your own class"
            )
        module = _make_layers(self.layers)
        # Assigned: a model in double precision stays in it.
        own = {name: value.clone() for name, value in self.state_dict.items()}
        module.load_state_dict(own, assign=True)
        return module.eval()

    def to_sklearn(self) -> Any:
        """Return a fitted ``LogisticRegression`` with the weights of a linear classifier."""
        from sklearn.linear_model import LogisticRegression

        is_linear = self.layers is not None and [own["type"] for own in self.layers] == ["Linear"]
        is_linear = is_linear and self.classes is not None
        require(is_linear, "model", "a linear classifier for scikit-learn", self.description)
        (layer,) = self.layers or ()
        prefix = layer["name"] and f"{layer['name']}."
        fitted = LogisticRegression()
        fitted.coef_ = self.state_dict[f"{prefix}weight"].double().numpy()
        fitted.intercept_ = self.state_dict[f"{prefix}bias"].double().numpy()
        fitted.classes_ = np.array(self.classes)
        fitted.n_features_in_ = fitted.coef_.shape[1]
        return fitted

    def predict(self, inputs: Tensor) -> FloatArray:
        """Return probabilities, shape (rows, classes), or numbers, for encoded inputs."""
        module = self.to_module()
        with torch.no_grad():
            samples = inputs.to(next(module.parameters()).dtype).reshape(-1, *self.input_shape)
            outputs = _to_predictions(module(samples).double(), self.output)
        return np.asarray(outputs.numpy())

    def measure(self, inputs: Tensor, targets: Tensor) -> Quality | None:
        """Return AUC, recall and calibration on encoded samples; None for other than classes."""
        if self.output not in ("logit", "logits") or self.layers is None:
            return None
        return measure_quality(self.predict(inputs), targets.cpu().numpy())

    def to_onnx(self) -> bytes:
        """Return an ONNX model of probabilities or numbers, with its description as metadata."""
        try:
            import onnx
        except ImportError as error:
            raise MissingExtraError("the ONNX format", extra="onnx") from error
        predictor = _Predictor(self.to_module().float(), self.output).eval()
        name = "probabilities" if self.output in ("logit", "logits") else "outputs"
        stream: Any = io.BytesIO()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            torch.onnx.export(
                predictor,
                (torch.zeros(2, *self.input_shape),),
                stream,
                input_names=["inputs"],
                output_names=[name],
                dynamic_axes={"inputs": {0: "rows"}, name: {0: "rows"}},
                opset_version=17,
                dynamo=False,
            )
        made = onnx.load_from_string(stream.getvalue())
        onnx.helper.set_model_props(made, {"corn": json.dumps(self.describe())})
        return cast("bytes", made.SerializeToString())


class _Predictor(nn.Module):
    """A model whose outputs are predictions."""

    def __init__(self, model: nn.Module, output: OutputKind) -> None:
        super().__init__()
        self.model = model
        self.output = output

    def forward(self, inputs: Tensor) -> Tensor:
        return _to_predictions(self.model(inputs), self.output)


def _to_predictions(outputs: Tensor, kind: OutputKind) -> Tensor:
    """Return the probabilities of classes, or the outputs where there are none."""
    if kind == "logit":
        # Both by σ, so that small probabilities keep their digits.
        return torch.sigmoid(torch.cat([-outputs, outputs], dim=1))
    return torch.softmax(outputs, dim=1) if kind == "logits" else outputs


def load_model(path: Path | str) -> TrainedModel:
    """Read ``model.pt``, or that in the folder of a run. No code in the file is run."""
    file = find_model(Path(path))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            content = torch.load(file, map_location="cpu", weights_only=True)
        return _read_content(content)
    except OSError as error:
        raise FileFormatError(f"{file}: cannot be read: {error.strerror}") from error
    except (*_DAMAGE, pickle.UnpicklingError) as error:
        found = make_printable(str(error), limit=200)
        raise FileFormatError(f"{file}: not a model that corn saved: {found}") from error


def find_model(path: Path) -> Path:
    """Return the model's file in the folder of a run: that of all agents, or of the only one."""
    if path.is_file():
        return path
    for folder in (path, path / "shared"):
        if (folder / MODEL_FILE).is_file():
            return folder / MODEL_FILE
    found = sorted(path.glob(f"shared/agent-*/{MODEL_FILE}"))
    if len(found) == 1:
        return found[0]
    listed = ", ".join(map(str, found[:5])) or "none"
    raise FileFormatError(f"{path}: must be a model, or have one {MODEL_FILE}, found {listed}")


@dataclass(frozen=True, eq=False)
class Predictions:
    """Predictions in the order of the rows, and columns of the table that the model does not use.

    If the table has targets, there are ``scores``, and of classes their ``quality``: private both.
    """

    values: FloatArray = field(repr=False)
    ignored: tuple[str, ...] = ()
    quality: Quality | None = None
    scores: Mapping[str, Any] = field(default_factory=dict)


def predict_table(model: TrainedModel, path: Path) -> Predictions:
    """Predict for every row of a table, or raise with all its differences from the schema."""
    from corn.learn.file_data import read_file

    if not (model.preprocessing or {}).get("columns"):
        found = model.description
        raise FileFormatError(f"{path}: needs a model of tables with named columns, found {found}")
    schema = read_schema(model.preprocessing)
    is_whole = schema.classes == (model.classes or ())
    if not is_whole or model.input_shape != (len(schema.features),):
        raise FileFormatError("the model is damaged: its preprocessing does not fit its weights")
    file = read_file(path)
    used = {*(column.name for column in schema.columns), schema.target}
    ignored = tuple(name for name in file.cells if name not in used)
    rows = schema.read(file, needs_targets=False)
    values = model.predict(torch.from_numpy(schema.scale_inputs(rows)).float())
    if not schema.classes:
        values = schema.decode_targets(values.reshape(-1))
    # Outputs of a loss of the user's own are no probabilities.
    if rows.targets is None or model.output == "own":
        return Predictions(values, ignored)
    if model.classes is None:
        scores = {"mean squared error": float(np.square(values - rows.targets).mean())}
        return Predictions(values, ignored, scores=scores)
    targets = rows.targets.astype(np.int64)
    quality = measure_quality(values, targets)
    picked = values[np.arange(len(values)), targets]
    loss = -float(np.log(np.maximum(picked, np.finfo(np.float64).tiny)).mean())
    return Predictions(values, ignored, quality, {"loss": loss, **asdict(quality)})


def _read_content(content: Any) -> TrainedModel:
    if not isinstance(content, dict) or content.get(_FORMAT_KEY) != _FORMAT:
        raise ValueError("it has no description, or is of another version")
    text = str(content["about"]).encode("utf-8", "surrogatepass")
    state = content["state_dict"]
    hints = get_type_hints(TrainedModel)
    hints |= {"shapes": Mapping[str, tuple[int, ...]], "corn_version": str}
    hints["preprocessing"] = Mapping[str, object] | None
    del hints["state_dict"]
    about = build_fields(hints, parse_json(text, max_bytes=_MAX_BYTES), "the description")
    if about.pop("shapes") != {name: tuple(value.shape) for name, value in state.items()}:
        raise ValueError("the weights do not have the shapes of the description")
    del about["corn_version"]
    model = TrainedModel(state_dict=state, **about)
    if model.layers is not None:
        shape = model.predict(torch.zeros(1, *model.input_shape)).shape[1:]
        if model.output in ("logit", "logits") and shape != (len(model.classes or ()),):
            raise ValueError("the outputs do not fit the classes")
    return model


def _find_output(task: Task, module: nn.Module) -> OutputKind:
    loss = getattr(task, "loss", None)
    # Tasks with their own gradients are classifiers by cross-entropy.
    if loss is None:
        return "logit" if _count_outputs(module) == 1 else "logits"
    if loss is functional.cross_entropy or isinstance(loss, nn.CrossEntropyLoss):
        return "logits"
    return "number" if loss is functional.mse_loss or isinstance(loss, nn.MSELoss) else "own"


def _count_outputs(module: nn.Module) -> int:
    linear = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    return linear[-1].out_features if linear else 0


def _describe_layers(module: nn.Module) -> tuple[dict[str, Any], ...] | None:
    children = list(module.named_children()) if type(module) is nn.Sequential else [("", module)]
    layers = []
    for name, layer in children:
        kind = type(layer).__name__
        if kind not in _LAYERS or type(layer) is not getattr(nn, kind):
            return None
        layers.append({"name": name, "type": kind} | {k: getattr(layer, k) for k in _LAYERS[kind]})
    # Through JSON, as a reader will get them: tuples become lists.
    layers = json.loads(json.dumps(layers))
    # A layer with settings beyond those listed, such as dilation, is not made again.
    return tuple(layers) if repr(_make_layers(layers)) == repr(module) else None


def _make_layers(layers: Iterable[Mapping[str, Any]]) -> nn.Module:
    made: dict[str, nn.Module] = {}
    for layer in layers:
        if layer["type"] not in _LAYERS:
            raise ValueError(f"unknown layer {layer['type']!r}")
        values = {k: layer[k] for k in _LAYERS[layer["type"]]}
        given = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        made[layer["name"]] = getattr(nn, layer["type"])(**given)
    if list(made) == [""]:
        return made[""]
    return nn.Sequential(OrderedDict(made))
