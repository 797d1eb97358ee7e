"""When correlated noise pays: training alone, LDP, CorN, a trusted server and no noise.

    OMP_NUM_THREADS=1 python benchmarks/when_correlation_pays.py --data-dir DATA

The rows of a data set are divided evenly between n agents, for each n, each ε and each model. An
agent that trains alone runs DP-SGD on its own rows. All others train one model by exact sums:
their noise differs, and nothing else. A study that the file has is not repeated. At the end the
table of ``docs/results/when-correlation-pays.md`` and its figure are made from the file.

Step sizes are chosen on seeds of their own by validation accuracy. All models of an average with
one noise level have the same best step size, whatever the mechanism, n and ε that the level is
from: levels are powers of two. Agents alone have their own choice for each n and ε.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from scipy import stats

from corn.checks import FloatArray
from corn.covariance import default_objective
from corn.covariance.decomposition import Decomposition
from corn.learn import (
    Constant,
    Mechanism,
    SweepSettings,
    TrainingProblem,
    Trial,
    Workload,
    make_mechanisms,
    run_sweep,
)
from corn.learn.workloads import select_agents
from corn.privacy import PrivacyBudget
from corn.report.figures import INK, MECHANISM_COLOURS, figure_style, save_figure
from corn.threads import limit_threads
from corn.topology import load_network
from measuring import append_runs, format_table, read_runs

_ROOT = Path(__file__).parent.parent
_DELTA, _CLIP, _SPLIT_SEED = 1e-5, 1.0, 1
_SEEDS = (10, 11, 12, 13, 14)
_LEAST_STEP_SIZE = 1e-4
# Server and no noise are the same for every n, because the rows of all agents together are.
_REFERENCE_AGENTS = 20
# The studies of all n, which the figure of the page shows.
TITLES = {
    "digits linear": "digits, softmax regression",
    "digits network": "digits, network",
    "mnist linear": "MNIST, softmax regression",
    "mnist network": "MNIST, network",
}
# The gain, in percentage points, of the darkest colour.
_MOST_GAIN = 60


@dataclass(frozen=True)
class Study:
    """A model on data with a unit of privacy, for several n and ε."""

    task: str
    model: str
    num_steps: int
    rate: float
    unit: str = "sample"
    agents: tuple[int, ...] = (3, 5, 10, 20, 50)
    epsilons: tuple[float, ...] = (0.1, 0.5, 1, 3, 8)
    tuning_seeds: tuple[int, ...] = (100, 101)
    first_step_sizes: tuple[float, ...] = (1 / 4, 1.0, 4.0)


# Batches of 300 of 1293 and of 600 of 50,400 rows, which all n divide: 6 and 12 rows of each of 50
# agents.
_DIGITS_RATE, _MNIST_RATE = 300 / 1293, 1 / 84
# There are 144 digits to validate on, whose accuracies have more local maxima.
_DIGITS: dict[str, Any] = {
    "tuning_seeds": tuple(range(100, 108)),
    "first_step_sizes": (1 / 16, 1 / 4, 1.0, 4.0, 16.0),
}
STUDIES = {
    "digits linear": Study("digits", "linear", 100, _DIGITS_RATE, **_DIGITS),
    "digits network": Study("digits", "network", 100, _DIGITS_RATE, **_DIGITS),
    "mnist linear": Study("mnist", "linear", 120, _MNIST_RATE),
    "mnist network": Study("mnist", "network", 120, _MNIST_RATE),
    "mnist linear, unit agent": Study(
        "mnist", "linear", 120, _MNIST_RATE, unit="agent", agents=(5, 20, 50), epsilons=(1, 3, 8)
    ),
}


class Score(NamedTuple):
    """One run: the accuracy on the test part, and its noise relative to what gradients move."""

    study: str
    agents: int
    epsilon: float
    mechanism: str
    noise_number: float
    step_size: float
    seed: int
    accuracy: float


def make_problem(study: Study, num_agents: int, directory: Path) -> TrainingProblem:
    """Return the problem with the rows of all agents."""
    return Workload(
        study.task, model=study.model, partition="iid", seed=_SPLIT_SEED, directory=directory
    ).build(num_agents)


def make_budget(study: Study, epsilon: float, problem: TrainingProblem) -> PrivacyBudget:
    """Return the promise of each agent."""
    if study.unit == "agent":
        return PrivacyBudget(epsilon, _DELTA, study.num_steps, _CLIP)
    return PrivacyBudget(
        epsilon,
        _DELTA,
        study.num_steps,
        _CLIP,
        unit="sample",
        batch_size=choose_batch(study, problem),
        sampling_rate=study.rate,
    )


def choose_batch(study: Study, problem: TrainingProblem) -> int:
    """Return the usual number of rows in an agent's batch."""
    return max(1, round(study.rate * float(np.mean(problem.data.sizes))))


