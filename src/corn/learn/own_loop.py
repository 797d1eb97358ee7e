"""The user's own training loop, made private: its batches, gradients and optimizer.

The gradient of each sample is clipped, the sums get noise and are rounded by
:mod:`corn.learn.step`, and the user's optimizer steps along the result. That is post-processing as
long as nothing else reaches the step.
"""

from __future__ import annotations

import atexit
import copy
import itertools
import math
import os
import secrets
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias, final

import networkx as nx
import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map_only
from torch.utils.data import ConcatDataset, DataLoader, Sampler, Subset

from corn.checks import require, require_count
from corn.errors import CornError, CornWarning
from corn.learn.batches import (
    AgentData,
    Batch,
    BatchSampler,
    SeededChoices,
    require_fitting_samples,
)
from corn.learn.mechanism import Mechanism
from corn.learn.metrics import PUBLIC_SEEDS
from corn.learn.optimizers import (
    HyperParameters,
    ScheduleFactory,
    copy_rule,
    require_one_gradient,
    restore_state,
    save_state,
    tabulate_schedule,
)
from corn.learn.perturbation import NoiseShare, make_source, simulation_nonce
from corn.learn.problem import take_dataset
from corn.learn.step import AgentStepper, sum_clipped_samples
from corn.learn.tasks.module import has_same_values
from corn.learn.tasks.protocol import Gradients, require_device
from corn.learn.user_model import SampleGradients, UserModel, seeded_randomness
from corn.noise import ReleaseLedger
from corn.noise.stream import NONCE_BYTES
from corn.plan import Plan, fingerprint, make_plan
from corn.privacy import PrivacyBudget
from corn.privacy.accounting import group_agents
from corn.privacy.budget import Adjacency
from corn.privacy.composition import Expense, PlanTerms, compose_expenses
from corn.topology import Network, load_network
from corn.topology.graphs import list_by_agent

# Gradients of single samples are clipped in float64, this many values at once.
_VALUES_AT_ONCE = 1 << 22

Loaders: TypeAlias = "DataLoader[Any] | Sequence[DataLoader[Any]] | Mapping[str, DataLoader[Any]]"
"""A loader whose samples are distributed over the agents, or one for each agent, in their order or
by the labels of the graph."""


def make_private(
    *,
    module: nn.Module,
    optimizer: Optimizer,
    data_loader: Loaders,
    target_epsilon: float,
    target_delta: float,
    epochs: int,
    max_grad_norm: float,
    network: Network | str | Path | nx.Graph,
    adjacency: Adjacency = "replace",
    accumulation: int = 1,
    schedule: ScheduleFactory | None = None,
    seed: int | None = None,
    ledger: Path | str | None = None,
    device: torch.device | str | None = None,
) -> PrivateTraining:
    """Return module, optimizer and loader with which the user's own training loop is private.

    All agents of the network are simulated in this process, with exact sums. The loop has for each
    batch ``optimizer.mean(losses).backward()``, for one loss of each sample, and
    ``optimizer.step()``. ε protects one sample. The models keep it, unless a seed is given.
    :func:`corn.distributed.make_private` runs one agent of a network, by a plan.

    Between a batch and its step the loop may read everything and change nothing: parameters, frozen
    ones included, the optimizer's state and its settings must be those that CorN has left.

    Args:
        module: only parameters with ``requires_grad`` are trained, get noise and are sent; the rest
            must not change. Batch normalisation is refused. Each sample runs alone.
        optimizer: an optimizer of the module's parameters; any that needs one gradient for a step.
        data_loader: one whose samples are distributed over the agents at random, or one for each
            agent, in their order or by the labels of the graph. Batches are drawn by Poisson
            sampling: of all agents together they have on average the loader's size, or the sum of
            the sizes. The numbers of samples and of batches are public.
        target_epsilon: ε of one sample after all epochs.
        target_delta: δ of that promise.
        epochs: the number of passes over the data, on average.
        max_grad_norm: the norm to which the gradient of each sample is clipped.
        network: such as ``"ring:4"``; its size is the number of agents.
        adjacency: ``"replace"``: neighbouring data sets differ in the values of one sample; or
            ``"add-remove"``: one of them has a sample more, as Opacus counts.
        accumulation: the number of batches with which the loader shows the samples of one step; a
            backward pass follows each of them, and ``optimizer.step()`` the last.
        schedule: a function that returns, for the optimizer that it is given, a scheduler of torch
            that depends on the number of the step alone. Libraries get ``optimizer.scheduler``.
        seed: the seed of noise and batches; it is public, so that the models protect nobody. None
            draws both from new secret keys.
        ledger: the file that counts the steps of all runs, to go on with a checkpoint
            (``optimizer.state_dict()``) of another process, which may have made further steps.
        device: the device to which the module and the batches go; None leaves them where they are.

    >>> data = torch.utils.data.TensorDataset(torch.randn(80, 3), torch.randint(0, 2, (80,)))
    >>> model = nn.Linear(3, 2)
    >>> model, optimizer, loader = make_private(
    ...     module=model,
    ...     optimizer=torch.optim.Adam(model.parameters()),
    ...     data_loader=DataLoader(data, batch_size=20),
    ...     target_epsilon=3,
    ...     target_delta=1e-5,
    ...     epochs=2,
    ...     max_grad_norm=1.0,
    ...     network="ring:4",
    ... )
    >>> for inputs, targets in loader:
    ...     losses = nn.functional.cross_entropy(model(inputs), targets, reduction="none")
    ...     optimizer.mean(losses).backward()
    ...     optimizer.step()
    >>> len(loader), 0 < optimizer.get_epsilon(1e-5) < 3
    (4, True)
    """
    require_count("epochs", epochs)
    agents = network if isinstance(network, Network) else load_network(network)
    require(agents.mixing == "sum", "network", "of mixing='sum'", repr(agents.mixing))
    source = LoopData.of_agents(data_loader, agents.agent_names, seed=seed)
    steps_per_epoch = math.ceil(len(source.dataset) / source.batch_size)
    budget = PrivacyBudget(
        epsilon=target_epsilon,
        delta=target_delta,
        num_steps=epochs * steps_per_epoch,
        clip=max_grad_norm,
        unit="sample",
        adjacency=adjacency,
        batch_size=max(1, round(source.batch_size / agents.num_agents)),
        sampling_rate=1 / steps_per_epoch,
    )
    plan = make_plan(agents, budget)
    print(  # noqa: T201 - once, for whoever knows Opacus
        f"corn: {budget.describe()}, against {plan.threat.describe()}; Opacus counts 'add-remove'",
        file=sys.stderr,
    )
    return simulate(
        plan,
        source,
        seed=seed,
        ledger=ledger,
        module=module,
        optimizer=optimizer,
        accumulation=accumulation,
        schedule=schedule,
        device=device,
    )


