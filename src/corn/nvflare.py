"""Agents of a plan as sites of NVFlare: any FedAvg job becomes private by one filter at each site.

``CornFilter`` takes a site's trained model, clips its difference from the server's model, adds the
site's share of the noise, rounds the sum to the grid and hides it under masks. ``CornSums`` at the
server adds up the integers of all sites modulo 2^B, where the masks cancel. Each site puts the
average in the place of its own result, so that all results are equal, and whatever the job's
controller makes of them is post-processing: averages with any weights, FedOpt, early stopping.

The guarantee is the plan's, for one site's whole data (unit agent): ε over all rounds, against the
server and anybody else who reads all messages and models, together with as many curious sites as
the plan's threat names. It does not rest on NVFlare: sites know each other by the keys of the
roster. A server that drops, delays, repeats or forges messages learns no more (docs/nvflare.md).

A job is written by others. The filter belongs into the site's own ``local/privacy.json``, which no
job can change, and the site's key, plan and ledger into a folder that only the site can read.

NVFlare is an extra: ``pip install 'corn-dsgd[nvflare]'``.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import json
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from corn.distributed.rendezvous import is_public, name_kind
from corn.distributed.requirements import Requirements
from corn.engines import (
    AbortedError,
    AgentRelease,
    GradientSteps,
    ServerSums,
    SumRounds,
    TooFewAgentsError,
    add_to_arrays,
    flatten,
    sum_releases,
)
from corn.errors import CornError, MissingExtraError, PublicError
from corn.learn.training import make_task
from corn.noise import BudgetSpentError, Roster
from corn.noise.ledger import find_agents
from corn.noise.stream import encode_fields
from corn.plan import load_plan

try:
    from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
    from nvflare.apis.event_type import EventType
    from nvflare.apis.executor import Executor
    from nvflare.apis.filter import Filter
    from nvflare.apis.fl_component import FLComponent
    from nvflare.apis.fl_constant import FilterKey, FLContextKey, ReturnCode
    from nvflare.apis.fl_context import FLContext
    from nvflare.apis.shareable import ReservedHeaderKey, Shareable, make_reply
    from nvflare.app_common.app_constant import AppConstants
    from nvflare.app_common.logging.constants import is_log_streaming_allowed
except ImportError as error:
    raise MissingExtraError("corn.nvflare", extra="nvflare") from error

_TOPIC = "corn.sums"
# Properties of the context of a task.
_TASK, _SITE, _RELEASED = "corn.task", "corn.site", "corn.released"
_LOGGER = logging.getLogger("corn.nvflare")
# Which round and task a result belongs to; the server has chosen them itself.
_PUBLIC_HEADERS = (
    ReservedHeaderKey.COOKIE_JAR,
    ReservedHeaderKey.TASK_NAME,
    ReservedHeaderKey.TASK_ID,
    AppConstants.CURRENT_ROUND,
    AppConstants.START_ROUND,
    AppConstants.NUM_ROUNDS,
)


_PUBLIC_CODES = (
    ReturnCode.EXECUTION_EXCEPTION,
    ReturnCode.EXECUTION_RESULT_ERROR,
    ReturnCode.TASK_ABORTED,
    ReturnCode.TASK_UNKNOWN,
)


class CornFilter(Filter):  # type: ignore[misc]
    """A filter of a site's task data and task results that makes every result a release of a plan.

    It answers with models alone. Metrics and numbers of samples depend on private data, so that
    every site has the weight 1, and results without a model, such as those of validation, are
    blocked.

    Args:
        folder: The site's own folder, with ``plan.json``, ``roster.json`` and its ``agent-I.key``;
            its ledger is written there. ``{site}`` in it is the site's name. By default ``corn`` in
            the ``local`` folder of the site.
        require: The owner's requirements of the plan and of all releases of this site's data, such
            as ``["unit=agent", "total-epsilon=3"]``.
        wait: The seconds for which an unreachable server is asked again.
        timeout: The seconds that one message may take.
    """

    def __init__(
        self,
        folder: str = "",
        require: Sequence[str] = (),
        wait: float = 600.0,
        timeout: float = 60.0,
    ) -> None:
        super().__init__()
        # NVFlare writes the arguments of a component to a job from attributes of the same names.
        self.folder = folder
        self.require = list(require)
        self.wait = wait
        self.timeout = timeout

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Keep the model of a task, or answer with the average of all sites' releases."""
        with _naming_no_data():
            if fl_ctx.get_prop(FLContextKey.FILTER_DIRECTION) == FilterKey.IN:
                self._keep(shareable, fl_ctx)
                return shareable
            return self._release(shareable, fl_ctx)

    def _keep(self, task: Shareable, fl_ctx: FLContext) -> None:
        """Keep what the server sent: both filters of a task have its context."""
        # A site's own filter protects its data. A filter in a job is for simulations.
        if not self.folder and is_log_streaming_allowed(fl_ctx):
            raise PublicError(
                "the site's logs must not be streamed to the server, as errors quote data: set "
                "allow_log_streaming to false in local/resources.json, or use protect_site"
            )
        fl_ctx.set_prop(_TASK, _Task.read(task), private=True, sticky=False)
        # An executor of a job must not choose other keys, plans and requirements than the site's.
        fl_ctx.set_prop(_SITE, (self.folder, self.require), private=True, sticky=False)

    def _release(self, result: Shareable, fl_ctx: FLContext) -> Shareable:
        task = fl_ctx.get_prop(_TASK)
        if task is None:
            raise PublicError(
                "CornFilter must filter the data of tasks too: add it to task_data_filters"
            )
        code = result.get_return_code()
        if code != ReturnCode.OK:
            # Whatever the site's own code answers with may quote data.
            kept = code if code in _PUBLIC_CODES else ReturnCode.EXECUTION_EXCEPTION
            return task.add_headers(make_reply(kept))
        if fl_ctx.get_prop(_RELEASED) is result:
            return result
        trained = _read_model(result)
        if task.arrays is None or set(trained.data) - set(task.arrays):
            raise PublicError("a result must be of the parameters that the server sent")
        names = sorted(trained.data)
        start = [task.arrays[name] for name in names]
        update = flatten([_as_array(trained.data[name]) for name in names], like=start)
        is_difference = trained.data_kind == DataKind.WEIGHT_DIFF
        if not is_difference:
            # Subtracted in float64, the type in which the update is clipped and released.
            update = update - flatten(start, like=start)
        own = _open_release(self.folder, self.require, fl_ctx)
        abort_signal = fl_ctx.get_run_abort_signal()
        try:
            average = sum_releases(
                own,
                own.clip_update(update),
                model=_digest(names, start, task.round_number),
                reduction=_open_sums(fl_ctx, abort_signal, self.timeout, self.wait),
            )
        except AbortedError:
            return task.add_headers(make_reply(ReturnCode.TASK_ABORTED))
        moved = start
        if is_difference:
            moved = [np.zeros_like(array) for array in start]
        if average is not None:
            moved = add_to_arrays(moved, average)
        # A new record: nothing of the site's own result but the average leaves.
        data = {
            name: _like(array, trained.data[name]) for name, array in zip(names, moved, strict=True)
        }
        return task.add_headers(_make_reply(trained.data_kind, data, task.round_number))


