"""``make_private``: the user's own training loop for one agent of a network, or for all.

A loop drives the agent's steps: each ``optimizer.step()`` hands over a gradient, and returns once
the next step has begun. While the loop computes, the links' own threads receive messages and send
heartbeats.
"""

from __future__ import annotations

import atexit
import hashlib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import networkx as nx
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from corn.checks import require, require_length
from corn.distributed.agent import run_steps
from corn.distributed.journal import Reports
from corn.distributed.keyring import find_terms
from corn.distributed.rendezvous import Rendezvous
from corn.distributed.requirements import Requirements
from corn.distributed.results import AgentResult
from corn.distributed.settings import RunSettings
from corn.errors import InvalidArgumentError
from corn.learn.batches import require_fitting_samples
from corn.learn.mechanism import Mechanism
from corn.learn.own_loop import (
    HyperParameters,
    LoaderPart,
    PrivateLoader,
    PrivateOptimizer,
    PrivateTraining,
    ScheduleFactory,
    Turn,
    Turns,
    number_rows,
    simulate_turns,
    tabulate_schedule,
)
from corn.learn.partition import partition_iid
from corn.learn.problem import TrainingProblem, require_plain_loader
from corn.learn.step import UpdateRule, require_one_gradient
from corn.learn.sweep import Interruption
from corn.learn.user_model import UserModel
from corn.noise import ReleaseLedger
from corn.plan import Plan, make_plan
from corn.privacy import PrivacyBudget
from corn.privacy.composition import Expense
from corn.topology import Network, load_network


