"""Private training of the user's own model on agents' data: one mechanism, or several compared."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import networkx as nx
import torch
from torch import Tensor, nn

from corn.covariance import (
    Decomposition,
    Design,
    ObjectiveLike,
    ThreatModel,
    default_objective,
    design,
)
from corn.covariance.design import read_objective
from corn.errors import CornWarning, InfeasibleError, InvalidArgumentError
from corn.learn.mechanism import Mechanism, Trial, make_mechanisms
from corn.learn.metrics import Result
from corn.learn.problem import DataSource, SweepSettings, make_problem
from corn.learn.schedule import Schedule, ScheduleName, make_schedule
from corn.learn.step import OptimizerFactory, read_learning_rate
from corn.learn.sweep import run_sweep
from corn.learn.tasks import MeanLoss, ModuleTask, Task
from corn.learn.tasks.module import trained_parameters
from corn.learn.tuning import Comparison, tune
from corn.plan import Plan, make_plan
from corn.privacy import PrivacyBudget
from corn.topology import Network, choose_cooldown, load_network


def train(
    source: Plan | Network | str | Path | nx.Graph,
    budget: PrivacyBudget | None = None,
    noise: Design | Decomposition | None = None,
    *,
    model: nn.Module | Task,
    loss: MeanLoss | None = None,
    datasets: Sequence[DataSource],
    validation: DataSource | None = None,
    test: DataSource | None = None,
    step_size: float | Schedule | None = None,
    schedule: ScheduleName = "constant",
    threat: ThreatModel | None = None,
    num_steps: int | None = None,
    batch_size: int | None = None,
    seeds: Sequence[int] = (0,),
    cooldown_steps: int | None = None,
    momentum: float | None = None,
    optimizer: OptimizerFactory | None = None,
    dtype: str | None = None,
    device: str = "cpu",
    secure: bool = False,
    **options: Any,
) -> Result:
    """Train one model per agent by differentially private DSGD: the paper's Algorithm 1.

    Args:
        source: a plan; or the network, as a ``Network``, a spec such as ``"ring:8"``, a file, or a
            graph of networkx.
        budget: the promise; its unit decides what is clipped. ``PrivacyBudget.for_sizes`` makes one
            for samples from the agents' numbers of samples. None trains without privacy, or with
            the plan's budget.
        noise: a design or decomposition for this budget; by default the plan's, or a design of
            mechanism ``corn`` against ``threat`` with the default objective.
        model: any ``torch.nn.Module`` without batch normalisation and dropout, or a ``Task``.
        loss: for a module: (outputs, targets) → mean loss.
        datasets: one per agent; a data loader stands for its data set.
        validation: samples to measure on.
        test: samples to measure on.
        step_size: η₁, or a schedule; by default 0.01, or the optimizer's own learning rate.
        schedule: ``constant``, ``inverse-sqrt`` or ``cosine``, if ``step_size`` is a number.
        threat: the adversary that the noise must hold against; by default the plan's, or that of
            the given noise, or one insider (an eavesdropper if there is one agent only). For
            networks too large for a seed per pair, take ``ThreatModel(0)``, an eavesdropper.
        num_steps: T; by default the budget's.
        batch_size: samples per mini-batch; by default the budget's, else each agent's whole data.
        seeds: one run for each.
        cooldown_steps: steps after the last that only mix, so that agents agree on one model; by
            default the plan's, or one mixing time of the network. They cost messages, not privacy.
        momentum: β of the average of releases that agents step along; by default the plan's, or
            that of ``default_objective``. Noise that is designed here is designed for it.
        optimizer: a function of a list of parameters that returns an optimizer of torch, such as
            ``torch.optim.Adam``; only for exact sums. It steps along the average of all releases,
            the same at all agents, and replaces ``momentum``. ``step_size`` and ``schedule`` set
            its learning rate. It sees the parameters as one vector.
        dtype: ``float32`` or ``float64``; by default the plan's, or float32.
        device: the torch device to compute on.
        secure: draw noise from new secret keys, so that the models keep the promise and the result
            has a column ``epsilon``. Otherwise noise follows from the seeds, and nobody is
            protected. The promise covers the models of one run: another run on the same data
            spends ε again.
        options: further options of :func:`corn.learn.sweep.run_sweep`: evaluation steps,
            checkpoints, progress.

    Raises:
        InfeasibleError: every run broke down. If only some did, a warning names them.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> data = [(rng.standard_normal((20, 3)), rng.integers(0, 2, 20)) for _ in range(4)]
    >>> result = train(
    ...     "ring:4",
    ...     PrivacyBudget(5, 1e-5, num_steps=10, clip=0.1),
    ...     model=nn.Linear(3, 2),
    ...     loss=nn.functional.cross_entropy,
    ...     datasets=data,
    ... )
    >>> result.status, result.parameters.shape, round(result.last_rows[0]["simulated_epsilon"], 6)
    ('complete', torch.Size([1, 4, 8]), 5.0)
    """
    task = make_task(model, loss)
    if step_size is None:
        step_size = 0.01 if optimizer is None else read_learning_rate(optimizer)
    if optimizer is not None:
        # The optimizer has a momentum of its own; settings refuse a second one.
        momentum = momentum or 0.0
    if isinstance(source, Plan):
        # A plan was checked as a whole: another budget or other noise would void its promise.
        if budget is not None or noise is not None or threat is not None:
            raise InvalidArgumentError(
                "budget, noise and threat must be None with a plan, which has all three"
            )
        plan: Plan | None = source
        network = source.network
        # The noise of a plan was designed for its momentum.
        momentum = source.momentum if momentum is None else momentum
    else:
        plan = None
        network = source if isinstance(source, Network) else load_network(source)
        if budget is None and (noise is not None or threat is not None or secure):
            raise InvalidArgumentError("noise, threat and secure need a budget, found None")
    objective = default_objective(
        1 if budget is None else budget.num_steps, mixing=network.mixing, momentum=momentum
    )
    if secure and plan is None and budget is not None:
        if noise is not None:
            raise InvalidArgumentError("noise must be None with secure=True: give a plan instead")
        # Noise that protects somebody must also cover the rounding of floating point.
        plan = make_plan(
            network, budget, threat=threat, objective=objective, cooldown_steps=cooldown_steps
        )
    if plan is not None:
        mechanism = Mechanism.from_plan(plan)
    elif budget is None:
        mechanism = Mechanism.non_private()
    else:
        if noise is None:
            noise = design(network, budget, objective=objective, threat=threat)
        name = noise.mechanism if isinstance(noise, Design) else "given noise"
        mechanism = Mechanism.private(name, noise, budget, threat=threat)
    if num_steps is None:
        if mechanism.budget is None:
            raise InvalidArgumentError("num_steps must be given if there is no budget, found None")
        num_steps = mechanism.budget.num_steps
    if cooldown_steps is None:
        # The plan's number, so that a simulation ends as its agents do.
        planned = None if plan is None else plan.cooldown_steps
        cooldown_steps = choose_cooldown(network, num_steps) if planned is None else planned
    query = mechanism.query
    settings = SweepSettings(
        num_steps=num_steps,
        # A budget of unit sample counted on its batch size; ``Simulation`` refuses another.
        batch_size=batch_size if batch_size is not None or query is None else query.batch_size,
        seeds=tuple(seeds),
        cooldown_steps=cooldown_steps,
        momentum=objective.momentum,
        optimizer=optimizer,
        dtype=dtype or ("float32" if plan is None else plan.dtype),
        device=device,
        noise_keys="secret" if secure else "none",
    )
    problem = make_problem(task, datasets, network.num_agents, validation=validation, test=test)
    trials = [Trial(mechanism, make_schedule(step_size, schedule))]
    result = run_sweep(problem, network, trials, settings=settings, **options)
    for (_, _, seed), breakdown in result.stopped.items():
        # There is one trial, so that runs are as many as seeds.
        if len(result.stopped) == len(result.seeds):
            raise InfeasibleError(f"every run broke down; seed {seed} {breakdown}")
        warnings.warn(f"seed {seed} {breakdown}", CornWarning, stacklevel=2)
    return result


def load_parameters(model: nn.Module, vector: Tensor) -> nn.Module:
    """Return a copy of the model with parameters from a result, such as ``parameters[run, agent]``.

    Frozen parameters are not in the vector and keep their values.
    """
    # The caller's model stays unchanged: it may be loaded with the parameters of several agents.
    filled = copy.deepcopy(model)
    trained = trained_parameters(filled)
    expected = sum(parameter.numel() for parameter in trained)
    if vector.shape != (expected,):
        raise InvalidArgumentError(
            f"vector must have the model's {expected} parameters, found shape "
            f"{tuple(vector.shape)}: take parameters[run, agent]"
        )
    # Copied into the model's own memory and type: training the copy must not change the result.
    pieces = torch.split(vector.detach(), [parameter.numel() for parameter in trained])
    with torch.no_grad():
        for parameter, piece in zip(trained, pieces, strict=True):
            parameter.copy_(piece.view_as(parameter))
    return filled


def make_task(model: nn.Module | Task, loss: MeanLoss | None) -> Task:
    """Return a task unchanged, or a task made from a module and its loss."""
    if isinstance(model, nn.Module):
        if loss is None:
            raise InvalidArgumentError(
                "loss must be given with a module, found None: try "
                "torch.nn.functional.cross_entropy"
            )
        return ModuleTask(model, loss)
    if loss is not None:
        raise InvalidArgumentError(
            f"loss must be None for a {type(model).__name__}, which has its own: give a loss with "
            "a torch.nn.Module only"
        )
    return model


MECHANISMS_TO_COMPARE = ("corn", "decor", "ldp", "central", "none")
"""CorN, two mechanisms without a server, a trusted server, and no noise."""


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
    objective: ObjectiveLike | None = None,
    threat: ThreatModel | None = None,
    device: str = "cpu",
    **options: Any,
) -> Comparison:
    """Simulate training with several mechanisms, at the same ε and on the same batches.

    Arguments are those of :func:`train`, except for these. ``budget`` is the promise of every
    mechanism. ``validation`` has the samples by which step sizes are chosen; by default these are
    the agents' own data. ``mechanisms`` are names, ``central`` and ``none`` among them, or
    covariances of your own: ``NAME=R.npy``, ``NAME=FILE.py:FUNCTION``. ``step_sizes`` are those to
    try; by default a search starts where clip and noise suggest. ``objective`` is what designs
    minimise, as for :func:`corn.design`. ``threat`` is the adversary of ``corn`` and ``ldp``; by
    default one insider.

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
    target = read_objective(objective, chosen, budget.num_steps)
    problem = make_problem(
        make_task(model, loss), datasets, chosen.num_agents, validation=validation, test=test
    )
    made = make_mechanisms(mechanisms, chosen, budget, objective=target, threat=threat)
    settings = SweepSettings(
        num_steps=budget.num_steps,
        batch_size=budget.batch_size if batch_size is None else batch_size,
        seeds=tuple(seeds),
        # Mixing after the last step is post-processing: it costs no privacy.
        cooldown_steps=choose_cooldown(chosen, budget.num_steps),
        # The momentum that the designs count on: trained with another, they would be suboptimal.
        momentum=target.momentum,
        device=device,
    )
    return tune(
        problem,
        chosen,
        made,
        settings=settings,
        step_sizes=step_sizes,
        schedule=schedule,
        **options,
    )
