"""``corn plan``: make the public plan that all agents of a run hold and verify."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from corn.cli.options import (
    AccountingOption,
    AdjacencyOption,
    BatchSizeOption,
    ClipOption,
    ColludersOption,
    CooldownOption,
    DeltaOption,
    EpsilonOption,
    GossipRoundsOption,
    GraphOption,
    HorizonOption,
    JsonOption,
    MechanismOption,
    PrivateNoiseOption,
    SamplingRateOption,
    SeedsOption,
    StepsOption,
    UnitOption,
    WeightsOption,
    choose_objective,
)
from corn.cli.output import print_facts, print_json, print_note, warn_of_insiders, working
from corn.covariance import ThreatModel
from corn.covariance.threat import PrivateNoise
from corn.plan import Plan, make_plan, save_plan
from corn.plan.codec import fingerprint
from corn.plan.record import NoiseType
from corn.privacy import PrivacyBudget
from corn.topology import load_network

EXAMPLE = "corn plan --graph er:n=20,p=0.2,seed=1 --epsilon 10 --out plan.corn"


def plan(
    graph: GraphOption,
    out: Annotated[Path, typer.Option(help="Where to write the plan.")],
    epsilon: EpsilonOption = 10.0,
    delta: DeltaOption = 1e-5,
    steps: StepsOption = 5000,
    clip: ClipOption = 0.1,
    unit: UnitOption = "agent",
    accounting: AccountingOption = "gdp",
    adjacency: AdjacencyOption = "replace",
    batch_size: BatchSizeOption = None,
    sampling_rate: SamplingRateOption = None,
    mechanism: MechanismOption = "corn",
    horizon: HorizonOption = None,
    weights: WeightsOption = None,
    gossip_rounds: GossipRoundsOption = 1,
    cooldown: CooldownOption = 0,
    colluders: ColludersOption = 1,
    seeds: SeedsOption = "pairs",
    private_noise: PrivateNoiseOption = "per-agent",
    drop_share: Annotated[
        float, typer.Option(min=0, max=1, help="Drop the weakest seeds, by noise power.")
    ] = 0.0,
    noise_type: Annotated[NoiseType, typer.Option(help="Type in which noise is drawn.")] = (
        "float32"
    ),
    json: JsonOption = False,
) -> None:
    """Make a plan to run: safe by default against one curious insider, with pair seeds."""
    budget = PrivacyBudget(
        epsilon, delta, steps, clip, unit, accounting, adjacency, batch_size, sampling_rate
    )
    with working("designing the noise"):
        made = make_plan(
            load_network(graph, weights=weights),
            budget,
            threat=_threat(mechanism, colluders, seeds, private_noise),
            objective=choose_objective(
                horizon, steps, gossip_rounds=gossip_rounds, cooldown_rounds=cooldown
            ),
            mechanism=mechanism,
            noise_type=noise_type,
            drop_share=drop_share,
        )
    save_plan(made, out)
    if json:
        print_json(plan_facts(made))
    else:
        _print(made)
    warn_of_insiders(made.decomposition, made.budget, made.threat)
    print_note(f"wrote {out}; check it with: corn verify {out}")


def plan_facts(made: Plan) -> dict[str, object]:
    """What a plan says of itself, for JSON."""
    streams = made.decomposition.count_streams()
    return {
        "fingerprint": fingerprint(made).hex(),
        "graph": made.network.source,
        "num_agents": made.num_agents,
        "promise": made.budget.describe(),
        "adversary": made.threat.describe(),
        "objective": made.objective.describe(),
        "mechanism": made.mechanism,
        "seeds": made.threat.seeds,
        "max_colluders": made.threat.max_colluders,
        "status": made.certificate.status,
        "value": made.certificate.value,
        "lower_bound": made.certificate.lower_bound,
        "num_seed_groups": len(made.decomposition.seed_groups),
        "max_streams": max(streams),
        "noise_type": made.noise_type,
    }


def _threat(mechanism: str, colluders: int, seeds: str, private_noise: PrivateNoise) -> ThreatModel:
    """Other mechanisms than corn have seeds of their own; pair seeds are then no request."""
    if mechanism != "corn" and seeds == "pairs":
        seeds = "global"
    return ThreatModel(colluders, seeds, private_noise)


def _print(made: Plan) -> None:
    streams = made.decomposition.count_streams()
    certificate = made.certificate
    print_facts(
        f"plan {fingerprint(made).hex()[:16]} for {made.num_agents} agents on "
        f"{made.network.source}",
        [
            ("promise", made.budget.describe()),
            ("against", made.threat.describe()),
            ("minimises", f"Tr(A R), {made.objective.describe()}"),
            ("noise energy", f"{certificate.value:.6g} ({certificate.status})"),
            ("lower bound", f"{certificate.lower_bound:.6g}"),
            (
                "seeds",
                f"{len(made.decomposition.seed_groups)} shared, up to {max(streams)} streams an "
                "agent",
            ),
            ("fingerprint", fingerprint(made).hex()),
        ],
    )
