"""``corn advise``: propose clip, batches, steps and step sizes without looking at data."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import replace

import typer

from corn import learn
from corn.checks import require
from corn.cli.options import COLLUDERS, JSON, REQUIRED, option, read_numbers
from corn.cli.output import print_json, print_note, print_result, working
from corn.covariance import DEFAULT_THREAT, EAVESDROPPER, ThreatModel
from corn.learn.datasets import WorkloadName
from corn.plan.advice import USUAL_CLIPS, Proposal, TrainingScale, propose
from corn.privacy import Unit
from corn.privacy.rounding import write_exactly
from corn.topology import Network, load_network

_PLAN = "plan.corn"
# Between the linear models of the built-in tasks and small networks.
_USUAL_PARAMETERS = 10_000


def advise(
    *,
    agents: int = option("Number of agents.", default=REQUIRED, min=1),
    epsilon: float = option("ε of the whole run.", default=REQUIRED),
    delta: float = option("δ of the whole run.", default=1e-5),
    unit: Unit = option(
        "Protected unit: one sample, or an agent's whole data set.", default="sample"
    ),
    samples: str | None = option(
        "Number of samples of an agent to train on, which is public, or one for each agent, "
        "separated by commas. (Default: the task's.)",
        metavar="COUNT[,COUNT…]",
    ),
    task: WorkloadName | None = option("Built-in task, for its numbers of parameters and samples."),
    parameters: int | None = option(
        f"Number of parameters of the model. (Default: the task's; {_USUAL_PARAMETERS:,} without a "
        "task.)",
        min=1,
    ),
    clip: float | None = option(
        "Largest norm C of a clipped gradient. (Default: 1; unit agent: 0.1.)"
    ),
    colluders: int | None = COLLUDERS,
    json: bool = JSON,
) -> None:
    """Propose clip, batches, steps and step sizes, and print commands that use them."""
    # A random regular graph mixes fast with few links; very few agents can all be linked.
    graph = f"regular:n={agents},degree=4,seed=1" if agents > 5 else f"complete:{agents}"
    network = load_network(graph)
    if task is not None and parameters is not None:
        raise typer.BadParameter("give --task or --parameters, not both: a task has its own number")
    num_parameters = parameters or _USUAL_PARAMETERS
    if task is not None:
        # The built-in data sets are public, so their sizes may be looked at.
        problem = learn.Workload(task).build(agents)
        num_parameters = problem.task.num_parameters
        samples = samples or ",".join(map(str, problem.data.sizes))
    if samples is None:
        raise typer.BadParameter("give a public number of --samples of an agent")
    sizes = read_numbers("--samples", samples, int)
    require(len(sizes) in (1, agents), "--samples", f"one number or {agents}", len(sizes))
    require(min(sizes) > 0, "--samples", "at least 1", min(sizes))
    scale = TrainingScale(
        num_agents=agents,
        # One rate for all: agents draw in proportion to their samples, and the mean decides.
        samples=max(1, round(sum(sizes) / len(sizes))),
        num_parameters=num_parameters,
        epsilon=epsilon,
        delta=delta,
        unit=unit,
        clip=USUAL_CLIPS[unit] if clip is None else clip,
    )
    # A single agent has nobody inside the network to fear.
    usual = EAVESDROPPER if agents == 1 else DEFAULT_THREAT
    with working("comparing settings"):
        threat = usual if colluders is None else ThreatModel(colluders)
        proposal = propose(network, scale, threat=threat)
    if scale.unit == "sample":
        # The batch of the largest agent at the common rate: agents with fewer samples than the
        # plan counts on are accepted.
        chosen = proposal.prospect
        size = math.ceil(chosen.batch_size * max(sizes) / scale.samples)
        budget = replace(proposal.budget, batch_size=size, samples_per_agent=max(sizes))
        # Step sizes are for gradients divided by the batch size.
        step_size = chosen.step_size * size / chosen.batch_size
        chosen = replace(chosen, batch_size=size, step_size=step_size)
        proposal = replace(proposal, budget=budget, prospect=chosen)
    commands = _write_commands(scale, proposal, network.source, task)
    _print(scale, proposal, network, threat, commands, sizes, as_json=json)
    if task is None and parameters is None:
        # The number of parameters decides how much noise a step has.
        print_note(
            f"this advice assumes a model of {_USUAL_PARAMETERS:,} parameters; --parameters or "
            "--task sets the number"
        )


def _write_commands(
    scale: TrainingScale, proposal: Proposal, graph: str, task: str | None
) -> list[str]:
    """Return commands that run as they are; those that train need a built-in task."""
    prospect = proposal.prospect
    promise: list[object] = ["--graph", graph, "--unit", scale.unit]
    promise += ["--epsilon", write_exactly(scale.epsilon)]
    promise += ["--delta", write_exactly(scale.delta), "--steps", prospect.num_steps]
    promise += ["--clip", write_exactly(scale.clip)]
    # For the agent unit the batch size does not affect privacy, and corn plan refuses it.
    batches: list[object] = ["--batch-size", prospect.batch_size]
    samples: list[object] = []
    if scale.unit == "sample":
        samples = [*batches, "--samples-per-agent", proposal.budget.samples_per_agent]
        batches = []
    plan = ["corn", "plan", *promise, *samples, "--out", _PLAN]
    commands: list[list[object]] = [[*plan], ["corn", "verify", _PLAN]]
    if task is not None:
        commands.insert(0, ["corn", "train", "--task", task, *promise, *samples, *batches])
        launch = ["corn", "launch", _PLAN, "--task", task, *batches, "--step-size"]
        # The distance D is a guess, so a second digit would mean nothing.
        rounded = write_exactly(float(f"{prospect.step_size:.1g}"))
        commands.append([*launch, rounded, "--out", "out/run"])
    return [shlex.join(map(str, command)) for command in commands]


def _print(
    scale: TrainingScale,
    proposal: Proposal,
    network: Network,
    threat: ThreatModel,
    commands: Sequence[str],
    sizes: Sequence[int],
    *,
    as_json: bool,
) -> None:
    prospect, budget = proposal.prospect, proposal.budget
    facts = {
        "graph": network.source,
        "num_agents": scale.num_agents,
        "samples": scale.samples,
        "expected_batches": [prospect.batch_size * size / max(sizes) for size in sizes],
        "num_parameters": scale.num_parameters,
        "promise": budget.describe(),
        "adversary": threat.describe(),
        "clip": scale.clip,
        "batch_size": prospect.batch_size,
        "sampling": budget.sampling,
        "sampling_rate": budget.query.sampling_rate,
        "num_steps": prospect.num_steps,
        "step_size": prospect.step_size,
        "precision_cap": budget.precision_cap,
        "noise_variance_of_average": prospect.noise_variance,
        "excess": prospect.excess,
        "mixing": network.mixing,
        "central_ratio": proposal.central_ratio,
        "prospects": [vars(own) for own in proposal.prospects],
    }
    if as_json:
        print_json({**facts, "commands": commands})
        return
    shown = {
        **facts,
        "step_size": f"about {prospect.step_size:.1g}; corn train searches for it on public data",
        "excess": None,
        "noise_in_the_average": f"{proposal.central_ratio:.3g} × a trusted server's variance",
    }
    print_result(f"advice for {scale.num_agents} agents", shown, as_json=False)
    # Not in a table, which would break the lines.
    typer.echo("\n".join(["Commands:", *commands]))
