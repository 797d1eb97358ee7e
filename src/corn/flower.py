"""Agents of a plan as client apps of Flower: a server that need not be trusted with updates.

The server averages what its clients send: a complete graph and one mixing round. ``CornMod`` clips
a client's update, adds the client's share of the noise, and rounds the sum, so that the server sees
protected updates only, while the noise cancels in their average.

The guarantee is the plan's, for one agent's whole data: ε over all rounds, against a server and
anybody else who reads all messages and models, together with as many curious clients as the plan's
threat names. The server is curious about data, not more: it could spoil the model, but rounds and
nonces that it repeats are refused.

Flower is an extra: ``pip install 'corn-dsgd[flower]'``.
"""

from __future__ import annotations

import importlib
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from corn.checks import require
from corn.distributed.startup.handshake import check_guarantee, is_public, name_kind
from corn.distributed.startup.keyring import load_credentials, open_ledger
from corn.distributed.startup.requirements import Requirements, compose_total
from corn.errors import (
    CornError,
    FileFormatError,
    InvalidArgumentError,
    MissingExtraError,
    PublicError,
)
from corn.learn.step import clip_batch_gradients, release
from corn.noise import ReleaseLedger, SecureSource, agent_keys, agree_on_nonce, draw_share
from corn.noise.history import compose_history, read_history
from corn.noise.ledger import LAST_STEP
from corn.plan import Plan, fingerprint, load_plan

# Flower calls a mod for the kinds of messages that the client app answers: an introduction is a
# message of the kind that every client app answers.
_TRAIN, _INTRODUCTION = "train", "corn.introduction"
_NONCES, _ROUND = "corn.nonces", "server-round"
_SECONDS_BETWEEN_POLLS = 0.5
# Seeds of larger groups would need messages between clients, which Flower does not carry.
_LARGEST_GROUP = 2
_NONCE = re.compile(r"[0-9a-f]{64}")
_LOGGER = logging.getLogger("corn.flower")


