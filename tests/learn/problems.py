"""Small problems that several tests train on."""

import numpy as np
import torch

from corn.covariance import Horizon, design
from corn.learn.batches import AgentData
from corn.learn.mechanism import Mechanism
from corn.learn.tasks import LinearClassifier, Quadratic, ShallowNetwork, Task
from corn.privacy import PrivacyBudget
from corn.topology import Network, load_network

NETWORK = load_network("er:n=6,p=0.6,seed=3", mixing="gossip")
BUDGET = PrivacyBudget(10, 1e-5, num_steps=400, clip=0.5)
SAMPLE_BUDGET = PrivacyBudget(
    10, 1e-5, num_steps=400, clip=0.5, unit="sample", batch_size=8, sampling="every-step"
)


def make_mechanism(
    mechanism: str, budget: PrivacyBudget = BUDGET, network: Network = NETWORK
) -> Mechanism:
    """Make any method by name; ``none`` is clipped, ``unclipped`` is not."""
    if mechanism == "unclipped":
        return Mechanism.non_private(name=mechanism)
    if mechanism == "none":
        return Mechanism.non_private(*budget.queries)
    if mechanism == "central":
        return Mechanism.central(budget, network.num_agents)
    made = design(
        network.mixing_matrix,
        budget.precision_cap,
        mechanism=mechanism,
        objective=Horizon(10),
    )
    return Mechanism.private(mechanism, made, budget)


def make_samples(
    num_samples: int, num_features: int, num_classes: int, *, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make noisy linearly separable samples, with the same true model for every seed."""
    rng, truth = np.random.default_rng(seed), np.random.default_rng(1)
    X = rng.standard_normal((num_samples, num_features))
    scores = 2 * X @ truth.standard_normal((num_features, num_classes))
    y = (scores + rng.standard_normal(scores.shape)).argmax(axis=1)
    return torch.from_numpy(X).double(), torch.from_numpy(y)


def make_agent_data(
    task: Task,
    samples: tuple[torch.Tensor, torch.Tensor],
    sizes: list[int],
    dtype: torch.dtype = torch.float64,
) -> AgentData:
    offsets = tuple(np.cumsum([0, *sizes]).tolist())
    X, y = samples
    return AgentData(task.prepare(X[: offsets[-1]].to(dtype)), y[: offsets[-1]], offsets)


def make_problem(name: str, dtype: torch.dtype = torch.float64) -> tuple[Task, AgentData]:
    """Make the task of a name and data for six agents of unequal sizes."""
    if name == "quadratic":
        quadratic = Quadratic(6)
        quadratic.start = np.array([1.0, -2.0])
        return quadratic, quadratic.agent_data(dtype)
    tasks: dict[str, Task] = {
        "logistic": LinearClassifier(4, 2, l2=0.01),
        "softmax": LinearClassifier(4, 3, l2=0.01),
        "network": ShallowNetwork(4, 3, num_hidden=5),
    }
    samples = make_samples(200, 4, 2 if name == "logistic" else 3)
    return tasks[name], make_agent_data(tasks[name], samples, [20, 40, 8, 60, 30, 5], dtype)
