"""``corn plan``: make the plan of a run, a public file that all agents hold and verify."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import typer

from corn import distributed
from corn.checks import require_choice
from corn.cli.options import (
    BATCH_SIZE,
    JSON,
    MECHANISM,
    OPTIONAL_GRAPH,
    BudgetOptions,
    MixingOptions,
    ThreatOptions,
    argument,
    option,
    refuse_given,
)
from corn.cli.output import (
    KAPPA,
    collect_sampling,
    describe_average,
    print_note,
    print_result,
    print_rows,
    warn_of_insiders,
    warn_of_large_disagreement,
    working,
)
from corn.covariance import MECHANISMS, MechanismName, read_mechanism
from corn.learn.consortium import Consortium, load_consortium
from corn.plan import Plan, fingerprint, make_plan, save_plan
from corn.privacy import PrivacyBudget
from corn.privacy.rounding import round_bound_down
from corn.topology import Gossip


def plan(
    context: typer.Context,
    consortium: Path | None = argument(
        "Consortium file (.toml), which replaces all other options but --out and --json.",
        default=None,
        metavar="[CONSORTIUM]",
    ),
    *,
    graph: str | None = OPTIONAL_GRAPH,
    out: Path | None = option(
        "File for the plan, or for the request. (Default: beside a consortium file, with its name "
        "and .corn.)"
    ),
    budget: BudgetOptions,
    batch_size: int | None = BATCH_SIZE,
    mechanism: str = MECHANISM,
    mixing: MixingOptions,
    threat: ThreatOptions,
    json: bool = JSON,
) -> None:
    """Make the plan of a run, by default against one curious insider.

    Without --graph, write a request: a plan without network and noise, from which agents that know
    only their neighbours make the plan together (corn agent --neighbours).
    """
    if consortium is not None:
        decided = [name for name in context.params if name not in ("consortium", "out", "json")]
        refuse_given(context, decided, f"{consortium} decides this: omit the option")
        agreed = load_consortium(consortium)
        with working("designing the noise"):
            given = agreed.load_network(), agreed.make_budget()
            made = make_plan(*given, threat=agreed.make_threat())
        _save(made, out or agreed.plan_path, agreed, json=json)
        return
    if out is None:
        raise typer.BadParameter("give a file for the plan", param_hint="--out")
    if graph is None:
        _write_request(budget.make(batch_size), mechanism, mixing, threat, out, json=json)
        return
    network = mixing.load_network(graph)
    promise = budget.make(batch_size)
    with working("designing the noise"):
        made = make_plan(
            network,
            promise,
            # None leaves the adversary to the mechanism: DECOR holds against no insider.
            threat=threat.make_if_given(),
            objective=mixing.choose_objective(network, budget.steps),
            mechanism=mechanism,
            cooldown_steps=mixing.cooldown,
        )
    _save(made, out, json=json)


def _save(made: Plan, out: Path, consortium: Consortium | None = None, *, json: bool) -> None:
    # Before anything is printed: a pipe that closes must not cost a design of minutes.
    save_plan(made, out)
    found = made.certificate
    facts = {"status": found.status, **describe_plan(made, found.value, found.lower_bound)}
    if consortium is not None and made.budget.batch_size is not None:
        # The sizes that sites declare, and what the one sampling rate makes of them.
        rate = made.budget.query.sampling_rate or 1.0
        sizes = consortium.training_samples
        facts["mean_training_samples"] = sum(sizes) / len(sizes)
        facts["sites"] = [
            {"site": site.name, "samples": site.samples, "training": own, "batch": rate * own}
            for site, own in zip(consortium.sites, sizes, strict=True)
        ]
    digits = fingerprint(made).hex()[:16]
    title = f"plan {digits} for {made.num_agents} agents on {made.network.source}"
    print_result(title, facts, as_json=json)
    if "sites" in facts and not json:
        print_rows("rows of each site", facts["sites"], ("site", "samples", "training", "batch"))
    warn_of_insiders([(made.mechanism, made.decomposition, made.threat)])
    warn_of_large_disagreement(made.disagreement_ratio)
    if consortium is None:
        print_note(f"wrote {out}; check it with: corn verify {out}")
    else:
        print_note(
            f"wrote {out}; send {consortium.path} and this file to every site, which runs: corn "
            f"check {consortium.path} --agent SITE --data FILE --keys FOLDER"
        )


def _write_request(
    budget: PrivacyBudget,
    mechanism: str,
    mixing: MixingOptions,
    threat: ThreatOptions,
    out: Path,
    *,
    json: bool,
) -> None:
    # Agents that plan together know no files of the others.
    chosen = cast("MechanismName", require_choice("mechanism", mechanism, MECHANISMS))
    combined = mixing.asked_mixing or "sum"
    request = distributed.PlanningRequest(
        budget=budget,
        objective=mixing.choose_horizon(combined, budget.num_steps),
        # Written into the request, so that agents do not depend on defaults of their own versions.
        threat=threat.make_if_given() or read_mechanism(chosen).default_threat,
        mechanism=chosen,
        gossip=Gossip.parse(mixing.gossip),
        mixing=combined,
        cooldown_steps=mixing.cooldown,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(request.to_text() + "\n", encoding="utf-8")
    facts = {
        "promise": budget.describe(),
        "adversary": request.threat.describe(),
        "mixing": request.mixing,
        "mechanism": request.mechanism,
    }
    print_result("request for a plan that agents make together", facts, as_json=json)
    print_note(
        f"wrote {out}; each agent runs: corn agent {out} --neighbours AGENT,AGENT --agent AGENT "
        "--keys FOLDER --store HOST"
    )


def describe_plan(made: Plan, value: float, lower_bound: float) -> dict[str, Any]:
    """Return the facts of a plan, with the value and the bound of its noise."""
    budget, shares = made.budget, made.decomposition
    steps = budget.num_steps, made.cooldown_steps
    # An agent's gradient is clipped as a whole, so this concerns samples only.
    alone = " that compute each sample's gradient without regard to others in its batch"
    least = None
    if made.network.mixing == "sum":
        # All noise of a sum is in the average, so its energy has the same ratio to the bound.
        bound = round_bound_down(made.central_ratio * lower_bound / value)
        least = f"{bound} × with any noise and any seeds"
    facts = {
        "promise": budget.describe(),
        "adversary": made.threat.describe(),
        "noise_in_the_average": describe_average(made),
        "least_possible": least,
        "graph": made.network.source,
        "num_agents": made.num_agents,
        **collect_sampling(budget),
        "central_ratio": made.central_ratio,
        "weighted_central_ratio": made.weighted_central_ratio,
        "disagreement_ratio": made.disagreement_ratio,
        "objective": made.objective.describe(),
        "value": value,
        "lower_bound": lower_bound,
        "mixing": made.network.mixing,
        "messages": made.network.describe_mixing(*steps),
        "messages_per_link": made.network.gossip.count_messages(*steps),
        "gossip": str(made.network.gossip),
        "cooldown_steps": made.cooldown_steps,
        "mechanism": made.mechanism,
        "seeds": made.threat.seeds,
        "max_colluders": made.threat.max_colluders,
        "num_seed_groups": len(shares.seed_groups),
        "max_streams": max(shares.count_streams()),
        "max_masks": shares.most_masks,
        "grid": made.grid,
        "max_parameters": made.max_parameters,
        "proved": f"in floating point, for models of up to {made.max_parameters:.3g} parameters"
        + (alone if budget.unit == "sample" else ""),
        "dtype": made.dtype,
        "fingerprint": fingerprint(made).hex(),
    }
    return {**facts, "kappa": KAPPA} if made.network.mixing == "gossip" else facts
