"""Checks that need no victim: of noise, messages under masks, the sampler and low-order bits.

- Noise that differs from the plan need not hurt privacy: a share with the wrong sign may only fail
  to cancel. It is still a fault, which :func:`check_noise` finds without a canary.
- Under masks a view can read one sum for each part of the agents that unknown masks join, and
  nothing else. :func:`check_messages` tests that whatever is less than such a sum is uniform modulo
  2^B: single messages, incomplete sums, and differences of messages of two steps, in which masks
  that were used twice would cancel.
- An attack on releases shows a fault of the sampler only as far as the canary's gradient shows it.
  :func:`check_sampler` reads the batches: their shape, the weights, how often and where a sample is
  in them, for data sets of several sizes.
- :func:`check_bits` runs the attack on low-order bits against the messages of the program.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from scipy.special import ndtr

from corn.audit.low_order_bits import Array, FloatAttacker, Pair, p_value
from corn.audit.observation import MaskedMessages, query_of, rate_of
from corn.audit.program import STEP_SIZE, NoiseRecord, Program, ReleaseNumber
from corn.audit.views import StreamWeights, View
from corn.checks import FloatArray, IntArray
from corn.learn.batches import AgentData
from corn.learn.step import ClippedGradients
from corn.noise.masks import MaskWords
from corn.noise.normals import OFFSET_BITS
from corn.plan import Plan
from corn.privacy import ClippedQuery

# Relative. Directions with less cannot be told from rounding, and are left out of the test.
_LEAST_VARIANCE = 1e-9
# Combinations of agents with random signs, for each release.
_COMBINATIONS = 8
# Releases before each one with which it is compared.
_EARLIER = 3
# Words that each cell of a test has on average, at least, and bits of a word that are compared.
_WORDS_PER_CELL, _MOST_BITS = 50, 8
# Noise beyond this many standard deviations has a probability below 10⁻³².
_DEVIATIONS = 12.0
# Two runs show faults of shapes and passes. Frequencies need as many as time allows.
_FEW_RUNS, _MOST_RUNS = 2, 50
_COINS = 2 * 10**7
_NUMBERS = 8
# Longer passes are checked in part.
_MOST_BATCHES = 60
# Against a plain sum the attack is right in almost every trial at this length (docs/floats.md).
_DIMENSIONS = 1000
_PRACTICE_PAIRS, _PAIRS = 2, 10
_MESSAGES = 60
_DECISIONS = 20  # about each pair


def check_noise(noise: FloatArray, covariance: FloatArray, *, alpha: float) -> list[str]:
    """Return what contradicts v ~ N(0, R), independent between releases, at level 1 − α.

    Noise is multiplied by R^{-1/2}. Its means, variances and correlations over agents and releases
    are then those of independent standard normals, whose exact tests share α.

    Args:
        noise: shape (releases, n, trials).
        covariance: R, shape (n, n).
        alpha: the probability of an alarm if the noise is right.
    """
    trials = noise.shape[-1]
    values, vectors = np.linalg.eigh(covariance)
    kept = values > _LEAST_VARIANCE * values[-1]
    root = vectors[:, kept] / np.sqrt(values[kept])
    # Shape (releases · directions, trials): independent standard normals if the noise is right.
    white = np.einsum("nk,rnt->rkt", root, noise).reshape(-1, trials)
    size = len(white)
    # Bonferroni over all means, variances and pairs, across releases too: reused noise shows there.
    each = alpha / (size + size + math.comb(size, 2))
    gram = white @ white.T / trials
    mean = stats.norm.sf(np.abs(white.mean(axis=1)) * math.sqrt(trials)) * 2
    # A sum of squares of standard normals is χ² with as many degrees of freedom.
    square = np.diag(gram) * trials
    spread = 2 * np.minimum(stats.chi2.sf(square, trials), stats.chi2.cdf(square, trials))
    # Noise that is missing altogether has no correlations.
    scale = np.sqrt(np.maximum(np.diag(gram), np.finfo(float).tiny))
    off = np.clip((gram / np.outer(scale, scale))[np.triu_indices(size, 1)], -1, 1)
    with np.errstate(divide="ignore"):
        # Means are known to be zero, so that r √((N − 1)/(1 − r²)) is Student's t with N − 1
        # degrees.
        t = np.abs(off) * np.sqrt((trials - 1) / (1 - off**2))
    link = 2 * stats.t.sf(t, trials - 1)
    if min(mean.min(), spread.min(), link.min(initial=1.0)) >= each:
        return []
    return [_name_largest(noise, covariance)]


def _name_largest(noise: FloatArray, covariance: FloatArray) -> str:
    """Return the entry of the covariance over agents and releases that is furthest off."""
    releases, n, trials = noise.shape
    flat = noise.reshape(-1, trials)
    expected = np.kron(np.eye(releases), covariance)
    found = flat @ flat.T / trials
    # Var(x_i x_j) = R_ii R_jj + R_ij² for normals (Isserlis).
    variances = np.outer(np.diag(expected), np.diag(expected)) + expected**2
    error = np.abs(found - expected) / np.sqrt(np.maximum(variances, 1e-300) / trials)
    i, j = sorted(np.unravel_index(int(error.argmax()), error.shape))
    (first, a), (second, b) = divmod(int(i), n), divmod(int(j), n)
    if first != second:
        return (
            f"the noise of releases {first} and {second} is correlated: covariance "
            f"{found[i, j]:.4g} of agents {a} and {b} instead of 0"
        )
    what = f"variance of agent {a}" if a == b else f"covariance of agents {a} and {b}"
    return (
        f"the noise is not the plan's: {what} is {found[i, j]:.4g} instead of {expected[i, j]:.4g}"
    )


@dataclass(frozen=True)
class MessageCheck:
    """The tests of messages under masks, which need no victim.

    Attributes:
        bits: B, of a word of a message.
        num_words: the words of each test of uniformity.
        num_tests: the number of these tests.
        p_value: the smallest p-value of them, times their number.
        problems: what contradicts the plan.
    """

    bits: int
    num_words: int
    num_tests: int
    p_value: float
    problems: tuple[str, ...]


def check_messages(
    plan: Plan, messages: MaskedMessages, view: View, *, seed: int, alpha: float
) -> MessageCheck:
    """Test messages, offsets and complete sums; two tests at level 1 − α each.

    An eavesdropper reads messages as they are. The insiders of ``view`` remove the masks that they
    can draw.
    """
    tests = [*list_offsets(messages), *list_masked(plan, messages, View(), seed)]
    if view.coalition:
        tests += list_masked(plan, messages, view, seed)
    values = [uniform_p_value(words) for _, words in tests]
    p = min([1.0, *(len(values) * value for value in values)])
    problems = [*check_modulus(plan, messages.bits), *check_sums(plan, messages, alpha)]
    if p < alpha:
        problems.append(f"{tests[int(np.argmin(values))][0]} is not uniform: p = {p:.2g}")
    return MessageCheck(messages.bits, messages.words.shape[-1], len(tests), p, tuple(problems))


def list_offsets(messages: MaskedMessages) -> Iterator[tuple[str, MaskWords]]:
    """Yield the public offsets of all releases as words, with their names.

    Without offsets, sums on the grid have almost the law of a continuous sum: δ changes too little
    for any attacker to show. So they are tested by themselves. That messages contain them shows in
    the mean of their sums.
    """
    whole = np.floor(np.ldexp(messages.offsets % 1.0, OFFSET_BITS)).astype(np.uint32)
    # As words of 16 bits: the first ones, and the last.
    for shift in (OFFSET_BITS - 16, 0):
        offsets = (whole >> np.uint32(shift)).astype(np.uint16)
        for r, own in enumerate(offsets):
            yield f"the public offset of release {r}", own
            for other in _list_earlier(r):
                name = f"the difference of the public offsets of releases {other} and {r}"
                yield name, own - offsets[other]


def list_masked(
    plan: Plan, messages: MaskedMessages, view: View, seed: int
) -> Iterator[tuple[str, MaskWords]]:
    """Yield what must be uniform to a view, with its name: everything but sums of whole parts."""
    parts, unmasked = messages.unmask(view)
    # An agent that no mask joins to others sends its release as it is.
    joined = [part for part in parts if len(part) > 1]
    agents = [agent for part in joined for agent in part]
    to = f" to {view.describe()}" if view.coalition else ""
    generator = np.random.default_rng(seed)
    below = _list_incomplete(plan, joined)
    for r, words in enumerate(unmasked):
        for agent in agents:
            yield f"the message of agent {agent} in release {r}{to}", words[agent]
            for other in _list_earlier(r):
                name = f"the difference of agent {agent}'s messages in releases {other} and {r}{to}"
                yield name, words[agent] - unmasked[other, agent]
            if messages.gradients is not None:
                # Uniform for each sign of the gradient's value: messages do not depend on it.
                for sign in (-1, 1):
                    chosen = messages.gradients[r, agent] * sign > 0
                    if chosen.sum() >= _WORDS_PER_CELL:
                        name = (
                            f"the message of agent {agent} in release {r}, given its gradient{to}"
                        )
                        yield name, words[agent, chosen]
        for agent, members in below.items():
            name = f"the partial sum that agent {agent} sends in release {r}{to}"
            yield name, words[members].sum(axis=0, dtype=words.dtype)
        for _ in range(_COMBINATIONS if joined else 0):
            signs = _draw_signs(generator, joined, len(words))
            text = " ".join(f"{'+' if s > 0 else '−'} m_{k}" for k, s in enumerate(signs) if s)
            plus = words[signs > 0].sum(axis=0, dtype=words.dtype)
            minus = words[signs < 0].sum(axis=0, dtype=words.dtype)
            yield f"the sum {text} of messages in release {r}{to}", plus - minus


def _list_earlier(release: int) -> list[int]:
    """Return the first release and those just before: repeated masks cancel in the difference."""
    return sorted({0, *range(max(0, release - _EARLIER), release)} - {release})


def _list_incomplete(plan: Plan, joined: Sequence[tuple[int, ...]]) -> dict[int, list[int]]:
    """Return the agents of each partial sum along the tree that is no sum of whole parts."""
    tree = plan.network.tree

    def list_below(agent: int) -> list[int]:
        return [agent, *(each for child in tree.children[agent] for each in list_below(child))]

    known = {agent for part in joined for agent in part}
    found = {agent: sorted(known & set(list_below(agent))) for agent in tree.parents}
    return {
        agent: members
        for agent, members in found.items()
        if len(members) > 1
        and any(0 < len(set(part) & set(members)) < len(part) for part in joined)
    }


def check_sums(plan: Plan, messages: MaskedMessages, alpha: float) -> list[str]:
    """Compare the sums of whole parts with the private noise of their agents, at level 1 − α."""
    streams = StreamWeights.of(plan.decomposition)
    parts = streams.join(range(plan.num_agents), ())
    sums = messages.read(View(), parts)
    sizes = np.array([len(part) for part in parts])
    # Rounding to the grid adds an independent uniform error for each agent.
    covariance = streams.hidden((), parts) + np.diag(sizes * plan.grid**2 / 12)
    if not check_noise(sums, covariance, alpha=alpha):
        return []
    found, expected = sums.var(axis=(0, 2)), np.diag(covariance)
    worst = int(np.argmax(np.abs(np.log(np.maximum(found, 1e-300) / expected))))
    agents = "all agents" if len(parts) == 1 else f"agents {', '.join(map(str, parts[worst]))}"
    return [
        f"the sum of {agents} is not the plan's: mean {sums[:, worst].mean():.4g} instead of "
        f"0, variance {found[worst]:.4g} instead of {expected[worst]:.4g}, or two releases are "
        "correlated"
    ]


def check_modulus(plan: Plan, bits: int) -> list[str]:
    """Return whether the largest sum of all releases can wrap around."""
    norms = sum(plan.budget.of_agent(k).query.largest_norm for k in range(plan.num_agents))
    noise_std = math.sqrt(StreamWeights.of(plan.decomposition).covariance.sum())
    # Offset and rounding move each agent's integer by up to one and a half.
    most = (norms + _DEVIATIONS * noise_std) / plan.grid + 1.5 * plan.num_agents
    if most < 2 ** (bits - 1):
        return []
    return [
        f"messages of {bits} bits are too short: the sum of all releases can reach "
        f"±{math.ceil(most):,} grid units, and wraps around beyond ±{2 ** (bits - 1):,}"
    ]


def uniform_p_value(words: MaskWords) -> float:
    """Return the p-value of words that are uniform: χ² of their high bits, and of their low bits.

    Both tests share the level.
    """
    num_bits = int(np.clip(math.log2(len(words) / _WORDS_PER_CELL), 1, _MOST_BITS))
    cells, shift = 2**num_bits, 8 * words.dtype.itemsize - num_bits
    counts = [
        np.bincount(some.astype(np.int64), minlength=cells)
        for some in (words >> shift, words & (cells - 1))
    ]
    expected = len(words) / cells
    square = [float(((count - expected) ** 2).sum()) / expected for count in counts]
    return min(1.0, 2 * float(stats.chi2.sf(max(square), cells - 1)))


def _draw_signs(
    generator: np.random.Generator, joined: list[tuple[int, ...]], num_agents: int
) -> FloatArray:
    """Return signs −1, 0 or 1 of all agents, which differ within some part."""
    signs = np.zeros(num_agents)
    # The same sign for all of a part would be its sum, which a view may read.
    while all(len(set(signs[list(part)])) == 1 for part in joined):
        for part in joined:
            signs[list(part)] = generator.integers(-1, 2, len(part))
    return signs


def check_sampler(query: ClippedQuery, *, seed: int, program: Program, alpha: float) -> list[str]:
    """Return what contradicts the sampling of a query, at level 1 − α; none for unit ``agent``.

    Nothing about a batch but the samples in it may depend on the data, not even on their number.
    """
    if query.unit == "agent" or query.batch_size is None:
        return []
    steps = query.steps_per_pass or 1
    if query.sampling == "poisson":
        usual, count = max(query.least_samples, 2), _NUMBERS
        sizes = sorted({1, -(-usual // 2), usual, usual + 1})
    else:
        usual, count = query.batch_size * steps, min(2 * steps, _MOST_BATCHES)
        sizes = sorted({1, usual - query.batch_size, usual - 1, usual, usual + 1} - {0})
        sizes.append(usual + query.batch_size)
    drawn = {m: _Batches.draw(query, m, range(count), _FEW_RUNS, seed, program) for m in sizes}
    problems = _check_shapes(drawn) + _check_weights(drawn, query.batch_size)
    problems += _check_neighbours(drawn, usual if query.sampling == "poisson" else usual - 1)
    if query.sampling == "poisson":
        runs = int(np.clip(_COINS // (_NUMBERS * usual), _FEW_RUNS, _MOST_RUNS)) // 2 * 2
        many = _Batches.draw(query, usual, range(_NUMBERS), runs, seed, program)
        problems += _check_coins(many, rate_of(query), alpha=alpha)
    else:
        problems += _check_passes(drawn, steps, usual)
        problems += _check_orders(drawn[usual + query.batch_size], steps, alpha=alpha)
    return problems


class _Batches:
    """Batches of several runs over one data set, whose rows are known by their numbers.

    Attributes:
        rows: one array (runs, width) for each batch; −1 where the weight is 0.
        weights: of the same shapes.
    """

    def __init__(self, num_samples: int, rows: list[IntArray], weights: list[FloatArray]) -> None:
        self.num_samples = num_samples
        self.rows = rows
        self.weights = weights

    @classmethod
    def draw(
        cls,
        query: ClippedQuery,
        num_samples: int,
        numbers: Sequence[int],
        num_runs: int,
        seed: int,
        program: Program,
    ) -> _Batches:
        names = torch.arange(num_samples, dtype=torch.float64)
        data = AgentData(names.unsqueeze(1), names, (0, num_samples))
        # Equal coins for data sets of all sizes, so that neighbours can be compared.
        choices = [program.make_choices(seed, run) for run in range(num_runs)]
        sampler = program.make_sampler(query, data, choices)
        rows, weights = [], []
        for number in numbers:
            batch = sampler.draw(number)
            own = batch.weights.double().numpy()
            weights.append(own)
            rows.append(np.where(own > 0, batch.targets.numpy(), -1).astype(np.int64))
        return cls(num_samples, rows, weights)

    def find(self) -> NDArray[np.bool_]:
        """Return which rows are in which batches, shape (numbers, runs, samples)."""
        found = np.zeros((len(self.rows), len(self.rows[0]), self.num_samples), dtype=bool)
        for number, batch in enumerate(self.rows):
            run, place = np.nonzero(batch >= 0)
            found[number, run, batch[run, place]] = True
        return found


def _check_shapes(drawn: dict[int, _Batches]) -> list[str]:
    widths = {size: {own.shape[1] for own in each.rows} for size, each in drawn.items()}
    every = sorted(set.union(*widths.values()))
    if len(every) == 1:
        return []
    return [
        f"the shape of a batch depends on the data: batches of data sets with {min(drawn)} to "
        f"{max(drawn)} samples have {every[0]} to {every[-1]} positions"
    ]


def _check_weights(drawn: dict[int, _Batches], batch_size: int) -> list[str]:
    problems = []
    for each in drawn.values():
        for rows, weights in zip(each.rows, each.weights, strict=True):
            largest = float(weights.max())
            if largest > 1 / batch_size:
                problems.append(
                    f"a sample has weight {largest:g}, where 1/{batch_size} was counted"
                )
            if any(len(set(own[own >= 0])) < (own >= 0).sum() for own in rows):
                problems.append("a sample is twice in one batch")
    return problems[:1]


def _check_neighbours(drawn: dict[int, _Batches], size: int) -> list[str]:
    """Compare batches with equal coins of data sets with and without one last sample."""
    pairs = zip(drawn[size].rows, drawn[size + 1].rows, strict=True) if size in drawn else ()
    for without, with_it in pairs:
        others = np.where(with_it == size, -1, with_it)
        if without.shape != others.shape or not np.array_equal(without, others):
            return ["one sample more moves other samples of a batch to other positions"]
    return []


def _check_passes(drawn: dict[int, _Batches], steps: int, num_slots: int) -> list[str]:
    for size, each in drawn.items():
        found = each.find()
        for start in range(0, len(found), steps):
            times = found[start : start + steps].sum(axis=0)
            if times.max() > 1:
                return [f"a sample is in {times.max()} batches of one pass of {steps}"]
            filled = times.sum(axis=1)
            expected = min(size, num_slots)
            if len(found) >= start + steps and bool((filled != expected).any()):
                return [
                    f"a pass of {steps} batches uses {filled.min()} samples of {size}, where "
                    f"{expected} fit"
                ]
    return []


def _check_orders(drawn: _Batches, steps: int, *, alpha: float) -> list[str]:
    """Compare the samples that two batches of neighbouring passes have in common."""
    found = drawn.find()[steps - 1 : steps + 1]
    # Of a longer pass only a part was drawn.
    if len(found) < 2:
        return []
    taken = found.sum(axis=2)
    values = []
    for run, common in enumerate((found[0] & found[1]).sum(axis=1)):
        law = stats.hypergeom(drawn.num_samples, taken[0, run], taken[1, run])
        values.append(2 * min(law.cdf(common), law.sf(common - 1)))
    is_chance = min(values) >= alpha / len(values)
    return [] if is_chance else ["the orders of two passes are not independent"]


def _check_coins(drawn: _Batches, rate: float, *, alpha: float) -> list[str]:
    """Compare how often samples are taken, alone and together, with independent coins."""
    found = drawn.find()
    numbers, runs, size = found.shape
    half = size // 2
    # Each is a number of independent events, its count and its probability, under one name.
    tests = [
        ("samples are taken with another probability than the plan's", found, rate),
        ("two runs use the same coins", found[:, ::2] & found[:, 1::2], rate**2),
        ("two samples share a coin", found[..., :half] & found[..., half : 2 * half], rate**2),
    ]
    tests += [
        (f"the coins of steps {a} and {b} are not independent", found[a] & found[b], rate**2)
        for a in range(numbers)
        for b in range(a)
    ]
    # Samples are at each position equally often.
    present = np.stack([rows >= 0 for rows in drawn.rows if rows.shape == drawn.rows[0].shape])
    width = present.shape[-1]
    level = alpha / (len(tests) + width)
    problems = [
        name
        for name, event, p in tests
        if _binomial_p_value(int(event.sum()), event.size, p) < level
    ]
    events = present.shape[0] * runs
    chance = rate * size / width
    # A position is taken in a batch or not: one event for each batch, all independent.
    values = [_binomial_p_value(int(k), events, min(chance, 1.0)) for k in present.sum(axis=(0, 1))]
    if min(values) < level:
        problems.append("samples are not at random positions of a batch")
    return problems[:3]


def _binomial_p_value(count: int, trials: int, probability: float) -> float:
    """Return twice the smaller tail of the binomial law."""
    law = stats.binom(trials, probability)
    return float(2 * min(law.cdf(count), law.sf(count - 1)))


def check_bits(plan: Plan, victim: int, *, seed: int, program: Program, alpha: float) -> list[str]:
    """Return the success of the attack if it is more than the promise allows, at level 1 − α.

    The attacker decides between two gradients of opposite sign, from one message of the victim. It
    knows nothing of other agents' noise: the promise would allow it far more. Where releases are
    summed exactly, it knows the victim's mask and sees the integers under it.
    """
    query = query_of(plan, victim)
    row = StreamWeights.of(plan.decomposition).weights[victim]
    # A program may multiply by weights in the type of messages.
    weights = {float(kind(weight)) for weight in row[row != 0] for kind in (float, np.float32)}
    # √R_jj, because streams are independent standard normals.
    noise_std = float(np.linalg.norm(row))
    draw = _Messages(plan, victim, program)
    generator = np.random.default_rng(seed)
    pairs = [
        _draw_pair(generator, query.contribution, plan.dtype)
        for _ in range(_PRACTICE_PAIRS + _PAIRS)
    ]
    # It practises on pairs and keys of its own, none of which it is judged by.
    attacker = FloatAttacker(
        draw,
        pairs[:_PRACTICE_PAIRS],
        noise_std=noise_std,
        weights=sorted(weights),
        step_size=STEP_SIZE,
        num_messages=_MESSAGES,
        seed=2**32 + seed,
    )
    right = 0
    for number, pair in enumerate(pairs[_PRACTICE_PAIRS:]):
        for truth in (0, 1):
            # Seeds above all of the attacker's own, and different for each pair and truth.
            released = draw(pair[truth], _DECISIONS // 2, 2**33 + 2 * number + truth + 64 * seed)
            right += int(((attacker.score(pair, released) > 0) == truth).sum())
    # Both candidates have full length, so that they differ by 2C whatever the adjacency is.
    cap = float(plan.precision_caps[victim])
    # Without its mask, an agent has only its own noise, which is less than what is promised.
    precision = max(cap, noise_std**-2) if plan.decomposition.is_masked else cap
    mu = 2 * query.contribution * math.sqrt(precision)
    # The best test between N(0, 1) and N(μ, 1) with equal chances is right with Φ(μ/2).
    trials, allowed = _PAIRS * _DECISIONS, float(ndtr(mu / 2))
    if p_value(right, trials, allowed) >= alpha:
        return []
    return [
        f"low-order bits reveal gradients: {right} of {trials} decisions are right, where "
        f"{allowed:.1%} are allowed"
    ]


class _Messages:
    """Releases of known gradients with the attacker's own keys; see ``DrawReleases``."""

    def __init__(self, plan: Plan, victim: int, program: Program) -> None:
        self._plan = plan
        self._victim = victim
        self._program = program

    def __call__(self, gradient: Array, num: int, seed: int) -> Array:
        at = [ReleaseNumber(0, 0)]
        size = num * len(gradient)
        # One release of num · d coordinates: coordinates are independent, so that they stand for
        # messages.
        record = NoiseRecord(self._plan, at, size, seed=seed, program=self._program)
        noise = torch.from_numpy(record.noise[0, self._victim].reshape(num, -1))
        dtype = torch.float32 if self._plan.dtype == "float32" else torch.float64
        values = torch.from_numpy(gradient).to(dtype).expand(num, 1, -1)
        # Clipping is not attacked here: a factor of 1 leaves the candidate as it is.
        ones = torch.ones(num, 1, dtype=torch.float64)
        found = ClippedGradients(values, ones, ones, ones, torch.zeros(num, 1))
        if self._plan.decomposition.is_masked:
            messages = MaskedMessages(self._plan, record, self._program)
            words = messages.make(found, 0, self._victim, is_masked=False)
            # The offset is public, but the grid is seen without it.
            zero = np.zeros(words.shape)
            return self._program.read_average(
                words, num_agents=1, grid=self._plan.grid, offset=zero
            )
        model = torch.zeros(len(gradient), dtype=dtype)
        sent = self._program.make_messages(model, found, noise, grid=self._plan.grid)
        released: Array = sent.double().numpy() / -STEP_SIZE
        return released


def _draw_pair(generator: np.random.Generator, norm: float, dtype: str) -> Pair:
    g = generator.standard_normal(_DIMENSIONS)
    # Rounded to the type of messages, as a gradient of the model would be.
    g = (g * norm / np.linalg.norm(g)).astype(dtype).astype(np.float64)
    return g, -g
