"""The public names of ``corn``."""

import inspect
import re
from pathlib import Path

import corn
from corn.covariance import DEFAULT_THREAT

PUBLIC = [
    "CornError",
    "CornWarning",
    "Decomposition",
    "Design",
    "DesignProblem",
    "FiniteRun",
    "Horizon",
    "Network",
    "Plan",
    "PrivacyBudget",
    "ThreatModel",
    "__version__",
    "account",
    "compare",
    "design",
    "expose",
    "load_network",
    "load_plan",
    "make_plan",
    "make_private",
    "save_plan",
    "spectrum",
    "train",
    "verify_plan",
]


def test_public_names_are_pinned() -> None:
    assert sorted(corn.__all__) == PUBLIC


def test_public_names_exist_and_are_listed() -> None:
    assert all(hasattr(corn, name) for name in corn.__all__)
    assert set(PUBLIC) <= set(dir(corn))


def test_public_names_have_an_example() -> None:
    """The reference of the documentation shows these examples, and the tests run them."""
    names = [name for name in corn.__all__ if name != "__version__"]
    assert [name for name in names if ">>>" not in (getattr(corn, name).__doc__ or "")] == []


def test_the_reference_has_every_public_name() -> None:
    page = (Path(__file__).parent.parent / "docs" / "api.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"auto\w+:: (\w+)", page))
    assert [name for name in corn.__all__ if name not in listed | {"__version__"}] == []


def test_train_has_few_arguments() -> None:
    assert len(inspect.signature(corn.train).parameters) <= 12


def test_the_readme_example_works() -> None:
    network = corn.load_network("er:n=20,p=0.2,seed=1")
    budget = corn.PrivacyBudget(epsilon=10, delta=1e-5, num_steps=5000, clip=0.1)
    result = corn.design(network, budget)
    loss = corn.expose(result.decomposition, [3], budget.query, num_steps=budget.num_steps)
    assert max(loss.epsilon(1e-5).values()) <= 10 * (1 + 1e-9)
    assert result.gap < 1e-3
    assert result.threat == DEFAULT_THREAT.resolve(network.graph, "sum")
