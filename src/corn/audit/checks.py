"""Checks that need no victim: of keys, noise, messages under masks and the sampler.

Noise that differs from the plan need not hurt privacy: a share with the wrong sign may only fail to
cancel. And an attack shows a fault of the sampler only as far as the canary's gradient shows it.
Both are faults of the program all the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats

from corn.audit.run import AuditedRun, make_choices, make_secret, rate_of
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


def check_keys(run: AuditedRun) -> list[str]:
    """Return keys that agents should not have, equal keys of owners, and keys without effect.

    Noise or masks that do not follow from the key of their owner can be drawn by anybody. In large
    networks this is checked for some owners.
    """
    leaked, equal = list[str](), list[str]()
    owners: dict[bytes, Owner] = {}
    for agent, own in enumerate(run.keys):
        for owner, key in own.items():
            if agent not in owner.members:
                leaked.append(f"agent {agent} has the key of {owner}")
            first = owners.setdefault(key.reveal(), owner)
            if first != owner:
                equal.append(f"{first} and {owner} have one key")
    # One of each kind shows the fault.
    return [*leaked, *equal[:1], *islice(_find_public_streams(run), 1)]


def _find_public_streams(run: AuditedRun) -> Iterator[str]:
    """Draw again with another key of one owner, which must give other values."""
    shares, step = run.plan.decomposition, run.releases[0][1]
    # Private noise below the grid may not change an integer.
    is_drawn = shares.private_variance > run.plan.grid**2
    drawn = [Owner((agent,)) for agent in np.flatnonzero(is_drawn).tolist()]
    drawn += [
        Owner(group, number)
        for number, group in enumerate(shares.seed_groups)
        if shares.is_masked or shares.factors[number][0].any()
    ]
    for owner in drawn[:: 1 + len(drawn) // _MOST_OWNERS]:
        agent = owner.members[0]
        keys = (run.keys[agent], {**run.keys[agent], owner: make_secret(0, "another key")})
        first, second = (
            run.send(torch.zeros(_VALUES), 0, agent, own)
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

    Noise, of shape (releases, n, trials), is multiplied by R^{-1/2}. Its means, variances and
    correlations over agents and releases are then those of independent standard normals, whose
    exact tests share α.
    """
    releases, n, trials = noise.shape
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
    # Named is the entry of the covariance that is furthest off, in standard deviations of both.
    flat = noise.reshape(-1, trials)
    found, expected = flat @ flat.T / trials, np.kron(np.eye(releases), covariance)
    stds = np.sqrt(np.maximum(np.diag(expected), 1e-300))
    error = np.abs(found - expected) / np.outer(stds, stds)
    i, j = np.unravel_index(int(error.argmax()), error.shape)
    (first, a), (second, b) = divmod(int(i), n), divmod(int(j), n)
    return [
        f"the noise is not the plan's: covariance of agent {a} in release {first} and agent {b} "
        f"in release {second} is {found[i, j]:.4g} instead of {expected[i, j]:.4g}"
    ]


@dataclass(frozen=True)
class MessageCheck:
    """The tests of messages under masks, which need no victim."""

    bits: int  # B, of a word of a message
    num_words: int  # of each test of uniformity
    num_tests: int
    p_value: float  # the smallest of these tests, times their number
    problems: tuple[str, ...]


def check_messages(run: AuditedRun, view: View, *, seed: int, alpha: float) -> MessageCheck:
    """Test messages, offsets and complete sums; two tests at level 1 − α each.

    Under masks a view can read one sum for each part of the agents that unknown masks join.
    Whatever is less than such a sum must be uniform modulo 2^B.
    """
    tests = [*list_offsets(run)]
    # An eavesdropper reads messages as they are. Insiders remove the masks that they can draw.
    for attacker in dict.fromkeys((View(), view)):
        tests += list_masked(run, attacker, seed)
    values = [uniform_p_value(words) for _, words in tests]
    p = min([1.0, *(len(values) * value for value in values)])
    bits = 8 * run.messages.dtype.itemsize
    problems = [*check_modulus(run.plan, bits), *check_sums(run, alpha)]
    if p < alpha:
        problems.append(f"{tests[int(np.argmin(values))][0]} is not uniform: p = {p:.2g}")
    return MessageCheck(bits, run.messages.shape[-1], len(tests), p, tuple(problems))


