"""Stand-ins for the networks of Flower and NVFlare: messages reach the other side in one process.

Neither engine is imported until a stand-in is used.
"""

import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from corn.distributed.keyring import make_keys
from corn.plan import Plan, save_plan


def make_sites(folder: Path, plan: Plan, names: Sequence[str]) -> None:
    """Make a folder for each site with its key, and ``all`` with the roster."""
    make_keys(folder / "all", len(names))
    for agent, name in enumerate(names):
        own, key = folder / name, f"agent-{agent}.key"
        own.mkdir(mode=0o700)
        save_plan(plan, own / "plan.corn")
        (folder / "all" / key).rename(own / key)
        shutil.copy(folder / "all" / "roster.json", own)


@contextmanager
def flower_runtime() -> Iterator[None]:
    """Set the numbers that messages carry, as Flower's runtime does."""
    # Flower logs every round on the terminal.
    logging.getLogger("flwr").setLevel(logging.ERROR)
    with ExitStack() as stack:
        for name in ("_run_id", "_node_id", "_task_id"):
            identity = f"flwr.supercore.task_identity.TaskIdentity.{name}"
            stack.enter_context(mock.patch(identity, 1))
        yield


class Grid:
    """A server's view of client apps that run in this process; messages are encoded as Flower's.

    ``change`` may replace the message to a node, and ``None`` loses it.
    """

    def __init__(self, mod: Any, train: Callable[..., Any], num_nodes: int = 4) -> None:
        from flwr.clientapp import ClientApp

        self.app = ClientApp(mods=[mod])
        self.app.train()(train)
        self.app.evaluate()(train)
        self.num_nodes = num_nodes
        self.change: Callable[[int, Any], Any] = lambda _, message: message
        self.asked: list[tuple[int, Any]] = []
        self.replies: list[Any] = []

    def get_node_ids(self) -> list[int]:
        return [70 + agent for agent in range(self.num_nodes)]

    def ask(self, agent: int, message: Any) -> Any:
        """Return the reply of a client, as a server sees it."""
        from flwr.app import Context, Error, Message, RecordDict

        context = Context(1, 70 + agent, {"partition-id": agent}, RecordDict(), {})
        try:
            reply = self.app(_encode(message), context)
        except Exception as error:  # noqa: BLE001 - as Flower does
            return Message(Error(code=2, reason=str(error)), reply_to=message)
        return _encode(reply)

    def send_and_receive(self, messages: Any, *, timeout: float) -> Iterator[Any]:
        assert timeout > 0
        first = len(self.replies)
        for message in messages:
            agent = message.metadata.dst_node_id % 10
            changed = self.change(agent, message)
            if changed is not None:
                self.asked.append((agent, changed))
                self.replies.append(self.ask(agent, changed))
        return map(_encode, self.replies[first:])


def _encode(message: Any) -> Any:
    from flwr.common.serde import message_from_proto, message_to_proto

    return message_from_proto(message_to_proto(message))


def grow(message: Any, _: object) -> Any:
    """Add one to every weight, and tell the server about the data."""
    from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict

    grown = {
        name: Array(np.asarray(array.numpy() + array.numpy().dtype.type(1)))
        for name, array in message.content["arrays"].items()
    }
    metrics = MetricRecord({"num-examples": 123, "train-loss": 0.7})
    content = RecordDict({"arrays": ArrayRecord(grown), "metrics": metrics})
    return Message(content, reply_to=message)


def lose_messages(agent: int, at_round: int) -> Callable[[int, Any], Any]:
    """Lose the messages to an agent from a round of training on."""
    is_gone = False

    def change(to: int, message: Any) -> Any:
        nonlocal is_gone
        config = message.content.config_records.get("config", {})
        is_gone |= config.get("server-round", 0) >= at_round
        return None if to == agent and is_gone else message

    return change


class Context:
    """A site's context of one task, whose messages reach the server's component."""

    def __init__(self, site: str, sums: Any) -> None:
        self._site, self._sums, self._props = site, sums, dict[str, Any]()
        self.abort_signal = SimpleNamespace(triggered=False)

    def get_prop(self, key: str, default: Any = None) -> Any:
        return self._props.get(key, default)

    def set_prop(self, key: str, value: Any, **_options: Any) -> None:
        self._props[key] = value

    def get_identity_name(self) -> str:
        return self._site

    def get_peer_context(self) -> "Context":
        return self

    def get_run_abort_signal(self) -> Any:
        return self.abort_signal

    def get_engine(self) -> Any:
        return SimpleNamespace(
            send_aux_request=self._send, register_aux_message_handler=lambda *_: None
        )

    def _send(self, *, topic: str, request: Any, **_options: Any) -> dict[str, Any]:
        return {"server": self._sums._answer(topic=topic, request=request, fl_ctx=self)}


def task(model: dict[str, Any], round_number: int = 0) -> Any:
    """Return a task of NVFlare with a model."""
    from nvflare.apis.dxo import DXO, DataKind
    from nvflare.app_common.app_constant import AppConstants

    shareable = DXO(DataKind.WEIGHTS, data=model).to_shareable()
    shareable.set_header(AppConstants.CURRENT_ROUND, round_number)
    return shareable
