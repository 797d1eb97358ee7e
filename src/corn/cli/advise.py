"""``corn advise``: propose clip, batches, steps and step sizes without looking at data."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from typing import Annotated

import typer

from corn import learn
from corn.checks import require
from corn.cli.options import ColludersOption, JsonOption, read_numbers
from corn.cli.output import (
    Fact,
    format_count,
    print_note,
    print_result,
    working,
)
from corn.covariance import DEFAULT_THREAT, EAVESDROPPER, ThreatModel
from corn.learn.datasets import WorkloadName
from corn.plan.advice import USUAL_CLIPS, Proposal, TrainingScale, propose
from corn.privacy import Unit
from corn.privacy.rounding import write_exactly
from corn.topology import Network, load_network

EXAMPLE = "corn advise --samples 2800 --agents 20 --epsilon 1 --parameters 7850"

_PLAN = "plan.corn"
# Between the linear models of the built-in tasks and small networks.
_USUAL_PARAMETERS = 10_000


def advise(
    *,
    agents: Annotated[int, typer.Option(min=1, help="Number of agents.")],
    epsilon: Annotated[float, typer.Option(help="ε of the whole run.")],
    delta: Annotated[float, typer.Option(help="δ of the whole run.")] = 1e-5,
    unit: Annotated[
        Unit, typer.Option(help="Protected unit: one sample, or an agent's whole data set.")
    ] = "sample",
    samples: Annotated[
        str | None,
        typer.Option(
            metavar="COUNT[,COUNT…]",
            help="Number of samples of an agent to train on, which is public, or one for each "
            "agent, separated by commas. (Default: the task's.)",
        ),
    ] = None,
    task: Annotated[
        WorkloadName | None,
        typer.Option(help="Built-in task, for its numbers of parameters and samples."),
    ] = None,
    parameters: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of parameters of the model. "
            f"(Default: the task's; {_USUAL_PARAMETERS:,} without a task.)",
        ),
    ] = None,
    clip: Annotated[
        float | None,
        typer.Option(help="Largest norm C of a clipped gradient. (Default: 1; unit agent: 0.1.)"),
    ] = None,
    colluders: ColludersOption = None,
    json: JsonOption = False,
) -> None:
    """Propose clip, batches, steps and step sizes, and print commands that use them."""
    # A random regular graph mixes fast with few links; very few agents can all be linked.
    graph = f"regular:n={agents},degree=4,seed=1" if agents > 5 else f"complete:{agents}"
    network = load_network(graph)
    n = agents
    if task is not None and parameters is not None:
        raise typer.BadParameter("give --task or --parameters, not both: a task has its own number")
    # Noted after the result: the number of parameters decides how much noise a step has.
    is_assumed = task is None and parameters is None
    if task is not None:
        # The built-in data sets are public, so their sizes may be looked at.
        problem = learn.Workload(task).build(n)
        parameters = problem.task.num_parameters
        samples = samples or ",".join(map(str, problem.data.sizes))
    if samples is None:
        raise typer.BadParameter("give a public number of --samples of an agent")
    sizes = read_numbers("--samples", samples, int)
    require(len(sizes) in (1, n), "--samples", f"one number or {n}", len(sizes))
    require(min(sizes) > 0, "--samples", "at least 1", min(sizes))
    scale = TrainingScale(
        num_agents=n,
        # One rate for all: agents draw in proportion to their samples, and the mean decides.
        samples=max(1, round(sum(sizes) / len(sizes))),
        num_parameters=parameters or _USUAL_PARAMETERS,
        epsilon=epsilon,
        delta=delta,
        unit=unit,
        clip=USUAL_CLIPS[unit] if clip is None else clip,
    )
    # A single agent has nobody inside the network to fear.
    usual = EAVESDROPPER if n == 1 else DEFAULT_THREAT
    with working("comparing settings"):
        threat = usual if colluders is None else ThreatModel(colluders)
        proposal = propose(network, scale, threat=threat)
    learner = _list_options(task=task)
    commands = _write_commands(
        proposal, network.source, learner, largest=max(sizes), is_runnable=task is not None
    )
    _print(proposal, network, commands, sizes, as_json=json)
    if is_assumed:
        print_note(
            f"this advice assumes a model of {_USUAL_PARAMETERS:,} parameters; "
            "--parameters or --task sets the number"
        )


def _write_commands(
    proposal: Proposal, graph: str, learner: Sequence[str], *, largest: int, is_runnable: bool
) -> list[str]:
    """Return commands that run as they are; those that train need a built-in task."""
    scale = proposal.scale
    prospect = proposal.prospect
    # For the agent unit the batch size does not affect privacy, and corn plan refuses it.
    size = None
    step_size = prospect.step_size
    if scale.unit == "sample":
        # The batch of the largest agent at the common rate: agents with fewer samples than the
        # plan counts on are accepted, and step sizes are for gradients divided by this number.
        size = math.ceil(prospect.batch_size * largest / scale.samples)
        step_size *= size / prospect.batch_size
    promise = _list_options(
        unit=scale.unit,
        epsilon=scale.epsilon,
        delta=scale.delta,
        steps=prospect.num_steps,
        clip=scale.clip,
    )
    network = _list_options(graph=graph)
    samples = _list_options(batch_size=size, samples_per_agent=None if size is None else largest)
    batches = _list_options(batch_size=prospect.batch_size)
    step = _list_options(step_size=round_step_size(step_size))
    # Without samples (agent unit) the batch size alone, on which no promise depends.
    train = ["corn", "train", *learner, *network, *promise, *(samples or batches)]
    plan = ["corn", "plan", *network, *promise, *samples, "--out", _PLAN]
    launch = ["corn", "launch", _PLAN, *learner, *([] if size else batches), *step]
    launch += ["--out", "out/run"]
    verify = ["corn", "verify", _PLAN]
    chosen = [train, plan, verify, launch] if is_runnable else [plan, verify]
    return [shlex.join(command) for command in chosen]


def _list_options(**options: object) -> list[str]:
    """Return the options of a command line that have a value.

    >>> _list_options(batch_size=128, model=None)
    ['--batch-size', '128']
    """
    given = {name: value for name, value in options.items() if value is not None}
    texts = {n: write_exactly(v) if isinstance(v, float) else str(v) for n, v in given.items()}
    return [part for n, text in texts.items() for part in (f"--{n.replace('_', '-')}", text)]


def round_step_size(step_size: float) -> float:
    """Return a step size with one digit, which is more than is known of it.

    >>> round_step_size(0.1384)
    0.1
    """
    # The distance D is a guess, so a second digit would mean nothing.
    return float(f"{step_size:.1g}")


def _print(
    proposal: Proposal,
    network: Network,
    commands: Sequence[str],
    sizes: Sequence[int],
    *,
    as_json: bool,
) -> None:
    scale = proposal.scale
    prospect = proposal.prospect
    noise = (scale.num_parameters * prospect.noise_variance) ** 0.5
    norm = f"of norm {noise:.3g} in the agents' average gradient at each step"
    start = f"{round_step_size(prospect.step_size):g}"
    step_sizes = f"about {start}; corn train searches for it on public data"
    server = f"{proposal.central_ratio:.3g} × its noise variance in the average model"
    print_result(
        f"advice for {scale.num_agents} agents on {network.source}, with "
        f"{format_count(scale.samples, 'sample')} each on average, and "
        f"{scale.num_parameters:,} parameters",
        [
            Fact("graph", network.source),
            Fact("num_agents", scale.num_agents),
            Fact("samples", scale.samples),
            Fact(
                "expected_batches",
                [prospect.batch_size * size / scale.samples for size in sizes],
                *_describe_batches(proposal, sizes),
            ),
            Fact("num_parameters", scale.num_parameters),
            Fact("promise", proposal.budget.describe(), "promise"),
            Fact("adversary", proposal.threat.describe(), "against"),
            Fact("clip", scale.clip, "clip", f"{scale.clip:g}"),
            Fact("batch_size", prospect.batch_size, "batches and steps", _describe(proposal)),
            Fact("sampling", proposal.budget.sampling),
            Fact("sampling_rate", proposal.budget.query.sampling_rate),
            Fact("num_steps", prospect.num_steps),
            Fact("step_size", prospect.step_size, "step sizes", step_sizes),
            Fact("precision_cap", proposal.budget.precision_cap),
            Fact("noise_variance_of_average", prospect.noise_variance, "noise", norm),
            Fact("excess", prospect.excess),
            Fact("mixing", network.mixing, "mixing", network.describe_mixing(prospect.num_steps)),
            Fact("central_ratio", proposal.central_ratio, "of a trusted server", server),
            Fact("prospects", [vars(own) for own in proposal.prospects]),
            Fact("commands", list(commands)),
        ],
        as_json=as_json,
    )
    if not as_json:
        # Not in a table, which would break the lines.
        typer.echo("\n".join(["Commands:", *commands]))


def _describe(proposal: Proposal) -> str:
    own = proposal.prospect
    scale = proposal.scale
    if scale.unit == "agent":
        return f"{own.num_steps} steps; the batch size does not affect privacy"
    rate = proposal.budget.query.sampling_rate
    return f"B = {own.batch_size}, rate {rate:.4g} (Poisson sampling), {own.num_steps} steps"


def _describe_batches(proposal: Proposal, sizes: Sequence[int]) -> tuple[str, ...]:
    """Return label and text of the batches of unequal agents; nothing if all are equal."""
    if len(set(sizes)) == 1 or proposal.scale.unit == "agent":
        return ()
    rate = proposal.prospect.batch_size / proposal.scale.samples
    ends = f"{rate * min(sizes):.3g} to {rate * max(sizes):.3g}"
    return "expected batches", f"{ends}, in proportion to samples, all at rate {rate:.4g}"
