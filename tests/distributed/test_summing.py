"""Agents with exact sums: one model, a step that all apply or none, and a stop for all."""

import threading
import time
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from corn.covariance import MechanismName, ThreatModel
from corn.covariance.objective import Horizon
from corn.distributed import messages, rounds, summing
from corn.distributed.keyring import make_keys
from corn.distributed.launcher import AgentProcesses
from corn.distributed.own_loop import make_private
from corn.distributed.rendezvous import Rendezvous
from corn.distributed.results import AgentResult, RunStatus, StopReason
from corn.distributed.settings import RunSettings
from corn.distributed.storage import Folders, read_model
from corn.distributed.summing import digest_model
from corn.learn import perturbation
from corn.learn.perturbation import DrawnNoise
from corn.learn.schedule import Constant
from corn.learn.step import AgentStepper, clip_gradients
from corn.learn.tasks import Gradients
from corn.noise.masks import is_possible
from corn.plan import Plan, load_plan, make_plan, save_plan
from corn.privacy import PrivacyBudget
from corn.topology import load_network
from corn.transport import Channel

from .harness import WORKLOAD, finished, run_processes, small_plan
from .rehearsal import rehearsing
from .test_agent import samples_of, train
from .test_simulation_match import compare
from .threads import run_in_threads

PLAN = small_plan("path:5", 12, mixing="sum")
SETTINGS = RunSettings(Constant(0.2), batch_size=16, timeout=30, evaluate_at=(0,))


def run(plan: Plan, folder: Path, **options: Any) -> list[AgentResult]:
    """Run all agents in threads; ``AGENT.number`` is the agent of each."""
    make_keys(folder / "keys", plan.num_agents)

    def run_one(rendezvous: Rendezvous) -> AgentResult:
        AGENT.number, AGENT.num_calls = rendezvous.agent, 0
        return train(rendezvous, folder, plan=plan, **options)

    results = []
    for result in run_in_threads(plan.num_agents, run_one):
        assert isinstance(result, AgentResult), result
        results.append(result)
    return results


AGENT = threading.local()


@pytest.mark.parametrize(
    ("mechanism", "threat"),
    [
        ("corn", ThreatModel(1, "pairs")),
        ("corn", ThreatModel(1, tuple(combinations(range(4), 3)))),
        ("ldp", ThreatModel(0)),
    ],
    ids=["pairs", "groups", "ldp"],
)
def test_four_processes_match_the_simulation(
    mechanism: MechanismName, threat: ThreatModel, tmp_path: Path
) -> None:
    plan = small_plan("ring:4", 15, mechanism=mechanism, threat=threat, mixing="sum")
    assert plan.decomposition.is_masked == (mechanism == "corn")
    compare(plan, tmp_path)


def test_momentum_is_that_of_the_average_in_double_precision(tmp_path: Path) -> None:
    budget = PrivacyBudget(10, 1e-5, num_steps=10, clip=0.1)
    network = load_network("path:5", mixing="sum")
    plan = make_plan(network, budget, objective=Horizon(3, momentum=0.7), dtype="float64")
    assert plan.network.tree.depth == 2
    compare(plan, tmp_path)


def test_a_single_agent_needs_nobody(tmp_path: Path) -> None:
    budget = PrivacyBudget(10, 1e-5, num_steps=5, clip=0.1)
    graph = load_network("path:1", mixing="sum")
    compare(make_plan(graph, budget, threat=ThreatModel(0)), tmp_path)


