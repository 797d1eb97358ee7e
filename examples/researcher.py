"""A researcher's script, by public names: own mechanism, objective and update, trace and figure."""

import networkx as nx
import numpy as np
import pandas as pd  # pip install '.[pandas]'
import torch
from sklearn.datasets import load_digits
from update_rules import GradientTracking, clip_layers, pair_at_random

import corn
from corn.learn import partition_samples
from corn.report import figure_style, plot_training, save_figure

NAMES = ["Oslo", "Rome", "Kyiv", "Bern", "Riga", "Graz"]


def two_hops(problem: corn.DesignProblem) -> np.ndarray:
    """Cancel noise between agents up to two links apart; it is scaled to the budget."""
    L = nx.laplacian_matrix(problem.graph).toarray()
    return np.eye(problem.num_agents) + L + L @ L


def late_noise(W: np.ndarray) -> np.ndarray:
    """Weigh the noise that is left after ten rounds of mixing: an own objective."""
    late = np.linalg.matrix_power(W, 10)
    return late.T @ late + 0.02 * np.eye(len(W))


X, y = load_digits(return_X_y=True)
inputs = torch.tensor(X / 16, dtype=torch.float32)  # grey values, from 0 to 16
parts = [(inputs[k], torch.tensor(y[k])) for k in partition_samples("iid", y, 7, seed=0)]
network = corn.load_network(nx.cycle_graph(NAMES), mixing="gossip")
torch.manual_seed(0)
model = torch.nn.Linear(64, 10)
trace: list[dict[str, object]] = []
found = corn.compare(
    network,
    corn.PrivacyBudget(2, 1e-5, 200, 1.0, unit="sample", batch_size=64, sampling_rate=0.25),
    model=model,
    loss=torch.nn.functional.cross_entropy,
    datasets=dict(zip(NAMES, parts[:6], strict=True)),
    test=parts[6],
    mechanisms=["corn", two_hops, "ldp", "central", "none"],
    step_sizes=[0.5],
    threat=corn.ThreatModel(0),
    objective=late_noise,
    mixing=pair_at_random(network),
    local_rule=GradientTracking,
    clipping=clip_layers(model),
    seeds=range(5),
    on_step=trace.extend,
)
for name, (mean, width) in found.differences("test_loss", to="two_hops").items():
    print(f"test loss of {name} minus that of two_hops: {mean:+.3f} ± {width:.3f}")
print(pd.DataFrame(trace).groupby("mechanism")[["noise_norm", "average_noise_norm"]].mean())
with figure_style(width=3.3, font_size=7):
    rows, steps, cooldown = found.measured_rows, found.best_step_sizes, found.result.cooldown_steps
    figure = plot_training(rows, steps, measures=["test_loss"], cooldown_steps=cooldown)
    save_figure(figure, "researcher.pdf")
