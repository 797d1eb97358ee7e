"""Every way to add up the releases of a step, behind one interface for the contract tests.

All train one model whose gradient at an agent is that agent's row, so that the number of steps that
were applied can be read off the model.
"""

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import corn.engines
from corn.checks import FloatArray
from corn.distributed import Rendezvous, RunSettings, run_agent
from corn.distributed.launcher import preloaded_context
from corn.distributed.results import AgentResult
from corn.engines import (
    AgentRelease,
    GradientSteps,
    RankSums,
    Reduction,
    ServerSums,
    SumRounds,
    TooFewAgentsError,
)
from corn.errors import CornError
from corn.learn import Constant, Mechanism, SweepSettings, Trial, run_sweep
from corn.learn.batches import AgentData
from corn.learn.perturbation import NoiseShare, simulation_nonce
from corn.learn.problem import TrainingProblem
from corn.learn.tasks.module import ModuleTask
from corn.noise import BudgetSpentError, load_roster
from corn.noise.masks import draw_offset
from corn.plan import Plan, make_plan, save_plan
from corn.privacy import PrivacyBudget
from corn.topology import load_network
from tests.contracts.engines import Context, Grid, flower_runtime, grow, lose_messages, task
from tests.distributed.rehearsal import make_public_source, rehearsing
from tests.distributed.threads import run_in_threads

N, T, SIZE, STEP_SIZE, SEED = 4, 5, 6, 0.5, 3
# One row of 64 is protected, so that there is little noise, and single steps can be counted.
ROWS = 64
BUDGET = PrivacyBudget(
    8, 1e-5, num_steps=T, clip=1.0, unit="sample", batch_size=ROWS, samples_per_agent=ROWS
)
# In float64, the type of all engines' averages.
PLAN = make_plan(load_network(f"ring:{N}", mixing="sum"), BUDGET, dtype="float64")
ROW = torch.linspace(0.1, 0.3, SIZE, dtype=torch.float64)
_WAIT = 3.0


