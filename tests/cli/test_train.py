"""``corn train`` compares mechanisms and saves results."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest

from corn import learn
from corn.covariance.threat import MOST_FOR_PAIRS
from corn.learn import mechanism as mechanism_module
from corn.plan import fingerprint, load_plan
from corn.topology import Network

from .commands import Runner, run_quietly

QUICK = ("--task", "breast-cancer", "--graph", "ring:6", "--steps", 30, "--batch-size", 16)


def test_mechanisms_side_by_side(corn: Runner) -> None:
    everything = "corn,decor,ldp,zero-sum,central,none,unclipped"
    outcome = corn("train", *QUICK, "--mechanism", everything, "--json")
    assert outcome.exit_code == 0, outcome.stderr
    facts = json.loads(outcome.stdout)
    mechanisms = facts["mechanisms"]
    assert list(mechanisms) == everything.split(",")
    assert facts["status"] == "complete"
    assert facts["notes"] == []
    assert len(mechanisms["corn"]["simulated_epsilon_of_each_agent"]) == 6
    assert mechanisms["corn"]["simulated_epsilon"] == pytest.approx(10)
    assert mechanisms["none"]["simulated_epsilon"] is None
    assert mechanisms["unclipped"]["test_loss"] < mechanisms["ldp"]["test_loss"]
    assert sum(facts["agent_samples"]) == 409


def test_adam_steps_along_exact_sums(corn: Runner) -> None:
    command = ("train", *QUICK, "--mechanism", "corn,central", "--json")
    outcome = corn(*command, "--mixing", "sum", "--optimizer", "adam")
    assert outcome.exit_code == 0, outcome.stderr
    facts = json.loads(outcome.stdout)
    assert facts["configuration"]["optimizer"] == "adam"
    rates = [float(own["step_size"]) for own in facts["mechanisms"].values()]
    # The search starts at Adam's own rate, not at one for SGD.
    assert all(1e-4 < rate < 1 for rate in rates)
    # One model for all agents, whose scores are those of the average.
    (corn_scores, _) = facts["mechanisms"].values()
    assert corn_scores["test_loss"] == pytest.approx(corn_scores["test_loss_of_average"])


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--mixing", "gossip"), 1, "optimizer needs exact sums"),
        (("--mixing", "sum", "--momentum", 0.5), 2, "belongs to --optimizer sgd"),
    ],
)
def test_adam_is_refused_with_gossip_and_with_a_momentum(
    corn: Runner, options: tuple[object, ...], code: int, message: str
) -> None:
    outcome = corn("train", *QUICK, "--optimizer", "adam", *options)
    assert outcome.exit_code == code
    assert message in " ".join(outcome.stderr.split())


def test_files_hold_configuration_and_measurements(corn: Runner, tmp_path: Path) -> None:
    outcome = corn("train", *QUICK, "--out", tmp_path, "--runs", 2, "--step-size", "0.1,0.01")
    assert outcome.exit_code == 0
    saved = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    assert saved["configuration"]["steps"] == 30
    assert saved["configuration"]["data_seed"] == 0
    assert saved["corn_version"]
    with (tmp_path / "metrics.csv").open(encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert {(row["mechanism"], row["step_size"], row["seed"]) for row in rows} >= {
        ("corn", "0.1", "0"),
        ("none", "0.01", "1"),
    }


def test_several_runs_give_paired_differences_and_verdicts(corn: Runner, tmp_path: Path) -> None:
    (tmp_path / "mine.mplstyle").write_text("font.size: 6\n")
    options = ("--runs", 3, "--step-size", 0.5, "--mechanism", "corn,ldp,none")
    figure = ("--plot", tmp_path / "a.pdf", "--plot-style", tmp_path / "mine.mplstyle")
    outcome = corn("train", *QUICK, *options, *figure)
    assert outcome.exit_code == 0, outcome.stderr
    assert "− corn" in outcome.stdout
    said = " ".join(outcome.stderr.split())
    assert re.search(r"accuracy: corn .*(better|worse|told).*paired over 3 runs", said)
    assert (tmp_path / "a.pdf").exists()


def test_a_second_ctrl_c_writes_nothing(corn: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("corn.learn.tuning.run_sweep", interrupt)
    outcome = corn("train", *QUICK, "--mechanism", "ldp")
    assert (outcome.exit_code, outcome.stderr) == (130, "corn: interrupted; nothing was written\n")


def test_each_row_names_its_adversary(corn: Runner) -> None:
    arguments = ("train", *QUICK, "--mechanism", "corn,decor,ldp,none", "--step-size", 0.01)
    outcome = corn(*arguments)
    assert outcome.exit_code == 0, outcome.stderr
    rows = {line.split()[1]: line for line in outcome.stdout.splitlines() if line.startswith("│")}
    assert "one insider" in rows["corn"]
    assert "one insider" in rows["ldp"]  # its agents share no seed
    assert "eavesdropper" in rows["decor"]
    assert "nobody" in rows["none"]
    assert "decor: private against an eavesdropper only" in outcome.stderr
    mechanisms = json.loads(corn(*arguments, "--json").stdout)["mechanisms"]
    assert mechanisms["corn"]["against"] == mechanisms["ldp"]["against"]
    assert mechanisms["corn"]["against"] != mechanisms["decor"]["against"]
    assert mechanisms["corn"]["simulated_epsilon"] == pytest.approx(10, rel=1e-3)


QUICK_SAMPLES = (*QUICK, "--unit", "sample", "--step-size", 0.5, "--mechanism", "ldp,none")


def test_the_rate_follows_from_data_and_batch_size(corn: Runner) -> None:
    outcome = corn("train", *QUICK_SAMPLES, "--partition", "iid", "--json")
    assert outcome.exit_code == 0, outcome.stderr
    facts = json.loads(outcome.stdout)
    assert sorted(set(facts["agent_samples"])) == [68, 69]
    assert (facts["sampling"], facts["samples_per_agent"]) == ("poisson", None)
    mean = sum(facts["agent_samples"]) / len(facts["agent_samples"])
    assert facts["sampling_rate"] == pytest.approx(16 / mean)
    assert f"taken with probability {16 / mean:.6g} (Poisson sampling)" in facts["promise"]
    assert facts["mechanisms"]["ldp"]["simulated_epsilon"] <= 10


def test_a_plan_for_more_samples_than_there_are_is_followed(corn: Runner, tmp_path: Path) -> None:
    """Rate and divisor are the plan's, so batches are smaller and the promise is the same."""
    made = corn(
        *("plan", "--graph", "ring:6", "--steps", 5, "--unit", "sample", "--batch-size", 16),
        *("--samples-per-agent", 100, "--mechanism", "ldp", "--out", tmp_path / "plan.corn"),
        "--json",
    )
    assert made.exit_code == 0, made.stderr
    assert json.loads(made.stdout)["sampling_rate"] == 0.16
    outcome = corn("train", "--plan", tmp_path / "plan.corn", "--task", "breast-cancer", "--json")
    assert outcome.exit_code == 0, outcome.stderr
    facts = json.loads(outcome.stdout)
    assert min(facts["agent_samples"]) < 100
    assert facts["sampling_rate"] == 0.16


