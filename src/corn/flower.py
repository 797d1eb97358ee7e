"""Agents of a plan as client apps of Flower: a server that adds up updates and cannot read them.

``CornMod`` makes a client's update a release, and ``CornStrategy`` gives the average of all clients
to any strategy of Flower. The guarantee is that of :mod:`corn.engines` (docs/flower.md). Whose code
a SuperNode runs is another question, which Flower answers.

Flower is an extra: ``pip install 'corn-dsgd[flower]'``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, final

from torch import nn

from corn.distributed.membership import name_agents
from corn.distributed.requirements import Requirements
from corn.engines import (
    FEWEST_AGENTS,
    PARAMETERS,
    AgentRelease,
    ConsortiumModel,
    GradientSteps,
    Hello,
    MaskedUpdate,
    SiteFolder,
    add_to_arrays,
    average_updates,
    calling_users_code,
    decode_hello,
    flatten,
    hiding_errors,
    is_seed,
    plan_for,
    require_masks,
)
from corn.errors import CornError, MissingExtraError, PublicError
from corn.learn.problem import DataSource
from corn.learn.step import ClippedGradients
from corn.learn.tasks.module import MeanLoss
from corn.noise import BudgetSpentError
from corn.noise.masks import WORDS
from corn.plan import Plan, fingerprint, load_plan
from corn.topology.graphs import add_names, label_agent

try:
    from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
except ImportError as error:
    raise MissingExtraError("corn.flower", extra="flower") from error

# Flower calls a mod for the kinds of messages that the client app answers: the question for a hello
# is a message of the kind that every client app answers.
_TRAIN, _QUESTION, _HELLOS = "train", "corn.question", "corn.hellos"
_ANSWER, _INTEGERS, _OFFSET, _HELLO = "corn", "integers", "offset-seed", "hello"
_WEIGHT = "num-examples"
_SECONDS_BETWEEN_POLLS = 0.5
_LOGGER = logging.getLogger("corn.flower")

# In a simulation one process answers many messages.
_open_site = lru_cache(maxsize=64)(SiteFolder.open)


@final
class CornMod:
    """A mod for ``flwr.clientapp.ClientApp`` that makes every update a release of a plan.

    It sends integers under masks, and nothing else of the client's reply: metrics and numbers of
    samples depend on private data, so that every client has the weight 1. Errors of the client app
    reach its own log only.

    Args:
        folder: The folder of the site (``corn.engines.SiteFolder``), in which ``{site}`` stands for
            the node's ``partition-id``. By default the entry ``corn`` of the node's configuration.
            If it has a consortium file, a round is one gradient step on the site's rows, and the
            client app computes nothing.
        problem: (context of Flower) → module, loss of a batch, data set of the client: without a
            consortium file a round is then one gradient step too. The server's arrays must be the
            module's trained parameters.
        requirements: The owner's requirements of this plan and of all releases of this data.
    """

    def __init__(
        self,
        folder: Path | str = "",
        *,
        problem: Callable[[Any], tuple[nn.Module, MeanLoss, DataSource]] | None = None,
        requirements: Requirements | None = None,
    ) -> None:
        self._folder = str(folder)
        self._problem = problem
        self._required = requirements

    def __call__(self, message: Any, context: Any, call_next: Callable[..., Any]) -> Any:
        """Answer a message of the server."""
        with hiding_errors():
            if message.metadata.message_type.startswith(_TRAIN):
                records = self._train(message, context, call_next)
            else:
                # Empty metrics: an average over clients has no scores, and the strategy goes on.
                records = {"metrics": MetricRecord({_WEIGHT: 1})}
            return Message(RecordDict(records), reply_to=message)

    def _train(self, message: Any, context: Any, call_next: Callable[..., Any]) -> dict[str, Any]:
        """Return the records of a reply: a release, unless none is asked for, and a hello."""
        folder = self._folder or str(context.node_config.get("corn", ""))
        if not folder:
            raise PublicError("the node's configuration must have the folder of the site as corn")
        site_id = str(context.node_config.get("partition-id"))
        site = _open_site(Path(folder.replace("{site}", site_id)))
        own = site.make_release(self._required)
        answer, records = {}, {}
        if _QUESTION not in message.content.config_records:
            # What cannot be released is refused before the client app trains.
            nonces = own.read_hellos(_find_hellos(message))
            clipped = self._compute(site, own, message, context, call_next)
            released = own.release(clipped, nonces)
            answer[_OFFSET] = released.offset_seed
            records["arrays"] = ArrayRecord({_INTEGERS: Array(released.integers)})
        try:
            # For the next sum, so that a round is one message.
            answer[_HELLO] = own.say_hello().encode()
        except BudgetSpentError:
            answer[_HELLO] = b""
        records[_ANSWER] = ConfigRecord(answer)
        return records

    def _compute(
        self, site: SiteFolder, own: AgentRelease, message: Any, context: Any, call_next: Any
    ) -> ClippedGradients:
        """Return the gradient of a batch at the server's model, or the client app's update."""
        (_, given) = _only_arrays(message)
        make, before = self._problem, given.to_numpy_ndarrays()
        if make is None and site.consortium is None:
            with calling_users_code():
                reply = call_next(message, context)
            if reply.has_error():
                raise PublicError("the client app answered with an error")
            (_, found) = _only_arrays(reply)
            after = found.to_numpy_ndarrays()
            # Subtracted in float64, the type in which the update is clipped and released.
            return own.clip_update(flatten(after, like=before) - flatten(before, like=before))
        if own.plan.momentum:
            raise PublicError("a plan with momentum needs a model that stays at the client")
        with calling_users_code():
            trained = site.load_problem(None if make is None else lambda: make(context))
        if list(given.keys()) != list(trained.shapes):
            raise PublicError("the server's arrays must be the trained parameters, in order")
        parameters = trained.read(dict(zip(given.keys(), before, strict=True)))
        with calling_users_code():
            # New coins for every message: rounds are independent, as amplification assumes.
            return GradientSteps(own, trained.problem).differentiate(parameters)


@final
class CornStrategy:
    """A strategy around another one of Flower, which gets the exact average of all clients.

    The other strategy sees one reply per round: the server's model plus the average of the clients'
    noisy updates, with weight 1.

    All agents take part in the first round. A round that lacks an agent is void: the model stays,
    and the others have spent one release. Training goes on without that agent, until a node that
    was started anew has its key. Where fewer than two agents are left, or the integers of all
    agents do not add up to a possible sum, ``start`` returns the model of the last complete round.

    Args:
        strategy: The strategy that gets the averages, for example ``FedAvg()``.
        plan: The plan of all agents, or its file.
        step_size: Where clients answer with gradients, the model moves by minus this times their
            average.
        timeout: The seconds to wait until all nodes are connected, and for their hellos.
    """

    def __init__(
        self,
        strategy: Any,
        plan: Plan | Path | str,
        *,
        step_size: float | None = None,
        timeout: float = 600.0,
    ) -> None:
        self._step_size = step_size
        self._plan = plan if isinstance(plan, Plan) else load_plan(Path(plan))
        require_masks(self._plan)
        self._strategy = strategy
        self._timeout = timeout

    def __getattr__(self, name: str) -> Any:
        # Evaluation, and whatever else ``start`` of the other strategy needs.
        return getattr(self._strategy, name)

    def start(self, *arguments: Any, **options: Any) -> Any:
        """Run the rounds of training as the other strategy's ``start`` does, and return its result.

        Raises:
            CornError: Not all agents could begin.
        """
        # What each node said for the next sum, in the order of agents.
        self._hellos: dict[int, Hello] = {}
        self._left_out: set[int] = set()
        self._has_begun = self._is_stopped = False
        # Its loop with this strategy in its place.
        return type(self._strategy).start(self, *arguments, **options)

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> list[Any]:
        """Return the messages of a round: the same one to all agents that are there."""
        self._arrays: Any = None
        if not self._is_stopped:
            self._meet(grid)
        if self._is_stopped:
            return []
        # A copy: the entry is of this round only.
        said = [hello.encode() for hello in self._hellos.values()]
        record = ConfigRecord({**config, _HELLOS: said})
        # Whomever it would sample, a sum needs all.
        messages = list(self._strategy.configure_train(server_round, arrays, record, grid))
        if not messages:
            return []
        content, kind = messages[0].content, messages[0].metadata.message_type
        self._record, self._arrays = _only_arrays(messages[0])
        return [Message(content, dst_node_id=node, message_type=kind) for node in self._hellos]

    def aggregate_train(self, server_round: int, replies: Iterable[Any]) -> tuple[Any, Any]:
        """Return the other strategy's model for the average of a round, or None if it is void."""
        if self._arrays is None:
            return None, None
        replies = list(replies)
        agents = {node: hello.agent for node, hello in self._hellos.items()}
        plan = plan_for(self._plan, tuple(agents.values()))
        self._hellos = {}
        received = self._read_replies(replies, plan)
        if lost := agents.keys() - received.keys():
            # Not again: a client that always fails would spend the releases of all others.
            self._left_out |= lost
            who = name_agents(agents[node] for node in lost)
            _LOGGER.warning(
                "round %s is void without %s: the model stays, and the round counts as released",
                server_round,
                add_names(who, self._plan.network.agent_names),
            )
            return None, None
        average = average_updates(plan, [received[node] for node in agents])
        if average is None:
            self._stop(
                f"round {server_round} is void, as the integers of its agents do not add up to a "
                "possible sum: an agent has another roster, or did not follow the protocol"
            )
            return None, None
        if self._step_size is not None:
            average = -self._step_size * average
        moved = map(Array, add_to_arrays(self._arrays.to_numpy_ndarrays(), average))
        content = {
            self._record: ArrayRecord(dict(zip(self._arrays.keys(), moved, strict=True))),
            "metrics": MetricRecord({getattr(self._strategy, "weighted_by_key", _WEIGHT): 1}),
        }
        replies[0].content = RecordDict(content)
        arrays, metrics = self._strategy.aggregate_train(server_round, replies[:1])
        # The server's own in the place of arrays that are not trained: an average of one has floats
        # for whole numbers, which would be trained in the next round.
        for name, array in self._arrays.items() if arrays else ():
            if array.numpy().dtype.kind != "f" and name in arrays:
                arrays[name] = array
        return arrays, metrics

    def _meet(self, grid: Any) -> None:
        """Ask nodes without a hello for one: all at first, later those that are new."""
        n = self._plan.num_agents
        # Not the wall clock, which may be set back while the server waits.
        deadline = time.monotonic() + self._timeout
        while len(nodes := list(grid.get_node_ids())) < n and not self._has_begun:
            if time.monotonic() > deadline:
                raise CornError(f"{n} nodes must be connected, found {len(nodes)}")
            time.sleep(_SECONDS_BETWEEN_POLLS)
        known = self._hellos.keys() | self._left_out
        reasons = self._ask([node for node in nodes if node not in known], grid)
        self._hellos = dict(sorted(self._hellos.items(), key=lambda item: item[1].agent))
        if self._is_stopped:
            return
        found = [hello.agent for hello in self._hellos.values()]
        if not self._has_begun and found != list(range(n)):
            told = "; ".join([", ".join(map(str, found)) or "none", *reasons[:1]])
            raise CornError(f"all agents 0 … {n - 1} must answer, each once, found {told}")
        self._has_begun = True
        if len(found) < FEWEST_AGENTS:
            self._stop(f"{FEWEST_AGENTS} agents must be left, found {len(found)}")

    def _ask(self, nodes: list[int], grid: Any) -> list[str]:
        """Take the hellos of nodes; return why others failed."""
        question = RecordDict({_QUESTION: ConfigRecord({})})
        asked = [Message(question, dst_node_id=node, message_type=_TRAIN) for node in nodes]
        reasons = []
        for reply in grid.send_and_receive(asked, timeout=self._timeout) if asked else ():
            node = reply.metadata.src_node_id
            if reply.has_error():
                reasons.append(f"node {node}: {reply.error.reason}")
            elif _ANSWER not in reply.content.config_records:
                reasons.append(f"node {node}: its client app has no CornMod")
            elif reply.content[_ANSWER][_HELLO] == b"":
                self._stop(f"the ledger of node {node} allows no more releases under this plan")
            else:
                self._take(node, reply.content[_ANSWER][_HELLO])
        return reasons

    def _take(self, node: int, said: object) -> None:
        """Keep the hello of a node for the next sum."""
        hello = decode_hello(said)
        # Masks of different plans would not cancel.
        if hello.plan != fingerprint(self._plan):
            who = label_agent(self._plan.network.agent_names, hello.agent)
            raise CornError(f"agent {who} has another plan than the server")
        # A node that has come back under another number may be in the list twice for a while.
        is_taken = any(hello.agent == other.agent for other in self._hellos.values())
        if not is_taken or not self._has_begun:
            self._hellos[node] = hello

    def _read_replies(self, replies: Iterable[Any], plan: Plan) -> dict[int, MaskedUpdate]:
        """Return the messages that can be added up, by node, and keep hellos; log the others."""
        given = self._arrays.to_numpy_ndarrays()
        size, words = len(flatten(given, like=given)), WORDS[plan.mask_bits]
        received = {}
        for reply in replies:
            node = reply.metadata.src_node_id
            if reply.has_error():
                _LOGGER.warning("node %s failed: %s", node, reply.error.reason)
                continue
            try:
                (_, arrays) = _only_arrays(reply)
                (integers,) = arrays.to_numpy_ndarrays()
                seed, hello = (reply.content[_ANSWER][name] for name in (_OFFSET, _HELLO))
                if hello:
                    self._take(node, hello)
            except (CornError, KeyError, TypeError, ValueError):
                _LOGGER.warning("node %s: the reply is not one of CornMod", node)
                continue
            if integers.dtype != words or integers.shape != (size,) or not is_seed(seed):
                _LOGGER.warning("node %s: %s integers of %s bits expected", node, size, words)
                continue
            received[node] = MaskedUpdate(integers, seed)
        return received

    def _stop(self, reason: str) -> None:
        self._is_stopped = True
        _LOGGER.error("training stops with the model of the last complete round: %s", reason)


