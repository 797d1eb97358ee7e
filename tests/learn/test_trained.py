"""Saved models: the weights have the names of a plain module, and every format predicts alike."""

import io
import json
import pickle
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import corn
from corn.errors import FileFormatError, InvalidArgumentError
from corn.learn import AgentData, ModelPromise, TrainedModel, TrainingProblem, load_model
from corn.learn.tasks import (
    LinearClassifier,
    ModuleTask,
    Quadratic,
    ShallowNetwork,
    Task,
    small_cnn_task,
)
from corn.learn.training import load_parameters
from tests.mutations import find_complaint, is_clear, mutate

PROMISE = ModelPromise(
    epsilon=2.0,
    epsilon_least=2.0,
    delta=1e-5,
    unit="sample",
    protects="one sample of one agent",
    clipping="each sample's gradient is clipped to 1",
    relation="replace-one",
    adversary="an eavesdropper",
    num_steps=10,
    num_agents=2,
    mechanism="corn",
    plan="ab" * 32,
)


def make_model(task: Task, shape: tuple[int, ...], num_classes: int) -> tuple[Any, Tensor, Any]:
    """Return a saved model with random weights, the flat vector, and samples to try it on."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(40, *shape), torch.randint(0, num_classes, (40,))
    vector = 0.3 * torch.randn(task.num_parameters)
    data = AgentData.from_parts([(inputs, targets)])
    model = TrainedModel.from_problem(TrainingProblem(task, data), vector, PROMISE)
    return model, vector, (inputs, targets)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.inner(inputs).tanh()
        return outputs


TASKS: dict[str, tuple[Task, tuple[int, ...], int]] = {
    "two classes": (LinearClassifier(4, 2), (4,), 2),
    "three classes": (LinearClassifier(4, 3), (4,), 3),
    "network": (ShallowNetwork(4, 3, num_hidden=5), (4,), 3),
    "convolutions": (small_cnn_task((8, 8), 3), (8, 8), 3),
    "own layers": (
        ModuleTask(
            nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), functional.cross_entropy
        ),
        (4,),
        3,
    ),
}


@pytest.fixture(params=TASKS)
def saved(request: pytest.FixtureRequest) -> tuple[Task, TrainedModel, Tensor, Any]:
    task, shape, num_classes = TASKS[request.param]
    return task, *make_model(task, shape, num_classes)


def test_probabilities_are_those_that_the_task_scores(
    saved: tuple[Task, TrainedModel, Tensor, Any],
) -> None:
    task, model, vector, (inputs, targets) = saved
    scores = task.evaluate(vector.view(1, -1), task.prepare(inputs), targets)
    found = model.predict(inputs)
    picked = found[np.arange(len(found)), targets.numpy()]
    assert -np.log(picked).mean() == pytest.approx(float(scores.loss), rel=1e-4)
    quality = model.measure(inputs, targets)
    assert quality is not None
    assert scores.accuracy is not None
    assert quality.accuracy == pytest.approx(float(scores.accuracy))


def test_the_file_loads_into_a_plain_module_by_one_line(
    saved: tuple[Task, TrainedModel, Tensor, Any], tmp_path: Path
) -> None:
    _, model, _, (inputs, _) = saved
    model.save(tmp_path / "model.pt")
    plain = model.to_module()
    for parameter in plain.parameters():
        nn.init.zeros_(parameter)
    plain.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True)["state_dict"])
    again = load_model(tmp_path / "model.pt")
    assert again.describe() == model.describe()
    assert again.promise == PROMISE
    np.testing.assert_array_equal(again.predict(inputs), model.predict(inputs))
    logits = plain(inputs.reshape(-1, *model.input_shape)).detach()
    expected = model.predict(inputs)
    torch.testing.assert_close(
        logits.argmax(dim=1) if logits.shape[1] > 1 else (logits[:, 0] > 0).long(),
        torch.from_numpy(expected.argmax(axis=1)),
    )


def test_a_flat_vector_in_a_linear_layer_is_another_classifier() -> None:
    """The task has the bias last in each row, and the module after all weights."""
    model, vector, (inputs, _) = make_model(LinearClassifier(4, 3), (4,), 3)
    wrong = load_parameters(nn.Linear(4, 3), vector)(inputs).argmax(dim=1)
    right = torch.from_numpy(model.predict(inputs).argmax(axis=1))
    rows = vector.view(3, 5)
    assert torch.equal(right, (inputs @ rows[:, :4].T + rows[:, 4]).argmax(dim=1))
    assert not torch.equal(wrong, right)


@pytest.mark.parametrize("num_classes", [2, 3])
def test_linear_models_are_those_of_scikit_learn(num_classes: int) -> None:
    model, _, (inputs, _) = make_model(LinearClassifier(4, num_classes), (4,), num_classes)
    named = replace(model, classes=tuple("abc"[:num_classes]))
    fitted = named.to_sklearn()
    np.testing.assert_allclose(
        fitted.predict_proba(inputs.double().numpy()), model.predict(inputs), atol=1e-6
    )
    assert set(fitted.predict(inputs.double().numpy())) <= set("abc")
    network, _, _ = make_model(ShallowNetwork(4, 3), (4,), 3)
    with pytest.raises(InvalidArgumentError):
        network.to_sklearn()


def test_json_is_enough_to_predict() -> None:
    model, _, (inputs, _) = make_model(LinearClassifier(4, 3), (4,), 3)
    content = json.loads(json.dumps(model.to_json()))
    weight, bias = (np.array(content["weights"][name]) for name in ("weight", "bias"))
    logits = inputs.double().numpy() @ weight.T + bias
    expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(model.predict(inputs), expected, atol=1e-6)
    assert content["promise"]["plan"] == PROMISE.plan


def test_onnx_predicts_the_same(saved: tuple[Task, TrainedModel, Tensor, Any]) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="the ONNX format is an extra")
    pytest.importorskip("onnx", reason="the ONNX format is an extra")
    _, model, _, (inputs, _) = saved
    session = runtime.InferenceSession(model.to_onnx())
    samples = inputs.reshape(-1, *model.input_shape).numpy()
    (found,) = session.run(["probabilities"], {"inputs": samples})
    np.testing.assert_allclose(found, model.predict(inputs), atol=1e-5)
    about = json.loads(session.get_modelmeta().custom_metadata_map["corn"])
    assert about["promise"]["epsilon"] == 2.0


def test_onnx_predicts_numbers() -> None:
    runtime = pytest.importorskip("onnxruntime", reason="the ONNX format is an extra")
    pytest.importorskip("onnx", reason="the ONNX format is an extra")
    module = nn.Sequential(nn.Flatten(), nn.Linear(4, 1), nn.Flatten(0))
    model = TrainedModel.from_module(module, PROMISE, input_shape=(4,), output="number")
    inputs = torch.randn(5, 4)
    (found,) = runtime.InferenceSession(model.to_onnx()).run(None, {"inputs": inputs.numpy()})
    np.testing.assert_allclose(found, model.predict(inputs), atol=1e-5)
    assert model.measure(inputs, torch.zeros(5)) is None


def test_classes_of_the_user_are_exported_by_their_state_dict(tmp_path: Path) -> None:
    module = Own()
    model = TrainedModel.from_module(module, PROMISE, input_shape=(4,), output="logits")
    model.save(tmp_path / "model.pt")
    again = Own()
    again.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True)["state_dict"])
    inputs = torch.randn(3, 4)
    assert torch.equal(again(inputs), module(inputs))
    loaded = load_model(tmp_path / "model.pt")
    assert loaded.layers is None
    assert loaded.classes == ("0", "1", "2")
    with pytest.raises(InvalidArgumentError, match="your own class"):
        loaded.to_module()


def test_a_layer_with_other_settings_is_not_taken_for_a_plain_one() -> None:
    module = nn.Sequential(nn.Conv2d(1, 2, 3, dilation=2), nn.Flatten(), nn.Linear(32, 2))
    model = TrainedModel.from_module(module, PROMISE, input_shape=(1, 8, 8))
    assert model.layers is None


def test_a_task_that_predicts_nothing_has_no_model() -> None:
    task = Quadratic(4)
    problem = TrainingProblem(task, task.agent_data(torch.float64))
    assert TrainedModel.from_problem(problem, torch.zeros(2), PROMISE) is None


def test_the_promise_of_a_result_names_unit_adversary_and_simulation() -> None:
    data = [(np.eye(3)[[0, 1, 2, 0]], np.array([0, 1, 0, 1]))] * 2
    budget = corn.PrivacyBudget(5, 1e-5, num_steps=2, clip=0.1)
    result = corn.train(
        corn.load_network("complete:2"),
        budget,
        model=nn.Linear(3, 2),
        loss=functional.cross_entropy,
        datasets=data,
    )
    promise = ModelPromise.of_result(result)
    assert (promise.epsilon, promise.delta, promise.unit) == (5, 1e-5, "agent")
    assert promise.adversary == result.trials[0].mechanism.against
    assert not promise.holds
    assert promise.describe().startswith("simulated, protects nobody: ε = 5")
    secure = replace(promise, simulation="")
    assert secure.holds
    assert not replace(secure, epsilon=None).holds


class Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("code of the file was run",)


@pytest.mark.parametrize("damage", ["cut", "code", "other", "shapes", "layers", "text"])
def test_damaged_files_are_refused(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, _, _ = make_model(LinearClassifier(4, 3), (4,), 3)
    path = tmp_path / "model.pt"
    model.save(path)
    content = torch.load(path, weights_only=True)
    about = json.loads(content["about"])
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:500])
    elif damage == "code":
        path.write_bytes(pickle.dumps(Trap()))
    elif damage == "text":
        path.write_text("not a model")
    else:
        if damage == "other":
            content = {"state_dict": content["state_dict"]}
        elif damage == "shapes":
            content["state_dict"] = {"weight": torch.zeros(3, 4), "bias": torch.zeros(2)}
        else:
            about["layers"][0]["type"] = "Module"
            content["about"] = json.dumps(about)
        stream = io.BytesIO()
        torch.save(content, stream)
        path.write_bytes(stream.getvalue())
    with pytest.raises(FileFormatError):
        load_model(path)
    assert capsys.readouterr().out == ""


def test_a_damaged_description_gives_an_error_of_one_line(tmp_path: Path) -> None:
    model, _, (inputs, _) = make_model(ShallowNetwork(4, 3, num_hidden=5), (4,), 3)
    path = tmp_path / "model.pt"
    model.save(path)
    content = torch.load(path, weights_only=True)
    errors = []
    for seed in range(100):
        about = mutate(content["about"].encode(), Random(seed)).decode("utf-8", "replace")
        torch.save({**content, "about": about}, path)
        # What is not refused predicts.
        errors.append(find_complaint(lambda: load_model(path).predict(inputs)))
    found = [error for error in errors if error is not None]
    assert len(found) > 50
    assert all(map(is_clear, found)), found


def test_the_model_of_a_folder_must_be_unambiguous(tmp_path: Path) -> None:
    model, _, _ = make_model(LinearClassifier(4, 3), (4,), 3)
    with pytest.raises(FileFormatError, match="found none"):
        load_model(tmp_path)
    model.save(tmp_path / "shared" / "agent-3" / "model.pt")
    load_model(tmp_path)
    model.save(tmp_path / "shared" / "agent-4" / "model.pt")
    with pytest.raises(FileFormatError, match="agent-4"):
        load_model(tmp_path)
    model.save(tmp_path / "shared" / "model.pt")
    load_model(tmp_path)