def find_noise_number(study: Study, problem: TrainingProblem, mechanism: Mechanism) -> float:
    """Return ν: what noise moves the model in T steps over the most that gradients can.

    T steps of size η along the average release move the model by at most η T C by gradients, and by
    about η √(T d) σ by noise with standard deviation σ per coordinate.
    """
    if mechanism.noise is None:
        return 0.0
    std = math.sqrt(mechanism.noise.total_variance) / mechanism.noise.num_agents
    return std * math.sqrt(problem.task.num_parameters / study.num_steps) / _CLIP


def find_level(number: float) -> int:
    """Return the power of two that is nearest to a noise number."""
    return round(math.log2(number))


def train(
    study: Study,
    problem: TrainingProblem,
    trials: Sequence[Trial],
    part: str,
    seeds: Sequence[int],
) -> list[list[float]]:
    """Return the accuracies of each trial by seed; NaN for runs that diverged."""
    query = next(iter(trials[0].mechanism.queries), None)
    result = run_sweep(
        replace(problem, parts={part: problem.parts[part]}),
        load_network(f"complete:{problem.data.num_agents}", mixing="sum"),
        trials,
        settings=SweepSettings(
            num_steps=study.num_steps,
            batch_size=(query and query.batch_size) or choose_batch(study, problem),
            seeds=tuple(seeds),
        ),
        evaluate_at=[study.num_steps],
        max_train_samples=100,
        show_progress=False,
    )
    found = {
        (str(row["mechanism"]), float(row["step_size"]), int(row["seed"])): float(
            row[f"{part}_accuracy"]
        )
        for row in result.last_rows
    }
    return [
        [
            found.get((trial.mechanism.name, trial.schedule.initial, seed), math.nan)
            for seed in seeds
        ]
        for trial in trials
    ]


def tune(
    study: Study,
    problem: TrainingProblem,
    mechanisms: Sequence[Mechanism],
    guesses: Sequence[float],
) -> list[float]:
    """Return the step size of the largest mean validation accuracy for each mechanism."""

    def measure(wanted: Sequence[tuple[int, float]]) -> list[float]:
        trials = [Trial(mechanisms[k], Constant(size)) for k, size in wanted]
        measured = train(study, problem, trials, "validation", study.tuning_seeds)
        return [float(np.nan_to_num(np.mean(values), nan=-1.0)) for values in measured]

    return tune_step_sizes(measure, guesses, study.first_step_sizes)


def tune_step_sizes(
    measure: Callable[[Sequence[tuple[int, float]]], list[float]],
    guesses: Sequence[float],
    first: Sequence[float] = Study.first_step_sizes,
) -> list[float]:
    """Return the step size of the largest accuracy for each mechanism.

    ``measure`` returns the accuracies of mechanisms, by number, with step sizes. Each grid begins
    with a guess times the first sizes, and grows by steps of four as long as its best value is at
    an end. Half and twice the best value are tried last.
    """
    accuracies: list[dict[float, float]] = [{} for _ in guesses]

    def extend(wanted: Sequence[tuple[int, float]]) -> None:
        for (k, size), accuracy in zip(wanted, measure(wanted), strict=True):
            accuracies[k][size] = accuracy

    wanted = [(k, guess * size) for k, guess in enumerate(guesses) for size in first]
    while wanted:
        extend(wanted)
        wanted = []
        for k, own in enumerate(accuracies):
            best = choose_best(own)
            if best == max(own):
                wanted.append((k, best * 4))
            # Where noise is all there is, ever smaller steps would be tried.
            elif best == min(own) and best > _LEAST_STEP_SIZE:
                wanted.append((k, best / 4))
    found = [choose_best(own) for own in accuracies]
    extend([(k, best * scale) for k, best in enumerate(found) for scale in (0.5, 2.0)])
    return [choose_best(own) for own in accuracies]


def choose_best(accuracies: Mapping[float, float]) -> float:
    """Return the step size with the largest accuracy, and of equally good ones the least."""
    return max(accuracies, key=lambda size: (accuracies[size], -size))


def tune_levels(
    study: Study, problem: TrainingProblem, levels: Sequence[int]
) -> tuple[dict[int, float], float]:
    """Return the best step size of each noise level, and of no noise."""
    # Less noise than any mechanism of the study has, which is then made louder: a promise can be
    # exceeded, and not missed.
    budget = make_budget(study, 4 * max(study.epsilons), problem)
    mildest = Mechanism.central(budget, problem.data.num_agents)
    number = find_noise_number(study, problem, mildest)
    noise = mildest.noise
    if not isinstance(noise, Decomposition):
        raise TypeError(f"noise must be a Decomposition, found {type(noise).__name__}")
    mechanisms = [Mechanism.non_private(*mildest.queries)]
    for level in levels:
        factors = tuple(2**level / number * factor for factor in noise.factors)
        louder = replace(noise, factors=factors)
        mechanisms.append(replace(mildest, name=f"level {level}", noise=louder))
    none, *sizes = tune(study, problem, mechanisms, [1.0] * len(mechanisms))
    return dict(zip(levels, sizes, strict=True)), none


