"""Programs that ``peers.py`` runs in the environments of peers, which have NumPy and no CorN.

    PYTHON benchmarks/peer_programs.py PEER FOLDER

The folder has the rows, the matrices of the graph and ``job.json`` with the settings. The result is
one line of JSON.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np


def run_opacus(folder: Path, job: Mapping[str, Any]) -> dict[str, Any]:
    """Train on the pooled rows with Opacus' sampler, clipping, noise and accountant."""
    torch: Any = importlib.import_module("torch")
    opacus: Any = importlib.import_module("opacus")
    utils: Any = importlib.import_module("opacus.accountants.utils")
    torch.set_num_threads(1)
    data = np.load(folder / "data.npz")
    inputs, targets = torch.from_numpy(data["inputs"]), torch.from_numpy(data["targets"])
    rate = job["batch_size"] * job["agents"] / len(targets)
    noise = utils.get_noise_multiplier(
        target_epsilon=job["epsilon"],
        target_delta=job["delta"],
        sample_rate=rate,
        steps=job["num_steps"],
        accountant="prv",
    )
    runs = []
    for seed in job["seeds"]:
        torch.manual_seed(seed)
        model = _make_module(torch, np.load(folder / f"{job['model']}-{seed}.npz"))
        start = time.process_time()
        # Opacus samples at a rate of one over the number of batches.
        loader = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(inputs, targets),
            batch_size=round(rate * len(targets)),
        )
        private, optimizer, criterion, loader = opacus.PrivacyEngine(accountant="prv").make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), job["step_size"]),
            data_loader=loader,
            criterion=torch.nn.CrossEntropyLoss(),
            noise_multiplier=noise,
            max_grad_norm=job["clip"],
            grad_sample_mode="ghost",
        )
        step = 0
        while step < job["num_steps"]:
            for X, y in loader:
                optimizer.zero_grad()
                criterion(private(X), y).backward()
                optimizer.step()
                step += 1
                if step == job["num_steps"]:
                    break
        seconds = time.process_time() - start
        with torch.no_grad():
            found = model(torch.from_numpy(data["test_inputs"])).argmax(dim=1).numpy()
        runs.append((float((found == data["test_targets"]).mean()), seconds))
    return {"runs": runs, "messages": 0, "bytes": 0, "noise_multiplier": noise}


