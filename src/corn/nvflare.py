"""Agents of a plan as sites of NVFlare: any FedAvg job becomes private by one filter at each site.

``CornFilter`` makes the update of a site's model a release, and ``CornSums`` at the server adds up
the releases of all sites. Each site puts the average in the place of its own result, so that
whatever the job's controller makes of the results is post-processing. ``CornExecutor`` takes
gradient steps in the place of a training script, for the unit sample.

The guarantee is that of :mod:`corn.engines`. But a job is written by others: ``protect_site`` puts
the filter into the site's own configuration, and closes the site to what its server could run there
(docs/nvflare.md).

NVFlare is an extra: ``pip install 'corn-dsgd[nvflare]'``.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, cast

import numpy as np
import torch

from corn.distributed.requirements import Requirements
from corn.engines import (
    CONSORTIUM_FILE,
    PARAMETERS,
    ConsortiumModel,
    GradientSteps,
    ServerSums,
    SiteFolder,
    SumRounds,
    TooFewAgentsError,
    add_to_arrays,
    calling_users_code,
    flatten,
    hiding_errors,
    save_model,
    sum_releases,
)
from corn.errors import CornError, MissingExtraError, PublicError
from corn.learn.consortium import load_consortium
from corn.noise import BudgetSpentError, Roster, load_roster
from corn.noise.stream import encode_fields

try:
    from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
    from nvflare.apis.event_type import EventType
    from nvflare.apis.executor import Executor
    from nvflare.apis.filter import Filter
    from nvflare.apis.fl_component import FLComponent
    from nvflare.apis.fl_constant import FilterKey, FLContextKey, ReturnCode
    from nvflare.apis.fl_context import FLContext
    from nvflare.apis.shareable import ReservedHeaderKey, Shareable, make_reply
    from nvflare.app_common.abstract.model import (
        ModelLearnable,
        ModelLearnableKey,
        make_model_learnable,
    )
    from nvflare.app_common.abstract.model_persistor import ModelPersistor
    from nvflare.app_common.app_constant import AppConstants
    from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST
    from nvflare.app_common.logging.constants import is_log_streaming_allowed
    from nvflare.app_common.workflows.fedavg import FedAvg
    from nvflare.job_config.api import FedJob
    from nvflare.private.defs import SysCommandTopic
    from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors
except ImportError as error:
    raise MissingExtraError("corn.nvflare", extra="nvflare") from error

_TOPIC = "corn.sums"
_MESSAGE_SECONDS = 60.0
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
# What a policy of NVFlare permits, but for a job's own code and commands at a site.
_RIGHTS = ("submit_job", "clone_job", "manage_job", "download_job", "view", "operate")
_PUBLIC_CODES = (
    ReturnCode.EXECUTION_EXCEPTION,
    ReturnCode.EXECUTION_RESULT_ERROR,
    ReturnCode.TASK_ABORTED,
    ReturnCode.TASK_UNKNOWN,
)


class AbortedError(CornError):
    """NVFlare has aborted the job while an agent waited for others."""


class CornFilter(Filter):  # type: ignore[misc]
    """A filter of a site's task data and task results that makes every result a release of a plan.

    It answers with models alone. Metrics and numbers of samples depend on private data, so that
    every site has the weight 1, and results without a model, such as those of validation, are
    blocked.

    Args:
        folder: The folder of the site (``corn.engines.SiteFolder``), in which ``{site}`` stands for
            its name. By default ``corn`` in the ``local`` folder of the site.
        require: The owner's requirements of the plan and of all releases of this site's data, such
            as ``["unit=agent", "total-epsilon=3"]``.
    """

    def __init__(self, folder: str = "", require: Sequence[str] = ()) -> None:
        super().__init__()
        # NVFlare writes the arguments of a component to a job from attributes of the same names.
        self.folder = folder
        self.require = list(require)

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Keep the model of a task, or answer with the average of all sites' releases."""
        with hiding_errors():
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
        fl_ctx.set_prop(_TASK, _Task(task), private=True, sticky=False)
        # An executor of a job must not choose other keys, plans and requirements than the site's.
        fl_ctx.set_prop(_SITE, (self.folder, self.require), private=True, sticky=False)

    def _release(self, result: Shareable, fl_ctx: FLContext) -> Shareable:
        task = fl_ctx.get_prop(_TASK)
        if task is None:
            raise PublicError("CornFilter must be among the task_data_filters too")
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
        moved = [np.zeros_like(array) for array in start]
        if trained.data_kind == DataKind.WEIGHTS:
            # Subtracted in float64, the type in which the update is clipped and released.
            update, moved = update - flatten(start, like=start), start
        site = SiteFolder.open(_find_folder(self.folder, fl_ctx))
        own = site.make_release(Requirements.parse(self.require))
        try:
            average = sum_releases(
                own,
                own.clip_update(update),
                model=_digest(names, start, task.round_number),
                reduction=_open_sums(fl_ctx, fl_ctx.get_run_abort_signal()),
            )
        except AbortedError:
            return task.add_headers(make_reply(ReturnCode.TASK_ABORTED))
        if average is not None:
            moved = add_to_arrays(moved, average)
        # A new record: nothing of the site's own result but the average leaves.
        pairs = zip(names, moved, strict=True)
        data = {name: _like(array, trained.data[name]) for name, array in pairs}
        return task.add_headers(_make_reply(trained.data_kind, data, task.round_number))


