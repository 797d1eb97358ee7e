"""Agents behind a Flower server: releases, refusals, and what a reply contains.

Messages and records are stand-ins with the interface of ``flwr.app``. The engine of Flower itself
runs ``examples/flower_app.py`` where it is installed.
"""

from functools import partial
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from corn.covariance import ThreatModel
from corn.distributed import Requirements
from corn.distributed.startup.handshake import name_kind
from corn.distributed.startup.keyring import find_terms, make_keys, open_ledger
from corn.distributed.startup.requirements import RequirementError
from corn.errors import (
    CornError,
    FileFormatError,
    InfeasibleError,
    InvalidArgumentError,
    MissingExtraError,
    PublicError,
)
from corn.flower import AgentRelease, CornMod, introduce_agents
from corn.noise import BudgetSpentError
from corn.plan import Plan, make_plan, save_plan
from corn.privacy import PrivacyBudget
from corn.privacy.composition import Expense, compose_expenses
from corn.topology import load_network

N, D = 4, 2000
BUDGET = PrivacyBudget(20, 1e-5, num_steps=5, clip=0.5)
PLAN = make_plan(load_network(f"complete:{N}"), BUDGET)


@pytest.fixture
def agents(tmp_path: Path) -> list[AgentRelease]:
    make_keys(tmp_path, N)
    return [AgentRelease(PLAN, agent, tmp_path) for agent in range(N)]


def introduce(agents: list[AgentRelease]) -> dict[int, bytes]:
    return {k: agent.introduce() for k, agent in enumerate(agents)}


def test_noise_cancels_in_the_average_and_releases_are_on_the_grid(
    agents: list[AgentRelease],
) -> None:
    nonces = introduce(agents)
    update = np.zeros(D)
    found = np.stack([own.release(update, round_number=1, nonces=nonces) for own in agents])
    assert np.array_equal(found / PLAN.grid, np.rint(found / PLAN.grid))
    R = PLAN.decomposition.covariance
    assert found.var(axis=1) == pytest.approx(R.diagonal(), rel=0.2)
    assert found.mean(axis=0).var() == pytest.approx(R.sum() / N**2, rel=0.2)
    assert R.sum() / N**2 < R.diagonal().mean() / N / 2, "far below that of independent noise"


def test_an_update_is_clipped_whatever_it_is(agents: list[AgentRelease]) -> None:
    nonces = introduce(agents)
    direction = np.full(D, 1 / np.sqrt(D))
    shifted = []
    for number, update in enumerate((1e9 * direction, np.full(D, np.nan)), start=1):
        given = update.copy()
        found = agents[0].release(update, round_number=number, nonces=nonces)
        np.testing.assert_array_equal(update, given)
        shifted.append(float(found @ direction))
    std = float(PLAN.decomposition.covariance[0, 0]) ** 0.5
    assert abs(shifted[0] - BUDGET.clip) < 6 * std
    assert abs(shifted[1]) < 6 * std


@pytest.mark.parametrize("limit", ["epsilon", "total_epsilon"])
def test_a_client_refuses_a_plan_that_its_owner_does_not_allow(limit: str, tmp_path: Path) -> None:
    """ε = 1 at δ = 0.9 is far more at the owner's δ, and whoever made the plan does not decide."""
    make_keys(tmp_path, N)
    plan = make_plan(PLAN.network, PrivacyBudget(1, 0.9, num_steps=5, clip=0.5))
    required = Requirements(**{"unit": "agent", limit: 1})  # type: ignore[arg-type]
    with pytest.raises(RequirementError) as caught:
        AgentRelease(plan, 0, tmp_path, requirements=required).introduce()
    assert "20" not in name_kind(caught.value)
    # The refusal leaves the ledger to others, and a limit that is kept refuses nothing.
    AgentRelease(plan, 0, tmp_path).introduce()
    kept = Requirements(**{"unit": "agent", limit: 20.1})  # type: ignore[arg-type]
    own = AgentRelease(PLAN, 1, tmp_path, requirements=kept)
    nonces = {k: AgentRelease(PLAN, k, tmp_path).introduce() for k in (0, 2, 3)}
    nonces[1] = own.introduce()
    for number in (1, 2):
        own.release(np.zeros(D), round_number=number, nonces=nonces)