@dataclass(frozen=True, eq=False)
class _Task:
    """What the server sent, in copies: training may change its arrays in place.

    Attributes:
        arrays: The parameters by name; None for a task without a model.
        round_number: The round.
        headers: Those that a reply needs.
    """

    arrays: dict[str, np.ndarray[Any, Any]] | None
    round_number: int
    headers: dict[str, Any]

    @classmethod
    def read(cls, task: Shareable) -> _Task:
        headers = {name: copy.deepcopy(task.get_header(name)) for name in _PUBLIC_HEADERS}
        number = headers[AppConstants.CURRENT_ROUND]
        arrays = None
        try:
            dxo = _read_model(task)
        except PublicError:
            dxo = None
        if dxo is not None and dxo.data_kind == DataKind.WEIGHTS:
            arrays = {name: _as_array(value).copy() for name, value in dxo.data.items()}
        return cls(arrays, number if type(number) is int else 0, headers)

    def add_headers(self, reply: Shareable) -> Shareable:
        for name, value in self.headers.items():
            if value is not None:
                reply.set_header(name, value)
        return reply


class CornExecutor(Executor):  # type: ignore[misc]
    """An executor of training tasks that takes private gradient steps, one sum for each.

    It fits the unit sample, for which a model after several steps cannot be clipped, and the unit
    agent. A task begins with the server's model and ends with the common model of all sites after
    ``steps`` steps, so that a job of several rounds has a model to go on with after each. Any
    controller that averages models will do, such as ``FedAvg``.

    Args:
        problem: ``MODULE.FUNCTION`` in the job's own code: (site's name) → module, loss of a batch,
            data set of the site.
        step_size: The step size, or learning rate.
        steps: The steps of one task; 0 for all that the plan has.
        batch_size: The samples of a mini-batch, unless the plan has their number; 0 for all.
        folder: See ``CornFilter``, as for the others.
        require: The owner's requirements.
        wait: Seconds.
        timeout: Seconds.
    """

    def __init__(
        self,
        problem: str,
        step_size: float,
        steps: int = 0,
        batch_size: int = 0,
        folder: str = "",
        require: Sequence[str] = (),
        wait: float = 600.0,
        timeout: float = 60.0,
    ) -> None:
        super().__init__()
        self.problem = problem
        self.step_size = step_size
        self.steps = steps
        self.batch_size = batch_size
        self.folder = folder
        self.require = list(require)
        self.wait = wait
        self.timeout = timeout

    def execute(
        self,
        task_name: str,  # noqa: ARG002 - every task is one of training
        shareable: Shareable,
        fl_ctx: FLContext,
        abort_signal: Any,
    ) -> Shareable:
        """Take the steps of a task, and return the model after them."""
        with _naming_no_data():
            return self._train(shareable, fl_ctx, abort_signal)

    def _train(self, shareable: Shareable, fl_ctx: FLContext, abort_signal: Any) -> Shareable:
        given = _read_model(shareable)
        folder, require = fl_ctx.get_prop(_SITE) or (self.folder, self.require)
        own = _open_release(folder, require, fl_ctx)
        num_steps = own.plan.budget.num_steps
        if own.plan.momentum and 0 < self.steps < num_steps:
            raise PublicError("a plan with momentum needs all steps in one task: leave out steps")
        with _calling_users_code():
            module_name, _, function = self.problem.rpartition(".")
            make_problem = getattr(importlib.import_module(module_name), function)
            model, loss, dataset = make_problem(fl_ctx.get_identity_name())
        trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        if set(trained) - set(given.data):
            raise PublicError("the server's model must have all parameters of the site's module")
        with torch.no_grad():
            for name, each in trained.items():
                each.copy_(torch.as_tensor(given.data[name]))
        with _calling_users_code():
            steps = GradientSteps(
                own,
                make_task(model, loss),
                dataset,
                step_size=self.step_size,
                batch_size=self.batch_size or None,
            )
        round_number = int(shareable.get_header(AppConstants.CURRENT_ROUND, 0) or 0)
        parameters = torch.nn.utils.parameters_to_vector(trained.values()).detach()
        sums = _open_sums(fl_ctx, abort_signal, self.timeout, self.wait)
        first = round_number * (self.steps or num_steps)
        for step in range(first, min(first + (self.steps or num_steps), num_steps)):
            if abort_signal.triggered:
                return make_reply(ReturnCode.TASK_ABORTED)
            try:
                with _calling_users_code():
                    clipped = steps.differentiate(parameters)
                moved = steps.take(parameters, clipped, step=step, reduction=sums)
            except AbortedError:
                return make_reply(ReturnCode.TASK_ABORTED)
            except (BudgetSpentError, TooFewAgentsError) as error:
                # All that are left stop with the same model.
                _LOGGER.warning("training ends before step %s: %s", step, error)
                break
            parameters = parameters if moved is None else moved
        torch.nn.utils.vector_to_parameters(parameters, trained.values())
        # What is not trained goes back as it came.
        data = dict(given.data)
        for name, each in trained.items():
            data[name] = _like(each.detach().numpy(), given.data[name])
        # The site's own filter lets a model pass that is a sum of releases already.
        reply = _make_reply(DataKind.WEIGHTS, data, round_number)
        fl_ctx.set_prop(_RELEASED, reply, private=True, sticky=False)
        return reply


