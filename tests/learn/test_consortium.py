"""The consortium file: everything public in one place, checked when it is read."""

from pathlib import Path

import pytest

from corn.errors import FileFormatError, InvalidArgumentError
from corn.learn.batches import require_fitting_samples
from corn.learn.consortium import choose_rate, load_consortium
from corn.privacy import PrivacyBudget

TEXT = """
graph = "complete:3"
store = "127.0.0.1:29500"

[data]
target = "ill"
classes = ["no", "yes"]
id = "person"
[data.columns]
age = { bounds = [0, 120], missing = 60 }
ward = { categories = ["a", "b"] }
admitted = { kind = "date", bounds = [2020-01-01, 2024-12-31], missing = 2022-01-01 }
smoker = { kind = "boolean", missing = false }

[promise]
epsilon = 2
delta = 1e-5

[training]
steps = 20
batch-size = 10
step-size = 0.5

[[sites]]
name = "north"
samples = 300
address = "127.0.0.1:29600"

[[sites]]
name = "south"
samples = 60

[[sites]]
name = "west"
samples = 40
accepts = false
"""


def save(folder: Path, text: str = TEXT) -> Path:
    path = folder / "consortium.toml"
    path.write_text(text)
    return path


def test_a_file_has_everything_public(tmp_path: Path) -> None:
    found = load_consortium(save(tmp_path))
    assert [site.name for site in found.sites] == ["north", "south", "west"]
    assert found.load_network().num_agents == 3
    assert found.data.columns[2].limits == (18262.0, 20088.0)
    budget = found.make_budget()
    # A fifth is for tests, and a tenth of the rest for validation.
    assert budget.query.sampling_rate == pytest.approx(10 * 3 / (0.72 * 400))
    assert budget.unit == "sample"
    assert found.find_site("south") == found.find_site("1") == 1
    with pytest.raises(InvalidArgumentError):
        found.find_site("east")
    assert found.make_workload(tmp_path / "a.csv").sites == ("north", "south", "west")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "steps = 20",
            'steps = 20\ntest-data = "../a.csv"',
            "test-data must be the name of a public file",
        ),
        ("epsilon = 2", "epsilom = 2", r"\[promise\] unknown entry 'epsilom': entries are epsilon"),
        ("epsilon = 2", "", r"\[promise\] epsilon is missing"),
        ("epsilon = 2", "epsilon = -2", "epsilon must be"),
        ("steps = 20", 'steps = "many"', r"\[training\] steps cannot be 'many'"),
        ("[0, 120]", "[120, 0]", "column 'age': bounds must be"),
        ('kind = "boolean"', 'kind = "colour"', "column 'smoker': kind cannot be 'colour'"),
        ("smoker = {", "smoker = 3 #", "column 'smoker': must be a table, found 3"),
        ("samples = 60", "samples = 0", r"\[\[sites\]\] 2 samples must be"),
        ('graph = "complete:3"', 'grph = "complete:3"', "unknown entry 'grph'"),
        ('"complete:3"', '"complete:4"', "graph must be of 3 agents"),
        ("[data]", "[data", "not TOML"),
    ],
)
def test_the_problem_of_a_file_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(FileFormatError, match=message):
        load_consortium(save(tmp_path, TEXT.replace(old, new)))


@pytest.mark.parametrize(
    "sizes",
    [[9000, 3000, 1200, 400, 120, 40], [9000, *[40] * 99], [5, 5], [100000, 1, 1], [1]],
)
@pytest.mark.parametrize("batch_size", [1, 16, 256])
def test_every_site_accepts_the_rate(sizes: list[int], batch_size: int) -> None:
    size, rate = choose_rate(sizes, batch_size)
    budget = PrivacyBudget(
        1, 1e-5, num_steps=10, clip=1, unit="sample", batch_size=size, sampling_rate=rate
    )
    # Also a site that has twice as many rows as it declared.
    require_fitting_samples(budget, [2 * own for own in sizes])
    assert rate * sum(sizes) / len(sizes) == pytest.approx(min(batch_size, sum(sizes) / len(sizes)))
