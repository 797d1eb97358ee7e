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


ROOT = Path(__file__).parent.parent


def read_reference() -> dict[str, set[str]]:
    """Return the names of the reference by the module under which they stand."""
    names: dict[str, set[str]] = {}
    module = "corn"
    for line in (ROOT / "docs" / "api.md").read_text(encoding="utf-8").splitlines():
        if match := re.search(r"currentmodule:: ([\w.]+)", line):
            module = match[1]
        if match := re.search(r"auto\w+:: (\w+)", line):
            names.setdefault(module, set()).add(match[1])
    for name in re.findall(r"`(\w+)`", (ROOT / "docs" / "api.md").read_text(encoding="utf-8")):
        names.setdefault("in text", set()).add(name)
    return names


def test_the_reference_has_every_public_name() -> None:
    listed = read_reference()["corn"]
    assert [name for name in corn.__all__ if name not in listed | {"__version__"}] == []


def test_examples_and_documents_use_public_names_only() -> None:
    """An example that needs another name shows that a public one is missing."""
    public = read_reference()
    private = set()
    sources = [
        *(ROOT / "examples").rglob("*.py"),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "docs" / "tutorials").glob("*.md"),
        ROOT / "README.md",
    ]
    for path in sources:
        # An attack, which looks into the release.
        if path.name == "reconstruct_images.py":
            continue
        text = path.read_text(encoding="utf-8")
        for module, names in re.findall(
            r"^ *from (corn[\w.]*) import (\([^)]*\)|.*)$", text, flags=re.MULTILINE
        ):
            for name in re.findall(r"\w+", names.partition("#")[0]):
                is_listed = name in public.get(module, ()) or name in public["in text"]
                if not (is_listed or (module == "corn.errors" and hasattr(corn, name))):
                    private.add(f"{path.name}: {module}.{name}")
    # The tutorial plants a fault there.
    assert private == {"audit.md: corn.noise.stream.list_terms"}


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
