"""Mechanisms side by side on the user's own model: one call, one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import networkx as nx
from torch import nn

from corn.covariance import Objective, ThreatModel, default_objective
from corn.covariance.objective import momentum_of
from corn.learn.named_methods import make_methods
from corn.learn.problem import DataSource, TrainingProblem, make_problem
from corn.learn.result import Result, make_frame
from corn.learn.schedule import ScheduleName
from corn.learn.search import search_step_sizes
from corn.learn.settings import SweepSettings
from corn.learn.sweep import run_sweep
from corn.learn.tasks import MeanLoss, Task
from corn.learn.training import make_task
from corn.learn.tuning import Tuning, make_grid, read_tuning, summarize_methods
from corn.privacy import PrivacyBudget
from corn.topology import Network, choose_cooldown, load_network

MECHANISMS_TO_COMPARE = ("corn", "decor", "ldp", "central", "none")
"""CorN, two mechanisms without a server, a trusted server, and no noise."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """Mechanisms at the same ε, each at its best step size.

    Attributes:
        problem: what was trained.
        tuning: the best step size of each mechanism, and the result of all runs.
    """

    problem: TrainingProblem
    tuning: Tuning

    @property
    def result(self) -> Result:
        """All runs: measurements and models."""
        return self.tuning.result

    @property
    def summary(self) -> dict[str, dict[str, object]]:
        """Scores, ε and adversary of each mechanism, by its name."""
        return summarize_methods(self.problem, self.tuning)

    def to_pandas(self) -> Any:
        """Return the summary as a data frame with one row for each mechanism."""
        rows = [{"mechanism": name, **facts} for name, facts in self.summary.items()]
        # Columns that would hold a dictionary or an array in each cell of the frame.
        hidden = ("intervals", "simulated_epsilon_of_each_agent", "epsilon_of_each_agent")
        return make_frame(
            [{k: v for k, v in row.items() if k not in hidden} for row in rows]
        ).set_index("mechanism")


def compare(
    network: Network | str | Path | nx.Graph,
    budget: PrivacyBudget,
    *,
    model: nn.Module | Task,
    loss: MeanLoss | None = None,
    datasets: Sequence[DataSource],
    validation: DataSource | None = None,
    test: DataSource | None = None,
    mechanisms: Sequence[str] = MECHANISMS_TO_COMPARE,
    step_sizes: Sequence[float] = (),
    schedule: ScheduleName = "constant",
    batch_size: int | None = None,
    seeds: Sequence[int] = (0,),
    objective: Objective | None = None,
    threat: ThreatModel | None = None,
    device: str = "cpu",
    **options: Any,
) -> Comparison:
    """Simulate training with several mechanisms, at the same ε and on the same batches.

    Args:
        network: a network, a spec or file, or a graph.
        budget: the promise of every mechanism.
        model: any module without batch normalisation and dropout, or a ``Task``.
        loss: for a module: (outputs, targets) → mean loss.
        datasets: one per agent.
        validation: samples by which step sizes are chosen; by default the agents' own data.
        test: samples to measure on.
        mechanisms: names, ``central`` and ``none`` among them, or covariances of your own:
            ``NAME=R.npy``, ``NAME=FILE.py:FUNCTION``.
        step_sizes: to try; by default a search that starts where clip and noise suggest.
        schedule: of the step sizes.
        batch_size: samples per mini-batch; by default the budget's, else each agent's whole data.
        seeds: one run for each.
        objective: the matrix that designs minimise.
        threat: the adversary of ``corn`` and ``ldp``; by default one insider.
        device: the torch device to compute on.
        options: further options of :func:`corn.learn.sweep.run_sweep`.

    Noise follows from public seeds: the models protect nobody. On private data every run counts;
    see :func:`corn.learn.price_all`.

    >>> import torch
    >>> samples = [(torch.randn(20, 3), torch.randint(0, 2, (20,))) for _ in range(3)]
    >>> found = compare(
    ...     "ring:3",
    ...     PrivacyBudget(5, 1e-5, num_steps=3, clip=0.1),
    ...     model=nn.Linear(3, 2),
    ...     loss=nn.functional.cross_entropy,
    ...     datasets=samples,
    ...     mechanisms=("ldp", "none"),
    ...     step_sizes=(0.1,),
    ... )
    >>> list(found.summary)
    ['ldp', 'none']
    """
    chosen = network if isinstance(network, Network) else load_network(network)
    # One objective for all mechanisms: one designed for another would look worse than it is.
    target = objective or default_objective(budget.num_steps, mixing=chosen.mixing)
    problem = make_problem(
        make_task(model, loss), datasets, chosen.num_agents, validation=validation, test=test
    )
    methods = make_methods(mechanisms, chosen, budget, objective=target, threat=threat)
    settings = SweepSettings(
        num_steps=budget.num_steps,
        batch_size=budget.batch_size if batch_size is None else batch_size,
        seeds=tuple(seeds),
        # Mixing after the last step is post-processing: it costs no privacy (docs/theory.md, “More
        # mixing is free”).
        cooldown_steps=choose_cooldown(chosen, budget.num_steps),
        # The momentum that the designs count on: trained with another, they would be suboptimal.
        momentum=momentum_of(target),
        device=device,
    )
    # Without validation samples step sizes are chosen by the loss on the agents' own data.
    column = "train_loss" if validation is None else "validation_loss"
    if step_sizes:
        trials = make_grid(methods, step_sizes=step_sizes, schedule=schedule)
        result = run_sweep(problem, chosen, trials, settings=settings, **options)
    else:
        result = search_step_sizes(
            problem,
            chosen,
            methods=methods,
            schedule=schedule,
            column=column,
            settings=settings,
            **options,
        )
    return Comparison(problem, read_tuning(result, column))