def simulate(
    plan: Plan,
    source: LoopData,
    *,
    seed: int | None = None,
    ledger: Path | str | None = None,
    **options: Any,
) -> PrivateTraining:
    """Make a loop of all agents of a plan private; ``options`` are those of ``open_loop``."""
    source.check()
    sizes = [len(rows) for rows in source.rows]
    require_fitting_samples(plan.budget, sizes)

    def open_steps(model: UserModel, update: PrivateOptimizer) -> Simulation:
        return Simulation(plan, model, sizes, update, seed=seed, ledger=ledger)

    return open_loop(plan, open_steps, source, **options)


def open_loop(
    plan: Plan,
    open_steps: Callable[[UserModel, PrivateOptimizer], LoopSteps],
    source: LoopData,
    *,
    module: nn.Module,
    optimizer: Optimizer,
    accumulation: int = 1,
    schedule: ScheduleFactory | None = None,
    device: torch.device | str | None = None,
) -> PrivateTraining:
    """Return the parts of a private loop for the steps of a simulation, or of an agent."""
    require_count("accumulation", accumulation)
    check_optimizer(optimizer, module)
    if device is not None:
        require_device(device)
        module.to(device)
    model = UserModel(module)
    # Longer models than the proof for floats covers are refused (docs/floats.md).
    plan.check_parameters(model.num_parameters)
    num_steps = plan.budget.num_steps
    table = None if schedule is None else tabulate_schedule(optimizer, schedule, num_steps)
    private = PrivateOptimizer(
        optimizer, model, plan, open_steps, schedule=table, num_pieces=accumulation
    )
    query = plan.budget.queries[0]
    # From the plan alone, or unit agent: a loop over epochs makes this number public.
    rate = query.sampling_rate or source.batch_size / sum(map(len, source.rows))
    steps_per_epoch = query.steps_per_pass or max(1, round(1 / rate))
    loader = PrivateLoader(private, source, steps_per_epoch=steps_per_epoch, device=device)
    return PrivateTraining(module, private, loader)


def check_optimizer(optimizer: Optimizer, module: nn.Module) -> None:
    """Raise unless an optimizer can step along releases, with the module's parameters alone."""
    require_one_gradient(optimizer)
    is_whole = not isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel)
    require(is_whole, "module", "on one device", type(module).__name__, advice="give its .module")
    own = {id(p) for p in module.parameters() if p.requires_grad}
    held = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    # Outside the optimizer a parameter never moves; outside the module it would get no noise.
    rule = "one of all parameters of the module with requires_grad, and of no others"
    found = f"{len(held & own)} of {len(own)} and {len(held - own)} others"
    require(own == held, "optimizer", rule, found)


