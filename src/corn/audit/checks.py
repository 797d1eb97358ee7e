"""Checks that need no victim: of keys, noise, messages under masks and the sampler.

- Keys that agents should not have, or that do not protect what they draw, show without any test
  (:func:`check_keys`).
- Noise that differs from the plan need not hurt privacy: a share with the wrong sign may only fail
  to cancel. It is still a fault, which :func:`check_noise` finds without a canary.
- Under masks a view can read one sum for each part of the agents that unknown masks join, and
  nothing else. :func:`check_messages` tests that whatever is less than such a sum is uniform modulo
  2^B: single messages, incomplete sums, and differences of messages of two steps, in which masks
  that were used twice would cancel.
- An attack on releases shows a fault of the sampler only as far as the canary's gradient shows it.
  :func:`check_sampler` reads the batches: their shape, the weights, how often and where a sample is
  in them, for data sets of several sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats

from corn.audit.observation import rate_of
from corn.audit.run import AuditedRun, keep_gradients, make_choices, make_secret
from corn.audit.views import StreamWeights, View
from corn.checks import FloatArray, IntArray
from corn.learn.batches import AgentData, Batch, BatchSampler
from corn.noise import Owner
from corn.noise.masks import MaskWords
from corn.noise.normals import OFFSET_BITS
from corn.plan import Plan
from corn.privacy import ClippedQuery

# Of the check that noise and masks follow from keys: streams and values that are drawn again, and
# the part of these values that may be equal.
_MOST_OWNERS, _VALUES, _MOST_EQUAL = 300, 64, 0.75
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


def check_keys(plan: Plan, run: AuditedRun) -> list[str]:
    """Return faults of keys that need no test.

    These are keys that agents have although the plan does not give them those keys, equal keys of
    different owners, and noise or masks that do not follow from the key of their owner, so that
    anybody can draw them. In large networks the last is checked for some owners.
    """
    leaked: list[str] = []
    equal: list[str] = []
    owners: dict[bytes, Owner] = {}
    for agent, own in enumerate(run.keys):
        for owner, key in own.items():
            if agent not in owner.members:
                leaked.append(f"agent {agent} has the key of {owner}")
            first = owners.setdefault(key.reveal(), owner)
            if first != owner:
                equal.append(f"{first} and {owner} have one key")
    # One of each kind shows the fault.
    return [*leaked, *equal[:1], *islice(_find_public_streams(plan, run), 1)]


def _find_public_streams(plan: Plan, run: AuditedRun) -> Iterator[str]:
    """Draw again with another key of one owner, which must give other values."""
    shares, least = plan.decomposition, plan.grid**2
    # Private noise below the grid may not change an integer.
    drawn = [Owner((i,)) for i, theta in enumerate(shares.private_variance) if theta > least]
    drawn += [
        Owner(group, number)
        for number, group in enumerate(shares.seed_groups)
        if shares.is_masked or shares.factors[number][0].any()
    ]
    zeros, step = keep_gradients(torch.zeros(1, _VALUES)), run.releases[0].step
    for owner in drawn[:: 1 + len(drawn) // _MOST_OWNERS]:
        agent = owner.members[0]
        keys = (run.keys[agent], {**run.keys[agent], owner: make_secret(0, "another key")})
        first, second = (
            run.send(zeros, 0, agent, own)
            if shares.is_masked
            # Before rounding, because noise of one seed group may be less than the grid.
            else run.open_share(agent, own, 0, size=_VALUES).draw(step).numpy()
            for own in keys
        )
        # Some integers are equal by chance, but not most of them.
        if (first == second).mean() > _MOST_EQUAL:
            yield (
                f"what agent {agent} draws does not depend on the key of {owner}: others can draw "
                "it too"
            )


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
    plan: Plan, run: AuditedRun, view: View, *, seed: int, alpha: float
) -> MessageCheck:
    """Test messages, offsets and complete sums; two tests at level 1 − α each.

    An eavesdropper reads messages as they are. The insiders of ``view`` remove the masks that they
    can draw.
    """
    tests = [*list_offsets(run), *list_masked(plan, run, View(), seed)]
    if view.coalition:
        tests += list_masked(plan, run, view, seed)
    values = [uniform_p_value(words) for _, words in tests]
    p = min([1.0, *(len(values) * value for value in values)])
    bits = 8 * run.messages.dtype.itemsize
    problems = [*check_modulus(plan, bits), *check_sums(plan, run, alpha)]
    if p < alpha:
        problems.append(f"{tests[int(np.argmin(values))][0]} is not uniform: p = {p:.2g}")
    return MessageCheck(bits, run.messages.shape[-1], len(tests), p, tuple(problems))


def list_offsets(run: AuditedRun) -> Iterator[tuple[str, MaskWords]]:
    """Yield the public offsets of all releases as words, with their names.

    Without offsets, sums on the grid have almost the law of a continuous sum: δ changes too little
    for any attacker to show. So they are tested by themselves. That messages contain them shows in
    the mean of their sums.
    """
    whole = np.floor(np.ldexp(run.offsets % 1.0, OFFSET_BITS)).astype(np.uint32)
    # As words of 16 bits: the first ones, and the last.
    for shift in (OFFSET_BITS - 16, 0):
        offsets = (whole >> np.uint32(shift)).astype(np.uint16)
        for r, own in enumerate(offsets):
            yield f"the public offset of release {r}", own
            for other in _list_earlier(r):
                name = f"the difference of the public offsets of releases {other} and {r}"
                yield name, own - offsets[other]


def list_masked(
    plan: Plan, run: AuditedRun, view: View, seed: int
) -> Iterator[tuple[str, MaskWords]]:
    """Yield what must be uniform to a view, with its name: everything but sums of whole parts."""
    unmasked = run.unmask(view)
    # An agent that no mask joins to others sends its release as it is.
    joined = [part for part in run.find_parts(view) if len(part) > 1]
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
            if run.gradients is not None:
                # Uniform for each sign of the gradient's value: messages do not depend on it.
                for sign in (-1, 1):
                    chosen = run.gradients[r, agent] * sign > 0
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


def check_sums(plan: Plan, run: AuditedRun, alpha: float) -> list[str]:
    """Compare the sums of whole parts with the private noise of their agents, at level 1 − α."""
    streams = StreamWeights.of(plan.decomposition)
    parts = streams.join(range(plan.num_agents), ())
    sums = run.read_sums(View())
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


def check_sampler(query: ClippedQuery, *, seed: int, alpha: float) -> list[str]:
    """Return what contradicts the sampling of a query, at level 1 − α; none for unit ``agent``.

    Nothing about a batch but the samples in it may depend on the data, not even on their number.
    """
    if query.unit == "agent" or query.batch_size is None:
        return []
    steps = query.steps_per_pass or 1
    is_poisson = query.sampling == "poisson"
    if is_poisson:
        usual, count = max(query.least_samples, 2), _NUMBERS
        sizes = {1, -(-usual // 2), usual, usual + 1}
    else:
        usual, count = query.batch_size * steps, min(2 * steps, _MOST_BATCHES)
        sizes = {1, usual - query.batch_size, usual - 1, usual, usual + 1, usual + query.batch_size}

    def draw(num_samples: int, num_runs: int) -> list[Batch]:
        names = torch.arange(num_samples, dtype=torch.float64)
        data = AgentData(names.unsqueeze(1), names, (0, num_samples))
        # Equal coins for data sets of all sizes, so that neighbours can be compared.
        choices = [make_choices(seed, run) for run in range(num_runs)]
        sampler = BatchSampler.of_agent(query, data, choices)
        return [sampler.draw(number) for number in range(count)]

    batches = {size: draw(size, _FEW_RUNS) for size in sorted(sizes - {0})}
    drawn = {size: [_read_rows(each) for each in own] for size, own in batches.items()}
    heaviest = max(float(each.weights.max()) for own in batches.values() for each in own)
    problems = _check_shapes(drawn) + _check_neighbours(drawn, usual if is_poisson else usual - 1)
    if heaviest > 1 / query.batch_size:
        size = query.batch_size
        problems.append(f"a sample has weight {heaviest:g}, where 1/{size} was counted")
    if not is_poisson:
        problems += _check_passes(drawn, steps, usual)
        return problems + _check_orders(drawn, steps, alpha=alpha)
    runs = int(np.clip(_COINS // (_NUMBERS * usual), _FEW_RUNS, _MOST_RUNS)) // 2 * 2
    many = [_read_rows(each) for each in draw(usual, runs)]
    return problems + _check_coins(many, usual, rate_of(query), alpha=alpha)


def _read_rows(batch: Batch) -> IntArray:
    """Return the numbers of the samples in each run's batch, −1 where the weight is 0."""
    return np.where(batch.weights.numpy() > 0, batch.targets.numpy(), -1).astype(np.int64)


