"""A proposal for a run on a network: batches, steps, step size, gossip and cool-down."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from corn.covariance import ThreatModel, default_objective, design
from corn.covariance.threat import EAVESDROPPER
from corn.errors import InvalidArgumentError
from corn.plan.advice import Prospect, TrainingScale, choose_prospect, expect, list_prospects
from corn.privacy import PrivacyBudget
from corn.topology import Gossip, Network, choose_cooldown

_GOSSIPS = (Gossip(1), Gossip(2), Gossip(3, "chebyshev"))
_TOLERANCE = 0.05
# The ratio to a trusted server is interpolated between designs for these numbers of steps.
_DESIGNED_STEPS = (50, 500, 5000)
# Designs against insiders of larger networks take minutes; advice needs an estimate only.
_MOST_AGENTS = 60


@dataclass(frozen=True)
class MixingChoice:
    """Gossip rounds for a network, with their cost and their effect.

    Attributes:
        gossip: the mixing rounds of a step.
        central_ratio: noise variance of the average over that of a trusted server.
        cooldown_steps: the steps at the end that only mix.
        num_messages: messages over each link and direction in the whole run.
        excess: the loss that the model expects above the least one.
    """

    gossip: Gossip
    central_ratio: float
    cooldown_steps: int
    num_messages: int
    excess: float


@dataclass(frozen=True, eq=False)
class Proposal:
    """Settings for a run, chosen without data, and those that they were chosen from.

    Attributes:
        scale: what was known.
        budget: the promise, with batches, steps and sampling.
        prospect: the expectation with exact calibration and the chosen mixing.
        mixing: the chosen mixing.
        prospects: all batches and steps that were compared, with one gossip round.
        mixings: all gossip that was compared.
        threat: the adversary that the ratios to a trusted server hold for.
    """

    scale: TrainingScale
    budget: PrivacyBudget
    prospect: Prospect
    mixing: MixingChoice
    prospects: tuple[Prospect, ...]
    mixings: tuple[MixingChoice, ...]
    threat: ThreatModel


def propose(network: Network, scale: TrainingScale, *, threat: ThreatModel) -> Proposal:
    """Return the cheapest settings that the model expects to be nearly the best (``advice``).

    On networks of more than 60 agents, noise designed against an eavesdropper stands for noise
    against insiders, which would take minutes to design.
    """
    if network.num_agents > _MOST_AGENTS:
        threat = EAVESDROPPER
    # Batches and steps are chosen before gossip, which then is compared at the chosen numbers only.
    network = replace(network, gossip=Gossip(1))
    ratios = [_find_ratio(network, num_steps, threat) for num_steps in _DESIGNED_STEPS]
    prospects = list_prospects(
        scale,
        central_ratio=lambda num_steps: float(
            np.interp(math.log(num_steps), np.log(_DESIGNED_STEPS), ratios)
        ),
    )
    chosen = choose_prospect(prospects)
    budget = scale.make_budget(chosen.batch_size, chosen.num_steps)
    mixings = _compare_gossip(network, scale, budget, chosen, threat)
    mixing = _choose_mixing(mixings)
    return Proposal(
        scale=scale,
        budget=budget,
        prospect=_expect_exactly(scale, budget, chosen, mixing.central_ratio),
        mixing=mixing,
        prospects=tuple(prospects),
        mixings=tuple(mixings),
        threat=threat,
    )


def _compare_gossip(
    network: Network,
    scale: TrainingScale,
    budget: PrivacyBudget,
    chosen: Prospect,
    threat: ThreatModel,
) -> list[MixingChoice]:
    found = []
    for gossip in _GOSSIPS:
        try:
            mixed = replace(network, gossip=gossip)
            ratio = _find_ratio(mixed, chosen.num_steps, threat)
        except InvalidArgumentError:
            continue  # Chebyshev rounds need symmetric weights
        cooldown = choose_cooldown(mixed, chosen.num_steps)
        found.append(
            MixingChoice(
                gossip=gossip,
                central_ratio=ratio,
                cooldown_steps=cooldown,
                num_messages=gossip.rounds * (chosen.num_steps + cooldown),
                excess=_expect_exactly(scale, budget, chosen, ratio).excess,
            )
        )
    return found


def _choose_mixing(mixings: Sequence[MixingChoice]) -> MixingChoice:
    """Return the fewest messages of those within a twentieth of the least excess."""
    limit = (1 + _TOLERANCE) * min(own.excess for own in mixings)
    return min((own for own in mixings if own.excess <= limit), key=lambda own: own.num_messages)


def _expect_exactly(
    scale: TrainingScale, budget: PrivacyBudget, chosen: Prospect, central_ratio: float
) -> Prospect:
    return expect(
        scale,
        chosen.batch_size,
        chosen.num_steps,
        precision_cap=budget.precision_cap,
        central_ratio=central_ratio,
    )


def _find_ratio(network: Network, num_steps: int, threat: ThreatModel) -> float:
    # The ratio is the same for every cap, so none needs to be calibrated for it.
    made = design(network, 1.0, objective=default_objective(num_steps), threat=threat)
    return made.central_ratio