def run_study(name: str, directory: Path) -> Iterator[Score]:
    """Yield the scores of all runs of a study."""
    study = STUDIES[name]
    problems = {n: make_problem(study, n, directory) for n in study.agents}
    joint: dict[int, list[tuple[float, str, Mechanism]]] = {n: [] for n in study.agents}
    for n, problem in problems.items():
        names = ["ldp", "corn", *(["central"] if n == _REFERENCE_AGENTS else [])]
        for epsilon in study.epsilons:
            made = make_mechanisms(
                names,
                load_network(f"complete:{n}", mixing="sum"),
                make_budget(study, epsilon, problem),
                objective=default_objective(study.num_steps),
            )
            for kind, mechanism in zip(names, made, strict=True):
                own = replace(mechanism, name=f"{kind} {epsilon:g}")
                joint[n].append((epsilon, kind, own))
    levels = sorted(
        {
            find_level(find_noise_number(study, problems[n], mechanism))
            for n, own in joint.items()
            for _, _, mechanism in own
        }
    )
    step_sizes, no_noise = tune_levels(study, problems[_REFERENCE_AGENTS], levels)
    for n, problem in problems.items():
        sizes = [
            step_sizes[find_level(find_noise_number(study, problem, mechanism))]
            for _, _, mechanism in joint[n]
        ]
        if n == _REFERENCE_AGENTS:
            queries = make_budget(study, study.epsilons[0], problem).queries
            # Without noise there is no ε, and one run for all.
            joint[n].append((math.inf, "none", Mechanism.non_private(*queries)))
            sizes.append(no_noise)
        trials = [
            Trial(mechanism, Constant(size))
            for (_, _, mechanism), size in zip(joint[n], sizes, strict=True)
        ]
        measured = train(study, problem, trials, "test", _SEEDS)
        for (epsilon, kind, mechanism), size, values in zip(joint[n], sizes, measured, strict=True):
            number = find_noise_number(study, problem, mechanism)
            for seed, accuracy in zip(_SEEDS, values, strict=True):
                yield Score(name, n, epsilon, kind, number, size, seed, accuracy)
        yield from run_alone(name, problem, step_sizes)


