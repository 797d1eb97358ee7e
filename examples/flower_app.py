"""Six clinics in a Flower federation whose server adds up their updates and cannot read them.

Run with ``python examples/flower_app.py``; it needs the extra ``flower`` and its simulation engine
(``pip install '.[flower]' 'flwr[simulation]'``). A mod clips each clinic's update, adds its share
of the noise and hides the result under masks, which cancel in the server's sum. The script prints
the promise, the test accuracy of the server's model, and the ε that each clinic's ledger counts.
"""

import logging
import shutil
import tempfile
from pathlib import Path

import numpy as np
from sklearn.datasets import make_classification

import corn
from corn.distributed import make_keys
from corn.engines import AgentRelease
from corn.flower import CornMod, CornStrategy
from corn.privacy import round_up

NUM_CLINICS, NUM_ROUNDS, CLIP = 6, 15, 1.0
DATA, LABELS = make_classification(1000, 20, n_informative=8, class_sep=2.0, random_state=1)
DATA = np.clip(DATA, -5, 5) / 5  # by public bounds, never by statistics of the data
FOLDER = Path(tempfile.mkdtemp())


def accuracy(weights: np.ndarray, rows: slice) -> float:
    return float(np.mean((DATA[rows] @ weights[:-1] + weights[-1] > 0) == LABELS[rows]))


def train(message, context):
    """Take local steps of logistic regression, as any client app would."""
    from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict

    own = slice(100 * int(context.node_config["partition-id"]), None)
    X, y = DATA[own][:100], LABELS[own][:100]
    (weights,) = (a.astype(float) for a in message.content["arrays"].to_numpy_ndarrays())
    X = np.column_stack([X, np.ones(len(X))])
    for _ in range(20):
        weights = weights - 0.5 * X.T @ (1 / (1 + np.exp(-X @ weights)) - y) / len(y)
    arrays = ArrayRecord({"weights": Array(weights)})
    metrics = MetricRecord({"num-examples": len(y)})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


def serve(grid, _) -> None:
    from flwr.app import Array, ArrayRecord
    from flwr.serverapp.strategy import FedAvg

    arrays = ArrayRecord({"weights": Array(np.zeros(DATA.shape[1] + 1))})
    strategy = CornStrategy(FedAvg(fraction_evaluate=0.0), FOLDER / "plan.corn")
    found = strategy.start(grid, arrays, num_rounds=NUM_ROUNDS)
    np.save(FOLDER / "model.npy", found.arrays.to_numpy_ndarrays()[0])


def main() -> None:
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.ERROR)
    budget = corn.PrivacyBudget(epsilon=20, delta=1e-5, num_steps=NUM_ROUNDS, clip=CLIP)
    plan = corn.make_plan(corn.load_network(f"complete:{NUM_CLINICS}", mixing="sum"), budget)
    corn.save_plan(plan, FOLDER / "plan.corn")
    # In a deployment every clinic makes its own folder, with its key from corn keys make.
    make_keys(FOLDER, NUM_CLINICS)
    for clinic in range(NUM_CLINICS):
        own = FOLDER / str(clinic)
        own.mkdir(mode=0o700)
        (FOLDER / f"agent-{clinic}.key").rename(own / f"agent-{clinic}.key")
        for name in ("plan.corn", "roster.json"):
            shutil.copy(FOLDER / name, own)
    client, server = ClientApp(mods=[CornMod(FOLDER / "{site}")]), ServerApp()
    client.train()(train)
    server.main()(serve)
    run_simulation(server, client, NUM_CLINICS)
    weights = np.load(FOLDER / "model.npy")
    print(f"{plan.describe()}; the server sees every message")
    print(f"noise of the average: {plan.central_ratio:.3f} × a trusted server's")
    print(f"test accuracy {accuracy(weights, slice(600, None)):.3f}")
    sites = [AgentRelease(plan, agent, FOLDER / str(agent)) for agent in range(NUM_CLINICS)]
    spent = [site.get_epsilon() for site in sites]
    print(f"ε spent by each clinic: {', '.join(map(round_up, spent))}")


if __name__ == "__main__":
    main()
