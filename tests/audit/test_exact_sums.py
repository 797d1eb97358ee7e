"""Audits of exact sums: tight on the sums that a coalition can read, and faults of masks found."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binom
from torch import Tensor

from corn.audit import AuditReport, View, audit_plan
from corn.audit.checks import uniform_p_value
from corn.audit.run import AuditedRun, derive_keys
from corn.audit.views import StreamWeights, find_smallest_break, list_worst_views
from corn.checks import FloatArray
from corn.covariance import Decomposition, SeedGroups
from corn.learn.perturbation import DrawnNoise
from corn.noise import Owner, Secret, SecureSource, draw_share
from corn.noise.masks import MaskWords, draw_offset
from corn.plan import Plan
from corn.topology import Mixing
from tests.audit.plans import agent_plan, sample_plan
from tests.oracles.message_parts import MessageParts, draw_mask, mask_release
from tests.oracles.word_statistics import WordStatistics

SHARES: dict[str, Any] = {"num_trials": 2000}
STEP: dict[str, Any] = {"through": "step", "num_trials": 500}


def sum_plan(colluders: int = 1, seeds: str | SeedGroups = "auto", graph: str = "ring:5") -> Plan:
    return agent_plan(colluders, seeds, graph=graph, mixing="sum")


def audit(settings: dict[str, Any] = SHARES, *, plan: Plan | None = None) -> AuditReport:
    victims = [1] if settings is not SHARES else [0, 1]
    return audit_plan(plan or sum_plan(), victims=victims, **settings)


def plant(monkeypatch: pytest.MonkeyPatch, **faults: Any) -> None:
    """Let agents make messages of single parts, some of them with faults."""
    parts = MessageParts(**faults)
    monkeypatch.setattr(DrawnNoise, "make_message", lambda *given: parts.make_message(*given))


@pytest.mark.parametrize(
    ("insiders", "seeds"),
    [(0, "edges"), (0, "global"), (1, "pairs"), (2, "pairs")],
)
def test_correct_code_is_tight(insiders: int, seeds: str) -> None:
    report = audit_plan(sum_plan(insiders, seeds, "er:n=12,p=0.4,seed=1"))
    assert not report.violated, (report.problems, [one.excess for one in report.findings])
    for one in report.findings:
        assert len(one.view.coalition) == insiders
        # The bound of theory is attained, and the interval of 95 % does not exclude it.
        assert one.ratio >= 0.95
        assert one.mu.low <= 1.01 * one.promise.mu
        assert 0.97 < one.mu.estimate / one.exact_mu < 1.03
    assert report.messages is not None
    assert report.messages.bits == 16


def test_agents_through_the_step_are_tight() -> None:
    report = audit(STEP)
    assert not report.violated, (report.problems, [one.excess for one in report.findings])
    assert report.findings[0].verdict == "tight"


def test_independent_noise_is_read_release_by_release() -> None:
    plan = agent_plan(0, mechanism="ldp", mixing="sum")
    # Many trials: with few, one of five agents can be above the promise by chance.
    report = audit_plan(plan, num_trials=40_000)
    assert report.messages is None
    assert {one.verdict for one in report.findings} == {"tight"}


def test_the_sum_of_an_agent_that_is_cut_off_shows() -> None:
    """On the seeds of a ring, agent 0 is alone between insiders 1 and 4."""
    plan = sum_plan(0, "edges")
    report = audit_plan(plan, view=View((1, 4)), **SHARES)
    assert {one.verdict for one in report.findings} == {"violated"}
    assert not any(one.is_promised for one in report.findings)
    alone, *others = report.findings
    # The noise of one agent instead of five, and of two.
    assert alone.ratio == pytest.approx(5**0.5, rel=0.1)
    assert [one.ratio for one in others] == pytest.approx([2.5**0.5] * 2, rel=0.1)


def test_more_insiders_than_planned_are_a_break() -> None:
    plan = sum_plan(1)
    found = find_smallest_break(plan)
    assert found is not None
    view, victim = found
    assert len(view.coalition) == 2
    precision = StreamWeights.of(plan.decomposition).precision(view)[victim]
    assert precision / plan.precision_caps[victim] == pytest.approx(4 / 3)


def test_the_worst_views_have_as_many_insiders_as_planned() -> None:
    assert {len(view.coalition) for view in list_worst_views(sum_plan(2))} == {2}


@pytest.mark.parametrize("size", [100, 2000])
def test_the_test_of_uniform_words_has_its_level(size: int) -> None:
    generator = np.random.default_rng(0)
    words = generator.integers(0, 1 << 16, (2000, size), dtype=np.uint16)
    alarms = sum(uniform_p_value(row) < 0.05 for row in words)
    assert 20 < alarms <= binom.isf(1e-3, 2000, 0.05)
    # A value that is one in a hundred words too often in the high bits, or never odd.
    assert uniform_p_value(words[0] & np.uint16(0xFFFE)) < 1e-6


def count_words(spoil: Any = None) -> WordStatistics:
    """Return the tests of two million words of messages, and of sums that lack an agent."""
    plan, found = sum_plan(1, graph="complete:4"), WordStatistics()
    for seed in range(4):
        words = AuditedRun(plan, 2, 1 << 16, seed=seed).messages
        sums = np.cumsum(words, axis=1, dtype=words.dtype)[:, :-1]
        signs = np.random.default_rng(seed).choice([-1.0, 1.0], sums.shape)
        found.add(sums if spoil is None else spoil(sums, signs), signs)
    return found


def test_words_are_uniform_and_independent() -> None:
    """``benchmarks/audit_table.py`` does so with a hundred million words."""
    found = count_words()
    assert found.num_words == 4 * 2 * 3 << 16
    assert min(found.list_p_values().values()) > 1e-4


@pytest.mark.parametrize(
    ("spoil", "test"),
    [
        (lambda words, _: words & np.uint16(0xFFFE), "low byte"),
        (lambda words, _: words | words << np.uint16(8) & np.uint16(0x0100), "high byte"),
        (lambda words, _: np.repeat(words[..., ::2], 2, axis=2), "the next coordinate"),
        (lambda words, _: words[:, [0, 0, 1]], "the next message"),
        (lambda words, _: words[[0, 0]], "the next release"),
        (lambda words, s: words + (40 * s).astype(np.int16).view(np.uint16), "nothing"),
        (lambda words, s: words - (words >> 15 << 9) * (s > 0), "the gradient"),
    ],
    ids=["low bit", "frequent bit", "coordinates", "agents", "steps", "shifted", "data"],
)
def test_words_that_are_not_are_found(spoil: Any, test: str) -> None:
    values = count_words(spoil).list_p_values()
    found = {name for name, p in values.items() if p < 1e-4}
    # A shift by the data leaves uniform words uniform: masks hide it.
    assert any(test in name for name in found) if test != "nothing" else not found


# Faults, planted into the program one by one. All checks of an audit are switched off but one, so
# that it is known which of them find the fault.


def find_nothing(*_: Any, **__: Any) -> list[str]:
    return []


CHECKS: dict[str, tuple[str, Any]] = {
    "noise": ("corn.audit.auditing.check_noise", find_nothing),
    "modulus": ("corn.audit.checks.check_modulus", find_nothing),
    "offsets": ("corn.audit.checks.list_offsets", find_nothing),
    "uniform": ("corn.audit.checks.list_masked", find_nothing),
    "sums": ("corn.audit.checks.check_sums", find_nothing),
    "keys": ("corn.audit.auditing.check_keys", find_nothing),
    "message": ("corn.audit.run.AuditedRun.recompute", AuditedRun.send),
    "sampler": ("corn.audit.auditing.check_sampler", find_nothing),
}
"""Where each check that needs no victim is, and what takes its place where it is left out."""


def find_checks(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any] = SHARES, *, plan: Plan | None = None
) -> set[str]:
    """Return the checks that find a fault, each alone; the attack on victims is one of them."""
    found = set()
    for only in CHECKS:
        with monkeypatch.context() as patch:
            for name, (where, instead) in CHECKS.items():
                if name != only:
                    patch.setattr(where, instead)
            report = audit(settings, plan=plan)
        if report.problems:
            found.add(only)
        # The attack needs none of them.
        if any(one.verdict == "violated" for one in report.findings):
            found.add("attack")
    return found


def reuse_masks(*args: Any, step: int, **rest: Any) -> MaskWords:
    return draw_mask(*args, step=step // 2, **rest)


def turn_sign(noise: Decomposition, agent: int, **rest: Any) -> MaskWords:
    drawn = draw_mask(noise, agent, **rest)
    return -drawn if agent == 2 else drawn


def draw_few_values(*args: Any, **rest: Any) -> MaskWords:
    return draw_mask(*args, **rest) & np.uint16(0x3FFF)


def draw_no_offset(nonce: bytes, step: int, size: int) -> FloatArray:
    del nonce, step
    return np.zeros(size)


def draw_one_offset(nonce: bytes, step: int, size: int) -> FloatArray:
    del step
    return draw_offset(nonce, 0, size)


def draw_too_little(noise: Decomposition, agent: int, **rest: Any) -> FloatArray:
    """Draw the noise for an eavesdropper under a promise against one insider of five agents."""
    drawn: FloatArray = draw_share(noise, agent, **rest)
    return drawn * math.sqrt(0.8)


FAULTS: list[tuple[str, Any, set[str]]] = [
    # Single messages are uniform still. The difference of two is free of masks.
    ("draw_mask", reuse_masks, {"uniform", "noise"}),
    # It does not cancel, so that the complete sum is uniform garbage.
    ("draw_mask", turn_sign, {"sums", "noise"}),
    ("draw_mask", draw_few_values, {"uniform", "sums", "noise"}),
    # The others subtract the offset that the agents left out.
    ("draw_offset", draw_no_offset, {"sums"}),
    ("draw_share", draw_too_little, {"sums", "noise", "attack"}),
]


@pytest.mark.parametrize(
    ("part", "fault", "checks"), FAULTS, ids=lambda given: getattr(given, "__name__", "")
)
def test_the_checks_that_find_a_fault(
    part: str, fault: Any, checks: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, **{part: fault})
    assert find_checks(monkeypatch) >= checks


@pytest.mark.parametrize("fault", [draw_no_offset, draw_one_offset])
def test_public_offsets_that_are_not_random(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No attacker can show this: δ changes too little."""
    plant(monkeypatch, draw_offset=fault)
    monkeypatch.setattr("corn.audit.run.draw_offset", fault)
    assert find_checks(monkeypatch) == {"offsets"}


