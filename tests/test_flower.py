"""Agents behind a Flower server: exact sums, refusals, void rounds, and what a reply contains.

Client app, mod, strategy, messages and their encoding are Flower's own. Only its network is not:
a stand-in for its grid calls the client apps in this process.
"""

import importlib
import runpy
import sys
from collections.abc import Iterator
from fractions import Fraction
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from corn.covariance import ThreatModel
from corn.distributed import Requirements
from corn.distributed.keyring import make_keys, open_ledger
from corn.distributed.rendezvous import is_public
from corn.distributed.requirements import RequirementError
from corn.engines import (
    AgentRelease,
    MaskedUpdate,
    average_updates,
    decode_hello,
    plan_for,
)
from corn.errors import (
    CornError,
    FileFormatError,
    InfeasibleError,
    InvalidArgumentError,
    MissingExtraError,
    PublicError,
)
from corn.noise import BudgetSpentError, load_identity, load_roster
from corn.noise.ledger import read_history
from corn.noise.masks import draw_offset
from corn.plan import Plan, fingerprint, make_plan, verify_plan
from corn.privacy import PrivacyBudget
from corn.privacy.composition import Expense, PlanTerms, compose_expenses
from corn.topology import load_network
from tests.contracts.engines import Grid, flower_runtime, grow, lose_messages, make_sites
from tests.oracles import masked_message

N, D = 4, 20_000
BUDGET = PrivacyBudget(20, 1e-5, num_steps=5, clip=0.5)
PLAN = make_plan(load_network(f"complete:{N}", mixing="sum"), BUDGET)


@pytest.fixture
def agents(tmp_path: Path) -> list[AgentRelease]:
    make_keys(tmp_path, N)
    return [AgentRelease(PLAN, agent, tmp_path) for agent in range(N)]


def greet(agents: list[AgentRelease], *numbers: int) -> dict[int, bytes]:
    """Return the nonces of new hellos, by default of all agents."""
    return {k: agents[k].say_hello().nonce for k in numbers or range(len(agents))}


def release(own: AgentRelease, update: Any, nonces: dict[int, bytes]) -> MaskedUpdate:
    return own.release(own.clip_update(update), nonces)


def release_all(
    agents: list[AgentRelease], updates: dict[int, Any], nonces: dict[int, bytes]
) -> list[MaskedUpdate]:
    return [release(agents[k], update, nonces) for k, update in sorted(updates.items())]


def is_uniform(words: Any) -> bool:
    """Return whether words modulo 2¹⁶ could be uniform, by their high and their low bytes."""
    assert words.dtype == np.uint16
    counts = (np.bincount(part, minlength=256) for part in (words >> 8, words & 255))
    return all(stats.chisquare(count).pvalue > 1e-9 for count in counts)


@pytest.mark.parametrize("present", [range(N), (0, 1, 3)])
def test_the_average_has_the_noise_of_a_trusted_server_times_n_over_n_minus_q(
    agents: list[AgentRelease], present: tuple[int, ...]
) -> None:
    update, m = np.full(D, BUDGET.clip / np.sqrt(D) / 2), len(present)
    nonces = greet(agents, *present)
    found = average_updates(
        plan_for(PLAN, tuple(present)),
        release_all(agents, dict.fromkeys(present, update), nonces),
    )
    assert found is not None
    # A trusted server's noise on the average of m clients has the standard deviation σ_LDP/m.
    server = BUDGET.independent_noise_std**2 / m**2
    ratio = (found - update).var() / server
    # ε and δ lose a part to floating point, and the grid adds its rounding: below 1 % together.
    assert ratio == pytest.approx(m / (m - 1), rel=0.01 + 5 * np.sqrt(2 / D))
    assert abs((found - update).mean()) < 5 * np.sqrt(server * m / (m - 1) / D)


