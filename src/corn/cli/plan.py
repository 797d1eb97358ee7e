"""``corn plan``: make the plan of a run, a public file that all agents hold and verify."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from corn.cli.budget_options import BatchSizeOption, BudgetOptions
from corn.cli.options import (
    GraphOption,
    JsonOption,
    MechanismOption,
    MixingOptions,
    ThreatOptions,
    choose_mechanism,
)
from corn.cli.output import (
    KAPPA,
    collect_sampling,
    format_count,
    print_facts,
    print_json,
    print_note,
    warn_of_insiders,
    warn_of_large_disagreement,
)
from corn.cli.strictest import describe_average, strictest_facts
from corn.cli.watching import designing, raise_if_interrupted
from corn.covariance import Corn
from corn.plan import FloatType, Plan, fingerprint, make_plan, save_plan
from corn.privacy import PrivacyBudget
from corn.privacy.budget import describe_range
from corn.privacy.rounding import round_bound_down

EXAMPLE = "corn plan --graph er:n=20,p=0.2,seed=1 --epsilon 10 --out plan.corn"


def plan(
    *,
    graph: GraphOption,
    out: Annotated[Path, typer.Option(help="File for the plan.")],
    budget: BudgetOptions,
    batch_size: BatchSizeOption = None,
    mechanism: MechanismOption = "corn",
    mixing: MixingOptions,
    threat: ThreatOptions,
    drop_cost: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Relative increase of the noise energy up to which the weakest seeds are left "
            "out, so that agents draw fewer streams. (Default: 0.02 where every pair has a seed, "
            "otherwise 0.)",
        ),
    ] = None,
    dtype: Annotated[
        FloatType, typer.Option(help="Float type of models and messages.")
    ] = "float32",
    json: JsonOption = False,
) -> None:
    """Make the plan of a run: by default against one curious insider, with seeds of pairs."""
    network = mixing.load_network(graph)
    promise = budget.make(batch_size, network)
    with designing(keep_best=True):
        made = make_plan(
            network,
            promise,
            # None leaves the adversary to the mechanism: DECOR holds against no insider.
            threat=threat.make_if_given(),
            objective=mixing.choose_objective(network, budget.steps),
            mechanism=choose_mechanism(
                mechanism, None if drop_cost is None else Corn(drop_cost=drop_cost)
            ),
            cooldown_steps=mixing.cooldown_steps,
            dtype=dtype,
        )
    # Before anything is printed: a pipe that closes must not cost a design of minutes.
    save_plan(made, out)
    if json:
        print_json(plan_facts(made))
    else:
        _print(made)
    warn_of_insiders(made.decomposition, made.budget, made.threat, mechanism=made.mechanism)
    mixing.warn_of_disagreement(network, made.cooldown_steps)
    warn_of_large_disagreement(
        network,
        made.objective,
        made.disagreement_ratio,
        mechanism=made.mechanism,
        num_steps=promise.num_steps,
    )
    print_note(f"wrote {out}; check it with: corn verify {out}")
    raise_if_interrupted(made)


def plan_facts(made: Plan) -> dict[str, object]:
    """Return the content of a plan for JSON."""
    streams = made.decomposition.count_streams()
    return {
        "fingerprint": fingerprint(made).hex(),
        "graph": made.network.source,
        "num_agents": made.num_agents,
        "promise": made.budget.describe(),
        **collect_sampling(made.budget),
        "adversary": made.threat.describe(),
        "objective": made.objective.describe(),
        "mixing": made.network.mixing,
        "gossip": str(made.network.gossip),
        "cooldown_steps": made.cooldown_steps,
        "messages_per_link": made.num_messages,
        "mechanism": made.mechanism,
        "seeds": made.threat.seeds,
        "max_colluders": made.threat.max_colluders,
        "status": made.certificate.status,
        "value": made.certificate.value,
        "lower_bound": made.certificate.lower_bound,
        "central_ratio": made.central_ratio,
        "weighted_central_ratio": made.weighted_central_ratio,
        "disagreement_ratio": made.disagreement_ratio,
        "num_seed_groups": len(made.decomposition.seed_groups),
        "max_streams": max(streams),
        "max_masks": made.decomposition.most_masks,
        "grid": made.grid,
        "max_parameters": made.max_parameters,
        "dtype": made.dtype,
    }


def declared_facts(budget: PrivacyBudget) -> list[tuple[str, str]]:
    """Return the numbers of samples that a plan counts on, and that they are public."""
    samples = budget.samples_per_agent
    if samples is None:
        return []
    shown = describe_range(samples if isinstance(samples, tuple) else (samples,))
    return [("declared samples", f"{shown} per agent; public, and not covered by ε")]


def noise_facts(made: Plan, value: float, lower_bound: float, remark: str) -> list[tuple[str, str]]:
    """Return the noise of a plan and the least that is possible."""
    average = describe_average(made.central_ratio, made.weighted_central_ratio, made.budget)
    if made.network.mixing == "sum":
        # All noise of a sum is in the average, so its energy has the same ratio to the bound.
        least = round_bound_down(made.central_ratio * lower_bound / value)
        return [
            ("noise in the average", average),
            ("least possible", f"{least} × with any noise and any seeds"),
        ]
    ratio = made.disagreement_ratio
    kappa = "not computed above 2000 agents" if ratio is None else f"{ratio:.2f}"
    return [
        ("minimises", f"Tr(A R), {made.objective.describe()}"),
        ("noise energy", f"{value:.6g} ({remark})"),
        ("lower bound", f"{round_bound_down(lower_bound)}, for the seeds allowed"),
        ("noise in the average", average),
        ("κ", f"{kappa} ({KAPPA})"),
    ]


def describe_mixing(made: Plan) -> str:
    """Return rounds, cool-down and messages of a plan's run in one line."""
    return made.network.describe_mixing(made.budget.num_steps, made.cooldown_steps)


def describe_grid(made: Plan) -> str:
    """Return the grid of releases and the largest model for which the promise is proved."""
    proved = (
        f"multiples of {made.grid:g}; the promise is proved in floating point for models of up to "
        f"{made.max_parameters:.3g} parameters"
    )
    if made.budget.unit == "agent":
        return proved
    # An agent's gradient is clipped as a whole, so this concerns samples only.
    return f"{proved} that compute each sample's gradient without regard to others in its batch"


def _print(made: Plan) -> None:
    streams, certificate = made.decomposition.count_streams(), made.certificate
    kind = "mask" if made.decomposition.is_masked else "stream"
    print_facts(
        f"plan {fingerprint(made).hex()[:16]} for {made.num_agents} agents on "
        f"{made.network.source}",
        [
            ("promise", made.budget.describe()),
            *strictest_facts(made.budget, made.num_agents),
            *declared_facts(made.budget),
            ("against", made.threat.describe()),
            *noise_facts(made, certificate.value, certificate.lower_bound, certificate.status),
            ("mixing", describe_mixing(made)),
            (
                "seeds",
                f"{len(made.decomposition.seed_groups):,} shared, at most "
                f"{format_count(made.decomposition.most_masks or max(streams), kind)} per agent",
            ),
            ("releases", describe_grid(made)),
            ("fingerprint", fingerprint(made).hex()),
        ],
    )