@final
class AgentRelease:
    """One agent's releases under a plan, for a transport that CorN does not run.

    Client apps may live for one message only, so the agent's ledger keeps the nonce that it
    contributed to the present run, the nonces of the others, and the last round that it released.

    Args:
        plan: of all agents; on a complete graph with one round, noise cancels in the average.
        agent: this agent's number.
        keys: the folder of ``agent-I.key``, ``roster.json`` and the ledger.
        requirements: the owner's, of this plan and of all releases of this data.

    Raises:
        RequirementError: the plan does not meet the requirements.
    """

    def __init__(
        self, plan: Plan, agent: int, keys: Path, *, requirements: Requirements | None = None
    ) -> None:
        require(plan.budget.unit == "agent", "unit", "agent: updates are clipped once", "sample")
        plan.require_gossip("Flower")
        largest = max(map(len, plan.decomposition.seed_groups), default=0)
        if largest > _LARGEST_GROUP:
            raise InvalidArgumentError(
                "seeds must be those of pairs, which follow from keys without a message, found a "
                f"group of {largest}: plan with --seeds pairs"
            )
        self._plan, self._agent, self._keys = plan, agent, keys
        self._required = requirements or Requirements()
        self._required.check(plan, agent, is_rehearsal=False)

    def introduce(self) -> bytes:
        """Begin a run, and return the nonce that this agent contributes to it."""
        # The ledger has a new nonce whenever it is opened so. With it the nonce of the run is new,
        # whatever the server claims about other agents' nonces.
        with self._open() as ledger:
            return ledger.nonce

    def release(
        self, update: NDArray[np.float64], *, round_number: int, nonces: Mapping[int, bytes]
    ) -> NDArray[np.float64]:
        """Return an update, clipped, with this agent's noise of a round, on the plan's grid.

        Args:
            update: the difference of the client's model from the server's, shape (d,).
            round_number: from 1, larger than in every earlier release of the run.
            nonces: of all agents, of which this agent's own must be the one it contributed.

        Raises:
            PublicError: the server named a round or nonces under which no noise may be released.
            BudgetSpentError: nothing of the budget is left.
        """
        self._plan.check_parameters(len(update))
        _require_round(round_number)
        _require_nonces(nonces, self._plan.num_agents)
        # A hash of all contributions and of the plan, which every client computes for itself.
        run = agree_on_nonce(nonces, plan_fingerprint=fingerprint(self._plan))
        # Before anything is reserved: without keys there is no noise, and no release.
        source = self._make_source()
        with self._open(continues=True) as ledger:
            self._check_run(ledger, run, round_number, nonces)
            # On the disk before noise is drawn: after a crash the round counts as released.
            ledger.reserve(round_number)
        # Private noise and the shares of all pairs, in float64.
        noise = draw_share(
            self._plan.decomposition,
            self._agent,
            source=source,
            nonce=run,
            step=round_number,
            stop=len(update),
        )
        # A copy: gradients that are not finite are set to zero in place.
        values = torch.from_numpy(np.array(update, dtype=np.float64)).view(1, 1, -1)
        # float64 throughout, as the proof for floats assumes (docs/floats.md).
        clip = torch.tensor([self._plan.budget.clip], dtype=torch.float64)
        found = clip_batch_gradients(values, clip)
        grid = torch.tensor([self._plan.grid], dtype=torch.float64)
        released = release(
            found.values.view(-1), found.factors.view(-1), torch.from_numpy(noise), grid
        )
        return np.asarray(released.numpy())

    def get_epsilon(self, delta: float = 1e-5) -> float:
        """Return the ε of all releases of this agent's data, under all plans of its keys.

        It holds for the unit, the adjacency and the adversary that ``corn ledger`` names.
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
                "run; start a new run with corn.flower.introduce_agents"
            )
        if round_number < ledger.next_step:
            raise PublicError(
                f"refuses to release round {round_number} again: with the same noise, the "
                "difference of two releases would show the data"
            )
        # The first release fixes the nonces of the run: with others, shares would no longer cancel.
        try:
            ledger.keep_nonce(run)
        except InvalidArgumentError as error:
            raise PublicError(
                "refuses to release: other agents' nonces changed during the run"
            ) from error

    def _open(self, *, continues: bool = False) -> ReleaseLedger:
        precision = _find_precision(self._plan, self._agent)
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

    def _make_source(self) -> SecureSource:
        own = load_credentials(self._keys, self._agent, self._plan.num_agents)
        return SecureSource(
            agent_keys(
                own.identity,
                self._agent,
                seed_groups=self._plan.decomposition.seed_groups,
                roster=own.roster,
                plan_fingerprint=fingerprint(self._plan),
            )
        )


def _require_round(found: object) -> int:
    """Return the number of a round that a server named, or raise ``PublicError``."""
    # By exact type: a bool is an integer to Python.
    if type(found) is not int or not 1 <= found <= LAST_STEP:
        raise PublicError(
            f"refuses to release: the round must be a whole number from 1 to {LAST_STEP:,}"
        )
    return found


def _require_nonces(found: Mapping[int, bytes], num_agents: int) -> None:
    """Raise ``PublicError`` unless a server named one nonce for each agent of the plan."""
    if len(found) != num_agents or set(found) != set(range(num_agents)):
        raise PublicError(
            f"refuses to release: there must be {num_agents} nonces, one for each agent, found "
            f"{len(found)}"
        )


# Verifying a plan takes a while, and a client app is made anew for every message.
@lru_cache(maxsize=64)
def _find_precision(plan: Plan, agent: int) -> float:
    return check_guarantee(plan, agent).precision


_load = lru_cache(maxsize=8)(load_plan)


@final
class CornMod:
    """A mod for ``flwr.clientapp.ClientApp`` that makes every update a release of a plan.

    It sends the server's model plus the released update, and nothing else of the client's reply:
    metrics and numbers of samples depend on private data, so that every client has the weight 1.
    Evaluation on private data is not answered, and errors of the client app reach its own log only.

    Args:
        plan: its file.
        keys: the folder of this client's key, the roster and the ledger.
        agent_key: the entry of the node's configuration that has the agent's number.
        weight_key: the metric by which the server's strategy weighs clients.
        shares_evaluation: answer evaluations unchanged, because they use public data only.
        requirements: the owner's, of this plan and of all releases of this client's data; the
            client refuses every message of a run that does not meet them.
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

    def _find_agent(self, context: Any) -> AgentRelease:
        try:
            agent = int(context.node_config[self._agent_key])
        except (KeyError, ValueError) as error:
            raise PublicError(
                f"the node's configuration must have the agent's number as {self._agent_key!r}"
            ) from error
        return AgentRelease(_load(self._plan), agent, self._keys, requirements=self._required)

    def _introduce(self, message: Any, context: Any) -> Any:
        flower, own = _import_flower(), self._find_agent(context)
        answer = {
            "agent": int(context.node_config[self._agent_key]),
            "nonce": own.introduce().hex(),
            "plan": fingerprint(_load(self._plan)).hex(),
        }
        record = flower.RecordDict({"corn": flower.ConfigRecord(answer)})
        return flower.Message(record, reply_to=message)

    def _train(self, message: Any, context: Any, call_next: Callable[..., Any]) -> Any:
        flower, own = _import_flower(), self._find_agent(context)
        # A message without nonces is refused before the client app trains.
        round_number, nonces = _read_config(message, _load(self._plan).num_agents)
        (name, given) = _only_arrays(message)
        reply = _call_app(call_next, message, context)
        if reply.has_error():
            raise PublicError("the client app answered with an error")
        (_, found) = _only_arrays(reply)
        start, end = given.to_numpy_ndarrays(), found.to_numpy_ndarrays()
        # Subtracted in float64, the type in which the update is clipped and released.
        update = _flatten(end, like=start) - _flatten(start, like=start)
        released = own.release(update, round_number=round_number, nonces=nonces)
        moved = map(flower.Array, _add(start, released))
        arrays = flower.ArrayRecord(dict(zip(given.keys(), moved, strict=True)))
        # Equal weights: numbers of samples are private, and noise cancels in a plain average only.
        metrics = flower.MetricRecord({self._weight_key: 1})
        content = flower.RecordDict({name: arrays, "metrics": metrics})
        return flower.Message(content, reply_to=message)