def run_alone(
    name: str, problem: TrainingProblem, step_sizes: Mapping[int, float]
) -> Iterator[Score]:
    """Yield the scores of agents that train by themselves: another agent for each seed."""
    study, n = STUDIES[name], problem.data.num_agents
    mechanisms = [
        replace(
            Mechanism.central(make_budget(study, epsilon, problem), 1), name=f"alone {epsilon:g}"
        )
        for epsilon in study.epsilons
    ]
    numbers = [find_noise_number(study, problem, mechanism) for mechanism in mechanisms]
    guesses = []
    for number in numbers:
        level = find_level(number)
        nearest = min(step_sizes, key=lambda own: abs(own - level))
        # Beyond the levels that were tuned, step sizes fall as noise rises.
        guesses.append(step_sizes[nearest] * 2.0 ** min(nearest - level, 0))
    chosen = tune(study, select_agents(problem, [n - 1]), mechanisms, guesses)
    trials = [
        Trial(mechanism, Constant(size)) for mechanism, size in zip(mechanisms, chosen, strict=True)
    ]
    for k, seed in enumerate(_SEEDS):
        own = select_agents(problem, [k * n // len(_SEEDS)])
        measured = train(study, own, trials, "test", [seed])
        for epsilon, number, size, (accuracy,) in zip(
            study.epsilons, numbers, chosen, measured, strict=True
        ):
            yield Score(name, n, epsilon, "alone", number, size, seed, accuracy)


def read_scores(path: Path) -> list[Score]:
    """Return the runs of a file."""
    hints = get_type_hints(Score)
    return [
        Score(**{name: hints[name](value) for name, value in row.items()})
        for row in read_runs(path)
    ]


Accuracies = dict[tuple[str, int, float, str], FloatArray]


def group(scores: Sequence[Score]) -> Accuracies:
    """Return the accuracies of each study, n, ε and mechanism by seed."""
    found: dict[tuple[str, int, float, str], dict[int, float]] = {}
    for score in scores:
        key = score.study, score.agents, score.epsilon, score.mechanism
        found.setdefault(key, {})[score.seed] = score.accuracy
    return {key: np.array([own[seed] for seed in _SEEDS]) for key, own in found.items()}


def find_gains(accuracies: Accuracies, name: str, num_agents: int, epsilon: float) -> list[float]:
    """Return the lower ends of the 95 % intervals of CorN − LDP and of CorN − alone.

    CorN and LDP have the same batches and normals for a seed. An agent alone has its own.
    """
    corn, ldp, alone = (
        accuracies[name, num_agents, epsilon, kind] for kind in ("corn", "ldp", "alone")
    )
    paired = stats.ttest_1samp(corn - ldp, 0).confidence_interval(0.95).low
    welch = stats.ttest_ind(corn, alone, equal_var=False).confidence_interval(0.95).low
    return [float(paired), float(welch)]


def tabulate(accuracies: Accuracies, name: str) -> str:
    """Return a Markdown table with one line for each n, and one for all n."""
    study = STUDIES[name]
    lines = [["agents", *(f"ε = {epsilon:g}" for epsilon in study.epsilons)]]
    for n in study.agents:
        line = [str(n)]
        for epsilon in study.epsilons:
            means = [
                f"{100 * accuracies[name, n, epsilon, kind].mean():.1f}"
                for kind in ("alone", "ldp", "corn")
            ]
            if min(find_gains(accuracies, name, n, epsilon)) > 0:
                means[-1] = f"**{means[-1]}**"
            line.append(" / ".join(means))
        lines.append(line)
    servers = [
        accuracies[name, _REFERENCE_AGENTS, epsilon, "central"] for epsilon in study.epsilons
    ]
    lines.append(["server", *(f"{100 * own.mean():.1f}" for own in servers)])
    return format_table(lines)


def draw_gains(accuracies: Accuracies) -> Figure:
    """Draw, for each model, the gain of CorN over the better of LDP and training alone."""
    figure = Figure(figsize=(10, 3.1), layout="constrained")
    colours = LinearSegmentedColormap.from_list("gain", ["#FFFFFF", MECHANISM_COLOURS["corn"]])
    for axes, name in zip(figure.subplots(1, len(TITLES), sharey=True), TITLES, strict=True):
        study = STUDIES[name]
        for row, n in enumerate(study.agents):
            for column, epsilon in enumerate(study.epsilons):
                mean = {
                    kind: accuracies[name, n, epsilon, kind].mean()
                    for kind in ("alone", "ldp", "corn")
                }
                gain = 100 * (mean["corn"] - max(mean["alone"], mean["ldp"]))
                is_certain = min(find_gains(accuracies, name, n, epsilon)) > 0
                shade = min(gain / _MOST_GAIN, 1.0)
                fill = colours(shade) if is_certain else "#EEEEEE"
                axes.add_patch(Rectangle((column, row), 1, 1, facecolor=fill, edgecolor="white"))
                text = f"{gain:+.0f}".replace("-", "−") if is_certain else "·"
                axes.text(
                    column + 0.5,
                    row + 0.5,
                    text,
                    ha="center",
                    va="center",
                    fontsize=9,
                    color="white" if is_certain and shade > 0.6 else INK,
                )
        axes.set(xlim=(0, len(study.epsilons)), ylim=(0, len(study.agents)))
        axes.set_xticks(np.arange(len(study.epsilons)) + 0.5, [f"{e:g}" for e in study.epsilons])
        axes.set_yticks(np.arange(len(study.agents)) + 0.5, [str(n) for n in study.agents])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_title(TITLES[name], fontsize=10)
        axes.set_xlabel("ε of one sample")
    figure.axes[0].set_ylabel("agents")
    return figure


def main() -> None:
    """Run what is missing, print the tables, and draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data-dir", type=Path, help="directory of data sets, with mnist")
    default = _ROOT / "docs" / "results" / "when-correlation-pays.csv"
    parser.add_argument("--out", type=Path, default=default, metavar="FILE")
    images = _ROOT / "docs" / "images"
    parser.add_argument("--images", type=Path, default=images, metavar="FOLDER")
    arguments = parser.parse_args()
    limit_threads()
    for name in STUDIES:
        if any(score.study == name for score in read_scores(arguments.out)):
            continue
        start = time.process_time()
        append_runs(arguments.out, Score._fields, list(run_study(name, arguments.data_dir)))
        print(f"{name}: {time.process_time() - start:,.0f} s of CPU time", flush=True)
    accuracies = group(read_scores(arguments.out))
    for name in STUDIES:
        print(f"\n{name}\n\n{tabulate(accuracies, name)}")
    with figure_style():
        save_figure(draw_gains(accuracies), arguments.images / "when-correlation-pays.png")


if __name__ == "__main__":
    main()
