"""An attacker on the network achieves the loss of links at most, and never a changed model."""

from pathlib import Path

import pytest
import torch

from corn.covariance import ThreatModel
from corn.distributed import AgentResult
from corn.distributed.results import RunStatus
from tests.oracles.network_attack import KINDS, Intervention, Strangers, judge, run_network

from .harness import small_plan

PLAN = small_plan("ring:4", 12, mechanism="ldp", threat=ThreatModel(), cooldown_steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_attack_on_a_link_changes_no_model(kind: str, tmp_path: Path) -> None:
    """In the middle of the training, each in one of the two directions."""
    attack = Intervention(kind, 0, 0, KINDS.index(kind) % 2, 1200, seed=1)
    assert judge(PLAN, attack, tmp_path) == ("unharmed" if kind == "delay" else "lost")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["flip", "replay", "flood"])
def test_an_attack_on_the_store_changes_no_model(kind: str, tmp_path: Path) -> None:
    found = judge(PLAN, Intervention(kind, -1, 0, 1, 600, seed=1), tmp_path)
    assert found in ("not started", "unharmed")


@pytest.mark.slow
def test_random_attacks_change_no_model(tmp_path: Path) -> None:
    seeds = (0, 2, 5)  # on a link, at the store, in the handshake
    found = {judge(PLAN, Intervention.draw(seed, 4), tmp_path / str(seed)) for seed in seeds}
    assert found & {"lost", "not started"}, "no attack was felt"


def test_two_runs_without_an_attacker_are_equal_to_the_bit(tmp_path: Path) -> None:
    """The comparison would be of no use otherwise."""
    results = [run_network(PLAN, tmp_path / name, None)[0] for name in ("a", "b")]
    models = [[own.parameters.tolist() for own in run] for run in results]  # type: ignore[union-attr]
    assert models[0] == models[1]


@pytest.mark.slow
def test_strangers_at_every_port_change_nothing(tmp_path: Path) -> None:
    """They connect to all agents and to the store, during the start and the training."""
    strangers = Strangers()
    try:
        disturbed, _ = run_network(PLAN, tmp_path / "a", None, strangers=strangers)
    finally:
        strangers.stop()
    calm, _ = run_network(PLAN, tmp_path / "b", None)
    assert strangers.num_connections > 20
    for own, reference in zip(disturbed, calm, strict=True):
        assert isinstance(own, AgentResult), own
        assert isinstance(reference, AgentResult)
        assert (own.status, own.notes) == (RunStatus.COMPLETE, ())
        assert torch.equal(own.parameters, reference.parameters)
