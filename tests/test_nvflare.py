"""Sites of NVFlare as agents: what leaves a site, and jobs in real processes.

``make engines`` runs these tests, in an environment with NVFlare.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("nvflare", reason="needs NVFlare: make engines")

from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.fl_constant import FilterKey, FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.app_common.app_constant import AppConstants
from nvflare.fuel.f3.message import Message as CellMessage
from nvflare.private.admin_defs import Message
from nvflare.private.defs import SysCommandTopic
from nvflare.private.fed.client.admin import FedAdminAgent
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors

from corn.distributed.requirements import RequirementError
from corn.errors import PublicError
from corn.noise import load_roster
from corn.noise.ledger import read_history
from corn.nvflare import (
    CornExecutor,
    CornFilter,
    CornSums,
    SiteGuard,
    prepare_server,
    protect_site,
)
from corn.plan import load_plan, make_plan
from corn.privacy import PrivacyBudget
from corn.topology import load_network
from tests.contracts.engines import Context, make_sites, task

EXAMPLES = Path(__file__).parents[1] / "examples" / "nvflare"
N, ROUNDS, SITES = 4, 5, 6


@pytest.fixture
def sites(tmp_path: Path) -> Path:
    budget = PrivacyBudget(8, 1e-5, num_steps=ROUNDS, clip=1.0)
    plan = make_plan(load_network(f"star:{N}", mixing="sum"), budget)
    make_sites(tmp_path, plan, [f"site-{agent + 1}" for agent in range(N)])
    return tmp_path


@pytest.fixture
def sums(sites: Path) -> CornSums:
    roster = load_roster(sites / "all" / "roster.json")
    sums = CornSums([key.hex() for key in roster.public_keys], wait=20)
    sums._start("", Context("server", sums))
    return sums


def count_releases(folder: Path, agent: int) -> int:
    return sum(each.num_releases for each in read_history([folder], agent).expenses)


Train = Callable[[int], Shareable]


def begin_task(
    sites: Path, sums: CornSums, given: Shareable | None, agent: int = 0, require: Any = ()
) -> tuple[CornFilter, Context]:
    """Return the filter of a site's results, and the context of a task that it was given."""
    context = Context(f"site-{agent + 1}", sums)
    own, other = (CornFilter(str(sites / "{site}"), require=require) for _ in range(2))
    if given is not None:
        context.set_prop(FLContextKey.FILTER_DIRECTION, FilterKey.IN)
        other.process(given, context)
    context.set_prop(FLContextKey.FILTER_DIRECTION, FilterKey.OUT)
    return own, context


def run_round(
    sites: Path, sums: CornSums, train: Train, given: Callable[[int], Shareable]
) -> list[Shareable]:
    def run(agent: int) -> Shareable:
        own, context = begin_task(sites, sums, given(agent), agent)
        return own.process(train(agent), context)

    with ThreadPoolExecutor(N) as pool:
        return list(pool.map(run, range(N)))


MODEL: dict[str, Any] = {
    "weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "bias": torch.zeros(2, dtype=torch.float64),
    "count": np.array([7]),
}
SECRET = 0.123456


def moved(agent: int) -> Shareable:
    data = {
        "weight": MODEL["weight"] + np.float32(0.01 * agent),
        "bias": MODEL["bias"] + 0.02,
        "count": np.array([8 + agent]),
    }
    meta = {"NUM_STEPS_CURRENT_ROUND": 17 + agent, "initial_metrics": {"accuracy": SECRET}}
    reply = DXO(DataKind.WEIGHTS, data=data, meta=meta).to_shareable()
    reply["more"] = SECRET
    return reply


def test_all_sites_answer_with_one_average_and_nothing_else(sites: Path, sums: CornSums) -> None:
    replies = run_round(sites, sums, moved, lambda _: task(MODEL))
    for reply in replies:
        dxo = from_shareable(reply)
        assert dxo.data_kind == DataKind.WEIGHTS
        assert dxo.data["weight"].dtype == np.float32
        assert dxo.data["bias"].dtype == torch.float64
        assert dxo.data["count"].tolist() == [7]
        for name in MODEL:
            assert np.array_equal(dxo.data[name], from_shareable(replies[0]).data[name])
        assert str(SECRET) not in str(dict(reply))
        assert dxo.meta["NUM_STEPS_CURRENT_ROUND"] == 1
    assert count_releases(sites / "site-1", 0) == 1


