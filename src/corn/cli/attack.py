"""``corn attack``: show what releases reveal, as images and recovered gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
import typer

from corn.cli.budget_options import BudgetOptions
from corn.cli.options import GraphOption, JsonOption, MixingOptions, PlotOption
from corn.cli.output import print_facts, print_json, print_table, print_written, progress, working
from corn.covariance import EAVESDROPPER, ThreatModel
from corn.errors import InvalidArgumentError
from corn.plan import Plan, make_plan
from corn.privacy import PrivacyBudget
from corn.topology import Network

if TYPE_CHECKING:  # need torch, whose import takes a second
    from pathlib import Path

    from corn.audit import View
    from corn.audit.reconstruction import Reconstruction
    from corn.learn.method import Method

EXAMPLE = "corn attack --graph er:n=60,p=0.1,seed=1 --epsilon 10 --steps 200 --plot digits.png"
_KNOWLEDGE_STEPS = 30


@dataclass(frozen=True, eq=False)
class Scene:
    """A method and its attacker, with their names."""

    name: str
    method: Method
    view: View
    attacker: str


def attack(
    *,
    graph: GraphOption,
    budget: BudgetOptions,
    mixing: MixingOptions,
    task: Annotated[
        Literal["digits", "mnist"],
        typer.Option(help="Images of which every agent has one; mnist needs corn data get."),
    ] = "digits",
    images: Annotated[int, typer.Option(min=1, max=20, help="Images to reconstruct.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Seed of images and keys.")] = 0,
    plot: PlotOption = None,
    json: JsonOption = False,
) -> None:
    """Reconstruct agents' training images from their releases: without noise, with LDP, with CorN.

    Every agent has one image and trains a linear classifier. The attacker reads all messages and
    knows all other images. The last row is CorN's noise with one seed for all agents, designed
    against an eavesdropper, and attacked by an insider that it was not designed for.
    """
    from corn.audit.reconstruction import choose_images, reconstruct_images
    from corn.learn.datasets import load_dataset

    # The attacker reads single releases, which masks hide under exact sums.
    network = replace(mixing, mixing="gossip").load_network(graph)
    if budget.unit != "agent":
        raise InvalidArgumentError("--unit must be agent: the attack is on an agent's only sample")
    promise = budget.make(None, network)
    dataset = load_dataset(task)
    data, prior = choose_images(dataset, network.num_agents, seed=seed)
    with working("designing noise"):
        scenes = _make_scenes(network, promise)
    # Nobody who attacks in one scene is a victim in another, so that rows show the same images.
    insiders = {agent for scene in scenes for agent in scene.view.coalition}
    victims = [agent for agent in range(network.num_agents) if agent not in insiders][:images]
    found = [
        reconstruct_images(
            scene.method,
            network,
            data,
            num_classes=dataset.num_classes,
            num_steps=promise.num_steps,
            view=scene.view,
            victims=victims,
            prior=prior,
            seed=seed,
            track=partial(progress, what=scene.name),
        )
        for scene in scenes
    ]
    labels = data.targets.numpy()[victims]
    rows = [_row(*each, labels) for each in zip(scenes, found, strict=True)]
    knowledge = _measure_knowledge(network, min(insiders))
    if json:
        print_json({"promise": promise.describe(), "rows": rows, "knowledge": knowledge})
    else:
        _print(promise, rows, knowledge)
    if plot is not None:
        shape = dataset.image_shape or (1, data.inputs.shape[1])
        truth = data.inputs.numpy()[victims].astype(np.float64)
        _draw(truth, list(zip(scenes, found, strict=True)), shape, promise, plot)


def _make_scenes(network: Network, promise: PrivacyBudget) -> list[Scene]:
    from corn.audit import View, find_smallest_break
    from corn.audit.views import list_worst_views
    from corn.learn.method import Method

    inside = make_plan(network, promise, threat=ThreatModel(1))
    outside = make_plan(network, promise, threat=EAVESDROPPER)
    ldp = make_plan(network, promise, mechanism="ldp", threat=EAVESDROPPER)
    broken = find_smallest_break(outside)
    # A plan that no coalition breaks still gets a row; any agent will do as the insider.
    insider = View((network.num_agents - 1,)) if broken is None else broken.view
    # The strongest attacker that the plan promises to withstand.
    worst = list_worst_views(inside)[0]
    return [
        Scene("no noise", Method.non_private(*promise.queries), View(), "anybody"),
        _scene("LDP", ldp, View(), "anybody"),
        _scene("CorN", inside, worst, "an insider, as planned"),
        _scene("CorN, one seed for all", outside, insider, "an insider it was not designed for"),
    ]


def _scene(name: str, plan: Plan, view: View, attacker: str) -> Scene:
    from corn.learn.method import Method

    return Scene(name, Method.from_plan(plan, name=name), view, attacker)


def _row(
    scene: Scene, found: Reconstruction, labels: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> dict[str, object]:
    return {
        "method": scene.name,
        "attacker": scene.attacker,
        "view": scene.view.describe(),
        "similarity": float(found.similarity.mean()),
        "similarities": found.similarity,
        "labels_right": int((found.labels == labels).sum()),
        "num_images": len(labels),
    }


def _measure_knowledge(network: Network, insider: int) -> dict[str, object]:
    """Count the gradients that an insider recovers from its neighbours' messages, without noise."""
    from corn.audit.reconstruction import find_recoverable, list_observed, make_knowledge

    observed = list_observed(network.mixing_matrix, [insider])
    knowledge = make_knowledge(network.step_matrix, observed, _KNOWLEDGE_STEPS)
    recovered = find_recoverable(knowledge)
    return {
        "insider": insider,
        "num_neighbours": len(observed) - 1,
        "num_steps": _KNOWLEDGE_STEPS,
        "recovered": recovered,
        "recovered_beyond_neighbours": sorted(set(recovered) - set(observed)),
    }


def _print(
    promise: PrivacyBudget, rows: list[dict[str, object]], knowledge: dict[str, object]
) -> None:
    beyond = knowledge["recovered_beyond_neighbours"]
    print_facts(
        "reconstruction of agents' images from their releases",
        [
            ("promise", promise.describe()),
            (
                "attacker",
                "reads all messages; knows all other images, public images and its own keys",
            ),
            (
                "neighbours only",
                f"without noise, agent {knowledge['insider']} recovers the gradients of "
                f"{len(beyond) if isinstance(beyond, list) else 0} agents that are not its "
                f"neighbours from {knowledge['num_steps']} steps of its "
                f"{knowledge['num_neighbours']} neighbours' messages",
            ),
        ],
    )
    print_table(
        "Similarity to the true image beyond the average image (1: the same, 0: unrelated)",
        ["noise", "attacker", "similarity", "labels found"],
        [
            [
                str(row["method"]),
                str(row["attacker"]),
                f"{row['similarity']:.2f}",
                f"{row['labels_right']} of {row['num_images']}",
            ]
            for row in rows
        ],
    )


def _draw(
    truth: np.ndarray[tuple[int, int], np.dtype[np.float64]],
    scenes: list[tuple[Scene, Reconstruction]],
    shape: tuple[int, int],
    promise: PrivacyBudget,
    path: Path,
) -> None:
    from corn.report.audits import plot_reconstructions
    from corn.report.style import save_figure

    rows = [(f"{scene.name}; seen by {scene.attacker}", found.images) for scene, found in scenes]
    title = f"Images that an attacker reconstructs from releases; {promise.describe()}"
    save_figure(plot_reconstructions(truth, rows, shape=shape, title=title), path)
    print_written(path)
