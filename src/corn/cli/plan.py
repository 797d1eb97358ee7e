"""``corn plan``: make the plan of a run, a public file that all agents hold and verify."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from corn import distributed
from corn.checks import require_choice
from corn.cli.options import (
    BatchSizeOption,
    BudgetOptions,
    JsonOption,
    MechanismOption,
    MixingOptions,
    OptionalGraphOption,
    ThreatOptions,
)
from corn.cli.output import (
    KAPPA,
    collect_sampling,
    describe_average,
    designing,
    format_count,
    print_facts,
    print_json,
    print_note,
    raise_if_interrupted,
    strictest_facts,
    warn_of_insiders,
    warn_of_large_disagreement,
)
from corn.covariance import MECHANISMS, MechanismName, read_mechanism
from corn.covariance.design import default_threat
from corn.plan import FloatType, Plan, fingerprint, make_plan, save_plan
from corn.privacy import PrivacyBudget
from corn.privacy.budget import describe_range
from corn.privacy.rounding import round_bound_down
from corn.topology import Gossip

EXAMPLE = "corn plan --graph er:n=20,p=0.2,seed=1 --epsilon 10 --out plan.corn"


def plan(
    *,
    graph: OptionalGraphOption = None,
    out: Annotated[Path, typer.Option(help="File for the plan, or for the request.")],
    budget: BudgetOptions,
    batch_size: BatchSizeOption = None,
    mechanism: MechanismOption = "corn",
    mixing: MixingOptions,
    threat: ThreatOptions,
    dtype: Annotated[
        FloatType, typer.Option(help="Float type of models and messages.")
    ] = "float32",
    json: JsonOption = False,
) -> None:
    """Make the plan of a run: by default against one curious insider, with seeds of pairs.

    Without --graph, write a request: a plan without network and noise, from which agents that know
    only their neighbours make the plan together (corn launch, corn agent).
    """
    if graph is None:
        _write_request(budget, batch_size, mechanism, mixing, threat, dtype, out=out, json=json)
        return
    network = mixing.load_network(graph)
    promise = budget.make(batch_size, network)
    with designing(keep_best=True):
        made = make_plan(
            network,
            promise,
            # None leaves the adversary to the mechanism: DECOR holds against no insider.
            threat=threat.make_if_given(),
            objective=mixing.choose_objective(network.mixing, budget.steps),
            mechanism=read_mechanism(mechanism) or cast("MechanismName", mechanism),
            cooldown_steps=mixing.cooldown,
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


def _write_request(
    budget: BudgetOptions,
    batch_size: int | None,
    mechanism: str,
    mixing: MixingOptions,
    threat: ThreatOptions,
    dtype: FloatType,
    *,
    out: Path,
    json: bool,
) -> None:
    # Agents that plan together know no files of the others.
    chosen = cast("MechanismName", require_choice("mechanism", mechanism, MECHANISMS))
    combined = mixing.choose_mixing()
    request = distributed.PlanningRequest(
        budget=budget.make(batch_size),
        objective=mixing.choose_objective(combined, budget.steps),
        # Written into the request, so that agents do not depend on defaults of their own versions.
        threat=threat.make_if_given() or default_threat(chosen),
        mechanism=chosen,
        weights=mixing.weights,
        gossip=Gossip.parse(mixing.gossip),
        mixing=combined,
        cooldown_steps=mixing.cooldown,
        dtype=dtype,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(request.to_text() + "\n", encoding="utf-8")
    facts = {
        "promise": request.budget.describe(),
        "against": request.threat.describe(),
        "mixing": request.mixing,
        "mechanism": request.mechanism,
    }
    if json:
        print_json(facts)
    else:
        print_facts("request for a plan that agents make together", facts.items())
    print_note(
        f"wrote {out}; run it with: corn launch {out} --graph GRAPH, or corn agent {out} "
        "--neighbours AGENT,AGENT"
    )


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