class CornSums(FLComponent):  # type: ignore[misc]
    """The component of a server that adds up the masked integers of all sites.

    Args:
        public_keys: The public keys of all sites in the order of the roster, in hexadecimal.
        min_agents: The fewest sites of a sum.
        wait: The seconds after which a sum begins without sites that are not ready, and is void
            without sites that have sent nothing.
    """

    def __init__(
        self, public_keys: Sequence[str], min_agents: int = 2, wait: float = 600.0
    ) -> None:
        super().__init__()
        # See CornFilter for the names.
        self.public_keys = list(public_keys)
        self.min_agents = min_agents
        self.wait = wait
        roster = Roster(tuple(map(bytes.fromhex, public_keys)))
        self._rounds = SumRounds(roster, min_agents=min_agents, wait=wait)
        self.register_event_handler(EventType.START_RUN, self._start)

    def _start(self, _event: str, fl_ctx: FLContext) -> None:
        fl_ctx.get_engine().register_aux_message_handler(_TOPIC, self._answer)

    def _answer(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:  # noqa: ARG002
        sender = fl_ctx.get_peer_context().get_identity_name()
        answer = self._rounds.answer(_unpack(request), sender)
        reply = make_reply(ReturnCode.OK)
        reply.update(_pack(answer))
        return reply


def protect_site(local: Path, *, require: Sequence[str] = ()) -> None:
    """Write ``privacy.json`` into the ``local`` folder of a site: no job can go round the filter.

    It also forbids the streaming of the site's logs, in ``resources.json``.

    The site's plan, roster and key belong into ``local/corn``. ``require`` is that of
    ``CornFilter``.
    """
    path = local / "privacy.json"
    if path.exists():
        raise CornError(f"{path}: exists; add CornFilter to its scopes by hand (docs/nvflare.md)")
    own = {"path": "corn.nvflare.CornFilter", "args": {"require": list(require)}}
    scope = {"name": "corn", "task_data_filters": [own], "task_result_filters": [own]}
    path.write_text(json.dumps({"scopes": [scope], "default_scope": "corn"}, indent=2) + "\n")
    # Errors quote data, and NVFlare streams logs of sites to the server unless they forbid it.
    resources = local / "resources.json"
    source = resources if resources.exists() else local / "resources.json.default"
    known = json.loads(source.read_text()) if source.exists() else {"format_version": 2}
    resources.write_text(json.dumps({**known, "allow_log_streaming": False}, indent=2) + "\n")


def make_private(
    recipe: Any,
    public_keys: Sequence[str],
    *,
    folder: str | None = None,
    tasks: Sequence[str] = ("train",),
    min_agents: int = 2,
    wait: float = 600.0,
) -> None:
    """Add ``CornSums`` to the server of a recipe, and ``CornFilter`` to its sites.

    Args:
        recipe: One of NVFlare whose controller averages models, such as ``FedAvgRecipe``.
        public_keys: The public keys of all sites in the order of the roster, in hexadecimal.
        folder: The folder of each site, with ``{site}`` for its name. None leaves the filter to the
            sites' own ``privacy.json``, as they should have it.
        tasks: The tasks whose results are filtered, if ``folder`` is given. NVFlare has no name for
            all tasks, and sends results of other tasks as they are.
        min_agents: The fewest sites of a sum.
        wait: See ``CornSums``.
    """
    job = recipe._job  # a recipe has no other way to leave a package out of the job
    # Sites use the CorN that they installed. NVFlare would copy its source, and that of what it
    # imports, into the job.
    job.set_app_packages(["corn"])
    job.to_server(CornSums(public_keys, min_agents, wait), id="corn_sums")
    if folder is not None:
        own = CornFilter(folder, wait=wait)
        recipe.add_client_input_filter(own, tasks=list(tasks))
        recipe.add_client_output_filter(own, tasks=list(tasks))


def _open_release(folder: str, require: Sequence[str], fl_ctx: FLContext) -> AgentRelease:
    """Return the releases of the agent whose key is in a site's own folder."""
    path = Path(folder.replace("{site}", fl_ctx.get_identity_name()))
    if not folder:
        workspace = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT)
        path = Path(workspace.get_site_config_dir()) / "corn"
    agents = find_agents(path)
    if len(agents) != 1:
        raise CornError(f"{path}: must have the key of one agent, found {len(agents)}")
    plan = load_plan(path / "plan.json")
    return AgentRelease(plan, agents[0], path, requirements=Requirements.parse(require))


