"""Agents of a plan as client apps of Flower: a server that adds up updates and cannot read them.

The plan is one of exact sums. ``CornMod`` clips a client's update, adds the client's share of the
noise, rounds the sum to the grid and hides it under masks. ``CornStrategy`` adds up the integers of
all clients modulo 2^B, where the masks cancel, and gives the average to any strategy of Flower.

The guarantee is the plan's, for one agent's whole data: ε over all rounds, against the server and
anybody else who reads all messages and models, together with as many curious clients as the plan's
threat names. The server need not follow the protocol: whatever it asks of whom, a release is either
uniform or part of one sum with the noise of all honest clients in it (docs/flower.md). It could
spoil the model.

Flower is an extra: ``pip install 'corn-dsgd[flower]'``.
"""

from __future__ import annotations

import importlib
import logging
import re
import time
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from corn.checks import require
from corn.distributed.membership import name_agents
from corn.distributed.rendezvous import is_public, name_kind
from corn.distributed.requirements import Requirements
from corn.engines import (
    FEWEST_AGENTS,
    AgentRelease,
    GradientSteps,
    MaskedUpdate,
    add_to_arrays,
    average_updates,
    count_trained,
    flatten,
    plan_for,
    require_agents,
    require_masks,
    require_round,
)
from corn.errors import (
    CornError,
    MissingExtraError,
    PublicError,
)
from corn.learn.problem import DataSource
from corn.learn.step import ClippedGradients
from corn.learn.tasks.module import MeanLoss
from corn.learn.training import make_task
from corn.noise.masks import (
    WORDS,
)
from corn.noise.stream import NONCE_BYTES
from corn.plan import Plan, fingerprint, load_plan

# Flower calls a mod for the kinds of messages that the client app answers: an introduction is a
# message of the kind that every client app answers.
_TRAIN, _INTRODUCTION = "train", "corn.introduction"
_AGENTS, _NONCES, _PLAN, _ROUND = "corn.agents", "corn.nonces", "corn.plan", "server-round"
_ANSWER, _INTEGERS, _OFFSET = "corn", "integers", "offset-seed"
_SECONDS_BETWEEN_POLLS = 0.5
_NONCE = re.compile(r"[0-9a-f]{64}")
_LOGGER = logging.getLogger("corn.flower")


_load = lru_cache(maxsize=8)(load_plan)