def test_all_agents_hold_the_same_bits_and_send_two_messages_per_link(tmp_path: Path) -> None:
    plan = small_plan("grid:2x3", 20, mixing="sum")
    results = finished(run_processes(plan, tmp_path, SETTINGS))
    tree, num_messages, num_bytes = plan.network.tree, 0, 0
    size = WORKLOAD.build(6).task.num_parameters
    folders = Folders.of_run(tmp_path)
    models = {read_model(folders.of_agent(a).shared, 20, plan).numpy().tobytes() for a in results}
    assert len(models) == 1
    for agent, own in results.items():
        assert (own.status, own.num_steps) == (RunStatus.COMPLETE, 20)
        for peer, traffic in own.traffic.items():
            is_link = peer == tree.parents[agent] or agent == tree.parents[peer]
            # One more in the end, to learn that everybody has the last sum. Over the other links
            # agents compare their models after 15 steps and in the end.
            assert traffic.messages_sent == (21 if is_link else 2)
            num_messages += traffic.messages_sent
            num_bytes += traffic.bytes_sent
    num_aside = 4 * (plan.network.graph.number_of_edges() - 5)
    assert num_messages == 21 * tree.num_messages + num_aside == 21 * 2 * 5 + 4 * 2
    assert plan.mask_bits == 16
    payload = 20 * tree.num_messages * 2 * size
    # Links that are not of the tree carry heartbeats alone, of a few bytes.
    assert payload < num_bytes <= payload + num_messages * 256 + 1000


def test_sums_in_pieces_have_the_bits_of_whole_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rehearsing(3):
        whole = run(PLAN, tmp_path / "whole")
        for module in (messages, summing):
            monkeypatch.setattr(module, "PIECE_BYTES", 10)  # the last of three has two integers
        pieces = run(PLAN, tmp_path / "pieces")
    for own in pieces:
        assert torch.equal(own.parameters, whole[0].parameters)
        for traffic in own.traffic.values():
            assert traffic.messages_sent == 12 * 3 + 1


def test_a_message_that_is_still_leaving_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A neighbour may have the last message, and end the run, before the sender has counted it."""
    send = Channel.send

    def send_slowly(self: Channel, message: bytes | memoryview) -> int:
        sent = send(self, message)
        time.sleep(0.02)
        return sent

    monkeypatch.setattr(Channel, "send", send_slowly)
    for result in run(PLAN, tmp_path):
        traffic = [link for link in result.traffic.values() if link.messages_sent]
        assert {link.messages_sent for link in traffic} == {13}


def test_every_agent_steps_along_the_average_of_all_releases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An independent sum of what all agents noted: of gradients and private noise, no masks."""
    noted: dict[tuple[int, int], np.ndarray] = {}
    averages: list[np.ndarray] = []
    make, read_total = DrawnNoise.make_message, DrawnNoise.read_total

    def note(self: DrawnNoise, gradient: Tensor, factor: Tensor) -> Any:
        exact = np.longdouble(gradient.numpy()) * float(factor) + self.values.numpy()
        noted[self.step, AGENT.number] = exact
        return make(self, gradient, factor)

    def read(*given: Any) -> Any:
        average = read_total(*given)
        if AGENT.number == 3:
            assert average is not None
            averages.append(average.copy())  # the step takes its memory
        return average

    monkeypatch.setattr(DrawnNoise, "make_message", note)
    monkeypatch.setattr(DrawnNoise, "read_total", read)
    results = run(PLAN, tmp_path)
    assert len({own.parameters.numpy().tobytes() for own in results}) == 1
    for step in range(12):
        expected = sum(noted[step, agent] for agent in range(5)) / 5
        # Each release is rounded to the grid once.
        assert abs(averages[step] - expected).max() <= PLAN.grid / 2 * (1 + 1e-9)
    # Each run has words and noise of its own.
    assert len({values.tobytes() for values in noted.values()}) == 60


