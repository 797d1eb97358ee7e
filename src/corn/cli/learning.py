"""Options and output files that ``corn train`` and ``corn launch`` share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import typer

from corn import learn
from corn.cli.options import in_learning, in_own_data, refuse_given
from corn.cli.output import print_note, save_json
from corn.learn.consortium import Consortium, load_consortium
from corn.learn.datasets import PAPER_PARTITION, USUAL_BATCH_SIZE, WorkloadName, usual_schedule
from corn.learn.schedule import Schedule
from corn.privacy import PrivacyBudget

MODEL_FILE = "model.pt"
"""The name of a saved model, here as well, because importing it takes seconds."""


@dataclass(frozen=True)
class LearningOptions:
    """The task or the user's own data, the model and the mini-batches."""

    task: WorkloadName | None = in_learning("Task to learn; a9a and mnist need corn data get.")
    data: Path | None = in_own_data(
        "Instead of a task: a .csv or .parquet file or a folder of images with a sub-folder per "
        "class, distributed over the agents; with {agent} (number) or {site} (name), one for each."
    )
    target: str | None = in_own_data("Column of the targets.")
    features: str | None = in_own_data(
        "Columns of the inputs, separated by commas. (Default: all but the target.)"
    )
    classes: str | None = in_own_data(
        "Public list of all classes, such as no,yes; K is 0 … K−1. (Default for train: the data's.)"
    )
    regression: bool = in_own_data("Predict numbers instead of classes.", default=False)
    bounds: str | None = in_own_data(
        "Public bounds that scale columns to [−1, 1]: LEAST:MOST for all, or age=0:120,bmi=10:60. "
        "Never statistics of private data: no ε covers those. (Default: values as they are.)"
    )
    test_data: Path | None = in_own_data(
        "Public file with the same columns. (Default: a fifth of the data, with private scores.)"
    )
    model: str | None = in_learning(
        "linear, network, cnn, or FILE.py:FUNCTION, a function of input_shape and num_outputs that "
        "returns a torch.nn.Module, or it and its loss. (Default: linear; mnist: network.)"
    )
    partition: str | None = in_learning(
        "Partition of a task's samples over agents: iid, dirichlet:ALPHA or shards:K. (Default: "
        "dirichlet:10; with --data: iid, which agents on several hosts must state.)"
    )
    data_seed: int = in_learning("Seed of split and partition.", default=0, min=0)
    batch_size: int = in_learning(
        "Samples per mini-batch, unless the plan has its own.", default=USUAL_BATCH_SIZE, min=1
    )

    def make_schedule(self, step_size: float) -> Schedule:
        """Return the schedule that begins with a step size: constant, or the paper's."""
        return learn.make_schedule(step_size, usual_schedule(self.task or ""))

    def make_workload(self, names: Sequence[str]) -> learn.Workload | learn.FileWorkload:
        """Return the workload, which builds a problem for agents with these names."""
        if (self.task is None) == (self.data is None):
            raise typer.BadParameter("give either a task or --data", param_hint="--task")
        if self.data is not None:
            from corn.learn.file_data import SITE_FIELD  # imports torch, which takes seconds

            own = self._make_file_workload(self.data)
            return replace(own, sites=tuple(names)) if SITE_FIELD in str(self.data) else own
        # Silently ignored, --bounds would leave the user with another model than intended.
        for name in _OF_DATA:
            if getattr(self, name) != getattr(LearningOptions, name):
                option = f"--{name.replace('_', '-')}"
                raise typer.BadParameter("belongs to --data, found a task", param_hint=option)
        return learn.Workload(
            name=self.task or "",
            model=self.model,
            partition=self.partition or PAPER_PARTITION,
            seed=self.data_seed,
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
            raise typer.BadParameter(
                f"{self.data}: if each agent has a file of its own, put {{agent}}, which stands "
                "for its number, into the name. If every agent has this same file, of which it "
                "trains on a part, give --partition iid",
                param_hint="--data",
            )

    def _make_file_workload(self, data: Path) -> learn.FileWorkload:
        # Others look at all labels, which no ε covers.
        if self.partition not in (None, "iid"):
            raise typer.BadParameter("must be iid with --data", param_hint="--partition")
        return learn.FileWorkload(
            data=data,
            target=self.target,
            features=_split_names(self.features),
            classes=_list_classes(self.classes),
            is_regression=self.regression,
            bounds=learn.parse_bounds(self.bounds),
            model=self.model or "linear",
            test_data=self.test_data,
            seed=self.data_seed,
        )


_OF_DATA = ("target", "features", "classes", "regression", "bounds", "test_data")
# What the consortium file has, so that it is no option beside it.
_OF_TRAINING = ("task", "model", "partition", "data_seed", "batch_size", "step_size")


def read_consortium(
    context: typer.Context, path: Path | None, data: Path | None
) -> Consortium | None:
    """Return the consortium of a ``.toml`` file in the place of a plan; None for any other file.

    Raises misuse for an option that the file decides, and without ``--data``.
    """
    if path is None or path.suffix != ".toml":
        return None
    consortium = load_consortium(path)
    refuse_given(context, (*_OF_DATA, *_OF_TRAINING), f"{path} decides this: omit the option")
    if data is None:
        raise typer.BadParameter(
            "give the file of this site, or of each site as data/{site}.csv", param_hint="--data"
        )
    return consortium


def _split_names(text: str | None) -> tuple[str, ...]:
    return () if text is None else tuple(name.strip() for name in text.split(","))


def _list_classes(text: str | None) -> tuple[str, ...] | None:
    """Return the names of classes; a single number is their count."""
    # Five digits at most, because each class gets a name in memory.
    if text is not None and text.isdecimal() and len(text) <= 5:
        return tuple(map(str, range(int(text))))
    return _split_names(text) or None


def refuse_options_of_plan(
    context: typer.Context, budget: PrivacyBudget, names: Iterable[str] = ()
) -> list[str]:
    """Return the options that a plan with this budget decides, or raise misuse if one is given.

    Also if it has the plan's own value: what a plan decides is not an option beside it.
    """
    # Where agents are the unit, the batch size has no effect on privacy, and no plan has one.
    decided = [*names, *([] if budget.batch_size is None else ["batch_size"])]
    refuse_given(context, decided, "the plan decides this: omit the option")
    return decided


def write_run(
    rows: Sequence[learn.Row],
    facts: Mapping[str, object],
    out: Path,
    columns: Sequence[str],
    *,
    is_private: bool,
) -> None:
    """Write columns of the measurements to metrics.csv in ``out``, and facts to run.json."""
    learn.write_table(rows, out / "metrics.csv", columns=columns, is_private=is_private)
    save_json(facts, out / "run.json", is_private=is_private)
    print_note(f"wrote {out / 'metrics.csv'} and {out / 'run.json'}")