class LoopSteps(Protocol):
    """The steps of a loop: of all agents of a simulation, or of one agent of a network.

    ``position`` and ``model`` are the next step's number and start; checkpoints know a ``run``.
    """

    is_simulated: bool
    run: str
    position: int
    model: Tensor

    def begin(self) -> Sequence[AgentStepper]:
        """Begin the next step and return the stepper of each agent here; none after the last."""

    def finish(self) -> None:
        """Release the gradients that the steppers have got, and take the step."""

    def resume(self, checkpoint: Mapping[str, Any]) -> None:
        """Go on from a checkpoint, or raise."""

    def list_expenses(self) -> list[Expense]:
        """Return all releases under the plan, of each agent here."""

    def close(self) -> None:
        """Take no more steps."""


@final
class Simulation:
    """The steps of all agents of a plan with exact sums, which have ``sizes`` samples."""

    def __init__(
        self,
        plan: Plan,
        model: UserModel,
        sizes: Sequence[int],
        update: PrivateOptimizer,
        *,
        seed: int | None,
        ledger: Path | str | None,
    ) -> None:
        self.is_simulated = seed is not None
        self._plan = plan
        self.model = model.read().to(getattr(torch, plan.dtype))
        self._process = os.getpid()
        self._begun = 0
        self.position = 0
        self._precision = Mechanism.from_plan(plan).precision
        self._ledger = None
        if ledger is not None:
            # A new run of passes has new orders: a sample could be twice in the present pass.
            is_sampled = plan.budget.sampling != "passes" and seed is None
            require(is_sampled, "ledger", "None with a seed or passes", ledger)
            self._ledger = ReleaseLedger.open(
                Path(ledger),
                plan_fingerprint=fingerprint(plan),
                agent=0,
                terms=self._terms_of(0),
                precision=float(self._precision.max()),
            )
        self.run = secrets.token_hex(16) if seed is None else f"seed {seed}"
        source = make_source(plan.decomposition, seed or 0, is_secret=seed is None)
        nonce = secrets.token_bytes(NONCE_BYTES) if seed is None else simulation_nonce(seed)
        self._shares, self._steppers = [], []
        for agent, size in enumerate(sizes):
            query = plan.budget.of_agent(agent).query
            # A seed for each agent: agents of one size would draw the same samples from one.
            choices = None if seed is None else [SeededChoices((seed << 20) + agent)]
            sampler = BatchSampler.of_agent(query, number_rows(size), choices)
            self._steppers.append(AgentStepper(query, lambda step: step, sampler, update=update))
            self._shares.append(
                NoiseShare(plan, agent, source, nonce=nonce, num_parameters=model.num_parameters)
            )

    def _terms_of(self, agent: int) -> PlanTerms:
        return PlanTerms(self._plan.budget.of_agent(agent), self._plan.threat.max_colluders)

    def _require_own_process(self) -> None:
        if os.getpid() != self._process:
            raise CornError("steps must be taken in one process: a fork would have the same noise")

    def begin(self) -> Sequence[AgentStepper]:
        """See ``LoopSteps``."""
        self._require_own_process()
        is_spent = self._ledger is not None and not self._ledger.remaining
        if self.position >= self._plan.budget.num_steps or is_spent:
            return []
        if self._ledger is not None:
            self._ledger.reserve(self._begun)
        self._begun += 1
        for stepper, share in zip(self._steppers, self._shares, strict=True):
            stepper.begin(self.position, share, self.model)
        return self._steppers

    def finish(self) -> None:
        """See ``LoopSteps``."""
        self._require_own_process()
        messages = [stepper.release_masked(observe=False) for stepper in self._steppers]
        total = np.add.reduce(messages, dtype=messages[0].dtype)
        moved = self._steppers[0].finish(total, step_size=1.0)
        if moved is None:
            raise CornError("masks of a simulation must cancel, found that they did not")
        self.model = moved
        self.position += 1
        if self._ledger is not None and not self._ledger.remaining:
            self._ledger.close()  # so that another run can read the file

    def resume(self, checkpoint: Mapping[str, Any]) -> None:
        """See ``LoopSteps``: models that were released may be used again, noise may not."""
        is_own = checkpoint["run"] == self.run
        if not is_own and self._begun:
            raise CornError("a checkpoint must be loaded before the first batch, found a later one")
        if not is_own and not self.is_simulated:
            count = self._plan.budget.num_steps
            spent = -1 if self._ledger is None else count - self._ledger.remaining
            if spent < checkpoint["step"]:
                raise CornError(
                    "a checkpoint of another process, which may have made more steps, needs "
                    "make_private(ledger=…) with the ledger of its run: only that counts them"
                )
        # A run with a seed repeats its own releases. Steps with secret noise are never taken back.
        if not is_own or self.is_simulated:
            self.position = int(checkpoint["step"])
        self.model = checkpoint["parameters"].to(self.model)

    def list_expenses(self) -> list[Expense]:
        """See ``LoopSteps``."""
        begun = max(self._begun, self.position)
        if self._ledger is not None:
            begun = self._plan.budget.num_steps - self._ledger.remaining
        # Agents with one promise differ in their noise only, and the least noise decides.
        return [
            Expense(self._terms_of(int(own[0])), float(self._precision[own].max()), begun)
            for own in group_agents(self._plan.budget, len(self._precision)).values()
        ]

    def close(self) -> None:
        """See ``LoopSteps``."""
        if self._ledger is not None:
            self._ledger.close()


