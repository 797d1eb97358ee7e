"""An audit of one training run with many canaries (Steinke, Nasr and Jagielski, 2023).

Each of m canary samples is in the training data or not, by a fair coin of its own. After the run
the attacker guesses some of the coins. If training is (ε, δ)-DP for one sample, the number of right
guesses exceeds that of randomised response only with a small probability, which bounds ε from
below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import final

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from corn.audit.attacks import compute_auc
from corn.audit.run import query_of
from corn.audit.views import StreamWeights, invert_hidden
from corn.checks import require_count
from corn.errors import InvalidArgumentError
from corn.learn.batches import AgentData, Batch
from corn.learn.mechanism import Mechanism, Trial
from corn.learn.problem import SweepSettings, TrainingProblem
from corn.learn.schedule import Schedule
from corn.learn.simulation import Simulation
from corn.plan import Plan
from corn.privacy import gaussian

# Few sure guesses or many unsure ones: which bound is best depends on the run.
_SHARES_OF_GUESSES = (0.05, 0.125, 0.25, 0.5, 1.0)
# Canaries are this many times longer than the data, so that their gradients are clipped to C.
_LENGTH = 3.0
# In float64 randomised response with this ε is always right, and no guesses refute it.
_MOST_EPSILON = 64.0


@dataclass(frozen=True)
class OneRunReport:
    """The bound on ε that guesses about one run prove."""

    num_canaries: int
    num_guesses: int  # of those that gave the best bound
    num_right: int  # of these guesses
    epsilon: float  # the certified lower bound at ``delta``
    promised_epsilon: float  # the largest ε that the plan promises a sample of any agent
    delta: float  # the largest δ, likewise
    auc: float  # of the scores of included and excluded canaries

    @property
    def violated(self) -> bool:
        """Whether the bound exceeds the promise."""
        return self.epsilon > self.promised_epsilon


def audit_training(
    plan: Plan,
    problem: TrainingProblem,
    *,
    schedule: Schedule,
    num_canaries: int = 500,
    confidence: float = 0.99,
    seed: int = 0,
    method: Mechanism | None = None,
    track: Callable[[range], Iterable[int]] = iter,
) -> OneRunReport:
    """Train once by a plan for samples, with canaries in the data that an eavesdropper guesses.

    Args:
        plan: of unit sample.
        problem: the user's model and data.
        schedule: step sizes.
        num_canaries: m, at most one for each sample of the data.
        confidence: of the bound.
        seed: of keys, coins and canaries.
        method: another program than the plan's, judged by the plan's promise.
        track: shows the progress of a range of steps.
    """
    if plan.budget.unit != "sample":
        raise InvalidArgumentError(
            "an audit by one run needs a plan for samples, found unit 'agent': there are too few "
            "agents to be canaries; make one with corn plan --unit sample"
        )
    require_count("canaries", num_canaries, least=10, most=len(problem.data.inputs))
    settings = SweepSettings(
        num_steps=plan.budget.num_steps,
        batch_size=query_of(plan, 0).batch_size,
        seeds=(seed,),
        dtype=plan.dtype,
        noise_keys="seed",
        momentum=plan.momentum,
    )
    attacker = _Eavesdropper(plan, problem, settings, num_canaries)
    data, _ = replace(problem, data=attacker.insert(problem.data)).place(settings)
    trial = Trial(method or Mechanism.from_plan(plan), schedule)
    simulation = Simulation(problem.task, data, plan.network, [trial], settings=settings)
    simulation.on_release = attacker.observe
    for _ in track(range(settings.num_steps)):
        simulation.advance()
    return attacker.judge(confidence)


@final
class _Eavesdropper:
    """Draws canaries, and adds up over all steps how well releases fit the gradient of each.

    It knows all other data, and so what a batch of it contributes on average. Of exact sums it sees
    the sum of all agents alone.
    """

    def __init__(
        self, plan: Plan, problem: TrainingProblem, settings: SweepSettings, num_canaries: int
    ) -> None:
        self._plan = plan
        self._task = problem.task
        self._query = query_of(plan, 0)
        self._is_replace = self._query.adjacency == "replace"
        self._data, _ = problem.place(settings)
        n, data = plan.num_agents, problem.data
        # The first word separates these coins from batches and noise of the same seed.
        generator = np.random.default_rng([3, *settings.seeds])
        rows = generator.choice(len(data.inputs), num_canaries, replace=False)
        self._inputs = data.inputs[rows].clone()
        if data.inputs.is_floating_point():
            # Random directions are nearly orthogonal: canaries then hide each other least.
            noise = torch.from_numpy(generator.standard_normal(self._inputs.shape))
            self._inputs = noise.to(data.inputs) * float(data.inputs.abs().max()) * _LENGTH

        def draw_targets() -> Tensor:
            chosen = generator.integers(len(data.targets), size=num_canaries)
            return data.targets[torch.from_numpy(chosen)]

        # Where neighbouring data sets replace a sample, another target does so to each canary. Few
        # are equal after three draws, which only weakens the attack.
        self._targets, self._others = draw_targets(), draw_targets()
        for _ in range(3):
            same = (self._targets == self._others).view(num_canaries, -1).all(dim=1)
            same = same.view(-1, *[1] * (self._others.dim() - 1))
            self._others = torch.where(same, draw_targets(), self._others)
        self._agents = torch.arange(num_canaries) % n
        self._included = generator.random(num_canaries) < 0.5
        self._scores = np.zeros(num_canaries)
        # How often a sample is in a batch. Without Poisson sampling, all are equally often.
        batch_size, sizes = self._query.batch_size or 1, np.array(self._data.sizes)
        given = [query_of(plan, agent).sampling_rate for agent in range(n)]
        rates = np.minimum(1.0, batch_size / sizes) if None in given else np.array(given, float)
        # The contribution of a sample, on average.
        self._weights = torch.from_numpy(rates / batch_size)
        # The coins of others are not known either: m of them have the variance m p (1 − p) times
        # the squared norm C of a contribution, spread over all parameters.
        spread = np.diag(sizes * rates * (1 - rates)) * self._query.contribution**2
        covariance = StreamWeights.of(plan.decomposition).hidden(())
        covariance += spread / self._task.num_parameters
        # Each row is a sum of agents' releases that is seen.
        seen = np.ones((1, n)) if plan.network.mixing == "sum" else np.eye(n)
        self._seen = torch.from_numpy(seen)
        self._precision = torch.from_numpy(seen.T @ invert_hidden(seen @ covariance @ seen.T))

    def insert(self, data: AgentData) -> AgentData:
        """Return the data with the included canaries in those of their agents."""
        parts, included = [], torch.from_numpy(self._included)
        for agent in range(data.num_agents):
            own, mine = data.of_agent(agent), self._agents == agent
            taken, left = mine & included, mine & ~included & self._is_replace
            # The number of samples is public under replace, so that excluded ones are replaced.
            inputs = torch.cat([own.inputs, self._inputs[taken], self._inputs[left]])
            targets = torch.cat([own.targets, self._targets[taken], self._others[left]])
            parts.append((inputs, targets))
        return AgentData.from_parts(parts)

    def observe(self, parameters: Tensor, released: Tensor) -> None:
        """Add the scores of one step; see ``Simulation.on_release``."""
        data, n = self._data, self._plan.num_agents
        # With exact sums all agents have one model, and what is seen is their average release.
        models, seen = parameters[0, :, 0].expand(n, -1), released[0, :, 0].double()
        seen = n * seen if len(seen) < n else seen
        # Of all agents' data without canaries, shape (n, d).
        parts = [
            self._differentiate(models[agent : agent + 1], own.inputs, own.targets)
            for agent, own in enumerate(map(data.of_agent, range(n)))
        ]
        expected = self._weights[:, None] * torch.cat(parts)
        # The clipped gradients of canaries at their agents' models, shape (m, d).
        models, inputs = models[self._agents], self._task.prepare(self._inputs.to(models.dtype))
        # A canary is there with probability ½.
        weights = self._weights[self._agents, None] / 2
        gap = self._differentiate(models, inputs, self._targets)
        expected.index_add_(0, self._agents, weights * gap)
        if self._is_replace:
            other = self._differentiate(models, inputs, self._others)
            expected.index_add_(0, self._agents, weights * other)
            gap = gap - other
        # ⟨gap, (Σ⁻¹ hidden)_j⟩ is the log-likelihood ratio up to constants, canary by canary.
        evidence = self._precision @ (seen - self._seen @ expected)
        self._scores += (gap * evidence[self._agents]).sum(dim=1).numpy()

    def _differentiate(self, models: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the clipped gradients of each model's samples, shape (models, d)."""
        # One model with all its samples, or m models with one canary each.
        per_model = (len(models), len(inputs) // len(models))
        batch = Batch(
            inputs.view(*per_model, *inputs.shape[1:]),
            targets.view(*per_model, *targets.shape[1:]),
            torch.ones(per_model, dtype=torch.float64),
            is_average=False,
        )
        clip = torch.tensor([self._query.clip], dtype=torch.float64)
        return self._task.gradient(models.unsqueeze(1), batch, sample_clip=clip).values[:, 0]

    def judge(self, confidence: float) -> OneRunReport:
        """Guess the coins of the canaries with the highest and the lowest scores."""
        # All agents have canaries, so only the weakest promise holds for every guess.
        promises, scores, included = self._plan.budget.promises, self._scores, self._included
        delta = max(promise.delta for promise in promises)
        m, order = len(scores), np.argsort(scores)
        # The best of several bounds holds at the level of all of them together (Bonferroni).
        alpha = (1 - confidence) / len(_SHARES_OF_GUESSES)
        best = (-1.0, 0, 0)
        for share in _SHARES_OF_GUESSES:
            half = max(1, int(share * m / 2))
            right = int(included[order[-half:]].sum() + (~included[order[:half]]).sum())
            found = bound_epsilon_by_guesses(m, 2 * half, right, delta=delta, alpha=alpha)
            best = max(best, (found, 2 * half, right))
        epsilon, num_guesses, num_right = best
        auc = compute_auc(scores[~included], scores[included])
        promised = max(promise.epsilon for promise in promises)
        return OneRunReport(m, num_guesses, num_right, epsilon, promised, delta, auc)


def bound_epsilon_by_guesses(
    num_canaries: int, num_guesses: int, num_right: int, *, delta: float, alpha: float
) -> float:
    """Return the largest ε that this many right guesses refute at level 1 − α; 0 if none."""

    def is_refuted(epsilon: float) -> bool:
        found = guess_p_value(num_canaries, num_guesses, num_right, epsilon=epsilon, delta=delta)
        return found < alpha

    if not is_refuted(0.0):
        return 0.0
    # Ends at an ε that is refuted: the bound is never above what the guesses prove.
    return gaussian.bisect(is_refuted, accepted=0.0, rejected=_MOST_EPSILON)


def guess_p_value(
    num_canaries: int, num_guesses: int, num_right: int, *, epsilon: float, delta: float
) -> float:
    """Bound the probability of this many right guesses, or more, under (ε, δ)-DP.

    Right guesses are at most as frequent as under randomised response with odds e^ε, but for up to
    2mδ guesses on average that are right for free (Theorem 5.2 of the paper).
    """
    # 1/(1 + e^−ε), without overflow for large ε.
    chance = float(np.exp(-np.logaddexp(0.0, -epsilon)))
    tail = float(stats.binom.sf(num_right - 1, num_guesses, chance))
    if delta == 0 or num_right == 0:
        return min(tail, 1.0)
    # i free guesses help if the others fall short by at most i; each costs 1/i of their mean.
    short = np.cumsum(stats.binom.pmf(np.arange(num_right - 1, -1, -1), num_guesses, chance))
    gain = float((short / np.arange(1, num_right + 1)).max())
    return min(tail + 2 * num_canaries * delta * gain, 1.0)