def make_private(
    source: Plan | Network | str | Path | nx.Graph,
    budget: PrivacyBudget | None = None,
    *,
    module: nn.Module,
    optimizer: Optimizer,
    data_loader: DataLoader[Any] | Sequence[DataLoader[Any]],
    rendezvous: Rendezvous | None = None,
    out: Path | None = None,
    settings: RunSettings | None = None,
    requirements: Requirements | None = None,
    schedule: ScheduleFactory | None = None,
    seed: int = 0,
    secure: bool = False,
    rejoins: bool = False,
) -> PrivateTraining:
    """Return module, optimizer and loader with which the user's own training loop is private.

    The loop has for each batch of the loader a backward pass and ``optimizer.step()``. With unit
    ``agent`` the backward pass is ``loss.backward()``, for any loss. With unit ``sample`` it is
    ``optimizer.backward(losses)``, for one loss of each sample
    (:meth:`~corn.learn.own_loop.PrivateOptimizer.backward`). The gradient is clipped as the budget
    says, gets the agent's share of the noise, and is rounded to the plan's grid. The user's
    optimizer sees the result alone, so its step is post-processing. Then models are mixed.

    Between a batch and its step the loop may read everything and change nothing: parameters, frozen
    ones included, the optimizer's state and its settings must be those that CorN has left. Whatever
    else others can see must not depend on private data: at which step the loop ends, also by an
    exception, and how long a step takes.

    Args:
        source: a plan; or the network and a budget, for which a plan is made.
        budget: the promise, unless there is a plan.
        module: only parameters with ``requires_grad`` are trained, get noise and are sent; the rest
            must not change, which is checked after every step. Batch normalisation is refused.
        optimizer: of the module's parameters. With exact sums it makes one step along the average
            of all agents' releases, and may be any that needs one gradient for a step. Under
            gossip, with noise that is correlated between agents, it must be ``torch.optim.SGD``,
            with or without momentum. L-BFGS, which needs several gradients, is refused.
        data_loader: of this agent. For a simulation of all agents one for each, or, without
            ``secure``, one whose samples are dealt out at random. Its data set and collate function
            are used; batches are drawn by CorN, of the budget's size or else the loader's.
        rendezvous: of a running network, in which this process is one agent, with its folder of
            keys; :func:`corn.distributed.join` makes it. Without it all agents
            are simulated here: the loader yields the batch of one agent after the other, and after
            each step of all agents the module is the average of their models. With exact sums all
            batches of a step are taken at one model, which changes after the last agent's step.
        out: the folder of an agent's run.
        settings: of an agent's run; step sizes are the optimizer's, and it cannot resume.
        requirements: the owner's, of the plan and of all releases of the agent's data.
        schedule: returns, for the optimizer that it is given, a scheduler of torch that depends on
            the number of the step alone. It advances once with each step of the network. Its values
            for all steps are computed before the first one.
        seed: of noise and batches of a simulation; public, so that its models protect nobody.
        secure: draw noise and batches of a simulation from new secret keys, so that the models keep
            the promise.
        rejoins: join a run of exact sums under way, which lost this agent, with the model and the
            optimizer's state of a neighbour.

    With unit ``sample`` the first dimension of each layer's inputs must number the samples, and the
    collate function must make each row from its own sample alone.

    >>> data = torch.utils.data.TensorDataset(torch.randn(80, 3), torch.randint(0, 2, (80,)))
    >>> model = nn.Linear(3, 2)
    >>> model, optimizer, loader = make_private(
    ...     "ring:4",
    ...     PrivacyBudget(5, 1e-5, num_steps=3, clip=0.1),
    ...     module=model,
    ...     optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    ...     data_loader=DataLoader(data, batch_size=20),
    ... )
    >>> for inputs, targets in loader:  # one pass over the data: one step of four agents
    ...     nn.functional.cross_entropy(model(inputs), targets).backward()
    ...     optimizer.step()
    >>> 0 < optimizer.get_epsilon(1e-5) < 5
    True
    """
    plan = _find_plan(source, budget)
    model = UserModel(module, clips_samples=plan.budget.unit == "sample")
    _check_optimizer(optimizer, module, plan)
    table = None
    if schedule is not None:
        table = tabulate_schedule(optimizer, schedule, plan.budget.num_steps)
    if rendezvous is None:
        if out is not None or settings is not None or requirements is not None or rejoins:
            raise InvalidArgumentError(
                "out, settings, requirements and rejoins belong to an agent of a network, found no "
                "rendezvous: corn.distributed.join() makes it"
            )
        return _simulate(plan, model, optimizer, data_loader, table, seed=seed, secure=secure)
    if secure or seed:
        raise InvalidArgumentError("seed and secure are for simulations: agents have keys")
    if not isinstance(data_loader, DataLoader):
        raise InvalidArgumentError("data_loader must be that of this agent alone, found several")
    # Optimizers are public, and must be the same: agents with other steps would not agree.
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    rule = f"loop with {type(optimizer).__name__} {groups!r}"
    if table is not None:
        rule += f" and schedule {hashlib.sha256(repr(table).encode()).hexdigest()[:16]}"
    if rejoins and plan.network.mixing == "gossip":
        raise InvalidArgumentError(
            "rejoins must be False under gossip, where each agent has an optimizer of its own"
        )
    _check_loader(data_loader, plan)
    chosen = settings or RunSettings()
    require(not chosen.resume, "resume", "False: optimizers have no checkpoints", True)
    if chosen.batch_of(plan) is None:
        chosen = replace(chosen, batch_size=data_loader.batch_size)
    agent, part, ledgers = rendezvous.agent, LoaderPart.of(data_loader), list[ReleaseLedger]()
    problem = TrainingProblem(model, number_rows(len(part.rows)))

    def take_turns(update: UpdateRule) -> Turns:
        steps = run_steps(
            plan,
            problem,
            rendezvous=rendezvous,
            out=out,
            settings=chosen,
            # Signals are the user's: a script that is interrupted ends, and its agent with it.
            reports=Reports(interruption=Interruption(), on_ledger=ledgers.append),
            requirements=requirements,
            # Published as the description of the data, which the handshake compares.
            data=rule,
            rejoins=rejoins,
            update=update,
        )
        with closing(steps):
            while True:
                try:
                    own = next(steps)
                except StopIteration as end:
                    result: AgentResult = end.value
                    return result.parameters
                yield Turn(agent, own, own.parameters)

    def list_expenses(_: int) -> list[Expense]:
        # What the ledger counts, in all runs and under all plans for survivors.
        terms, (ledger,) = find_terms(plan, agent), ledgers
        spent = terms.budget.num_steps - ledger.remaining
        return [Expense(terms, ledger.precision, spent)]

    private = PrivateOptimizer(
        optimizer,
        model,
        plan,
        take_turns,
        list_expenses=list_expenses,
        is_simulated=False,
        schedule=table,
    )
    # A script that fails closes its links here. Later the interpreter has stopped the threads that
    # do it.
    atexit.register(private.leave)
    batches = _count_batches(len(part.rows), plan, data_loader.batch_size)
    loader = PrivateLoader(private, {agent: part}, batches_per_pass=batches)
    return PrivateTraining(module, private, loader)