@final
class ClippedSums:
    """The sums of each agent's clipped sample gradients, over the batches that show one step."""

    def __init__(
        self, batches: Sequence[Batch], *, clip: float, num_parameters: int, num_pieces: int
    ) -> None:
        self._clip = torch.tensor([clip], dtype=torch.float64)
        self._batches = batches
        widths = torch.tensor([batch.inputs.shape[1] for batch in batches])
        self._agents = torch.repeat_interleave(torch.arange(len(batches)), widths)
        self._rows = torch.cat([batch.inputs[0] for batch in batches])
        # Padding is in the loop's batch as well. Its weight removes it from the sum.
        self._weights = torch.cat([batch.weights[0] for batch in batches])
        # Pieces of different lengths, so that losses of one are never taken for those of another.
        count = len(self._rows)
        least = (count - num_pieces * (num_pieces - 1) // 2) // num_pieces
        require(least > 0, "accumulation", "less, as a step has few samples", num_pieces)
        cuts = np.cumsum([least + k for k in range(num_pieces - 1)]).tolist()
        pieces = torch.arange(count).tensor_split(cuts)
        self.hidden, self.missing = list(pieces), list(pieces)
        self._totals = torch.zeros(len(batches), num_parameters, dtype=torch.float64)
        self._factors = torch.ones(count, dtype=torch.float64)

    def show(self) -> list[tuple[int, int]]:
        """Return the agent of each sample in the next piece, and the number of its row."""
        piece = self.hidden.pop(0)
        return list(zip(self._agents[piece].tolist(), self._rows[piece].tolist(), strict=True))

    @torch.no_grad()
    def add(self, gradients: Tensor) -> None:
        """Add the gradients of the samples of the next piece."""
        piece = self.missing[0]
        limit = max(1, _VALUES_AT_ONCE // gradients.shape[1])
        for agent, batch in enumerate(self._batches):
            for own in torch.split(piece[self._agents[piece] == agent], limit):
                found, self._factors[own] = sum_clipped_samples(
                    gradients[own - piece[0]].cpu().to(self._clip.dtype),
                    self._clip,
                    self._weights[own],
                    most_samples=batch.most_samples,
                )
                self._totals[agent] += found
        # Where an error was raised above, the piece is still missing.
        self.missing.pop(0)

    def of_agent(self, agent: int) -> Gradients:
        """Return the sum of one agent's samples."""
        return Gradients.of_samples(
            self._totals[agent].view(1, 1, -1),
            self._factors[self._agents == agent].view(1, -1, 1),
            self._batches[agent].weights,
        )


@dataclass(eq=False)
class _Progress:
    """The position of a loop: libraries copy the attributes of an optimizer, and so share it."""

    rule: Any  # settings and state of the user's optimizer, as CorN left them last
    steppers: Sequence[AgentStepper] = ()  # of the step under way
    sums: ClippedSums | None = None
    error: BaseException | None = field(default=None, repr=False)


@final
class PrivateOptimizer(Optimizer):
    """The user's optimizer on released gradients: clipped, with noise, rounded to the grid.

    Between two steps nothing else may change the parameters, the optimizer's state or
    ``param_groups``: such a change could depend on data, and no noise would cover it. Schedules
    belong into ``make_private(schedule=…)``; see also :meth:`public_change`.
    """

    # The state is that of the user's optimizer, so the base class is not initialised.
    def __init__(
        self,
        inner: Optimizer,
        model: UserModel,
        plan: Plan,
        open_steps: Callable[[UserModel, PrivateOptimizer], LoopSteps],
        *,
        schedule: Sequence[HyperParameters] | None = None,
        num_pieces: int = 1,
    ) -> None:
        self._inner = inner
        self.defaults = inner.defaults
        self._model = model
        self._samples = SampleGradients(model.module) if plan.budget.unit == "sample" else None
        self._plan = plan
        self._schedule = schedule
        self.num_pieces = num_pieces
        # Moments from before could depend on data.
        inner.state = type(inner.state)(dict)
        self._now = _Progress(copy_rule(inner))
        self._steps = open_steps(model, self)
        # Links are closed here: later the interpreter has stopped the threads that do it.
        atexit.register(self.leave)

    def leave(self) -> None:
        """Take no more steps."""
        atexit.unregister(self.leave)
        self._steps.close()

    @property
    def position(self) -> int:
        """The number of the next step, from 0."""
        return self._steps.position

    @property
    def scheduler(self) -> LRScheduler:
        """A scheduler for libraries that want one: ``make_private(schedule=…)`` has the values."""
        return _GivenSchedule(self)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of the user's optimizer, to read; see :meth:`public_change`."""
        return self._inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the user's optimizer, to read."""
        return self._inner.state

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002 - zeros are not kept
        """Remove gradients of parameters; those of samples stay with the step under way."""
        self._model.forget_gradient()

    def add_param_group(self, param_group: dict[str, Any]) -> None:  # noqa: ARG002 - never accepted
        """Refuse parameters that would move without noise."""
        raise CornError("parameters must be given before make_private: others would get no noise")

    def state_dict(self) -> dict[str, Any]:
        """Return optimizer, parameters and position: all of it follows from releases."""
        own = {
            "plan": fingerprint(self._plan).hex(),
            "run": self._steps.run,
            "step": self._steps.position,
            "parameters": self._steps.model.clone(),
        }
        return {**self._inner.state_dict(), "corn": own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state, with its parameters; steps that were made stay counted."""
        rest = dict(state_dict)
        own = rest.pop("corn", {"plan": "none"})
        if self._now.steppers:
            raise CornError("a state must be loaded between two steps, found one under way")
        is_own = own["plan"] == fingerprint(self._plan).hex()
        if not is_own or len(own["parameters"]) != self._model.num_parameters:
            raise CornError(
                "state_dict must be that of a private optimizer under the same plan, with the "
                f"parameters of this module, found that of plan {own['plan'][:16]}"
            )
        self._steps.resume(own)
        self._inner.load_state_dict(rest)
        self._model.write(own["parameters"])
        self._now.rule = copy_rule(self._inner)

    def begin_batch(self) -> list[tuple[int, int]]:
        """Return the agent and the row of each sample of the next batch; none after the last."""
        now = self._now
        if now.error is not None:
            raise now.error
        if now.sums is not None and not now.sums.hidden:
            # Which batches are followed by a step must not depend on data, so all of them must be.
            raise CornError(
                f"optimizer.step() must follow the {self.num_pieces} batches of each step, once"
            )
        if now.sums is None:
            self._model.require_unchanged()
            with self._keeping_error():
                now.steppers = self._steps.begin()
            if not now.steppers:
                self.leave()
                return []
            self._model.write(now.steppers[0].parameters)
            if self._schedule is not None:
                self._require_same_rule()
                values = self._schedule[now.steppers[0].step]
                for group, own in zip(self._inner.param_groups, values, strict=True):
                    group.update(own)
                now.rule = copy_rule(self._inner)
            now.sums = ClippedSums(
                [stepper.batch for stepper in now.steppers],
                clip=self._plan.budget.clip,
                num_parameters=self._model.num_parameters,
                num_pieces=self.num_pieces,
            )
        return now.sums.show()

    def show(self, batch: Any, num_samples: int) -> Any:
        """Return a batch for the user's loop."""
        return batch if self._samples is None else self._samples.begin(batch, num_samples)

    @contextmanager
    def _keeping_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._now.error = error
            self.leave()
            raise

    def mean(self, losses: Tensor) -> Tensor:
        """Return the mean of the losses of all samples of the batch, for unit ``sample``.

        ``losses`` has one loss for each sample, as losses of torch with ``reduction="none"``; for
        sequences, the mean over each sample's own positions. Losses that depend on other samples
        are refused. A factor that is computed from the whole batch without gradients, such as class
        weights from its counts, is not noticed and breaks the promise.
        """
        sums, samples = self._now.sums, self._samples
        if samples is None:
            raise CornError("optimizer.mean(losses) is for unit='sample': call loss.backward()")
        if sums is None:
            raise CornError("optimizer.mean(losses) must follow a batch of the private loader")

        def take(_: Tensor) -> None:
            # Gradients at parameters that depend on the batch would depend on all of its samples.
            self._model.require_unchanged()
            with torch.enable_grad():
                gradients = samples.take(losses)
            sums.add(gradients)

        # Whatever the mean is multiplied by, its backward pass calls this once.
        anchor = losses.new_zeros((), requires_grad=True)
        anchor.register_hook(take)  # type: ignore[no-untyped-call]
        return losses.detach().mean() + anchor

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Release the gradient of the batch, and take the user's step with it."""
        now = self._now
        loss = None
        if now.error is not None:
            raise now.error
        if now.sums is None:
            # Every step is a release, and needs new noise.
            raise CornError("optimizer.step() must follow a batch of the private loader, once")
        # Not handed to the user's optimizer, which could call it again after the release.
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if now.sums.hidden or (self._samples is not None and now.sums.missing):
            raise CornError(
                f"optimizer.step() must follow {self.num_pieces} batches of the loader, each with "
                "a backward pass of optimizer.mean(losses): there is no gradient"
            )
        # The user's step must be computed from releases alone, so that it is post-processing.
        self._model.require_unchanged()
        self._require_same_rule()
        if self._samples is not None:
            if self._model.has_gradient:
                raise CornError("gradients must come from optimizer.mean(losses), found others")
            for agent, stepper in enumerate(now.steppers):
                stepper.clip(now.sums.of_agent(agent))
        else:
            now.steppers[0].differentiate(self._model)
        with self._keeping_error():
            self._steps.finish()
            if self._samples is not None:
                self._samples.end()
            self._model.write(self._steps.model)
            now.steppers = ()
            now.sums = None
        return loss

    def __reduce__(self) -> Any:
        """Refuse copies, which would draw the same noise for other gradients."""
        raise CornError("a copy would release with the same noise: keep optimizer.state_dict()")

    def take_step(self, released: Tensor) -> Tensor:
        """Return the model after the user's step along a release, or the average of all."""
        self._model.set_gradient(released)
        self._inner.step()
        # The state alone: a hook of the step that changes settings may depend on data.
        parameters, settings, *_ = self._now.rule
        self._now.rule = parameters, settings, *copy_rule(self._inner)[2:]
        # Before the model leaves the agent.
        self._model.require_frozen()
        return self._model.read()

    def save(self) -> dict[str, Tensor]:
        """Return what the optimizer keeps between steps."""
        return save_state(self._inner)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on with what another agent's optimizer keeps, or raise ``InvalidArgumentError``."""
        self._inner.state = restore_state(self._inner, state)
        self._now.rule = copy_rule(self._inner)

    @contextmanager
    def public_change(self) -> Iterator[None]:
        """Allow changes of ``param_groups`` that depend on step numbers and public data alone.

        The caller declares this, and nothing can check it: a learning rate that follows from the
        training loss, or from a score on private data, reveals it to all who see the models. In a
        network every agent must make the same change at the same step.

        ``with optimizer.public_change(): plateau.step(loss_on_public_data)``
        """
        if self._schedule is not None:
            raise CornError("use either make_private(schedule=…) or optimizer.public_change()")
        self._require_same_rule()
        parameters, _, *state = self._now.rule
        yield
        found, groups, *_ = copy_rule(self._inner)
        if found != parameters:
            raise CornError("parameters must be given before make_private, found other ones")
        self._now.rule = parameters, groups, *state

    def _require_same_rule(self) -> None:
        if not has_same_values(self._now.rule, copy_rule(self._inner)):
            raise CornError(
                "param_groups and the optimizer's state must not change between steps, found that "
                "they did: what depends on data is public with the models; give a schedule of the "
                "step number as make_private(schedule=…), or change learning rates by public data "
                "alone inside of optimizer.public_change()"
            )

    def get_epsilon(self, delta: float | None = None) -> float:
        """Return the ε spent so far at δ, of the agent that spent most; by default at its own δ.

        It includes floating point, earlier runs of the plan, and the step that is under way. With a
        public seed it is the ε that the same run with secret keys would spend.
        """
        return max(
            compose_expenses(
                [own], own.terms.budget.promise.delta if delta is None else delta
            ).epsilon
            for own in self._steps.list_expenses()
        )

    @property
    def privacy(self) -> str:
        """A sentence on the privacy of the models: the promise, its unit and its adversary."""
        if self._steps.is_simulated:
            return f"simulated: {self._plan.describe()}; {PUBLIC_SEEDS}"
        return f"the models keep {self._plan.describe()}"


class _GivenSchedule(LRScheduler):
    """A scheduler that changes nothing: the optimizer follows the table of its schedule."""

    def __init__(self, optimizer: PrivateOptimizer) -> None:
        # The base class would change learning rates and the method ``step``.
        self.optimizer = optimizer

    def step(self, epoch: int | None = None) -> None:
        """Do nothing."""

    def get_last_lr(self) -> list[Any]:
        """Return the learning rates of the last step."""
        return [group["lr"] for group in self.optimizer.param_groups]


@dataclass(frozen=True, eq=False)
class LoopData:
    """All samples, the rows of each agent among them, and the batch size of all agents."""

    dataset: Any
    collate: Callable[[list[Any]], Any]
    rows: Sequence[Sequence[int]]
    batch_size: int

    @classmethod
    def of_agents(cls, given: Loaders, names: Sequence[str], *, seed: int | None) -> LoopData:
        """Return the data of one loader for each agent, or of one for all."""
        num_agents = len(names)
        if isinstance(given, DataLoader):
            whole = cls.of_agent(given)
            # Each sample by itself, so that one more or less moves no other.
            random_numbers = np.random.default_rng(secrets.randbits(128) if seed is None else seed)
            agents = random_numbers.integers(num_agents, size=len(whole.dataset))
            rows = [np.flatnonzero(agents == agent).tolist() for agent in range(num_agents)]
            rule = f"of enough samples for all {num_agents} agents"
            require(all(rows), "data_loader", rule, f"{len(agents)}, and some agent got none")
            return replace(whole, rows=rows)
        listed = list_by_agent(names, given, argument="data_loader")
        parts = [cls.of_agent(loader) for loader in listed]
        require_different_samples([part.dataset for part in parts])
        is_one = all(part.collate == parts[0].collate for part in parts)
        require(is_one, "data_loader", "with one collate_fn for all agents", "several")
        stops = np.cumsum([0, *(len(part.dataset) for part in parts)]).tolist()
        return cls(
            ConcatDataset([part.dataset for part in parts]),
            parts[0].collate,
            list(itertools.starmap(range, itertools.pairwise(stops))),
            sum(part.batch_size for part in parts),
        )

    @classmethod
    def of_agent(cls, loader: DataLoader[Any]) -> LoopData:
        """Return the data of one loader, or raise where batches cannot be drawn from it."""
        dataset = take_dataset(loader)
        require(len(dataset) > 0, "data_loader", "of at least one sample", "none")
        require_different_samples([dataset])
        size = loader.batch_size or len(dataset)
        return cls(dataset, loader.collate_fn, [range(len(dataset))], size)

    def check(self) -> None:
        """Raise if the collate function mixes samples: replacing one must change no other row."""
        count = len(self.dataset)
        # Several: functions that mix samples at random leave some batches as they are.
        for trial in range(_COLLATE_TRIALS):
            # Of two sizes: one of them is not the number of parts of a batch. Each place has its
            # turn, because a row may depend on rows before it or after it.
            size = _COLLATE_SAMPLES + trial % 2
            turn = trial // 2 % size
            places = [(trial + k * (1 + count // 7)) % count for k in range(size + 1)]
            with seeded_randomness(trial):
                one, other, *rest = (self.dataset[place] for place in places)
            batches = []
            for changed in (one, other):
                samples = [*rest[:turn], changed, *rest[turn:]]
                with seeded_randomness(trial):
                    # Copied: a function that changes samples in place must find them as they were.
                    batches.append(self.collate(copy.deepcopy(samples)))
            # Clipping a sample would not bound its influence on rows of others.
            is_own = _keeps_others(batches[0], batches[1], size, turn)
            rule = "one that puts samples along the first dimension, each row from its own sample"
            found = "rows that other samples change, as in mixup"
            require(is_own, "collate_fn", rule, found, advice="use unit='agent'")


_COLLATE_TRIALS, _COLLATE_SAMPLES = 10, 5


def _to_tensor(values: Any) -> Any:
    return torch.from_numpy(values) if values.dtype.kind in "biufc" else values.tolist()


def _keeps_others(before: Any, after: Any, count: int, turn: int) -> bool:
    """Return whether two batches of ``count`` samples that differ in one agree in all others."""
    if type(before) is not type(after):
        return False
    if isinstance(before, Mapping):
        return before.keys() == after.keys() and all(
            _keeps_others(before[name], after[name], count, turn) for name in before
        )
    if isinstance(before, list | tuple):
        if len(before) != len(after):
            return False
        # A list numbers the samples, or the parts of a batch.
        pairs = list(zip(before, after, strict=True))
        others = [*pairs[:turn], *pairs[turn + 1 :]]
        is_kept = len(pairs) == count and all(itertools.starmap(_is_common_part_equal, others))
        return is_kept or all(_keeps_others(*own, count, turn) for own in pairs)
    if isinstance(before, Tensor | np.ndarray) and before.ndim:
        if len(before) == len(after) == count:
            rest = [k for k in range(count) if k != turn]
            before, after = before[rest], after[rest]
        return _is_common_part_equal(before, after)
    # Numbers and names of the whole batch. Objects of other kinds could hold samples.
    return isinstance(before, Tensor | np.ndarray | int | float | str | None)


def _is_common_part_equal(before: Any, after: Any) -> bool:
    """Return whether two values are equal, tensors as far as padding leaves them comparable."""
    before, after = (tree_map_only(np.ndarray, _to_tensor, each) for each in (before, after))
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return has_same_values(before, after)
    if before.dim() != after.dim():
        return False
    # Batches are padded to their longest sample, at the end or at the start.
    least = tuple(slice(min(sizes)) for sizes in zip(before.shape, after.shape, strict=True))
    turned = [each.flip(tuple(range(each.dim())))[least] for each in (before, after)]
    return has_same_values(before[least], after[least]) or has_same_values(*turned)


def require_different_samples(datasets: Sequence[Any]) -> None:
    """Raise if subsets and concatenations have a row of a data set twice."""
    origins = [origin for own in datasets for origin in _list_origins(own)]
    rule = "of data sets with every sample once, as ε counts it"
    require(len(set(origins)) == len(origins), "data_loader", rule, "some several times")


def _list_origins(dataset: Any) -> list[tuple[int, int]]:
    """Return for each sample the data set that it comes from, and its row."""
    if isinstance(dataset, Subset):
        every = _list_origins(dataset.dataset)
        return [every[row] for row in dataset.indices]
    if isinstance(dataset, ConcatDataset):
        return [origin for part in dataset.datasets for origin in _list_origins(part)]
    return [(id(dataset), row) for row in range(len(dataset))]


class _NoSampler(Sampler[int]):
    """The sampler of a private loader, from which nobody else may draw."""

    def __iter__(self) -> Iterator[int]:
        raise CornError(
            "batches must come from the private loader: leave it out of accelerator.prepare(), and "
            "let Trainer resume with ignore_data_skip=True"
        )


@final
class PrivateLoader(DataLoader[Any]):
    """Batches drawn as the accounting assumes, for the steps left of a pass over the data."""

    # Accelerate leaves loaders alone that it takes for its own; it would draw batches ahead.
    _is_accelerate_prepared = True

    def __init__(
        self, optimizer: PrivateOptimizer, source: LoopData, *, steps_per_epoch: int, device: Any
    ) -> None:
        size = max(1, round(source.batch_size / optimizer.num_pieces))
        super().__init__(
            source.dataset, batch_size=size, sampler=_NoSampler(), collate_fn=source.collate
        )
        self._optimizer = optimizer
        self._source = source
        self._steps_per_epoch = steps_per_epoch
        self._device = device

    def __len__(self) -> int:
        return self._steps_per_epoch * self._optimizer.num_pieces

    def close(self) -> None:
        """End an agent's run before the last step; the others go on as their settings say.

        All others see at which step an agent leaves, also by an exception. So the decision must not
        depend on private data, such as the training loss or a score on data of the agent.
        """
        self._optimizer.leave()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        left = self._steps_per_epoch - self._optimizer.position % self._steps_per_epoch
        for number in range(left * self._optimizer.num_pieces):
            samples = self._optimizer.begin_batch()
            if not samples:
                if number == 0:
                    step = self._optimizer.position
                    text = f"the loader has no batches left: steps are used up after step {step}"
                    warnings.warn(text, CornWarning, stacklevel=2)
                return
            own = self._source
            batch = own.collate([own.dataset[own.rows[agent][row]] for agent, row in samples])
            if self._device is not None:
                batch = tree_map_only(Tensor, lambda value: value.to(self._device), batch)
            yield self._optimizer.show(batch, len(samples))


class PrivateTraining(NamedTuple):
    """The user's module, and a private optimizer and loader in place of the user's."""

    module: nn.Module
    optimizer: PrivateOptimizer
    data_loader: PrivateLoader


def number_rows(size: int) -> AgentData:
    """Return the row numbers of an agent's data in place of its samples."""
    # The sampler then draws rows without holding samples, which the user's data set keeps.
    rows = torch.arange(size)
    return AgentData(rows, rows, (0, size))
