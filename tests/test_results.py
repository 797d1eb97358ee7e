"""The tables of ``docs/results`` have the numbers of the files beside them."""

import csv
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

RESULTS = Path(__file__).parent.parent / "docs" / "results"

MECHANISMS = {
    "LDP, the paper's constant": "ldp-paper",
    "DECOR, the paper's constant, one-step design": "decor-paper",
    "CorN, the paper's constant, one-step design": "corn-paper",
    "LDP, exact accounting": "ldp",
    "CorN, exact accounting, one-step design": "corn-one-step",
    "DECOR, exact, designed for accumulated noise": "decor",
    "CorN, exact, against two insiders": "corn-2-insiders",
    "CorN, exact, against one insider": "corn-1-insider",
    "CorN, exact, designed for accumulated noise": "corn",
    "CorN, training defaults, against one insider": "corn-defaults-1-insider",
    "CorN, training defaults": "corn-defaults",
    "central DP, a trusted server": "central",
    "no noise": "none",
}
STUDY_LINES = {
    "each agent by itself": "alone",
    "independent noise (LDP)": "ldp",
    "CorN, gossip": "gossip",
    "CorN, no server": "corn",
    "trusted server": "central",
}
SOURCES = {
    "made or implied by the paper": "paper",
    "that a reader might expect": "expected",
    "about the additions of this project": "corn",
}


def read_table(page: Path, heading: str, corner: str) -> dict[str, list[str]]:
    """Return the rows, by their first cell, of the table with this corner under a heading."""
    (section,) = re.findall(
        rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)",
        page.read_text(encoding="utf-8"),
        flags=re.DOTALL | re.MULTILINE,
    )
    lines = section.replace("**", "").splitlines()
    (start,) = (at for at, line in enumerate(lines) if line.startswith(f"| {corner} |"))
    rows = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        rows[name] = cells
    return rows


