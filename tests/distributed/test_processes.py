"""Agents are killed, suspended, cut off and restarted; the rest follow the policy on dropout."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from corn.covariance import ThreatModel
from corn.distributed import launcher
from corn.distributed.keyring import load_credentials, make_keys
from corn.distributed.launcher import (
    AgentProcesses,
    LaunchResult,
    merge_results,
    preloaded_context,
    raise_common_failure,
)
from corn.distributed.rendezvous import join_store
from corn.distributed.results import RunStatus, StopReason
from corn.distributed.settings import RunSettings
from corn.distributed.storage import Folders, read_model
from corn.errors import CornError
from corn.learn.schedule import Constant
from corn.plan import Plan, save_plan
from corn.topology import Gossip

from . import ledger_script
from .harness import (
    WORKLOAD,
    Fault,
    Forked,
    failures,
    finished,
    is_alive,
    run_corn,
    run_processes,
    send_signal,
    small_plan,
)

NUM_STEPS = 60
PLAN = small_plan("ring:5", NUM_STEPS, mechanism="decor", threat=ThreatModel())
SETTINGS = RunSettings(Constant(0.2), batch_size=16, timeout=30, evaluate_at=(0,))
# The others wait so long for a suspended agent: longer than a busy machine pauses a process.
SHORT_TIMEOUT = 6
LOST = 2


def test_the_rest_continue_when_one_is_killed(tmp_path: Path) -> None:
    results = run_processes(PLAN, tmp_path, SETTINGS, faults=[Fault(LOST, 20)])
    assert failures(results) == {LOST: "ended"}
    assert set(finished(results)) == {0, 1, 3, 4}
    for own in finished(results).values():
        assert (own.status, own.num_steps) == (RunStatus.PARTIAL, NUM_STEPS)
        assert set(own.lost) == {LOST}
        notes = "\n".join(own.notes)
        assert "was left out without agent 2" in notes
        assert "for 4 agents from step" in notes
    plans = {
        next(text for text in own.notes if text.startswith("new plan"))
        for own in finished(results).values()
    }
    assert len(plans) == 1
    for agent in (1, 3):
        assert "agent 2 closed its connection at step" in "\n".join(results[agent].notes)


@pytest.mark.slow
def test_the_last_survivor_stops(tmp_path: Path) -> None:
    plan = small_plan("complete:4", 60, mechanism="decor", threat=ThreatModel())
    results = run_processes(plan, tmp_path, SETTINGS, faults=[Fault(a, 20) for a in (1, 2, 3)])
    (own,) = finished(results).values()
    assert (own.status, own.stop.reason) == (RunStatus.INTERRUPTED, StopReason.LOSS)
    assert 20 <= own.num_steps < 25
    assert "no neighbour is left" in results[0].notes[-1]
    problem = WORKLOAD.build(4)
    folders = Folders.of_run(tmp_path)
    result = merge_results(plan, problem, results, folders, SETTINGS)
    launched = LaunchResult(plan, problem, results, result, folders, tmp_path / "keys")
    assert launched.status is RunStatus.INTERRUPTED
    for agent, why in launched.lost.items():
        assert 20 <= own.lost[agent] < 25
        assert why == f"agent {agent}: ended by SIGKILL"
        assert why in result.notes
    assert set(launched.lost) == {1, 2, 3}


def test_survivors_of_chebyshev_rounds_agree_after_the_cool_down(tmp_path: Path) -> None:
    plan = small_plan(
        "ring:5",
        NUM_STEPS,
        mechanism="decor",
        threat=ThreatModel(),
        gossip=Gossip(3, "chebyshev"),
        cooldown_steps=30,
    )
    results = run_processes(plan, tmp_path, SETTINGS, faults=[Fault(LOST, 20)])
    assert set(finished(results)) == {0, 1, 3, 4}
    folders = Folders.of_run(tmp_path)
    models = torch.stack(
        [read_model(folders.of_agent(a).shared, NUM_STEPS, plan) for a in finished(results)]
    )
    # 30 steps of 3 rounds on the path of survivors leave nothing of disagreement but rounding.
    assert torch.isfinite(models).all()
    assert (models - models.mean(dim=0)).norm() < 1e-3 * models.norm()


def test_all_stop_together_when_one_is_killed(tmp_path: Path) -> None:
    settings = replace(SETTINGS, on_dropout="stop")
    results = run_processes(PLAN, tmp_path, settings, faults=[Fault(LOST, 20)])
    ends = {(own.status, own.num_steps, own.stop) for own in finished(results).values()}
    assert len(ends) == 1, failures(results)
    status, steps, stop = ends.pop()
    assert status is RunStatus.INTERRUPTED
    assert (stop.agent, stop.reason) == (LOST, StopReason.LOSS)
    for agent in (0, 1, 3, 4):
        folder = Folders.of_run(tmp_path).of_agent(agent).private
        assert (folder / f"checkpoint-{steps}.corn").exists()
        assert (folder / "metrics.csv").exists()


@pytest.mark.slow
def test_a_suspended_agent_times_out_and_ends_when_it_wakes(tmp_path: Path) -> None:
    brake = tmp_path / "brake"
    brake.touch()

    def wake(processes: AgentProcesses) -> None:
        progress = processes.states.get(0)
        if progress is not None and progress.step > 10:
            send_signal(processes, LOST, signal.SIGCONT)
        if LOST in processes.results:
            brake.unlink(missing_ok=True)

    results = run_processes(
        PLAN,
        tmp_path,
        replace(SETTINGS, timeout=SHORT_TIMEOUT),
        faults=[Fault(LOST, 5, signal.SIGSTOP)],
        brake=brake,
        on_poll=wake,
    )
    for agent in (1, 3):
        notes = "\n".join(results[agent].notes)
        assert f"agent 2 sent nothing for {SHORT_TIMEOUT} s (time-out) at step" in notes
    assert results[LOST].stop.reason is StopReason.LOSS
    assert {own.num_steps for a, own in results.items() if a != LOST} == {NUM_STEPS}


@pytest.mark.slow
def test_a_suspended_agent_that_never_wakes_is_ended(tmp_path: Path) -> None:
    settings = replace(SETTINGS, timeout=SHORT_TIMEOUT, on_dropout="stop")
    results = run_processes(PLAN, tmp_path, settings, faults=[Fault(LOST, 20, signal.SIGSTOP)])
    stops = {(own.stop.agent, own.stop.reason) for own in finished(results).values()}
    assert stops == {(LOST, StopReason.LOSS)}
    assert failures(results) == {LOST: "suspended"}


@pytest.mark.slow
def test_a_suspension_of_all_agents_does_not_end_them_at_a_later_loss(tmp_path: Path) -> None:
    """It lasts longer than half the time-out: links hold, but agents may have been lost."""
    brake = tmp_path / "brake"
    brake.touch()

    def pause_all(processes: AgentProcesses) -> None:
        if brake.exists() and len(processes.states) == 3:
            for number in (signal.SIGSTOP, signal.SIGCONT):
                for agent in range(3):
                    send_signal(processes, agent, number)
                if number == signal.SIGSTOP:
                    time.sleep(0.6 * settings.timeout)
            brake.unlink()

    plan = small_plan("ring:3", 100, mechanism="decor", threat=ThreatModel())
    settings = replace(SETTINGS, timeout=10)
    faults = [Fault(LOST, 60)]
    results = run_processes(plan, tmp_path, settings, faults=faults, brake=brake, on_poll=pause_all)
    assert not brake.exists()
    assert failures(results) == {LOST: "ended"}
    assert {own.num_steps for own in finished(results).values()} == {100}


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [(0, 1), (1,)], ids=["both", "one"])
def test_a_signal_stops_the_agents_that_get_it(stopped: Sequence[int], tmp_path: Path) -> None:
    agents, _ = start_one_by_one(tmp_path, [0, 1])
    try:
        wait_for_tables(tmp_path / "out", 2)
        for agent in stopped:
            agents[agent].send_signal(signal.SIGINT)
        for agent in stopped:
            process = agents[agent]
            assert process.wait() == 130, process.stderr
            assert f"agent {agent}: interrupted: step" in process.stderr
            assert "--resume continues from the newest checkpoint" in process.stderr
        if stopped == (1,):
            # To the other one it is a lost agent, and no third one is left.
            assert agents[0].wait() == 1, agents[0].stderr
            assert "loss (agent 1)" in agents[0].stderr
    finally:
        for process in agents:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_first_step_ends_an_agent_that_waits(
    number: signal.Signals, tmp_path: Path
) -> None:
    (process,), port = start_one_by_one(tmp_path, [0])
    try:
        own = load_credentials(tmp_path / "keys", 1, 2)
        store = join_store(("127.0.0.1", port), own, timeout=60)
        while store.get(["join/0"], 1.0) == [None]:
            pass
        store.close()
        process.send_signal(number)
        assert process.wait() == 130
        assert process.stderr.endswith(
            "\ncorn: agent 0: interrupted before the first step, nothing was released\n"
        )
    finally:
        process.kill()


@pytest.mark.slow
def test_an_agent_handles_signals_while_its_neighbour_is_silent(tmp_path: Path) -> None:
    agents, _ = start_one_by_one(tmp_path, [0, 1])
    stopped, waiting = agents
    try:
        wait_for_tables(tmp_path / "out", 2)
        stopped.send_signal(signal.SIGSTOP)
        time.sleep(0.5)
        assert "all releases of this data before this run: ε = 0;" in waiting.stderr
        waiting.send_signal(signal.SIGINT)
        time.sleep(1.2)  # signals within a second are one request
        assert waiting.process.is_alive()
        waiting.send_signal(signal.SIGINT)
        assert waiting.wait() == 128 + signal.SIGINT
    finally:
        for process in agents:
            process.kill()


def test_signals_are_handled_without_a_reader_of_stderr_and_repeats_count_once() -> None:
    with preloaded_context() as context:
        ours, theirs = context.Pipe()
        process = context.Process(target=listen_without_stderr, args=(theirs,), daemon=True)
        process.start()
    theirs.close()
    assert process.pid is not None
    try:
        assert ours.recv() == "listens"
        os.kill(process.pid, signal.SIGINT)
        assert ours.recv() == "asked"
        os.kill(process.pid, signal.SIGTERM)
        time.sleep(0.5)
        assert process.is_alive()
        ours.send("a second request may come")
        assert ours.recv() == "ready"
        os.kill(process.pid, signal.SIGTERM)
        process.join(60)
        assert process.exitcode == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.join()


def listen_without_stderr(connection: Connection) -> None:
    """Handle signals as an agent does, as one request until a message comes."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 2)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "_SECONDS_OF_ONE_REQUEST", 1000.0)
        asked = launcher.listen_for_signals()
        connection.send("listens")
        while not asked.requested:
            time.sleep(0.01)
        connection.send("asked")
        connection.recv()
        patch.setattr(launcher, "_SECONDS_OF_ONE_REQUEST", 0.0)
        connection.send("ready")
        time.sleep(60)


