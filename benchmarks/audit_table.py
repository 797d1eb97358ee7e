"""Promised ε next to what attackers certify, for mechanisms, arrangements of seeds and samplings.

Run ``python benchmarks/audit_table.py [--trials N] [--words N] [--only TEXT] [--out FILE]``.

Each row audits one plan (``corn.audit``) on a random graph of 12 agents: the worst attacker of the
plan's threat against every agent, or the attacker that the row names. Certified bounds hold
together for all agents of a row, at 99 %. A second table tests 10⁸ words of messages of exact sums,
and of partial sums.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from corn import Plan, PrivacyBudget, ThreatModel, load_network, make_plan
from corn.audit import View, audit_plan, audit_training
from corn.audit.run import AuditedRun, make_choices
from corn.covariance import DEFAULT_THREAT
from corn.learn import Workload, make_schedule
from corn.learn.batches import SeededChoices
from corn.privacy.rounding import round_bound_down, round_up
from corn.threads import limit_threads

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.audit.recording import ProcessRun
from tests.oracles.word_statistics import WordStatistics

GRAPH, EPSILON, DELTA, STEPS = "er:n=12,p=0.4,seed=1", 3.0, 1e-5, 200
STEP_TRIALS = 10_000
TITLE = f"""# Audits: promised ε and what attackers certify

Made by `python benchmarks/audit_table.py --out docs/results/audit.md`. Plans are for {GRAPH} with
δ = {DELTA:g}. [Audits](../audit.md) explains the columns. Keys, coins and canaries follow from
seed 0, but keys of real processes are new in each run. The last column is the time in seconds,
design included.
"""
HEADER = (
    "| plan | attacker | attacked | promised ε | certified ε ≥ | Gaussian ε ≥ "
    "| measured / promised μ | verdict | s |\n|---|---|---|---|---|---|---|---|---|"
)

WORDS = """
## Words of messages

Messages of exact sums, as an eavesdropper reads them, and as an insider does, who removes the masks
that it knows. Every coordinate has a gradient of ±C. Tests are χ² of all values, of each byte, and
of pairs of high bytes (with the next coordinate, agent and step, and with the sign of the
gradient), and the correlations of whole words with these. The smallest p-value is shown, and its
product with the number of tests.