def introduce_agents(grid: Any, num_agents: int, *, timeout: float = 600.0) -> Any:
    """Collect a nonce from every agent; return the ``train_config`` of the strategy's start.

    Call it in the server app, once for each run::

        config = introduce_agents(grid, num_agents=8)
        FedAvg(fraction_evaluate=0.0).start(grid, arrays, num_rounds=50, train_config=config)
    """
    flower = _import_flower()
    nodes = _wait_for_nodes(grid, num_agents, timeout)
    asked = [
        flower.Message(
            flower.RecordDict({_INTRODUCTION: flower.ConfigRecord({})}),
            dst_node_id=node,
            message_type=_TRAIN,
        )
        for node in nodes
    ]
    replies = list(grid.send_and_receive(asked, timeout=timeout))
    failed = [reply.error.reason for reply in replies if reply.has_error()]
    if failed:
        raise CornError(f"{len(failed)} of {len(replies)} agents failed: {failed[0]}")
    answers = [reply.content["corn"] for reply in replies]
    # Shares of different plans would not cancel.
    plans = {str(answer["plan"]) for answer in answers}
    require(len(plans) == 1, "plans of all agents", "one", f"{len(plans)}")
    found = sorted((int(answer["agent"]), str(answer["nonce"])) for answer in answers)
    if [agent for agent, _ in found] != list(range(num_agents)):
        raise CornError(
            f"all agents 0 … {num_agents - 1} must answer, each once, found "
            f"{', '.join(str(agent) for agent, _ in found) or 'none'}"
        )
    return flower.ConfigRecord({_NONCES: [nonce for _, nonce in found]})


def _wait_for_nodes(grid: Any, num_agents: int, timeout: float) -> list[int]:
    # Not the wall clock, which may be set back while the server waits.
    deadline = time.monotonic() + timeout
    while len(nodes := list(grid.get_node_ids())) < num_agents:
        if time.monotonic() > deadline:
            raise CornError(f"{num_agents} nodes must be connected, found {len(nodes)}")
        time.sleep(_SECONDS_BETWEEN_POLLS)
    return nodes


def _read_config(message: Any, num_agents: int) -> tuple[int, dict[int, bytes]]:
    for record in message.content.config_records.values():
        if _NONCES in record and _ROUND in record:
            listed = dict(enumerate(record[_NONCES]))
            _require_nonces(listed, num_agents)
            if not all(
                isinstance(text, str) and _NONCE.fullmatch(text) for text in listed.values()
            ):
                raise PublicError("refuses to release: a nonce must have 64 hexadecimal digits")
            nonces = {agent: bytes.fromhex(text) for agent, text in listed.items()}
            return _require_round(record[_ROUND]), nonces
    raise PublicError(
        "refuses to release: the message has no nonces; give the strategy's start the train_config "
        "of corn.flower.introduce_agents"
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


def _import_flower() -> Any:
    try:
        return importlib.import_module("flwr.app")
    except ImportError as error:
        raise MissingExtraError("corn.flower", extra="flower") from error