def test_differences_are_averaged_as_differences(sites: Path, sums: CornSums) -> None:
    model = {"weight": np.zeros(4000, np.float32)}

    def train(agent: int) -> Shareable:
        data = {"weight": np.full(4000, 1e-3 * agent, np.float32)}
        return DXO(DataKind.WEIGHT_DIFF, data=data).to_shareable()

    replies = run_round(sites, sums, train, lambda _: task(model))
    dxo = from_shareable(replies[2])
    assert dxo.data_kind == DataKind.WEIGHT_DIFF
    # The mean over sites is 1.5e-3, the noise that of the plan.
    plan = load_plan(sites / "site-1" / "plan.corn")
    noise = np.sqrt(1 / (N * (N - 1) * plan.precision_caps[0]))
    assert abs(dxo.data["weight"].mean() - 1.5e-3) < 5 * noise / np.sqrt(4000)
    assert dxo.data["weight"].std() / noise == pytest.approx(1, abs=0.06)


def test_what_is_no_model_does_not_leave(sites: Path, sums: CornSums) -> None:
    own, context = begin_task(sites, sums, None)
    with pytest.raises(PublicError, match="task_data_filters"):
        own.process(moved(0), context)
    own, context = begin_task(sites, sums, task(MODEL))
    # Whatever a job calls a result of CornExecutor.
    context.set_prop("corn.released", moved(0))
    metrics = DXO(DataKind.METRICS, data={"accuracy": SECRET}).to_shareable()
    for wrong in (metrics, Shareable({"accuracy": SECRET})):
        with pytest.raises(PublicError, match="is not sent"):
            own.process(wrong, context)
    failed = make_reply(ReturnCode.EXECUTION_EXCEPTION)
    failed["error"] = SECRET
    failed.set_header(AppConstants.NUM_ROUNDS, SECRET)
    answer = own.process(failed, context)
    assert answer.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    assert str(SECRET) not in str(dict(answer))
    other = DXO(DataKind.WEIGHTS, data={"other": np.zeros(2)}).to_shareable()
    with pytest.raises(PublicError, match="parameters that the server sent"):
        own.process(other, context)


def test_training_in_place_and_a_late_site_reveal_nothing(sites: Path, sums: CornSums) -> None:
    """The attack: the server answers that a sum began without this site."""
    given = task({"weight": np.zeros(3, np.float32), "count": np.array([7])})
    own, context = begin_task(sites, sums, given)
    context.get_engine = lambda: SimpleNamespace(  # type: ignore[method-assign]
        send_aux_request=lambda **_: {"server": Shareable({"status": "late"})}
    )
    data = from_shareable(given).data
    data["weight"] += SECRET
    data["count"] += 417
    answer = own.process(DXO(DataKind.WEIGHTS, data=data).to_shareable(), context)
    found = from_shareable(answer).data
    assert found["weight"].tolist() == [0, 0, 0]
    assert found["count"].tolist() == [7]


@pytest.mark.parametrize("by_executor", [False, True])
def test_the_owner_may_refuse_a_plan(sites: Path, sums: CornSums, by_executor: bool) -> None:
    require = ["unit=agent", "epsilon=1"]
    own, context = begin_task(sites, sums, task(MODEL), require=require)
    release = partial(own.process, moved(0), context)
    if by_executor:
        executor = CornExecutor("os.getcwd", 1.0, folder=str(sites / "{site}"))
        release = partial(executor.execute, "train", task(MODEL), context, context.abort_signal)
    with pytest.raises((PublicError, RequirementError), match=r"[rR]equirement"):
        release()


def test_a_policy_of_a_site_keeps_what_it_does_not_change(tmp_path: Path) -> None:
    (tmp_path / "resources.json.default").write_text('{"allow_log_streaming": true, "kept": 1}')
    protect_site(tmp_path)
    resources = json.loads((tmp_path / "resources.json").read_text())
    assert resources.pop("components")[0]["path"] == "corn.nvflare.SiteGuard"
    assert resources == {"allow_log_streaming": False, "kept": 1}


