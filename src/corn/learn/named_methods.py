"""Methods by the names of mechanisms, each designed for one network and budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np

from corn.checks import require, require_choice
from corn.covariance import (
    DEFAULT_THREAT,
    Decomposition,
    Horizon,
    MechanismName,
    Objective,
    OwnMechanism,
    ThreatModel,
    design,
    read_mechanism,
)
from corn.covariance.design import require_feasible_size
from corn.covariance.disagreement import disagreement_ratio
from corn.covariance.lattice import LatticeNoise, design_lattice, design_lattice_pairs
from corn.covariance.lattice_pairs import design_lattice_insider
from corn.covariance.masks import design_masks
from corn.covariance.threat import EAVESDROPPER, SPARSE_PARTNERS
from corn.learn.method import Method
from corn.learn.names import METHOD_NAMES
from corn.privacy import PrivacyBudget
from corn.topology import Mixing, Network
from corn.topology.sparse import find_lattice

_MOST_DENSE_DESIGN = 2000
"""Agents beyond which rings and tori are designed by Fourier transform, where that is possible."""


def make_methods(
    names: Sequence[str],
    network: Network,
    budget: PrivacyBudget,
    *,
    objective: Objective,
    threat: ThreatModel | None = None,
) -> list[Method]:
    """Make methods for the mechanisms named, each designed for the budget under one objective.

    ``none`` clips but has no noise; ``unclipped`` has neither; ``central`` trusts a server.
    ``corn`` is designed against ``threat``, and ``ldp``, which shares no seeds, holds against it
    too; None is the default of ``corn.design``, one insider. ``decor``, ``zero-sum`` and a
    covariance of one's own (``NAME=R.npy``, ``NAME=FILE.py:FUNCTION``) hold against an eavesdropper
    only, whatever the threat.
    """
    # All names are checked before the first design, which can take minutes.
    own = {name: read_mechanism(name) for name in names}
    for name, mechanism in own.items():
        if mechanism is None:
            require_choice("mechanism", name, METHOD_NAMES, advice="or NAME=R.npy of your own")
    # Rows are told apart by these labels, without the file of an own mechanism.
    labels = [name.partition("=")[0] for name in names]
    repeated = sorted({label for label in labels if labels.count(label) > 1})
    require(not repeated, "mechanism", "different names", f"{', '.join(repeated)} twice")
    return [
        _make_method(name, network, budget, objective, threat)
        if mechanism is None
        else _make_own_method(mechanism, network, budget, objective)
        for name, mechanism in own.items()
    ]


def _make_own_method(
    mechanism: OwnMechanism, network: Network, budget: PrivacyBudget, objective: Objective
) -> Method:
    require(mechanism.label not in METHOD_NAMES, "mechanism", "a new name", repr(mechanism.label))
    designed = design(network, budget, mechanism=mechanism, objective=objective)
    return Method.private(mechanism.label, designed, budget)


def _make_method(
    name: str,
    network: Network,
    budget: PrivacyBudget,
    objective: Objective,
    threat: ThreatModel | None,
) -> Method:
    if name == "unclipped":
        return Method.non_private(name=name)
    if name == "none":
        # Clipped like the private methods: the difference to them is then the noise alone.
        return Method.non_private(*budget.queries)
    if name == "central":
        return Method.central(budget, network.num_agents)
    made = _design_at_scale(name, network, budget, objective, threat)
    if made is not None:
        return made
    designed = design(
        network,
        budget,
        mechanism=cast("MechanismName", name),
        objective=objective,
        # Noise that pairs of agents cancel is known to either of them: no ε holds against insiders.
        threat=threat if name in ("corn", "ldp") else EAVESDROPPER,
    )
    return Method.private(name, designed, budget)


def _design_at_scale(
    name: str,
    network: Network,
    budget: PrivacyBudget,
    objective: Objective,
    threat: ThreatModel | None,
) -> Method | None:
    """Make a method without matrices of n × n numbers, if the network is large and it can be."""
    n = network.num_agents
    if n <= _MOST_DENSE_DESIGN:
        return None
    caps = budget.precision_caps(n)
    if name == "ldp":
        # Noise by a formula, of which the bound on all covariances is not asked here.
        # Without shared seeds insiders know no more than an eavesdropper (docs/theory.md,
        # “Insiders”).
        holds = replace(threat or DEFAULT_THREAT, seeds="global")
        return Method.private(name, Decomposition(1 / caps), budget, threat=holds)
    if name == "corn" and network.mixing == "sum":
        # The optimum is a formula, whose record in ``design`` has matrices of n × n.
        held = (threat or DEFAULT_THREAT).resolve(network.graph, "sum")
        masks = design_masks(caps, held.seed_groups(network.graph), held.max_colluders)
        made = Method.private(name, masks, budget, threat=held)
        return replace(made, disagreement_ratio=0.0)
    row = find_lattice(network.sparse_matrix)
    # Fourier transforms diagonalise R only if the network looks the same from every agent: a
    # lattice, and one cap for all.
    if row is not None and isinstance(objective, Horizon) and not np.ptp(caps):
        lattice = _choose_lattice_design(name, threat or DEFAULT_THREAT, network.mixing)
        if lattice is not None:
            solve, holds = lattice
            noise = solve(row, float(caps[0]), objective=objective, gossip=network.gossip)
            ratio = disagreement_ratio(
                network,
                noise,
                precision_cap=float(caps[0]),
                momentum=objective.momentum,
                num_steps=budget.num_steps,
            )
            made = Method.private(name, noise, budget, threat=holds)
            return replace(made, disagreement_ratio=ratio)
    if name == "corn":
        require_feasible_size(n, threat or DEFAULT_THREAT)
    return None


def _choose_lattice_design(
    name: str, threat: ThreatModel, mixing: Mixing
) -> tuple[Callable[..., LatticeNoise], ThreatModel] | None:
    """Return the design of a mechanism on rings and tori, and the threat that it holds against."""
    if name == "decor":
        return partial(design_lattice_pairs, mixing=mixing), EAVESDROPPER
    if name == "corn" and threat == EAVESDROPPER:
        return design_lattice, EAVESDROPPER
    # This design has seeds of sparse hops, so the promise names them also where the default
    # arrangement was asked for.
    sparse = replace(DEFAULT_THREAT, seeds=f"sparse:{SPARSE_PARTNERS}")
    if name == "corn" and threat in (DEFAULT_THREAT, sparse):
        return design_lattice_insider, sparse
    return None