def start_one_by_one(folder: Path, agents: Sequence[int]) -> tuple[list[Forked], int]:
    """Start some agents of a plan for two; return them and the port of their store."""
    save_plan(small_plan("path:2", 100_000), folder / "plan.corn")
    make_keys(folder / "keys", 2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = ["agent", "plan.corn", "--keys", "keys", "--task", "breast-cancer"]
    command += ["--timeout", "60", "--store", f"127.0.0.1:{port}", "--agent"]
    return [Forked(folder, run_corn, *command, str(agent)) for agent in agents], port


@pytest.mark.slow
def test_survivors_that_are_cut_apart_go_on_in_their_components(tmp_path: Path) -> None:
    results = run_processes(
        small_plan("path:5", NUM_STEPS), tmp_path, SETTINGS, faults=[Fault(LOST, 20)]
    )
    for agent in (0, 1, 3, 4):
        assert "for 2 agents from step" in "\n".join(results[agent].notes)
        assert results[agent].num_steps == NUM_STEPS


@pytest.mark.slow
def test_a_restart_repeats_no_release_and_keeps_the_budget(tmp_path: Path) -> None:
    settings, plan = replace(SETTINGS, checkpoint_every=10), small_plan("ring:3", 200)
    copies = []
    for turn in range(3):
        resumed = replace(settings, resume=turn > 0)
        faults = [Fault(agent, 30 + 30 * turn) for agent in range(3)] if turn < 2 else []
        results = run_processes(plan, tmp_path, resumed, faults=faults)
        copies.append(tmp_path / f"ledgers-{turn}")
        shutil.copytree(tmp_path / "keys", copies[-1])
    ends = {(own.first_step, own.num_steps) for own in finished(results).values()}
    assert len(ends) == 1
    first, last = ends.pop()
    assert first > 0
    assert first % 10 == 0
    # Two crashes cost redone steps and up to a block of reserved ones each: the run ends early.
    assert last < 200
    assert "ledger allows" in "\n".join(results[0].notes)
    spent = ledger_script.check(200, copies)
    assert max(counts[-1] for counts in spent.values()) == 200


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        # Agent 1 cannot tell the others, which time out; whichever failure comes first is reported.
        ("key", r"no message \(join\) from agent 1 within 8 s|agent-1\.key: cannot be read"),
        ("plan", "agents differ in the plan's fingerprint: agent 1 has"),
        ("checkpoint", r"agent 1: .*checkpoint-100\.corn: not a checkpoint, or a damaged one"),
        ("data", "agents differ in the data: agent 1 has breast-cancer, iid, seed 7;"),
        ("no plan", r"^agent 1: .*none\.corn: no such file"),
    ],
)
def test_a_run_that_cannot_start_fails_with_one_line(
    spoil: str, message: str, tmp_path: Path
) -> None:
    plan, plans, settings = small_plan("ring:3", 200), {}, dict.fromkeys(range(3), SETTINGS)
    out, workloads = tmp_path / "run", dict.fromkeys(range(3), WORKLOAD)
    if spoil == "key":
        run_processes(plan, out, SETTINGS, agents=[])
        (out / "keys" / "agent-1.key").unlink()
        settings = dict.fromkeys(range(3), replace(SETTINGS, timeout=8))
    elif spoil == "plan":
        plans[1] = save(small_plan("ring:3", 201), tmp_path / "other.corn")
    elif spoil == "checkpoint":
        settings = dict.fromkeys(range(3), replace(SETTINGS, resume=True))
        folder = Folders.of_run(out).of_agent(1).private
        folder.mkdir(parents=True)
        (folder / "checkpoint-100.corn").write_bytes(b"nonsense")
    elif spoil == "data":
        workloads[1] = replace(WORKLOAD, seed=7)
    else:
        plans[1] = tmp_path / "none.corn"
    results = run_processes(plan, out, settings, plans=plans, workload=workloads)
    assert not finished(results)
    assert len(failures(results)) == 3
    with pytest.raises(CornError, match=message):
        raise_common_failure(results)