def test_a_server_cannot_read_files_of_a_guarded_site(
    sites: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: a message without headers, of which no permission is asked, for any file."""
    processors = ClientRequestProcessors.request_processors
    monkeypatch.setattr(ClientRequestProcessors, "request_processors", list(processors))

    def read(file: Path) -> str:
        agent = FedAdminAgent.__new__(FedAdminAgent)
        agent.auditor, agent.processors = None, {}
        agent.app_ctx = SimpleNamespace(new_context=lambda: contextlib.nullcontext(FLContext()))
        for each in ClientRequestProcessors.request_processors:
            agent.register_processor(each)
        message = Message(SysCommandTopic.SHELL, f"cat {file}")
        return str(agent._dispatch_request(CellMessage(payload=message)).payload.body)

    key = sites / "site-1" / "agent-0.key"
    assert read(key) == key.read_text()
    SiteGuard()
    assert "invalid_request" in read(key)


def test_errors_of_a_site_name_neither_data_nor_files(sites: Path, sums: CornSums) -> None:
    (sites / "site-1" / "agent-0.key").write_text("damaged")
    own, context = begin_task(sites, sums, task(MODEL))
    with pytest.raises(PublicError) as caught:
        own.process(moved(0), context)
    assert "agent-0.key" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_server_that_sends_sites_different_models_gets_no_sum_of_them(
    sites: Path, sums: CornSums
) -> None:
    sums._rounds._wait = 1.0
    other = {**MODEL, "bias": torch.ones(2, dtype=torch.float64)}
    replies = run_round(sites, sums, moved, lambda agent: task(MODEL if agent < 2 else other))
    first, second, third, fourth = (from_shareable(reply).data["bias"] for reply in replies)
    assert torch.equal(first, second)
    assert torch.equal(third, fourth)
    assert not torch.equal(first, third)


def test_a_filter_that_waits_observes_the_abort_signal(sites: Path, sums: CornSums) -> None:
    """No other site is ready, and the server would let this one wait for 20 s."""
    own, context = begin_task(sites, sums, task(MODEL))
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(own.process, moved(0), context)
        time.sleep(0.5)
        assert not call.done()
        context.abort_signal.triggered = True
        assert call.result(10).get_return_code() == ReturnCode.TASK_ABORTED
    assert count_releases(sites / "site-1", 0) == 0


class SlowLinear(torch.nn.Linear):
    """A layer that lets other threads run during its forward pass."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05)
        return super().forward(inputs)


def make_drawing_problem(site: str) -> Any:
    """Return a model whose construction draws from the process's generator for a while."""
    # Longer at each site, so that one still draws when another computes its first gradient.
    until = time.monotonic() + 0.3 * int(site[-1])
    while time.monotonic() < until:
        model = SlowLinear(3, 2)
    generator = torch.Generator().manual_seed(int(site[-1]))
    data = torch.randn(20, 3, generator=generator), torch.randint(0, 2, (20,), generator=generator)
    return model, torch.nn.functional.cross_entropy, data


def execute(sites: Path, sums: CornSums, agent: int, signal: Any) -> Shareable:
    executor = CornExecutor(
        f"{__name__}.make_drawing_problem", 0.1, steps=1, folder=str(sites / "{site}")
    )
    given = task({"weight": np.zeros((2, 3), np.float32), "bias": np.zeros(2, np.float32)})
    return executor.execute("train", given, Context(f"site-{agent + 1}", sums), signal)


def test_executors_in_threads_of_one_process_take_a_step_together(
    sites: Path, sums: CornSums
) -> None:
    """Each refused the other's draws from the generator of the process as those of its model."""
    signal = SimpleNamespace(triggered=False)
    with ThreadPoolExecutor(N) as pool:
        replies = list(pool.map(lambda agent: execute(sites, sums, agent, signal), range(N)))
    first, *others = (from_shareable(reply).data for reply in replies)
    assert first["weight"].any()
    for other in others:
        assert all(np.array_equal(other[name], first[name]) for name in first)


def test_an_executor_that_waits_observes_the_abort_signal(sites: Path, sums: CornSums) -> None:
    signal = SimpleNamespace(triggered=False)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(execute, sites, sums, 0, signal)
        time.sleep(3)
        signal.triggered = True
        assert call.result(15).get_return_code() == ReturnCode.TASK_ABORTED


class Federation:
    """A server and sites of NVFlare in processes of their own, from its ``poc`` command."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **os.environ,
            "HOME": str(folder),
            "NVFLARE_POC_WORKSPACE": str(folder / "poc"),
            "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        self.run("nvflare", "poc", "prepare", "-n", str(SITES), "--force")
        self.startup = folder / "poc" / "example_project" / "prod_00"

    def run(self, *command: str) -> str:
        done = subprocess.run(
            command,
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start(self, script: str, *arguments: str, require: Sequence[str]) -> Path:
        """Make plan, keys and job by an example, and start all parties; return the job's folder."""
        self.run(sys.executable, str(EXAMPLES / script), *arguments)
        for folder in (self.folder / "sites").glob("s*"):
            local = self.startup / folder.name / "local"
            shutil.copytree(folder, local / "corn")
            if folder.name == "server":
                prepare_server(local)
            else:
                protect_site(local, require=require)
        # It would wait for an answer within one second, which a busy machine does not give.
        self.run("nvflare", "poc", "start", "--no-wait")
        log = self.startup / "server" / "log.txt"
        self.wait_until(lambda: log.exists() and f"clients: {SITES}" in log.read_text())
        (job,) = (self.folder / "job").iterdir()
        return job

    def wait_until(self, condition: Callable[[], bool], seconds: float = 600) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.5)

    def ask(self, *command: str) -> list[str]:
        """Return the lines of a command's answer, as soon as the server is there."""
        deadline = time.monotonic() + 400
        while True:
            try:
                return self.run("nvflare", "job", *command).splitlines()
            except AssertionError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(3)

    def submit(self, job: Path) -> str:
        lines = self.ask("submit", "-j", str(job))
        return next(line.split()[-1] for line in lines if "job_id" in line)

    def wait_for_end(self, job: str) -> str:
        def find_status() -> str:
            lines = self.ask("list")
            return next((line.split()[2] for line in lines if line.startswith(job)), "")

        self.wait_until(lambda: find_status().startswith("FINISHED"), 900)
        return find_status()

    def find_corn(self, party: str) -> Path:
        return self.startup / party / "local" / "corn"

    def count_releases(self) -> list[int]:
        sites = (self.find_corn(f"site-{site + 1}") for site in range(SITES))
        return [count_releases(folder, site) for site, folder in enumerate(sites)]

    def find_processes(self, *parts: str) -> list[int]:
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                text = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(self.startup) in text and all(part in text for part in parts):
                found.append(int(path.parent.name))
        return found

    def kill(self, *parts: str) -> None:
        """Kill processes that have all these texts in their command lines."""
        for process in self.find_processes(*parts):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    found = Federation(tmp_path)
    yield found
    # First the scripts that restart processes.
    found.kill("sub_start.sh")
    found.kill()


