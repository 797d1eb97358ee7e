"""``corn threat``: the cost of protection from insiders, for each way to share seeds."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from corn.cli.budget_options import BatchSizeOption, BudgetOptions
from corn.cli.options import GraphOption, JsonOption, MixingOptions, PrivateNoiseOption
from corn.cli.output import print_facts, print_json, print_table, progress
from corn.cli.strictest import (
    StrictestPromise,
    describe_reference,
    find_strictest,
    strictest_facts,
)
from corn.covariance import Auto, Corn, Design, Horizon, MechanismName, ThreatModel, design
from corn.errors import InvalidArgumentError
from corn.privacy import PrivacyBudget
from corn.topology import Network

EXAMPLE = "corn threat --graph er:n=12,p=0.4,seed=1 --seeds global,edges,pairs --colluders 0,1,2"
WORTHLESS = 0.99
"""Share of LDP's noise energy above which a design is not worth its shared seeds."""
_MOST_DIGITS = 9
_REFERENCES: dict[MechanismName, str] = {"ldp": "LDP", "central": "a trusted server"}


def threat(
    *,
    graph: GraphOption,
    budget: BudgetOptions,
    batch_size: BatchSizeOption = None,
    mixing: MixingOptions,
    seeds: Annotated[
        str, typer.Option(help="Ways to share seeds, separated by commas.")
    ] = "global,groups:2,edges,pairs",
    colluders: Annotated[
        str, typer.Option(help="Numbers of colluding insiders, separated by commas.")
    ] = "0,1,2",
    private_noise: PrivateNoiseOption = "per-agent",
    tolerance: Annotated[float, typer.Option(help="Relative gap to stop at.")] = 1e-2,
    json: JsonOption = False,
) -> None:
    """Compare ways to share seeds against growing coalitions of curious insiders.

    Where agents have different promises, each row also has the cost of the strictest: its noise
    energy over that of the same design with the next strictest promise in its place.
    """
    network = mixing.load_network(graph)
    promise = budget.make(batch_size, network)
    objective = mixing.choose_objective(network, budget.steps)
    threats = [
        ThreatModel(q, kind, private_noise)
        for kind in _read_list(seeds)
        for q in map(_read_number, _read_list(colluders))
    ]
    # Many designs, to compare and not to run: a loose tolerance saves most of the time.
    is_sum = network.mixing == "sum"  # whose optimum is a formula
    mechanism = Corn() if is_sum else Corn(solver=Auto(tolerance))
    ldp = design(network, promise, mechanism="ldp", objective=objective)
    central = design(network, promise, mechanism="central", objective=objective)
    strictest = find_strictest(promise, network.num_agents)
    relax = partial(design, network, objective=objective)
    rows = []
    for model in progress(threats, "designing"):
        result = design(network, promise, mechanism=mechanism, objective=objective, threat=model)
        row = _row(model, result, ldp.value, central.value)
        if strictest is not None:
            relaxed = relax(strictest.relaxed_caps, mechanism=mechanism, threat=model)
            row["strictest_cost"] = result.value / relaxed.value
        rows.append(row)
    references = {}
    if strictest is not None:
        references = {
            own.mechanism: own.value / relax(strictest.relaxed_caps, mechanism=own.mechanism).value
            for own in (ldp, central)
        }
    if json:
        print_json(_facts(network, promise, objective, rows, strictest, references))
    else:
        _print(network, promise, objective, rows, references)


def _row(model: ThreatModel, result: Design, ldp: float, central: float) -> dict[str, object]:
    streams = result.decomposition.count_streams()
    worthless = result.value >= WORTHLESS * ldp
    return {
        "seeds": model.seeds,
        "max_colluders": model.max_colluders,
        "adversary": model.describe(),
        "value": result.value,
        "normalized_value": result.normalized_value,
        "normalized_lower_bound": result.normalized_lower_bound,
        "ratio_to_ldp": result.value / ldp,
        "ratio_to_central": result.value / central,
        "central_ratio": result.central_ratio,
        "weighted_central_ratio": result.weighted_central_ratio,
        "gap": result.gap,
        "status": result.status,
        "num_coalitions": result.num_coalitions,
        "max_streams": max(streams),
        "worthless": worthless,
        "remark": _remark(model, result, worthless=worthless),
    }


def _remark(model: ThreatModel, result: Design, *, worthless: bool) -> str:
    if worthless:
        return f"{model.describe_seeds()} with {model.describe_colluders()}: no better than LDP"
    if result.status == "loose bound":
        return f"proved only to be within {result.gap:.0%} of the best"
    if result.status != "optimal":
        return f"{result.status}: up to {result.gap:.0%} above the best"
    return ""


def _facts(
    network: Network,
    budget: PrivacyBudget,
    objective: Horizon,
    rows: list[dict[str, object]],
    strictest: StrictestPromise | None,
    references: dict[MechanismName, float],
) -> dict[str, object]:
    costs = {} if strictest is None else {"strictest": strictest.describe()}
    return {
        "graph": network.source,
        "num_agents": network.num_agents,
        "promise": budget.describe(),
        "objective": objective.describe(),
        **costs,
        **{f"strictest_cost_of_{name}": cost for name, cost in references.items()},
        "gossip": str(network.gossip),
        "rows": rows,
    }


def _print(
    network: Network,
    budget: PrivacyBudget,
    objective: Horizon,
    rows: list[dict[str, object]],
    references: dict[MechanismName, float],
) -> None:
    costs = [f"{_REFERENCES[name]} × {cost:.3f}" for name, cost in references.items()]
    print_facts(
        f"{network.source}, {network.num_agents} agents",
        [
            ("promise", budget.describe()),
            *strictest_facts(budget, network.num_agents),
            *([("cost of the strictest", ", ".join(costs))] if costs else []),
            ("against", "an eavesdropper who sees every message, and insiders as listed"),
            ("minimises", f"Tr(A R), {objective.describe()}"),
            ("average × server", describe_reference(budget)),
            ("gossip", f"{network.gossip} in each step"),
        ],
    )
    print_table(
        "Noise energy for each way to share seeds",
        [
            "seeds",
            "insiders",
            "value",
            "× LDP",
            "average × server",
            *(["cost of the strictest"] if costs else []),
            "gap",
            "streams",
            "remark",
        ],
        [
            [
                str(row["seeds"]),
                str(row["max_colluders"]),
                f"{row['value']:.5g}",
                f"{row['ratio_to_ldp']:.3f}",
                f"{row['central_ratio']:.3f}",
                *([f"× {row['strictest_cost']:.3f}"] if costs else []),
                f"{row['gap']:.1e}",
                str(row["max_streams"]),
                str(row["remark"]),
            ]
            for row in rows
        ],
    )


def _read_list(text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise InvalidArgumentError(f"--seeds and --colluders must name something, found {text!r}")
    return parts


def _read_number(text: str) -> int:
    # int() refuses very long texts with an error of its own.
    if not text.isdecimal() or len(text) > _MOST_DIGITS:
        raise InvalidArgumentError(
            f"--colluders must be whole numbers separated by commas, found {text!r}"
        )
    return int(text)