@contextmanager
def _naming_no_data() -> Iterator[None]:
    """Replace errors that may quote data or name private files: NVFlare may send their text."""
    try:
        yield
    except Exception as error:
        if is_public(error):
            raise
        # Not as an error: NVFlare's log of errors may be streamed to the server.
        _LOGGER.warning("the site failed", exc_info=True)
        raise PublicError(f"the site failed: {name_kind(error)}") from None


# Torch has one generator in a process. Sites in threads of a simulator that draw from it together
# would take each other's draws for randomness of their models, which is refused.
_USERS_CODE = threading.RLock()


@contextmanager
def _calling_users_code() -> Iterator[None]:
    """Let one site of a process at a time run a user's code, and make all of its errors private.

    A user's code may raise a ``PublicError`` about its data.
    """
    with _USERS_CODE:
        try:
            yield
        except Exception as error:
            raise CornError("the site's own code failed") from error


def _make_reply(kind: str, data: dict[str, Any], round_number: int) -> Shareable:
    meta = {MetaKey.NUM_STEPS_CURRENT_ROUND: 1, AppConstants.CURRENT_ROUND: round_number}
    reply = DXO(kind, data=data, meta=meta).to_shareable()
    reply.set_header(AppConstants.CURRENT_ROUND, round_number)
    return reply