@pytest.mark.parametrize(
    ("options", "exit_code", "message"),
    [
        (["--mechanism", "corn,magic"], 1, "found 'magic'"),
        (["--mechanism", "ldp,corn,ldp"], 1, "must be different names, found ldp twice"),
        (["--step-size", "big"], 1, "--step-size must be numbers"),
        (["--step-size", "0"], 1, "step size must be positive"),
        (["--step-size", "0.1,0.1"], 1, "--step-size must be different numbers, found '0.1,0.1'"),
        (["--device", "abacus"], 1, "device must be one on which torch computes"),
        (["--graph", "ring:410"], 1, "num_agents must be at most 409, found 410"),
        (["--partition", "even"], 1, "partition must be iid"),
        (["--model", "cnn"], 1, "cnn needs images"),
        (["--epsilon", "-1"], 1, "epsilon must be positive"),
        (["--out", __file__], 2, "must be a directory, found a file"),
    ],
)
def test_bad_options_are_refused_before_any_design(
    corn: Runner,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    exit_code: int,
    message: str,
) -> None:
    monkeypatch.setattr(mechanism_module, "design", None)
    outcome = corn("train", *QUICK, *options)
    assert outcome.exit_code == exit_code
    assert message in " ".join(outcome.stderr.split())


def test_a_network_beyond_pair_seeds_is_trained_against_one_insider(corn: Runner) -> None:
    """The default threat, with sparse seeds, just above the size at which they begin."""
    side = f"ring:{MOST_FOR_PAIRS + 1}"
    options = ("--steps", 2, "--step-size", 0.1, "--mechanism", "corn")
    outcome = corn("train", "--task", "digits", "--graph", side, *options, "--json")
    assert outcome.exit_code == 0, outcome.stderr
    [own] = json.loads(outcome.stdout)["mechanisms"].values()
    assert own["simulated_epsilon"] == pytest.approx(10, rel=1e-2)


