"""Options and output files that ``corn train`` and ``corn launch`` share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from corn import learn
from corn.cli.config_file import is_given
from corn.cli.output import print_note, save_json
from corn.cli.promises import find_promises, format_per_agent, parse_samples
from corn.learn.names import PAPER_PARTITION, USUAL_BATCH_SIZE, WorkloadName, usual_schedule
from corn.learn.schedule import ScheduleName
from corn.plan import Plan
from corn.privacy import PrivacyBudget
from corn.topology import Network, load_network

LEARNING = "Learning"
OWN_DATA = "Your own data"
# Of a number of classes, each of which gets a name in memory.
_MOST_DIGITS = 5


@dataclass(frozen=True)
class LearningOptions:
    """The task or the user's own data, the model and the mini-batches."""

    task: Annotated[
        WorkloadName | None,
        typer.Option(
            help="Task to learn; a9a and mnist need corn data get.", rich_help_panel=LEARNING
        ),
    ] = None
    data: Annotated[
        Path | None,
        typer.Option(
            help="Instead of a task: a .csv, .parquet or .npz file or a folder of images with a "
            "sub-folder per class, distributed over the agents; with {agent} in its name, one for "
            "each agent: data/agent-{agent}.csv.",
            rich_help_panel=OWN_DATA,
        ),
    ] = None
    target: Annotated[
        str | None,
        typer.Option(help="Column, or array, of the targets.", rich_help_panel=OWN_DATA),
    ] = None
    features: Annotated[
        str | None,
        typer.Option(
            help="Columns of the inputs, separated by commas. (Default: all but the target, in "
            "order of their names.)",
            rich_help_panel=OWN_DATA,
        ),
    ] = None
    classes: Annotated[
        str | None,
        typer.Option(
            help="Public list of all classes, such as benign,malignant; a number K is 0 … K−1. "
            "(Default for train: those in the data.)",
            rich_help_panel=OWN_DATA,
        ),
    ] = None
    regression: Annotated[
        bool,
        typer.Option(
            "--regression", help="Predict numbers instead of classes.", rich_help_panel=OWN_DATA
        ),
    ] = False
    bounds: Annotated[
        str | None,
        typer.Option(
            help="Public bounds that scale columns to [−1, 1]: LEAST:MOST for all, "
            "age=0:120,bmi=10:60 or a .csv file with column,least,most. Values outside count as "
            "the nearest bound. Never statistics of private data: no ε covers those. (Default: "
            "values as they are; pixels of images in [0, 1].)",
            rich_help_panel=OWN_DATA,
        ),
    ] = None
    test_data: Annotated[
        Path | None,
        typer.Option(
            help="Public file with the same columns, on which no agent trains; scores on it may be "
            "published.",
            rich_help_panel=OWN_DATA,
        ),
    ] = None
    held_out: Annotated[
        float,
        typer.Option(
            help="Without --test-data: fraction of the data to measure on; scores on it are "
            "private.",
            rich_help_panel=OWN_DATA,
        ),
    ] = 0.2
    model: Annotated[
        str | None,
        typer.Option(
            help="linear, network (32 hidden units), cnn, or FILE.py:FUNCTION, a function of "
            "input_shape and num_outputs that returns a torch.nn.Module, or a module and its loss. "
            "(Default: linear; mnist: network.)",
            rich_help_panel=LEARNING,
        ),
    ] = None
    partition: Annotated[
        str | None,
        typer.Option(
            help="Partition of the samples over agents: iid, dirichlet:ALPHA or shards:K; only iid "
            "moves no sample when another changes, so that ε is simulated with the others. "
            "(Default: dirichlet:10; with --data: iid, which agents on several hosts must state "
            "if all have the same file.)",
            rich_help_panel=LEARNING,
        ),
    ] = None
    data_seed: Annotated[
        int, typer.Option(min=0, help="Seed of split and partition.", rich_help_panel=LEARNING)
    ] = 0
    l2: Annotated[
        float, typer.Option(min=0, help="L2 penalty of linear models.", rich_help_panel=LEARNING)
    ] = 1e-4
    cache: Annotated[
        Path | None,
        typer.Option(help="Directory of data sets. (Default: $CORN_DATA, or the user's cache.)"),
    ] = None
    stand_in: Annotated[
        bool,
        typer.Option(help="Use an embedded data set in place of an absent one, with a warning."),
    ] = True
    batch_size: Annotated[
        int,
        typer.Option(
            min=1,
            help="Samples per mini-batch, unless the plan has its own.",
            rich_help_panel=LEARNING,
        ),
    ] = USUAL_BATCH_SIZE
    schedule: Annotated[
        ScheduleName | None,
        typer.Option(
            help="Step-size schedule. (Default: constant; quadratic: inverse-sqrt.)",
            rich_help_panel=LEARNING,
        ),
    ] = None

    @property
    def is_quadratic(self) -> bool:
        """Whether the task is the paper's quadratic, which has its own step sizes."""
        return self.task == "quadratic"

    @property
    def source_name(self) -> str:
        """The task's name, or the name of the data."""
        return self.task or (self.data.name if self.data else "")

    def choose_schedule(self) -> ScheduleName:
        """Return the schedule asked for, or the paper's."""
        return self.schedule or usual_schedule(self.task or "")

    def make_workload(self) -> learn.Workload | learn.FileWorkload:
        """Return the workload, which builds a problem for any number of agents."""
        if (self.task is None) == (self.data is None):
            raise typer.BadParameter("give either a task or --data", param_hint="--task")
        if self.data is not None:
            return self._make_file_workload(self.data)
        # Silently ignored, --bounds or --classes would leave the user with another model than
        # intended.
        self._refuse_options_of_data()
        return learn.Workload(
            name=self.task or "",
            model=self.model,
            partition=self.partition or PAPER_PARTITION,
            seed=self.data_seed,
            l2=self.l2,
            directory=self.cache,
            stand_in=self.stand_in,
        )

    def require_public_classes(self) -> None:
        """Raise where real agents would have to read the list of classes from private data."""
        if self.data is not None and self.classes is None and not self.regression:
            raise typer.BadParameter(
                "list all classes, such as benign,malignant: which of them occur in the data is "
                "private, and the model that agents publish shows the list",
                param_hint="--classes",
            )

    def require_stated_partition(self) -> None:
        """Raise where every host may have a file of its own under a name without ``{agent}``."""
        # Each agent would train on a part of its own file, and spend all of ε on it.
        if self.data is None or self.partition is not None:
            return
        if not self._make_file_workload(self.data).has_file_per_agent:
            name, dot, suffix = self.data.name.partition(".")
            raise typer.BadParameter(
                f"must have {{agent}} in its name if each agent has a file of its own, found "
                f"{self.data}: rename it and give {name}-{{agent}}{dot}{suffix}, where {{agent}} "
                "stands for the agent's number. If every agent has this same file, of which it "
                "trains on a part, say so with --partition iid",
                param_hint="--data",
            )

    def _make_file_workload(self, data: Path) -> learn.FileWorkload:
        return learn.FileWorkload(
            data=data,
            target=self.target,
            features=_split_names(self.features),
            classes=_list_classes(self.classes),
            is_regression=self.regression,
            bounds=learn.Bounds.parse(self.bounds),
            model=self.model or "linear",
            test_data=self.test_data,
            held_out=self.held_out,
            partition=self.partition,
            seed=self.data_seed,
            l2=self.l2,
        )

    def _refuse_options_of_data(self) -> None:
        """Raise for options that only describe the user's own data."""
        usual = LearningOptions()
        for name in ("target", "features", "classes", "regression", "bounds", "test_data"):
            if getattr(self, name) != getattr(usual, name):
                option = f"--{name.replace('_', '-')}"
                raise typer.BadParameter("belongs to --data, found a task", param_hint=option)

    def count_samples(self, num_agents: int) -> tuple[int, ...]:
        """Return the number of training samples of each agent."""
        return self.make_workload().build(num_agents).data.sizes


