"""Algorithm 1 of the paper for all agents of all runs at once: clip, add noise, half step, mix.

With exact sums all agents have one model. Trials of a seed share mini-batches and normals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from corn.checks import require, require_count, require_length
from corn.covariance.decomposition import Decomposition
from corn.learn.batches import (
    AgentData,
    Batch,
    BatchSampler,
    SeededChoices,
    require_fitting_samples,
)
from corn.learn.mechanism import Trial
from corn.learn.optimizers import RunOptimizers, require_exact_sums
from corn.learn.perturbation import JointNoise, KeyedNoise
from corn.learn.problem import SweepSettings
from corn.learn.step import (
    ClippedGradients,
    Mixer,
    StepStatistics,
    average_integers,
    compute_gradients,
    release,
    release_integers,
    smooth,
)
from corn.learn.tasks import Task
from corn.learn.update import check_clipping, clip_by_rule
from corn.plan.plan import require_mixing
from corn.privacy import ClippedQuery
from corn.privacy.budget import describe_queries
from corn.topology import Network

# Values of models (cells × trials × parameters) in a piece: 2¹⁸ to 2²¹ were about equally fast.
_MODEL_VALUES_AT_ONCE = 1 << 20


@final
class Simulation:
    """Models of all agents in all runs, and the step that updates them.

    ``data`` is prepared for the task, in the settings' type and device. ``parameters`` have shape
    (seeds, agents, trials, parameters), ``alive``, ``broken`` and ``num_broken`` (seeds, trials):
    runs without noise break at gradients that are not finite, others count them as zero.
    ``on_release`` is called in each step with the models before it and with what is released: all
    that an eavesdropper sees, for audits. Later steps overwrite the second tensor.
    """

    def __init__(
        self,
        task: Task,
        data: AgentData,
        network: Network,
        trials: Sequence[Trial],
        *,
        settings: SweepSettings,
    ) -> None:
        self._task = task
        self._trials = tuple(trials)
        self._settings = settings
        queries = _check_trials(self._trials, data, network, settings)
        # Checked before the first gradient: an error that depended on one would reveal it.
        is_secret = settings.noise_keys == "secret"
        if is_secret:
            _check_release(self._trials, task.num_parameters)
        self._clips_samples = bool(queries) and queries[0].unit == "sample"
        self._compute: Callable[..., ClippedGradients] = compute_gradients
        if settings.clipping is not None:
            check_clipping(settings.clipping, task.num_parameters)
            self._compute = partial(clip_by_rule, rule=settings.clipping)
        size = settings.batch_size
        if is_secret and queries:
            # One for each agent: in a common batch, sizes would change bits of other gradients.
            each = queries * data.num_agents if len(queries) == 1 else queries
            self._samplers = [
                BatchSampler.of_agent(query, data.of_agent(agent), batch_size=size)
                for agent, query in enumerate(each)
            ]
        else:
            seeded = [SeededChoices(seed) for seed in settings.seeds]
            self._samplers = [BatchSampler(data, queries, batch_size=size, choices=seeded)]
        self._num_agents = network.num_agents
        self._is_sum = network.mixing == "sum"
        self._mixer = None
        if not self._is_sum:
            self._mixer = Mixer(network, dtype=settings.torch_dtype, device=settings.device)
        is_mixed = settings.mixing is None or not self._is_sum
        require(is_mixed, "mixing", "None with exact sums, not gossip", settings.mixing)
        real = settings.torch_dtype if settings.noise_keys == "none" else torch.float64
        clips = [trial.mechanism.clip for trial in trials]
        self._clip = torch.tensor(clips, dtype=real, device=settings.device)
        grids = [trial.mechanism.grid for trial in trials]
        self._grid = torch.tensor(grids, dtype=real, device=settings.device).unsqueeze(-1)
        self._has_noise = torch.tensor([v.mechanism.noise is not None for v in self._trials])
        self._central = [k for k, v in enumerate(self._trials) if v.mechanism.is_central]
        self.step = 0
        # Mechanisms compare by identity: each gets one place in the noise, in order of appearance.
        self._mechanisms = list(dict.fromkeys(trial.mechanism for trial in self._trials))
        indices = [self._mechanisms.index(trial.mechanism) for trial in self._trials]
        self._mechanism_of = torch.tensor(indices, device=settings.device)
        self._changes = {start for each in self._mechanisms for start, _ in each.later_noise}
        self._source = self._make_source()
        self._noise: Tensor | None = None
        self._adds_at_end = isinstance(self._source, JointNoise) and self._source.is_average
        self.alive = torch.ones(len(settings.seeds), len(trials), dtype=torch.bool)
        self.broken = torch.zeros_like(self.alive)
        self.num_broken = torch.zeros(self.alive.shape, dtype=torch.long)
        starts = torch.stack([task.initialize(seed) for seed in settings.seeds])
        models = self._tensor(starts)[:, None, None, :]
        num_models = 1 if self._is_sum else network.num_agents
        self.parameters = models.expand(-1, num_models, len(trials), -1).contiguous()
        self.on_release: Callable[[Tensor, Tensor], None] | None = None
        self._memory = torch.zeros_like(self.parameters) if settings.momentum else None
        self._rule = None if settings.local_rule is None else settings.local_rule()
        self._optimizers = None
        if settings.optimizer is not None:
            require_exact_sums(network)
            self._optimizers = RunOptimizers(settings.optimizer, self.parameters)
        # Exact sums by keys are those of agents: of whole numbers, in units of the grid.
        is_keyed = isinstance(self._source, KeyedNoise)
        self._sums_integers = self._is_sum and is_keyed and min(grids) > 0
        # What agents release, or its average in exact sums, in memory that every step overwrites.
        self._released = torch.empty_like(self.parameters)
        self._total = self._released.flatten(0, 1)
        if self._sums_integers:
            self._total = torch.zeros_like(self._total, dtype=torch.int64)
        # Other devices keep memory for the next step by themselves, and are faster with much work.
        self._cells_at_once = len(settings.seeds) * self._num_agents
        if self.parameters.device.type == "cpu":
            self._cells_at_once = max(1, _MODEL_VALUES_AT_ONCE // self.parameters[0, 0].numel())

    def stop_runs(self, runs: Tensor) -> None:
        """Stop the runs marked in a mask of shape (seeds, trials); their models stay at zero."""
        # A step size of zero would not stop a run: 0 times an infinite gradient is NaN.
        self.alive &= ~runs
        stopped = runs.to(self.parameters.device)[:, None, :, None]
        self.parameters.masked_fill_(stopped, 0.0)
        if self._memory is not None:
            self._memory.masked_fill_(stopped, 0.0)

    @torch.no_grad()
    def advance(self, *, observe: bool = False) -> StepStatistics | None:
        """Run one step; return its statistics if ``observe``. Look at ``broken`` after it."""
        norms, fraction = self._release_all()
        if self.on_release is not None:
            self.on_release(self.parameters, self._released)
        self.parameters = self._update(self._released)
        self.step += 1
        if not observe:
            return None
        return StepStatistics(norms.mean(1), fraction.mean(1), self.measure_noise().to(norms))

    def measure_noise(self, *, of_average: bool = False) -> Tensor:
        """Return the mean norm of the agents' noise, or that of its average, (seeds, trials)."""
        if self._noise is None:
            return torch.zeros(self.alive.shape)
        noise = self._noise.mean(1, keepdim=True) if of_average else self._noise
        norms: Tensor = torch.linalg.vector_norm(noise, dim=-1).mean(1)
        return norms.index_select(1, self._mechanism_of)

    def _update(self, g: Tensor) -> Tensor:
        """Return the models after a step along what was released, which it overwrites."""
        step_sizes = [v.schedule.at(self.step + 1, self._settings.num_steps) for v in self._trials]
        if self._optimizers is not None:
            return self._optimizers.step(self.parameters, g, step_sizes, self.alive)
        # Zero for runs that were stopped, shape (seeds, 1, trials, 1).
        eta = self._tensor(step_sizes)
        eta = torch.mul(eta, self.alive.to(eta.device).unsqueeze(1)).unsqueeze(-1)
        if self._rule is not None:
            moved = self._rule.take_step(self.parameters, g, eta, self._mix)
            shape = tuple(self.parameters.shape)
            rule = f"one that returns models of shape {shape}"
            require(moved.shape == shape, "local_rule", rule, moved.shape)
            return moved
        direction = g if self._memory is None else smooth(self._memory, g, self._settings.momentum)
        if self._mixer is None:
            return torch.addcmul(self.parameters, direction, eta, value=-1)
        # X − η·m, written into the memory of g, which is needed no more.
        return self._mix(torch.addcmul(self.parameters, direction, eta, value=-1, out=g))

    def _mix(self, values: Tensor) -> Tensor:
        """Return values of shape (seeds, agents, trials, d) mixed over agents, as in a step."""
        mixed = self._mix_by_links(values, self.step)
        # A trusted server gives all agents the exact average, whatever the network.
        for k in self._central if self._mixer is not None else ():
            mixed[:, :, k] = values[:, :, k].mean(dim=1, keepdim=True)
        return mixed

    def _mix_by_links(self, values: Tensor, step: int) -> Tensor:
        if self._mixer is None:
            return values
        flat = values.view(*values.shape[:2], -1)
        rule = self._settings.mixing
        mixed = self._mixer.mix(flat) if rule is None else rule(flat, step)
        expected = f"a rule that keeps the shape (seeds, agents, values) = {tuple(flat.shape)}"
        require(mixed.shape == flat.shape, "mixing", expected, tuple(mixed.shape))
        return mixed.view(values.shape)

    @torch.no_grad()
    def cool_down(self) -> None:
        """Mix without new gradients, for the settings' number of steps."""
        # Rows of W sum to one, so that equal models of a trusted server stay equal.
        for number in range(self._settings.cooldown_steps):
            self.parameters = self._mix_by_links(self.parameters, self.step + number)

    def _release_all(self) -> tuple[Tensor, Tensor]:
        """Release all gradients, into ``_released``; return their norms and fractions clipped.

        Some cells at a time: mapping memory for large results takes longer than arithmetic.
        """
        if self.step in self._changes:
            self._source = self._make_source()
        self._noise = None if self._source is None else self._source.draw(self.step)
        source = self._source
        offset = source.draw_offset(self.step) if isinstance(source, KeyedNoise) else None
        if self._is_sum:
            self._total.zero_()
        models = self.parameters.flatten(0, 1)
        statistics = []
        start = 0
        for batch in self._draw_batches():
            cells = slice(start, start + len(batch.inputs))
            seed_of = torch.arange(start, cells.stop, device=models.device) // self._num_agents
            start = cells.stop
            found = self._compute(
                self._task,
                models[seed_of if self._is_sum else cells],
                batch,
                self._clip,
                clips_samples=self._clips_samples,
            )
            statistics.append((found.norms, found.fraction_clipped, found.num_broken))
            values = self._add_noise(found, cells, None if offset is None else offset[seed_of])
            if self._is_sum:
                self._total.index_add_(0, seed_of, values.to(self._total))
            else:
                self._total[cells] = values
        if self._sums_integers:
            average = average_integers(self._total, self._num_agents, self._grid, offset)
            self._released.copy_(average.view(self._released.shape))
        elif self._is_sum:
            self._released.div_(self._num_agents)
        if self._noise is not None and self._adds_at_end:
            self._released.add_(self._noise.index_select(2, self._mechanism_of))
        norms, fraction, num_broken = (
            torch.cat(column).view(-1, self._num_agents, len(self._trials))
            for column in zip(*statistics, strict=True)
        )
        # A run with noise must not stop: whether it does would reveal data that no noise covers.
        is_finite = torch.isfinite(norms).all(dim=1).cpu()
        count = num_broken.sum(dim=1).cpu()
        self.broken = (count > 0).logical_or(~is_finite) & ~self._has_noise
        self.num_broken += count * self._has_noise * self.alive
        return norms, fraction

    def _add_noise(self, found: ClippedGradients, cells: slice, offset: Tensor | None) -> Tensor:
        """Return the releases of some cells, shape (cells, trials, d), once in a step."""
        # Product, sum and rounding are one operation, for an agent and for a simulation alike.
        factors = found.factors.unsqueeze(-1)
        if self._noise is None or self._adds_at_end:
            return found.values * factors
        noise = self._noise.flatten(0, 1)[cells].index_select(1, self._mechanism_of)
        if self._sums_integers:
            return release_integers(found.values, factors, noise, self._grid, offset)
        return release(found.values, factors, noise, self._grid)

    def _draw_batches(self) -> list[Batch]:
        """Return the mini-batches of each piece: of some cells, or of one agent."""
        first, *others = [own.draw(self.step) for own in self._samplers]
        return [first, *others] if others else first.split(self._cells_at_once)

    def _make_source(self) -> JointNoise | KeyedNoise | None:
        """Return the source of all mechanisms' noise from this step on; None if none has noise."""
        if all(mechanism.noise is None for mechanism in self._mechanisms):
            return None
        # Mechanisms without noise get shares of zero, so that all mechanisms have the same layout.
        silence = Decomposition(np.zeros(self._num_agents))
        shares = [mechanism.noise_at(self.step) or silence for mechanism in self._mechanisms]
        settings = self._settings
        where: dict[str, Any] = {
            "seeds": settings.seeds,
            "num_parameters": self._task.num_parameters,
            "device": settings.device,
        }
        if settings.noise_keys != "none":
            return KeyedNoise(shares, is_secret=settings.noise_keys == "secret", **where)
        if self._is_sum:
            totals = [
                part.total_variance + self._num_agents * mechanism.grid**2 / 12
                for part, mechanism in zip(shares, self._mechanisms, strict=True)
            ]
            # The square of a float has that float as its root, so that no bit is lost.
            stds = np.sqrt(totals) / self._num_agents
            shares = [Decomposition(np.array([std**2])) for std in stds]
        # Without keys only the joint distribution matters, so R^{1/2} replaces the agents' shares.
        return JointNoise(shares, dtype=settings.torch_dtype, is_average=self._is_sum, **where)

    def _tensor(self, values: object) -> Tensor:
        settings = self._settings
        return torch.as_tensor(values, dtype=settings.torch_dtype, device=settings.device)