def _find_samples(batches: Sequence[IntArray], num_samples: int) -> NDArray[np.bool_]:
    """Return which samples are in which batches, shape (batches, runs, samples)."""
    found = np.zeros((len(batches), len(batches[0]), num_samples), dtype=bool)
    for number, batch in enumerate(batches):
        run, place = np.nonzero(batch >= 0)
        found[number, run, batch[run, place]] = True
    return found


def _check_shapes(drawn: dict[int, list[IntArray]]) -> list[str]:
    problems = []
    every = sorted({batch.shape[1] for batches in drawn.values() for batch in batches})
    if len(every) > 1:
        problems.append(
            f"the shape of a batch depends on the data: batches of data sets with {min(drawn)} to "
            f"{max(drawn)} samples have {every[0]} to {every[-1]} positions"
        )
    for size, batches in drawn.items():
        if _find_samples(batches, size).sum() < sum(int((batch >= 0).sum()) for batch in batches):
            problems.append("a sample is twice in one batch")
    return problems


def _check_neighbours(drawn: dict[int, list[IntArray]], size: int) -> list[str]:
    """Compare batches with equal coins of data sets with and without one last sample."""
    pairs = zip(drawn[size], drawn[size + 1], strict=True) if size in drawn else ()
    for without, with_it in pairs:
        if not np.array_equal(without, np.where(with_it == size, -1, with_it)):
            return ["one sample more moves other samples of a batch to other positions"]
    return []


