"""Messages of real agents: one process per agent, with keys, ledgers and links as in a run.

:class:`AgentPool` is the only place that knows how messages are recorded. An agent's process notes
what it hands to its links, and returns it after the run.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from corn.audit.run import (
    RAW_LENGTH,
    AuditedRun,
    Signal,
    count_samples,
    mean_output,
    query_of,
)
from corn.audit.views import View, sum_parts
from corn.checks import FloatArray, require
from corn.distributed import AgentConfig, Reports, RunSettings, run_workload
from corn.distributed.keyring import load_credentials, make_keys
from corn.distributed.launcher import preloaded_context
from corn.distributed.messages import Header
from corn.distributed.summing import DOWN, UP
from corn.errors import CornError
from corn.learn.batches import AgentData, Batch
from corn.learn.problem import TrainingProblem
from corn.learn.schedule import Constant
from corn.learn.step import compute_gradients
from corn.learn.tasks import ModuleTask
from corn.learn.workloads import Workload
from corn.noise import Owner, Secret, agent_keys
from corn.noise.masks import MaskWords
from corn.plan import Plan, fingerprint, save_plan
from corn.threads import limit_threads
from corn.topology.graphs import SpanningTree
from corn.transport import StoreHost

# A power of two, so that dividing a message by it is exact.
_STEP_SIZE = 2.0**-4
_TIMEOUT = 120.0


@dataclass(frozen=True, eq=False)
class RecordedRun:
    """Messages of agents in a run, and its nonce, which all of them know.

    Attributes:
        messages: shape (steps, n, d): the first message of each agent in each step. That is its
            half step before mixing, or with exact sums its partial sum on the way up the tree, and
            the total of the root.
        nonce: of the run.
        totals: with exact sums, what each agent passed on down the tree, by step and agent.
        models: with exact sums, the digests of models that agents announced, by step and agent.
    """

    messages: NDArray[Any]
    nonce: bytes
    totals: Mapping[tuple[int, int], MaskWords] = field(default_factory=dict)
    models: Mapping[tuple[int, int], bytes] = field(default_factory=dict)

    def read_words(self, tree: SpanningTree) -> MaskWords:
        """Return each agent's own message, as whoever reads all links can, shape (steps, n, d)."""
        words = self.messages.copy()
        for agent, children in tree.children.items():
            for child in children:
                words[:, agent] -= self.messages[:, child]
        return words

    def check_agreement(self, tree: SpanningTree) -> list[str]:
        """Return whether agents passed on different totals, or applied different ones."""
        problems = []
        for (step, agent), total in sorted(self.totals.items(), key=lambda one: one[0]):
            if not np.array_equal(total, self.messages[step, tree.root]):
                problems.append(
                    f"agent {agent} passed on another total than the root in step {step}"
                )
        for step in sorted({step for step, _ in self.models}):
            held = {agent: own for (when, agent), own in self.models.items() if when == step}
            others = [agent for agent, own in held.items() if own != held[tree.root]]
            if others:
                who = ", ".join(map(str, sorted(others)))
                problems.append(
                    f"agents {who} have another model than the root after {step} steps: some step "
                    "was not applied by all"
                )
        return problems[:1]


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
        credentials = load_credentials(keys, 0, plan.num_agents)
        # Port 0 lets the system choose a free one, which agents learn from their configuration.
        store = StoreHost(("127.0.0.1", 0), credentials)
        for agent, end in enumerate(self._ends):
            end.send(
                AgentConfig(
                    workload=workload,
                    settings=settings,
                    out=out,
                    source=out / "plan.corn",
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
        return _join(plan, settings.steps_of(plan), answers)

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
    answer = _Answer({}, {}, b"")

    def record(nonce: bytes, header: Header, parameters: torch.Tensor) -> None:
        # Of gossip the first round is the half step; with exact sums there are two messages.
        at = header.step, header.mixing_round
        if header.mixing_round <= DOWN and at not in answer.messages:
            answer.messages[at] = parameters.detach().cpu().numpy().copy()
            answer.models[at] = header.model
        answer.nonce = nonce

    with suppress(EOFError, ConnectionError):  # the audit was killed
        while (order := connection.recv()) is not None:
            answer = _Answer({}, {}, b"")
            try:
                _, result = run_workload(order, Reports(on_message=record))
            except CornError as error:
                connection.send(str(error))
                continue
            why = str(result.stop)
            connection.send(f"stopped after {result.num_steps} steps: {why}" if why else answer)


@dataclass
class _Answer:
    """Messages of one agent, by step and round, with the digests of its model in their headers."""

    messages: dict[tuple[int, int], NDArray[Any]]
    models: dict[tuple[int, int], bytes]
    nonce: bytes


def _join(plan: Plan, num_steps: int, answers: Sequence[_Answer]) -> RecordedRun:
    nonce, steps = answers[0].nonce, range(num_steps)
    if plan.network.mixing == "gossip":
        # Later messages belong to the cool-down, which releases nothing.
        sent = [[own.messages[step, 0] for own in answers] for step in steps]
        return RecordedRun(np.array(sent, dtype=np.float64), nonce)
    root, unsigned = plan.network.tree.root, f"u{plan.mask_bits // 8}"
    first = [DOWN if agent == root else UP for agent in range(plan.num_agents)]
    sent = [
        [own.messages[step, k] for own, k in zip(answers, first, strict=True)] for step in steps
    ]
    totals, models = {}, {}
    for agent, own in enumerate(answers):
        for (step, number), values in own.messages.items():
            # After the last step an empty message has the digest of the last model.
            models[step, agent] = own.models[step, number]
            if number == DOWN and step in steps:
                totals[step, agent] = values.view(unsigned)
    return RecordedRun(np.array(sent).view(unsigned), nonce, totals, models)


@dataclass(frozen=True)
class CanaryWorkload(Workload):
    """A linear model whose loss is its output, so that a sample's gradient is its input.

    Attributes:
        num_parameters: d.
        num_samples: of each agent.
        lengths: of the canary of each agent, with its sign; 0 for agents that release noise alone.
        is_whole: whether all samples of an agent are its canary, instead of the first.
    """

    num_parameters: int = 1
    num_samples: int = 1
    lengths: tuple[float, ...] = ()
    is_whole: bool = True

    def build(self, num_agents: int, agents: Sequence[int] | None = None) -> TrainingProblem:
        """See ``Workload``."""
        chosen = range(num_agents) if agents is None else agents
        parts = []
        for agent in chosen:
            inputs = torch.zeros(self.num_samples, self.num_parameters)
            own = inputs if self.is_whole else inputs[:1]
            own[:] = torch.from_numpy(self.lengths[agent] * self.direct(agent))
            parts.append((inputs, torch.zeros(self.num_samples)))
        layer = nn.Linear(self.num_parameters, 1, bias=False)
        # The start from which ``_read_releases`` recovers all later models.
        nn.init.zeros_(layer.weight)
        return TrainingProblem(ModuleTask(layer, mean_output), AgentData.from_parts(parts))

    def direct(self, agent: int) -> FloatArray:
        """Return the direction of an agent's canary: random signs, so that all values count."""
        signs = np.random.default_rng([self.seed, agent]).choice([-1.0, 1.0], self.num_parameters)
        direction: FloatArray = signs / math.sqrt(self.num_parameters)
        return direction


@final
class ProcessRun(AuditedRun):
    """Releases read off the messages of real agents, in two runs under one plan and the same keys.

    Each coordinate of a release is a trial, to whose noise the canary is added, as in
    ``AuditedRun``. With gossip agents release noise alone: whether real gradients are clipped
    is audited through the step. With exact sums the first run is without the canary (or has its
    negation) and the second with it, in the data of all agents. The canary that is added is then as
    long as the one in the messages.
    """

    def __init__(self, plan: Plan, *, num_trials: int, num_releases: int, seed: int = 0) -> None:
        require(
            num_releases <= plan.budget.num_steps,
            "releases",
            f"at most {plan.budget.num_steps} through processes, whose ledgers allow no more",
            num_releases,
        )
        # Two runs under the same keys: a nonce that is used twice would repeat the first one's
        # noise.
        steps = [-(-num_releases // 2), num_releases // 2]
        workloads = [_make_workload(plan, num_trials, seed, has_canary=k == 1) for k in range(2)]
        with tempfile.TemporaryDirectory() as folder, AgentPool(plan.num_agents) as pool:
            path = Path(folder) / "keys"
            runs = [
                pool.run(
                    plan,
                    workload,
                    _make_settings(count),
                    keys=path,
                    out=Path(folder) / f"run-{number}",
                )
                for number, (workload, count) in enumerate(zip(workloads, steps, strict=True))
            ]
            keys = _load_all_keys(plan, path)
        super().__init__(plan, num_releases, num_trials, seed=seed)
        self.keys = keys
        self.nonces = {number: run.nonce for number, run in enumerate(runs)}
        self.releases = [
            (k, step) for k, run in enumerate(runs) for step in range(len(run.messages))
        ]
        # How long the canary in each agent's messages is, relative to what the plan accounts for.
        self._lengths = np.ones(plan.num_agents)
        if plan.network.mixing == "gossip":
            self.messages = np.concatenate([_read_releases(plan, run) for run in runs])
            self.gradients = np.zeros(self.messages.shape)
            return
        for run in runs:
            self.problems += run.check_agreement(plan.network.tree)
        words = np.concatenate([run.read_words(plan.network.tree) for run in runs])
        self.messages = words
        self.gradients = self._find_gradients(words, workloads)

    @cached_property
    def released(self) -> FloatArray:
        """All agents' releases without the gradients, which attackers know."""
        return super().released - self.gradients

    def read_sums(self, view: View) -> FloatArray:
        """Return the sums of releases without the gradients, which attackers know."""
        known = sum_parts(self.gradients, self.find_parts(view), axis=1)
        return np.asarray(super().read_sums(view) - known)

    def add_canary(self, victim: int) -> Signal:
        """See ``AuditedRun``."""
        signal, length = super().add_canary(victim), self._lengths[victim]
        return signal._replace(null=signal.null * length, alternative=signal.alternative * length)

    def _find_gradients(self, words: MaskWords, workloads: Sequence[CanaryWorkload]) -> FloatArray:
        """Return the gradients in recorded messages; note messages that have none of the expected.

        Messages are computed again, with the canary and without it, from the keys of all agents.
        Recorded ones must be equal to the last bit.
        """
        gradients = np.zeros(words.shape)
        for agent in range(self.plan.num_agents):
            canaries = [_clip_canary(self.plan, agent, each) for each in workloads]
            query, lengths = query_of(self.plan, agent), []
            for number, (run, _) in enumerate(self.releases):
                canary, own = canaries[run], words[number, agent]
                # Only the agent knows the batches of its samples.
                allowed = [canary]
                if query.unit == "sample" and query.sampling != "every-step":
                    allowed.append(torch.zeros_like(canary))
                for found in allowed:
                    if np.array_equal(self.recompute(found, number, agent), own):
                        gradients[number, agent] = found.numpy()
                        break
                else:
                    lengths.append(self._measure(own, number, agent, workloads[run]))
            if lengths:
                self._lengths[agent] = np.max(np.abs(lengths)) / query.contribution
                self.problems.append(
                    f"{len(lengths)} messages of agent {agent} are not those of its gradient, "
                    "noise, offset and masks"
                )
        return gradients

    def _measure(
        self, words: MaskWords, number: int, agent: int, workload: CanaryWorkload
    ) -> float:
        """Return how far a message is along the canary from one without gradient."""
        without = self.recompute(torch.zeros(len(words)), number, agent)
        units = (words - without).view(f"i{words.itemsize}")
        return float(units @ workload.direct(agent)) * self.plan.grid


def _make_workload(plan: Plan, size: int, seed: int, *, has_canary: bool) -> CanaryWorkload:
    queries = [query_of(plan, agent) for agent in range(plan.num_agents)]
    lengths = [0.0] * len(queries)
    if plan.network.mixing == "sum":
        # Without the canary there is its negation under replace, and nothing otherwise.
        signs = [1.0 if has_canary else -float(q.adjacency == "replace") for q in queries]
        lengths = [sign * q.clip * RAW_LENGTH for sign, q in zip(signs, queries, strict=True)]
    return CanaryWorkload(
        "canary",
        seed=seed,
        num_parameters=size,
        num_samples=max(count_samples(query) for query in queries),
        lengths=tuple(lengths),
        is_whole=plan.budget.unit == "agent",
    )


def _clip_canary(plan: Plan, agent: int, workload: CanaryWorkload) -> torch.Tensor:
    """Return an agent's clipped gradient in a batch that has the canary, shape (d,)."""
    query, problem = query_of(plan, agent), workload.build(plan.num_agents, [agent])
    dtype = torch.float32 if plan.dtype == "float32" else torch.float64
    rows = slice(None) if query.unit == "agent" else slice(1)
    inputs = problem.data.inputs[rows].to(dtype)
    # Weights are equal: 1/B for samples, and those of a mean for agents.
    weight = 1 / (query.batch_size if query.unit == "sample" and query.batch_size else len(inputs))
    weights = torch.full((1, len(inputs)), weight, dtype=torch.float64)
    batch = Batch(inputs[None], torch.zeros(1, len(inputs)), weights, query.unit == "agent")
    found = compute_gradients(
        problem.task,
        torch.zeros(1, 1, workload.num_parameters, dtype=dtype),
        batch,
        torch.tensor([query.clip], dtype=torch.float64),
        clips_samples=query.unit == "sample",
    )
    return (found.values.double() * found.factors.unsqueeze(-1)).flatten()


def _make_settings(num_steps: int) -> RunSettings:
    return RunSettings(
        Constant(_STEP_SIZE), num_steps=num_steps, timeout=_TIMEOUT, evaluate_at=(0,)
    )


def _load_all_keys(plan: Plan, folder: Path) -> list[dict[Owner, Secret]]:
    """Return all agents' keys from their files."""
    groups = plan.decomposition.seed_groups
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