def test_a_program_without_faults_passes_every_check(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_checks(monkeypatch) == set()
    plant(monkeypatch)
    assert find_checks(monkeypatch) == set()


def test_problems_name_the_messages_in_which_they_show(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, draw_mask=reuse_masks)
    problem = audit().problems[-1]
    assert "the difference of the message of agent" in problem
    assert "between releases 0 and 1" in problem
    assert "is not uniform" in problem
    plant(monkeypatch, draw_mask=turn_sign)
    assert any("in the sums of agents (0, 1, 2, 3, 4)" in one for one in audit().problems)


def test_a_plan_with_noise_for_fewer_insiders(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program draws what the plan says, but that is not what the plan promises."""
    plan, eavesdropper = sum_plan(1), sum_plan(0)
    theta = eavesdropper.decomposition.private_variance
    noise = replace(plan.decomposition, private_variance=theta)
    assert find_checks(monkeypatch, plan=replace(plan, decomposition=noise)) == {"attack"}


def round_apart(
    clipped: FloatArray, noise: FloatArray, *, grid: float, mask: MaskWords, **rest: Any
) -> MaskWords:
    rounded = np.rint(noise / grid).astype(np.int64).astype(mask.dtype)
    return rounded + mask_release(clipped, grid=grid, mask=mask, **rest)


def round_apart_in_gossip(
    model: Tensor, gradient: Tensor, factor: Tensor, noise: Tensor, *, grid: float, step_size: float
) -> Tensor:
    units = torch.round(gradient.double() * factor / grid) + torch.round(noise / grid)
    return (model - step_size * grid * units).float()


@pytest.mark.parametrize("mixing", ["gossip", "sum"])
def test_rounding_gradient_and_noise_apart(mixing: Mixing, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message is on the grid, and its variance changes little. It is no function of the sum."""
    plant(monkeypatch, release=round_apart)
    monkeypatch.setattr("corn.learn.step.take_half_step", round_apart_in_gossip)
    found = find_checks(monkeypatch, STEP, plan=agent_plan(mixing=mixing))
    assert found - {"attack"} == {"message"}


def test_a_modulus_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    # A mean of 4096 samples is far longer than the change by one of them.
    plan = sample_plan("every-step", "replace", batch_size=4096, mixing="sum")
    correct = audit(plan=plan)
    assert correct.messages is not None
    assert (correct.messages.bits, correct.problems) == (32, ())
    monkeypatch.setattr(Plan, "mask_bits", 16)
    assert find_checks(monkeypatch, plan=plan) == {"modulus"}


def open_source(noise: Decomposition) -> SecureSource:
    """Return streams whose keys anybody can compute."""
    owners = [Owner((agent,)) for agent in range(noise.num_agents)]
    owners += [Owner(group, number) for number, group in enumerate(noise.seed_groups)]
    return SecureSource({owner: Secret(bytes([k] * 32)) for k, owner in enumerate(owners)})


def draw_by_public_keys(noise: Decomposition, agent: int, *, source: Any, **rest: Any) -> MaskWords:
    del source
    return draw_mask(noise, agent, source=open_source(noise), **rest)


def test_masks_from_a_public_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """They cancel and are uniform, but anybody can subtract them."""
    plant(monkeypatch, draw_mask=draw_by_public_keys)
    problems = " ".join(audit().problems)
    assert "does not depend on the key of seed group 0 of agents 0, 1" in problems


@pytest.mark.parametrize("mixing", ["gossip", "sum"])
def test_noise_from_a_public_key(mixing: Mixing, monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(noise: Decomposition, agent: int, *, source: Any, **rest: Any) -> FloatArray:
        del source
        return draw_share(noise, agent, source=open_source(noise), **rest)

    plant(monkeypatch, draw_share=draw)
    monkeypatch.setattr("corn.learn.perturbation.draw_share", draw)
    problems = " ".join(audit(plan=agent_plan(mixing=mixing)).problems)
    assert "does not depend on the key of agent 0's private noise" in problems


@pytest.mark.parametrize("mixing", ["gossip", "sum"])
def test_one_key_for_all_pairs(mixing: Mixing, monkeypatch: pytest.MonkeyPatch) -> None:
    def keys(plan: Plan, seed: int) -> Sequence[Any]:
        first = Secret(bytes(range(32)))
        return [
            {owner: own[owner] if owner.group is None else first for owner in own}
            for own in derive_keys(plan, seed)
        ]

    monkeypatch.setattr("corn.audit.run.derive_keys", keys)
    assert "have one key" in " ".join(audit(plan=agent_plan(mixing=mixing)).problems)


def test_leaked_seeds_that_cut_an_agent_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agent 2 has the seeds of both links of agent 0, whose neighbours are 1 and 4."""
    plan = sum_plan(0, "edges")

    def keys(plan: Plan, seed: int) -> Sequence[Any]:
        every = derive_keys(plan, seed)
        every[2].update({own: key for own, key in every[0].items() if own.group is not None})
        return every

    monkeypatch.setattr("corn.audit.run.derive_keys", keys)
    report = audit_plan(plan, victims=[0], view=View((2,)), **SHARES)
    assert any("agent 2 has the key of" in problem for problem in report.problems)
    assert report.findings[0].ratio == pytest.approx(5**0.5, rel=0.1)
    assert report.findings[0].verdict == "violated"