# Several launches by one process, as imports take seconds in each.
LAUNCHES = """
import sys
from corn.cli import run_command

for folder in ("first", "second", "third"):
    sys.argv = ["corn", "launch", "plan.corn", "--task", "breast-cancer", "--out", folder]
    try:
        run_command()
    except SystemExit as end:
        print("exit code", end.code, flush=True)
"""


@pytest.mark.slow
def test_agents_of_a_launch_stop_together_and_never_outlive_it(tmp_path: Path) -> None:
    """A terminal or a scheduler signals the process that forks agents, too: it must not end."""
    save_plan(small_plan("path:2", 100_000), tmp_path / "plan.corn")
    with (
        (tmp_path / "stderr").open("wb") as stderr,
        subprocess.Popen(
            [sys.executable, "-c", LAUNCHES],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        ) as process,
    ):
        try:
            check_ctrl_c_soon_after_the_start(process, tmp_path / "stderr")
            check_signal_to_all_processes(process, tmp_path / "second")
            check_no_agent_outlives_the_launcher(process, tmp_path / "third")
        finally:
            process.kill()


def check_ctrl_c_soon_after_the_start(process: subprocess.Popen[bytes], stderr: Path) -> None:
    deadline = time.monotonic() + 120
    while not any(map(is_fork_server, descendants(process.pid))):
        assert time.monotonic() < deadline, "no fork server"
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    assert read_exit_code(process) == 130
    # Whether agents have begun to train by then depends on the machine.
    written = stderr.read_text(encoding="utf-8")
    *_, last = written.splitlines()
    assert last.startswith("corn: "), written
    assert "interrupted" in last
    assert "Traceback" not in written


