"""Reconstruct agents' training images from their releases: without noise, with LDP, with CorN.

``python examples/reconstruct_images.py [--task mnist] [--graph SPEC] [--plot digits.png]``. Every
agent has one image and trains a linear classifier. The attacker reads all messages and knows all
other images. The last row is CorN's noise with one seed for all agents, designed against an
eavesdropper, and attacked by an insider that it was not designed for.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from corn.audit import View, find_smallest_break
from corn.audit.reconstruction import (
    choose_images,
    find_recoverable,
    list_observed,
    make_knowledge,
    reconstruct_images,
)
from corn.audit.views import list_worst_views
from corn.covariance import EAVESDROPPER, ThreatModel
from corn.learn.datasets import load_dataset
from corn.learn.method import Method
from corn.plan import make_plan
from corn.privacy import PrivacyBudget
from corn.report.audits import plot_reconstructions
from corn.report.style import save_figure
from corn.topology import Network, load_network

KNOWLEDGE_STEPS = 30


def make_scenes(network: Network, budget: PrivacyBudget) -> list[tuple[Method, View, str]]:
    """Return each mechanism, its attacker, and the attacker in words."""
    inside = make_plan(network, budget, threat=ThreatModel(1))
    outside = make_plan(network, budget, threat=EAVESDROPPER)
    ldp = make_plan(network, budget, mechanism="ldp", threat=EAVESDROPPER)
    broken = find_smallest_break(outside)
    # A plan that no coalition breaks still gets a row; any agent will do as the insider.
    insider = View((network.num_agents - 1,)) if broken is None else broken.view
    shared = Method.from_plan(outside, name="CorN, one seed for all")
    return [
        (Method.non_private(*budget.queries), View(), "anybody"),
        (Method.from_plan(ldp, name="LDP"), View(), "anybody"),
        # The strongest attacker that the plan promises to withstand.
        (Method.from_plan(inside, name="CorN"), list_worst_views(inside)[0], "an insider"),
        (shared, insider, "an insider it was not designed for"),
    ]


def describe_knowledge(network: Network, insider: int) -> str:
    """Return how many gradients an insider recovers from messages without noise."""
    observed = list_observed(network.mixing_matrix, [insider])
    recovered = find_recoverable(make_knowledge(network.step_matrix, observed, KNOWLEDGE_STEPS))
    beyond = set(recovered) - set(observed)
    return (
        f"without noise, agent {insider} recovers the gradients of {len(beyond)} agents that are "
        f"not its neighbours from {KNOWLEDGE_STEPS} steps of its {len(observed) - 1} neighbours' "
        "messages"
    )


def main() -> None:
    """Attack each mechanism, print how similar the images are, and draw them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=["digits", "mnist"], default="digits")
    parser.add_argument("--graph", default="er:n=60,p=0.1,seed=1")
    parser.add_argument("--epsilon", type=float, default=10)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    # The attacker reads single releases, which masks hide under exact sums.
    network = load_network(options.graph, mixing="gossip")
    budget = PrivacyBudget(options.epsilon, 1e-5, num_steps=options.steps, clip=0.1)
    dataset = load_dataset(options.task, stand_in=False)
    data, prior = choose_images(dataset, network.num_agents, seed=0)
    scenes = make_scenes(network, budget)
    # Nobody who attacks in one scene is a victim in another, so that rows show the same images.
    insiders = {agent for _, view, _ in scenes for agent in view.coalition}
    victims = [i for i in range(network.num_agents) if i not in insiders][: options.images]
    labels = data.targets.numpy()[victims]
    print(f"promise: {budget.describe()}")
    print(f"neighbours only: {describe_knowledge(network, min(insiders))}")
    print("similarity to the true image beyond the average image (1: the same, 0: unrelated)")
    rows = []
    for method, view, attacker in scenes:
        found = reconstruct_images(
            method,
            network,
            data,
            num_classes=dataset.num_classes,
            num_steps=options.steps,
            view=view,
            victims=victims,
            prior=prior,
            seed=0,
        )
        right = int((found.labels == labels).sum())
        rows.append((f"{method.name}; seen by {attacker}", found.images))
        print(
            f"{rows[-1][0]}: similarity {found.similarity.mean():.2f}, labels found {right} of "
            f"{len(labels)}"
        )
    if options.plot is not None:
        truth = data.inputs.numpy()[victims].astype(np.float64)
        title = f"Images that an attacker reconstructs from releases; {budget.describe()}"
        shape = dataset.image_shape or (1, data.inputs.shape[1])
        save_figure(plot_reconstructions(truth, rows, shape=shape, title=title), options.plot)


if __name__ == "__main__":
    main()
