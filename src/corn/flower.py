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
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from corn.checks import FloatArray, require
from corn.covariance import ThreatModel
from corn.distributed.handshake import check_guarantee, is_public, name_kind
from corn.distributed.keyring import Keyring, load_credentials, open_ledger
from corn.distributed.membership import name_agents
from corn.distributed.recovery import budget_left
from corn.distributed.requirements import Requirements, compose_total
from corn.errors import (
    CornError,
    FileFormatError,
    InvalidArgumentError,
    MissingExtraError,
    PublicError,
)
from corn.learn.step import clip_batch_gradients, release_masked
from corn.noise import ReleaseLedger, agree_on_nonce, draw_share
from corn.noise.ledger import LAST_STEP, compose_history, read_history
from corn.noise.masks import (
    WORDS,
    MaskWords,
    draw_mask,
    draw_offset,
    is_possible,
    read_average,
)
from corn.noise.stream import NONCE_BYTES
from corn.plan import Plan, fingerprint, load_plan, make_plan
from corn.threads import one_thread
from corn.topology import load_network

# Flower calls a mod for the kinds of messages that the client app answers: an introduction is a
# message of the kind that every client app answers.
_TRAIN, _INTRODUCTION = "train", "corn.introduction"
_AGENTS, _NONCES, _PLAN, _ROUND = "corn.agents", "corn.nonces", "corn.plan", "server-round"
_ANSWER, _INTEGERS, _OFFSET = "corn", "integers", "offset-seed"
_SECONDS_BETWEEN_POLLS = 0.5
# Seeds of larger groups would need messages between clients, which Flower does not carry.
_LARGEST_GROUP = 2
_FEWEST_AGENTS = 2
_NONCE = re.compile(r"[0-9a-f]{64}")
_LOGGER = logging.getLogger("corn.flower")


@dataclass(frozen=True, eq=False)
class MaskedUpdate:
    """The message of one agent in one round. All of it may be public.

    Attributes:
        integers: the noisy update on the grid, under masks, modulo 2^B, shape (d,).
        offset_seed: 32 random bytes, from which the agent's offset of the grid follows.
    """

    integers: MaskWords
    offset_seed: bytes


# A client app is made anew for every message, and verifying a plan takes a while.
@lru_cache(maxsize=64)
def plan_for(plan: Plan, agents: tuple[int, ...]) -> Plan:
    """Return the plan of a round in which some agents take part, renumbered in their order.

    It follows from the plan of all and from the set alone, so that every client computes it for
    itself. Each release under it keeps the agent's precision cap of the plan of all, against as
    many insiders, or against all other agents of the set.
    """
    if len(agents) == plan.num_agents:
        return plan
    # No message takes the links of a plan here, so they may be any that join these agents.
    network = load_network(f"star:{len(agents)}", mixing="sum")
    source = f"agents {','.join(map(str, agents))} of {plan.network.source}"
    with one_thread():  # BLAS threads would change the order of sums, and so the last bits
        return make_plan(
            replace(network, source=source),
            # For as many steps as the plan of all: the cap on each step is the same, and one ledger
            # counts the releases under all of these plans together.
            budget_left(plan, agents, plan.budget.num_steps),
            threat=ThreatModel(min(plan.threat.max_colluders, len(agents) - 1)),
            dtype=plan.dtype,
        )


@lru_cache(maxsize=64)
def _find_precision(plan: Plan, agent: int) -> float:
    return check_guarantee(plan, agent).precision


_load = lru_cache(maxsize=8)(load_plan)