def make_client_app(folder: Path | str = "", *, requirements: Requirements | None = None) -> Any:
    """Return the client app of a consortium file: see ``CornMod``."""
    app = ClientApp(mods=[CornMod(folder, requirements=requirements)])
    # Flower calls no mod for messages that no function answers.
    app.train()(_refuse)
    return app


def _refuse(*_: object) -> None:
    raise PublicError("the folder of the site must have a consortium file")


def train_consortium(grid: Any, consortium: Path | str, out: Path | str, **options: Any) -> None:
    """Train the model of a consortium file, as the main function of a server app.

    The model is kept in the folder ``out`` after each round. A server that was killed goes on from
    there, with the releases that ledgers still allow. ``options`` are those of ``CornStrategy``.
    """
    from flwr.serverapp.strategy import FedAvg

    model = ConsortiumModel(Path(consortium), Path(out))
    strategy = FedAvg(fraction_evaluate=0.0)
    CornStrategy(strategy, model.plan, step_size=model.step_size, **options).start(
        grid,
        ArrayRecord({PARAMETERS: Array(model.load())}),
        num_rounds=model.plan.budget.num_steps,
        evaluate_fn=lambda _, arrays: model.save(arrays[PARAMETERS].numpy()),
    )


def _find_hellos(message: Any) -> list[object]:
    """Return the hellos that a server names, or raise ``PublicError``."""
    for record in message.content.config_records.values():
        if isinstance(record.get(_HELLOS), list):
            return list(record[_HELLOS])
    raise PublicError(
        "refuses to release: the message has no hellos; the server needs corn.flower.CornStrategy"
    )


def _only_arrays(message: Any) -> tuple[str, Any]:
    records = list(message.content.array_records.items())
    if len(records) != 1:
        raise PublicError(f"a message must have one record of arrays, found {len(records)}")
    name, record = records[0]
    return str(name), record