def test_no_noise_is_released_twice(agents: list[AgentRelease]) -> None:
    update = np.zeros(3)
    with pytest.raises(PublicError, match="not the one it contributed"):
        agents[0].release(update, round_number=1, nonces=dict.fromkeys(range(N), bytes(32)))
    nonces = introduce(agents)
    agents[0].release(update, round_number=2, nonces=nonces)
    for number in (1, 2):
        with pytest.raises(CornError, match=f"refuses to release round {number} again"):
            agents[0].release(update, round_number=number, nonces=nonces)
    changed = {**nonces, 1: bytes(32)}
    with pytest.raises(CornError, match="other agents' nonces changed"):
        agents[0].release(update, round_number=3, nonces=changed)
    agents[0].introduce()
    with pytest.raises(CornError, match="not the one it contributed"):
        agents[0].release(update, round_number=3, nonces=nonces)


def test_the_ledger_ends_the_run_and_counts_the_loss(agents: list[AgentRelease]) -> None:
    assert agents[1].get_epsilon() == 0
    for _ in range(BUDGET.num_steps):  # a new run for each release: all of them count
        agents[1].release(np.zeros(2), round_number=1, nonces=introduce(agents))
    assert agents[1].get_epsilon() == pytest.approx(20, rel=2e-3)
    nonces = introduce(agents)
    with pytest.raises(BudgetSpentError):
        agents[1].release(np.zeros(2), round_number=1, nonces=nonces)


def test_a_total_that_is_not_known_is_not_stated(
    agents: list[AgentRelease], tmp_path: Path
) -> None:
    agents[1].release(np.zeros(2), round_number=1, nonces=introduce(agents))
    (ledger,) = tmp_path.glob("agent-1-*.ledger")
    ledger.unlink()
    with pytest.raises(FileFormatError, match=r"total is not known: .*\.ledger: is missing"):
        agents[1].get_epsilon()


def test_no_restored_file_but_the_ledger_lets_noise_be_released_twice(
    agents: list[AgentRelease], tmp_path: Path
) -> None:
    """The attack: files beside the key are put back to their content before round 1."""
    release = partial(agents[0].release, np.zeros(50), round_number=1, nonces=introduce(agents))
    snapshot = {path: path.read_bytes() for path in tmp_path.iterdir()}
    first = release()
    kept = [path for path in snapshot if path.suffix != ".ledger"]
    subsets = [subset for size in range(len(kept) + 1) for subset in combinations(kept, size)]
    assert len(subsets) >= 2 ** (N + 1)
    for subset in subsets:
        for path in subset:
            path.write_bytes(snapshot[path])
        with pytest.raises(PublicError, match="refuses to release round 1 again"):
            release()
    # With the ledger nothing can be noticed: the update would be free of noise in the difference.
    for path, content in snapshot.items():
        path.write_bytes(content)
    np.testing.assert_array_equal(release(), first)


def test_a_crash_after_the_reservation_counts_the_round(
    agents: list[AgentRelease], monkeypatch: pytest.MonkeyPatch
) -> None:
    nonces = introduce(agents)

    def crash(*_: object, **__: object) -> None:
        raise OSError("killed")

    with monkeypatch.context() as patch:
        patch.setattr("corn.flower.draw_share", crash)
        with pytest.raises(OSError, match="killed"):
            agents[0].release(np.zeros(2), round_number=1, nonces=nonces)
    spent = agents[0].get_epsilon()
    assert spent > 0
    with pytest.raises(PublicError, match="refuses to release round 1 again"):
        agents[0].release(np.zeros(2), round_number=1, nonces=nonces)
    agents[0].release(np.zeros(2), round_number=2, nonces=nonces)
    assert agents[0].get_epsilon() > spent


