"""``corn graph``: print and draw a network and its mixing speed."""

from __future__ import annotations

from corn.cli.options import GossipOption, GraphArgument, JsonOption, PlotOption, WeightsOption
from corn.cli.output import Fact, print_result, print_written
from corn.topology import ONE_ROUND, Gossip, load_network, measure_network, name_of
from corn.topology.sparse import MOST_DENSE

EXAMPLE = "corn graph er:n=20,p=0.2,seed=1 --plot graph.png"


def graph(
    source: GraphArgument,
    weights: WeightsOption = None,
    gossip: GossipOption = str(ONE_ROUND),
    plot: PlotOption = None,
    json: JsonOption = False,
) -> None:
    """Print and draw a network, its mixing weights and their speed."""
    network = load_network(source, weights=weights, gossip=Gossip.parse(gossip), mixing="gossip")
    measured = measure_network(network)
    if plot:
        # Imported here, because Matplotlib takes a second that commands without a figure save.
        from corn.report import plot_network, save_figure

        # The matrix of a step, with all its rounds: what the mixing time refers to.
        save_figure(plot_network(network, network.step_matrix, measured), plot)
    n, links = network.num_agents, network.graph.number_of_edges()
    kind = "directed links" if network.graph.is_directed() else "links"
    degrees = [degree for _, degree in network.graph.degree]
    # All singular values of a large network take too long.
    rank = f"not computed for more than {MOST_DENSE} agents"
    if measured.rank is not None:
        rank = f"{measured.rank} of {n}"
    facts = [
        Fact("graph", network.source),
        Fact("num_agents", n),
        Fact("num_links", links),
        Fact("directed", network.graph.is_directed()),
        Fact("min_degree", min(degrees), "degree", f"{min(degrees)} to {max(degrees)}"),
        Fact("max_degree", max(degrees)),
        Fact("weights", network.weights, "mixing weights"),
        Fact(
            "gossip",
            str(network.gossip),
            "rounds per step",
            f"{network.gossip.rounds} ({network.gossip.kind})",
        ),
        _number("second_singular_value", measured.second_singular_value, "second singular value"),
        _number("second_eigenvalue", measured.second_eigenvalue, "second eigenvalue, modulus"),
        _number("spectral_gap", measured.spectral_gap, "spectral gap"),
        _number(
            "smallest_singular_value",
            measured.smallest_singular_value,
            "" if measured.rank is None else "smallest singular value",
        ),
        Fact("rank", measured.rank, "rank", rank),
        Fact(
            "mixing_time",
            measured.mixing_time,
            "mixing time",
            f"{measured.mixing_time} steps to {1 - measured.accuracy:.0%} agreement",
        ),
        Fact("mixing_accuracy", measured.accuracy),
        Fact("agents", [name_of(network.graph, agent) for agent in range(n)]),
        Fact("links", [[int(i), int(j)] for i, j in network.graph.edges]),
    ]
    if json:
        # Dense, and so only where they are asked for.
        facts += [
            Fact("mixing_matrix", network.mixing_matrix),
            Fact("step_matrix", network.step_matrix),
        ]
    print_result(f"{n} agents, {links} {kind}: {network.source}", facts, as_json=json)
    print_written(plot)


def _number(key: str, value: float, label: str) -> Fact:
    return Fact(key, value, label, f"{value:.6g}")