def _split_names(text: str | None) -> tuple[str, ...]:
    return () if text is None else tuple(name.strip() for name in text.split(","))


def _list_classes(text: str | None) -> tuple[str, ...] | None:
    """Return the names of classes; a single number is their count.

    >>> _list_classes("3"), _list_classes("no, yes")
    (('0', '1', '2'), ('no', 'yes'))
    """
    if text is None:
        return None
    if text.isdecimal() and len(text) <= _MOST_DIGITS:
        return tuple(map(str, range(int(text))))
    return _split_names(text)


def let_plan_decide(context: typer.Context, plan: Plan, **also_fixed: object) -> None:
    """Set the options that a plan decides to its values, in the command's configuration.

    An option on the command line that contradicts the plan is misuse, with exit code 2.
    ``also_fixed`` are options that the plan decides for the present command only.
    """
    fixed = {**_fixed_by_plan(plan, context.params), **also_fixed}
    for name, value in fixed.items():
        found = context.params[name]
        # Options that were not given keep their defaults, which a plan replaces without complaint.
        if is_given(context, name) and found != value:
            raise typer.BadParameter(
                f"the plan has {'none' if value is None else value}, found {found}: omit the "
                "option",
                param_hint=f"--{name.replace('_', '-')}",
            )
    # run.json then states what was run, not what was typed.
    context.params.update(fixed, graph=plan.network.source, weights=None)