def test_ten_thousand_agents_train_without_dense_matrices(
    corn: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Network, "mixing_matrix")
    options = ("--steps", 2, "--step-size", 0.1, "--mechanism", "corn,ldp,none", "--json")
    outcome = corn("train", "--task", "synthetic", "--graph", "torus:100x100", *options)
    assert outcome.exit_code == 0, outcome.stderr
    facts = json.loads(outcome.stdout)
    assert facts["num_agents"] == 10_000
    assert facts["mechanisms"]["corn"]["simulated_epsilon"] == pytest.approx(10)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a plan with one insider, sample unit and two mixing rounds per step: no defaults."""
    path = tmp_path_factory.mktemp("plan") / "plan.corn"
    exit_code = run_quietly(
        *("plan", "--graph", "ring:6", "--steps", 20, "--epsilon", 7, "--clip", 0.5),
        *("--unit", "sample", "--batch-size", 16, "--sampling", "every-step"),
        *("--gossip", "chebyshev:2", "--cooldown", 1),
        *("--out", path),
    )
    assert exit_code == 0
    return path


def test_a_plan_decides_network_budget_and_noise(corn: Runner, plan: Path) -> None:
    arguments = ("train", "--plan", plan, "--task", "breast-cancer", "--step-size", 0.1)
    outcome = corn(*arguments, "--json")
    assert outcome.exit_code == 0, outcome.stderr
    facts = json.loads(outcome.stdout)
    assert list(facts["mechanisms"]) == ["plan"]
    assert (facts["num_steps"], facts["num_agents"]) == (20, 6)
    assert "cool-down" not in outcome.stderr, "it was chosen with the plan"
    assert facts["plan"] == fingerprint(load_plan(plan)).hex()
    own = facts["mechanisms"]["plan"]
    assert own["unit"] == "sample"
    assert "one insider" in own["against"]
    assert 6.9 < own["simulated_epsilon"] <= 7
    problem = learn.Workload("breast-cancer").build(6)
    parts = np.split(problem.data.inputs, problem.data.offsets[1:-1])
    labels = np.split(problem.data.targets, problem.data.offsets[1:-1])
    alone = learn.train(
        load_plan(plan),
        model=problem.task,
        datasets=list(zip(parts, labels, strict=True)),
        test=problem.parts["test"],
        step_size=0.1,
    )
    assert own["test_loss"] == alone.last_rows[0]["test_loss"]


def test_the_result_names_own_and_average_models_and_messages(corn: Runner) -> None:
    arguments = ["train", "--task", "breast-cancer", "--graph", "ring:6", "--steps", 20]
    arguments += ["--mechanism", "corn,none", "--step-size", 0.2, "--gossip", 2]
    facts = json.loads(corn(*arguments, "--cooldown", 5, "--json").stdout)
    assert (facts["gossip"], facts["cooldown_steps"]) == ("plain:2", 5)
    assert facts["messages_per_link"] == 2 * (20 + 5)
    own = facts["mechanisms"]["corn"]
    assert own["test_loss"] == pytest.approx(own["test_loss_of_average"], abs=1e-3)
    assert own["central_ratio"] > 1
    assert facts["mechanisms"]["none"]["central_ratio"] is None
    apart = json.loads(corn(*arguments, "--cooldown", 0, "--json").stdout)["mechanisms"]["corn"]
    # Mixing keeps the average model, and only the average.
    assert apart["test_loss_of_average"] == pytest.approx(own["test_loss_of_average"], abs=1e-5)
    assert apart["consensus_distance"] > 3 * own["consensus_distance"]
    text = " ".join(corn(*arguments).stdout.split())
    for words in (
        "of their average model",
        "2 rounds per step",
        "that only mix",
        "messages per link, each way",
    ):
        assert words in text


def test_weights_that_never_agree_are_noted(corn: Runner, tmp_path: Path) -> None:
    np.save(tmp_path / "W.npy", (np.roll(np.eye(4), 1, 0) + np.roll(np.eye(4), -1, 0)) / 2)
    arguments = ["--graph", tmp_path / "W.npy", "--steps", 10]
    outcome = corn("plan", *arguments, "--out", tmp_path / "p.corn", "--json")
    assert "agents never agree with these weights" in outcome.stderr
    assert json.loads(outcome.stdout)["cooldown_steps"] == 0


def test_baselines_next_to_a_plan_have_its_budget(corn: Runner, plan: Path) -> None:
    arguments = ("train", "--plan", plan, "--task", "breast-cancer", "--step-size", 0.1)
    outcome = corn(*arguments, "--mechanism", "ldp, none")
    assert outcome.exit_code == 0, outcome.stderr
    for words in ("plan", "ldp", "none", "ε (sample)"):
        assert words in outcome.stdout


@pytest.mark.parametrize(
    "options",
    [
        ["--epsilon", "7"],  # the plan's own
        ["--graph", "ring:6"],
        ["--steps", "10"],
        ["--unit", "agent"],
        ["--batch-size", "128"],
        ["--colluders", "0"],
        ["--horizon", "3"],
        ["--gossip", "2"],
        ["--cooldown", "2"],
        ["--momentum", "0"],
        ["--seeds", "pairs"],
    ],
)
def test_options_that_a_plan_decides_are_misuse(
    corn: Runner, plan: Path, options: list[str]
) -> None:
    outcome = corn("train", "--plan", plan, "--task", "breast-cancer", *options)
    assert outcome.exit_code == 2
    assert "the plan decides this" in " ".join(outcome.stderr.split())


def test_a_graph_or_a_plan_is_required(corn: Runner, tmp_path: Path) -> None:
    outcome = corn("train", "--task", "breast-cancer")
    assert outcome.exit_code == 2
    assert "--plan" in outcome.stderr
    absent = corn("train", "--task", "breast-cancer", "--plan", tmp_path / "absent.corn")
    assert (absent.exit_code, absent.stderr.count("\n")) == (1, 1)


def test_intervals_ends_and_the_number_of_runs_are_stated(corn: Runner) -> None:
    quick = ("train", *QUICK, "--mechanism", "ldp,none")
    outcome = corn(*quick, "--step-size", "0.001,0.002")
    assert "runs one, so chance is not shown" in " ".join(outcome.stdout.split())
    assert "±" not in outcome.stdout
    assert "none: the best step size, 0.002, is the largest that was tried" in outcome.stderr
    outcome = corn(*quick, "--step-size", "1000,2000", "--runs", 3, "--mechanism", "ldp")
    assert "95 % interval of 3, which differ" in " ".join(outcome.stdout.split())
    assert "±" in outcome.stdout
    assert "ldp: the best step size, 1000, is the smallest that was tried" in outcome.stderr
    facts = json.loads(corn(*quick, "--step-size", 0.1, "--runs", 2, "--json").stdout)
    assert facts["grid_ends"] == {}
    assert facts["mechanisms"]["ldp"]["intervals"]["test_loss"] > 0
    assert facts["mechanisms"]["ldp"]["num_step_sizes"] == 1


def test_the_cost_of_tuning_on_private_data_is_stated(corn: Runner, tmp_path: Path) -> None:
    path = tmp_path / "all.csv"
    path.write_text("x,y\n" + "".join(f"{k % 7},{k % 2}\n" for k in range(90)))
    quick = ("train", "--data", path, "--target", "y", "--graph", "ring:3", "--steps", 10)
    arguments = (*quick, "--mechanism", "ldp", "--step-size", "0.1,0.2,0.5")
    outcome = corn(*arguments)
    assert "3 runs with noise on the agents' data together spend ε = " in outcome.stderr
    # Rows are protected by default: they may be people.
    assert "one sample of one agent" in outcome.stderr
    assert "one agent's whole data set" in corn(*arguments, "--unit", "agent").stderr
    assert "if each run has secret noise and secret batches of its own" in outcome.stderr
    assert "no ε of the agents covers" not in outcome.stderr
    others = corn(*quick, "--mechanism", "ldp,central,none", "--step-size", "0.1").stderr
    assert "central, none ran on the agents' data without noise of the agents" in others
    facts = json.loads(corn(*arguments, "--json").stdout)
    price = facts["tuning"]["price"]
    assert price["num_runs"] == 3
    # Three runs at ε = 10 each: μ grows by √3.
    assert 10 < price["epsilon"] < 30


def test_a_printed_epsilon_is_never_below_the_one_that_was_spent(corn: Runner) -> None:
    options = ("--mechanism", "ldp", "--step-size", "0.1", "--epsilon", "1.00004")
    table = corn("train", *QUICK, *options).stdout
    # In the promise, as spent, and in the last line: four digits would show 1.
    assert table.count("1.00004") == 3
    last = table.splitlines()[-1]
    assert "at simulated ε = 1.00004 for one agent's whole data set" in last
    assert last.endswith("6 × a trusted server's noise variance in the average model")
