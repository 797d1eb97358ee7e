"""Processes compute the models of the simulation, to float32 summation error."""

from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import torch

from corn.covariance import Horizon, MechanismName, ThreatModel
from corn.distributed.launcher import merge_results
from corn.distributed.settings import RunSettings
from corn.distributed.storage import Folders, read_rows
from corn.learn import Constant, Mechanism, SweepSettings, Trial, run_sweep
from corn.learn.workloads import Workload
from corn.plan import Plan, make_plan
from corn.privacy import PrivacyBudget, Sampling
from corn.topology import Gossip, load_network

from .harness import failures, run_processes, small_plan

SEED = 3
NORMS = ("gradient_norm", "fraction_clipped", "noise_norm")
WORKLOAD = Workload("breast-cancer")
SETTINGS = RunSettings(Constant(0.2), batch_size=16, seed=SEED, timeout=30, evaluate_at=(0, 5))


def compare(plan: Plan, out: Path, *, settings: RunSettings | None = None) -> None:
    """Run a plan both ways with the same keys, and compare models and measurements."""
    chosen, n = settings or SETTINGS, plan.num_agents
    results = run_processes(plan, out, chosen, workload=WORKLOAD, rehearsal_seed=SEED)
    assert not failures(results)
    problem = WORKLOAD.build(n)
    folders = Folders.of_run(out)
    found = merge_results(plan, problem, results, folders, chosen)
    method = Mechanism.from_plan(plan)
    expected = run_sweep(
        problem,
        plan.network,
        [Trial(method, chosen.schedule)],
        settings=SweepSettings(
            chosen.steps_of(plan),
            chosen.batch_of(plan),
            (SEED,),
            plan.cooldown_steps,
            plan.dtype,
            noise_keys="seed",
            momentum=plan.momentum,
        ),
        evaluate_at=sorted(chosen.evaluation_steps(plan)),
    )
    scale = float(expected.parameters.abs().max())
    torch.testing.assert_close(
        found.parameters, expected.parameters, rtol=1e-5, atol=1e-5 * max(scale, 1)
    )
    assert found.status == expected.status == "complete"
    assert len(found.rows) == len(expected.rows)
    private = [read_rows(folders.of_agent(agent).private / "metrics.csv") for agent in results]
    for row, theirs in zip(found.rows, expected.rows, strict=True):
        of_agents = [table[int(row["step"])] for table in private]
        ours = row | {name: fmean(float(own[name]) for own in of_agents) for name in NORMS}
        for name, value in theirs.items():
            if isinstance(value, str):
                assert ours[name] == value
            elif name.startswith(("epsilon", "simulated", "train")):
                continue  # a promise by the ledgers of agents, a simulated ε, and private data
            else:
                assert ours[name] == pytest.approx(value, rel=1e-4, abs=1e-5, nan_ok=True), name


@pytest.mark.parametrize(
    ("mechanism", "threat"),
    [
        ("corn", ThreatModel(1, "pairs")),
        ("corn", ThreatModel(0, ((0, 1, 2),))),
        ("zero-sum", ThreatModel()),
        ("ldp", ThreatModel()),
    ],
    ids=["pairs", "groups", "zero-sum", "ldp"],
)
def test_four_processes_match_for_every_mechanism(
    mechanism: MechanismName, threat: ThreatModel, tmp_path: Path
) -> None:
    compare(small_plan("ring:4", 15, mechanism=mechanism, threat=threat), tmp_path)


def test_per_sample_clipping_matches(tmp_path: Path) -> None:
    budget = PrivacyBudget(
        10, 1e-5, num_steps=8, clip=0.1, unit="sample", batch_size=8, sampling="every-step"
    )
    plan = make_plan(load_network("path:4", mixing="gossip"), budget)
    settings = RunSettings(Constant(0.2), seed=SEED, timeout=30, evaluate_at=(0,))
    compare(plan, tmp_path, settings=settings)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["poisson", "passes"])
def test_agents_of_different_sizes_match_under_every_sampling(
    sampling: Sampling, tmp_path: Path
) -> None:
    """Rates and passes are each agent's own; some Poisson batches are empty."""
    sizes = WORKLOAD.build(2).data.sizes
    assert len(set(sizes)) > 1
    budget = PrivacyBudget.for_sizes(
        sizes, epsilon=10, delta=1e-5, num_steps=8, clip=0.1, batch_size=3, sampling=sampling
    )
    plan = make_plan(
        load_network("path:2", mixing="gossip"), budget, mechanism="ldp", threat=ThreatModel()
    )
    settings = RunSettings(Constant(0.2), seed=SEED, timeout=30, evaluate_at=(0,))
    compare(plan, tmp_path, settings=settings)


@pytest.mark.parametrize("gossip", [Gossip(2), Gossip(3, "chebyshev")])
def test_gossip_rounds_and_cool_down_match(gossip: Gossip, tmp_path: Path) -> None:
    network = load_network("path:4", gossip=gossip, mixing="gossip")
    budget = PrivacyBudget(10, 1e-5, num_steps=10, clip=0.1)
    compare(make_plan(network, budget, cooldown_steps=2), tmp_path)


def test_momentum_and_double_precision_match(tmp_path: Path) -> None:
    budget = PrivacyBudget(10, 1e-5, num_steps=10, clip=0.1)
    objective = Horizon(3, momentum=0.7)
    plan = make_plan(
        load_network("path:4", mixing="gossip"), budget, objective=objective, dtype="float64"
    )
    assert plan.momentum == 0.7
    compare(plan, tmp_path)


@pytest.mark.slow
def test_eight_processes_match(tmp_path: Path) -> None:
    """The plan is long, because for a few steps DECOR may share no noise at all."""
    plan = small_plan("er:n=8,p=0.5,seed=1", 500, mechanism="decor", threat=ThreatModel())
    assert plan.momentum > 0
    assert len(plan.decomposition.seed_groups) >= plan.num_agents
    compare(plan, tmp_path, settings=replace(SETTINGS, num_steps=10))
