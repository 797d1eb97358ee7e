"""The user's own training loop, made private: batches, gradients and the optimizer of each agent.

One batch of the loader, one ``loss.backward()`` and one ``optimizer.step()`` are one agent's part
of one step. The loader draws the batch as the accounting assumes. The optimizer takes the gradient,
which is clipped, gets noise and is rounded by :mod:`corn.learn.step`, and applies the user's
optimizer to the released gradient: momentum and Adam are post-processing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from corn.errors import CornError, InvalidArgumentError
from corn.learn.batches import AgentData, Batch
from corn.learn.tasks.protocol import Gradients, Scores
from corn.learn.user_model import UserModel
from corn.plan import Plan
from corn.privacy.composition import Expense, PlanTerms, compose_expenses


class Turn(NamedTuple):
    """One agent's part of a step: its model, and the rows of its data that are in the batch."""

    agent: int
    parameters: Tensor
    batch: Batch


class Turns(Protocol):
    """The order in which agents take steps: all of a simulation, or one of a running network."""

    @property
    def precisions(self) -> dict[int, float]:
        """[R⁻¹]_ii of the agents here, against the plan's adversary."""

    @property
    def num_releases(self) -> int:
        """The number of releases that each agent here has made under the plan."""

    def begin(self) -> Turn | None:
        """Return the next turn, or None after the last step."""

    def leave(self) -> None:
        """Take no more turns."""

    def release(self, gradients: Callable[[Tensor | None], Gradients]) -> Tensor:
        """Return the released gradient of this turn, shape (d,).

        ``gradients`` computes the gradient; its argument is the norm to clip samples to, if any.
        """

    def end(self, parameters: Tensor) -> Tensor | None:
        """End a turn with the agent's half step; return the model to show next, if it is known."""


@final
class LoopTask:
    """The user's loop in the place of a task: gradients come from the loop, scores do not exist."""

    def __init__(self, model: UserModel, gradients: Callable[..., Gradients]) -> None:
        self._model, self._gradients, self._start = model, gradients, model.read()

    @property
    def num_parameters(self) -> int:
        """See ``Task``."""
        return self._model.num_parameters

    def prepare(self, inputs: Tensor) -> Tensor:
        """Return row numbers as they are."""
        return inputs

    def initialize(self, seed: int) -> Tensor:  # noqa: ARG002 - the module has its own start
        """Return the module's parameters."""
        return self._start.clone()

    def gradient(
        self, parameters: Tensor, batch: Batch, *, sample_clip: Tensor | None = None
    ) -> Gradients:
        """Return the gradient that the user's loop computes on this batch."""
        return self._gradients(parameters, batch, sample_clip)

    def evaluate(self, parameters: Tensor, inputs: Tensor, targets: Tensor) -> Scores:  # noqa: ARG002
        """Return no scores: only the user's loop knows the loss."""
        return Scores(parameters.new_full((len(parameters),), math.nan))

    def describe(self) -> str:
        """See ``Task``."""
        return self._model.describe()

    def fingerprint(self) -> bytes:
        """See ``HasFingerprint``."""
        return self._model.fingerprint()