class Weights(nn.Module):
    """A vector, whose product with a row is the output."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(SIZE, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.w


def mean_output(outputs: Tensor, _targets: Tensor) -> Tensor:
    return outputs.mean()


def make_problem(agent: int) -> tuple[nn.Module, Any, tuple[Tensor, Tensor]]:
    """Return module, loss and data, whose gradient is (0.7 + 0.2 agent) times the row."""
    return Weights(), mean_output, ((0.7 + 0.2 * agent) * ROW.repeat(ROWS, 1), torch.zeros(ROWS))


def measure_distance(model: FloatArray) -> float:
    """Return how far a model is from zero, in steps along the average gradient of all agents."""
    row = ROW.numpy()
    return float(-(model @ row) / (STEP_SIZE * (row @ row)))


@dataclass(frozen=True)
class Loss:
    """An agent that is lost after it has announced its release of a step, and sends nothing."""

    agent: int
    step: int


class Gone(BaseException):
    """What a lost agent raises; no handler of errors takes it for one."""


Models = dict[int, FloatArray]
Run = Callable[..., Models]


@contextmanager
def public_noise(num_agents: int = N) -> Iterator[None]:
    """Let the engines' agents of this process draw the noise of a simulation with a seed.

    The seed of an offset has the number of the step. Releases of a step are made before any of the
    next, so that the number of releases in this process has it too.
    """
    releases, make, nonce = count(), NoiseShare.__init__, simulation_nonce(SEED)

    def make_public(
        share: NoiseShare, plan: Plan, agent: int, _source: object, **options: Any
    ) -> None:
        source = make_public_source(plan.decomposition, agent, seed=SEED)
        share._step = int.from_bytes(options.pop("offset_seed"))  # type: ignore[attr-defined]
        make(share, plan, agent, source, **{**options, "nonce": nonce})

    take = NoiseShare.take

    def take_public(share: NoiseShare, _step: int) -> Any:
        return take(share, share._step)  # type: ignore[attr-defined]

    def draw_public(seed: bytes, _step: int, size: int) -> Any:
        return draw_offset(nonce, int.from_bytes(seed), size)

    tokens = SimpleNamespace(token_bytes=lambda n: (next(releases) // num_agents).to_bytes(n))
    with ExitStack() as stack:
        for owner, name, function in (
            (NoiseShare, "__init__", make_public),
            (NoiseShare, "take", take_public),
            (corn.engines, "draw_offset", draw_public),
            (corn.engines, "secrets", tokens),
        ):
            stack.enter_context(mock.patch.object(owner, name, function))
        yield


def simulate(_folder: Path, num_steps: int, *, public: bool = False) -> Models:
    """Run all agents in one tensor."""
    model, loss, _ = make_problem(0)
    data = AgentData.from_parts([make_problem(agent)[2] for agent in range(N)])
    settings = SweepSettings(
        num_steps,
        ROWS,
        (SEED,),
        dtype=PLAN.dtype,
        noise_keys="seed" if public else "secret",
    )
    found = run_sweep(
        TrainingProblem(ModuleTask(model, loss), data),
        PLAN.network,
        [Trial(Mechanism.from_plan(PLAN), Constant(STEP_SIZE))],
        settings=settings,
        evaluate_at=[num_steps],
    )
    parameters = found.parameters.reshape(-1, SIZE).numpy()
    return {agent: parameters[agent % len(parameters)] for agent in range(N)}


def run_peers(
    folder: Path, num_steps: int, *, lose: Loss | None = None, public: bool = False
) -> Models:
    """Run agents that add up along a tree of sealed links."""
    take = NoiseShare.take

    def disturb(share: NoiseShare, step: int) -> Any:
        if lose is not None and (share.agent, step) == (lose.agent, lose.step):
            raise Gone
        return take(share, step)

    def run(rendezvous: Rendezvous) -> AgentResult:
        model, loss, dataset = make_problem(rendezvous.agent)
        rendezvous.keys = folder
        settings = RunSettings(Constant(STEP_SIZE), num_steps=num_steps, timeout=_WAIT)
        return run_agent(
            PLAN,
            rendezvous=rendezvous,
            model=model,
            loss=loss,
            dataset=dataset,
            settings=settings,
        )

    with ExitStack() as stack:
        if public:
            stack.enter_context(rehearsing(SEED))
        stack.enter_context(mock.patch.object(NoiseShare, "take", disturb))
        results = run_in_threads(N, run)
    return _select_models(
        {
            agent: each.parameters.numpy() if isinstance(each, AgentResult) else each
            for agent, each in enumerate(results)
        }
    )


def take_steps(folder: Path, agent: int, num_steps: int, reduction: Reduction) -> FloatArray:
    """Return the model of an agent after steps, of which void ones leave it as it is."""
    model, loss, dataset = make_problem(agent)
    own = AgentRelease(PLAN, agent, folder)
    problem = TrainingProblem(ModuleTask(model, loss), AgentData.from_parts([dataset]))
    steps = GradientSteps(own, problem, step_size=STEP_SIZE)
    parameters = torch.zeros(SIZE, dtype=torch.float64)
    for step in range(num_steps):
        clipped = steps.differentiate(parameters)
        try:
            moved = steps.take(parameters, clipped, step=step, reduction=reduction)
        except (BudgetSpentError, TooFewAgentsError):
            break
        parameters = parameters if moved is None else moved
    return parameters.numpy()


def run_at_server(
    folder: Path, num_steps: int, *, lose: Loss | None = None, public: bool = False
) -> Models:
    """Run agents that ask ``SumRounds`` at a server."""
    rounds = SumRounds(load_roster(folder / "roster.json"), wait=_WAIT)

    def run(agent: int) -> FloatArray | BaseException:
        sent = count()

        def ask(request: dict[str, Any]) -> Any:
            if "integers" in request and lose == Loss(agent, next(sent)):
                raise Gone
            return rounds.answer(request, f"site-{agent}")

        try:
            return take_steps(folder, agent, num_steps, ServerSums(ask))
        except (Gone, CornError) as error:
            return error

    with public_noise() if public else ExitStack(), ThreadPoolExecutor(N) as pool:
        return _select_models(dict(enumerate(pool.map(run, range(N)))))


def run_rank(rank: int, folder: Path, num_steps: int, public: bool) -> None:
    """Run one rank in a process of its own, and write its model."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=N
    )
    with public_noise(1) if public else ExitStack():
        np.save(folder / f"model-{rank}.npy", take_steps(folder, rank, num_steps, RankSums()))
    torch.distributed.destroy_process_group()