@final
class AgentRelease:
    """One agent's releases under a plan of exact sums, for a transport that CorN does not run.

    Client apps may live for one message only, so the agent's ledger keeps the nonce that it
    contributed to the present run, the nonces of the others, and the last round that it released.

    Args:
        plan: The plan of all agents.
        agent: This agent's number.
        keys: The folder of ``agent-I.key``, ``roster.json`` and the ledger.
        requirements: The owner's requirements of this plan and of all releases of this data.

    Raises:
        RequirementError: The plan does not meet the requirements.
    """

    def __init__(
        self, plan: Plan, agent: int, keys: Path, *, requirements: Requirements | None = None
    ) -> None:
        require(plan.budget.unit == "agent", "unit", "agent: updates are clipped once", "sample")
        require_masks(plan)
        self._plan, self._agent, self._keys = plan, agent, keys
        self._required = requirements or Requirements()
        self._required.check(plan, agent, is_rehearsal=False)

    def introduce(self) -> tuple[bytes, int]:
        """Begin a run; return this agent's contribution to its nonce, and the releases left."""
        # The ledger has a new nonce whenever it is opened so. With it the nonce of the run is new,
        # whatever the server claims about other agents' nonces.
        with self._open(_find_precision(self._plan, self._agent)) as ledger:
            return ledger.nonce, ledger.remaining

    def release(
        self, update: NDArray[np.float64], *, round_number: int, nonces: Mapping[int, bytes]
    ) -> MaskedUpdate:
        """Return an update, clipped, with this agent's noise of a round, on the grid, under masks.

        Args:
            update: The difference of the client's model from the server's, shape (d,).
            round_number: From 1, larger than in every earlier release of the run.
            nonces: The contribution of each agent that takes part in the run; this agent's must be
                the one that it made.

        Formal guarantee:
            Whatever rounds and nonces a server names to whom, the messages of honest agents are
            uniform but for complete sums: those of all honest agents in ``nonces`` for one round
            and the same ``nonces``. A complete sum has Gaussian noise of the plan's precision cap
            at most, and an agent is in at most as many of them as its plan has steps.

        Raises:
            PublicError: The server named a round or nonces under which nothing may be released.
            BudgetSpentError: Nothing of the budget is left.
        """
        agents = _require_agents(sorted(nonces), self._plan.num_agents, self._agent)
        _require_round(round_number)
        plan, place, size = plan_for(self._plan, agents), agents.index(self._agent), len(update)
        plan.check_parameters(size)
        # A hash of all contributions and of the plan, which every client computes for itself. It
        # binds the set: masks of agents that were told of different sets do not cancel.
        run = agree_on_nonce(nonces, plan_fingerprint=fingerprint(self._plan))
        own = load_credentials(self._keys, self._agent, self._plan.num_agents)
        with self._open(_find_precision(plan, place), continues=True) as ledger:
            keyring = Keyring(ledger, own.identity, own.roster)
            # Before anything is reserved: without keys there is no noise, and no release.
            source = keyring.make_source(plan, self._agent, agents)
            self._check_run(ledger, run, round_number, nonces)
            # On the disk before noise is drawn: after a crash the round counts as released.
            ledger.reserve(round_number)
        noise = draw_share(
            plan.decomposition, place, source=source, nonce=run, step=round_number, stop=size
        )
        mask = draw_mask(
            plan.decomposition,
            place,
            source=source,
            nonce=run,
            step=round_number,
            size=size,
            bits=plan.mask_bits,
        )
        # Each agent draws its own offset, at the last moment. An offset that follows from the
        # nonces would be the choice of a server that tries many of them.
        offset_seed = secrets.token_bytes(NONCE_BYTES)
        # A copy: gradients that are not finite are set to zero in place.
        values = torch.from_numpy(np.array(update, dtype=np.float64)).view(1, 1, -1)
        # float64 throughout, as the proof for floats assumes (docs/floats.md).
        found = clip_batch_gradients(
            values, torch.tensor([self._plan.budget.clip], dtype=torch.float64)
        )
        integers = release_masked(
            found.values.view(-1),
            found.factors.view(-1),
            torch.from_numpy(noise),
            grid=plan.grid,
            offset=_expand(offset_seed, size),
            mask=mask,
        )
        return MaskedUpdate(integers, offset_seed)

    def get_epsilon(self, delta: float = 1e-5) -> float:
        """Return the ε of all releases of this agent's data, under all plans of its keys.

        It holds for the unit, the adjacency and the adversary that ``corn keys ledger`` names.
        """
        history = read_history([self._keys], self._agent)
        if history.problems:
            raise FileFormatError(f"the total is not known: {history.problems[0]}")
        return compose_history(history, delta).total.epsilon

    def _check_run(
        self, ledger: ReleaseLedger, run: bytes, round_number: int, nonces: Mapping[int, bytes]
    ) -> None:
        """Raise if the noise of a round may have been released."""
        # A server that repeats an old list of nonces would get the old noise on a new update.
        if nonces[self._agent] != ledger.nonce:
            raise PublicError(
                "refuses to release: the nonce of this agent is not the one it contributed to this "
                "run"
            )
        if round_number < ledger.next_step:
            raise PublicError(
                f"refuses to release round {round_number} again: with the same noise, the "
                "difference of two releases would show the data"
            )
        # The first release fixes agents and nonces of the run: a round under other ones would be a
        # run that no other agent is in.
        try:
            ledger.keep_nonce(run)
        except InvalidArgumentError as error:
            raise PublicError(
                "refuses to release: the agents or their nonces changed during the run"
            ) from error

    def _open(self, precision: float, *, continues: bool = False) -> ReleaseLedger:
        ledger = open_ledger(
            self._keys, self._agent, self._plan, precision=precision, continues=continues
        )
        if self._required.total_epsilon is not None:
            try:
                # As if all rounds of the plan were released, so that no run ends in the middle.
                compose_total(
                    self._plan,
                    self._agent,
                    keys=self._keys,
                    ledger=ledger,
                    requirements=self._required,
                    num_steps=self._plan.budget.num_steps,
                )
            except BaseException:
                ledger.close()
                raise
        return ledger


