"""``corn attack``."""

import json
from pathlib import Path

from .commands import Runner

ARGUMENTS = ("attack", "--graph", "ring:6", "--steps", 20, "--images", 3)


def test_images_of_each_method(corn: Runner, tmp_path: Path) -> None:
    figure = tmp_path / "digits.png"
    outcome = corn(*ARGUMENTS, "--plot", figure, "--json")
    assert outcome.exit_code == 0, outcome.stderr
    rows = {row["method"]: row for row in json.loads(outcome.stdout)["rows"]}
    assert rows["no noise"]["similarity"] > 0.999
    assert rows["no noise"]["labels_right"] == 3
    assert rows["CorN"]["similarity"] < 0.7
    assert figure.stat().st_size > 10_000


def test_the_table_names_the_promise(corn: Runner) -> None:
    outcome = corn(*ARGUMENTS)
    assert outcome.exit_code == 0
    assert "one agent's whole data set" in outcome.stdout
    assert "an insider it was not designed for" in outcome.stdout


def test_samples_are_refused(corn: Runner) -> None:
    outcome = corn(*ARGUMENTS, "--unit", "sample", "--sampling", "every-step")
    assert outcome.exit_code == 1
    assert "--unit must be agent" in outcome.stderr