def list_offsets(run: AuditedRun) -> Iterator[tuple[str, MaskWords]]:
    """Yield the public offsets of all releases as words, with their names.

    They are tested by themselves: without them δ changes too little for any attacker to show. That
    messages contain them shows in the mean of their sums.
    """
    whole = np.floor(np.ldexp(run.offsets % 1.0, OFFSET_BITS)).astype(np.uint32)
    # As words of 16 bits: the first ones, and the last.
    for shift in (OFFSET_BITS - 16, 0):
        offsets = (whole >> np.uint32(shift)).astype(np.uint16)
        for r in range(len(offsets)):
            yield from _list_differences("the public offset", offsets, r)


def list_masked(run: AuditedRun, view: View, seed: int) -> Iterator[tuple[str, MaskWords]]:
    """Yield what must be uniform to a view, with its name: everything but sums of whole parts."""
    unmasked = run.unmask(view)
    # An agent that no mask joins to others sends its release as it is.
    joined = [part for part in run.find_parts(view) if len(part) > 1]
    agents = [agent for part in joined for agent in part]
    to = f" to {view.describe()}" if view.coalition else ""
    generator = np.random.default_rng(seed)
    for r, words in enumerate(unmasked):
        for agent in agents:
            yield from _list_differences(f"the message of agent {agent}{to}", unmasked[:, agent], r)
        for part in joined:
            # The first agents of a random order: some of a sum, but never all of it.
            sums = np.cumsum(words[generator.permutation(part)], axis=0, dtype=words.dtype)
            for size, own in enumerate(sums[1:-1], start=2):
                yield f"the sum of {size} agents' messages in release {r}{to}", own


def _list_differences(name: str, words: MaskWords, release: int) -> Iterator[tuple[str, MaskWords]]:
    """Yield the words of a release, and their differences from the first and some just before.

    Repeated masks cancel in the difference.
    """
    yield f"{name} in release {release}", words[release]
    for other in sorted({0, *range(max(0, release - _EARLIER), release)} - {release}):
        between = f"between releases {other} and {release}"
        yield f"the difference of {name} {between}", words[release] - words[other]


def uniform_p_value(words: MaskWords) -> float:
    """Return the p-value of words that are uniform, by χ² of their high and of their low bits."""
    num_bits = int(np.clip(math.log2(len(words) / _WORDS_PER_CELL), 1, _MOST_BITS))
    cells, shift = 2**num_bits, 8 * words.dtype.itemsize - num_bits
    parts = (words >> shift, words & (cells - 1))
    counts = [np.bincount(part.astype(np.int64), minlength=cells) for part in parts]
    return min(1.0, 2 * min(float(stats.chisquare(count).pvalue) for count in counts))


def check_sums(run: AuditedRun, alpha: float) -> list[str]:
    """Compare the sums of whole parts with the private noise of their agents, at level 1 − α."""
    streams = StreamWeights.of(run.plan.decomposition)
    parts = run.find_parts(View())
    # Rounding to the grid adds an independent uniform error for each agent.
    rounding = np.diag([len(part) * run.plan.grid**2 / 12 for part in parts])
    found = check_noise(run.read_sums(View()), streams.hidden((), parts) + rounding, alpha=alpha)
    return [f"in the sums of agents {', '.join(map(str, parts))}, {problem}" for problem in found]


def check_modulus(plan: Plan, bits: int) -> list[str]:
    """Return whether the largest sum of all releases can wrap around."""
    norms = sum(plan.budget.of_agent(k).query.largest_norm for k in range(plan.num_agents))
    noise_std = math.sqrt(StreamWeights.of(plan.decomposition).hidden(()).sum())
    # Offset and rounding move each agent's integer by up to one and a half.
    most = (norms + _DEVIATIONS * noise_std) / plan.grid + 1.5 * plan.num_agents
    if most < 2 ** (bits - 1):
        return []
    return [
        f"messages of {bits} bits are too short: the sum of all releases can reach "
        f"±{math.ceil(most):,} grid units, and wraps around beyond ±{2 ** (bits - 1):,}"
    ]


