"""The user's own training loop, made private: batches, gradients and the optimizer of each agent.

One batch of the loader, one backward pass and one ``optimizer.step()`` are one agent's part of one
step. The loader draws the batch as the accounting assumes. The optimizer takes the gradient, which
is clipped, gets noise and is rounded by :mod:`corn.learn.step`, and applies the user's optimizer to
the released gradient. That is post-processing as long as nothing else reaches the step: so the
parameters, the optimizer's state and its settings must be those that CorN has left.

With exact sums all agents have one model, and one step of the optimizer follows from the average of
all releases of a step. A single release has too little noise to protect anybody, so the optimizer
and the module never see one.

``simulate_turns`` lets all agents of a network take their turns in one process.
"""

from __future__ import annotations

import atexit
import copy
import random
import secrets
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from corn.errors import CornError, InvalidArgumentError
from corn.learn.batches import AgentData, Batch, BatchSampler, SeededChoices
from corn.learn.perturbation import NoiseShare, make_source, simulation_nonce
from corn.learn.step import AgentStepper, Mixer, UpdateRule
from corn.learn.user_model import UserModel, has_same_values
from corn.noise.stream import NONCE_BYTES
from corn.plan import Plan
from corn.privacy.composition import Expense, PlanTerms, compose_expenses


class Turn(NamedTuple):
    """One agent's part of a step.

    Attributes:
        agent: The agent whose turn it is.
        stepper: Its step, which has begun. The next turn releases the gradient that it is given;
            inputs of its batch are row numbers in place of samples.
        shown: The model that the module has until the turn begins; None leaves it as it is.
    """

    agent: int
    stepper: AgentStepper
    shown: Tensor | None


Turns: TypeAlias = Generator[Turn, None, Tensor]
"""The turns of all agents of a simulation, or of one of a running network; then the last model."""


HyperParameters: TypeAlias = list[dict[str, Any]]
"""The values of each group of an optimizer's ``param_groups``, without its parameters."""

ScheduleFactory: TypeAlias = Callable[[Optimizer], LRScheduler]
"""(optimizer) → a scheduler of torch that follows the number of the step alone."""