class _Task:
    """Copies of what the server sent: training may change its arrays in place."""

    def __init__(self, task: Shareable) -> None:
        # Those that a reply needs.
        self._headers = {name: copy.deepcopy(task.get_header(name)) for name in _PUBLIC_HEADERS}
        number = self._headers[AppConstants.CURRENT_ROUND]
        self.round_number = number if type(number) is int else 0
        # The parameters by name; None for a task without a model.
        self.arrays: dict[str, np.ndarray[Any, Any]] | None = None
        with suppress(PublicError):
            dxo = _read_model(task)
            if dxo.data_kind == DataKind.WEIGHTS:
                self.arrays = {name: _as_array(value).copy() for name, value in dxo.data.items()}

    def add_headers(self, reply: Shareable) -> Shareable:
        for name, value in self._headers.items():
            if value is not None:
                reply.set_header(name, value)
        return reply


class CornExecutor(Executor):  # type: ignore[misc]
    """An executor of training tasks that takes private gradient steps, one sum for each.

    A task begins with the server's model and ends with the common model of all sites after
    ``steps`` steps, which it also leaves in the folder of the site. Any controller that averages
    models will do, such as ``FedAvg``.

    Args:
        problem: ``MODULE.FUNCTION`` in the job's own code: (site's name) → module, loss of a batch,
            data set of the site. A consortium file in the site's folder has precedence over it.
        step_size: The step size, or learning rate, unless the consortium file has it.
        steps: The steps of one task; 0 for all that the plan has.
        folder: See ``CornFilter``, whose folder and requirements count where a site has one.
    """

    def __init__(
        self, problem: str = "", step_size: float = 0.0, steps: int = 0, folder: str = ""
    ) -> None:
        super().__init__()
        self.problem = problem
        self.step_size = step_size
        self.steps = steps
        self.folder = folder

    def execute(
        self,
        task_name: str,  # noqa: ARG002 - every task is one of training
        shareable: Shareable,
        fl_ctx: FLContext,
        abort_signal: Any,
    ) -> Shareable:
        """Take the steps of a task, and return the model after them."""
        with hiding_errors():
            return self._train(shareable, fl_ctx, abort_signal)

    def _train(self, shareable: Shareable, fl_ctx: FLContext, abort_signal: Any) -> Shareable:
        given = _read_model(shareable)
        folder, require = fl_ctx.get_prop(_SITE) or (self.folder, ())
        site = SiteFolder.open(_find_folder(folder, fl_ctx))
        own = site.make_release(Requirements.parse(require))
        num_steps = own.plan.budget.num_steps
        if own.plan.momentum and 0 < self.steps < num_steps:
            raise PublicError("a plan with momentum needs all steps in one task: leave out steps")
        agreed = site.consortium
        step_size = self.step_size if agreed is None else agreed.step_size
        with calling_users_code():
            # A site with a consortium file calls no function that a job names.
            name = fl_ctx.get_identity_name()
            trained = site.load_problem(lambda: resolve_name(self.problem)(name))
            steps = GradientSteps(own, trained.problem, step_size=step_size)
        parameters = trained.read({name: _as_array(value) for name, value in given.data.items()})
        round_number = int(shareable.get_header(AppConstants.CURRENT_ROUND, 0) or 0)
        sums = _open_sums(fl_ctx, abort_signal)
        steps_per_task = self.steps or num_steps
        first = round_number * steps_per_task
        for step in range(first, min(first + steps_per_task, num_steps)):
            try:
                with calling_users_code():
                    clipped = steps.differentiate(parameters)
                moved = steps.take(parameters, clipped, step=step, reduction=sums)
            except AbortedError:
                return make_reply(ReturnCode.TASK_ABORTED)
            except (BudgetSpentError, TooFewAgentsError) as error:
                # All that are left stop with the same model.
                _LOGGER.warning("training ends before step %s: %s", step, error)
                break
            parameters = parameters if moved is None else moved
        save_model(trained.problem, parameters, site.plan, site.path)
        # What is not trained goes back as it came.
        before = {name: given.data[name] for name in trained.shapes}
        zeros = [np.zeros_like(_as_array(value)) for value in before.values()]
        arrays = zip(before.items(), add_to_arrays(zeros, parameters.numpy()), strict=True)
        data = given.data | {name: _like(array, value) for (name, value), array in arrays}
        # The site's own filter lets a model pass that is a sum of releases already.
        reply = _make_reply(DataKind.WEIGHTS, data, round_number)
        fl_ctx.set_prop(_RELEASED, reply, private=True, sticky=False)
        return reply


