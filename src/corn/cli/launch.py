"""``corn launch``: run all agents of a plan as processes on this machine."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from corn import distributed, learn
from corn.cli.agent import RunOptions, read_plan
from corn.cli.learning import MODEL_FILE, LearningOptions, write_run
from corn.cli.options import JSON, argument, in_agents, option, read_configuration
from corn.cli.output import (
    collect_sampling,
    describe_average,
    describe_outcome,
    print_json,
    print_line,
    print_note,
    print_result,
)
from corn.distributed.logs import PRIVATE_MARK
from corn.plan import fingerprint
from corn.privacy.rounding import round_up_range

# Left out of run.json, which is shared: they reveal other runs, folders and hosts of the owner.
_OWNERS_OPTIONS = ("require", "other_keys", "status")


def launch(
    context: typer.Context,
    plan: Path = argument("The plan, or the consortium file it was made from."),
    *,
    learning: LearningOptions,
    run: RunOptions,
    keys: Path | None = in_agents(
        "Folder of keys, ledgers and roster.json; never publish it. Keys are made if it has none. "
        "(Default: PLAN.keys beside the plan.)",
        envvar="CORN_KEYS",
    ),
    out: Path = option(
        "Folder of the run. Publish its folder shared, never private.", default=Path("out/launch")
    ),
    json: bool = JSON,
) -> None:
    """Run all agents of a plan as processes on this machine."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # failures are reported in one line
    source, plan, consortium = read_plan(context, plan, learning)
    launched = distributed.launch(
        plan,
        run.make_workload(learning, consortium, source.network.agent_names),
        out=out,
        settings=run.make_settings(learning, source.budget, consortium),
        keys=keys or plan.with_suffix(".keys"),
        requirements=run.make_requirements(),
        status=run.status_address,
    )
    if launched.made_keys:
        print_note(
            f"made keys for all agents in {launched.keys}, which is safe on one machine only; "
            "agents that do not trust each other make their own with corn keys make"
        )
    model = _average_models(launched)
    facts = _collect_facts(read_configuration(context), launched, model)
    folders = launched.folders
    rows = launched.measured.rows
    write_run(rows, facts, folders.shared, learn.SHARED_COLUMNS, is_private=False)
    if model is not None:
        model.save(folders.shared / MODEL_FILE)
        print_note(f"wrote the model to {folders.shared / MODEL_FILE}: corn export {out}")
    title = f"{facts['task']}, {launched.plan.num_agents} agents on {facts['graph']}"
    least, most = rows[-1]["epsilon_least"], rows[-1]["epsilon"]
    if json:
        print_json(facts)
    else:
        names = [k for k in facts["measured"] if k.startswith(("test", "cons"))]
        if facts["mixing"] == "sum":  # all agents hold the average model
            names = [k for k in names if k in ("test_loss", "test_accuracy")]
        scores = {name: facts["measured"][name] for name in names}
        spent = f"{'simulated ' if facts['simulation'] else ''}ε spent"
        shown = {
            **facts,
            "measured": scores,
            spent: f"{round_up_range([least, most])} (unit {rows[-1]['unit']})",
            "agents_lost": ", ".join(facts["names"][agent] for agent in launched.lost) or "none",
            "lost": None,
            "notes": None,  # whole on stderr
        }
        print_result(title, shown, as_json=False)
    notes = dict.fromkeys(facts["notes"])
    if facts["simulation"] not in ("", *notes):
        notes[f"simulated ε: {facts['simulation']}"] = None
    # On stderr, as stdout may be published.
    notes |= dict.fromkeys(f"{PRIVATE_MARK}{own}" for own in launched.private_notes)
    for note in notes:
        print_note(note)
    print_note(f"publish {folders.shared}, but never {folders.private} or {launched.keys}")
    if not json:
        # The last line: what was reached, and at which privacy.
        print_line(
            describe_outcome(
                facts["measured"],
                most if launched.plan.budget.is_uniform else [least, most],
                launched.plan.budget,
                launched.plan.threat,
                (launched.plan.central_ratio, launched.plan.weighted_central_ratio),
                is_simulated=bool(facts["simulation"]),
            )
        )
    distributed.require_done(
        launched.finished.values(),
        launched.measured.num_steps,
        was_interrupted=launched.was_interrupted,
    )


def _average_models(launched: distributed.LaunchResult) -> learn.TrainedModel | None:
    """Return the average of the agents' final models; None if there is none that predicts."""
    models = launched.measured.parameters[0]
    finished = models[models.isfinite().all(dim=1)]
    if not len(finished):
        return None
    promise = learn.ModelPromise.of_plan(launched.plan, simulation=launched.problem.simulation)
    # Relative to the first, so that the average of equal models is that model to the bit.
    average = finished[0] + (finished - finished[0]).mean(dim=0)
    return learn.TrainedModel.from_problem(launched.problem, average, promise)


def _collect_facts(
    configuration: dict[str, object],
    launched: distributed.LaunchResult,
    model: learn.TrainedModel | None,
) -> dict[str, Any]:
    """Return the content of run.json: nothing computed from private data without noise."""
    plan, problem, last = launched.plan, launched.problem, launched.measured.rows[-1]
    quality = None
    # Scores on an agent's own samples are private.
    if model is not None and "test" in problem.public_parts:
        quality = model.measure(*problem.parts["test"])
    return {
        # Names of folders may describe the owner of the data, and limits its other runs.
        "configuration": {
            name: str(value).rpartition("/")[2] if isinstance(value, Path | str) else value
            for name, value in configuration.items()
            if name not in _OWNERS_OPTIONS
        },
        "task": problem.task.describe(),
        "plan": fingerprint(plan).hex(),
        "graph": plan.network.source,
        "num_agents": plan.num_agents,
        "names": plan.network.agent_names,
        "promise": f"{'simulated: ' if problem.simulation else ''}{plan.budget.describe()}",
        "simulation": problem.simulation,
        **collect_sampling(plan.budget),
        "adversary": plan.threat.describe(),
        "noise_in_the_average": describe_average(plan),
        "central_ratio": plan.central_ratio,
        "weighted_central_ratio": plan.weighted_central_ratio,
        "mixing": plan.network.mixing,
        "messages": plan.network.describe_mixing(plan.budget.num_steps, plan.cooldown_steps),
        "gossip": str(plan.network.gossip),
        "cooldown_steps": plan.cooldown_steps,
        "status": launched.status.value,
        "num_steps": launched.measured.num_steps,
        # NaN, which is not equal to itself, marks what was not measured.
        "measured": {k: last[k] for k in learn.SHARED_COLUMNS if last[k] == last[k]},
        "test_quality": None if quality is None else asdict(quality),
        "lost": {str(agent): why for agent, why in launched.lost.items()},
        "notes": list(launched.measured.notes),
        "agents": {str(agent): own.to_json() for agent, own in launched.finished.items()},
    }