def average_updates(plan: Plan, updates: Sequence[MaskedUpdate]) -> FloatArray | None:
    """Return the average of all agents' noisy updates, or None where their masks did not cancel.

    ``plan`` is that of the round, ``plan_for`` its agents, each of which has one message.
    """
    require(len(updates) == plan.num_agents, "updates", f"{plan.num_agents}", len(updates))
    size = len(updates[0].integers)
    total, offset = np.zeros(size, WORDS[plan.mask_bits]), np.zeros(size)
    for update in updates:
        total += update.integers
        offset += _expand(update.offset_seed, size)
    if not is_possible(total, plan.largest_sum):
        return None
    n = plan.num_agents
    return read_average(total, num_agents=n, grid=plan.grid, offset=offset / n)


def require_masks(plan: Plan) -> None:
    """Raise unless a plan has exact sums under masks of pairs."""
    if not plan.decomposition.is_masked:
        raise InvalidArgumentError(
            f"a plan behind a server must have exact sums under masks, found mixing "
            f"{plan.network.mixing!r} of mechanism {plan.mechanism!r}: plan with --mixing sum"
        )
    largest = max(map(len, plan.decomposition.seed_groups), default=0)
    if largest > _LARGEST_GROUP:
        raise InvalidArgumentError(
            "seeds must be those of pairs, which follow from keys without a message, found a "
            f"group of {largest}: plan with --seeds pairs"
        )


def _expand(offset_seed: bytes, size: int) -> FloatArray:
    # A seed is of one release, so that there are no other steps to keep apart.
    return draw_offset(offset_seed, 0, size)


def _require_round(found: object) -> int:
    """Return the number of a round that a server named, or raise ``PublicError``."""
    # By exact type: a bool is an integer to Python.
    if type(found) is not int or not 1 <= found <= LAST_STEP:
        raise PublicError(
            f"refuses to release: the round must be a whole number from 1 to {LAST_STEP:,}"
        )
    return found