BAD_ROUNDS = [True, False, 0, -1, 10**15 + 1, 2**70, 10**5000, 1.0, "1", None]


@pytest.mark.parametrize("number", BAD_ROUNDS, ids=range(len(BAD_ROUNDS)))
def test_rounds_that_are_no_rounds_are_refused_before_anything_is_written(
    agents: list[AgentRelease], tmp_path: Path, number: Any
) -> None:
    nonces = introduce(agents)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(PublicError, match="round must be a whole number from 1 to"):
        agents[0].release(np.zeros(2), round_number=number, nonces=nonces)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    agents[0].release(np.zeros(2), round_number=1, nonces=nonces)


def test_a_late_round_leaves_a_readable_state(agents: list[AgentRelease]) -> None:
    """A server can only keep the agent from further rounds of this run."""
    nonces = introduce(agents)
    agents[0].release(np.zeros(2), round_number=10**15, nonces=nonces)
    with pytest.raises(PublicError, match="refuses to release round 2 again"):
        agents[0].release(np.zeros(2), round_number=2, nonces=nonces)
    agents[0].release(np.zeros(2), round_number=1, nonces=introduce(agents))


def test_nonces_must_be_one_for_each_agent(agents: list[AgentRelease]) -> None:
    nonces = introduce(agents)
    fewer = {agent: nonces[agent] for agent in range(N - 1)}
    more = nonces | {agent: bytes(32) for agent in range(N, 100_000)}
    others = fewer | {N: nonces[N - 1]}
    for wrong in (fewer, more, others, {}):
        with pytest.raises(PublicError, match=f"must be {N} nonces, one for each agent"):
            agents[0].release(np.zeros(2), round_number=1, nonces=wrong)
    with pytest.raises(InvalidArgumentError, match="nonce must be 32 bytes"):
        agents[0].release(np.zeros(2), round_number=1, nonces={**nonces, 1: b"short"})
    agents[0].release(np.zeros(2), round_number=1, nonces=nonces)


def test_the_loss_is_that_of_the_least_noise_of_any_run(
    agents: list[AgentRelease], tmp_path: Path
) -> None:
    """Under ``--on-dropout replan`` an agent may release with less noise than its plan's."""
    agents[0].release(np.zeros(2), round_number=1, nonces=introduce(agents))
    alone = agents[0].get_epsilon()
    largest = 4 * float(PLAN.precision_caps[0])
    with open_ledger(tmp_path, 0, PLAN, precision=largest) as ledger:
        ledger.reserve(0)
    # Flower's own runs have more noise, and do not hide it.
    agents[0].release(np.zeros(2), round_number=1, nonces=introduce(agents))
    expected = compose_expenses([Expense(find_terms(PLAN, 0), largest, 3)], 1e-5).epsilon
    assert agents[0].get_epsilon() == expected > 2 * alone


def test_keys_that_cannot_be_used_cost_no_release(
    agents: list[AgentRelease], tmp_path: Path
) -> None:
    nonces = introduce(agents)
    (tmp_path / "roster.json").rename(tmp_path / "elsewhere")
    with pytest.raises(FileFormatError, match=r"roster\.json"):
        agents[0].release(np.zeros(2), round_number=1, nonces=nonces)
    assert agents[0].get_epsilon() == 0


def test_plans_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    network = load_network("complete:3")
    sample = PrivacyBudget(
        1, 1e-5, num_steps=5, clip=1, unit="sample", batch_size=2, samples_per_agent=20
    )
    with pytest.raises(InvalidArgumentError, match="updates are clipped once"):
        AgentRelease(make_plan(network, sample), 0, tmp_path)
    shared = make_plan(network, BUDGET, threat=ThreatModel(0, "global"))
    with pytest.raises(InvalidArgumentError, match="plan with --seeds pairs"):
        AgentRelease(shared, 0, tmp_path)


class Arrays(dict[str, Any]):
    def to_numpy_ndarrays(self) -> list[Any]:
        return list(self.values())


