"""``corn account`` in both directions, always with unit, clipping and adversary."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from .commands import Runner

PAPER = ["account", "--delta", "1e-5", "--steps", "5000", "--clip", "0.1"]


def test_budget_to_noise(corn: Runner) -> None:
    facts = json.loads(corn(*PAPER, "--epsilon", 10, "--json").stdout)
    assert facts["mu"] == pytest.approx(2.00044562, abs=1e-8)
    assert facts["sensitivity"] == pytest.approx(0.2)
    assert facts["precision_cap"] == pytest.approx(facts["mu"] ** 2 / (0.04 * 5000))
    assert facts["calibrations"]["paper"]["variance_ratio"] == pytest.approx(1.84, abs=0.005)
    assert facts["calibrations"]["gdp"]["exact_epsilon"] <= 10


def test_the_printed_numbers_are_on_the_private_side(corn: Runner) -> None:
    shown = corn(*PAPER, "--epsilon", 10.00000012).stdout
    facts = json.loads(corn(*PAPER, "--epsilon", 10.00000012, "--json").stdout)
    numbers = {
        name: float(re.search(rf"{name} +([\d.e-]+)", shown)[1])  # type: ignore[index]
        for name in ("μ", "precision cap", "independent noise std")
    }
    assert numbers["μ"] >= facts["mu"]
    assert numbers["precision cap"] <= facts["precision_cap"]
    assert numbers["independent noise std"] >= facts["independent_noise_std"]
    assert "ε = 10.00000012," in shown


def test_violations_of_the_paper_calibration_are_reported(corn: Runner) -> None:
    facts = json.loads(corn(*PAPER, "--epsilon", 40, "--json").stdout)
    assert facts["calibrations"]["paper"]["verdict"] == "VIOLATES ε = 40"
    assert facts["calibrations"]["paper"]["exact_epsilon"] == pytest.approx(41.76, abs=0.005)
    at_30 = json.loads(corn(*PAPER, "--epsilon", 30, "--json").stdout)
    assert "not proved" in at_30["calibrations"]["paper"]["verdict"]


def test_unit_clipping_and_adversary_are_named(corn: Runner) -> None:
    text = " ".join(corn(*PAPER, "--epsilon", 3).stdout.split())
    for word in (
        "one agent's whole data set",
        "clipped once to 0.1",
        "an eavesdropper who sees every message",
        "adjacency",
    ):
        assert word in text


def test_poisson_sampling(corn: Runner) -> None:
    options = ["account", "--unit", "sample", "--batch-size", 10, "--steps", 20, "--epsilon", 1]
    facts = json.loads(corn(*options, "--samples-per-agent", 100, "--json").stdout)
    assert facts["mu"] is None
    assert (facts["sampling"], facts["sampling_rate"]) == ("poisson", 0.1)


def test_passes_count_once_each(corn: Runner) -> None:
    options = ["--unit", "sample", "--batch-size", 128, "--steps", 1000, "--epsilon", 1, "--json"]
    worst = json.loads(corn("account", *options, "--sampling", "every-step").stdout)
    passes = json.loads(
        corn("account", *options, "--sampling", "passes", "--samples-per-agent", 2800).stdout
    )
    assert (passes["sampling"], passes["steps_per_pass"]) == ("passes", 21)
    # 48 passes of 21 batches are begun in 1000 steps.
    assert passes["precision_cap"] == pytest.approx(worst["precision_cap"] * 1000 / 48, rel=1e-12)
    for own in (worst, passes):
        calibrated = own["calibrations"]["gdp"]["independent_noise_std"]
        assert calibrated == pytest.approx(own["independent_noise_std"], rel=1e-12)


def test_agents_with_different_numbers_of_samples(corn: Runner) -> None:
    options = ["--unit", "sample", "--batch-size", 128, "--steps", 1000, "--epsilon", 1]
    given = ("account", *options, "--clip", 1, "--samples-per-agent")
    several = corn(*given, "2800,2800,2800,1400", "--sampling", "passes")
    assert re.search(r"precision cap +\S+ to \S+", several.stdout)
    facts = json.loads(corn(*given, "2800,1400", "--json").stdout)
    assert len(facts["precision_cap"]) == 2


def test_a_missing_sampling_rate_names_all_choices(corn: Runner) -> None:
    outcome = corn("account", "--epsilon", 1, "--unit", "sample", "--batch-size", 128)
    assert outcome.exit_code == 1
    for word in ("samples_per_agent", "sampling_rate", "poisson", "passes", "every-step"):
        assert word in outcome.stderr


def test_noise_to_privacy_and_back(corn: Runner, tmp_path: Path) -> None:
    cap = json.loads(corn(*PAPER, "--epsilon", 10, "--json").stdout)["precision_cap"]
    np.save(tmp_path / "R.npy", np.diag([1 / cap, 2 / cap]))
    facts = json.loads(
        corn(*PAPER, "--covariance", tmp_path / "R.npy", "--epsilon", 10, "--json").stdout
    )
    assert facts["worst_agent"] == 0
    assert facts["worst_epsilon"] == pytest.approx(10, rel=1e-8)
    assert facts["epsilon_per_agent"][1] < 7
    assert facts["delta_per_agent"][0] == pytest.approx(1e-5, rel=1e-6)


def test_zero_sum_noise_has_no_finite_epsilon(corn: Runner, tmp_path: Path) -> None:
    np.save(tmp_path / "Z.npy", np.eye(3) - 1 / 3)
    outcome = corn(*PAPER, "--covariance", tmp_path / "Z.npy")
    text = " ".join(outcome.stdout.split())
    assert "worst agent 0 worst ε inf" in text
    assert "guarantee none, because some sum of messages has no noise" in text
    facts = json.loads(corn(*PAPER, "--covariance", tmp_path / "Z.npy", "--json").stdout)
    assert facts["worst_epsilon"] == "inf"


@pytest.mark.parametrize(
    ("options", "exit_code", "message"),
    [
        (["--epsilon", "-1"], 1, "epsilon must be positive"),
        (["--epsilon", "1", "--delta", "2"], 1, "delta must be in (0, 1)"),
        (["--covariance", "no.npy"], 1, "no such file"),
        (["--covariance", "R.npy", "--delta", "1e-5,1e-6"], 1, "the same for all agents"),
        (["--epsilon", "much"], 1, "--epsilon must be numbers separated by commas, found 'much'"),
        (["--steps", "0"], 2, "--steps"),
    ],
)
def test_bad_input_is_refused(
    corn: Runner, options: list[str], exit_code: int, message: str
) -> None:
    outcome = corn("account", *options)
    assert outcome.exit_code == exit_code
    assert message in " ".join(outcome.stderr.split())


def test_a_covariance_of_the_wrong_shape_gets_no_advice_on_graphs(
    corn: Runner, tmp_path: Path
) -> None:
    np.save(tmp_path / "R.npy", np.ones((2, 3)))
    outcome = corn(*PAPER, "--covariance", tmp_path / "R.npy")
    assert outcome.exit_code == 1
    assert "a covariance must be square and not empty, found shape (2, 3)\n" in outcome.stderr
    (tmp_path / "R.txt").write_text("1 0\n0 1\n")
    outcome = corn(*PAPER, "--covariance", tmp_path / "R.txt")
    assert outcome.exit_code == 1
    assert "accepted are .csv, .npy\n" in outcome.stderr
