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
    refuse_given,
)
from corn.cli.output import (
    KAPPA,
    Fact,
    collect_sampling,
    describe_average,
    format_count,
    is_open_to_insiders,
    print_note,
    print_result,
    warn_of_insiders,
    warn_of_large_disagreement,
    working,
)
from corn.covariance import MECHANISMS, MechanismName, read_mechanism
from corn.learn.consortium import Consortium, load_consortium
from corn.plan import Plan, fingerprint, make_plan, save_plan
from corn.privacy.rounding import round_bound_down, write_range
from corn.topology import Gossip

EXAMPLE = "corn plan --graph er:n=20,p=0.2,seed=1 --epsilon 10 --out plan.corn"


def plan(
    context: typer.Context,
    consortium: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONSORTIUM]",
            help="Consortium file (.toml), which replaces all other options but --out and --json.",
        ),
    ] = None,
    *,
    graph: OptionalGraphOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="File for the plan, or for the request. (Default: beside a consortium file, with "
            "its name and .corn.)"
        ),
    ] = None,
    budget: BudgetOptions,
    batch_size: BatchSizeOption = None,
    mechanism: MechanismOption = "corn",
    mixing: MixingOptions,
    threat: ThreatOptions,
    json: JsonOption = False,
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
        _write_request(budget, batch_size, mechanism, mixing, threat, out=out, json=json)
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
    certificate = made.certificate
    print_result(
        f"plan {fingerprint(made).hex()[:16]} for {made.num_agents} agents on "
        f"{made.network.source}",
        [
            Fact("status", certificate.status),
            *plan_facts(made, certificate.value, certificate.lower_bound, certificate.status),
            *([] if consortium is None else _site_facts(consortium, made)),
        ],
        as_json=json,
    )
    if is_open_to_insiders(made.decomposition, made.threat):
        warn_of_insiders([made.mechanism])
    warn_of_large_disagreement(made.disagreement_ratio)
    if consortium is None:
        print_note(f"wrote {out}; check it with: corn verify {out}")
        return
    print_note(
        f"wrote {out}; send {consortium.path} and this file to every site, which runs: corn check "
        f"{consortium.path} --agent SITE --data FILE --keys FOLDER"
    )


def _site_facts(consortium: Consortium, made: Plan) -> list[Fact]:
    """Return the sizes that sites declare, and what the one sampling rate makes of them."""
    if made.budget.batch_size is None:
        return []
    rate = made.budget.query.sampling_rate or 1.0
    sites = [
        {"site": site.name, "samples": site.samples, "training": own, "batch": rate * own}
        for site, own in zip(consortium.sites, consortium.training_samples, strict=True)
    ]
    shown = ", ".join(f"{own['site']} {own['batch']:.3g} of {own['training']:.0f}" for own in sites)
    mean = sum(consortium.training_samples) / len(sites)
    return [
        Fact("sites", sites, "expected batches", f"{shown} training rows, all at rate {rate:.4g}"),
        Fact("mean_training_samples", mean, "mean", f"{rate * mean:.3g} of {mean:.0f} rows"),
    ]