@final
class CornMod:
    """A mod for ``flwr.clientapp.ClientApp`` that makes every update a release of a plan.

    It sends integers under masks, and nothing else of the client's reply: metrics and numbers of
    samples depend on private data, so that every client has the weight 1. Evaluation on private
    data is not answered, and errors of the client app reach its own log only.

    Args:
        plan: The plan's file.
        keys: The folder of this client's key, the roster and the ledger.
        agent_key: The entry of the node's configuration that has the agent's number.
        problem: (context of Flower) → module, loss of a batch, data set of the client: a round is
            then one gradient step, which the client app does not compute. Plans with the unit
            sample need it. The server's arrays must be the module's trained parameters.
        batch_size: The samples of a gradient's mini-batch, unless the plan has their number.
        weight_key: The metric by which the server's strategy weighs evaluations of clients.
        shares_evaluation: Answer evaluations unchanged, because they use public data only.
        requirements: The owner's requirements of this plan and of all releases of this client's
            data. The client refuses every message of a run that does not meet them.
    """

    def __init__(
        self,
        plan: Path | str,
        keys: Path | str,
        *,
        agent_key: str = "partition-id",
        problem: Callable[[Any], tuple[nn.Module, MeanLoss, DataSource]] | None = None,
        batch_size: int | None = None,
        weight_key: str = "num-examples",
        shares_evaluation: bool = False,
        requirements: Requirements | None = None,
    ) -> None:
        self._plan, self._keys, self._required = Path(plan), Path(keys), requirements
        self._agent_key, self._weight_key = agent_key, weight_key
        self._shares_evaluation = shares_evaluation
        self._problem = problem
        self._batch_size = batch_size

    def __call__(self, message: Any, context: Any, call_next: Callable[..., Any]) -> Any:
        """Answer a message of the server."""
        try:
            return self._answer(message, context, call_next)
        except Exception as error:
            # Flower sends the text to the server, and it may quote data or name private files.
            if is_public(error):
                raise
            _LOGGER.exception("the client failed")
            # Without its cause: a chained traceback would carry the text.
            raise PublicError(f"the client failed: {name_kind(error)}") from None

    def _answer(self, message: Any, context: Any, call_next: Callable[..., Any]) -> Any:
        kind = message.metadata.message_type
        if kind.startswith(_TRAIN):
            if _INTRODUCTION in message.content.config_records:
                return self._introduce(message, context)
            return self._train(message, context, call_next)
        # Only where the owner states that evaluation uses public data: other scores have no noise.
        if kind.startswith("evaluate") and self._shares_evaluation:
            return _call_app(call_next, message, context)
        flower = _import_flower()
        # Empty metrics: an average over clients then has no scores, and the strategy goes on.
        metrics = flower.MetricRecord({self._weight_key: 1})
        return flower.Message(flower.RecordDict({"metrics": metrics}), reply_to=message)

    def _find_agent(self, context: Any) -> int:
        try:
            return int(context.node_config[self._agent_key])
        except (KeyError, ValueError) as error:
            raise PublicError(
                f"the node's configuration must have the agent's number as {self._agent_key!r}"
            ) from error

    def _make_release(self, agent: int) -> AgentRelease:
        return AgentRelease(_load(self._plan), agent, self._keys, requirements=self._required)

    def _introduce(self, message: Any, context: Any) -> Any:
        flower, agent = _import_flower(), self._find_agent(context)
        nonce, remaining = self._make_release(agent).introduce()
        answer = {
            "agent": agent,
            "nonce": nonce.hex(),
            "plan": fingerprint(_load(self._plan)).hex(),
            "remaining": remaining,
        }
        record = flower.RecordDict({_ANSWER: flower.ConfigRecord(answer)})
        return flower.Message(record, reply_to=message)

    def _train(self, message: Any, context: Any, call_next: Callable[..., Any]) -> Any:
        flower, agent = _import_flower(), self._find_agent(context)
        own = self._make_release(agent)
        # What cannot be released is refused before the client app trains.
        round_number, nonces = _read_config(message, _load(self._plan), agent)
        (_, given) = _only_arrays(message)
        if self._problem is not None:
            clipped = self._differentiate(own, given, context)
        else:
            reply = _call_app(call_next, message, context)
            if reply.has_error():
                raise PublicError("the client app answered with an error")
            (_, found) = _only_arrays(reply)
            start, end = given.to_numpy_ndarrays(), found.to_numpy_ndarrays()
            # Subtracted in float64, the type in which the update is clipped and released.
            clipped = own.clip_update(flatten(end, like=start) - flatten(start, like=start))
        released = own.release(clipped, round_number=round_number, nonces=nonces)
        content = flower.RecordDict(
            {
                "arrays": flower.ArrayRecord({_INTEGERS: flower.Array(released.integers)}),
                _ANSWER: flower.ConfigRecord({_OFFSET: released.offset_seed}),
            }
        )
        return flower.Message(content, reply_to=message)

    def _differentiate(self, own: AgentRelease, given: Any, context: Any) -> ClippedGradients:
        """Return the gradient of a batch at the server's model."""
        if own.plan.momentum:
            raise PublicError("a plan with momentum needs a model that stays at the client")
        module, loss, dataset = _call_app(self._problem, context)
        trained = {name: each for name, each in module.named_parameters() if each.requires_grad}
        arrays = dict(zip(given.keys(), given.to_numpy_ndarrays(), strict=True))
        if [(name, array.shape) for name, array in arrays.items()] != [
            (name, tuple(each.shape)) for name, each in trained.items()
        ]:
            raise PublicError("the server's arrays must be the trained parameters of the module")
        # New coins for every message: rounds are independent, as amplification assumes.
        task, size = _call_app(make_task, module, loss), self._batch_size
        steps = _call_app(GradientSteps, own, task, dataset, batch_size=size)
        vector = flatten(list(arrays.values()), like=list(arrays.values()))
        clipped: ClippedGradients = _call_app(steps.differentiate, torch.from_numpy(vector))
        return clipped