def _make_module(torch: Any, arrays: Mapping[str, Any]) -> Any:
    """Return the module with these weights: one linear layer, or two with a ReLU between."""
    weights = [torch.from_numpy(arrays[name].astype(np.float32)) for name in sorted(arrays)]
    layers: list[Any] = []
    for bias, weight in zip(weights[::2], weights[1::2], strict=True):
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0])
        layer.bias.data, layer.weight.data = bias, weight
        layers += [layer, torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


def run_jax_privacy(folder: Path, job: Mapping[str, Any]) -> dict[str, Any]:
    """Minimise Tr(A R) under [R⁻¹]_ii ≤ 1 with the dense strategy optimiser, until it stalls."""
    dense: Any = importlib.import_module("jax_privacy.matrix_factorization.dense")
    jax: Any = importlib.import_module("jax")
    A = np.load(folder / "design.npz")["A"]
    eigenvalues, vectors = np.linalg.eigh(A)
    workload = np.sqrt(np.maximum(eigenvalues, 0))[:, None] * vectors.T
    start = time.process_time()
    with jax.enable_x64():
        # A strategy C with unit columns has error Tr(A (CᵀC)⁻¹).
        found = dense.optimize(
            len(A), A=jax.numpy.array(workload), max_optimizer_steps=job["num_steps"]
        )
        strategy = np.asarray(found)
    seconds = time.process_time() - start
    R = np.linalg.inv(strategy.T @ strategy)
    scale = float(np.diag(np.linalg.inv(R)).max())
    return {"value": float(np.trace(A @ R)) * scale, "seconds": seconds}


def run_whisper(folder: Path, job: Mapping[str, Any]) -> dict[str, Any]:
    """Design noise with the authors' code, with Clarabel in place of MOSEK."""
    cvxpy: Any = importlib.import_module("cvxpy")
    sys.path.insert(0, job["code"])
    cvxpy.MOSEK = cvxpy.CLARABEL
    generator: Any = importlib.import_module("diff_privacy").DPNoiseGenerator
    start = time.process_time()
    # The covariance grows with the square of the clip. With this one its cap is 1: solvers keep
    # constraints up to absolute errors, and missed a small cap by 12 %.
    unit = generator._compute_dp_bound(job["epsilon"], job["delta"], 1.0, job["num_steps"]) ** 0.5
    # One parameter: the covariance is what is asked for, and not the noise.
    made = generator(
        dp_mechanism="mixing",
        epsilon=job["epsilon"],
        delta=job["delta"],
        norm_clip=unit,
        n_clients=job["agents"],
        n_rounds=job["num_steps"],
        model_dim=1,
        weight_matrix=np.load(folder / "design.npz")["W"],
        seed=0,
    )
    seconds = time.process_time() - start
    # The code adds noise to sums of clipped gradients, and divides them by the batch size.
    scale = job["clip"] / (unit * job["batch_size"])
    R = scale**2 * np.asarray(made.noise_params)
    np.save(folder / "whisper.npy", R)
    cap = generator._compute_dp_bound(job["epsilon"], job["delta"], 1.0, job["num_steps"])
    excess = float(np.diag(np.linalg.inv(R)).max()) * (job["clip"] / job["batch_size"]) ** 2 / cap
    return {"seconds": seconds, "precision over its cap": excess}


def run_decor(folder: Path, job: Mapping[str, Any]) -> dict[str, Any]:
    """Calibrate σ_cdp² I + σ_cor² L with the accountant of the authors' code.

    Its branch for sampled examples uses neither the steps nor δ (``rdp_compose_convert``), so that
    the other one is used, which counts an example at every step. Of all ratios of the two the best
    for CorN's default objective is taken.
    """
    sys.path.insert(0, job["code"])
    account: Any = importlib.import_module("utils.dp_account")
    matrices = np.load(folder / "design.npz")
    links = ((matrices["W"] > 0) & ~np.eye(job["agents"], dtype=bool)).astype(float)
    degrees = np.diag(links.sum(axis=1))
    clip = job["clip"] / job["batch_size"]
    start = time.process_time()
    allowed = account.reverse_eps(job["epsilon"], job["num_steps"], job["delta"])
    best = math.inf
    for ratio in np.geomspace(0.01, 100, 41):
        # The loss of a step falls with the square of a common factor.
        spent = account.rdp_account(1.0, ratio, clip, degrees, links, sparse=False)
        R = spent / allowed * (np.eye(job["agents"]) + ratio**2 * (degrees - links))
        value = float(np.trace(matrices["A"] @ R))
        if value < best:
            best = value
            np.save(folder / "decor.npy", R)
    return {"seconds": time.process_time() - start}


def run_flower(folder: Path, job: Mapping[str, Any]) -> dict[str, Any]:
    """Train with SecAgg+, clipping by the clients' mod, and the server's central DP."""
    logging: Any = importlib.import_module("logging")
    accounting: Any = importlib.import_module("flwr.supercore.privacy_accounting")
    accountant: Any = importlib.import_module("flwr.supercore.privacy_accounting.rdp_accountant")
    logging.getLogger("flwr").setLevel(logging.ERROR)
    n, num_steps = job["agents"], job["num_steps"]

    def spend(noise_multiplier: float) -> float:
        config = accounting.PrivacyConfig(
            job["delta"],
            n,
            accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
            accounting.SamplingMethod.NO_AMPLIFICATION,
        )
        counted = accountant.RdpAccountant(config)
        counted.compose(accounting.GaussianPrivacyEvent(noise_multiplier, n, n), num_steps)
        return float(counted.get_epsilon(job["delta"]))

    low, high = 0.1, 1000.0
    # The search ends on the private side.
    while high / low > 1.0001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if spend(middle) <= job["epsilon"] else (middle, high)
    data = dict(np.load(folder / "data.npz"))
    runs = [_train_flower(data, job, high, seed) for seed in job["seeds"]]
    traffic = runs[0][2]
    return {
        "runs": [(accuracy, seconds) for accuracy, seconds, _ in runs],
        "messages": traffic[0] / num_steps,
        "bytes": traffic[1] / num_steps,
        "noise_multiplier": high,
        "epsilon": spend(high),
    }


def _train_flower(
    data: Mapping[str, Any], job: Mapping[str, Any], noise_multiplier: float, seed: int
) -> tuple[float, float, list[float]]:
    """Return test accuracy, seconds, and the number and bytes of messages of one run."""
    app: Any = importlib.import_module("flwr.app")
    client_mods: Any = importlib.import_module("flwr.client.mod")
    common: Any = importlib.import_module("flwr.common")
    compat: Any = importlib.import_module("flwr.compat.common.recorddict_compat")
    serde: Any = importlib.import_module("flwr.common.serde")
    server: Any = importlib.import_module("flwr.server")
    strategies: Any = importlib.import_module("flwr.server.strategy")
    workflows: Any = importlib.import_module("flwr.server.workflow")
    proxies: Any = importlib.import_module("flwr.server.compat.grid_client_proxy")
    n, rng = job["agents"], np.random.default_rng(seed)
    num_features, num_classes = data["inputs"].shape[1], 10
    contexts = {node: app.Context(1, node, {}, app.RecordDict(), {}) for node in range(1, n + 1)}
    traffic = [0.0, 0.0]

    def fit(message: Any, context: Any) -> Any:
        """Take one gradient step of softmax regression on a batch of the client's rows."""
        instructions = compat.recorddict_to_fitins(message.content, keep_input=True)
        (theta,) = common.parameters_to_ndarrays(instructions.parameters)
        first, last = data["offsets"][context.node_id - 1 : context.node_id + 1]
        rows = rng.choice(np.arange(first, last), job["batch_size"], replace=False)
        X = np.column_stack([data["inputs"][rows], np.ones(len(rows))])
        logits = X @ theta.reshape(num_classes, -1).T
        chances = np.exp(logits - logits.max(axis=1, keepdims=True))
        chances /= chances.sum(axis=1, keepdims=True)
        chances[np.arange(len(rows)), data["targets"][rows]] -= 1
        gradient = (chances.T @ X / len(rows)).ravel()
        updated = common.ndarrays_to_parameters([theta - job["step_size"] * gradient])
        # Equal weights: the accountant counts on them.
        status = common.Status(common.Code.OK, "")
        result = common.FitRes(status, updated, num_examples=1, metrics={})
        content = compat.fitres_to_recorddict(result, keep_input=True)
        return app.Message(content, reply_to=message)

    def clip(message: Any, context: Any) -> Any:
        return client_mods.fixedclipping_mod(message, context, fit)

    def carry(message: Any) -> Any:
        """Return the message as the other side reads it, and count its bytes."""
        encoded = serde.message_to_proto(message)
        traffic[0] += 1
        traffic[1] += encoded.ByteSize()
        return serde.message_from_proto(encoded)

    class Grid:
        """The server's view of clients that run in this process."""

        def get_node_ids(self) -> list[int]:
            return list(contexts)

        def send_and_receive(self, messages: Any, *, timeout: Any = None) -> list[Any]:
            del timeout
            return [
                carry(
                    client_mods.secaggplus_mod(
                        carry(message), contexts[message.metadata.dst_node_id], clip
                    )
                )
                for message in messages
            ]

    initial = np.zeros((num_features + 1) * num_classes)
    strategy = strategies.DifferentialPrivacyClientSideFixedClipping(
        strategies.FedAvg(
            fraction_evaluate=0.0,
            min_fit_clients=n,
            min_available_clients=n,
            initial_parameters=common.ndarrays_to_parameters([initial]),
        ),
        noise_multiplier,
        # One step along a gradient that is clipped to C moves the model by η C at most.
        job["step_size"] * job["clip"],
        n,
    )
    grid = Grid()
    context = server.LegacyContext(
        context=app.Context(1, 0, {}, app.RecordDict(), {}), strategy=strategy
    )
    for node in contexts:
        context.client_manager.register(proxies.GridClientProxy(node, grid, 1))
    identity = "flwr.supercore.task_identity.TaskIdentity."
    numbers = {name: mock.patch(identity + name, 1) for name in ("_run_id", "_node_id", "_task_id")}
    # Flower draws the server's noise from NumPy's global generator.
    np.random.seed(seed)  # noqa: NPY002
    # Four neighbours share masks with each client: all others would take four times as long.
    fit_all = workflows.SecAggPlusWorkflow(num_shares=5, reconstruction_threshold=3)
    start = time.process_time()
    for patch in numbers.values():
        patch.start()
    parameters = compat.parameters_to_arrayrecord(strategy.initialize_parameters(None), True)
    context.state.array_records["parameters"] = parameters
    for current in range(1, job["num_steps"] + 1):
        context.state.config_records["config"] = app.ConfigRecord({"current_round": current})
        fit_all(grid, context)
    for patch in numbers.values():
        patch.stop()
    seconds = time.process_time() - start
    (theta,) = common.parameters_to_ndarrays(
        compat.arrayrecord_to_parameters(context.state.array_records["parameters"], True)
    )
    X = np.column_stack([data["test_inputs"], np.ones(len(data["test_inputs"]))])
    found = (X @ theta.reshape(num_classes, -1).T).argmax(axis=1)
    return float((found == data["test_targets"]).mean()), seconds, traffic


PROGRAMS: dict[str, Callable[[Path, Mapping[str, Any]], dict[str, Any]]] = {
    "opacus": run_opacus,
    "jax_privacy": run_jax_privacy,
    "whisper": run_whisper,
    "decor": run_decor,
    "flower": run_flower,
}


def main() -> None:
    """Run the program of one peer."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    print(json.dumps(PROGRAMS[name](folder, job)))


if __name__ == "__main__":
    main()
