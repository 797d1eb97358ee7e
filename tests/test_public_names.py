"""The names a user may rely on."""

import corn
from corn.covariance import DEFAULT_THREAT

PUBLIC = [
    "CornError",
    "CornWarning",
    "Decomposition",
    "Design",
    "Horizon",
    "Network",
    "Plan",
    "PrivacyBudget",
    "ThreatModel",
    "__version__",
    "account",
    "design",
    "expose",
    "load_network",
    "load_plan",
    "make_plan",
    "save_plan",
    "spectrum",
    "train",
    "verify_plan",
]


def test_public_names_are_pinned() -> None:
    assert sorted(corn.__all__) == PUBLIC


def test_public_names_exist() -> None:
    assert all(hasattr(corn, name) for name in corn.__all__)


def test_the_readme_example_works() -> None:
    network = corn.load_network("er:n=20,p=0.2,seed=1")
    budget = corn.PrivacyBudget(epsilon=10, delta=1e-5, num_steps=5000, clip=0.1)
    result = corn.design(network, budget)
    loss = corn.account(result.covariance, budget.query, num_steps=budget.num_steps)
    assert loss.worst_epsilon(1e-5) <= 10 * (1 + 1e-9)
    assert result.gap < 1e-3
    assert result.threat == DEFAULT_THREAT