def _simulate(
    plan: Plan,
    model: UserModel,
    optimizer: Optimizer,
    data_loader: DataLoader[Any] | Sequence[DataLoader[Any]],
    table: list[HyperParameters] | None,
    *,
    seed: int,
    secure: bool,
) -> PrivateTraining:
    n = plan.num_agents
    if isinstance(data_loader, DataLoader):
        if secure:
            # By their places in the data set: one sample more or less moves all others.
            raise InvalidArgumentError(
                "data_loader must be a list of one for each agent with secure=True, found a single "
                "one: to deal its samples out is a simulation, which no ε covers; divide the data "
                "beforehand, or leave secure out"
            )
        _check_loader(data_loader, plan)
        count = len(data_loader.dataset)  # type: ignore[arg-type]
        rows = partition_iid([0] * count, n, seed=seed)
        parts = [LoaderPart.of(data_loader, own.tolist()) for own in rows]
        batch_size = data_loader.batch_size
    else:
        require_length("data_loader", len(data_loader), n, per="agent")
        for loader in data_loader:
            _check_loader(loader, plan)
        parts = [LoaderPart.of(loader) for loader in data_loader]
        batch_size = data_loader[0].batch_size
    sizes = [len(part.rows) for part in parts]
    # Longer models than the proof for floats covers are refused (docs/floats.md).
    plan.check_parameters(model.num_parameters)
    require_fitting_samples(plan.budget, sizes)

    def take_turns(update: UpdateRule) -> Turns:
        return simulate_turns(
            plan, model, sizes, update, batch_size=batch_size, seed=seed, secure=secure
        )

    @cache
    def find_precisions() -> list[float]:
        precisions: list[float] = Mechanism.from_plan(plan).precision.tolist()
        return precisions

    def list_expenses(begun: int) -> list[Expense]:
        # Agents that have not released yet in a step count too.
        return [
            Expense(find_terms(plan, agent), precision, begun)
            for agent, precision in enumerate(find_precisions())
        ]

    private = PrivateOptimizer(
        optimizer,
        model,
        plan,
        take_turns,
        list_expenses=list_expenses,
        is_simulated=not secure,
        schedule=table,
    )
    batches = n * _count_batches(sum(sizes) / n, plan, batch_size)
    shown = PrivateLoader(private, dict(enumerate(parts)), batches_per_pass=batches)
    return PrivateTraining(model.module, private, shown)


def _count_batches(num_samples: float, plan: Plan, batch_size: int | None) -> int:
    """Return how many batches are a pass over the data, on average."""
    query = plan.budget.queries[0]
    # From the plan alone: a loop over epochs makes this number public. Unit agent has no other
    # number than that of the agent's samples.
    if query.steps_per_pass is not None:
        return query.steps_per_pass
    if query.sampling_rate is not None:
        return max(1, round(1 / query.sampling_rate))
    size = query.batch_size or batch_size or num_samples
    return max(1, round(num_samples / size))


def _find_plan(
    source: Plan | Network | str | Path | nx.Graph, budget: PrivacyBudget | None
) -> Plan:
    if isinstance(source, Plan):
        if budget is not None:
            raise InvalidArgumentError("budget must be None with a plan, which has its own")
        return source
    if budget is None:
        raise InvalidArgumentError("budget must be given with a network, found None")
    network = source if isinstance(source, Network) else load_network(source)
    return make_plan(network, budget)


def _check_optimizer(optimizer: Optimizer, module: nn.Module, plan: Plan) -> None:
    require_one_gradient(optimizer)
    # Shares of noise that cancel in the sum of all agents still do after a step that is linear in
    # the gradient with the same factors everywhere: SGD with momentum and weight decay. Adam
    # divides by each agent's own second moments. A subclass may do anything. With exact sums there
    # is one optimizer, on the average release.
    shared = zip(plan.decomposition.seed_groups, plan.decomposition.factors, strict=True)
    is_correlated = any(len(group) > 1 and factor.any() for group, factor in shared)
    is_gossip = plan.network.mixing == "gossip"
    if is_gossip and is_correlated and type(optimizer) is not torch.optim.SGD:
        raise InvalidArgumentError(
            "optimizer must be torch.optim.SGD, as the noise of this plan is correlated between "
            f"agents, found {type(optimizer).__name__}: agents whose steps are not linear in the "
            "gradient would not cancel each other's noise; use SGD, with or without momentum, "
            "exact sums (mixing='sum'), or a plan with independent noise (mechanism ldp)"
        )
    own = {id(p) for p in module.parameters() if p.requires_grad}
    held = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    # A parameter outside the optimizer would get noise and never move; one outside the module would
    # follow gradients without noise.
    if own != held:
        raise InvalidArgumentError(
            "optimizer must have the module's parameters with requires_grad, all of them and no "
            f"others, found {len(held & own)} of {len(own)} and {len(held - own)} others"
        )


def _check_loader(loader: DataLoader[Any], plan: Plan) -> None:
    require_plain_loader(loader)
    if isinstance(loader.dataset, IterableDataset):
        raise InvalidArgumentError(
            "data_loader must have a data set with items by number, as batches are drawn from it "
            "at random, found a stream: read it into a list first"
        )
    if not len(loader.dataset):  # type: ignore[arg-type]
        raise InvalidArgumentError("data_loader must have at least one sample, found none")
    if plan.budget.unit == "sample":
        LoaderPart.of(loader).check()