@pytest.mark.parametrize("present", [range(N), (0, 1, 3)])
def test_every_message_follows_from_keys_by_a_second_implementation(
    agents: list[AgentRelease], tmp_path: Path, present: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(1)
    updates = {k: rng.standard_normal(D) * 1e-3 for k in present}
    roster = load_roster(tmp_path / "roster.json")
    public_keys = {k: roster.public_key(k) for k in range(N)}
    secrets = {k: load_identity(tmp_path / f"agent-{k}.key").secret.reveal() for k in present}
    for _ in range(2):
        nonces = greet(agents, *present)
        sent = dict(zip(present, release_all(agents, updates, nonces), strict=True))
        at = masked_message.Round(PLAN, plan_for(PLAN, tuple(present)), nonces)
        for k, update in updates.items():
            noise = masked_message.draw_private_noise(at, k, secrets[k], D)
            mask = masked_message.draw_mask(at, k, secrets[k], public_keys, D)
            expected = masked_message.recompute_message(
                at, update + noise, mask=mask, offset_seed=sent[k].offset_seed
            )
            np.testing.assert_array_equal(sent[k].integers, expected)


def test_the_sum_is_exact_and_fewer_messages_are_uniform(
    agents: list[AgentRelease], tmp_path: Path
) -> None:
    """The oracle has the noise of each agent by itself, and adds in fractions."""
    rng = np.random.default_rng(1)
    updates = {k: rng.standard_normal(D) * 1e-3 for k in range(N)}
    nonces = greet(agents)
    sent = release_all(agents, updates, nonces)
    at = masked_message.Round(PLAN, PLAN, nonces)
    total, offsets = [0] * D, [Fraction(0)] * D
    for k, update in updates.items():
        secret = load_identity(tmp_path / f"agent-{k}.key").secret.reveal()
        noise = masked_message.draw_private_noise(at, k, secret, D)
        offset = masked_message.draw_offset(sent[k].offset_seed, D)
        units = np.rint((update + noise) / PLAN.grid + offset)
        total = [a + int(b) for a, b in zip(total, units, strict=True)]
        offsets = [a + Fraction(b) for a, b in zip(offsets, offset.tolist(), strict=True)]
    words = np.sum([each.integers.astype(object) for each in sent], axis=0) % 2**16
    assert words.tolist() == [value % 2**16 for value in total]
    average = average_updates(PLAN, sent)
    assert average is not None
    exact = [float(Fraction(PLAN.grid) * (a - b) / N) for a, b in zip(total, offsets, strict=True)]
    np.testing.assert_allclose(average, exact, rtol=1e-12, atol=1e-14)
    assert len({each.offset_seed for each in sent}) == N
    for size in range(1, N):
        for subset in combinations(sent, size):
            assert is_uniform(sum(each.integers for each in subset))
    assert not is_uniform(sum(each.integers for each in sent))


def test_an_update_is_clipped_whatever_it_is(agents: list[AgentRelease]) -> None:
    direction = np.full(D, 1 / np.sqrt(D))
    std = float(PLAN.decomposition.total_variance) ** 0.5
    wanted = [(1e9 * direction, BUDGET.clip), (np.full(D, np.nan), 0)]
    for update, expected in wanted:
        given = update.copy()
        others = dict.fromkeys(range(1, N), np.zeros(D))
        sent = release_all(agents, {0: update, **others}, greet(agents))
        np.testing.assert_array_equal(update, given)
        average = average_updates(PLAN, sent)
        assert average is not None
        assert abs(N * float(average @ direction) - expected) < 6 * std


@pytest.mark.parametrize(("graph", "q"), [("star", 0), ("ring", 1), ("complete", 2)])
def test_every_set_of_agents_has_a_plan_that_keeps_the_cap_on_a_release(graph: str, q: int) -> None:
    """Whomever the server names: no more precision per release than under the plan of all."""
    n = 5
    plan = make_plan(load_network(f"{graph}:{n}", mixing="sum"), BUDGET, threat=ThreatModel(q))
    cap = float(plan.precision_caps.min())
    found = set()
    for m in range(2, n + 1):
        for agents in combinations(range(n), m):
            own = plan_for(plan, agents)
            verification = verify_plan(own)
            assert verification.passed
            assert max(each.precision for each in verification.guarantees) <= cap
            # The oracle: noise of the honest agents in the set, of which this agent is one.
            honest = max(m - q, 1)
            assert own.decomposition.is_masked
            assert honest * own.decomposition.private_variance.min() >= 1 / cap
            # The same for everybody who derives it.
            again = make_plan(plan.network, BUDGET, threat=ThreatModel(q))
            assert fingerprint(plan_for(again, agents)) == fingerprint(own)
            found.add(fingerprint(own))
    assert len(found) == 2**n - n - 1, "one for each set of two or more"


@pytest.mark.parametrize("limit", ["epsilon", "total_epsilon"])
def test_a_client_refuses_a_plan_that_its_owner_does_not_allow(limit: str, tmp_path: Path) -> None:
    """ε = 1 at δ = 0.9 is far more at the owner's δ, and whoever made the plan does not decide."""
    make_keys(tmp_path, N)
    plan = make_plan(PLAN.network, PrivacyBudget(1, 0.9, num_steps=5, clip=0.5))
    required = Requirements(**{"unit": "agent", limit: 1})  # type: ignore[arg-type]
    with pytest.raises(RequirementError) as caught:
        AgentRelease(plan, 0, tmp_path, requirements=required).say_hello()
    assert not is_public(caught.value)
    # The refusal leaves the ledger to others, and a limit that is kept refuses nothing.
    AgentRelease(plan, 0, tmp_path).say_hello()
    kept = Requirements(**{"unit": "agent", limit: 20.1})  # type: ignore[arg-type]
    others = [AgentRelease(PLAN, k, tmp_path) for k in range(N)]
    own = AgentRelease(PLAN, 1, tmp_path, requirements=kept)
    for _ in range(2):
        release(own, np.zeros(9), greet(others) | {1: own.say_hello().nonce})


def test_no_noise_is_released_twice(agents: list[AgentRelease]) -> None:
    update = np.zeros(3)
    with pytest.raises(PublicError, match="refuses to release"):
        release(agents[0], update, dict.fromkeys(range(N), bytes(32)))
    nonces = greet(agents)
    release(agents[0], update, nonces)
    fewer = {k: nonces[k] for k in (0, 1, 2)}
    # The same nonces again, other agents, and other nonces of them under the same own one.
    for other in (nonces, fewer, {**nonces, 1: bytes(32)}):
        with pytest.raises(PublicError, match="refuses to release"):
            release(agents[0], update, other)
    agents[0].say_hello()
    with pytest.raises(PublicError, match="refuses to release"):
        release(agents[0], update, nonces)


def test_a_server_that_names_different_agents_to_different_clients_gets_uniform_words(
    agents: list[AgentRelease],
) -> None:
    """Agents 0 and 1 are told that 3 is lost, 2 and 3 that nobody is, with the true nonces."""
    nonces, zero = greet(agents), np.zeros(D)
    fewer = {k: nonces[k] for k in (0, 1, 2)}
    sent = release_all(agents, dict.fromkeys((0, 1), zero), fewer)
    sent += release_all(agents, dict.fromkeys((2, 3), zero), nonces)
    for size in range(1, N + 1):
        for subset in combinations(sent, size):
            assert is_uniform(sum(each.integers for each in subset))
    assert average_updates(PLAN, sent) is None
    assert average_updates(plan_for(PLAN, (0, 1, 2)), sent[:3]) is None
    # Nor can agent 2 complete the other sum later, before or after its next hello.
    for _ in range(2):
        with pytest.raises(PublicError, match="refuses to release"):
            release(agents[2], zero, fewer)
        agents[2].say_hello()


def test_a_sum_over_different_runs_is_uniform(agents: list[AgentRelease]) -> None:
    nonces, zero = greet(agents), np.zeros(D)
    sent = release_all(agents, dict.fromkeys((0, 1, 2), zero), nonces)
    sent.append(release(agents[3], zero, nonces | greet(agents, 3)))
    assert is_uniform(sum(each.integers for each in sent))
    assert average_updates(PLAN, sent) is None


def test_the_ledger_ends_the_run_and_counts_the_loss(agents: list[AgentRelease]) -> None:
    """A new run for each release, of other agents each time: one ledger counts all of them."""
    assert agents[1].get_epsilon() == 0
    sets = [(0, 1, 2, 3), (0, 1, 2), (1, 3), (0, 1), (1, 2, 3)]
    for numbers in sets:
        release(agents[1], np.zeros(2), greet(agents, *numbers))
    assert 19.9 < agents[1].get_epsilon() <= 20
    with pytest.raises(BudgetSpentError):
        agents[1].say_hello()


def test_a_total_that_is_not_known_is_not_stated(
    agents: list[AgentRelease], tmp_path: Path
) -> None:
    release(agents[1], np.zeros(2), greet(agents))
    (ledger,) = tmp_path.glob("agent-1-*.ledger")
    ledger.unlink()
    with pytest.raises(FileFormatError, match=r"total is not known: .*\.ledger: is missing"):
        agents[1].get_epsilon()


def test_no_restored_file_but_the_ledger_lets_noise_be_released_twice(
    agents: list[AgentRelease], tmp_path: Path
) -> None:
    """The attack: files beside the key are put back to their content before the release."""
    release_again = partial(release, agents[0], np.zeros(50), greet(agents))
    snapshot = {path: path.read_bytes() for path in tmp_path.iterdir()}
    first = release_again()
    kept = [path for path in snapshot if path.suffix != ".ledger"]
    subsets = [subset for size in range(len(kept) + 1) for subset in combinations(kept, size)]
    assert len(subsets) >= 2 ** (N + 1)
    for subset in subsets:
        for path in subset:
            path.write_bytes(snapshot[path])
        with pytest.raises(PublicError, match="refuses to release"):
            release_again()
    # With the ledger nothing can be noticed: the update would be free of noise in the difference,
    # but for the rounding with another offset.
    for path, content in snapshot.items():
        path.write_bytes(content)
    difference = (release_again().integers - first.integers).astype(np.int16)
    assert np.abs(difference).max() <= 1


def test_a_crash_after_the_reservation_counts_the_round(
    agents: list[AgentRelease], monkeypatch: pytest.MonkeyPatch
) -> None:
    nonces = greet(agents)

    def crash(*_: object, **__: object) -> None:
        raise OSError("killed")

    with monkeypatch.context() as patch:
        patch.setattr("corn.learn.perturbation.make_message", crash)
        with pytest.raises(OSError, match="killed"):
            release(agents[0], np.zeros(2), nonces)
    spent = agents[0].get_epsilon()
    assert spent > 0
    with pytest.raises(PublicError, match="refuses to release"):
        release(agents[0], np.zeros(2), nonces)
    release(agents[0], np.zeros(2), greet(agents))
    assert agents[0].get_epsilon() > spent


def test_the_loss_is_that_of_the_least_noise_of_any_run(
    agents: list[AgentRelease], tmp_path: Path
) -> None:
    release(agents[0], np.zeros(2), greet(agents))
    alone = agents[0].get_epsilon()
    largest = 4 * float(PLAN.precision_caps[0])
    with open_ledger(tmp_path, 0, PLAN, precision=largest) as ledger:
        ledger.reserve(0)
    # Flower's own runs have more noise, and do not hide it.
    release(agents[0], np.zeros(2), greet(agents))
    terms = PlanTerms(PLAN.budget.of_agent(0), PLAN.threat.max_colluders)
    expected = compose_expenses([Expense(terms, largest, 3)], 1e-5).epsilon
    assert agents[0].get_epsilon() == expected > 2 * alone


def test_keys_that_cannot_be_used_cost_no_release(
    agents: list[AgentRelease], tmp_path: Path
) -> None:
    nonces = greet(agents)
    (tmp_path / "roster.json").rename(tmp_path / "elsewhere")
    with pytest.raises(FileFormatError, match=r"roster\.json"):
        release(agents[0], np.zeros(2), nonces)
    assert agents[0].get_epsilon() == 0


def test_plans_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    network = load_network("complete:3", mixing="sum")
    sample = PrivacyBudget(
        1, 1e-5, num_steps=5, clip=1, unit="sample", batch_size=2, samples_per_agent=20
    )
    nonces = dict.fromkeys(range(3), bytes(32))
    with pytest.raises(InvalidArgumentError, match="an update is one gradient"):
        release(AgentRelease(make_plan(network, sample), 0, tmp_path), np.zeros(2), nonces)
    gossip = make_plan(load_network("complete:3", mixing="gossip"), BUDGET)
    alone = make_plan(network, BUDGET, mechanism="ldp")
    for plan in (gossip, alone):
        with pytest.raises(InvalidArgumentError, match="exact sums under masks"):
            AgentRelease(plan, 0, tmp_path)
    shared = make_plan(network, BUDGET, threat=ThreatModel(0, ((0, 1, 2),)))
    with pytest.raises(InvalidArgumentError, match="plan with --seeds pairs"):
        AgentRelease(shared, 0, tmp_path)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr.app", None)
    monkeypatch.delitem(sys.modules, "corn.flower", raising=False)
    with pytest.raises(MissingExtraError, match=r"corn-dsgd\[flower\]"):
        importlib.import_module("corn.flower")


# Flower's own objects from here on.


def make_folders(tmp_path: Path, plan: Plan) -> Path:
    """Make the folders of sites; return their path with the place of the site's number."""
    make_sites(tmp_path / "sites", plan, [str(agent) for agent in range(N)])
    return tmp_path / "sites" / "{site}"


@pytest.fixture
def mod(tmp_path: Path) -> Iterator[Any]:
    pytest.importorskip("flwr.app")
    from corn.flower import CornMod

    with flower_runtime():
        yield CornMod(make_folders(tmp_path, PLAN))


@pytest.fixture
def grid(mod: Any) -> Grid:
    return Grid(mod, grow)


def make_model() -> Any:
    from flwr.app import Array, ArrayRecord

    arrays = {"w": np.zeros((40, 5), np.float32), "steps": np.array([3]), "b": np.ones(7)}
    return ArrayRecord({name: Array(values) for name, values in arrays.items()})


def start(grid: Grid, num_rounds: int, strategy: Any = None, **options: Any) -> Any:
    from flwr.serverapp.strategy import FedAvg

    from corn.flower import CornStrategy

    own = CornStrategy(strategy or FedAvg(fraction_evaluate=0.0), PLAN, **options)
    return own.start(grid, make_model(), num_rounds=num_rounds)


def spent(tmp_path: Path) -> list[int]:
    """Return the number of releases that each agent's ledger has counted."""
    found = (read_history([tmp_path / "sites" / str(agent)], agent) for agent in range(N))
    return [sum(each.num_releases for each in history.expenses) for history in found]


def test_the_model_of_the_server_is_that_of_exact_integer_arithmetic(grid: Grid) -> None:
    """To the bit, after two rounds; integers add up without a limit, and are reduced at the end."""
    result = start(grid, 2)
    w, b = np.zeros(200, np.float32), np.ones(7)
    for replies in (grid.replies[N : 2 * N], grid.replies[2 * N :]):
        sent = [reply.content["arrays"]["integers"].numpy() for reply in replies]
        seeds = [reply.content["corn"]["offset-seed"] for reply in replies]
        total = sum(words.astype(object) for words in sent) % 2**16
        signed = np.array([int(v) - 2**16 * (v >= 2**15) for v in total], float)
        offset = sum(draw_offset(seed, 0, len(signed)) for seed in seeds) / N
        average = (signed - N * offset) * (PLAN.grid / N)
        w = (w.astype(float) + average[:200]).astype(np.float32)
        b = b + average[200:]
        # An update of ones in 207 weights, clipped to C.
        std = (PLAN.decomposition.total_variance / N**2 / 207) ** 0.5
        assert abs(average.mean() - BUDGET.clip / np.sqrt(207)) < 6 * std
    found = {name: array.numpy() for name, array in result.arrays.items()}
    assert found["w"].dtype == np.float32
    np.testing.assert_array_equal(found["w"].ravel(), w)
    np.testing.assert_array_equal(found["b"], b)
    assert found["steps"].dtype == np.int64
    assert found["steps"].tolist() == [3], "whole numbers are not trained"


def test_a_reply_has_masked_integers_and_nothing_else(grid: Grid) -> None:
    start(grid, 1)
    assert len(grid.replies) == 2 * N
    for reply in grid.replies[N:]:
        assert set(reply.content) == {"arrays", "corn"}
        assert set(reply.content["arrays"]) == {"integers"}
        assert set(reply.content["corn"]) == {"offset-seed", "hello"}
        assert not reply.content.metric_records


def test_any_strategy_of_flower_gets_the_average(grid: Grid, tmp_path: Path) -> None:
    from flwr.serverapp.strategy import FedAdam, FedProx

    for strategy in (FedAdam(), FedProx(fraction_train=0.5)):
        result = start(grid, 2, strategy)
        assert np.isfinite(result.arrays["w"].numpy()).all()
        assert (result.arrays["w"].numpy() != 0).all()
    assert spent(tmp_path) == [4] * N
    last = [message for _, message in grid.asked if message.metadata.message_type == "train"][-N:]
    assert all("proximal-mu" in message.content["config"] for message in last)


def test_a_round_without_a_client_is_void_and_the_others_go_on(
    grid: Grid, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grid.change = lose_messages(2, at_round=2)
    models = []

    def keep(_: int, arrays: Any) -> None:
        models.append(arrays["b"].numpy())

    from flwr.serverapp.strategy import FedAvg

    from corn.flower import CornStrategy

    strategy = CornStrategy(FedAvg(fraction_evaluate=0.0), PLAN)
    strategy.start(grid, make_model(), num_rounds=4, evaluate_fn=keep)
    moves = [not np.array_equal(a, b) for a, b in pairwise(models)]
    assert moves == [True, False, True, True]
    assert "round 2 is void without agent 2" in caplog.text
    # The void round counts for those who released in it.
    assert spent(tmp_path) == [4, 4, 1, 4]
    last = [message for _, message in grid.asked if "config" in message.content][-1]
    hellos = map(decode_hello, last.content["config"]["corn.hellos"])
    assert [hello.agent for hello in hellos] == [0, 1, 3]


def test_a_client_that_was_started_anew_takes_part_again(grid: Grid, tmp_path: Path) -> None:
    """Node 72 is lost in round 2, and its site comes back as node 82."""

    def change(_: int, message: Any) -> Any:
        is_lost = message.content.config_records.get("config", {}).get("server-round") == 2
        if is_lost and message.metadata.dst_node_id == 72:
            nodes[2] = 82
            return None
        return message

    nodes = grid.get_node_ids()
    grid.get_node_ids = lambda: nodes  # type: ignore[method-assign]
    grid.change = change
    assert start(grid, 4).arrays is not None
    assert spent(tmp_path) == [4, 4, 3, 4]


def test_training_stops_with_the_last_model_where_too_few_are_left(
    grid: Grid, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def change(to: int, message: Any) -> Any:
        config = message.content.config_records.get("config", {})
        return None if to != 3 and config.get("server-round") == 2 else message

    grid.change = change
    result = start(grid, 4)
    assert result.arrays["steps"].numpy().tolist() == [3]
    assert "2 agents must be left, found 1" in caplog.text
    assert spent(tmp_path) == [1, 1, 1, 2]


def test_a_client_that_fails_is_left_out(grid: Grid, caplog: pytest.LogCaptureFixture) -> None:
    def fail(to: int, message: Any) -> Any:
        from flwr.app import Message, RecordDict

        if to != 1 or "arrays" not in message.content:
            return message
        content = RecordDict({"config": message.content["config"]})
        return Message(content, dst_node_id=71, message_type="train")

    grid.change = fail
    assert start(grid, 2).arrays is not None
    assert "node 71 failed: a message must have one record of arrays" in caplog.text
    assert [agent for agent, _ in grid.asked[-3:]] == [0, 2, 3]


@pytest.mark.parametrize("change", ["integers", "type", "seed"])
def test_integers_that_do_not_add_up_are_not_applied(
    grid: Grid, caplog: pytest.LogCaptureFixture, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One agent has another plan's masks, or sends what is not the message of an agent."""
    ask = grid.ask

    def spoil(agent: int, message: Any) -> Any:
        from flwr.app import Array

        reply = ask(agent, message)
        if agent == 3 and not reply.has_error() and "arrays" in reply.content:
            words = reply.content["arrays"]["integers"].numpy()
            other = {"integers": words + np.uint16(20_000), "type": words.astype(float)}
            if change == "seed":
                reply.content["corn"]["offset-seed"] = b"short"
            else:
                reply.content["arrays"]["integers"] = Array(other[change])
        return reply

    monkeypatch.setattr(grid, "ask", spoil)
    result = start(grid, 1)
    assert result.arrays is None or not len(result.arrays)
    expected = "do not add up to a possible sum" if change == "integers" else "void without agent 3"
    assert expected in caplog.text


def test_training_ends_with_the_budget(
    grid: Grid, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start(grid, 3)
    start(grid, 9)
    assert "the ledger of node 70 allows no more releases" in caplog.text
    assert spent(tmp_path) == [5] * N
    assert start(grid, 1).arrays is None or not len(start(grid, 1).arrays)
    assert spent(tmp_path) == [5] * N


def test_all_agents_must_begin(grid: Grid, mod: Any, tmp_path: Path) -> None:
    from corn.flower import CornMod, CornStrategy

    grid.change = lose_messages(1, at_round=0)
    with pytest.raises(CornError, match="each once, found 0, 2, 3"):
        start(grid, 1)
    twice = Grid(mod, grow)
    twice.ask = lambda agent, message: Grid.ask(twice, agent % 2, message)  # type: ignore[method-assign]
    with pytest.raises(CornError, match="each once, found 0, 0, 1, 1"):
        start(twice, 1)
    twice.get_node_ids = lambda: [70]  # type: ignore[method-assign]
    with pytest.raises(CornError, match="4 nodes must be connected, found 1"):
        start(twice, 1, timeout=0.01)
    other = make_plan(PLAN.network, PrivacyBudget(2, 1e-5, num_steps=5, clip=0.5))
    folders = make_folders(tmp_path / "other", other)
    with pytest.raises(CornError, match="agent 0 has another plan than the server"):
        start(Grid(CornMod(folders), grow), 1)
    assert spent(tmp_path) == [0] * N
    gossip = make_plan(load_network(f"complete:{N}", mixing="gossip"), BUDGET)
    with pytest.raises(InvalidArgumentError, match="exact sums under masks"):
        CornStrategy(None, gossip)


def next_message(grid: Grid, **changes: Any) -> Any:
    """Return the message to agent 0 that follows the last round, with changes of its entries."""
    from flwr.app import ConfigRecord, Message, RecordDict

    last = grid.asked[-1][1]
    hellos = [reply.content["corn"]["hello"] for reply in grid.replies[-N:]]
    config = {**last.content["config"], "corn.hellos": hellos, **changes}
    content = RecordDict({"arrays": last.content["arrays"], "config": ConfigRecord(config)})
    return Message(content, dst_node_id=70, message_type="train")


def test_a_hostile_server_gets_refusals_before_a_client_trains(
    grid: Grid, mod: Any, tmp_path: Path
) -> None:
    def train(*_: object) -> None:
        pytest.fail("the client app was called")

    start(grid, 1)
    hellos = next_message(grid).content["config"]["corn.hellos"]
    strict = Grid(mod, train)
    forged = hellos[1][:-64] + bytes(64)
    nonsense: list[Any] = [[], hellos[1:], hellos[:1], hellos * 300, [*hellos[:3], forged]]
    nonsense += [[*hellos, hellos[0]], [b"hello"] * N, ["0"] * N, [7] * N, "0" * N]
    for wrong in nonsense:
        reply = strict.ask(0, next_message(grid, **{"corn.hellos": wrong}))
        assert reply.has_error(), wrong
        assert "refuses" in reply.error.reason, wrong
    assert spent(tmp_path)[0] == 1


def test_a_hostile_server_that_repeats_rounds_gets_refusals(grid: Grid, tmp_path: Path) -> None:
    start(grid, 2)
    first, second = grid.asked[N][1], grid.asked[-1][1]
    again = next_message(grid)
    fewer = next_message(grid, **{"corn.hellos": again.content["config"]["corn.hellos"][:3]})
    assert not grid.ask(0, again).has_error()
    for message in (first, second, again, fewer):
        assert "refuses to release" in grid.ask(0, message).error.reason
    assert spent(tmp_path) == [3, 2, 2, 2]


@pytest.mark.parametrize("kind", [ValueError, PublicError, InfeasibleError])
def test_private_evaluations_and_errors_stay_with_their_owner(
    mod: Any, grid: Grid, caplog: pytest.LogCaptureFixture, kind: type[Exception]
) -> None:
    from flwr.app import Message, RecordDict

    def fail(*_: object) -> None:
        raise kind("patient 17 has no age")

    start(grid, 1)
    reply = Grid(mod, fail).ask(0, next_message(grid))
    assert "the site failed: CornError; only its owner" in reply.error.reason
    assert "patient" not in reply.error.reason
    assert "patient 17" in caplog.text
    answer = grid.ask(0, Message(RecordDict(), dst_node_id=70, message_type="evaluate"))
    assert {name: dict(record) for name, record in answer.content.items()} == {
        "metrics": {"num-examples": 1}
    }


def test_files_of_the_owner_and_answers_of_the_app_are_not_quoted_to_the_server(
    mod: Any, grid: Grid, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from flwr.app import Array, ArrayRecord, Message, RecordDict

    def leak(message: Any, _: object) -> Any:
        arrays = {name: array.numpy() for name, array in message.content["arrays"].items()}
        arrays["b"] = np.array(["patient 17"] * 7)
        record = ArrayRecord({name: Array(values) for name, values in arrays.items()})
        return Message(RecordDict({"arrays": record}), reply_to=message)

    start(grid, 1)
    message = next_message(grid)
    reply = Grid(mod, leak).ask(0, message)
    assert reply.error.reason == "the site failed: ValueError; only its owner sees the details"
    assert "patient 17" in caplog.text
    next(tmp_path.glob("sites/0/agent-0-*.ledger")).unlink()
    reply = grid.ask(0, message)
    expected = "the site failed: FileFormatError; only its owner sees the details"
    assert reply.error.reason == expected


def test_messages_of_other_servers_and_other_shapes_are_refused(mod: Any, grid: Grid) -> None:
    from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

    from corn.flower import CornMod

    start(grid, 1)
    message = next_message(grid)
    config = ConfigRecord({"server-round": 2})
    plain = RecordDict({"arrays": message.content["arrays"], "config": config})
    asked = Message(plain, dst_node_id=70, message_type="train")
    assert "the server needs corn.flower.CornStrategy" in grid.ask(0, asked).error.reason

    def cut(message: Any, _: object) -> Any:
        arrays = ArrayRecord({"w": Array(np.zeros(2))})
        return Message(RecordDict({"arrays": arrays}), reply_to=message)

    assert "arrays of the shapes" in Grid(mod, cut).ask(0, message).error.reason
    with pytest.raises(PublicError, match="folder of the site"):
        CornMod()(message, SimpleNamespace(node_config={}), grow)


@pytest.mark.slow
def test_the_example_runs_without_a_simulation_engine(
    grid: Grid, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_here(server: Any, client: Any, num_nodes: int) -> None:
        grid.app, grid.num_nodes = client, num_nodes
        server(grid, SimpleNamespace())

    monkeypatch.setattr("flwr.simulation.run_simulation", run_here)
    example = Path(__file__).parent.parent / "examples" / "flower_app.py"
    runpy.run_path(str(example), run_name="__main__")
    promise, noise, accuracy, total = capsys.readouterr().out.splitlines()
    assert promise.startswith("ε = 20")
    assert noise == "noise of the average: 1.200 × a trusted server's"
    # Chance is 0.5, without noise it is 0.94; the standard deviation over runs is 0.02.
    assert float(accuracy.split()[-1]) > 0.75
    assert total.count("19.999") == 6