class Records(dict[str, Any]):
    @property
    def array_records(self) -> dict[str, Any]:
        return {k: v for k, v in self.items() if isinstance(v, Arrays)}

    @property
    def config_records(self) -> dict[str, Any]:
        return {k: v for k, v in self.items() if not isinstance(v, Arrays)}


class Letter:
    """A message."""

    def __init__(self, content: Any, message_type: str = "", **_: Any) -> None:
        self.content, self.metadata = content, SimpleNamespace(message_type=message_type)

    def has_error(self) -> bool:
        return False


FLOWER = SimpleNamespace(
    Array=lambda values: values,
    ArrayRecord=Arrays,
    ConfigRecord=dict,
    MetricRecord=dict,
    RecordDict=Records,
    Message=Letter,
)


class Grid:
    """A server's view of clients that all run one mod."""

    def __init__(self, mod: CornMod, app: Any) -> None:
        self._mod, self._app = mod, app

    def get_node_ids(self) -> list[int]:
        return list(range(N))

    def ask(self, agent: int, message: Letter) -> Any:
        context = SimpleNamespace(node_config={"partition-id": agent})
        return self._mod(message, context, self._app)

    def send_and_receive(self, messages: list[Letter], timeout: float) -> list[Any]:
        assert timeout > 0
        return [self.ask(agent, message) for agent, message in enumerate(messages)]


@pytest.fixture
def mod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CornMod:
    monkeypatch.setattr("corn.flower._import_flower", lambda: FLOWER)
    make_keys(tmp_path / "keys", N)
    save_plan(PLAN, tmp_path / "plan.corn")
    return CornMod(tmp_path / "plan.corn", tmp_path / "keys")


def grow(message: Letter, _: object) -> Letter:
    """Add one to every weight, and tell the server about the data."""
    (arrays,) = message.content.array_records.values()
    grown = Arrays({name: values + values.dtype.type(1) for name, values in arrays.items()})
    metrics = {"num-examples": 123, "train-loss": 0.7}
    return Letter(Records({"arrays": grown, "metrics": metrics}))


def test_a_reply_has_the_release_and_nothing_else(mod: CornMod) -> None:
    grid = Grid(mod, grow)
    config = introduce_agents(grid, N)
    arrays = Arrays(weights=np.zeros((40, 5), np.float32), steps=np.array([3]))
    message = Letter(Records(arrays=arrays, config={**config, "server-round": 1}), "train")
    replies = [grid.ask(agent, message).content for agent in range(N)]
    for reply in replies:
        assert set(reply) == {"arrays", "metrics"}
        assert reply["metrics"] == {"num-examples": 1}
        weights, steps = reply["arrays"].values()
        assert (weights.dtype, weights.shape) == (np.float32, (40, 5))
        assert steps.tolist() == [3], "whole numbers are not trained"
    # The average of all updates has norm C = 0.5, in every weight alike.
    mean = np.mean([reply["arrays"]["weights"] for reply in replies], axis=0)
    std = (PLAN.decomposition.covariance.sum() / N**2) ** 0.5
    expected = BUDGET.clip / np.sqrt(200)
    assert abs(mean.mean() - expected) < 5 * std / np.sqrt(200)


@pytest.mark.parametrize("kind", [ValueError, PublicError, InfeasibleError])
def test_private_evaluations_and_errors_stay_with_their_owner(
    mod: CornMod, caplog: pytest.LogCaptureFixture, kind: type[Exception]
) -> None:
    def fail(*_: object) -> None:
        raise kind("patient 17 has no age")

    grid = Grid(mod, fail)
    config = {**introduce_agents(grid, N), "server-round": 1}
    message = Letter(Records(arrays=Arrays(w=np.zeros(3)), config=config), "train")
    with pytest.raises(CornError) as caught:
        grid.ask(0, message)
    assert "patient" not in str(caught.value)
    assert caught.value.__suppress_context__
    assert "patient 17" in caplog.text
    answer = grid.ask(0, Letter(Records(), "evaluate"))
    assert dict(answer.content) == {"metrics": {"num-examples": 1}}


