"""``make_private`` for one agent of a network: the user's own training loop drives its steps.

Each ``optimizer.step()`` hands over a gradient, and returns once the next step has begun.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from corn.distributed.agent import run_steps
from corn.distributed.journal import Reports
from corn.distributed.rendezvous import Rendezvous
from corn.distributed.requirements import Requirements
from corn.distributed.results import AgentResult
from corn.distributed.settings import RunSettings
from corn.errors import CornError, InvalidArgumentError
from corn.learn.optimizers import ScheduleFactory, tabulate_schedule
from corn.learn.own_loop import LoopData, PrivateOptimizer, PrivateTraining, number_rows, open_loop
from corn.learn.problem import TrainingProblem
from corn.learn.step import AgentStepper
from corn.learn.sweep import Interruption
from corn.learn.user_model import UserModel
from corn.noise import ReleaseLedger
from corn.plan import Plan
from corn.privacy.composition import Expense


def make_private(
    plan: Plan,
    *,
    module: nn.Module,
    optimizer: Optimizer,
    data_loader: DataLoader[Any],
    rendezvous: Rendezvous,
    out: Path | None = None,
    settings: RunSettings | None = None,
    requirements: Requirements | None = None,
    accumulation: int = 1,
    schedule: ScheduleFactory | None = None,
    device: torch.device | str | None = None,
) -> PrivateTraining:
    """Return module, optimizer and loader with which the user's loop is one agent of a network.

    The loop and the arguments without a line here are those of :func:`corn.make_private`. With unit
    ``agent`` the backward pass is ``loss.backward()``, for any loss of the batch, in place of
    ``optimizer.mean(losses).backward()``. Whatever others can see must not depend on private data:
    at which step the loop ends, also by an exception, and how long a step takes.

    Args:
        plan: the plan, the same for all agents.
        module: the model; all agents start from the same parameters.
        optimizer: the optimizer, the same for all agents. Under gossip, with noise that is
            correlated between agents, it must be ``torch.optim.SGD``, with or without momentum.
        data_loader: the loader of this agent's data. Batches have the budget's size, or else the
            loader's.
        rendezvous: the other agents, and the folder of this agent's keys, as
            :func:`corn.distributed.join` returns it.
        out: the folder of the run.
        settings: the settings of the run, the same for all agents; step sizes are the optimizer's.
            With ``resume`` and ``out`` the agents go on from the newest checkpoint that all have.
        requirements: the owner's requirements of the plan and of all releases of the agent's data.
        accumulation: the number of batches that show the samples of one step.
        schedule: a function that returns a scheduler of torch for an optimizer.
        device: the device to which the module and the batches go.
    """
    _check_optimizer(optimizer, plan)
    if not isinstance(data_loader, DataLoader):
        raise InvalidArgumentError("data_loader must be that of this agent alone, found several")
    source = LoopData.of_agent(data_loader)
    if plan.budget.unit == "sample":
        source.check()
    chosen = settings or RunSettings()
    if chosen.batch_of(plan) is None:
        chosen = replace(chosen, batch_size=data_loader.batch_size)
    # Optimizers are public, and must be the same: agents with other steps would not agree.
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    rule = f"loop with {type(optimizer).__name__} {groups!r}"
    if schedule is not None:
        table = tabulate_schedule(optimizer, schedule, plan.budget.num_steps)
        rule += f" and schedule {hashlib.sha256(repr(table).encode()).hexdigest()[:16]}"

    def open_steps(model: UserModel, update: PrivateOptimizer) -> AgentSteps:
        problem = TrainingProblem(model, number_rows(len(source.dataset)))
        ledgers: list[ReleaseLedger] = []
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
            update=update,
        )
        return AgentSteps(steps, ledgers)

    return open_loop(
        plan,
        open_steps,
        source,
        module=module,
        optimizer=optimizer,
        accumulation=accumulation,
        schedule=schedule,
        device=device,
    )


@final
class AgentSteps:
    """The steps of one agent of a running network; see ``LoopSteps``."""

    is_simulated = False

    def __init__(self, steps: Any, ledgers: list[ReleaseLedger]) -> None:
        self._steps = steps
        self._ledgers = ledgers
        self.run = secrets.token_hex(16)
        self.finish()

    def begin(self) -> Sequence[AgentStepper]:
        """See ``LoopSteps``: a step begins when the one before has ended."""
        return [] if self._next is None else [self._next]

    def finish(self) -> None:
        """See ``LoopSteps``."""
        self._next: AgentStepper | None = None
        try:
            self._next = stepper = next(self._steps)
        except StopIteration as end:
            result: AgentResult = end.value
            self.position = result.num_steps
            self.model = result.parameters
        else:
            self.position = stepper.step
            self.model = stepper.parameters

    def resume(self, checkpoint: Mapping[str, Any]) -> None:
        """See ``LoopSteps``: all agents go on together, by ``RunSettings(resume=True)``."""
        if checkpoint["run"] != self.run or checkpoint["step"] != self.position:
            raise CornError(
                "state_dict must be the present one of an agent, found another: use "
                "RunSettings(resume=True) and out=…, or join again with rejoins=True"
            )

    def list_expenses(self) -> list[Expense]:
        """See ``LoopSteps``: what the ledger counts, in all runs and plans for survivors."""
        return [ledger.expense for ledger in self._ledgers]

    def close(self) -> None:
        """See ``LoopSteps``."""
        self._next = None
        self._steps.close()


def _check_optimizer(optimizer: Optimizer, plan: Plan) -> None:
    # Shares of noise that cancel in the sum of all agents still do after a step that is linear in
    # the gradient with the same factors everywhere: SGD with momentum and weight decay. Adam
    # divides by each agent's own second moments. A subclass may do anything. With exact sums there
    # is one optimizer, on the average release.
    shared = zip(plan.decomposition.seed_groups, plan.decomposition.factors, strict=True)
    is_correlated = any(len(group) > 1 and factor.any() for group, factor in shared)
    is_gossip = plan.network.mixing == "gossip"
    if is_gossip and is_correlated and type(optimizer) is not torch.optim.SGD:
        raise InvalidArgumentError(
            "optimizer must be torch.optim.SGD, in whose steps the noise of this plan cancels "
            f"between agents, found {type(optimizer).__name__}: use SGD, exact sums "
            "(mixing='sum'), or independent noise (mechanism ldp)"
        )