def run_ranks(folder: Path, num_steps: int, *, public: bool = False) -> Models:
    """Run agents as the ranks of a cluster, with ``all_reduce`` of ``torch.distributed``."""
    with preloaded_context() as context:
        arguments = folder, num_steps, public
        ranks = [context.Process(target=run_rank, args=(rank, *arguments)) for rank in range(N)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join(200)
    assert [each.exitcode for each in ranks] == [0] * N
    (folder / "store").unlink(missing_ok=True)
    return {rank: np.load(folder / f"model-{rank}.npy") for rank in range(N)}


def run_flower(
    folder: Path, num_steps: int, *, lose: Loss | None = None, public: bool = False
) -> Models:
    """Run agents as client apps of Flower, whose messages a grid in this process carries."""
    pytest.importorskip("flwr.app", reason="needs Flower: make engines")
    from flwr.app import Array, ArrayRecord
    from flwr.serverapp.strategy import FedAvg

    from corn.flower import CornMod, CornStrategy

    def make(context: Any) -> Any:
        return make_problem(int(context.node_config["partition-id"]))

    grid = Grid(CornMod(_make_folders(folder) / "site-{site}", problem=make), grow)
    if lose is not None:
        grid.change = lose_messages(lose.agent, at_round=lose.step + 1)
    strategy = CornStrategy(FedAvg(fraction_evaluate=0.0), PLAN, step_size=STEP_SIZE)
    arrays = ArrayRecord({"w": Array(np.zeros(SIZE))})
    with ExitStack() as stack:
        stack.enter_context(flower_runtime())
        if public:
            stack.enter_context(public_noise())
        found = strategy.start(grid, arrays, num_rounds=num_steps).arrays
    model = found["w"].numpy() if found is not None and len(found) else np.zeros(SIZE)
    present = [agent for agent in range(N) if lose is None or agent != lose.agent]
    return dict.fromkeys(present, model)


def run_nvflare(
    folder: Path, num_steps: int, *, lose: Loss | None = None, public: bool = False
) -> Models:
    """Run agents as executors of NVFlare, whose messages reach its server's component directly."""
    pytest.importorskip("nvflare", reason="needs NVFlare: make engines")
    from nvflare.apis.dxo import from_shareable

    from corn.nvflare import CornExecutor, CornSums

    roster = load_roster(folder / "roster.json")
    sums = CornSums([key.hex() for key in roster.public_keys], wait=_WAIT)
    sums._start("", Context("server", sums))
    _make_folders(folder)

    def run(agent: int) -> FloatArray | BaseException:
        context, sent = Context(f"site-{agent}", sums), count()
        send = context._send

        def disturb(*, topic: str, request: Any, **options: Any) -> Any:
            if "integers" in request and lose == Loss(agent, next(sent)):
                raise Gone
            return send(topic=topic, request=request, **options)

        context._send = disturb  # type: ignore[method-assign]
        executor = CornExecutor(
            f"{__name__}.make_site_problem",
            STEP_SIZE,
            steps=num_steps,
            folder=str(folder / "{site}"),
        )
        given = task({"w": np.zeros(SIZE)})
        try:
            reply = executor.execute("train", given, context, context.abort_signal)
        except (Gone, CornError) as error:
            return error
        return np.asarray(from_shareable(reply).data["w"])

    with public_noise() if public else ExitStack(), ThreadPoolExecutor(N) as pool:
        return _select_models(dict(enumerate(pool.map(run, range(N)))))


def _make_folders(folder: Path) -> Path:
    """Make the folder of each site from one with all keys, if it is not there yet."""
    for agent in range(N):
        own = folder / f"site-{agent}"
        if not own.exists():
            own.mkdir(mode=0o700)
            save_plan(PLAN, own / "plan.corn")
            for name in (f"agent-{agent}.key", "roster.json"):
                shutil.copy2(folder / name, own)
    return folder


def make_site_problem(site: str) -> Any:
    return make_problem(int(site.rpartition("-")[2]))


def _select_models(found: dict[int, Any]) -> Models:
    """Return the models of agents that have one; raise an error that is no loss of an agent."""
    for each in found.values():
        if isinstance(each, BaseException) and not isinstance(each, Gone):
            raise each
    return {agent: each for agent, each in found.items() if not isinstance(each, Gone)}


REDUCTIONS: dict[str, Run] = {
    "simulation": simulate,
    "peers": run_peers,
    "server": run_at_server,
    "torch.distributed": run_ranks,
    "flower": run_flower,
    "nvflare": run_nvflare,
}