@pytest.mark.slow
def test_a_job_of_real_processes_is_private_by_the_policy_of_each_site(
    federation: Federation,
) -> None:
    folders = ("--job", str(federation.folder / "job"), "--sites", str(federation.folder / "sites"))
    folder = federation.start("job.py", *folders, require=["unit=agent", "total-epsilon=9"])
    job = federation.submit(folder)
    assert federation.wait_for_end(job) == "FINISHED:COMPLETED"
    assert federation.count_releases() == [ROUNDS] * SITES
    # The budget of the plan is spent: the same job again gets nothing.
    federation.wait_for_end(federation.submit(folder))
    assert federation.count_releases() == [ROUNDS] * SITES
    config = json.loads(next(folder.rglob("config_fed_client.json")).read_text())
    assert not config.get("task_result_filters")


@pytest.mark.slow
def test_six_hospitals_of_one_consortium_file_go_on_after_their_server_was_killed(
    federation: Federation,
) -> None:
    """Sizes from 9000 to 40, text, dates and missing values; sites run no code of a job."""
    require = ["unit=sample", "total-epsilon=1"]
    folder = federation.start("consortium.py", str(federation.folder), require=require)
    federation.submit(folder)
    federation.wait_until(lambda: min(federation.count_releases()) >= 75)
    # NVFlare's own script restarts the server.
    federation.kill("nvflare.private.fed.app.server")
    assert max(federation.count_releases()) < 100
    server = federation.find_corn("server")
    kept = np.load(server / "parameters.npy")
    federation.wait_for_end(federation.submit(folder))
    # What was spent stays spent, and the rest of the budget was used.
    assert federation.count_releases() == [100] * SITES
    # At most 25 steps are left after the kill: from the first model, they would not come as near.
    final = np.load(server / "parameters.npy")
    assert 0 < np.linalg.norm(final - kept) < 0.5 * np.linalg.norm(final)
    corn = (sys.executable, "-m", "corn")
    models = {
        (federation.find_corn(f"site-{site + 1}") / "model.pt").read_bytes()
        for site in range(SITES)
    }
    assert len(models) == 1
    for party in ("server", "site-5"):
        model = str(federation.find_corn(party))
        found = federation.run(*corn, "predict", model, str(server / "public.csv"), "--json")
        result, _ = json.JSONDecoder().raw_decode(found)
        assert result["promise"]["epsilon"] == 1
        assert result["promise"]["simulation"] == ""
        assert result["scores"]["accuracy"] > 0.8
    federation.run(*corn, "export", model, "--to", "json", "--out", "model.json")
    federation.run(*corn, "report", model, "--keys", model, "--out", "report.html")
    # A job with code of its own is refused by every site, whoever submits it.
    folders = ("--job", "other", "--sites", "other-sites")
    federation.run(sys.executable, str(EXAMPLES / "steps.py"), *folders)
    other = federation.submit(federation.folder / "other" / "corn_steps")
    assert "COMPLETED" not in federation.wait_for_end(other)
    logs = [federation.startup / f"site-{site + 1}" / "log.txt" for site in range(SITES)]
    assert not any("make_problem" in log.read_text() for log in logs)
