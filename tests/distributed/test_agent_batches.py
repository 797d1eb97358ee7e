"""Batches of agents: secret, none twice in a pass, of any number of samples, never written."""

import re
import threading
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

from corn.checks import FloatArray, IntArray
from corn.covariance import ThreatModel
from corn.distributed import AgentResult, Rendezvous, RunSettings, run_agent
from corn.distributed.agent import digest_data, run_steps, run_to_end
from corn.distributed.keyring import make_keys, open_ledger
from corn.distributed.results import RunStatus
from corn.errors import FileFormatError
from corn.learn import Constant
from corn.learn.batches import Batch, BatchSampler, public_width
from corn.learn.own_loop import number_rows
from corn.learn.problem import DataSource, TrainingProblem, make_problem
from corn.learn.tasks.module import make_task
from corn.learn.user_model import UserModel
from corn.noise import Secret, rotate_key
from corn.noise.choices import SecretChoices
from corn.plan import Plan, make_plan
from corn.privacy import PrivacyBudget
from corn.topology import load_network

from .threads import make_identities, run_in_threads

SAMPLES, BATCH, STEPS = 40, 8, 12
# Accounting of Poisson sampling takes a tenth of a second for each number of steps.
FEW_STEPS = 4


TASK = make_task(nn.Linear(5, 2), nn.functional.cross_entropy)


def sample_plan(sampling: Any, num_steps: int = STEPS, **changes: Any) -> Plan:
    common = {"unit": "sample", "batch_size": BATCH, "samples_per_agent": SAMPLES}
    budget = PrivacyBudget(
        10, 1e-5, num_steps=num_steps, clip=0.5, sampling=sampling, **{**common, **changes}
    )
    return make_plan(
        load_network("ring:3", mixing="gossip"), budget, mechanism="ldp", threat=ThreatModel()
    )


def samples_of(agent: int, size: int = SAMPLES) -> TensorDataset:
    inputs = torch.randn(size, 5, generator=torch.Generator().manual_seed(agent))
    return TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())