def test_files_of_the_owner_and_answers_of_the_app_are_not_quoted_to_the_server(
    mod: CornMod, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grid = Grid(mod, lambda *_: Letter(Records(arrays=Arrays(w=np.array(["patient 17"])))))
    config = {**introduce_agents(grid, N), "server-round": 1}
    message = Letter(Records(arrays=Arrays(w=np.zeros(1)), config=config), "train")
    with pytest.raises(
        PublicError, match="the client failed: ValueError; only its owner"
    ) as caught:
        grid.ask(0, message)
    assert caught.value.__suppress_context__
    assert "patient 17" in caplog.text
    next(tmp_path.glob("keys/agent-0-*.ledger")).unlink()
    with pytest.raises(PublicError) as caught:
        Grid(mod, grow).ask(0, message)
    assert (
        str(caught.value) == "the client failed: FileFormatError; only its owner sees the details"
    )


def test_messages_without_nonces_and_other_shapes_are_refused(mod: CornMod) -> None:
    grid = Grid(mod, grow)
    arrays = Arrays(w=np.zeros(3))
    with pytest.raises(CornError, match="the message has no nonces"):
        grid.ask(0, Letter(Records(arrays=arrays, config={"server-round": 1}), "train"))
    config = {**introduce_agents(grid, N), "server-round": 1}
    with pytest.raises(CornError, match="one record of arrays, found 0"):
        grid.ask(0, Letter(Records(config=config), "train"))
    cut = Grid(mod, lambda *_: Letter(Records(arrays=Arrays(w=np.zeros(2)))))
    with pytest.raises(CornError, match="arrays of the shapes"):
        cut.ask(0, Letter(Records(arrays=arrays, config=config), "train"))
    unnamed = SimpleNamespace(node_config={})
    with pytest.raises(CornError, match="'partition-id'"):
        mod(Letter(Records(arrays=arrays, config=config), "train"), unnamed, grow)


@pytest.mark.parametrize(
    "change",
    [
        {"server-round": True},
        {"server-round": 2**70},
        {"server-round": -1},
        {"corn.nonces": []},
        {"corn.nonces": ["00" * 32] * 100_000},
        {"corn.nonces": ["xy" * 32] * N},
        {"corn.nonces": ["00"] * N},
        {"corn.nonces": [7] * N},
        {"corn.nonces": "0" * N},
    ],
)
def test_a_server_that_names_nonsense_gets_a_refusal_before_the_client_trains(
    mod: CornMod, change: dict[str, Any]
) -> None:
    def train(*_: object) -> None:
        pytest.fail("the client app was called")

    grid = Grid(mod, train)
    config = {**introduce_agents(grid, N), "server-round": 1, **change}
    with pytest.raises(PublicError, match="refuses to release"):
        grid.ask(0, Letter(Records(arrays=Arrays(w=np.zeros(3)), config=config), "train"))


def test_all_agents_must_introduce_themselves(mod: CornMod) -> None:
    class Twice(Grid):
        def ask(self, agent: int, message: Letter) -> Any:
            return super().ask(agent % 2, message)

    with pytest.raises(CornError, match="each once, found 0, 0, 1, 1"):
        introduce_agents(Twice(mod, grow), N)
    with pytest.raises(CornError, match="each once, found 0, 0, 1, 1"):
        introduce_agents(Twice(mod, grow), 2)
    with pytest.raises(CornError, match="nodes must be connected, found 4"):
        introduce_agents(Grid(mod, grow), N + 1, timeout=0.01)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> object:
        raise ImportError(name)

    monkeypatch.setattr("importlib.import_module", fail)
    with pytest.raises(MissingExtraError, match=r"corn-dsgd\[flower\]"):
        introduce_agents(None, 2)


def test_the_plan_is_close_to_a_trusted_server() -> None:
    plan: Plan = make_plan(load_network("complete:10"), BUDGET)
    assert plan.central_ratio < 1.25