@final
class CornStrategy:
    """A strategy around another one of Flower, which gets the exact average of all clients.

    The other strategy sees one reply per round: the server's model plus the average of the clients'
    noisy updates, with weight 1. What it makes of it is post-processing, as with ``FedAdam``.

    All agents take part in every round. A round that lacks an agent is void: the model stays, and
    the others have spent one release. Training goes on without that agent, by ``plan_for`` the
    rest. Where fewer than ``min_agents`` are left, or the integers of all agents do not add up to a
    possible sum, training stops: ``start`` returns the model of the last complete round.

    Args:
        strategy: The strategy that gets the averages, for example ``FedAvg()``.
        plan: The plan of all agents, or its file.
        step_size: Where clients answer with gradients, the model moves by minus this times their
            average. It has no meaning for clients that answer with updates.
        min_agents: The fewest agents with which training goes on.
        timeout: The seconds to wait until all nodes are connected, and for their introductions.
    """

    def __init__(
        self,
        strategy: Any,
        plan: Plan | Path | str,
        *,
        step_size: float | None = None,
        min_agents: int = FEWEST_AGENTS,
        timeout: float = 600.0,
    ) -> None:
        self._step_size = step_size
        self._plan = plan if isinstance(plan, Plan) else load_plan(Path(plan))
        require_masks(self._plan)
        n = self._plan.num_agents
        is_possible_number = FEWEST_AGENTS <= min_agents <= n
        require(is_possible_number, "min_agents", f"from {FEWEST_AGENTS} to {n}", min_agents)
        self._strategy, self._min_agents, self._timeout = strategy, min_agents, timeout
        self._arrays: Any = None
        self._reset()

    def start(self, *arguments: Any, **options: Any) -> Any:
        """Run the rounds of training as the other strategy's ``start`` does, and return its result.

        Raises:
            CornError: Not all agents could begin.
        """
        self._reset()
        # Its loop with this strategy in its place. A base class would make Flower a dependency.
        return type(self._strategy).start(self, *arguments, **options)

    def summary(self) -> None:
        """Log the promise of the plan and the settings of the other strategy."""
        _LOGGER.info("exact sums: %s", self._plan.describe())
        self._strategy.summary()

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> list[Any]:
        """Return the messages of a round: the same one to all agents that are left."""
        self._arrays = None
        if not self._nonces and not self._is_stopped:
            self._begin_run(grid)
        elif self._rounds_left == 0 and not self._is_stopped:
            self._stop("all releases that the ledgers allow were made")
        if self._is_stopped:
            return []
        self._rounds_left -= 1
        flower, agents = _import_flower(), tuple(sorted(self._nonces))
        named = {
            _AGENTS: list(agents),
            _NONCES: [self._nonces[agent] for agent in agents],
            _PLAN: fingerprint(self._active).hex(),
        }
        # A copy: the entries are of this run only.
        record = flower.ConfigRecord({**config, **named})
        # Whomever it would sample, a sum needs all.
        messages = list(self._strategy.configure_train(server_round, arrays, record, grid))
        if not messages:
            return []
        first = messages[0]
        self._record, self._arrays = _only_arrays(first)
        return [
            flower.Message(
                first.content, dst_node_id=node, message_type=first.metadata.message_type
            )
            for node in self._nodes
        ]

    def aggregate_train(self, server_round: int, replies: Iterable[Any]) -> tuple[Any, Any]:
        """Return the other strategy's model for the average of a round, or None if it is void."""
        if not self._nonces or self._arrays is None:
            return None, None
        replies = list(replies)
        received = self._read_replies(replies)
        lost = [node for node in self._nodes if node not in received]
        if lost:
            self._lose(lost, server_round)
            return None, None
        # In the order of agents, so that offsets add up to the same bits on every server.
        updates = [received[node] for node in sorted(self._nodes, key=self._nodes.__getitem__)]
        average = average_updates(self._active, updates)
        if average is None:
            self._stop(
                f"round {server_round} is void, as the integers of its agents do not add up to a "
                "possible sum: an agent has another roster, or did not follow the protocol"
            )
            return None, None
        if self._step_size is not None:
            average = -self._step_size * average
        flower, start = _import_flower(), self._arrays.to_numpy_ndarrays()
        moved = map(flower.Array, add_to_arrays(start, average))
        content = {
            self._record: flower.ArrayRecord(dict(zip(self._arrays.keys(), moved, strict=True))),
            "metrics": flower.MetricRecord(
                {getattr(self._strategy, "weighted_by_key", "num-examples"): 1}
            ),
        }
        replies[0].content = flower.RecordDict(content)
        arrays, metrics = self._strategy.aggregate_train(server_round, replies[:1])
        return arrays and self._keep_types(arrays), metrics

    def configure_evaluate(self, *arguments: Any) -> Any:
        """Return the other strategy's messages."""
        return self._strategy.configure_evaluate(*arguments)

    def aggregate_evaluate(self, *arguments: Any) -> Any:
        """Return the other strategy's metrics."""
        return self._strategy.aggregate_evaluate(*arguments)

    def _reset(self) -> None:
        self._nodes: dict[int, int] = {}  # the agent of each node that takes part
        self._nonces: dict[int, str] = {}  # of a run; empty before it, and after a void round
        self._active, self._rounds_left, self._is_stopped = self._plan, 0, False
        self._record, self._arrays = "", None

    def _begin_run(self, grid: Any) -> None:
        """Collect a new nonce of each agent that is left, and plan for them, or stop."""
        is_first, n = not self._nodes, self._plan.num_agents
        nodes = _wait_for_nodes(grid, n, self._timeout) if is_first else list(self._nodes)
        answers, reasons = _introduce_agents(grid, nodes, self._plan, self._timeout)
        found = {node: int(answer["agent"]) for node, answer in answers.items()}
        if is_first and sorted(found.values()) != list(range(n)):
            listed = ", ".join(map(str, sorted(found.values()))) or "none"
            raise CornError(
                f"all agents 0 … {n - 1} must answer, each once, found "
                f"{'; '.join([listed, *reasons[:1]])}"
            )
        self._nodes = {node: a for node, a in found.items() if self._nodes.get(node, a) == a}
        if not self._has_enough():
            return
        agents = tuple(sorted(self._nodes.values()))
        self._active = plan_for(self._plan, agents)
        present = [answers[node] for node in self._nodes]
        self._nonces = {int(own["agent"]): str(own["nonce"]) for own in present}
        self._rounds_left, agent = min((int(own["remaining"]), own["agent"]) for own in present)
        if self._rounds_left == 0:
            self._stop(f"the ledger of agent {agent} allows no more releases under this plan")

    def _has_enough(self) -> bool:
        left = len(self._nodes)
        if left < self._min_agents:
            self._stop(f"{self._min_agents} agents must be left, found {left}")
        return not self._is_stopped

    def _read_replies(self, replies: Iterable[Any]) -> dict[int, MaskedUpdate]:
        """Return the messages that can be added up, by node; log the others."""
        size = count_trained(self._arrays.to_numpy_ndarrays())
        words, received = WORDS[self._active.mask_bits], {}
        for reply in replies:
            node = reply.metadata.src_node_id
            if reply.has_error():
                _LOGGER.warning("node %s failed: %s", node, reply.error.reason)
                continue
            try:
                (_, arrays) = _only_arrays(reply)
                (integers,) = arrays.to_numpy_ndarrays()
                seed = reply.content[_ANSWER][_OFFSET]
            except (CornError, KeyError, TypeError, ValueError):
                _LOGGER.warning("node %s: the reply is not one of CornMod", node)
                continue
            is_whole = integers.dtype == words and integers.shape == (size,)
            if not is_whole or not isinstance(seed, bytes) or len(seed) != NONCE_BYTES:
                _LOGGER.warning("node %s: %s integers of %s bits expected", node, size, words)
                continue
            received[node] = MaskedUpdate(integers, seed)
        return received

    def _lose(self, lost: list[int], server_round: int) -> None:
        agents = name_agents(sorted(self._nodes.pop(node) for node in lost))
        # New nonces for those that are left: the old ones are of a run with the lost agents.
        self._nonces = {}
        _LOGGER.warning(
            "round %s is void without %s: the model stays, and the round counts as released",
            server_round,
            agents,
        )
        self._has_enough()

    def _stop(self, reason: str) -> None:
        self._is_stopped, self._nonces = True, {}
        _LOGGER.error("training stops with the model of the last complete round: %s", reason)

    def _keep_types(self, arrays: Any) -> Any:
        """Return arrays with the server's own in the place of those that are not trained."""
        # An average of one has floats for whole numbers, which would be trained in the next round.
        for name, array in self._arrays.items():
            if array.numpy().dtype.kind != "f" and name in arrays:
                arrays[name] = array
        return arrays