| words | number | tests | smallest p | × tests | s |
|---|---|---|---|---|---|"""
BLOCK = 1 << 17
"""Coordinates that are drawn at once."""


@dataclass(frozen=True)
class Setting:
    """One row: a plan, the attacker, and the part of the program that is attacked."""

    name: str
    budget: dict[str, Any] = field(default_factory=dict)
    threat: ThreatModel = DEFAULT_THREAT
    mechanism: Any = "corn"
    view: View | None = None
    through: Any = "shares"
    mixing: Any = "gossip"
    has_public_coins: bool = False

    def make_plan(self) -> Plan:
        """Design the noise."""
        given = {"num_steps": STEPS, "clip": 0.1, **self.budget}
        budget = PrivacyBudget(EPSILON, DELTA, **given)
        network = load_network(GRAPH, mixing=self.mixing)
        return make_plan(network, budget, threat=self.threat, mechanism=self.mechanism)


def list_settings() -> Iterator[Setting]:
    """Yield every row of the table."""
    nobody = ThreatModel(0)
    yield Setting("LDP", threat=nobody, mechanism="ldp")
    yield Setting("DECOR", threat=nobody, mechanism="decor")
    yield Setting("zero-sum + local", threat=nobody, mechanism="zero-sum")
    yield Setting("CorN, one seed for all", threat=nobody)
    yield Setting("CorN, two groups", threat=ThreatModel(0, "groups:2"))
    yield Setting("CorN, links, one insider", threat=ThreatModel(1, "edges"))
    yield Setting("CorN, links and 2 partners, one insider", threat=ThreatModel(1, "sparse:2"))
    yield Setting("CorN, pairs, one insider")
    yield Setting("CorN, pairs, two insiders", threat=ThreatModel(2))
    yield Setting("CorN, pairs, one insider", view=View())
    yield Setting("CorN, pairs, one insider", budget={"adjacency": "add-remove"})
    yield Setting("CorN, pairs, one insider", through="step")
    sample = {"unit": "sample", "clip": 1.0, "batch_size": 32, "num_steps": 40}
    for sampling in ("poisson", "passes", "every-step"):
        size = {} if sampling == "every-step" else {"samples_per_agent": 256}
        for adjacency in ("replace", "add-remove"):
            own = {**sample, **size, "sampling": sampling, "adjacency": adjacency}
            name = f"CorN, one sample, {sampling}, {adjacency}"
            yield Setting(name, budget=own, through="step")
    links = ThreatModel(0, "edges")
    yield Setting("exact sums, links", threat=links, mixing="sum")
    yield Setting("exact sums, pairs, one insider", mixing="sum")
    yield Setting("exact sums, pairs, two insiders", threat=ThreatModel(2), mixing="sum")
    yield Setting("exact sums, pairs, one insider", mixing="sum", through="step")
    for sampling in ("poisson", "passes"):
        own = {**sample, "samples_per_agent": 256, "sampling": sampling}
        name = f"exact sums, one sample, {sampling}, replace"
        yield Setting(name, budget=own, through="step", mixing="sum")
    yield Setting("exact sums, pairs, one insider", mixing="sum", through="processes")
    # The neighbours of agent 0, which cut it off from the rest.
    around = tuple(load_network(GRAPH).graph[0])
    for through in ("shares", "processes"):
        yield Setting(
            "exact sums, links", threat=links, view=View(around), through=through, mixing="sum"
        )
    own = {**sample, "samples_per_agent": 256, "sampling": "poisson"}
    name = "exact sums, one sample, poisson, replace, coins of a public seed"
    yield Setting(name, budget=own, through="step", mixing="sum", has_public_coins=True)
    yield Setting("CorN, one seed for all", threat=nobody, view=View((3,)))
    yield Setting("DECOR", threat=nobody, mechanism="decor", view=View((3,)))


def make_public_choices(_: int, trial: int) -> SeededChoices:
    """Return coins that follow from the number of a trial: a planted fault."""
    return SeededChoices(trial)


def audit_row(setting: Setting, trials: int) -> str:
    """Audit one setting and return its row."""
    began = time.perf_counter()
    plan = setting.make_plan()
    size = trials if setting.through == "shares" else STEP_TRIALS
    is_recorded = setting.through == "processes"
    choices = make_public_choices if setting.has_public_coins else make_choices
    with patch("corn.audit.run.make_choices", choices):
        report = audit_plan(
            plan,
            victims=[0] if setting.through == "step" else None,
            view=setting.view,
            through="shares" if is_recorded else setting.through,
            num_trials=size,
            run=ProcessRun(plan, num_trials=size, num_releases=4) if is_recorded else None,
        )
    strongest = max(report.findings, key=lambda one: one.ratio)
    promised, found = strongest.promise, strongest
    ratios = [one.ratio for one in report.findings]
    spread = "–".join(dict.fromkeys(f"{x:.3f}" for x in (min(ratios), max(ratios))))
    bound = "" if found.gaussian_epsilon is None else round_bound_down(found.gaussian_epsilon, 3)
    attacker = setting.view.describe() if setting.view else f"worst ({found.view.describe()})"
    cells = [
        setting.name + (", zero-out" if setting.budget == {"adjacency": "add-remove"} else ""),
        attacker,
        f"{setting.through}, {report.num_releases} releases",
        round_up(promised.epsilon, 3),
        round_bound_down(max(one.certified_epsilon for one in report.findings), 3),
        bound,
        spread,
        "**violated**" if report.violated else strongest.verdict,
        f"{time.perf_counter() - began:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def audit_one_run() -> str:
    """Audit one training run of a classifier of digits."""
    began = time.perf_counter()
    problem = Workload("digits", partition="iid").build(4)
    budget = PrivacyBudget(
        EPSILON,
        DELTA,
        num_steps=60,
        clip=1.0,
        unit="sample",
        adjacency="add-remove",
        batch_size=64,
        samples_per_agent=min(problem.data.sizes),
    )
    plan = make_plan(load_network("ring:4"), budget)
    schedule = make_schedule(0.2, "constant")
    report = audit_training(plan, problem, schedule=schedule, num_canaries=1000)
    cells = [
        "digits, 4 agents, one sample, poisson, add-remove",
        "eavesdropper",
        f"one run: {report.num_right} of {report.num_guesses} guesses right, of "
        f"{report.num_canaries} canaries",
        round_up(report.promised_epsilon, 3),
        round_bound_down(report.epsilon, 3),
        "",
        "",
        "**violated**" if report.violated else "not violated",
        f"{time.perf_counter() - began:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def stream_words(plan: Plan, num_words: int, view: View) -> Iterator[tuple[str, WordStatistics]]:
    """Yield tests of messages and of partial sums, as a view reads them, on many words each.

    Every coordinate has a gradient of C, with a random sign: more data than a real release has.
    """
    agents = view.honest(plan.num_agents)
    single, partial = WordStatistics(), WordStatistics()
    for seed in count():
        if min(single.num_words, partial.num_words) >= num_words:
            break
        run = AuditedRun(plan, 2, BLOCK, seed=seed)
        signs = np.random.default_rng(seed).choice([-1.0, 1.0], (2, plan.num_agents, BLOCK))
        gradients = torch.from_numpy(signs) * plan.budget.query.clip
        run.messages = np.array(
            [
                [run.send(g, number, k) for k, g in enumerate(own)]
                for number, own in enumerate(gradients)
            ]
        )
        words, signs = run.unmask(view)[:, agents], signs[:, agents]
        # Each sum is compared with the gradient of the last agent in it.
        sums = np.cumsum(words, axis=1, dtype=words.dtype)[:, 1:-1]
        single.add(words, signs)
        partial.add(sums, signs[:, 1:-1])
    yield "single messages", single
    yield f"partial sums of 2 … {len(agents) - 1} agents", partial


def test_words(num_words: int) -> list[str]:
    """Return the rows of the table of words."""
    network = load_network(GRAPH, mixing="sum")
    plan = make_plan(network, PrivacyBudget(EPSILON, DELTA, num_steps=STEPS, clip=0.1))
    rows = []
    for view in (View(), View((1,))):
        began = time.perf_counter()
        for name, found in stream_words(plan, num_words, view):
            values = found.list_p_values()
            worst = min(values, key=lambda test: values[test])
            cells = [
                f"{name}, {view.describe()}",
                f"{found.num_words:,}",
                str(len(values)),
                f"{values[worst]:.3g} ({worst})",
                f"{min(1.0, len(values) * values[worst]):.3g}",
                f"{time.perf_counter() - began:.0f}",
            ]
            rows.append(f"| {' | '.join(cells)} |")
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=100_000, help="trials of rows through shares")
    parser.add_argument("--words", type=int, default=10**8, help="words of each test of messages")
    parser.add_argument("--only", default="", help="plans whose names contain this text")
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    options = parser.parse_args()
    limit_threads()
    began = time.perf_counter()
    rows = [HEADER]
    for setting in list_settings():
        if options.only in setting.name:
            rows.append(audit_row(setting, options.trials))
            print(rows[-1], file=sys.stderr, flush=True)
    if options.only in "digits":
        rows.append(audit_one_run())
    if options.only in "words":
        rows += [WORDS, *test_words(options.words)]
    rows.append(f"\nBoth tables took {time.perf_counter() - began:.0f} s.")
    text = "\n".join([TITLE, *rows]) + "\n"
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
