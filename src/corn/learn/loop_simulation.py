"""The user's own training loop as a simulation of all agents of a network in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from corn.errors import CornError
from corn.learn.batches import BatchSampler, SeededChoices, require_fitting_samples
from corn.learn.method import Method
from corn.learn.mixer import Mixer
from corn.learn.own_loop import LoopTask, Turn, number_rows
from corn.learn.perturbation import KeyedNoise
from corn.learn.step import average_integers, compute_gradients, release, release_integers
from corn.learn.tasks.protocol import Gradients
from corn.learn.user_model import UserModel
from corn.noise import Secret
from corn.noise.choices import SecretChoices
from corn.plan import Plan
from corn.privacy import ClippedQuery
from corn.privacy.composition import Expense, PlanTerms


@final
class SimulatedTurns:
    """Turns of all agents, one after the other; all models are mixed after the last of a step.

    With exact sums all agents have one model, and releases are averaged after the last of a step.

    Args:
        plan: the network, the budget and the noise.
        model: the user's.
        sizes: the number of samples of each agent.
        batch_size: samples per mini-batch where the budget names none; None takes all.
        seed: of noise and batches, public.
        secure: draw noise and batches from new secret keys instead.
    """

    def __init__(
        self,
        plan: Plan,
        model: UserModel,
        sizes: Sequence[int],
        *,
        batch_size: int | None,
        seed: int,
        secure: bool,
    ) -> None:
        # Longer models than the proof for floats covers are refused (docs/floats.md).
        plan.check_parameters(model.num_parameters)
        require_fitting_samples(plan.budget, sizes)
        self._plan, self.is_simulated = plan, not secure
        dtype = getattr(torch, plan.dtype)
        self._is_sum = plan.network.mixing == "sum"
        # One row per agent, or one for all: they start from the user's model.
        num_models = 1 if self._is_sum else plan.num_agents
        self._models = model.read().to(dtype).repeat(num_models, 1)
        self._mixer = Mixer(plan.network, dtype=dtype)
        self._noise = KeyedNoise(
            [plan.decomposition],
            seeds=(seed,),
            num_parameters=model.num_parameters,
            is_secret=secure,
        )
        queries = plan.budget.queries
        # One query for each agent. All of them have one clipping norm and may differ in sampling.
        self._queries = queries * plan.num_agents if len(queries) == 1 else queries
        self._samplers = [
            _make_sampler(query, size, batch_size=batch_size, seed=None if secure else own)
            # A seed for each agent: agents of one size would draw the same samples from one.
            for own, (query, size) in enumerate(
                zip(self._queries, sizes, strict=True), start=seed << 20
            )
        ]
        # Clipping and rounding in float64, as the proof for floats assumes (docs/floats.md).
        self._clip = torch.tensor([queries[0].clip], dtype=torch.float64)
        self._grid = torch.tensor([plan.grid], dtype=torch.float64)
        self._turn: Turn | None = None
        self._task = LoopTask(model, self._hand_over)
        self._gradients: Callable[[Tensor | None], Gradients] | None = None
        self._agent, self._step, self._shares = 0, 0, torch.empty(0)
        # With exact sums: the sum of a step's releases so far, in units of the grid; its offset.
        self._total, self._offset = torch.empty(0), torch.zeros(1, dtype=torch.float64)

    @cached_property
    def _precisions(self) -> list[float]:
        """[R⁻¹]_ii of each agent, against the plan's adversary."""
        precisions: list[float] = Method.from_plan(self._plan).precision.tolist()
        return precisions

    @property
    def expenses(self) -> list[Expense]:
        """See ``Turns``: agents that have not released yet in a step count too."""
        begun, budget = self._step + (self._agent > 0), self._plan.budget
        colluders = self._plan.threat.max_colluders
        return [
            Expense(PlanTerms(budget.of_agent(agent), colluders), precision, begun)
            for agent, precision in enumerate(self._precisions)
        ]

    def begin(self) -> Turn | None:
        """See ``Turns``."""
        if self._step == self._plan.budget.num_steps:
            return None
        # One draw has the shares of all agents. Of (seeds, agents, methods, d) there is one seed
        # and one method, so that (n, d) remains.
        if self._agent == 0:
            self._shares = self._noise.draw(self._step)[0, :, 0]
            offset = self._noise.draw_offset(self._step)
            # Noise without masks needs none: every single release keeps the promise.
            self._offset = self._offset if offset is None else offset[0, 0]
            self._total = torch.zeros_like(self._models[0], dtype=torch.int64)
        batch = self._samplers[self._agent].draw(self._step)
        model = self._models[0 if self._is_sum else self._agent]
        self._turn = Turn(self._agent, self._step, model, batch)
        return self._turn

    def leave(self) -> None:
        """Take no more turns; nobody waits for them."""

    @torch.no_grad()
    def release(self, gradients: Callable[[Tensor | None], Gradients]) -> Tensor | None:
        """See ``Turns``: as an agent does it, by the same functions."""
        if self._turn is None:
            raise CornError("a release must follow a batch")
        # ``compute_gradients`` asks the task, and the task hands over what the user's loop found:
        # clipping is then done by the same function as in an agent.
        self._gradients = gradients
        found = compute_gradients(
            self._task,
            self._turn.parameters.view(1, 1, -1),
            self._turn.batch,
            self._clip,
            clips_samples=self._queries[self._agent].unit == "sample",
        )
        gradient, factor = found.values.view(-1), found.factors.view(-1)
        noise = self._shares[self._agent]
        # The turn ends here: a second release in it would reuse the same noise, and raises instead.
        self._turn = None
        if not self._is_sum:
            return release(gradient, factor, noise, self._grid)
        self._total += release_integers(gradient, factor, noise, self._grid, self._offset)
        self._agent += 1
        if self._agent < self._plan.num_agents:
            return None
        return average_integers(self._total, self._agent, self._grid, self._offset)

    @torch.no_grad()
    def end(self, parameters: Tensor) -> Tensor | None:
        """Keep an agent's half step; mix after the last, and return the average model."""
        if self._is_sum:
            self._models[0] = parameters.to(self._models)
            self._agent, self._step = 0, self._step + 1
            return self._models[0]
        # Kept, not mixed yet: in a step all agents' gradients are taken before any exchange.
        self._models[self._agent] = parameters.to(self._models)
        self._agent += 1
        if self._agent < self._plan.num_agents:
            return None
        self._agent, self._step = 0, self._step + 1
        # A cool-down after the last step only mixes: it releases nothing and costs no privacy.
        rounds = 1
        if self._step == self._plan.budget.num_steps:
            rounds += self._plan.cooldown_steps
        for _ in range(rounds):
            self._models = self._mixer.mix(self._models.unsqueeze(0))[0]
        return self._models.mean(dim=0)

    def _hand_over(self, _: Tensor, __: object, sample_clip: Tensor | None) -> Gradients:
        if self._gradients is None:
            raise CornError("a release must follow a batch")
        return self._gradients(sample_clip)


def _make_sampler(
    query: ClippedQuery, size: int, *, batch_size: int | None, seed: int | None
) -> BatchSampler:
    """Return the sampler of one agent, with secret choices unless there is a seed."""
    rows = number_rows(size)
    if seed is None:
        choices = SecretChoices(coins=Secret.random(), orders=Secret.random())
        return BatchSampler.of_agent(query, rows, [choices], batch_size=batch_size)
    return BatchSampler(rows, (query,), batch_size=batch_size, choices=[SeededChoices(seed)])
