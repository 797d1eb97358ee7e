"""``corn compare``: mechanisms, adversaries and ways to share seeds at the same privacy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from corn.cli.options import (
    BATCH_SIZE,
    GRAPH,
    JSON,
    PLOT,
    PLOT_STYLE,
    SEVERAL_MECHANISMS,
    BudgetOptions,
    NoiseOptions,
    option,
    read_numbers,
)
from corn.cli.output import (
    KAPPA,
    name_server,
    print_note,
    print_result,
    print_rows,
    warn_of_insiders,
    warn_of_large_disagreement,
    working,
)
from corn.covariance import Design, Mechanism, Objective, ThreatModel, design, read_mechanisms
from corn.errors import InfeasibleError
from corn.privacy import PrivacyBudget
from corn.topology import Network, spectrum

_COMPARED = "corn,ldp,decor,zero-sum,central,none"
_REFERENCES = ("central", "none", "unclipped")


def compare(
    *,
    graph: str = GRAPH,
    budget: BudgetOptions,
    batch_size: int | None = BATCH_SIZE,
    mixing: NoiseOptions,
    mechanism: str | None = SEVERAL_MECHANISMS,
    colluders: str | None = option(
        "Numbers of curious insiders that corn is designed against, separated by commas; 0 is an "
        "eavesdropper alone. (Default: 1,0.)"
    ),
    seeds: str = option(
        "Ways to share seeds for corn, separated by commas: auto, global, edges, pairs, sparse:K, "
        "partners:K or groups:M.",
        default="auto",
    ),
    plot: Path | None = PLOT,
    plot_style: Path | None = PLOT_STYLE,
    json: bool = JSON,
) -> None:
    """Compare mechanisms, numbers of insiders and ways to share seeds at the same privacy.

    Rows are grouped by the adversary that they hold against: less noise against a weaker adversary
    is no merit. DECOR and zero-sum noise hold against no insider.
    """
    network = mixing.load_network(graph)
    promise = budget.make(batch_size)
    objective = mixing.choose_objective(network, budget.steps)
    # A single agent has nobody inside the network to fear.
    listed = colluders or ("1,0" if network.num_agents > 1 else "0")
    threats = [
        ThreatModel(count, kind.strip())
        for count in read_numbers("--colluders", listed, int)
        for kind in seeds.split(",")
    ]
    chosen = read_mechanisms(mechanism or _COMPARED)
    with working("designing the noise"):
        designs = _design_all(network, promise, objective, chosen, threats)
    name, best = designs[0]
    if best.status != "reference":
        warn_of_insiders([(name, best.decomposition, best.threat)])
    warn_of_large_disagreement(best.disagreement_ratio)
    ldp = design(network, promise, mechanism="ldp", objective=objective)
    # LDP's own bound is that of an eavesdropper. CorN's, against insiders, is higher, and holds for
    # LDP too: noise without seeds is a split over any seeds.
    bounds = [own.lower_bound for name, own in designs if name in ("corn", "ldp")]
    bound = max(bounds, default=0.0)
    rows = [_describe_row(name, own, ldp.value, bound) for name, own in designs]
    if plot:
        _draw(f"{network.source}: {promise.describe()}", rows, plot, plot_style)
    facts = {**_describe_network(network, promise), "objective": objective.describe()}
    print_result("", {**facts, "rows": rows}, as_json=json)
    if not json:
        own = ["gap", "max_streams", "max_masks"]
        if network.mixing == "gossip":
            own = ["ratio_to_ldp", "disagreement_ratio", "gap", "max_streams"]
        columns = ["mechanism", "seeds", "central_ratio", *own, "holds_against"]
        print_rows("Noise of each mechanism at the same privacy", rows, columns)
    if plot:
        print_note(f"wrote {plot}")


def _design_all(
    network: Network,
    budget: PrivacyBudget,
    objective: Objective,
    mechanisms: Mapping[str, Mechanism],
    threats: Sequence[ThreatModel],
) -> list[tuple[str, Design]]:
    """Return a design per mechanism, and CorN's for each threat, in groups of one adversary."""
    designs = []
    for name, mechanism in mechanisms.items():
        # Other mechanisms have seeds of their own, and name the adversary that they hold against.
        for threat in threats if mechanism.name == "corn" else [None]:
            try:
                result = design(
                    network, budget, mechanism=mechanism, objective=objective, threat=threat
                )
            except InfeasibleError as error:
                # Of several ways to share seeds, those that protect nobody are only named.
                if threat is None or len(threats) == 1:
                    raise
                print_note(f"{name}, seeds {threat.seeds}, {threat.describe_colluders()}: {error}")
                continue
            designs.append((name, result))
    if not designs:
        raise InfeasibleError("no mechanism holds against these insiders with these seeds")
    # Groups are in the order of their first members, references last.
    counts = [own.threat.max_colluders for name, own in designs if name not in _REFERENCES]

    def find_group(named: tuple[str, Design]) -> int:
        name, own = named
        return len(counts) if name in _REFERENCES else counts.index(own.threat.max_colluders)

    return sorted(designs, key=find_group)