def _write_request(
    budget: BudgetOptions,
    batch_size: int | None,
    mechanism: str,
    mixing: MixingOptions,
    threat: ThreatOptions,
    *,
    out: Path,
    json: bool,
) -> None:
    # Agents that plan together know no files of the others.
    chosen = cast("MechanismName", require_choice("mechanism", mechanism, MECHANISMS))
    combined = mixing.choose_mixing()
    request = distributed.PlanningRequest(
        budget=budget.make(batch_size),
        objective=mixing.choose_horizon(combined, budget.steps),
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
    facts = [
        Fact("promise", request.budget.describe(), "promise"),
        Fact("adversary", request.threat.describe(), "against"),
        Fact("mixing", request.mixing, "mixing"),
        Fact("mechanism", request.mechanism, "mechanism"),
    ]
    print_result("request for a plan that agents make together", facts, as_json=json)
    print_note(
        f"wrote {out}; run it with: corn launch {out} --graph GRAPH, or corn agent {out} "
        "--neighbours AGENT,AGENT"
    )


def plan_facts(made: Plan, value: float, lower_bound: float, remark: str) -> list[Fact]:
    """Return the content of a plan, with the value and the bound of its noise."""
    streams = made.decomposition.count_streams()
    noise = []
    samples = made.budget.samples_per_agent
    kappa = made.disagreement_ratio
    if made.network.mixing == "sum":
        # All noise of a sum is in the average, so its energy has the same ratio to the bound.
        least = round_bound_down(made.central_ratio * lower_bound / value)
        noise = [Fact("", None, "least possible", f"{least} × with any noise and any seeds")]
    else:
        least = round_bound_down(lower_bound)
        noise = [
            Fact("", None, "minimises", f"Tr(A R), {made.objective.describe()}"),
            Fact("", None, "noise energy", f"{value:.6g} ({remark})"),
            Fact("", None, "lower bound", f"{least}, for the seeds allowed"),
            Fact("", None, "κ", f"{kappa:.2f} ({KAPPA})"),
        ]
    declared = ""
    if samples is not None:
        counts = write_range(samples, "{:.12g}".format)
        declared = f"{counts} per agent; public, and not covered by ε"
    kind = "mask" if made.decomposition.is_masked else "stream"
    most = made.decomposition.most_masks or max(streams)
    return [
        Fact("graph", made.network.source),
        Fact("num_agents", made.num_agents),
        Fact("promise", made.budget.describe(), "promise"),
        *(Fact(key, value) for key, value in collect_sampling(made.budget).items()),
        Fact("", None, "declared samples" if declared else "", declared),
        Fact("adversary", made.threat.describe(), "against"),
        Fact("central_ratio", made.central_ratio, "noise in the average", describe_average(made)),
        *noise,
        Fact("objective", made.objective.describe()),
        Fact("mixing", made.network.mixing, "mixing", describe_mixing(made)),
        Fact("gossip", str(made.network.gossip)),
        Fact("cooldown_steps", made.cooldown_steps),
        Fact(
            "messages_per_link",
            made.network.gossip.count_messages(made.budget.num_steps, made.cooldown_steps),
        ),
        Fact("mechanism", made.mechanism),
        Fact("seeds", made.threat.seeds),
        Fact("max_colluders", made.threat.max_colluders),
        Fact("value", value),
        Fact("lower_bound", lower_bound),
        Fact("weighted_central_ratio", made.weighted_central_ratio),
        Fact("disagreement_ratio", kappa),
        Fact(
            "num_seed_groups",
            len(made.decomposition.seed_groups),
            "seeds",
            f"{len(made.decomposition.seed_groups):,} shared, at most {format_count(most, kind)} "
            "per agent",
        ),
        Fact("max_streams", max(streams)),
        Fact("max_masks", made.decomposition.most_masks),
        Fact("grid", made.grid, "releases", _describe_grid(made)),
        Fact("max_parameters", made.max_parameters),
        Fact("dtype", made.dtype),
        Fact("fingerprint", fingerprint(made).hex(), "fingerprint"),
    ]


def describe_mixing(made: Plan) -> str:
    """Return rounds, cool-down and messages of a plan's run in one line."""
    return made.network.describe_mixing(made.budget.num_steps, made.cooldown_steps)


def _describe_grid(made: Plan) -> str:
    """Return the grid of releases and the largest model for which the promise is proved."""
    proved = (
        f"multiples of {made.grid:g}; the promise is proved in floating point for models of up to "
        f"{made.max_parameters:.3g} parameters"
    )
    if made.budget.unit == "agent":
        return proved
    # An agent's gradient is clipped as a whole, so this concerns samples only.
    return f"{proved} that compute each sample's gradient without regard to others in its batch"