def _introduce_agents(
    grid: Any, nodes: Sequence[int], plan: Plan, timeout: float
) -> tuple[dict[int, Any], list[str]]:
    """Return the introduction of each node that answered, and why others failed."""
    flower = _import_flower()
    asked = [
        flower.Message(
            flower.RecordDict({_INTRODUCTION: flower.ConfigRecord({})}),
            dst_node_id=node,
            message_type=_TRAIN,
        )
        for node in nodes
    ]
    answers: dict[int, Any] = {}
    reasons = []
    for reply in grid.send_and_receive(asked, timeout=timeout):
        node = reply.metadata.src_node_id
        if reply.has_error():
            reasons.append(f"node {node}: {reply.error.reason}")
            continue
        answer = reply.content.config_records.get(_ANSWER)
        if answer is None:
            reasons.append(f"node {node}: its client app has no CornMod")
            continue
        # Masks of different plans would not cancel.
        if answer["plan"] != fingerprint(plan).hex():
            raise CornError(f"agent {answer['agent']} has another plan than the server")
        answers[node] = answer
    return answers, reasons


def _wait_for_nodes(grid: Any, num_agents: int, timeout: float) -> list[int]:
    # Not the wall clock, which may be set back while the server waits.
    deadline = time.monotonic() + timeout
    while len(nodes := list(grid.get_node_ids())) < num_agents:
        if time.monotonic() > deadline:
            raise CornError(f"{num_agents} nodes must be connected, found {len(nodes)}")
        time.sleep(_SECONDS_BETWEEN_POLLS)
    return nodes