class Recorder:
    """The batches that each agent's sampler chose, as (number, rows)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.agent = threading.local()
        self.batches: dict[int, list[tuple[int, list[int]]]] = defaultdict(list)
        self.drawn: list[Batch] = []
        choose = BatchSampler.choose_rows

        def record(sampler: BatchSampler, number: int) -> list[IntArray]:
            rows = choose(sampler, number)
            self.batches[self.agent.number].append((number, rows[0].tolist()))
            return rows

        draw = BatchSampler.draw

        def keep(sampler: BatchSampler, number: int) -> Batch:
            self.drawn.append(draw(sampler, number))
            return self.drawn[-1]

        monkeypatch.setattr(BatchSampler, "choose_rows", record)
        monkeypatch.setattr(BatchSampler, "draw", keep)

    def run(
        self,
        plan: Plan,
        keys: Path,
        out: Path,
        *,
        sizes: Sequence[int] = (SAMPLES,) * 3,
        rows: Sequence[int] | None = None,
        **more: Any,
    ) -> list[AgentResult | BaseException]:
        """Train all agents, on some rows of their data if they are given."""

        def train(rendezvous: Rendezvous) -> AgentResult:
            self.agent.number, rendezvous.keys = rendezvous.agent, keys
            model = nn.Linear(5, 2)
            nn.init.zeros_(model.weight)
            nn.init.zeros_(model.bias)
            dataset: Any = samples_of(rendezvous.agent, sizes[rendezvous.agent])
            return run_agent(
                plan,
                rendezvous=rendezvous,
                model=model,
                loss=nn.functional.cross_entropy,
                dataset=dataset if rows is None else Subset(dataset, rows),
                out=out,
                settings=RunSettings(
                    Constant(0.5), evaluate_at=(0,), timeout=20, checkpoint_every=3, **more
                ),
            )

        make_keys(keys, 3)
        return run_in_threads(3, train)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


def test_passes_go_on_where_a_crashed_run_stopped(recorder: Recorder, tmp_path: Path) -> None:
    """Replay: over both runs no sample is in more batches than passes of 5 batches were begun."""
    plan, keys = sample_plan("passes"), tmp_path / "keys"
    recorder.run(plan, keys, tmp_path, num_steps=7)
    crashed = {agent: list(own) for agent, own in recorder.batches.items()}
    # Without its last checkpoint the run resumes from step 6, in the middle of the second pass.
    for path in tmp_path.glob("private/agent-*/checkpoint-7*"):
        path.unlink()
    results = recorder.run(plan, keys, tmp_path, resume=True, num_steps=10)
    assert all(isinstance(result, AgentResult) for result in results), results
    for agent, own in recorder.batches.items():
        assert len(crashed[agent]) == 7
        assert [number for number, _ in own] == list(range(len(own)))
        assert len(own) > 9
        counts = np.bincount(np.concatenate([rows for _, rows in own]), minlength=SAMPLES)
        assert counts.max() <= -(-len(own) // (SAMPLES // BATCH))
        passes: dict[int, list[int]] = defaultdict(list)
        for number, rows in own:
            passes[number // (SAMPLES // BATCH)] += rows
        assert all(len(set(rows)) == len(rows) for rows in passes.values())
        assert passes[0] != passes[1]


def test_two_runs_of_an_agent_take_other_samples(recorder: Recorder, tmp_path: Path) -> None:
    plan = sample_plan("poisson", FEW_STEPS)
    for name in ("one", "two"):
        for result in recorder.run(plan, tmp_path / "keys", tmp_path / name, num_steps=2):
            assert isinstance(result, AgentResult), result
    for own in recorder.batches.values():
        numbers, rows = zip(*own, strict=True)
        assert numbers == (0, 1, 2, 3)
        assert rows[:2] != rows[2:]


CHANGES = {
    "other keys": range(SAMPLES),
    "more rows": range(SAMPLES + 7),  # as many batches as before
    "another order": [*range(7, SAMPLES), *range(7)],
    "another row": [*range(1, SAMPLES), SAMPLES],
    "nothing": range(SAMPLES),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_keys_and_other_data_put_no_sample_into_two_batches_of_a_pass(
    change: str, recorder: Recorder, tmp_path: Path
) -> None:
    """The attack: a run ends within a pass of 5 batches, and the next one has other orders."""
    plan, keys, length = sample_plan("passes"), tmp_path / "keys", SAMPLES // BATCH
    sizes, rows = (SAMPLES + 7,) * 3, CHANGES[change]
    first = recorder.run(
        plan, keys, tmp_path / "one", sizes=sizes, rows=range(SAMPLES), num_steps=7
    )
    if change == "other keys":
        for agent in range(3):
            rotate_key(keys, agent)
        make_identities.cache_clear()  # those with which agents meet in threads
    second = recorder.run(plan, keys, tmp_path / "two", sizes=sizes, rows=rows)
    assert all(isinstance(result, AgentResult) for result in (*first, *second)), (first, second)
    is_same = change in ("other keys", "nothing")
    for agent, own in recorder.batches.items():
        result = second[agent]
        assert isinstance(result, AgentResult)
        # Other data begins the third pass; the same data, also under other keys, the rest of the
        # second.
        assert [number for number, _ in own] == [*range(7), *range(7 if is_same else 10, STEPS)]
        assert any("begins a new pass" in note for note in result.private_notes) == (not is_same)
        assert "begins a new pass" not in f"{result.notes} {result.to_json()}"
        passes: dict[int, list[int]] = defaultdict(list)
        for k, (number, batch) in enumerate(own):
            passes[number // length] += batch if k < 7 else [rows[row] for row in batch]
        assert all(len(set(used)) == len(used) for used in passes.values())
        counts = np.bincount(np.concatenate(list(passes.values())))
        assert counts.max() <= plan.budget.query.participations(STEPS) == 3


def test_a_digest_is_taken_where_it_decides_on_passes() -> None:
    """A user's loop has its samples elsewhere: their row numbers tell nothing about them."""

    def digest(sampling: str, data: DataSource) -> bytes | None:
        problem = make_problem(TASK, [data], 1)
        return digest_data(sample_plan(sampling), 0, problem)

    one, other = samples_of(0), samples_of(1)
    found = [digest("passes", each) for each in (one, Subset(one, range(SAMPLES)), other)]
    assert found[0] == found[1] != found[2]
    inputs, targets = one.tensors
    for changed in (
        (inputs.flip(0), targets.flip(0)),
        (inputs, 1 - targets),
        (inputs.double(), targets),
        (inputs[1:], targets[1:]),
        (inputs.view(SAMPLES, 1, 5), targets),
    ):
        assert digest("passes", TensorDataset(*changed)) not in found
    assert digest("poisson", one) is None
    assert digest("every-step", one) is None
    model = UserModel(nn.Linear(5, 2))
    loop = TrainingProblem(model, number_rows(SAMPLES))
    assert digest_data(sample_plan("passes"), 0, loop) is None