def _is_same(named: Network, planned: Network) -> bool:
    """Return whether agents mix alike on two networks: sums need the same links only."""
    if named.num_agents != planned.num_agents:
        return False
    if planned.mixing == "sum":
        return {*map(frozenset, named.graph.edges)} == {*map(frozenset, planned.graph.edges)}
    return bool((named.sparse_matrix != planned.sparse_matrix).nnz == 0)


def _fixed_by_plan(plan: Plan, given: Mapping[str, Any]) -> dict[str, object]:
    """Return the values of the options that a plan decides."""
    budget, threat, objective = plan.budget, plan.threat, plan.objective
    graph, weights, cooldown = given["graph"], given["weights"], given["cooldown"]
    # The plan's graph under another name, such as a file with the same weights, is no
    # contradiction.
    named = plan.network if graph is None else load_network(graph, weights=weights)
    is_same = _is_same(named, plan.network)
    fixed = {
        "graph": graph if is_same else plan.network.source,
        "weights": weights if is_same and graph is not None else "weights of its own",
        **_promises_as_given(plan, given["epsilon"], given["delta"]),
        "steps": budget.num_steps,
        "clip": budget.clip,
        "unit": budget.unit,
        "accounting": budget.accounting,
        "adjacency": budget.adjacency,
        "sampling": budget.sampling,
        "sampling_rate": budget.sampling_rate,
        "samples_per_agent": _samples_as_given(budget, given["samples_per_agent"]),
        "horizon": getattr(objective, "length", None),
        "disagreement_weight": getattr(objective, "disagreement_weight", None),
        "momentum": plan.momentum,
        "gossip": str(plan.network.gossip),
        # Automatic is no contradiction either.
        "cooldown": cooldown if cooldown == "auto" else str(plan.cooldown_steps),
        "colluders": threat.max_colluders,
        "seeds": threat.seeds,
        "private_noise": threat.private_noise,
    }
    # The batch size is the plan's where it counts for privacy, the precision where noise is drawn
    # bit for bit as in a deployment.
    if budget.batch_size is not None:
        fixed["batch_size"] = budget.batch_size
    if "dtype" in given and given.get("rehearse"):
        fixed["dtype"] = plan.dtype
    return fixed


def _promises_as_given(plan: Plan, epsilon: str, delta: str) -> dict[str, object]:
    """Return the plan's ε and δ as the options' texts, as they were given if they agree."""
    budget = plan.budget
    found = find_promises(epsilon, delta, plan.network)
    return {
        "epsilon": epsilon if found[0] == budget.epsilon else format_per_agent(budget.epsilon),
        "delta": delta if found[1] == budget.delta else format_per_agent(budget.delta),
    }


def _samples_as_given(budget: PrivacyBudget, given: str | None) -> str | None:
    """Return the plan's samples per agent as the option's text, as it was given if it agrees."""
    samples = budget.samples_per_agent
    if given is not None and parse_samples(given) == samples:
        return given
    listed = samples if isinstance(samples, tuple) else (samples,)
    return None if samples is None else ",".join(map(str, listed))


def write_run(
    rows: Sequence[learn.Row],
    facts: Mapping[str, object],
    out: Path,
    *,
    columns: Sequence[str] | None = None,
    is_private: bool = False,
) -> None:
    """Write columns of the measurements to metrics.csv in ``out``, and facts to run.json."""
    columns = columns or learn.COLUMNS
    learn.write_table(rows, out / "metrics.csv", columns=columns, is_private=is_private)
    save_json(facts, out / "run.json", is_private=is_private)
    print_note(f"wrote {out / 'metrics.csv'} and {out / 'run.json'}")


def draw_run(
    rows: Sequence[learn.Row],
    schedules: Mapping[str, str],
    *,
    agent_samples: Sequence[int] | None = None,
    title: str,
    path: Path,
) -> None:
    """Draw the measurements of each method that were made with its schedule.

    ``agent_samples`` are the numbers of samples per agent, a panel of their own; None omits it.
    """
    # Matplotlib takes a second to import, which runs without a figure need not wait for.
    from corn.report import plot_training, save_figure

    save_figure(plot_training(rows, schedules, agent_samples, title=title), path)
    print_note(f"wrote {path}")
