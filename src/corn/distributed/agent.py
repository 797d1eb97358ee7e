"""``python -m corn.distributed.agent``: one agent of a workload in this process, for torchrun.

Example: ``torchrun --nnodes 2 --nproc-per-node 2 … -m corn.distributed.agent --plan plan.corn
--keys keys --task breast-cancer``. The agent's number is the rank. Without torchrun, ``--agent 3
--agents 4 --store 10.0.0.1:29500`` says the same, and agent 0 opens the store.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # failures are told in one line

from corn.distributed.agent_run import AgentResult, Reports
from corn.distributed.child import find_plan
from corn.distributed.launching import parse_address
from corn.distributed.meeting import join
from corn.distributed.planning import read_request
from corn.distributed.running import preparing, run_problem
from corn.distributed.settings import DropoutPolicy, RunSettings
from corn.distributed.signals import listen_for_signals
from corn.errors import CornError, make_printable
from corn.learn.names import MODELS, USUAL_BATCH_SIZE, WORKLOADS, usual_schedule
from corn.learn.schedule import ScheduleName, make_schedule
from corn.learn.workloads import Workload, select_agent
from corn.plan import Plan
from corn.threads import limit_threads


def main(arguments: list[str] | None = None) -> int:
    """Run the agent; expected failures are one line on stderr and exit code 1."""
    options = _parser().parse_args(arguments)
    limit_threads()
    try:
        _run(options)
    except CornError as error:
        sys.stderr.write(f"corn: {error}\n")
        return 1
    except KeyboardInterrupt:  # before it listens
        return 130
    return 0


def _run(options: argparse.Namespace) -> None:
    settings, workload = _make_settings(options), _make_workload(options)
    interruption = listen_for_signals()
    meeting = join(
        timeout=settings.timeout,
        store=None if options.store is None else parse_address(options.store),
        agent=options.agent,
        num_agents=options.agents,
        interruption=interruption,
    )
    with preparing(meeting):
        request = None if options.request is None else read_request(options.request)
        plan, settings = find_plan(
            meeting, options.plan, request, options.neighbours, settings, options.out
        )
        if settings.batch_size is None:
            settings = replace(settings, batch_size=plan.budget.batch_size or USUAL_BATCH_SIZE)
        problem = workload.build(meeting.num_agents)
    result = run_problem(
        plan,
        select_agent(problem, meeting.agent),
        meeting=meeting,
        keys=options.keys,
        out=options.out,
        settings=settings,
        reports=Reports(
            on_note=lambda text: _say(meeting.agent, text),
            interruption=interruption,
            on_private_note=lambda text: _say(meeting.agent, f"private, do not hand out: {text}"),
        ),
        data=workload.describe(problem),
    )
    _say(result.agent, _describe(result, plan))


def _describe(result: AgentResult, plan: Plan) -> str:
    """How the run ended, and what it promised to whom, in one line."""
    last, why = result.rows[-1], f" ({result.stop})" if result.stop else ""
    lost = "".join(f", without agent {who} from step {s} on" for who, s in result.lost.items())
    return (
        f"{result.status} after {result.num_steps} steps{why}{lost}, "
        f"test loss {last['test_loss']:.4g}, {result.seconds_waited:.1f} s waited; ε spent "
        f"{last['epsilon']:.4g} of {plan.budget.describe()}, against {plan.threat.describe()}"
    )


def _make_settings(options: argparse.Namespace) -> RunSettings:
    return RunSettings(
        make_schedule(options.step_size, options.schedule or usual_schedule(options.task)),
        num_steps=options.steps,
        batch_size=options.batch_size,
        seed=options.seed,
        on_dropout=options.on_dropout,
        timeout=options.timeout,
        checkpoint_every=options.checkpoint_every,
        resume=options.resume,
    )


def _make_workload(options: argparse.Namespace) -> Workload:
    return Workload(
        options.task,
        options.model,
        options.partition,
        options.data_seed,
        options.l2,
        options.cache,
        options.stand_in,
    )


def _say(agent: int, text: str) -> None:
    sys.stderr.write(f"agent {agent}: {make_printable(text)}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m corn.distributed.agent", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--plan", type=Path, help="the plan that all agents hold")
    what.add_argument("--request", type=Path, help="what to plan together, instead of a plan")
    add("--neighbours", type=_numbers, default=(), help="with --request: this agent's, 1,4,7")
    add("--keys", type=Path, required=True, help="folder of agent-I.key and roster.json")
    add("--task", choices=WORKLOADS, required=True, help="what to learn")
    add("--model", choices=MODELS, help="what to train")
    add("--partition", default=Workload.partition, help="how samples are dealt out")
    add("--data-seed", type=int, default=Workload.seed, help="of split and partition")
    add("--l2", type=float, default=Workload.l2, help="penalty of linear models")
    add("--no-stand-in", dest="stand_in", action="store_false", help="refuse an absent data set")
    add("--cache", type=Path, help="where data sets are kept")
    add(
        "--out", type=Path, default=Path("out"), help="folder of the run: shared/ may be handed out"
    )
    add("--step-size", type=float, default=0.1, help="first step size")
    add("--schedule", choices=get_args(ScheduleName), help="how step sizes go on")
    add("--batch-size", type=int, help=f"by default the plan's, or {USUAL_BATCH_SIZE}")
    add("--steps", type=int, default=None, help="fewer steps than planned")
    add("--seed", type=int, default=0, help="of the initial models; public")
    add("--on-dropout", choices=get_args(DropoutPolicy), default=RunSettings.on_dropout)
    add(
        "--timeout", type=float, default=RunSettings.timeout, help="seconds of silence that give up"
    )
    add("--checkpoint-every", type=int, default=RunSettings.checkpoint_every, help="steps")
    add("--resume", action="store_true", help="go on from what all agents have")
    add("--agent", type=int, help="without torchrun: this agent's number")
    add("--agents", type=int, help="without torchrun: how many there are")
    add("--store", help="without torchrun: HOST:PORT where agents meet; agent 0 opens it")
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"must be numbers with commas, as 1,4,7, found {text!r}"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