@final
class PrivateOptimizer(Optimizer):
    """The user's optimizer on released gradients: clipped, with noise, rounded to the grid.

    Learning-rate schedulers work as with the user's own optimizer.
    """

    # The state is that of the user's optimizer, so the base class is not initialised.
    def __init__(self, inner: Optimizer, model: UserModel, turns: Turns, plan: Plan) -> None:
        self._inner, self._model, self._turns, self._plan = inner, model, turns, plan
        self._turn: Turn | None = None
        self._states: dict[int, Any] = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of the user's optimizer."""
        return self._inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the user's optimizer for the present agent."""
        return self._inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The defaults of the user's optimizer."""
        return self._inner.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Remove gradients."""
        self._inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the user's optimizer for the present agent."""
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # noqa: ARG002 - never accepted
        """Refuse a state: ``begin`` would replace it by the agent's own."""
        raise CornError(
            "the state of a private optimizer cannot be loaded, as every agent begins with an "
            "empty one; set learning rates in param_groups"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:  # noqa: ARG002 - never accepted
        """Refuse parameters that would move without noise."""
        raise CornError("parameters must be given before make_private: others would get no noise")

    def begin(self, turn: Turn) -> None:
        """Take the model and the optimizer's state of the agent whose turn it is."""
        self.require_done()
        self._model.write(turn.parameters)
        # Momentum and Adam's moments are each agent's own: a simulation swaps them with the model.
        self._inner.state = self._states.setdefault(turn.agent, type(self._inner.state)(dict))
        self._turn = turn

    def require_done(self) -> None:
        """Raise if the last batch was not followed by a step."""
        if self._turn is not None:
            raise CornError("optimizer.step() must follow every batch of the loader, once")

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Release the gradient of the batch, and take the user's step with it."""
        turn, loss = self._turn, None
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
        # The user's step is computed from the release alone, so that it is post-processing.
        released = self._turns.release(lambda clip: self._model.compute(turn.batch, clip))
        self._model.set_gradient(released)
        self._inner.step()
        self._model.forget_gradient()
        # Before the model leaves the agent: ``end`` sends or mixes it.
        self._model.require_frozen()
        self._turn = None
        shown = self._turns.end(self._model.read())
        if shown is not None:
            self._model.write(shown)
        return loss

    def get_epsilon(self, delta: float | None = None) -> float:
        """Return the ε spent so far at δ, of the agent that spent most; by default at its own δ.

        It includes floating point. In a simulation with a public seed it is the ε that the same run
        with secret keys would spend: see ``privacy``.
        """
        spent, budget = self._turns.num_releases, self._plan.budget
        colluders = self._plan.threat.max_colluders
        # Agents with one promise differ in their noise only, and the least noise decides.
        worst: dict[PlanTerms, float] = {}
        for agent, precision in self._turns.precisions.items():
            terms = PlanTerms(budget.of_agent(agent), colluders)
            worst[terms] = max(precision, worst.get(terms, 0.0))
        return max(
            compose_expenses(
                [Expense(t, p, spent)], t.budget.promise.delta if delta is None else delta
            ).epsilon
            for t, p in worst.items()
        )

    @property
    def privacy(self) -> str:
        """A sentence on the privacy of the models: the promise, its unit and its adversary."""
        if getattr(self._turns, "is_simulated", False):
            return (
                f"simulated: {self._plan.describe()}; the noise follows from a public seed, so "
                "these models protect nobody; secure=True, with a loader for each agent, draws "
                "secret noise"
            )
        return f"the models keep {self._plan.describe()}"


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
        """Raise if the collate function puts samples along another dimension than the first."""
        first = self.dataset[self.rows[0]]
        # A second batch with one more sample shows which dimension numbers the samples.
        batches = [tree_leaves(self.collate([first] * count)) for count in (2, 3)]
        tensors = [[leaf for leaf in batch if isinstance(leaf, Tensor)] for batch in batches]
        # Lists with one tensor for each sample differ in length, and have no dimension to check.
        if len(tensors[0]) != len(tensors[1]):
            return
        for two, three in zip(*tensors, strict=True):
            if two.shape[1:] != three.shape[1:]:
                raise InvalidArgumentError(
                    f"collate_fn must put samples along the first dimension, found {two.dim()} "
                    "dimensions of which another one numbers them: gradients of single samples "
                    "need it"
                )


@final
class PrivateLoader:
    """Batches drawn as the accounting assumes, collated by the user's own function.

    One iteration over it is one pass over the data on average; the next one goes on with the next
    steps. It ends for good after the last step of the plan.
    """

    def __init__(
        self,
        turns: Turns,
        optimizer: PrivateOptimizer,
        parts: dict[int, LoaderPart],
        *,
        batches_per_pass: int,
    ) -> None:
        self._turns, self._optimizer, self._parts = turns, optimizer, parts
        self._length = batches_per_pass

    def __len__(self) -> int:
        return self._length

    def close(self) -> None:
        """End an agent's run before the last step; the others go on as their settings say."""
        self._turns.leave()

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._length):
            # Which batches are followed by a step must not depend on data, so all of them must be.
            self._optimizer.require_done()
            turn = self._turns.begin()
            if turn is None:
                return
            self._optimizer.begin(turn)
            yield self._parts[turn.agent].fetch(turn.batch)


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