@pytest.mark.parametrize("step", [5, 12], ids=["middle", "last"])
def test_an_agent_with_a_flipped_bit_in_its_model_is_left_behind(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    move = AgentStepper.move

    def flip(self: AgentStepper, *given: Any, **options: Any) -> Tensor:
        moved, AGENT.num_calls = move(self, *given, **options), AGENT.num_calls + 1
        if AGENT.number == 4 and AGENT.num_calls == step:
            moved.view(torch.int32)[3] ^= 1  # the last bit of one number
        return moved

    monkeypatch.setattr(AgentStepper, "move", flip)
    *others, faulty = run(PLAN, tmp_path)
    # On a path, its link to its parent is its only one.
    assert PLAN.network.tree.parents[4] == 3
    for own in others:
        assert own.num_steps == 12
        assert set(own.lost) == {4}
    assert f"agent 4 is no longer linked, as it has another model at step {step}" in others[3].notes
    models = {own.parameters.numpy().tobytes() for own in others}
    assert len(models) == 1
    assert faulty.parameters.numpy().tobytes() not in models
    assert faulty.num_steps == (step + 1 if step == 5 else 12)


make_message = DrawnNoise.make_message


def spoil_a_mask(self: DrawnNoise, gradient: Tensor, factor: Tensor) -> Any:
    """Give agent 1 another word in one coordinate at step 4, by half the ring of integers."""
    message = make_message(self, gradient, factor)
    if AGENT.number == 1 and self.step == 4:
        message[2] ^= np.uint16(1 << 15)
    return message


def test_a_sum_whose_masks_do_not_cancel_is_applied_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(parameters: Tensor) -> bytes:
        models.setdefault(AGENT.number, []).append(parameters.numpy().tobytes())
        return digest(parameters)

    models: dict[int, list[bytes]] = {}
    digest = digest_model
    monkeypatch.setattr(DrawnNoise, "make_message", spoil_a_mask)
    monkeypatch.setattr(rounds, "digest_model", record)
    results = run(PLAN, tmp_path)
    for own in results:
        assert own.status is RunStatus.COMPLETE
        (note,) = own.notes
        assert note.startswith("the sum of step 4 is void, as masks did not cancel")
        before = models[own.agent]
        assert [before[k] == before[k + 1] for k in range(11)] == [k == 4 for k in range(11)]
        # It counts as released.
        assert own.rows[-1]["epsilon"] == pytest.approx(10, rel=1e-6)


@pytest.mark.parametrize("agent", [4, 3, 2], ids=["leaf", "inner", "root"])
def test_an_agent_that_applies_a_void_sum_loses_its_links(
    agent: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum of step 4 is void for all, but the check of one agent lets it pass."""
    monkeypatch.setattr(DrawnNoise, "make_message", spoil_a_mask)
    check = is_possible

    def accept(total: Any, largest_sum: int) -> bool:
        return AGENT.number == agent or check(total, largest_sum)

    monkeypatch.setattr(perturbation, "is_possible", accept)
    results = run(PLAN, tmp_path)
    models = {own.agent: own.parameters.numpy().tobytes() for own in results}
    # Those that are still linked on the path have one model; an agent that is alone stops.
    for part in ([0, 1, 2, 3, 4][:agent], [0, 1, 2, 3, 4][agent + 1 :]):
        assert len({models[own] for own in part}) <= 1
        for own in part:
            assert results[own].num_steps == (12 if len(part) > 1 else 6)
            assert set(results[own].lost) == {agent}
            told = any(note.startswith("the sum of step 4 is void") for note in results[own].notes)
            assert told
    # Each step shows the difference over one of its links.
    assert results[agent].num_steps == (6 if agent == 4 else 7)
    assert results[agent].stop.reason is StopReason.LOSS


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite_counts_as_zero_and_is_told_to_its_owner_alone(
    value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(found: Gradients, *given: Any, **options: Any) -> Any:
        if AGENT.number == 2:
            found.values.fill_(value)
        return clip_gradients(found, *given, **options)

    monkeypatch.setattr("corn.learn.step.clip_gradients", spoil)
    for own in run(PLAN, tmp_path):
        assert own.status is RunStatus.COMPLETE
        assert own.notes == ()
        assert torch.isfinite(own.parameters).all()
        assert bool(own.private_notes) == (own.agent == 2)


def test_agents_stop_at_the_same_step_where_the_model_diverges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    move = AgentStepper.move

    def diverge(self: AgentStepper, *given: Any, **options: Any) -> Tensor:
        moved, AGENT.num_calls = move(self, *given, **options), AGENT.num_calls + 1
        return moved * torch.inf if AGENT.num_calls == 7 else moved

    monkeypatch.setattr(AgentStepper, "move", diverge)
    for own in run(PLAN, tmp_path):
        assert own.stop.reason is StopReason.DIVERGED
        assert own.num_steps == 7


def test_bits_and_largest_sum_follow_from_the_plan_file(tmp_path: Path) -> None:
    save_plan(PLAN, tmp_path / "plan.corn")
    loaded = load_plan(tmp_path / "plan.corn")
    assert (loaded.mask_bits, loaded.largest_sum) == (PLAN.mask_bits, PLAN.largest_sum)
    assert PLAN.largest_sum < 2 ** (PLAN.mask_bits - 2)


def test_a_run_that_resumes_ends_with_the_same_bits_momentum_included(tmp_path: Path) -> None:
    budget = PrivacyBudget(10, 1e-5, num_steps=12, clip=0.1)
    network = load_network("path:3", mixing="sum")
    plan = make_plan(network, budget, objective=Horizon(3, momentum=0.7))
    with rehearsing(3):
        whole = run(plan, tmp_path / "whole", checkpoint_every=6)
        for own in run(plan, tmp_path / "parts", num_steps=6, checkpoint_every=6):
            assert own.num_steps == 6
        for own in run(plan, tmp_path / "parts", resume=True, checkpoint_every=6):
            assert (own.first_step, own.num_steps) == (6, 12)
            assert torch.equal(own.parameters, whole[0].parameters)


def test_all_agents_stop_at_the_same_step_on_request(tmp_path: Path) -> None:
    plan, brake = small_plan("grid:2x3", 500, mixing="sum"), tmp_path / "brake"
    brake.touch()

    def stop(processes: AgentProcesses) -> None:
        if 0 in processes.states:
            processes.request_stop()

    results = run_processes(plan, tmp_path, SETTINGS, brake=brake, on_poll=stop)
    ends = {(own.num_steps, own.stop.reason) for own in finished(results).values()}
    assert len(ends) == 1
    assert len(finished(results)) == 6
    num_steps, reason = ends.pop()
    assert reason is StopReason.INTERRUPTED
    assert num_steps < 500
    folders = Folders.of_run(tmp_path)
    models = [read_model(folders.of_agent(a).shared, num_steps, plan) for a in results]
    assert all(torch.equal(own, models[0]) for own in models)


def test_loops_of_agents_may_use_adam_and_end_with_one_model(tmp_path: Path) -> None:
    """Every agent's optimizer sees the average of all releases, and so the same numbers."""
    plan = small_plan("path:3", 6, mixing="sum")
    make_keys(tmp_path / "keys", 3)
    torch.manual_seed(0)
    models = [nn.Linear(5, 2) for _ in range(3)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())

    def train_one(rendezvous: Rendezvous) -> bytes:
        rendezvous.keys = tmp_path / "keys"
        model = models[rendezvous.agent]
        private = make_private(
            plan,
            module=model,
            optimizer=torch.optim.Adam(model.parameters(), lr=0.1),
            data_loader=DataLoader(samples_of(rendezvous.agent), batch_size=10),
            rendezvous=rendezvous,
            settings=RunSettings(timeout=20),
        )
        num_steps = 0
        for _ in range(2):
            for inputs, targets in private.data_loader:
                loss = nn.functional.cross_entropy(model(inputs), targets)
                loss.backward()  # type: ignore[no-untyped-call]
                private.optimizer.step()
                num_steps += 1
        assert num_steps == 6
        return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().tobytes()

    found = run_in_threads(3, train_one)
    assert all(isinstance(own, bytes) for own in found), found
    assert len(set(found)) == 1