def _require_agents(found: Sequence[object], num_agents: int, agent: int) -> tuple[int, ...]:
    """Return the agents of a round that a server named, or raise ``PublicError``."""
    agents = tuple(each for each in found if type(each) is int and 0 <= each < num_agents)
    is_set = len(agents) == len(found) and all(a < b for a, b in pairwise(agents))
    if not is_set or len(agents) < _FEWEST_AGENTS or agent not in agents:
        raise PublicError(
            f"refuses to release: agents must be at least {_FEWEST_AGENTS} of 0 … {num_agents - 1} "
            f"in increasing order, agent {agent} among them, found another list of {len(found)}"
        )
    return agents


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
        weight_key: str = "num-examples",
        shares_evaluation: bool = False,
        requirements: Requirements | None = None,
    ) -> None:
        self._plan, self._keys, self._required = Path(plan), Path(keys), requirements
        self._agent_key, self._weight_key = agent_key, weight_key
        self._shares_evaluation = shares_evaluation

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
        reply = _call_app(call_next, message, context)
        if reply.has_error():
            raise PublicError("the client app answered with an error")
        (_, found) = _only_arrays(reply)
        start, end = given.to_numpy_ndarrays(), found.to_numpy_ndarrays()
        # Subtracted in float64, the type in which the update is clipped and released.
        update = _flatten(end, like=start) - _flatten(start, like=start)
        released = own.release(update, round_number=round_number, nonces=nonces)
        content = flower.RecordDict(
            {
                "arrays": flower.ArrayRecord({_INTEGERS: flower.Array(released.integers)}),
                _ANSWER: flower.ConfigRecord({_OFFSET: released.offset_seed}),
            }
        )
        return flower.Message(content, reply_to=message)


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
        min_agents: The fewest agents with which training goes on.
        timeout: The seconds to wait until all nodes are connected, and for their introductions.
    """

    def __init__(
        self,
        strategy: Any,
        plan: Plan | Path | str,
        *,
        min_agents: int = _FEWEST_AGENTS,
        timeout: float = 600.0,
    ) -> None:
        self._plan = plan if isinstance(plan, Plan) else load_plan(Path(plan))
        require_masks(self._plan)
        n = self._plan.num_agents
        is_possible_number = _FEWEST_AGENTS <= min_agents <= n
        require(is_possible_number, "min_agents", f"from {_FEWEST_AGENTS} to {n}", min_agents)
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
        flower, start = _import_flower(), self._arrays.to_numpy_ndarrays()
        moved = map(flower.Array, _add(start, average))
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
        size = _count_trained(self._arrays.to_numpy_ndarrays())
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
            agents = _require_agents(list(record[_AGENTS]), plan.num_agents, agent)
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
            return _require_round(record[_ROUND]), nonces
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


def _call_app(call_next: Callable[..., Any], message: Any, context: Any) -> Any:
    """Call the client app; no error of it is public, whatever its type."""
    try:
        return call_next(message, context)
    except Exception as error:
        # An app may use CorN too, and raise a ``PublicError`` or ``InfeasibleError`` about data.
        raise CornError("the client app failed") from error


def _flatten(
    arrays: Sequence[NDArray[Any]], *, like: Sequence[NDArray[Any]]
) -> NDArray[np.float64]:
    """Return all floating-point arrays as one vector; the others are not trained."""
    if [a.shape for a in arrays] != [a.shape for a in like]:
        raise PublicError("the client app must answer with arrays of the shapes that it was sent")
    pairs = zip(arrays, like, strict=True)
    # Which arrays are trained follows from the types of the server's, which are public.
    parts = [a.reshape(-1).astype(np.float64) for a, b in pairs if b.dtype.kind == "f"]
    return np.concatenate(parts) if parts else np.empty(0)


def _add(arrays: Sequence[NDArray[Any]], vector: NDArray[np.float64]) -> list[NDArray[Any]]:
    """Return the arrays plus the pieces of a vector, in their own types."""
    moved, start = [], 0
    for array in arrays:
        if array.dtype.kind != "f":
            # The server's own array: a counter that the client changed would leave without noise.
            moved.append(array)
            continue
        piece = vector[start : start + array.size].reshape(array.shape)
        # Rounded to the model's type after the release: post-processing of public numbers.
        moved.append((array.astype(np.float64) + piece).astype(array.dtype))
        start += array.size
    return moved


def _count_trained(arrays: Sequence[NDArray[Any]]) -> int:
    return sum(array.size for array in arrays if array.dtype.kind == "f")


def _import_flower() -> Any:
    try:
        return importlib.import_module("flwr.app")
    except ImportError as error:
        raise MissingExtraError("corn.flower", extra="flower") from error
