"""Messages of real agents: one process per agent, with keys, ledgers and links as in a run.

:class:`AgentPool` is the only place that knows how messages are recorded. An agent's process notes
what it hands to its links, and returns it after the run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

import numpy as np
import torch
from torch import Tensor

from corn.arrays import FloatArray
from corn.audit.observation import Signal, add_share_canary, count_samples, query_of
from corn.audit.program import select_known
from corn.audit.views import Parts, View, sum_parts
from corn.checks import require
from corn.distributed import AgentConfig, Reports, RunSettings, run_workload
from corn.distributed.processes import preloaded_context
from corn.distributed.startup.joining import host_store
from corn.distributed.startup.keyring import find_credentials, load_credentials, make_keys
from corn.distributed.steps.messages import Header
from corn.errors import CornError, InvalidArgumentError
from corn.learn.batches import AgentData, Batch
from corn.learn.problem import TrainingProblem
from corn.learn.schedule import Constant
from corn.learn.tasks.protocol import Gradients, Scores
from corn.learn.workloads import Workload
from corn.noise import Owner, Secret, SecureSource, agent_keys, draw_all_shares
from corn.plan import Plan, fingerprint, save_plan
from corn.threads import limit_threads

# A power of two, so that dividing a message by it is exact.
_STEP_SIZE = 2.0**-4
_TIMEOUT = 120.0


@dataclass(frozen=True, eq=False)
class RecordedRun:
    """Messages of agents in a run, and its nonce, which all of them know.

    ``messages`` has shape (steps, n, d): the first message of each step, before mixing.
    """

    messages: FloatArray
    nonce: bytes


@final
class AgentPool:
    """Processes that run as agents, one run after the other; a context manager."""

    def __init__(self, num_agents: int) -> None:
        with preloaded_context() as context:
            pipes = [context.Pipe() for _ in range(num_agents)]
            self._ends = [own for own, _ in pipes]
            self._children = [
                context.Process(target=_serve, args=(theirs,), daemon=True) for _, theirs in pipes
            ]
            for child in self._children:
                child.start()
        # Only a child holds its end now, so that this end reports when the child is gone.
        for _, theirs in pipes:
            theirs.close()

    def run(
        self, plan: Plan, workload: Workload, settings: RunSettings, *, keys: Path, out: Path
    ) -> RecordedRun:
        """Run a plan in all processes, with the keys of a folder, and return what they sent."""
        out.mkdir(parents=True)
        save_plan(plan, out / "plan.corn")
        make_keys(keys, plan.num_agents)
        credentials = find_credentials(settings, keys, 0, plan.num_agents)
        # Port 0 lets the system choose a free one, which agents learn from their configuration.
        store = host_store(("127.0.0.1", 0), credentials)
        for agent, end in enumerate(self._ends):
            end.send(
                AgentConfig(
                    workload=workload,
                    settings=settings,
                    out=out,
                    plan=out / "plan.corn",
                    keys=keys,
                    agent=agent,
                    num_agents=plan.num_agents,
                    store=("127.0.0.1", store.port),
                    opens_store=False,
                )
            )
        try:
            # From all agents before any error is raised, so that the pool can be used again.
            answers = [end.recv() for end in self._ends]
        except EOFError:
            raise CornError("an agent's process ended in the middle of a run") from None
        finally:
            store.close()
        for agent, answer in enumerate(answers):
            if isinstance(answer, str):
                raise CornError(f"agent {agent} failed: {answer}")
        sent = np.stack([messages for messages, _ in answers], axis=1)
        return RecordedRun(sent.astype(np.float64), answers[0][1])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for end, child in zip(self._ends, self._children, strict=True):
            if child.is_alive() and kind is None:
                end.send(None)
                child.join(20)
            # After an error agents may wait for each other, so that they are not asked to end.
            child.kill()
        # Files of a run may be removed only when nobody writes them any more.
        for child in self._children:
            child.join()


def _serve(connection: Connection) -> None:
    """Run as one agent after the other, and return the messages of each run."""
    limit_threads()
    messages: dict[int, Any] = {}
    nonces: list[bytes] = []

    def record(nonce: bytes, header: Header, parameters: torch.Tensor) -> None:
        # A step has one message per mixing round, of which the first is the half step.
        messages.setdefault(header.step, parameters.detach().cpu().numpy().copy())
        nonces.append(nonce)

    with suppress(EOFError, ConnectionError):  # the audit was killed
        while (order := connection.recv()) is not None:
            messages.clear()
            try:
                plan, _ = run_workload(order, Reports(on_message=record))
            except CornError as error:
                connection.send(str(error))
                continue
            # Later messages belong to the cool-down, which releases nothing.
            steps = range(order.settings.steps_of(plan))
            connection.send((np.stack([messages[step] for step in steps]), nonces[-1]))


@final
class SilentTask:
    """A model whose loss is constant, so that all gradients are zero."""

    def __init__(self, num_parameters: int) -> None:
        self.num_parameters = num_parameters

    def prepare(self, inputs: Tensor) -> Tensor:
        """See ``Task``."""
        return inputs

    def initialize(self, seed: int) -> Tensor:  # noqa: ARG002
        """Return zeros, the start from which ``_read_releases`` recovers all later models."""
        return torch.zeros(self.num_parameters, dtype=torch.float64)

    def gradient(
        self, parameters: Tensor, batch: Batch, *, sample_clip: Tensor | None = None
    ) -> Gradients:
        """See ``Task``."""
        del batch
        if sample_clip is None:
            return Gradients(torch.zeros_like(parameters))
        zeros = torch.zeros_like(parameters, dtype=sample_clip.dtype)
        none = zeros[..., 0]
        return Gradients(zeros, fraction_clipped=none, num_broken=none.long())

    def evaluate(self, parameters: Tensor, inputs: Tensor, targets: Tensor) -> Scores:
        """See ``Task``."""
        del inputs, targets
        return Scores(parameters.new_zeros(len(parameters)))

    def describe(self) -> str:
        """See ``Task``."""
        return f"constant loss of {self.num_parameters} parameters"


@dataclass(frozen=True)
class SilentWorkload(Workload):
    """A model without gradients: agents release noise alone.

    Attributes:
        num_parameters: d.
        num_samples: of each agent.
    """

    num_parameters: int = 1
    num_samples: int = 1

    def build(self, num_agents: int, agents: Sequence[int] | None = None) -> TrainingProblem:
        """See ``Workload``."""
        rows = (num_agents if agents is None else len(agents)) * self.num_samples
        offsets = tuple(range(0, rows + 1, self.num_samples))
        data = AgentData(torch.zeros(rows, 1), torch.zeros(rows), offsets)
        return TrainingProblem(SilentTask(self.num_parameters), data)


@final
class ProcessObservation:
    """Noise read off the messages of real agents, in two runs under one plan and the same keys.

    Each coordinate of a release is a trial. Canaries are added to what was read, as in
    ``ShareObservation``: whether real gradients are clipped is audited through the step.
    """

    def __init__(self, plan: Plan, *, num_trials: int, num_releases: int) -> None:
        self._plan, self.problems = plan, list[str]()
        self.messages = None
        require(
            num_releases <= plan.budget.num_steps,
            "releases",
            f"at most {plan.budget.num_steps} through processes, whose ledgers allow no more",
            num_releases,
        )
        samples = max(count_samples(query_of(plan, agent)) for agent in range(plan.num_agents))
        workload = SilentWorkload("silent", num_parameters=num_trials, num_samples=samples)
        # Two runs under the same keys: a nonce that is used twice would repeat the first one's
        # noise.
        steps = [-(-num_releases // 2), num_releases // 2]
        with tempfile.TemporaryDirectory() as folder, AgentPool(plan.num_agents) as pool:
            keys = Path(folder) / "keys"
            self._runs = [
                pool.run(
                    plan,
                    workload,
                    _make_settings(count),
                    keys=keys,
                    out=Path(folder) / f"run-{number}",
                )
                for number, count in enumerate(steps)
            ]
            self._keys = _load_all_keys(plan, keys)
        self.released = np.concatenate([_read_releases(plan, run) for run in self._runs])

    @property
    def num_releases(self) -> int:
        """See ``Observation``."""
        return len(self.released)

    def held_by(self, view: View) -> Collection[Owner]:
        """See ``Observation``."""
        return self._collect(view)

    def read(self, view: View, parts: Parts) -> FloatArray:
        """See ``Observation``."""
        del view
        return sum_parts(self.released, parts, axis=1)

    def draw_known(self, view: View) -> FloatArray:
        """See ``Observation``."""
        keys = self._collect(view)
        if not keys:
            return np.zeros_like(self.released)
        known, source = select_known(self._plan.decomposition, keys), SecureSource(keys)
        drawn = [
            draw_all_shares(
                known, source=source, nonce=run.nonce, step=step, stop=self.released.shape[-1]
            )
            for run in self._runs
            for step in range(len(run.messages))
        ]
        return np.stack(drawn)

    def add_canary(self, victim: int) -> Signal:
        """See ``Observation``."""
        shape = self.num_releases, self.released.shape[-1]
        return add_share_canary(self._plan, victim, shape)

    def _collect(self, view: View) -> dict[Owner, Secret]:
        if view.coalition and self._keys is None:
            raise InvalidArgumentError(
                "view must be eavesdropper for processes that share seeds in groups of three or "
                "more: these seeds never leave the processes"
            )
        own = self._keys or []
        return {owner: key for agent in view.coalition for owner, key in own[agent].items()}


def _make_settings(num_steps: int) -> RunSettings:
    return RunSettings(
        Constant(_STEP_SIZE), num_steps=num_steps, timeout=_TIMEOUT, evaluate_at=(0,)
    )


def _load_all_keys(plan: Plan, folder: Path) -> Sequence[dict[Owner, Secret]] | None:
    """Return all agents' keys from their files; None if seeds were agreed on within a run."""
    groups = plan.decomposition.seed_groups
    if any(len(group) > 2 for group in groups):
        return None
    found = []
    for agent in range(plan.num_agents):
        own = load_credentials(folder, agent, plan.num_agents)
        found.append(
            agent_keys(
                own.identity,
                agent,
                seed_groups=groups,
                roster=own.roster,
                plan_fingerprint=fingerprint(plan),
            )
        )
    return found


def _read_releases(plan: Plan, run: RecordedRun) -> FloatArray:
    """Solve the messages of all agents for what each released, shape (steps, n, d)."""
    model = np.zeros_like(run.messages[0])
    memory, released = np.zeros_like(model), []
    for message in run.messages:
        # m = x − η · direction. All models and messages are public, so the attacker can do the
        # same.
        direction = (model - message) / _STEP_SIZE
        # Agents step along an average of their releases: m ← β m + (1 − β) s.
        released.append((direction - plan.momentum * memory) / (1 - plan.momentum))
        # Mixing of all messages gives the models of the next step.
        memory, model = direction, plan.network.step_matrix @ message
    return np.stack(released)
