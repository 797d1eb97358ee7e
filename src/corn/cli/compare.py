"""``corn compare``: mechanisms, adversaries and ways to share seeds at the same privacy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    format_count,
    format_kappa,
    name_server,
    print_note,
    print_result,
    print_table,
    warn_of_insiders,
    warn_of_large_disagreement,
    working,
)
from corn.covariance import Design, Mechanism, Objective, ThreatModel, design, read_mechanisms
from corn.errors import InfeasibleError
from corn.privacy import PrivacyBudget
from corn.topology import Network, spectrum
from corn.topology.mixing import UNMIXED

_COMPARED = "corn,ldp,decor,zero-sum,central,none"
_REFERENCES = ("central", "none", "unclipped")


@dataclass(frozen=True, eq=False)
class ComparedDesign:
    """One row: a mechanism with its seeds, and its noise."""

    mechanism: str
    result: Design

    @property
    def seeds(self) -> str:
        """The arrangement of seeds; CorN is the only mechanism with a choice."""
        threat = self.result.threat
        if self.mechanism != "corn":
            return ""
        return threat.seeds if isinstance(threat.seeds, str) else f"{len(threat.seeds)} groups"

    @property
    def adversary(self) -> str:
        """The adversary in two words; LDP shares no seed that insiders could know."""
        if self.mechanism in _REFERENCES:
            return "nobody"
        if self.mechanism == "ldp":
            return "any insiders"
        colluders = self.result.threat.max_colluders
        return self.result.threat.describe_colluders() if colluders else "eavesdropper"

    @property
    def group(self) -> int:
        """The number of insiders that the row holds against; −1 for references."""
        return -1 if self.mechanism in _REFERENCES else self.result.threat.max_colluders


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
    promise = budget.make(batch_size, network)
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
        rows = _design_all(network, promise, objective, chosen, threats)
    best = rows[0].result
    if best.status != "reference":
        warn_of_insiders([(rows[0].mechanism, best.decomposition, best.threat)])
    warn_of_large_disagreement(best.disagreement_ratio)
    if plot:
        _draw(f"{network.source}: {promise.describe()}", rows, plot, plot_style)
    _print(network, promise, objective, rows, as_json=json)
    if plot:
        print_note(f"wrote {plot}")


def _design_all(
    network: Network,
    budget: PrivacyBudget,
    objective: Objective,
    mechanisms: Mapping[str, Mechanism],
    threats: Sequence[ThreatModel],
) -> list[ComparedDesign]:
    """Return one row per mechanism, and CorN's for each threat, in groups of one adversary."""
    rows = []
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
            rows.append(ComparedDesign(name, result))
    if not rows:
        raise InfeasibleError("no mechanism holds against these insiders with these seeds")
    # Groups are in the order of their first rows, references last.
    groups = list(dict.fromkeys(row.group for row in rows))
    return sorted(rows, key=lambda row: (row.group == -1, groups.index(row.group)))