class CornSums(FLComponent):  # type: ignore[misc]
    """The component of a server that adds up the masked integers of all sites.

    Args:
        public_keys: The public keys of all sites in the order of the roster, in hexadecimal. By
            default those of ``local/corn/roster.json`` of the server.
        wait: The seconds after which a sum begins without sites that are not ready, and is void
            without sites that have sent nothing.
    """

    def __init__(self, public_keys: Sequence[str] = (), wait: float = 600.0) -> None:
        super().__init__()
        # See CornFilter for the names.
        self.public_keys = list(public_keys)
        self.wait = wait
        self.register_event_handler(EventType.START_RUN, self._start)

    def _start(self, _event: str, fl_ctx: FLContext) -> None:
        keys = tuple(map(bytes.fromhex, self.public_keys))
        roster = Roster(keys) if keys else load_roster(_find_folder("", fl_ctx) / "roster.json")
        self._rounds = SumRounds(roster, wait=self.wait)
        fl_ctx.get_engine().register_aux_message_handler(_TOPIC, self._answer)

    def _answer(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:  # noqa: ARG002
        sender = fl_ctx.get_peer_context().get_identity_name()
        reply = make_reply(ReturnCode.OK)
        reply.update(self._rounds.answer(request, sender))
        return reply


class CornModel(ModelPersistor):  # type: ignore[misc]
    """The component of a server that keeps the model of a consortium file after every round.

    File, plan and model are in ``local/corn`` of the server. A job that is submitted again after
    the server was killed goes on from there.
    """

    def load_model(self, fl_ctx: FLContext) -> ModelLearnable:
        """Return the last model that was kept, or else the first."""
        return make_model_learnable({PARAMETERS: self._open(fl_ctx).load()}, {})

    def save_model(self, model: ModelLearnable, fl_ctx: FLContext) -> None:
        """Keep the model."""
        self._open(fl_ctx).save(_as_array(model[ModelLearnableKey.WEIGHTS][PARAMETERS]))

    def _open(self, fl_ctx: FLContext) -> ConsortiumModel:
        folder = _find_folder("", fl_ctx)
        return ConsortiumModel(folder / CONSORTIUM_FILE, folder)


class SiteGuard(FLComponent):  # type: ignore[misc]
    """A component of a site's ``resources.json``: the server may not read files of the site.

    The process of a site runs ``cat FILE`` and similar commands for a server that asks for it, and
    checks permissions only if the server's message says so.
    """

    def __init__(self) -> None:
        super().__init__()
        # Before the site listens: its components are built first.
        known = ClientRequestProcessors.request_processors
        known[:] = [each for each in known if SysCommandTopic.SHELL not in each.get_topics()]


def protect_site(local: Path, *, require: Sequence[str] = ()) -> None:
    """Close a site to its server: no job can go round the filter, and no file can be read.

    Written into the ``local`` folder of the site: ``privacy.json`` with ``CornFilter``, and
    ``resources.json`` with ``SiteGuard`` and without streaming of logs. If ``local/corn`` has a
    consortium file, jobs also bring no code, by ``authorization.json``, and use no other classes
    than ``CornExecutor``.

    The site's folder is ``local/corn``. ``require`` is that of ``CornFilter``.
    """
    path = local / "privacy.json"
    if path.exists():
        raise CornError(f"{path}: exists; add CornFilter to its scopes by hand (docs/nvflare.md)")
    own = {"path": "corn.nvflare.CornFilter", "args": {"require": list(require)}}
    scope = {"name": "corn", "task_data_filters": [own], "task_result_filters": [own]}
    _write_json(path, {"scopes": [scope], "default_scope": "corn"})
    resources = _read_json(local / "resources.json", {"format_version": 2})
    # Errors quote data, and NVFlare streams logs of sites to the server unless they forbid it.
    resources["allow_log_streaming"] = False
    guard = {"id": "corn_guard", "path": "corn.nvflare.SiteGuard", "args": {}}
    resources["components"] = [*resources.get("components", []), guard]
    if (local / "corn" / CONSORTIUM_FILE).exists():
        # Classes with paths to programs and scripts would run them without any code in a job.
        resources["class_allow_list"] = ["corn.nvflare.CornExecutor"]
        resources["class_list_enforcement_mode"] = "enforce"
        policy = _read_json(local / "authorization.json", {"format_version": "1.0"})
        for role, rights in policy.get("permissions", {}).items():
            others = dict.fromkeys(_RIGHTS, rights) if isinstance(rights, str) else rights
            policy["permissions"][role] = {**others, "byoc": "none", "shell_commands": "none"}
        _write_json(local / "authorization.json", policy)
    _write_json(local / "resources.json", resources)


def prepare_server(local: Path) -> None:
    """Let jobs without code use ``CornSums`` and ``CornModel`` at a server."""
    resources = _read_json(local / "resources.json", {"format_version": 2})
    known = resources.get("class_allow_list", DEFAULT_CLASS_ALLOW_LIST)
    resources["class_allow_list"] = [*known, "corn.nvflare.CornSums", "corn.nvflare.CornModel"]
    _write_json(local / "resources.json", resources)


def _read_json(path: Path, otherwise: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a file, or of the one that NVFlare takes in its place."""
    for source in (path, path.with_name(f"{path.name}.default")):
        if source.exists():
            return cast("dict[str, Any]", json.loads(source.read_text()))
    return otherwise


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def make_consortium_job(
    consortium: Path, *, steps_per_round: int = 10, wait: float = 600.0
) -> FedJob:
    """Return the job of a consortium file, which has neither code nor data.

    Every party has the file and its plan in its own ``local/corn``. The server keeps the model
    after each ``steps_per_round`` steps: a server that is killed loses no more of them.
    """
    agreed = load_consortium(consortium)
    num_sites, num_steps = len(agreed.sites), agreed.training.steps
    job = FedJob(name="corn", min_clients=num_sites)
    # Every party uses the CorN that it installed. NVFlare would copy its source into the job.
    job.set_app_packages(["corn"])
    job.to_server(FedAvg(num_clients=num_sites, num_rounds=-(-num_steps // steps_per_round)))
    job.to_server(CornModel(), id="persistor")
    job.to_server(CornSums(wait=wait), id="corn_sums")
    job.to_clients(CornExecutor(steps=steps_per_round), tasks=["train"])
    return job


def _find_folder(folder: str, fl_ctx: FLContext) -> Path:
    """Return a party's own folder, by default ``corn`` in its ``local`` folder."""
    if folder:
        return Path(folder.replace("{site}", fl_ctx.get_identity_name()))
    workspace = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT)
    return Path(workspace.get_site_config_dir()) / "corn"


def _make_reply(kind: str, data: dict[str, Any], round_number: int) -> Shareable:
    meta = {MetaKey.NUM_STEPS_CURRENT_ROUND: 1, AppConstants.CURRENT_ROUND: round_number}
    reply = DXO(kind, data=data, meta=meta).to_shareable()
    reply.set_header(AppConstants.CURRENT_ROUND, round_number)
    return reply


def _open_sums(fl_ctx: FLContext, abort_signal: Any) -> ServerSums:
    def ask(request: dict[str, Any]) -> Mapping[str, Any] | None:
        if abort_signal and abort_signal.triggered:
            raise AbortedError("the job was aborted while an agent waited for others")
        replies = fl_ctx.get_engine().send_aux_request(
            targets=None,
            topic=_TOPIC,
            request=Shareable(request),
            timeout=_MESSAGE_SECONDS,
            fl_ctx=fl_ctx,
        )
        found = (replies or {}).values()
        return next((each for each in found if each.get_return_code() == ReturnCode.OK), None)

    return ServerSums(ask)


def _read_model(shareable: Shareable) -> DXO:
    dxo = None
    with suppress(TypeError, ValueError, KeyError):
        dxo = from_shareable(shareable)
    if dxo is None or dxo.data_kind not in (DataKind.WEIGHTS, DataKind.WEIGHT_DIFF) or not dxo.data:
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