def test_an_agent_does_not_return_with_an_older_ledger(recorder: Recorder, tmp_path: Path) -> None:
    """Its checkpoints show more releases than the ledger that was restored."""
    plan, keys = sample_plan("every-step", FEW_STEPS, samples_per_agent=None), tmp_path / "keys"
    make_keys(keys, 3)
    with open_ledger(keys, 0, plan, precision=0.0):
        pass
    (path,) = keys.glob("agent-0-*.ledger")
    older = path.read_bytes()
    recorder.run(plan, keys, tmp_path)
    path.write_bytes(older)

    def rejoin(rendezvous: Rendezvous) -> AgentResult | None:
        rendezvous.keys = keys
        rendezvous.rejoins = True
        if rendezvous.agent != 0:
            return None
        steps = run_steps(
            plan,
            make_problem(TASK, [samples_of(rendezvous.agent)], 1),
            rendezvous=rendezvous,
            out=tmp_path,
            settings=RunSettings(Constant(0.5), timeout=1),
        )
        return run_to_end(steps, TASK, rendezvous)

    refused, *_ = run_in_threads(3, rejoin)
    assert isinstance(refused, FileFormatError), refused
    assert "releases, but the ledger beside the key counts 0" in str(refused)
    assert "an older copy of it, which must not be used" in str(refused)


def test_a_pass_that_is_skipped_does_not_hide_an_older_ledger(
    recorder: Recorder, tmp_path: Path
) -> None:
    """With other data two of five batches are skipped, which are more than the older copy lacks."""
    plan, keys = sample_plan("passes"), tmp_path / "keys"
    make_keys(keys, 3)
    recorder.run(plan, keys, tmp_path, num_steps=3)
    (path,) = keys.glob("agent-0-*.ledger")
    older = path.read_bytes()
    recorder.run(plan, keys, tmp_path, num_steps=4, resume=True)
    path.write_bytes(older)
    refused, *_ = recorder.run(plan, keys, tmp_path, resume=True, rows=range(SAMPLES - 1))
    assert isinstance(refused, FileFormatError), refused
    assert "after 4 releases, but the ledger beside the key counts 3" in str(refused)