def _describe_network(network: Network, budget: PrivacyBudget) -> dict[str, Any]:
    """Return what the network, its mixing and the promise are."""
    facts = {
        "graph": network.source,
        "num_agents": network.num_agents,
        "num_links": network.graph.number_of_edges(),
        "links_per_agent": [degree for _, degree in network.graph.degree],
        "weights": network.weights,
        "gossip": str(network.gossip),
        "promise": budget.describe(),
        "adversary": "an eavesdropper who sees every message, and whom a row holds against",
        "reference": f"average × server: noise variance over that of {name_server(budget)}",
        "mixing": network.mixing,
        "messages": network.describe_mixing(budget.num_steps),
        "precision_caps": budget.precision_caps(network.num_agents),
    }
    if network.mixing == "gossip":
        facts |= {"mixing_time": spectrum(network.step_matrix).mixing_time, "kappa": KAPPA}
    return facts


def _describe_row(name: str, result: Design, ldp: float, bound: float) -> dict[str, Any]:
    """Return the facts of a row; ``ldp`` is LDP's value, and ``bound`` a lower bound on it."""
    gap: float | None = result.gap
    seeds: Any = result.threat.seeds if result.decomposition.seed_groups else ""
    colluders = result.threat.max_colluders
    # The adversary in two words.
    against = result.threat.describe_colluders() if colluders else "eavesdropper"
    if name in _REFERENCES:
        gap, against, seeds = None, "nobody", None
    elif name == "ldp":
        # LDP shares no seed that insiders could know.
        gap, against = max(result.value / bound - 1, 0.0), "any insiders"
    return {
        "mechanism": name,
        "seeds": seeds,
        "max_colluders": colluders,
        "central_ratio": result.central_ratio,
        "weighted_central_ratio": result.weighted_central_ratio,
        "value": result.value,
        "normalized_value": result.value * result.strictest_cap,
        "normalized_lower_bound": result.lower_bound * result.strictest_cap,
        "ratio_to_ldp": result.value / ldp,
        "disagreement_ratio": result.disagreement_ratio,
        "gap": gap,
        "status": result.status,
        "max_noise_std": float(result.noise_std.max()),
        "max_streams": None if seeds is None else max(result.decomposition.count_streams()),
        "max_masks": None if seeds is None else result.decomposition.most_masks,
        "adversary": result.adversary,
        "holds_against": against,
    }


def _draw(title: str, rows: Sequence[dict[str, Any]], path: Path, style: Path | None) -> None:
    from corn.report import figure_style, plot_comparison, save_figure

    drawn = []
    for own in rows:
        if own["mechanism"] not in ("none", "unclipped"):
            remark = " · ".join(filter(None, [own["seeds"], own["holds_against"]]))
            drawn.append((own["mechanism"], remark, own["central_ratio"]))
    with figure_style(style):
        save_figure(plot_comparison(drawn, title=title), path)