@final
class PrivateOptimizer(Optimizer):
    """The user's optimizer on released gradients: clipped, with noise, rounded to the grid.

    Between two steps nothing else may change the parameters, the optimizer's state or
    ``param_groups``: such a change could depend on data, and no noise would cover it. Schedules
    belong into ``make_private(schedule=…)``; see also :meth:`public_change`.

    Args:
        inner: The user's optimizer.
        model: The user's module.
        plan: The network, the budget and the noise.
        take_turns: Begins the turns, with the rule that makes a step of a release. With exact sums
            the rule steps along the average of a step's releases, unless the sum is void.
        list_expenses: Returns all releases under the plan, of each agent here, from the number of
            steps that were begun in this run.
        is_simulated: Whether the noise follows from a public seed.
        schedule: The hyperparameters of each step; None leaves them as they are.
    """

    # The state is that of the user's optimizer, so the base class is not initialised.
    def __init__(
        self,
        inner: Optimizer,
        model: UserModel,
        plan: Plan,
        take_turns: Callable[[UpdateRule], Turns],
        *,
        list_expenses: Callable[[int], list[Expense]],
        is_simulated: bool,
        schedule: Sequence[HyperParameters] | None = None,
    ) -> None:
        self._inner = inner
        self._model = model
        self._plan = plan
        self._list_expenses = list_expenses
        self._is_simulated = is_simulated
        self._schedule = schedule
        self._turn: Turn | None = None
        self._next: Turn | None = None
        self._error: BaseException | None = None
        # Of each agent, or of the one model of exact sums, with a copy that shows changes.
        self._states: dict[int, tuple[Any, Any]] = {}
        self._groups = _copy_groups(inner)
        self._held = _list_held(inner)
        self._turns = take_turns(self)
        self._advance()

    def _advance(self) -> Tensor | None:
        """Run to the next turn, or to the end; return the model to show."""
        try:
            self._next = next(self._turns)
        except StopIteration as end:
            self.leave()
            last: Tensor | None = end.value  # None after the user left
            return last
        except BaseException as error:
            self._error = error
            self.leave()
            raise
        return self._next.shown

    def leave(self) -> None:
        """Take no more turns."""
        atexit.unregister(self.leave)
        self._next = None
        self._turns.close()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of the user's optimizer, to read; see :meth:`public_change`."""
        return self._inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the user's optimizer for the present agent, to read."""
        return self._inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The defaults of the user's optimizer."""
        return self._inner.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002 - zeros are not kept
        """Remove gradients."""
        self._model.forget_gradient()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the user's optimizer for the present agent."""
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # noqa: ARG002 - never accepted
        """Refuse a state: ``begin`` would replace it by the agent's own."""
        raise CornError(
            "the state of a private optimizer cannot be loaded, as every agent begins with an "
            "empty one; set learning rates before make_private"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:  # noqa: ARG002 - never accepted
        """Refuse parameters that would move without noise."""
        raise CornError("parameters must be given before make_private: others would get no noise")

    @contextmanager
    def public_change(self) -> Iterator[None]:
        """Allow changes of ``param_groups`` that depend on step numbers and public data alone.

        The caller declares this, and nothing can check it: a learning rate that follows from the
        training loss, or from a score on private data, reveals it to all who see the models. In a
        network every agent must make the same change at the same step.

        ``with optimizer.public_change(): plateau.step(loss_on_public_data)``
        """
        if self._schedule is not None:
            raise CornError(
                "param_groups follow the schedule that make_private was given: use either "
                "schedule=… or optimizer.public_change()"
            )
        self._require_same_groups()
        yield
        if self._held != _list_held(self._inner):
            raise CornError("parameters must be given before make_private, found other ones")
        self._groups = _copy_groups(self._inner)

    def find_turn(self) -> Turn | None:
        """Return the next turn; None after the last step."""
        # A loop that goes on after an error gets the same one again.
        if self._error is not None:
            raise self._error
        # Which batches are followed by a step must not depend on data, so all of them must be.
        if self._turn is not None:
            raise CornError("optimizer.step() must follow every batch of the loader, once")
        return self._next

    def begin(self, turn: Turn, batch: Any) -> Any:
        """Take the model and the state of the agent whose turn it is; return its batch to show."""
        self._model.write(turn.stepper.parameters)
        self._model.forget_gradient()
        # Momentum is each agent's own under gossip: a simulation swaps it with the model.
        owner = self._owner_of(turn)
        if owner not in self._states:
            empty = type(self._inner.state)(dict)
            self._states[owner] = empty, _copy_state(self._inner, empty)
        self._inner.state, _ = self._states[owner]
        if self._schedule is not None:
            self._require_same_groups()
            for group, values in zip(
                self._inner.param_groups, self._schedule[turn.stepper.step], strict=True
            ):
                group.update(values)
            self._groups = _copy_groups(self._inner)
        self._turn = turn
        return self._model.watch(batch, num_samples=turn.stepper.batch.inputs.shape[1])

    def backward(self, losses: Tensor) -> None:
        """Compute the gradient of each sample from the losses of all samples, for unit ``sample``.

        ``losses`` has one loss for each sample of the batch, shape (samples,), as losses of torch
        return it with ``reduction="none"``; for sequences, the mean over each sample's own
        positions. Each sample then has weight 1 before it is clipped, whatever others are in the
        batch. Losses that depend on other samples are refused, on the first batch of each kind and
        on some later ones. A factor that is computed from the whole batch without gradients, such
        as class weights from its counts, is not noticed and breaks the promise.
        """
        if self._turn is None:
            raise CornError("optimizer.backward() must follow a batch of the private loader")
        # Gradients at parameters that depend on the batch would depend on all of its samples.
        self._model.require_unchanged()
        self._model.backward(losses, num_samples=self._turn.stepper.batch.inputs.shape[1])

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Release the gradient of the batch, and take the user's step with it.

        With exact sums the step follows from the average release, after the last agent's batch.
        """
        if self._error is not None:
            raise self._error
        turn = self._turn
        loss = None
        if turn is None:
            raise CornError(
                "optimizer.step() must follow a batch of the private loader, once: every step is a "
                "release, and needs new noise"
            )
        # Not handed to the user's optimizer, which could call it again after the release, and step
        # along gradients without noise.
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # The user's step must be computed from releases alone, so that it is post-processing.
        self._model.require_unchanged()
        self._require_same_groups()
        self._require_same_state(self._owner_of(turn))
        turn.stepper.differentiate(self._model)
        shown = self._advance()
        self._model.forget_gradient()
        self._model.require_frozen()
        self._turn = None
        if shown is not None:
            self._model.write(shown)
        return loss

    def take_step(self, released: Tensor) -> Tensor:
        """See ``UpdateRule``: the user's optimizer steps along a release, or their average."""
        if self._turn is None:
            raise CornError("a step must follow a batch of the private loader")
        self._model.forget_gradient()
        self._model.set_gradient(released)
        self._inner.step()
        state = self._inner.state
        self._states[self._owner_of(self._turn)] = state, _copy_state(self._inner, state)
        # Before the model leaves the agent.
        self._model.require_frozen()
        return self._model.read()

    def save(self) -> dict[str, Tensor]:
        """See ``UpdateRule``."""
        return save_state(self._inner)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """See ``UpdateRule``."""
        own = self._inner.state = restore_state(self._inner, state)
        self._states[0] = own, _copy_state(self._inner, own)
        self._groups = _copy_groups(self._inner)

    def _owner_of(self, turn: Turn) -> int:
        """Return the agent whose state of the optimizer a turn uses: with exact sums the first."""
        return 0 if self._plan.network.mixing == "sum" else turn.agent

    def _require_same_groups(self) -> None:
        # A parameter that leaves its group stops moving, which others see too.
        is_same = has_same_values(self._groups, _copy_groups(self._inner))
        if not is_same or self._held != _list_held(self._inner):
            raise CornError(
                "param_groups must not change between steps, found that they did: a learning rate "
                "that depends on data is public with the models; give a schedule of the step "
                "number as make_private(schedule=…), or make a change that depends on public data "
                "alone inside of optimizer.public_change()"
            )

    def _require_same_state(self, owner: int) -> None:
        own, copied = self._states[owner]
        if self._inner.state is not own or not has_same_values(
            copied, _copy_state(self._inner, own)
        ):
            raise CornError(
                "the optimizer's state must not change between steps, found that it did: the "
                "change could depend on data, and would be sent without noise"
            )

    def get_epsilon(self, delta: float | None = None) -> float:
        """Return the ε spent so far at δ, of the agent that spent most; by default at its own δ.

        It includes floating point, earlier runs of the plan, and the step that is under way. After
        agents were lost and the others made a new plan, it is that of the plan with less noise.
        In a simulation with a public seed it is the ε that the same run with secret keys would
        spend; in a rehearsal it is infinite: see ``privacy``.
        """
        # Agents with one promise differ in their noise only, and the least noise decides.
        worst: dict[tuple[PlanTerms, int], Expense] = {}
        begun = self._plan.budget.num_steps
        if self._next is not None:
            begun = self._next.stepper.step + (self._next.agent > 0)
        for expense in self._list_expenses(begun):
            kind = expense.terms, expense.num_releases
            worst[kind] = max(expense, worst.get(kind, expense), key=lambda own: own.precision)
        return max(
            compose_expenses(
                [own], own.terms.budget.promise.delta if delta is None else delta
            ).epsilon
            for own in worst.values()
        )

    @property
    def privacy(self) -> str:
        """A sentence on the privacy of the models: the promise, its unit and its adversary."""
        if self._is_simulated:
            return (
                f"simulated: {self._plan.describe()}; the noise follows from a public seed, so "
                "these models protect nobody; secure=True with a loader for each agent, or an "
                "agent with keys, draws secret noise"
            )
        return f"the models keep {self._plan.describe()}"


def save_state(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return what an optimizer keeps between steps: its state and the numbers of its groups.

    >>> parameter = nn.Parameter(torch.ones(2))
    >>> first, second = (torch.optim.SGD([parameter], lr=lr, momentum=0.9) for lr in (0.1, 0.2))
    >>> parameter.grad = torch.ones(2)
    >>> first.step()
    >>> second.state = restore_state(second, save_state(first))
    >>> second.state[parameter]["momentum_buffer"].tolist(), second.param_groups[0]["lr"]
    ([1.0, 1.0], 0.1)
    """
    saved: dict[str, Tensor] = {}
    for place, parameter in enumerate(_list_parameters(optimizer)):
        for name, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                saved[f"tensor {place} {name}"] = value.detach().clone()
            elif value is not None:
                saved[f"number {place} {name}"] = torch.tensor(value, dtype=_type_of(value))
    for place, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if isinstance(value, int | float):
                saved[f"group {place} {name}"] = torch.tensor(value, dtype=_type_of(value))
    return saved


def restore_state(optimizer: Optimizer, saved: Mapping[str, Tensor]) -> Any:
    """Return the state to give to an optimizer, and set the numbers of its groups.

    Raises:
        InvalidArgumentError: the state is of other parameters.
    """
    state = type(optimizer.state)(dict)
    parameters = _list_parameters(optimizer)
    for key, value in saved.items():
        kind, number, name = (*key.split(" ", 2), "", "")[:3]
        # int() raises for thousands of digits.
        place = int(number) if number.isdecimal() and len(number) < 10 else -1
        known = optimizer.param_groups if kind == "group" else parameters
        fits = 0 <= place < len(known) and kind in ("tensor", "number", "group")
        if kind == "tensor" and fits:
            fits = value.dim() == 0 or value.shape == parameters[place].shape
        else:
            fits = fits and value.dim() == 0
        if not fits or name == "params":
            raise InvalidArgumentError("the optimizer's state is that of other parameters")
        if kind == "group":
            optimizer.param_groups[place][name] = value.item()
        else:
            state[parameters[place]][name] = value if kind == "tensor" else value.item()
    return state


def _list_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [own for group in optimizer.param_groups for own in group["params"]]


def _type_of(value: bool | int | float) -> torch.dtype:
    if isinstance(value, bool):
        return torch.bool
    return torch.int64 if isinstance(value, int) else torch.float64


def tabulate_schedule(
    optimizer: Optimizer, factory: ScheduleFactory, num_steps: int
) -> list[HyperParameters]:
    """Return the hyperparameters of each step by a scheduler.

    They are computed before the first batch, so that no measurement of the run can change them.
    """
    # A stand-in with the same settings: a scheduler replaces methods of its optimizer, and warns
    # unless its steps follow those of the optimizer.
    stand_in = _StandIn(
        [{**own, "params": [torch.zeros(1)]} for own in _copy_groups(optimizer)], optimizer.defaults
    )
    scheduler = factory(stand_in)
    is_plateau = isinstance(scheduler, ReduceLROnPlateau)
    if is_plateau or getattr(scheduler, "optimizer", None) is not stand_in:
        raise InvalidArgumentError(
            "schedule must be a function that returns a scheduler of torch for the optimizer that "
            "it is given, by step numbers alone, found "
            f"{type(scheduler).__name__}{', which follows a loss' if is_plateau else ''}: try "
            "lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps); "
            "for a loss on public data see optimizer.public_change()"
        )
    table = []
    for _ in range(num_steps):
        table.append(_copy_groups(stand_in))
        stand_in.step()
        scheduler.step()
    return table


class _StandIn(Optimizer):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing."""


def _copy_groups(optimizer: Optimizer) -> HyperParameters:
    return [
        {name: _copy_value(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def _list_held(optimizer: Optimizer) -> list[list[int]]:
    """Return the identities of the parameters of each group."""
    return [list(map(id, group["params"])) for group in optimizer.param_groups]


def _copy_state(optimizer: Optimizer, state: Any) -> Any:
    """Return a copy of the state of each parameter, in their order."""
    # Not by parameter: dictionaries of tensors cannot be compared.
    every = _list_parameters(optimizer)
    return len(state), [tree_map(_copy_value, dict(state.get(own, {}))) for own in every]


def _copy_value(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.copy(value)


@dataclass(frozen=True, eq=False)
class LoaderPart:
    """The data set of one agent, and the collate function of its loader."""

    dataset: Any
    collate: Callable[[list[Any]], Any]
    rows: Sequence[int]

    @classmethod
    def of(cls, loader: DataLoader[Any], rows: Sequence[int] | None = None) -> LoaderPart:
        """Return a loader's data set, or some rows of it."""
        dataset: Any = loader.dataset
        return cls(dataset, loader.collate_fn, range(len(dataset)) if rows is None else rows)

    def fetch(self, batch: Batch) -> Any:
        """Return the samples of a batch as the user's loader would."""
        # Inputs of these batches are row numbers (``number_rows``), one cell per agent.
        return self.collate([self.dataset[self.rows[row]] for row in batch.inputs[0].tolist()])

    def check(self) -> None:
        """Raise if the collate function puts samples along another dimension, or mixes them."""
        with _restored_randomness():
            self._check_independence()

    def _check_independence(self) -> None:
        """Replace the first sample of small batches; the rows of all others must stay."""
        count = len(self.rows)
        # Several: functions that mix samples at random leave some batches as they are.
        for trial in range(_COLLATE_TRIALS):
            places = [(trial + k * (1 + count // 7)) % count for k in range(_COLLATE_SAMPLES + 1)]
            one, other, *rest = (self.dataset[self.rows[place]] for place in places)
            before, after = (
                self._collate_with(trial, [changed, *rest]) for changed in (one, other)
            )
            if not _keeps_others(before, after, _COLLATE_SAMPLES):
                raise InvalidArgumentError(
                    "collate_fn must put samples along the first dimension, and make each row from "
                    "its own sample alone, found that another sample changes a row, as in mixup "
                    "and in normalisation by statistics of the batch: clipping a sample then does "
                    "not bound its influence; change single samples in the data set, or use "
                    "unit='agent'"
                )

    def _collate_with(self, seed: int, samples: list[Any]) -> Any:
        """Return a batch whose random numbers follow from a seed."""
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - the user's generator
        torch.manual_seed(seed)
        # Copied: a function that changes samples in place must find them as they were.
        return self.collate(copy.deepcopy(samples))


_COLLATE_TRIALS, _COLLATE_SAMPLES = 10, 5


def _keeps_others(before: Any, after: Any, count: int) -> bool:
    """Return whether two batches whose first samples differ agree in all others."""
    if type(before) is not type(after):
        return False
    if isinstance(before, Mapping):
        return before.keys() == after.keys() and all(
            _keeps_others(before[name], after[name], count) for name in before
        )
    if isinstance(before, list | tuple):
        if len(before) != len(after):
            return False
        # A list numbers the samples, or the parts of a batch.
        pairs = list(zip(before, after, strict=True))
        is_kept = len(pairs) == count and all(_is_common_part_equal(*own) for own in pairs[1:])
        return is_kept or all(_keeps_others(*own, count) for own in pairs)
    if isinstance(before, Tensor | np.ndarray) and before.ndim:
        start = 1 if len(before) == count else 0
        return _is_common_part_equal(before[start:], after[start:])
    if hasattr(before, "__dict__") and not isinstance(before, Tensor):
        return _keeps_others(vars(before), vars(after), count)
    return True  # a number or a name of the whole batch


def _is_common_part_equal(before: Any, after: Any) -> bool:
    """Return whether two values are equal, tensors as far as padding leaves them comparable."""
    if isinstance(before, np.ndarray) and before.dtype.kind in "biufc":
        before, after = torch.from_numpy(before), torch.from_numpy(after)
    if not isinstance(before, Tensor):
        if hasattr(before, "__dict__"):
            before, after = vars(before), vars(after)
        return has_same_values(before, after)
    if before.dim() != after.dim():
        return False
    # Batches are padded to their longest sample, at the end or at the start.
    least = [min(sizes) for sizes in zip(before.shape, after.shape, strict=True)]
    first = tuple(slice(0, size) for size in least)
    return has_same_values(before[first], after[first]) or has_same_values(
        *(
            each[tuple(slice(own - size, own) for own, size in zip(each.shape, least, strict=True))]
            for each in (before, after)
        )
    )


@contextmanager
def _restored_randomness() -> Iterator[None]:
    """Give the user's random numbers back as they were."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002 - the user's generator
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002


@final
class PrivateLoader:
    """Batches drawn as the accounting assumes, collated by the user's own function.

    One iteration over it is one pass over the data on average; the next one goes on with the next
    steps. It ends for good after the last step of the plan.
    """

    def __init__(
        self,
        optimizer: PrivateOptimizer,
        parts: dict[int, LoaderPart],
        *,
        batches_per_pass: int,
    ) -> None:
        self._optimizer = optimizer
        self._parts = parts
        self._length = batches_per_pass

    def __len__(self) -> int:
        return self._length

    def close(self) -> None:
        """End an agent's run before the last step; the others go on as their settings say.

        All others see at which step an agent leaves. So the decision to leave must not depend on
        private data: not on the training loss, nor on a score on data of the agent. The same holds
        for a loop that ends by an exception.
        """
        self._optimizer.leave()

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._length):
            turn = self._optimizer.find_turn()
            if turn is None:
                return
            yield self._optimizer.begin(turn, self._parts[turn.agent].fetch(turn.stepper.batch))


class PrivateTraining(NamedTuple):
    """The user's module, and a private optimizer and loader in place of the user's."""

    module: nn.Module
    optimizer: PrivateOptimizer
    data_loader: PrivateLoader

    def get_epsilon(self, delta: float | None = None) -> float:
        """See :meth:`PrivateOptimizer.get_epsilon`."""
        return self.optimizer.get_epsilon(delta)


def number_rows(size: int) -> AgentData:
    """Return the row numbers of an agent's data in place of its samples."""
    # The sampler then draws rows without holding samples, which the user's data set keeps.
    rows = torch.arange(size)
    return AgentData(rows, rows, (0, size))


def simulate_turns(
    plan: Plan,
    model: UserModel,
    sizes: Sequence[int],
    update: UpdateRule,
    *,
    batch_size: int | None,
    seed: int,
    secure: bool,
) -> Turns:
    """Let all agents take their turns, one after the other.

    Under gossip all models are mixed after the last of a step. With exact sums all agents have one
    model, and releases are averaged.

    Args:
        plan: The network, the budget and the noise.
        model: The user's module.
        sizes: The number of samples of each agent.
        update: The user's optimizer.
        batch_size: Samples per mini-batch where the budget names none; None takes all.
        seed: The public seed of noise and batches.
        secure: Draw noise and batches from new secret keys instead.
    """
    dtype = getattr(torch, plan.dtype)
    is_sum = plan.network.mixing == "sum"
    # One row per agent, or one for all: they start from the user's model.
    models = model.read().to(dtype).repeat(1 if is_sum else plan.num_agents, 1)
    mixer = None if is_sum else Mixer(plan.network, dtype=dtype)
    source = make_source(plan.decomposition, seed, is_secret=secure)
    nonce = secrets.token_bytes(NONCE_BYTES) if secure else simulation_nonce(seed)
    agents = []
    for agent, size in enumerate(sizes):
        query, rows = plan.budget.of_agent(agent).query, number_rows(size)
        if secure:
            sampler = BatchSampler.of_agent(query, rows, batch_size=batch_size)
        else:
            # A seed for each agent: agents of one size would draw the same samples from one.
            choices = [SeededChoices((seed << 20) + agent)]
            sampler = BatchSampler(rows, [query], batch_size=batch_size, choices=choices)
        share = NoiseShare(plan, agent, source, nonce=nonce, num_parameters=model.num_parameters)
        # Keys are used once, in this run, so that no ledger has to remember a release.
        agents.append((AgentStepper(query, lambda step: step, sampler, update=update), share))
    shown: Tensor | None = None
    for step in range(plan.budget.num_steps):
        messages = []
        for agent, (stepper, share) in enumerate(agents):
            stepper.begin(step, share, models[0 if is_sum else agent])
            yield Turn(agent, stepper, shown)
            shown = None
            # Sizes of steps are those of the user's optimizer.
            if is_sum:
                messages.append(stepper.release_masked(observe=False))
            else:
                # The half step is kept, not mixed yet: in a step all agents' gradients are taken
                # before any exchange.
                models[agent] = stepper.release_half_step(step_size=1.0, observe=False)
        if mixer is None:
            total = np.add.reduce(messages, dtype=messages[0].dtype)
            moved = agents[0][0].finish(total, step_size=1.0)
            if moved is None:
                raise CornError("masks of a simulation must cancel, found that they did not")
            models[0] = moved
            shown = models[0]
        else:
            models = mixer.mix(models[None])[0]
            shown = models.mean(dim=0)
    if mixer is None:
        return models[0]
    # A cool-down after the last step only mixes: it releases nothing and costs no privacy.
    for _ in range(plan.cooldown_steps):
        models = mixer.mix(models[None])[0]
    return models.mean(dim=0)