@pytest.mark.parametrize("sampling", ["poisson", "passes"])
def test_no_file_of_a_run_has_a_secret_or_a_batch(
    sampling: str, recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets: list[bytes] = []
    monkeypatch.setattr(SecretChoices, "__init__", spy_on_secrets(secrets))
    plan = sample_plan(sampling, FEW_STEPS)
    for result in recorder.run(plan, tmp_path / "keys", tmp_path):
        assert isinstance(result, AgentResult), result
    found = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(found) > 9
    assert len(secrets) == 6
    # Ledgers have the secrets from which the orders follow, and no other file has them.
    ledgers = {path: path.read_bytes() for path in found if path.suffix == ".ledger"}
    roots = {
        form
        for content in ledgers.values()
        for text in re.findall(rb'"secret": "([0-9a-f]{64})"', content)
        for form in (text, bytes.fromhex(text.decode()))
    }
    assert len(roots) == 6
    for path in found:
        assert path in ledgers or not any(form in path.read_bytes() for form in roots), path
    hidden = [form for secret in secrets for form in (secret, secret.hex().encode())]
    for own in recorder.batches.values():
        for _, rows in own:
            if len(rows) >= 4:  # shorter ones may occur by chance
                hidden += [np.array(rows[:4], kind).tobytes() for kind in ("<i8", "<i4")]
                hidden += [
                    ", ".join(map(str, rows[:4])).encode(),
                    ",".join(map(str, rows[:4])).encode(),
                ]
    assert len(hidden) > 40
    for path in found:
        content = path.read_bytes()
        assert not any(form in content for form in hidden), path


def spy_on_secrets(found: list[bytes]) -> Any:
    def keep(self: Any, coins: Secret, orders: Secret) -> None:
        self._coins, self._orders = coins, orders
        found.extend([coins.reveal(), orders.reveal()])

    return keep


def test_an_empty_batch_is_a_batch(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise alone is sent, every release counts, and nobody else learns of it."""

    def draw_tails(_: object, number: int, sizes: Sequence[int]) -> FloatArray:  # noqa: ARG001
        return np.full(sum(sizes), 1 - 2.0**-53)

    monkeypatch.setattr(SecretChoices, "draw_coins", draw_tails)
    plan = sample_plan("poisson", FEW_STEPS)
    for agent, result in enumerate(recorder.run(plan, tmp_path / "keys", tmp_path)):
        assert isinstance(result, AgentResult), result
        assert (result.status, result.num_steps) == (RunStatus.COMPLETE, FEW_STEPS)
        assert result.notes == ()
        assert float(result.rows[-1]["gradient_norm"]) == 0
        assert float(result.rows[-1]["epsilon"]) == pytest.approx(10, rel=1e-3)
        assert float(result.parameters.abs().min()) > 0
        assert [rows for _, rows in recorder.batches[agent]] == [[]] * FEW_STEPS


@pytest.mark.parametrize("sampling", ["poisson", "passes"])
def test_data_far_smaller_than_planned_is_not_refused(
    sampling: str, recorder: Recorder, tmp_path: Path
) -> None:
    """A refusal would tell others that a sample is missing, and the guarantee needs none."""
    plan = sample_plan(sampling, FEW_STEPS)
    results = recorder.run(plan, tmp_path / "keys", tmp_path, sizes=(40, 13, 39))
    for result in results:
        assert isinstance(result, AgentResult), result
        assert result.num_steps == FEW_STEPS
        assert result.notes == ()


@pytest.mark.parametrize("sampling", ["poisson", "passes", "every-step"])
def test_agents_of_different_sizes_train_together(
    sampling: str, recorder: Recorder, tmp_path: Path
) -> None:
    samples = None if sampling == "every-step" else SAMPLES
    plan = sample_plan(sampling, FEW_STEPS, samples_per_agent=samples)
    for result in recorder.run(plan, tmp_path / "keys", tmp_path, sizes=(40, 47, 90)):
        assert isinstance(result, AgentResult), result
        assert result.num_steps == FEW_STEPS
    lengths = {agent: {len(rows) for _, rows in own} for agent, own in recorder.batches.items()}
    if sampling != "poisson":
        assert set(map(tuple, lengths.values())) == {(BATCH,)}
    # Nobody can tell agents apart by the shapes of their batches, which take equally long.
    widths = {batch.weights.shape for batch in recorder.drawn}
    assert widths == {(1, public_width(BATCH) if sampling == "poisson" else BATCH)}