def _open_sums(fl_ctx: FLContext, abort_signal: Any, timeout: float, wait: float) -> ServerSums:
    def is_aborted() -> bool:
        return abort_signal is not None and bool(abort_signal.triggered)

    return ServerSums(lambda request: _ask(request, fl_ctx, timeout), wait, is_aborted=is_aborted)


def _ask(request: dict[str, Any], fl_ctx: FLContext, timeout: float) -> Mapping[str, Any] | None:
    message = Shareable()
    message.update(_pack(request))
    replies = fl_ctx.get_engine().send_aux_request(
        targets=None, topic=_TOPIC, request=message, timeout=timeout, fl_ctx=fl_ctx
    )
    for reply in (replies or {}).values():
        if reply.get_return_code() == ReturnCode.OK:
            return _unpack(reply)
    return None


def _pack(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose arrays of whole numbers are bytes, which NVFlare sends as they are."""
    packed = dict(message)
    integers = packed.pop("integers", None)
    if integers is not None:
        packed["words"] = integers.dtype.str
        packed["integers"] = integers.tobytes()
    return packed


def _unpack(message: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in message.items() if not name.startswith("__")}
    words, data = found.pop("words", None), found.get("integers")
    if data is not None:
        # Anybody may have sent it: other types of numbers are refused as no array at all.
        is_known = words in ("<u2", "<u4", "<u8") and isinstance(data, bytes)
        is_known = is_known and len(data) % np.dtype(cast("str", words)).itemsize == 0
        found["integers"] = np.frombuffer(data, words).copy() if is_known else None
    return found


def _read_model(shareable: Shareable) -> DXO:
    try:
        dxo = from_shareable(shareable)
    except (TypeError, ValueError, KeyError) as error:
        raise PublicError("a result without a model is private, and is not sent") from error
    if dxo.data_kind not in (DataKind.WEIGHTS, DataKind.WEIGHT_DIFF) or not dxo.data:
        raise PublicError("a result without a model is private, and is not sent")
    return dxo


def _as_array(value: Any) -> np.ndarray[Any, Any]:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().numpy()
    return np.asarray(value)


def _like(array: np.ndarray[Any, Any], value: Any) -> Any:
    return torch.from_numpy(array) if isinstance(value, torch.Tensor) else array


def _digest(names: Sequence[str], arrays: Sequence[Any], round_number: int) -> bytes:
    state = hashlib.sha256()
    for name, array in zip(names, arrays, strict=True):
        state.update(encode_fields(name, array.dtype.str, str(array.shape)))
        state.update(np.ascontiguousarray(array).data)
    state.update(encode_fields("round", round_number))
    return state.digest()
