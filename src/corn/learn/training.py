"""Private training of the user's own model on agents' data: one mechanism, or several compared."""

from __future__ import annotations

import copy
import difflib
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import networkx as nx
import torch
from torch import Tensor, nn

from corn.checks import require
from corn.covariance import (
    Decomposition,
    Design,
    Objective,
    ObjectiveLike,
    ThreatModel,
    default_objective,
)
from corn.covariance.design import read_objective
from corn.errors import CornWarning, InfeasibleError, InvalidArgumentError
from corn.learn.mechanism import Mechanism, TrainedWith, Trial, make_mechanisms
from corn.learn.metrics import Result
from corn.learn.optimizers import read_learning_rate
from corn.learn.problem import DataSource, SweepSettings, make_problem
from corn.learn.schedule import Schedule, ScheduleName, make_schedule
from corn.learn.sweep import run_sweep
from corn.learn.tasks import MeanLoss, Task
from corn.learn.tasks.module import make_task, split_vector, trained_parameters
from corn.learn.tuning import Comparison, tune
from corn.plan import Plan, make_plan
from corn.privacy import PrivacyBudget
from corn.topology import Network, choose_cooldown, load_network


def train(
    source: Plan | Network | str | Path | nx.Graph,
    budget: PrivacyBudget | None = None,
    mechanism: TrainedWith = "corn",
    *,
    model: nn.Module | Task,
    loss: MeanLoss | None = None,
    datasets: Sequence[DataSource] | Mapping[str, DataSource],
    validation: DataSource | None = None,
    test: DataSource | None = None,
    step_size: float | Schedule | None = None,
    threat: ThreatModel | None = None,
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
        mechanism: a mechanism as for `corn.design`, ``central`` and ``none`` included; or a design,
            a decomposition or a ``corn.learn.Mechanism`` for this budget.
        model: any ``torch.nn.Module`` without batch normalisation and dropout, or a ``Task``.
        loss: a function (outputs, targets) → mean loss, for a module.
        datasets: one per agent, in their order or by the labels of the graph; a data loader stands
            for its data set.
        validation: samples to measure on.
        test: samples to measure on.
        step_size: η₁, or a schedule such as ``corn.learn.Cosine(0.1)``; by default 0.01, or the
            optimizer's own learning rate.
        threat: the adversary that the noise must hold against; by default the plan's, or that of
            the given noise, or one insider (an eavesdropper if there is one agent only). For
            networks too large for a seed per pair, take ``ThreatModel(0)``, an eavesdropper.
        secure: draw noise from new secret keys, so that the models keep the promise and the result
            has a column ``epsilon``. Otherwise noise follows from the seeds, and nobody is
            protected. The promise covers the models of one run: another run on the same data
            spends ε again.
        options: ``objective``, as for `corn.design`; any field of
            :class:`corn.learn.SweepSettings`, such as ``num_steps``, ``seeds``, ``optimizer``,
            ``clipping`` or ``mixing``, by default those of the plan or the budget and a cool-down
            of one mixing time; and options of :func:`corn.learn.run_sweep`, such as ``on_step``.

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
    given = _take_settings(options, of=train)
    objective = options.pop("objective", None)
    plan = source if isinstance(source, Plan) else None
    if isinstance(source, Plan):
        # A plan was checked as a whole: another budget or other noise would void its promise.
        if any((budget, mechanism != "corn", threat, objective is not None)):
            raise InvalidArgumentError(
                "budget, mechanism, threat and objective must be those of the plan: leave them out"
            )
        network, target = source.network, source.objective
    else:
        network = source if isinstance(source, Network) else load_network(source)
        needs_none = isinstance(mechanism, str) and mechanism in ("corn", "none", "unclipped")
        if budget is None and (not needs_none or threat is not None or secure):
            raise InvalidArgumentError("mechanism, threat and secure need a budget, found None")
        if budget is None and "num_steps" not in given:
            raise InvalidArgumentError("num_steps must be given if there is no budget, found None")
        num_steps = 1 if budget is None else budget.num_steps
        target = _choose_objective(objective, network, num_steps, given)
        if secure and budget is not None:
            if isinstance(mechanism, Design | Decomposition | Mechanism):
                raise InvalidArgumentError("mechanism must not be noise: give a plan instead")
            # Noise that protects somebody must also cover the rounding of floating point.
            plan = make_plan(
                network,
                budget,
                mechanism=mechanism,
                threat=threat,
                objective=target,
                cooldown_steps=given.get("cooldown_steps"),
            )
    made = Mechanism.non_private() if plan is None else Mechanism.from_plan(plan)
    if plan is None and budget is not None:
        designed = make_mechanisms([mechanism], network, budget, objective=target, threat=threat)
        (made,) = _forget_kappa(designed, given)
    usual: dict[str, Any] = {"noise_keys": "secret" if secure else "none"}
    if plan is not None:
        usual |= {"cooldown_steps": plan.cooldown_steps, "dtype": plan.dtype}
    settings = _make_settings({**usual, **given}, network, made.budget or budget, target)
    problem = make_problem(task, datasets, network.agent_names, validation=validation, test=test)
    if step_size is None:
        step_size = 0.01 if settings.optimizer is None else read_learning_rate(settings.optimizer)
    trials = [Trial(made, make_schedule(step_size))]
    result = run_sweep(problem, network, trials, settings=settings, **options)
    for (_, _, seed), why in result.stopped.items():
        if len(result.stopped) == len(result.seeds):
            raise InfeasibleError(f"every run broke down; seed {seed} {why}")
        warnings.warn(f"seed {seed} {why}", CornWarning, stacklevel=2)
    return result


def _take_settings(options: dict[str, Any], *, of: Callable[..., Any]) -> dict[str, Any]:
    """Return the settings of sweeps among a function's options, without which those are left."""
    known = {"objective", *(field.name for field in fields(SweepSettings))}
    functions: list[Callable[..., Any]] = [of, run_sweep, *([tune] if of is compare else [])]
    for function in functions:
        known |= inspect.signature(function).parameters.keys()
    for name in options.keys() - known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f", perhaps {near[0]!r} is meant" if near else ""
        raise TypeError(f"{of.__name__}() has no argument {name!r}{hint}")
    names = [field.name for field in fields(SweepSettings) if field.name in options]
    given = {name: options.pop(name) for name in names}
    return {name: value for name, value in given.items() if value is not None}


def _forget_kappa(mechanisms: list[Mechanism], given: Mapping[str, Any]) -> list[Mechanism]:
    """Return mechanisms without κ where models are not mixed as their designs assume."""
    if "mixing" not in given and "local_rule" not in given:
        return mechanisms
    return [replace(each, disagreement_ratio=None) for each in mechanisms]


def _make_settings(
    given: Mapping[str, Any], network: Network, budget: PrivacyBudget | None, objective: Objective
) -> SweepSettings:
    """Return the settings that a caller gave, and those of network and budget for the others."""
    # The momentum that the designs count on; optimizers and rules have their own.
    is_own = "optimizer" in given or "local_rule" in given
    usual: dict[str, Any] = {"momentum": 0.0 if is_own else objective.momentum}
    # A budget of unit sample counted on its batch size; ``Simulation`` refuses another.
    usual["batch_size"] = None if budget is None else budget.batch_size
    usual["num_steps"] = given.get("num_steps") or (1 if budget is None else budget.num_steps)
    if "cooldown_steps" not in given:
        usual["cooldown_steps"] = choose_cooldown(network, usual["num_steps"])
    return SweepSettings(**{**usual, **given, "seeds": tuple(given.get("seeds", (0,)))})


def _choose_objective(
    objective: ObjectiveLike | None, network: Network, num_steps: int, given: Mapping[str, Any]
) -> Objective:
    """Return the objective of designs: the caller's, or the default for this momentum."""
    if objective is not None:
        return read_objective(objective, network, num_steps)
    is_own = "optimizer" in given or "local_rule" in given
    momentum = given.get("momentum", 0.0 if is_own else None)
    return default_objective(num_steps, mixing=network.mixing, momentum=momentum)


def load_parameters(model: nn.Module, vector: Tensor) -> nn.Module:
    """Return a copy of the model with trained parameters from ``parameters[run, agent]``."""
    # The caller's model stays unchanged: it may be loaded with the parameters of several agents.
    filled = copy.deepcopy(model)
    trained = trained_parameters(filled)
    expected = sum(parameter.numel() for parameter in trained)
    shape = tuple(vector.shape)
    require(shape == (expected,), "vector", f"the model's {expected} parameters", f"shape {shape}")
    # Copied into the model's own memory and type: training the copy must not change the result.
    pieces = split_vector(vector.detach(), [parameter.shape for parameter in trained])
    with torch.no_grad():
        for parameter, piece in zip(trained, pieces, strict=True):
            parameter.copy_(piece)
    return filled


MECHANISMS_TO_COMPARE = ("corn", "decor", "ldp", "central", "none")


def compare(
    network: Network | str | Path | nx.Graph,
    budget: PrivacyBudget,
    *,
    model: nn.Module | Task,
    loss: MeanLoss | None = None,
    datasets: Sequence[DataSource] | Mapping[str, DataSource],
    validation: DataSource | None = None,
    test: DataSource | None = None,
    mechanisms: str | Sequence[TrainedWith] | Mapping[str, TrainedWith] = MECHANISMS_TO_COMPARE,
    step_sizes: Sequence[float] = (),
    schedule: ScheduleName = "constant",
    threat: ThreatModel | None = None,
    **options: Any,
) -> Comparison:
    """Simulate training with several mechanisms, at the same ε and on the same batches.

    Arguments are those of :func:`train`, except for these. ``budget`` is the promise of every
    mechanism. ``validation`` has the samples by which step sizes are chosen; by default these are
    the agents' own data. ``mechanisms`` are names, records and functions, as for `corn.design`,
    ``central`` and ``none`` among them; a mapping has names for tables. ``step_sizes`` are those to
    try; by default a search starts where clip and noise suggest. ``threat`` is the adversary of
    ``corn`` and ``ldp``; by default one insider.

    Noise follows from public seeds: the models protect nobody. On private data every run counts;
    see :func:`corn.learn.price_tuning`.

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
    given = _take_settings(options, of=compare)
    # One objective for all mechanisms: one designed for another would look worse than it is.
    target = _choose_objective(options.pop("objective", None), chosen, budget.num_steps, given)
    problem = make_problem(
        make_task(model, loss), datasets, chosen.agent_names, validation=validation, test=test
    )
    designed = make_mechanisms(mechanisms, chosen, budget, objective=target, threat=threat)
    settings = _make_settings(given, chosen, budget, target)
    options |= {"step_sizes": step_sizes, "schedule": schedule}
    return tune(problem, chosen, _forget_kappa(designed, given), settings=settings, **options)
