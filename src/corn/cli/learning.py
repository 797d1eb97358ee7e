"""What ``corn train`` and ``corn launch`` share: what to learn, and what a run leaves behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from corn import learn
from corn.cli.output import print_note, save_json
from corn.learn.names import USUAL_BATCH_SIZE, ModelName, WorkloadName, usual_schedule
from corn.learn.schedule import ScheduleName

LEARNING = "Learning"


@dataclass(frozen=True)
class LearningOptions:
    """What to learn from which data, in what batches."""

    task: Annotated[
        WorkloadName,
        typer.Option(help="What to learn; a9a and mnist: see corn data.", rich_help_panel=LEARNING),
    ]
    model: Annotated[
        ModelName | None,
        typer.Option(
            help="linear, network (32 hidden units) or cnn. (Default: linear; mnist: network.)",
            rich_help_panel=LEARNING,
        ),
    ] = None
    partition: Annotated[
        str,
        typer.Option(
            help="How samples are dealt out: iid, dirichlet:ALPHA or shards:K.",
            rich_help_panel=LEARNING,
        ),
    ] = "dirichlet:10"
    data_seed: Annotated[
        int, typer.Option(min=0, help="Of split and partition.", rich_help_panel=LEARNING)
    ] = 0
    l2: Annotated[
        float, typer.Option(min=0, help="Penalty of linear models.", rich_help_panel=LEARNING)
    ] = 1e-4
    cache: Annotated[Path | None, typer.Option(help="Where data sets are kept.")] = None
    stand_in: Annotated[
        bool,
        typer.Option(help="Let an embedded data set stand in for an absent one, and say so."),
    ] = True
    batch_size: Annotated[
        int,
        typer.Option(
            min=1, help="Samples a mini-batch, if the plan names none.", rich_help_panel=LEARNING
        ),
    ] = USUAL_BATCH_SIZE
    schedule: Annotated[
        ScheduleName | None,
        typer.Option(
            help="How step sizes go on. (Default: constant; quadratic: inverse-sqrt.)",
            rich_help_panel=LEARNING,
        ),
    ] = None

    @property
    def is_quadratic(self) -> bool:
        """Whether the task is the paper's quadratic, which has step sizes of its own."""
        return self.task == "quadratic"

    def choose_schedule(self) -> ScheduleName:
        """The schedule asked for, or the paper's."""
        return self.schedule or usual_schedule(self.task)

    def make_workload(self) -> learn.Workload:
        """The workload, yet to be built for a number of agents."""
        return learn.Workload(
            self.task,
            self.model,
            self.partition,
            self.data_seed,
            self.l2,
            self.cache,
            self.stand_in,
        )


def write_run(
    rows: Sequence[learn.Row],
    facts: Mapping[str, object],
    out: Path,
    *,
    columns: Sequence[str] | None = None,
    is_private: bool = False,
) -> None:
    """Write all or some columns of measurements to metrics.csv in ``out``, facts to run.json."""
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

    ``agent_samples`` says how much data each agent holds; None leaves that out.
    """
    from corn.report import plot_training, save_figure

    save_figure(plot_training(rows, schedules, agent_samples, title=title), path)
    print_note(f"wrote {path}")
