"""Settings that make no sense, or that a plan does not allow, are refused."""

from typing import Any

import pytest

from corn.covariance import ThreatModel
from corn.distributed.settings import RunSettings
from corn.errors import CornError, InvalidArgumentError
from corn.parsing import DEFAULT_PORT, format_address, parse_address
from corn.plan import make_plan

from .harness import small_plan

PLAN = small_plan("ring:3", 12, mechanism="ldp", threat=ThreatModel())


def test_steps_to_measure_at_must_be_in_the_run() -> None:
    with pytest.raises(InvalidArgumentError, match=r"from 0 to 12, found \[-1, 99\]"):
        RunSettings(evaluate_at=(-1, 5, 99)).evaluation_steps(PLAN)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"on_dropout": "panic"}, "on_dropout must be one of replan, stop"),
        ({"timeout": 0.0}, "timeout must be positive"),
        ({"timeout": 1e18}, "timeout must be positive seconds, at most 1e\\+06"),
        ({"checkpoint_every": 0}, "checkpoint_every must be an integer of at least 1"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        RunSettings(**wrong)


def test_more_steps_than_planned_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="num_steps must be from 1 to 12"):
        RunSettings(num_steps=13).steps_of(PLAN)


def test_policies_that_a_plan_does_not_allow_are_refused() -> None:
    shared = small_plan("ring:4", 10, threat=ThreatModel())
    with pytest.raises(InvalidArgumentError, match="needs seeds of pairs or links"):
        RunSettings(on_dropout="replan").policy_for(shared)
    assert RunSettings().policy_for(shared) == "stop"
    assert RunSettings().policy_for(small_plan("ring:4", 10)) == "replan"


def test_survivors_of_exact_sums_replan_unless_they_are_to_stop() -> None:
    plan = small_plan("ring:4", 10, mixing="sum")
    assert RunSettings().policy_for(plan) == "replan"
    # Not with one seed for all, which the lost agents have too.
    one_seed = make_plan(plan.network, plan.budget, mechanism="zero-sum")
    assert RunSettings().policy_for(one_seed) == "stop"
    assert RunSettings(on_dropout="stop").policy_for(plan) == "stop"


def test_agents_compare_the_minor_version_of_the_software(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, found = small_plan("ring:3", 5), []
    for version in ("0.1.2", "0.1.5", "0.2.0"):
        monkeypatch.setattr("corn.distributed.settings.__version__", version)
        found.append(RunSettings().describe(plan))
    assert found[0] == found[1]
    assert {name for name in found[0] if found[0][name] != found[2][name]} == {"version of CorN"}


@pytest.mark.parametrize(
    "text",
    ["", "::1", "::1:29500", "10.0.0.1:", "10.0.0.1:x", "10.0.0.1:70000", "10.0.0.1:" + "1" * 5000],
)
def test_an_address_is_a_host_and_a_port(text: str) -> None:
    with pytest.raises(CornError, match="an address must be HOST:PORT"):
        parse_address(text)
    for host in ("10.0.0.1", "[fe80::1]"):
        assert format_address(parse_address(host, default_port=DEFAULT_PORT)) == f"{host}:29500"
