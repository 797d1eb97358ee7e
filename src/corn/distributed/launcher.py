"""Start all agents of a plan on this machine, watch them, and put their results together."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import Any, final

from corn.distributed.child import Order, run_child
from corn.distributed.progress_table import ProgressTable
from corn.distributed.recording import Progress
from corn.errors import CornError
from corn.learn.monitor import catch_interruption
from corn.threads import limit_threads

_SECONDS_BETWEEN_LOOKS = 0.2
_SECONDS_TO_END = 3.0
_PRELOADED = [
    "corn.distributed.child",
    "corn.distributed.warm_up",
    "corn.learn.workloads",
    "sklearn.datasets",
]


@dataclass(frozen=True)
class Ending:
    """How one agent ended.

    Attributes:
        summary: what it reported at its end; empty if it did not get there.
        failure: what it said when it failed, or what ended its process; empty if nothing did.
        notes: what it had noted on the way, if it did not get to a summary.
        private_notes: what it had noted for its owner alone.
        is_private: whether the failure, too, is for its owner alone, as it may tell of its data.
    """

    summary: Mapping[str, Any] = field(default_factory=dict)
    failure: str = ""
    notes: tuple[str, ...] = ()
    private_notes: tuple[str, ...] = ()
    is_private: bool = False

    def describe_failure(self, agent: int) -> str:
        """What others may read of the failure."""
        return f"agent {agent}: failed, and told its owner why" if self.is_private else self.failure


@dataclass(frozen=True)
class Outcome:
    """How all agents on this machine ended.

    Attributes:
        endings: by agent.
        seconds_to_start: until every agent had done its first step.
        was_interrupted: whether a person asked them to stop.
    """

    endings: Mapping[int, Ending]
    seconds_to_start: float
    was_interrupted: bool

    @property
    def finished(self) -> dict[int, Mapping[str, Any]]:
        """What the agents that came to an end reported."""
        return {agent: own.summary for agent, own in self.endings.items() if own.summary}

    @property
    def failures(self) -> dict[int, str]:
        """What went wrong with the others, in words that may be for their owner alone."""
        return {agent: own.failure for agent, own in self.endings.items() if own.failure}

    @property
    def missed(self) -> dict[int, int]:
        """Whom those that came to an end had lost, here or elsewhere, and since which step."""
        told = [item for own in self.finished.values() for item in own.get("lost", {}).items()]
        return {int(agent): step for agent, step in sorted(told, key=lambda item: -item[1])}

    @property
    def lost(self) -> dict[int, str]:
        """The agents that did not come to an end, here or elsewhere, why, and since which step.

        Anyone may read it.
        """
        missed, ends = self.missed, self.endings
        failures = {agent: ends[agent].describe_failure(agent) for agent in self.failures}
        return {
            agent: failures.get(agent, f"agent {agent}: lost on another host")
            + (f", missed by the others from step {missed[agent]} on" if agent in missed else "")
            for agent in sorted((failures.keys() | missed.keys()) - self.finished.keys())
        }


def run_agents(
    orders: Sequence[Order], *, num_steps: int, show_table: bool = True, show_private: bool = False
) -> Outcome:
    """Run every order in a process of its own until all have ended; none is left behind.

    Ctrl-C asks all of them to stop together after a few more steps; a second one ends them at once.
    With ``show_private`` the table has numbers computed from private data without noise, too.
    """
    crew = Crew(orders)
    try:
        with (
            catch_interruption() as interruption,
            ProgressTable(num_steps, show=show_table, show_private=show_private) as table,
        ):
            crew.start()
            while crew.is_running:
                crew.look(_SECONDS_BETWEEN_LOOKS)
                table.update(crew.progress, crew.describe_ends())
                if interruption.requested:
                    crew.ask_to_stop()
        return crew.outcome(was_interrupted=interruption.requested)
    finally:
        crew.end()


@final
class Crew:
    """The processes of agents, and what they said."""

    def __init__(self, orders: Sequence[Order]) -> None:
        self._orders = {order.agent: order for order in orders}
        self._processes: dict[int, ForkServerProcess] = {}
        self._lines: dict[int, Connection] = {}
        self._endings: dict[int, Ending] = {}
        self._notes: dict[int, list[str]] = {agent: [] for agent in self._orders}
        self._private_notes: dict[int, list[str]] = {agent: [] for agent in self._orders}
        self._stopped: dict[int, float] = {}
        self._began, self._all_stepped, self._asked = time.monotonic(), 0.0, False
        self.progress: dict[int, Progress] = {}

    @property
    def is_running(self) -> bool:
        """Whether any agent has not ended yet."""
        return len(self._endings) < len(self._orders)

    def start(self) -> None:
        """Start all processes, from one that has imported everything already."""
        limit_threads()
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # failures are told in one line
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        with _without_main():
            _start_forkserver()
            for agent, order in self._orders.items():
                self._start_one(context, agent, order)

    def look(self, seconds: float) -> None:
        """Wait for news, and take them in."""
        lines = {line: agent for agent, line in self._lines.items()}
        for ready in wait(list(lines), timeout=seconds):
            self._take(lines[ready])  # type: ignore[index]
        self._end_the_stopped()

    def ask_to_stop(self) -> None:
        """Ask all agents to stop together."""
        if not self._asked:
            self._asked = True
            for line in self._lines.values():
                with suppress(OSError):
                    line.send("stop")

    def send_signal(self, agent: int, number: int) -> None:
        """Send a signal to an agent's process, as a fault would."""
        pid = self._processes[agent].pid
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def describe_ends(self) -> dict[int, str]:
        """In a word, how agents ended."""
        return {agent: "lost" if own.failure else "done" for agent, own in self._endings.items()}

    def outcome(self, *, was_interrupted: bool) -> Outcome:
        """How all ended."""
        endings = {
            agent: replace(
                own,
                notes=tuple(self._notes[agent]),
                private_notes=tuple(self._private_notes[agent]),
            )
            for agent, own in sorted(self._endings.items())
        }
        return Outcome(endings, self._all_stepped, was_interrupted)

    def end(self) -> None:
        """End every process that is left: those that hear no more of us go by themselves."""
        for line in self._lines.values():
            line.close()
        deadline = time.monotonic() + _SECONDS_TO_END
        for process in self._processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()

    def _start_one(self, context: ForkServerContext, agent: int, order: Order) -> None:
        ours, theirs = context.Pipe()
        process = context.Process(target=run_child, args=(theirs, order), daemon=True)
        process.start()
        theirs.close()
        self._processes[agent], self._lines[agent] = process, ours

    def _take(self, agent: int) -> None:
        try:
            kind, content = self._lines[agent].recv()
        except (EOFError, OSError):
            self._close(agent)
            return
        if kind == "progress":
            self.progress[agent] = content
            if not self._all_stepped and len(self.progress) == len(self._orders):
                self._all_stepped = time.monotonic() - self._began
        elif kind == "note":
            self._notes[agent].append(content)
        elif kind == "private note":
            self._private_notes[agent].append(content)
        elif kind == "done":
            self._endings[agent] = Ending(content)
        elif kind == "failed":
            failure, is_private = content
            self._endings[agent] = Ending(failure=failure, is_private=is_private)

    def _close(self, agent: int) -> None:
        """An agent's line is dead, and so is the agent."""
        del self._lines[agent]
        if agent not in self._endings:
            self._processes[agent].join(_SECONDS_TO_END)
            code = self._processes[agent].exitcode
            self._endings[agent] = Ending(failure=f"agent {agent}: {describe_exit(code)}")

    def _end_the_stopped(self) -> None:
        """A process that was stopped cannot end by itself.

        Do it when no other runs any more, and it stood still for so long that it was given up.
        """
        left = [agent for agent in self._orders if agent not in self._endings]
        stopped = [agent for agent in left if is_stopped(self._processes[agent].pid)]
        now = time.monotonic()
        self._stopped = {agent: self._stopped.get(agent, now) for agent in stopped}
        for agent in stopped if stopped == left else []:
            pause = now - self._stopped[agent]
            if pause > self._orders[agent].settings.timeout:
                self._processes[agent].kill()
                self._endings[agent] = Ending(
                    failure=f"agent {agent}: was stopped {pause:.0f} s ago, and is ended now"
                )


