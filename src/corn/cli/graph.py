"""``corn graph``: print and draw a network and its mixing speed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from corn.checks import FloatArray
from corn.cli.options import GossipOption, GraphArgument, JsonOption, PlotOption, WeightsOption
from corn.cli.output import print_facts, print_json, print_written
from corn.errors import FileFormatError
from corn.topology import (
    ONE_ROUND,
    Gossip,
    Network,
    Spectrum,
    load_network,
    measure_network,
    name_of,
)
from corn.topology.sparse import MOST_DENSE

EXAMPLE = "corn graph er:n=20,p=0.2,seed=1 --plot graph.png"


def graph(
    source: GraphArgument,
    weights: WeightsOption = None,
    gossip: GossipOption = str(ONE_ROUND),
    plot: PlotOption = None,
    out: Annotated[Path | None, typer.Option(help="File for the matrix of a step: .npy.")] = None,
    json: JsonOption = False,
) -> None:
    """Print and draw a network, its mixing weights and their mixing speed."""
    if out and out.suffix != ".npy":
        raise FileFormatError(f"{out}: a mixing matrix's file must end in .npy")
    network = load_network(source, weights=weights, gossip=Gossip.parse(gossip), mixing="gossip")
    measured = measure_network(network)
    if plot:
        # The matrix of a step, with all its rounds: what the mixing time refers to.
        _draw(network, network.step_matrix, measured, plot)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        np.save(out, network.step_matrix)
    facts = _facts(network, measured)
    if json:
        matrices = {
            "mixing_matrix": network.mixing_matrix,
            "step_matrix": network.step_matrix,
        }
        print_json(facts | matrices)
    else:
        _print(network, measured, facts)
    print_written(plot, out)


def _facts(network: Network, measured: Spectrum) -> dict[str, object]:
    degrees = [degree for _, degree in network.graph.degree]
    return {
        "graph": network.source,
        "num_agents": network.num_agents,
        "num_links": network.graph.number_of_edges(),
        "directed": network.graph.is_directed(),
        "min_degree": min(degrees),
        "max_degree": max(degrees),
        "weights": network.weights,
        "gossip": str(network.gossip),
        "second_singular_value": measured.second_singular_value,
        "second_eigenvalue": measured.second_eigenvalue,
        "spectral_gap": measured.spectral_gap,
        "rank": measured.rank,
        "smallest_singular_value": measured.smallest_singular_value,
        "mixing_time": measured.mixing_time,
        "mixing_accuracy": measured.accuracy,
        "agents": [name_of(network.graph, agent) for agent in range(network.num_agents)],
        "links": [[int(i), int(j)] for i, j in network.graph.edges],
    }


def _print(network: Network, measured: Spectrum, facts: dict[str, object]) -> None:
    links = "directed links" if network.graph.is_directed() else "links"
    print_facts(
        f"{network.num_agents} agents, {facts['num_links']} {links}: {network.source}",
        [
            ("degree", f"{facts['min_degree']} to {facts['max_degree']}"),
            ("mixing weights", network.weights),
            ("rounds per step", f"{network.gossip.rounds} ({network.gossip.kind})"),
            ("second singular value", f"{measured.second_singular_value:.6g}"),
            ("second eigenvalue, modulus", f"{measured.second_eigenvalue:.6g}"),
            ("spectral gap", f"{measured.spectral_gap:.6g}"),
            *_describe_rank(measured, network.num_agents),
            (
                "mixing time",
                f"{measured.mixing_time} steps to {1 - measured.accuracy:.0%} agreement",
            ),
        ],
    )


def _describe_rank(measured: Spectrum, num_agents: int) -> list[tuple[str, str]]:
    if measured.rank is None:
        return [("rank", f"not computed for more than {MOST_DENSE} agents")]
    return [
        ("smallest singular value", f"{measured.smallest_singular_value:.6g}"),
        ("rank", f"{measured.rank} of {num_agents}"),
    ]


def _draw(network: Network, W: FloatArray, measured: Spectrum, path: Path) -> None:
    # Imported here, because Matplotlib takes a second that commands without a figure save.
    from corn.report import plot_network, save_figure

    save_figure(plot_network(network, W, measured), path)