def read_file(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def show(mean: float, half_width: float) -> str:
    """Return a mean with its interval, which is left out if it rounds to zero."""
    return f"{mean:.3f}" if half_width < 0.0005 else f"{mean:.3f} ± {half_width:.3f}"


def summarise(values: Iterable[float]) -> str:
    """Return the mean of values with its 95 % interval."""
    sample = np.array(list(values))
    interval = stats.t(len(sample) - 1, sample.mean(), stats.sem(sample)).interval(0.95)
    return show(sample.mean(), (interval[1] - interval[0]) / 2)


@pytest.mark.parametrize(
    ("heading", "folder", "panels"),
    [
        ("Logistic regression on a9a", ".", ["fig4b"]),
        ("MNIST", "mnist", ["fig5b-sample", "fig5b-agent"]),
    ],
)
def test_tables_of_figures_show_the_plotted_points(
    heading: str, folder: str, panels: list[str]
) -> None:
    shown = read_table(RESULTS / "README.md", heading, "noise")
    points = {
        (row["panel"], row["mechanism"], float(row["x"])): row
        for row in read_file(RESULTS / folder / "points.csv")
    }
    expected = {}
    for name, mechanism in MECHANISMS.items():
        rows = [points[panel, mechanism, 0.2] for panel in panels]
        expected[name] = [show(float(row["mean"]), float(row["half_width_95"])) for row in rows]
    assert shown == expected


@pytest.mark.parametrize(
    ("heading", "folder"), [("Which statements hold", "."), ("MNIST", "mnist")]
)
def test_counts_of_statements_are_those_of_the_claims(heading: str, folder: str) -> None:
    shown = read_table(RESULTS / "README.md", heading, "statements")
    counts = Counter(
        (row["source"], row["verdict"]) for row in read_file(RESULTS / folder / "claims.csv")
    )
    verdicts = ("holds", "undecided", "does not hold")
    assert shown == {
        name: [str(counts[source, verdict]) for verdict in verdicts]
        for name, source in SOURCES.items()
    }


@pytest.mark.parametrize(
    ("heading", "model"),
    [
        ("Softmax regression", "linear"),
        ("A network with 32 hidden units", "network"),
        ("A CNN", "cnn"),
    ],
)
def test_tables_of_the_one_sample_study_follow_from_its_runs(heading: str, model: str) -> None:
    folder = RESULTS / "one-sample"
    shown = read_table(folder / "README.md", heading, "noise")
    runs = read_file(folder / f"{model}.csv")
    seeds = Counter((row["epsilon"], row["line"], row["step_size"]) for row in runs)
    # Only the chosen step size was run with all seeds.
    chosen = {key[:2]: key[2] for key, count in seeds.items() if count == 5}
    expected = {}
    for name, line in STUDY_LINES.items():
        own = sorted((key for key in chosen if key[1] == line), key=lambda key: float(key[0]))
        expected[name] = [
            summarise(
                float(row["test_accuracy"])
                for row in runs
                if (row["epsilon"], row["line"], row["step_size"]) == (*key, chosen[key])
            )
            for key in own
        ]
    assert shown == expected


MODELS = {
    "linear": "softmax",
    "hog": "softmax on HOG",
    "a9a": "a9a",
    "network": "network",
    "cnn": "CNN",
}
CASE = ("model", "epsilon", "optimizer", "partition", "adjacency")


def read_cases() -> dict[tuple[str, ...], list[dict[str, str]]]:
    """Return the runs of each case of the study of exact sums."""
    cases: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in read_file(RESULTS / "exact-sums.csv"):
        cases.setdefault(tuple(row[name] for name in CASE), []).append(row)
    return cases


def choose_step_size(runs: list[dict[str, str]], mechanism: str) -> float:
    """Return the step size of the largest mean validation accuracy, and check the protocol."""
    accuracies: dict[float, list[float]] = {}
    for row in runs:
        if (row["mechanism"], row["part"]) == (mechanism, "validation"):
            accuracies.setdefault(float(row["step_size"]), []).append(float(row["accuracy"]))
            assert row["seed"] in ("100", "101")
    means = {size: np.nan_to_num(np.mean(own), nan=-1) for size, own in accuracies.items()}
    best = max(sorted(means), key=means.__getitem__)
    # Neither end of the grid is the best.
    assert min(means) < best < max(means)
    return best


def describe_accuracies(values: np.ndarray, sign: str = "") -> str:
    """Return mean ± half the width of Student's 95 % interval, as the tables show it."""
    low, high = stats.t(len(values) - 1, values.mean(), stats.sem(values)).interval(0.95)
    return f"{values.mean():{sign}.4f} ± {(high - low) / 2:.4f}".replace("-", "−")


def test_tables_of_exact_sums_follow_from_their_runs() -> None:
    shown: dict[tuple[str, bool], list[str]] = {}
    for heading in ("Similar data", "Label-skewed data", "Opacus on the pooled data"):
        shown |= {
            (name, heading.startswith("Opacus")): cells
            for name, cells in read_table(RESULTS / "exact-sums.md", heading, "case").items()
        }
    expected = {}
    for (model, epsilon, optimizer, partition, adjacency), runs in read_cases().items():
        is_pooled = adjacency == "add-remove"
        trained = {row["mechanism"] for row in runs}
        tuned = [name for name in ("server", "gossip") if name in trained]
        sizes: dict[str, float] = {name: choose_step_size(runs, name) for name in tuned}
        accuracy = {}
        for name in trained:
            own = {
                row["seed"]: float(row["accuracy"])
                for row in runs
                if (row["mechanism"], row["part"]) == (name, "test")
                and float(row["step_size"]) == sizes.get(name, sizes["server"])
            }
            assert sorted(own) == ["10", "11", "12", "13", "14"]
            accuracy[name] = np.array([own[seed] for seed in sorted(own)])
        sums, server = accuracy["sum"], accuracy["server"]
        shown_sizes = ", ".join(f"{size:g}" for size in sizes.values())
        cells = [shown_sizes, *map(describe_accuracies, (sums, server))]
        cells.append(describe_accuracies(sums - server, "+"))
        if is_pooled:
            theirs = accuracy["opacus"]
            welch = stats.ttest_ind(sums, theirs, equal_var=False).confidence_interval(0.95)
            shift, half = sums.mean() - theirs.mean(), (welch.high - welch.low) / 2
            difference = f"{shift:+.4f} ± {half:.4f}".replace("-", "−")
            cells += [describe_accuracies(theirs), difference]
        elif "gossip" in trained:
            gossip = accuracy["gossip"]
            cells += [describe_accuracies(gossip), describe_accuracies(sums - gossip, "+")]
        else:
            cells += ["refused" if optimizer == "adam" else "not run", ""]
        where = "" if model == "a9a" or partition == "iid" else f", {partition}"
        name = {"sgd": "SGD", "adam": "Adam"}[optimizer]
        expected[f"{MODELS[model]}{where}, ε = {epsilon}, {name}", is_pooled] = cells
    assert shown == expected


Cells = dict[tuple[str, int, float, str], np.ndarray]


@pytest.fixture(scope="module")
def correlation() -> Cells:
    """Return the accuracies of each study, n, ε and mechanism by seed."""
    cells: dict[tuple[str, int, float, str], dict[int, float]] = {}
    for row in read_file(RESULTS / "when-correlation-pays.csv"):
        key = row["study"], int(row["agents"]), float(row["epsilon"]), row["mechanism"]
        cells.setdefault(key, {})[int(row["seed"])] = float(row["accuracy"])
    assert all(sorted(own) == [10, 11, 12, 13, 14] for own in cells.values())
    return {key: np.array([own[seed] for seed in sorted(own)]) for key, own in cells.items()}


@pytest.fixture(scope="module")
def noise_numbers() -> dict[tuple[str, int, float, str], float]:
    """Return ν of each study, n, ε and mechanism."""
    return {
        (row["study"], int(row["agents"]), float(row["epsilon"]), row["mechanism"]): float(
            row["noise_number"]
        )
        for row in read_file(RESULTS / "when-correlation-pays.csv")
    }


def is_best(cells: Cells, study: str, agents: int, epsilon: float) -> bool:
    """Return whether 95 % intervals say that CorN beats LDP and training alone."""
    corn, ldp, alone = (cells[study, agents, epsilon, name] for name in ("corn", "ldp", "alone"))
    half = stats.t.ppf(0.975, len(corn) - 1) * stats.sem(corn - ldp)
    # Agents alone have batches of their own, so that only LDP is paired by seeds.
    welch = stats.ttest_ind(corn, alone, equal_var=False).confidence_interval(0.95)
    return bool((corn - ldp).mean() > half and welch.low > 0)


@pytest.mark.parametrize(
    ("heading", "study"),
    [
        ("Softmax regression on digits", "digits linear"),
        ("A network on digits", "digits network"),
        ("Softmax regression on MNIST", "mnist linear"),
        ("A network on MNIST", "mnist network"),
        ("Unit agent", "mnist linear, unit agent"),
    ],
)
def test_tables_of_correlation_follow_from_its_runs(
    correlation: Cells, heading: str, study: str
) -> None:
    text = (RESULTS / "when-correlation-pays.md").read_text(encoding="utf-8")
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    shown = {}
    for line in section.splitlines():
        name, *values = (cell.strip() for cell in line.strip("|").split("|"))
        if line.startswith("|") and not set(name) <= set("- "):
            shown[name] = values
    header = shown.pop("agents")
    epsilons = sorted({key[2] for key in correlation if key[0] == study and key[3] == "corn"})
    assert header == [f"ε = {epsilon:g}" for epsilon in epsilons]
    expected = {}
    for agents in sorted({key[1] for key in correlation if key[0] == study}):
        expected[str(agents)] = [
            " / ".join(
                f"**{100 * correlation[study, agents, epsilon, name].mean():.1f}**"
                if name == "corn" and is_best(correlation, study, agents, epsilon)
                else f"{100 * correlation[study, agents, epsilon, name].mean():.1f}"
                for name in ("alone", "ldp", "corn")
            )
            for epsilon in epsilons
        ]
    server = [correlation[study, 20, epsilon, "central"].mean() for epsilon in epsilons]
    expected["server"] = [f"{100 * value:.1f}" for value in server]
    assert shown == expected
    (none,) = re.findall(r"Without noise: ([\d.]+)\.", section)
    assert none == f"{100 * correlation[study, 20, float('inf'), 'none'].mean():.1f}"


def test_the_rule_of_thumb_describes_the_runs(
    correlation: Cells, noise_numbers: dict[tuple[str, int, float, str], float]
) -> None:
    """Noise costs so many times ν of accuracy as the page says, with every mechanism."""
    text = (RESULTS / "when-correlation-pays.md").read_text(encoding="utf-8")
    pattern = r"Between ν = ([\d.]+) and ([\d.]+), noise costs ([\d.]+) to ([\d.]+) times ν"
    (found,) = re.findall(pattern, text)
    first, last, low, high = map(float, found)
    counted = 0
    for key, number in noise_numbers.items():
        if first <= number <= last and "unit agent" not in key[0]:
            without = correlation[key[0], 20, float("inf"), "none"].mean()
            ratio = (without - correlation[key].mean()) / number
            assert low - 0.05 <= ratio < high + 0.05
            counted += 1
    assert f"in all {counted} such cases" in text
    pattern = r"difference is at least ([\d.]+) and ν\(CorN\) below ([\d.]+), and less elsewhere"
    (found,) = re.findall(pattern, text)
    least, most = map(float, found)
    right = 0
    cells = [key for key in correlation if key[3] == "corn" and "unit agent" not in key[0]]
    for key in cells:
        ldp, alone = ((*key[:3], name) for name in ("ldp", "alone"))
        gain = correlation[key].mean() - max(correlation[ldp].mean(), correlation[alone].mean())
        number = noise_numbers[key]
        expected = noise_numbers[ldp] - number >= least and number < most
        right += expected == (gain >= 0.01)
    assert f"right in {right} of the {len(cells)} cases" in text
    certain = sum(is_best(correlation, *key[:3]) for key in cells)
    assert f"in all {len(cells)} cases that we measured, and certainly so in {certain}." in text


PEER_COLUMNS = {
    "One sample": [
        ("sample", 0.3, "linear"),
        ("sample", 1.0, "linear"),
        ("sample", 0.3, "network"),
    ],
    "One agent's whole data": [("agent", 8.0, "linear")],
}


@pytest.mark.parametrize("heading", list(PEER_COLUMNS))
def test_tables_of_peers_follow_from_their_runs(heading: str) -> None:
    shown = read_table(RESULTS / "peers.md", heading, "method")
    runs: dict[tuple[str, float, str], dict[str, list[dict[str, str]]]] = {}
    for row in read_file(RESULTS / "peers.csv"):
        case = row["unit"], float(row["epsilon"]), row["model"]
        runs.setdefault(case, {}).setdefault(row["peer"], []).append(row)
    columns = [runs[case] for case in PEER_COLUMNS[heading]]
    expected = {}
    for peer in columns[0]:
        own = [column[peer] for column in columns]
        assert all(len({row["seed"] for row in rows}) == len(rows) == 5 for rows in own)
        seconds = np.mean([float(row["seconds"]) for row in own[0]])
        messages, size = (float(own[0][0][name]) for name in ("messages", "bytes"))
        traffic = f"{messages:g}, {size / 1e6:.2g} MB" if messages else "–"
        accuracies = (summarise(float(row["accuracy"]) for row in rows) for rows in own)
        expected[peer] = [*accuracies, f"{seconds:.1f}", traffic]
    assert {name: cells[: len(columns) + 2] for name, cells in shown.items()} == expected