def _check_trials(
    trials: Sequence[Trial], data: AgentData, network: Network, settings: SweepSettings
) -> tuple[ClippedQuery, ...]:
    """Return the queries that all clipping trials share, up to their norm; none if none clips."""
    require(len(trials) > 0, "trials", "at least one", "none")
    require_length("data", data.num_agents, network.num_agents, per="agent")
    # All trials share their mini-batches. With one norm for all, equal samplings compare equal.
    kinds = {}
    for mechanism in dict.fromkeys(trial.mechanism for trial in trials):
        if mechanism.queries:
            kinds[tuple(replace(own, clip=1.0) for own in mechanism.queries)] = mechanism.queries
        if mechanism.noise is None or mechanism.budget is None:
            continue
        of = f"the noise of {mechanism.name!r}"
        require_length(of, mechanism.noise.num_agents, network.num_agents, per="agent")
        require_mixing(mechanism.noise, network)
        # Every step spends ε. Fewer steps than planned spend less, more would exceed the promise.
        require_count("num_steps", settings.num_steps, most=mechanism.budget.num_steps)
        require_fitting_samples(mechanism.budget, data.sizes)
    found = sorted({describe_queries(each) for each in kinds.values()})
    rule = "of one unit, batch size and sampling"
    require(len(kinds) <= 1, "all mechanisms", rule, "; and ".join(found))
    queries = next(iter(kinds.values()), ())
    batch_size = queries[0].batch_size if queries else None
    rule = f"{batch_size}, for which privacy was counted"
    require(batch_size in (None, settings.batch_size), "batch_size", rule, settings.batch_size)
    return queries


def _check_release(trials: Sequence[Trial], num_parameters: int) -> None:
    """Raise unless there is one run whose promise holds in floating point, as releases need."""
    # Two runs on the same data would spend twice, and releases with shared noise have none.
    require(len(trials) == 1, "trials", "one for a run with secret keys", len(trials))
    mechanism = trials[0].mechanism
    is_exact = mechanism.budget is None or (mechanism.counts_floats and mechanism.grid > 0)
    rule = "one that counts floating point, as of a plan, for secret keys"
    require(is_exact, "mechanism", rule, repr(mechanism.name))
    mechanism.check_parameters(num_parameters)