def raise_common_failure(outcome: Outcome) -> None:
    """If no agent came to an end, say why: in the words of the first that has a reason of its own.

    Agents that could not start because of another say so and name it, or lost the store with it.
    """
    if outcome.finished:
        return
    texts = list(outcome.failures.values())
    borrowed = ("does not start, because agent", "the store where agents meet is gone")
    own = [text for text in texts if not any(part in text for part in borrowed)]
    raise CornError((own or texts or ["no agent was started"])[0])


def is_stopped(pid: int | None) -> bool:
    """Whether a process was stopped by a signal, as far as the system tells."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] in ("T", "t")


def describe_exit(code: int | None) -> str:
    """What a process's exit code says of its end."""
    if code is None or code >= 0:
        return f"ended without a word (exit code {code})"
    name = signal.Signals(-code).name
    if name == "SIGABRT":
        return "ended by SIGABRT: gloo does so when a message is far larger than agreed on"
    return f"ended by {name}"


def _start_forkserver() -> None:
    """Start the process that forks agents, deaf to SIGTERM.

    It ends with the launcher. A signal to all processes of a run must not end it before, and with
    it the agents, which stop together.
    """
    resource_tracker.ensure_running()  # whose own start would let signals through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _without_main() -> Iterator[None]:
    """Keep children from running this program's main script again, which takes seconds."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
