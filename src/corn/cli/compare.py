"""``corn compare``: mechanisms, adversaries and ways to share seeds at the same privacy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from corn.cli.options import (
    BatchSizeOption,
    BudgetOptions,
    GraphOption,
    JsonOption,
    MechanismsOption,
    NoiseOptions,
    PlotOption,
    PlotStyleOption,
    read_numbers,
)
from corn.cli.output import (
    KAPPA,
    Column,
    Fact,
    collect_rows,
    describe_reference,
    format_count,
    format_kappa,
    is_open_to_insiders,
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
from corn.topology.mixing import UNMIXED

EXAMPLE = "corn compare --graph er:n=20,p=0.2,seed=1 --colluders 0,1,2 --plot noise.png"
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


def compare(
    *,
    graph: GraphOption,
    budget: BudgetOptions,
    batch_size: BatchSizeOption = None,
    mixing: NoiseOptions,
    mechanism: MechanismsOption = None,
    colluders: Annotated[
        str | None,
        typer.Option(
            help="Numbers of curious insiders that corn is designed against, separated by commas; "
            "0 is an eavesdropper alone. (Default: 1,0.)"
        ),
    ] = None,
    seeds: Annotated[
        str,
        typer.Option(
            help="Ways to share seeds for corn, separated by commas: auto, global, edges, pairs, "
            "sparse:K, partners:K or groups:M."
        ),
    ] = "auto",
    plot: PlotOption = None,
    plot_style: PlotStyleOption = None,
    json: JsonOption = False,
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
        rows = _design_all(network, promise, objective, chosen, threats)
    ldp = design(network, promise, mechanism="ldp", objective=objective)
    best = rows[0].result
    if best.precision is not None and is_open_to_insiders(best.decomposition, best.threat):
        warn_of_insiders([rows[0].mechanism])
    warn_of_large_disagreement(best.disagreement_ratio)
    if plot:
        _draw(network, promise, rows, plot, plot_style)
    _print(network, promise, objective, rows, ldp, as_json=json)
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
    # Sorting is stable, so that the order within a group stays, and the first row is the first.
    groups = list(dict.fromkeys(_group_of(row) for row in rows))
    return sorted(rows, key=lambda row: (_group_of(row) == -1, groups.index(_group_of(row))))


def _group_of(row: ComparedDesign) -> int:
    """Return the number of insiders that a row holds against; −1 for references."""
    return -1 if row.mechanism in _REFERENCES else row.result.threat.max_colluders


def _print(
    network: Network,
    budget: PrivacyBudget,
    objective: Objective,
    rows: Sequence[ComparedDesign],
    ldp: Design,
    *,
    as_json: bool,
) -> None:
    is_gossip = network.mixing == "gossip"
    columns = _list_columns(rows, ldp, is_gossip=is_gossip)
    measure = "energy" if is_gossip else ""
    whom = "an eavesdropper who sees every message, and insiders as listed"
    print_result(
        f"{network.source}, {network.num_agents} agents",
        [
            Fact("graph", network.source),
            Fact("num_agents", network.num_agents),
            *_network_facts(network),
            Fact("weights", network.weights),
            Fact("gossip", str(network.gossip)),
            Fact("promise", budget.describe(), "promise"),
            Fact("", None, "against", whom),
            Fact("", None, "average × server", describe_reference(budget)),
            Fact("", None, "κ" if is_gossip else "", KAPPA),
            Fact("objective", objective.describe(), measure, f"Tr(A R), {objective.describe()}"),
            Fact("mixing", network.mixing, "mixing", network.describe_mixing(budget.num_steps)),
            Fact("precision_caps", budget.precision_caps(network.num_agents)),
            Fact("rows", collect_rows(columns, rows)),
        ],
        as_json=as_json,
    )
    if not as_json:
        groups = [_group_of(row) for row in rows]
        print_rows(
            "Noise of each mechanism at the same privacy",
            columns,
            rows,
            section_ends=[k for k in range(len(rows) - 1) if groups[k] != groups[k + 1]],
        )


def _network_facts(network: Network) -> list[Fact]:
    """Return the size of the graph and, for gossip, how fast its weights mix."""
    degrees = [degree for _, degree in network.graph.degree]
    links = network.graph.number_of_edges()
    text = f"{format_count(links, 'link')}, {min(degrees)} to {max(degrees)} per agent"
    facts = [Fact("num_links", links, "network", text)]
    if network.mixing == "gossip":
        measured = spectrum(network.step_matrix)
        facts += [
            Fact("second_eigenvalue", measured.second_eigenvalue),
            Fact("spectral_gap", measured.spectral_gap),
            Fact(
                "mixing_time",
                measured.mixing_time,
                "mixing time",
                f"{measured.mixing_time} steps to {1 - UNMIXED:.0%} agreement",
            ),
        ]
    return facts


def _list_columns(
    rows: Sequence[ComparedDesign], ldp: Design, *, is_gossip: bool
) -> list[Column[ComparedDesign]]:
    from corn.report.figures import SHORT_NAMES

    bounds = [row.result.lower_bound for row in rows if row.mechanism == "corn"]

    def gap(row: ComparedDesign) -> float | None:
        if row.mechanism in _REFERENCES:
            return None
        if row.mechanism != "ldp":
            return row.result.gap
        # LDP's own bound is that of an eavesdropper. CorN's, against insiders, is higher, and holds
        # for LDP too: noise without seeds is a split over any seeds.
        return max(row.result.value / max([row.result.lower_bound, *bounds]) - 1, 0.0)

    return [
        Column("mechanism", lambda r: r.mechanism),
        Column("", lambda r: SHORT_NAMES.get(r.mechanism, r.mechanism), "mechanism"),
        Column("seeds", lambda r: r.result.threat.seeds),
        Column("", lambda r: r.seeds, "seeds"),
        Column("max_colluders", lambda r: r.result.threat.max_colluders),
        Column(
            "central_ratio", lambda r: r.result.central_ratio, "average × server", "{:.3f}".format
        ),
        Column("weighted_central_ratio", lambda r: r.result.weighted_central_ratio),
        Column("value", lambda r: r.result.value),
        Column("normalized_value", lambda r: r.result.normalized_value),
        Column("normalized_lower_bound", lambda r: r.result.normalized_lower_bound),
        Column(
            "ratio_to_ldp",
            lambda r: r.result.value / ldp.value,
            "energy × LDP" if is_gossip else "",
            "{:.4f}".format,
        ),
        Column(
            "disagreement_ratio",
            lambda r: r.result.disagreement_ratio,
            "κ" if is_gossip else "",
            format_kappa,
        ),
        Column("gap", gap, "above the best", _format_gap),
        Column("status", lambda r: r.result.status),
        Column("max_noise_std", lambda r: float(r.result.noise_std.max())),
        Column("max_streams", lambda r: max(r.result.decomposition.count_streams())),
        Column("max_masks", lambda r: r.result.decomposition.most_masks),
        Column("", lambda r: _format_streams(r.result), "per agent"),
        Column("adversary", lambda r: r.result.adversary),
        Column("", lambda r: r.adversary, "holds against"),
    ]


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


def _draw(
    network: Network,
    budget: PrivacyBudget,
    rows: Sequence[ComparedDesign],
    path: Path,
    style: Path | None,
) -> None:
    from corn.report import figure_style, plot_comparison, save_figure

    drawn = [
        (row.mechanism, f"{row.seeds} · {row.adversary}".strip(" ·"), row.result.central_ratio)
        for row in rows
        if row.mechanism not in ("none", "unclipped")
    ]
    with figure_style(style):
        figure = plot_comparison(drawn, title=f"{network.source}: {budget.describe()}")
        save_figure(figure, path)
