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
    format_count,
    print_note,
    print_result,
    warn_of_insiders,
    warn_of_large_disagreement,
    working,
)
from corn.covariance import MECHANISMS, MechanismName, read_mechanism
from corn.learn.consortium import Consortium, load_consortium
from corn.plan import Plan, fingerprint, make_plan, save_plan
from corn.privacy import PrivacyBudget
from corn.privacy.rounding import round_bound_down, write_range
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
    only their neighbours make the plan together (corn launch, corn agent).
    """
    if consortium is not None:
        decided = [name for name in context.params if name not in ("consortium", "out", "json")]
        refuse_given(context, decided, f"{consortium} decides this: omit the option")
        agreed = load_consortium(consortium)
        with working("designing the noise"):
            made = make_plan(
                agreed.load_network(), agreed.make_budget(), threat=agreed.make_threat()
            )
        _save(made, out or agreed.plan_path, agreed, json=json)
        return
    if out is None:
        raise typer.BadParameter("give a file for the plan", param_hint="--out")
    if graph is None:
        promise = budget.make(batch_size)
        _write_request(promise, mechanism, mixing, threat, out, json=json)
        return
    network = mixing.load_network(graph)
    promise = budget.make(batch_size, network)
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
    lines, facts = describe_plan(made, found.value, found.lower_bound, found.status)
    facts["status"] = found.status
    if consortium is not None and made.budget.batch_size is not None:
        # The sizes that sites declare, and what the one sampling rate makes of them.
        rate = made.budget.query.sampling_rate or 1.0
        sizes = consortium.training_samples
        pairs = list(zip(consortium.sites, sizes, strict=True))
        facts["mean_training_samples"] = sum(sizes) / len(sizes)
        facts["sites"] = [
            {"site": site.name, "samples": site.samples, "training": own, "batch": rate * own}
            for site, own in pairs
        ]
        batches = ", ".join(f"{site.name} {rate * own:.3g} of {own:.0f}" for site, own in pairs)
        lines.append(("expected batches", f"{batches} training rows, all at rate {rate:.4g}"))
    title = (
        f"plan {fingerprint(made).hex()[:16]} for {made.num_agents} agents on {made.network.source}"
    )
    print_result(title, lines, facts, as_json=json)
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
        weights=mixing.weights,
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
    title = "request for a plan that agents make together"
    print_result(title, facts.items(), facts, as_json=json)
    print_note(
        f"wrote {out}; run it with: corn launch {out} --graph GRAPH, or corn agent {out} "
        "--neighbours AGENT,AGENT"
    )


def describe_plan(
    made: Plan, value: float, lower_bound: float, remark: str
) -> tuple[list[tuple[str, str]], dict[str, Any]]:
    """Return a plan as lines and as facts, with the value and the bound of its noise."""
    budget = made.budget
    shares = made.decomposition
    streams = shares.count_streams()
    kappa = made.disagreement_ratio
    if made.network.mixing == "sum":
        # All noise of a sum is in the average, so its energy has the same ratio to the bound.
        least = round_bound_down(made.central_ratio * lower_bound / value)
        noise = [("least possible", f"{least} × with any noise and any seeds")]
    else:
        noise = [
            ("minimises", f"Tr(A R), {made.objective.describe()}"),
            ("noise energy", f"{value:.6g} ({remark})"),
            ("lower bound", f"{round_bound_down(lower_bound)}, for the seeds allowed"),
            ("κ", f"{kappa:.2f} ({KAPPA})"),
        ]
    releases = (
        f"multiples of {made.grid:g}; the promise is proved in floating point for models of up to "
        f"{made.max_parameters:.3g} parameters"
    )
    if budget.unit == "sample":
        # An agent's gradient is clipped as a whole, so this concerns samples only.
        releases += " that compute each sample's gradient without regard to others in its batch"
    samples = []
    if budget.samples_per_agent is not None:
        counts = write_range(budget.samples_per_agent, "{:.12g}".format)
        samples = [("declared samples", f"{counts} per agent; public, and not covered by ε")]
    shared = len(shares.seed_groups)
    most = shares.most_masks or max(streams)
    kind = "mask" if shares.is_masked else "stream"
    lines = [
        ("promise", budget.describe()),
        *samples,
        ("against", made.threat.describe()),
        ("noise in the average", describe_average(made)),
        *noise,
        ("mixing", made.network.describe_mixing(budget.num_steps, made.cooldown_steps)),
        ("seeds", f"{shared:,} shared, at most {format_count(most, kind)} per agent"),
        ("releases", releases),
        ("fingerprint", fingerprint(made).hex()),
    ]
    return lines, {
        "graph": made.network.source,
        "num_agents": made.num_agents,
        "promise": budget.describe(),
        **collect_sampling(budget),
        "adversary": made.threat.describe(),
        "central_ratio": made.central_ratio,
        "objective": made.objective.describe(),
        "mixing": made.network.mixing,
        "gossip": str(made.network.gossip),
        "cooldown_steps": made.cooldown_steps,
        "messages_per_link": made.num_messages,
        "mechanism": made.mechanism,
        "seeds": made.threat.seeds,
        "max_colluders": made.threat.max_colluders,
        "value": value,
        "lower_bound": lower_bound,
        "weighted_central_ratio": made.weighted_central_ratio,
        "disagreement_ratio": kappa,
        "num_seed_groups": shared,
        "max_streams": max(streams),
        "max_masks": shares.most_masks,
        "grid": made.grid,
        "max_parameters": made.max_parameters,
        "dtype": made.dtype,
        "fingerprint": fingerprint(made).hex(),
    }