def _check_passes(drawn: dict[int, list[IntArray]], steps: int, num_slots: int) -> list[str]:
    for size, batches in drawn.items():
        found = _find_samples(batches, size)
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


def _check_orders(drawn: dict[int, list[IntArray]], steps: int, *, alpha: float) -> list[str]:
    """Compare the samples that two batches of neighbouring passes have in common."""
    # Of the largest data set, which does not fit into a pass: batches then differ most.
    size = max(drawn)
    found = _find_samples(drawn[size], size)[steps - 1 : steps + 1]
    # Of a longer pass only a part was drawn.
    if len(found) < 2:
        return []
    taken = found.sum(axis=2)
    common = (found[0] & found[1]).sum(axis=1)
    law = stats.hypergeom(size, taken[0], taken[1])
    values = 2 * np.minimum(law.cdf(common), law.sf(common - 1))
    is_chance = values.min() >= alpha / len(values)
    return [] if is_chance else ["the orders of two passes are not independent"]


def _check_coins(batches: Sequence[IntArray], size: int, rate: float, *, alpha: float) -> list[str]:
    """Compare how often samples are taken, alone and together, with independent coins."""
    found = _find_samples(batches, size)
    half = size // 2
    # Independent events and their probability, under one name.
    tests = [
        ("samples are taken with another probability than the plan's", found, rate),
        ("two runs use the same coins", found[:, ::2] & found[:, 1::2], rate**2),
        ("two samples share a coin", found[..., :half] & found[..., half : 2 * half], rate**2),
    ]
    tests += [
        (f"the coins of steps {a} and {b} are not independent", found[a] & found[b], rate**2)
        for a in range(len(found))
        for b in range(a)
    ]
    # Samples are at each position equally often. A position is taken in a batch or not: one event
    # for each batch, all independent.
    present = np.stack([batch >= 0 for batch in batches if batch.shape == batches[0].shape])
    width = present.shape[-1]
    chance = min(rate * size / width, 1.0)
    at_random = "samples are not at random positions of a batch"
    tests += [(at_random, present[..., place], chance) for place in range(width)]
    problems = [
        name
        for name, event, p in tests
        if _binomial_p_value(int(event.sum()), event.size, p) < alpha / len(tests)
    ]
    return list(dict.fromkeys(problems))[:3]


def _binomial_p_value(count: int, trials: int, probability: float) -> float:
    """Return twice the smaller tail of the binomial law."""
    law = stats.binom(trials, probability)
    return float(2 * min(law.cdf(count), law.sf(count - 1)))