def _print(
    network: Network,
    budget: PrivacyBudget,
    objective: Objective,
    rows: Sequence[ComparedDesign],
    *,
    as_json: bool,
) -> None:
    is_gossip = network.mixing == "gossip"
    degrees = [degree for _, degree in network.graph.degree]
    links = network.graph.number_of_edges()
    lines = [
        ("network", f"{format_count(links, 'link')}, {min(degrees)} to {max(degrees)} per agent"),
        ("promise", budget.describe()),
        ("against", "an eavesdropper who sees every message, and insiders as listed"),
        ("average × server", f"noise variance of the average over that of {name_server(budget)}"),
        ("mixing", network.describe_mixing(budget.num_steps)),
    ]
    facts = {
        "graph": network.source,
        "num_agents": network.num_agents,
        "num_links": links,
        "weights": network.weights,
        "gossip": str(network.gossip),
        "promise": budget.describe(),
        "objective": objective.describe(),
        "mixing": network.mixing,
        "precision_caps": budget.precision_caps(network.num_agents),
    }
    if is_gossip:
        mixed = spectrum(network.step_matrix).mixing_time
        facts["mixing_time"] = mixed
        lines += [
            ("mixing time", f"{mixed} steps to {1 - UNMIXED:.0%} agreement"),
            ("κ", KAPPA),
            ("energy", f"Tr(A R), {objective.describe()}"),
        ]
    ldp = design(network, budget, mechanism="ldp", objective=objective)
    # LDP's own bound is that of an eavesdropper. CorN's, against insiders, is higher, and holds for
    # LDP too: noise without seeds is a split over any seeds.
    bounds = [row.result.lower_bound for row in rows if row.mechanism in ("corn", "ldp")]
    listed = [_describe_row(row, ldp, max(bounds, default=0.0)) for row in rows]
    facts["rows"] = listed
    title = f"{network.source}, {network.num_agents} agents"
    print_result(title, lines, facts, as_json=as_json)
    if as_json:
        return
    from corn.report.figures import SHORT_NAMES

    def gossip_cells(own: dict[str, Any]) -> list[str]:
        cells = [f"{own['ratio_to_ldp']:.4f}", format_kappa(own["disagreement_ratio"])]
        return cells if is_gossip else []

    columns = ["mechanism", "seeds", "average × server"]
    columns += ["energy × LDP", "κ"] if is_gossip else []
    print_table(
        "Noise of each mechanism at the same privacy",
        [*columns, "above the best", "per agent", "holds against"],
        [
            [
                SHORT_NAMES.get(row.mechanism, row.mechanism),
                row.seeds,
                f"{own['central_ratio']:.3f}",
                *gossip_cells(own),
                _format_gap(own["gap"]),
                _format_streams(row.result),
                row.adversary,
            ]
            for row, own in zip(rows, listed, strict=True)
        ],
    )


def _describe_row(row: ComparedDesign, ldp: Design, bound: float) -> dict[str, Any]:
    """Return the facts of a row; ``bound`` is the largest lower bound on LDP's noise."""
    result = row.result
    gap: float | None = result.gap
    if row.mechanism in _REFERENCES:
        gap = None
    elif row.mechanism == "ldp":
        gap = max(result.value / bound - 1, 0.0)
    return {
        "mechanism": row.mechanism,
        "seeds": result.threat.seeds,
        "max_colluders": result.threat.max_colluders,
        "central_ratio": result.central_ratio,
        "weighted_central_ratio": result.weighted_central_ratio,
        "value": result.value,
        "normalized_value": result.normalized_value,
        "normalized_lower_bound": result.normalized_lower_bound,
        "ratio_to_ldp": result.value / ldp.value,
        "disagreement_ratio": result.disagreement_ratio,
        "gap": gap,
        "status": result.status,
        "max_noise_std": float(result.noise_std.max()),
        "max_streams": max(result.decomposition.count_streams()),
        "max_masks": result.decomposition.most_masks,
        "adversary": result.adversary,
    }


def _format_gap(gap: float | None) -> str:
    if gap is None:
        return ""
    return f"{gap:.1e}" if gap < 1e-3 else f"{gap:.1%}"


def _format_streams(result: Design) -> str:
    """Return the most streams or masks that an agent draws at each step."""
    if result.status == "reference":
        return ""
    masks = result.decomposition.most_masks
    if masks:
        return format_count(masks, "mask")
    return format_count(max(result.decomposition.count_streams()), "stream")


def _draw(title: str, rows: Sequence[ComparedDesign], path: Path, style: Path | None) -> None:
    from corn.report import figure_style, plot_comparison, save_figure

    drawn = [
        (row.mechanism, f"{row.seeds} · {row.adversary}".strip(" ·"), row.result.central_ratio)
        for row in rows
        if row.mechanism not in ("none", "unclipped")
    ]
    with figure_style(style):
        save_figure(plot_comparison(drawn, title=title), path)