def check_sampler(query: ClippedQuery, *, seed: int, alpha: float) -> list[str]:
    """Return what contradicts the sampling of a query, at level 1 − α; none for unit ``agent``.

    Nothing about a batch but the samples in it may depend on the data, not even on their number.
    """
    if query.unit == "agent" or query.batch_size is None:
        return []
    steps, is_poisson = query.steps_per_pass or 1, query.sampling == "poisson"
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
    taken = {size: _find_samples(own, size) for size, own in drawn.items()}
    problems = []
    widths = sorted({rows.shape[1] for own in drawn.values() for rows in own})
    if len(widths) > 1:
        problems.append(
            f"the shape of a batch depends on the data: batches of data sets with {min(drawn)} to "
            f"{max(drawn)} samples have {widths[0]} to {widths[-1]} positions"
        )
    if any(taken[size].sum() < sum((rows >= 0).sum() for rows in drawn[size]) for size in drawn):
        problems.append("a sample is twice in one batch")
    # The batches of data sets with and without one last sample.
    fewer = usual if is_poisson else usual - 1
    pairs = zip(drawn.get(fewer, []), drawn[fewer + 1], strict=fewer in drawn)
    if any(not np.array_equal(own, np.where(more == fewer, -1, more)) for own, more in pairs):
        problems.append("one sample more moves other samples of a batch to other positions")
    heaviest = max(float(each.weights.max()) for own in batches.values() for each in own)
    if heaviest > 1 / query.batch_size:
        problems.append(f"a sample has weight {heaviest:g}, where 1/{query.batch_size} was counted")
    if not is_poisson:
        return problems + _check_passes(taken, steps, usual, alpha=alpha)
    runs = int(np.clip(_COINS // (_NUMBERS * usual), _FEW_RUNS, _MOST_RUNS)) // 2 * 2
    many = [_read_rows(each) for each in draw(usual, runs)]
    return problems + _check_coins(many, usual, rate_of(query), alpha=alpha)


def _read_rows(batch: Batch) -> IntArray:
    """Return the numbers of the samples in each run's batch, −1 where the weight is 0."""
    return np.where(batch.weights.numpy() > 0, batch.targets.numpy(), -1).astype(np.int64)


def _find_samples(batches: Sequence[IntArray], num_samples: int) -> NDArray[np.bool_]:
    """Return which samples are in which batches, shape (batches, runs, samples)."""
    names = np.arange(num_samples)
    return np.array([[np.isin(names, row) for row in batch] for batch in batches])


def _check_passes(
    taken: dict[int, NDArray[np.bool_]], steps: int, num_slots: int, *, alpha: float
) -> list[str]:
    """Return what contradicts passes in which each sample that fits is used once."""
    for size, found in taken.items():
        for start in range(0, len(found), steps):
            times = found[start : start + steps].sum(axis=0)
            if times.max() > 1:
                return [f"a sample is in {times.max()} batches of one pass of {steps}"]
            filled, expected = times.sum(axis=1), min(size, num_slots)
            if len(found) >= start + steps and bool((filled != expected).any()):
                return [
                    f"a pass of {steps} batches uses {filled.min()} samples of {size}, where "
                    f"{expected} fit"
                ]
    # Of the largest data set, which does not fit into a pass: batches then differ most. Two batches
    # of neighbouring passes have samples in common by chance. Of a longer pass a part was drawn.
    size = max(taken)
    found = taken[size][steps - 1 : steps + 1]
    if len(found) < 2:
        return []
    law = stats.hypergeom(size, *found.sum(axis=2))
    common = (found[0] & found[1]).sum(axis=1)
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
        (f"the coins of steps {b} and {a} are not independent", found[a] & found[b], rate**2)
        for a, b in combinations(range(len(found)), 2)
    ]
    # Samples are at each position equally often. A position is taken in a batch or not: one event
    # for each batch, all independent.
    present = np.stack([batch >= 0 for batch in batches if batch.shape == batches[0].shape])
    width = present.shape[-1]
    chance = min(rate * size / width, 1.0)
    at_random = "samples are not at random positions of a batch"
    tests += [(at_random, present[..., place], chance) for place in range(width)]
    problems = []
    for name, event, p in tests:
        law, times = stats.binom(event.size, p), int(event.sum())
        if 2 * min(law.cdf(times), law.sf(times - 1)) < alpha / len(tests):
            problems.append(name)
    return list(dict.fromkeys(problems))[:3]
