"""An audit of one training run with many canaries (Steinke, Nasr and Jagielski, 2023).

Each of m canary samples is in the training data or not, by a fair coin of its own. After the run
the attacker guesses some of the coins. If training is (ε, δ)-DP for one sample, the number of right
guesses exceeds that of randomised response only with a small probability, which bounds ε from
below. One run gives a weaker bound than many runs, but it is the run of the user's own model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from corn.audit.attacks import compute_auc
from corn.audit.run import draw_known_share
from corn.audit.views import Parts, StreamWeights, View, invert_hidden, sum_parts
from corn.checks import FloatArray, require, require_count
from corn.covariance import Decomposition
from corn.errors import InvalidArgumentError
from corn.learn.batches import AgentData, Batch
from corn.learn.mechanism import Mechanism, Trial
from corn.learn.perturbation import simulation_nonce
from corn.learn.problem import SweepSettings, TrainingProblem
from corn.learn.schedule import Schedule
from corn.learn.simulation import Simulation
from corn.noise import simulated_keys
from corn.plan import Plan
from corn.privacy import gaussian
from corn.privacy.budget import ClippedQuery

# Few sure guesses or many unsure ones: which bound is best depends on the run.
_SHARES_OF_GUESSES = (0.05, 0.125, 0.25, 0.5, 1.0)
# Canaries are this many times longer than the data, so that their gradients are clipped to C.
_LENGTH = 3.0
# Gradients of all canaries are in memory together: 2 GB in float64.
_MOST_VALUES = 1 << 28
# Right guesses of all canaries that fit into memory refute far less.
_MOST_EPSILON = 512.0
# Of two classes, one in eight of equal targets stays equal, which only weakens the attack.
_REDRAWS = 3


def guess_p_value(
    num_canaries: int, num_guesses: int, num_right: int, *, epsilon: float, delta: float
) -> float:
    """Bound the probability of this many right guesses, or more, under (ε, δ)-DP.

    Right guesses are at most as frequent as under randomised response with odds e^ε, but for up to
    2mδ guesses on average that are right for free (Theorem 5.2 of the paper).

    >>> guess_p_value(10, 10, 10, epsilon=0.0, delta=0.0) == 2.0**-10
    True
    """
    require(0 <= num_right <= num_guesses <= num_canaries, "guesses", "at most all", num_guesses)
    # 1/(1 + e^−ε), without overflow for large ε.
    chance = float(np.exp(-np.logaddexp(0.0, -epsilon)))
    tail = float(stats.binom.sf(num_right - 1, num_guesses, chance))
    if delta == 0 or num_right == 0:
        return min(tail, 1.0)
    # i free guesses help if the others fall short by at most i; each costs 1/i of their mean.
    short = np.cumsum(stats.binom.pmf(np.arange(num_right - 1, -1, -1), num_guesses, chance))
    gain = float((short / np.arange(1, num_right + 1)).max())
    return min(tail + 2 * num_canaries * delta * gain, 1.0)


def bound_epsilon_by_guesses(
    num_canaries: int, num_guesses: int, num_right: int, *, delta: float, alpha: float
) -> float:
    """Return the largest ε that this many right guesses refute at level 1 − α; 0 if none."""

    def is_refuted(epsilon: float) -> bool:
        found = guess_p_value(num_canaries, num_guesses, num_right, epsilon=epsilon, delta=delta)
        return found < alpha

    if not is_refuted(0.0):
        return 0.0
    if is_refuted(_MOST_EPSILON):
        return _MOST_EPSILON
    # Ends at an ε that is refuted: the bound is never above what the guesses prove.
    return gaussian.bisect(is_refuted, accepted=0.0, rejected=_MOST_EPSILON)


@dataclass(frozen=True, eq=False)
class Canaries:
    """Samples to put into the data, and the coins that decide which of them are there.

    Attributes:
        inputs: shape (m, …).
        targets: shape (m, …): of the samples that are included.
        others: shape (m, …): targets of the samples that take the place of excluded ones, where
            neighbouring data sets replace a sample.
        agents: shape (m,): the agent that has the canary.
        included: shape (m,).
    """

    inputs: Tensor
    targets: Tensor
    others: Tensor
    agents: NDArray[np.int64]
    included: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class OneRunReport:
    """The bound on ε that guesses about one run prove.

    Attributes:
        num_canaries: m.
        num_guesses: of those that gave the best bound.
        num_right: of these guesses.
        epsilon: the certified lower bound on ε at ``delta``.
        promised_epsilon: the largest ε that the plan promises a sample of any agent.
        delta: the largest δ, likewise.
        confidence: of the bound.
        auc: of the scores of included and excluded canaries.
    """

    num_canaries: int
    num_guesses: int
    num_right: int
    epsilon: float
    promised_epsilon: float
    delta: float
    confidence: float
    auc: float

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
    view: View | None = None,
    confidence: float = 0.99,
    seed: int = 0,
    method: Mechanism | None = None,
    track: Callable[[range], Iterable[int]] = iter,
) -> OneRunReport:
    """Train once by a plan for samples, with canaries in the data, and guess which were there.

    Args:
        plan: of unit sample.
        problem: the user's model and data.
        schedule: step sizes.
        num_canaries: m, at most one for each sample of the data.
        view: the attacker; by default an eavesdropper.
        confidence: of the bound.
        seed: of keys, coins and canaries.
        method: another program than the plan's, to be judged by the plan's promise.
        track: shows the progress of a range of steps.
    """
    if plan.budget.unit != "sample":
        raise InvalidArgumentError(
            "an audit by one run needs a plan for samples, found unit 'agent': there are too few "
            "agents to be canaries; make one with corn plan --unit sample"
        )
    query = plan.budget.of_agent(0).query
    require_count("canaries", num_canaries, least=10, most=len(problem.data.inputs))
    most = _MOST_VALUES // problem.task.num_parameters
    require(num_canaries <= most, "canaries", f"at most {most:,} for this model", num_canaries)
    canaries = make_canaries(problem.data, num_canaries, seed=seed)
    watched = _insert(problem, canaries, query)
    settings = SweepSettings(
        num_steps=plan.budget.num_steps,
        batch_size=query.batch_size,
        seeds=(seed,),
        dtype=plan.dtype,
        noise_keys="seed",
        momentum=plan.momentum,
    )
    data, _ = watched.place(settings)
    trial = Trial(method or Mechanism.from_plan(plan), schedule)
    simulation = Simulation(watched.task, data, plan.network, [trial], settings=settings)
    # It knows the data without canaries, and all canaries; of the coins it reads none.
    attacker = _Eavesdropper(plan, problem, canaries, settings, query, view or View())
    simulation.on_release = attacker.observe
    for _ in track(range(settings.num_steps)):
        simulation.advance()
    return _judge(attacker.scores, canaries.included, plan, confidence)


def make_canaries(data: AgentData, num_canaries: int, *, seed: int) -> Canaries:
    """Draw canaries far from the data, with random targets, and a coin for each."""
    # The first word separates these coins from batches and noise of the same seed.
    generator = np.random.default_rng([3, seed])
    rows = generator.choice(len(data.inputs), num_canaries, replace=False)
    inputs = data.inputs[rows].clone()
    if inputs.is_floating_point():
        # Random directions are nearly orthogonal: canaries then hide each other least.
        noise = torch.from_numpy(generator.standard_normal(inputs.shape)).to(inputs)
        inputs = noise * float(data.inputs.abs().max()) * _LENGTH

    def draw_targets() -> Tensor:
        return data.targets[
            torch.from_numpy(generator.integers(len(data.targets), size=num_canaries))
        ]

    targets, others = draw_targets(), draw_targets()
    for _ in range(_REDRAWS):
        # A sample that is replaced with itself would be no canary.
        same = (targets == others).view(num_canaries, -1).all(dim=1)
        others = torch.where(same.view(-1, *[1] * (others.dim() - 1)), draw_targets(), others)
    return Canaries(
        inputs,
        targets,
        others,
        np.arange(num_canaries) % data.num_agents,
        generator.random(num_canaries) < 0.5,
    )


def _insert(problem: TrainingProblem, canaries: Canaries, query: ClippedQuery) -> TrainingProblem:
    """Return the problem with the included canaries in the data of their agents."""
    data, parts = problem.data, []
    for agent in range(data.num_agents):
        rows = slice(data.offsets[agent], data.offsets[agent + 1])
        own = canaries.agents == agent
        taken, left = own & canaries.included, own & ~canaries.included
        if query.adjacency != "replace":
            left[:] = False
        # The number of samples is public under replace, so that excluded canaries are replaced.
        inputs = [data.inputs[rows], canaries.inputs[taken], canaries.inputs[left]]
        targets = [data.targets[rows], canaries.targets[taken], canaries.others[left]]
        parts.append((torch.cat(inputs), torch.cat(targets)))
    return replace(problem, data=AgentData.from_parts(parts))


@final
class _Eavesdropper:
    """Adds up, over all steps, how well releases fit the gradient of each canary.

    It knows all other data, and so what a batch of it contributes on average. Of exact sums it sees
    the sum of all agents alone. Insiders then subtract their noise, and of their own gradients what
    they are on average, which weakens the attack a little.
    """

    def __init__(
        self,
        plan: Plan,
        problem: TrainingProblem,
        canaries: Canaries,
        settings: SweepSettings,
        query: ClippedQuery,
        view: View,
    ) -> None:
        self._plan = plan
        self._task = problem.task
        self._canaries = canaries
        self._seed = settings.seeds[0]
        self._query = query
        self._view = view
        self._data, _ = problem.place(settings)
        honest = view.honest(plan.num_agents)
        # The agents of whose releases only a sum is seen, for each sum.
        self._parts: Parts = tuple((agent,) for agent in honest)
        if plan.network.mixing == "sum":
            self._parts = (tuple(range(plan.num_agents)),)
        self._inputs = self._task.prepare(canaries.inputs.to(settings.torch_dtype))
        self._agents = torch.from_numpy(canaries.agents)
        self._watched = np.isin(canaries.agents, honest)
        # Canaries of insiders have no place; zero keeps their index valid, see ``observe``.
        place = {agent: k for k, part in enumerate(self._parts) for agent in part}
        self._places = torch.tensor([place.get(agent, 0) for agent in canaries.agents.tolist()])
        # How often a sample is in a batch. Without Poisson sampling, all are equally often.
        size, sizes = query.batch_size or 1, self._data.sizes
        queries = [plan.budget.of_agent(agent).query for agent in range(plan.num_agents)]
        pairs = zip(queries, sizes, strict=True)
        self._rates = np.array([own.sampling_rate or min(1.0, size / m) for own, m in pairs])
        streams = StreamWeights.of(plan.decomposition)
        hidden = streams.hidden(streams.held_by(view.coalition), self._parts)
        # The coins of others are not known either: m of them have the variance m p (1 − p) times
        # the squared norm C of a contribution, spread over all parameters.
        energy = np.array(sizes) * self._rates * (1 - self._rates) * query.contribution**2
        sums = sum_parts(energy, self._parts, axis=0)
        precision = invert_hidden(hidden + np.diag(sums / self._task.num_parameters))
        self._precision = torch.from_numpy(precision)
        self.scores = np.zeros(len(canaries.included))
        self._step = 0

    def observe(self, parameters: Tensor, released: Tensor) -> None:
        """Add the scores of one step; see ``Simulation.on_release``."""
        data, canaries, n = self._data, self._canaries, self._data.num_agents
        # With exact sums all agents have one model, and what is seen is their average release.
        models, s = parameters[0, :, 0].expand(n, -1), released[0, :, 0].double()
        # The contribution of a sample, on average.
        rates = torch.from_numpy(self._rates / (self._query.batch_size or 1))
        # Of all agents' data without canaries, shape (n, d).
        expected = torch.cat(
            [
                self._differentiate(
                    models[agent : agent + 1],
                    data.inputs[data.offsets[agent] : data.offsets[agent + 1]],
                    data.targets[data.offsets[agent] : data.offsets[agent + 1]],
                    float(rates[agent]),
                )
                for agent in range(n)
            ]
        )
        # The clipped gradients of canaries at their agents' models, shape (m, d).
        own = models[self._agents]
        gap = self._differentiate(own, self._inputs, canaries.targets, 1.0)
        # A canary is there with probability ½.
        weights = rates[self._agents, None] / 2
        expected.index_add_(0, self._agents, weights * gap)
        if self._query.adjacency == "replace":
            other = self._differentiate(own, self._inputs, canaries.others, 1.0)
            expected.index_add_(0, self._agents, weights * other)
            gap = gap - other
        at = {"seed": self._seed, "step": self._step, "size": s.shape[1]}
        known = draw_known_noise(self._plan.decomposition, self._view, **at) + expected
        seen = n * s if len(s) < n else s[[agent for part in self._parts for agent in part]]
        hidden = seen - torch.from_numpy(sum_parts(known.numpy(), self._parts, axis=0))
        # ⟨gap, (Σ⁻¹ hidden)_j⟩ is the log-likelihood ratio up to constants, canary by canary.
        evidence = (self._precision @ hidden)[self._places]
        self._step += 1
        # Canaries of insiders are no secret to them, and no finding: their scores stay zero.
        self.scores += np.where(self._watched, (gap * evidence).sum(dim=1).numpy(), 0.0)

    def _differentiate(
        self, models: Tensor, inputs: Tensor, targets: Tensor, weight: float
    ) -> Tensor:
        """Return the weighted sum of the clipped gradients of each model's samples, (models, d)."""
        # One model with all its samples, or m models with one canary each.
        per_model = (len(models), len(inputs) // len(models))
        batch = Batch(
            inputs.view(*per_model, *inputs.shape[1:]),
            targets.view(*per_model, *targets.shape[1:]),
            torch.full(per_model, weight, dtype=torch.float64),
            is_average=False,
        )
        clip = torch.tensor([self._query.clip], dtype=torch.float64)
        return self._task.gradient(models.unsqueeze(1), batch, sample_clip=clip).values[:, 0]


def draw_known_noise(
    noise: Decomposition, view: View, *, seed: int, step: int, size: int
) -> Tensor:
    """Return the part of a step's noise that a view knows in a simulation of a seed, (n, d)."""
    held = StreamWeights.of(noise).held_by(view.coalition)
    keys = {own: key for own, key in simulated_keys(noise, seed=seed).items() if own in held}
    # The nonce is public: all agents of the run agree on it.
    at: dict[str, Any] = {"nonce": simulation_nonce(seed), "step": step, "size": size}
    agents = range(noise.num_agents)
    return torch.from_numpy(np.stack([draw_known_share(noise, k, keys, **at) for k in agents]))


def _judge(
    scores: FloatArray, included: NDArray[np.bool_], plan: Plan, confidence: float
) -> OneRunReport:
    # All agents have canaries, so only the weakest promise holds for every guess.
    epsilon = max(promise.epsilon for promise in plan.budget.promises)
    delta = max(promise.delta for promise in plan.budget.promises)
    m, order = len(scores), np.argsort(scores)
    # The best of several bounds holds at the level of all of them together (Bonferroni).
    alpha = (1 - confidence) / len(_SHARES_OF_GUESSES)
    best = (-1.0, 0, 0)
    for share in _SHARES_OF_GUESSES:
        # The highest scores are guessed to be included, the lowest to be excluded.
        # Rounded down, as there are at most m guesses.
        half = max(1, int(share * m / 2))
        right = int(included[order[-half:]].sum() + (~included[order[:half]]).sum())
        found = bound_epsilon_by_guesses(m, 2 * half, right, delta=delta, alpha=alpha)
        best = max(best, (found, 2 * half, right))
    return OneRunReport(
        num_canaries=m,
        num_guesses=best[1],
        num_right=best[2],
        epsilon=best[0],
        promised_epsilon=epsilon,
        delta=delta,
        confidence=confidence,
        auc=compute_auc(scores[~included], scores[included]),
    )