def _read_config(message: Any, plan: Plan, agent: int) -> tuple[int, dict[int, bytes]]:
    """Return the round and the nonces that a server named, or raise ``PublicError``."""
    for record in message.content.config_records.values():
        if {_AGENTS, _NONCES, _PLAN, _ROUND} <= set(record):
            agents = require_agents(list(record[_AGENTS]), plan.num_agents, agent)
            texts = list(record[_NONCES])
            is_whole = len(texts) == len(agents)
            if not is_whole or not all(isinstance(t, str) and _NONCE.fullmatch(t) for t in texts):
                raise PublicError(
                    "refuses to release: there must be one nonce of 64 hexadecimal digits for each "
                    "agent"
                )
            # The client's own plan for these agents counts. The server's is compared, because
            # under another one masks would not cancel, and the round would be spent for nothing.
            if record[_PLAN] != fingerprint(plan_for(plan, agents)).hex():
                raise PublicError(
                    "refuses to release: the server's plan for these agents is not the one that "
                    "follows from the client's plan; compare files and versions of CorN"
                )
            nonces = dict(zip(agents, map(bytes.fromhex, texts), strict=True))
            return require_round(record[_ROUND]), nonces
    raise PublicError(
        "refuses to release: the message names no agents, nonces, plan and round; the server needs "
        "corn.flower.CornStrategy"
    )


def _only_arrays(message: Any) -> tuple[str, Any]:
    records = list(message.content.array_records.items())
    if len(records) != 1:
        raise PublicError(f"a message must have one record of arrays, found {len(records)}")
    name, record = records[0]
    return str(name), record


def _call_app(call: Callable[..., Any] | None, *arguments: Any, **options: Any) -> Any:
    """Call code of the client app; no error of it is public, whatever its type."""
    try:
        return call(*arguments, **options)  # type: ignore[misc]
    except Exception as error:
        # An app may use CorN too, and raise a ``PublicError`` or ``InfeasibleError`` about data.
        raise CornError("the client app failed") from error


def _import_flower() -> Any:
    try:
        return importlib.import_module("flwr.app")
    except ImportError as error:
        raise MissingExtraError("corn.flower", extra="flower") from error