def check_signal_to_all_processes(process: subprocess.Popen[bytes], out: Path) -> None:
    wait_for_tables(out, 2)
    os.killpg(process.pid, signal.SIGTERM)
    assert read_exit_code(process) == 130
    summary = json.loads((out / "shared/run.json").read_text(encoding="utf-8"))
    assert summary["status"] == "interrupted"
    assert not summary.get("lost")


def check_no_agent_outlives_the_launcher(process: subprocess.Popen[bytes], out: Path) -> None:
    wait_for_tables(out, 2)
    children = list(descendants(process.pid))
    assert len(children) >= 2
    os.kill(children[-1], signal.SIGSTOP)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while any(map(is_alive, children)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, children))


def read_exit_code(process: subprocess.Popen[bytes]) -> int:
    """Return the exit code of the next launch that ends."""
    assert process.stdout is not None
    line = next(line for line in process.stdout if line.startswith(b"exit code"))
    return int(line.split()[-1])


def is_fork_server(pid: int) -> bool:
    with suppress(OSError):
        return b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def wait_for_tables(folder: Path, num_agents: int) -> None:
    deadline = time.monotonic() + 180
    while len(list(folder.glob("shared/agent-*/metrics.csv"))) < num_agents:
        assert time.monotonic() < deadline, "agents do not start"
        time.sleep(0.1)


def descendants(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text(encoding="ascii").split()):
            yield child
            yield from descendants(child)


def save(plan: Plan, path: Path) -> Path:
    save_plan(plan, path)
    return path
