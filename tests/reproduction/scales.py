"""Scales small enough for tests: six agents, a few steps."""

from dataclasses import replace

from reproduction.scale import QUICK, Training

TINY = replace(
    QUICK,
    name="tiny",
    num_agents=6,
    batch_size=8,
    epsilons=(3.0, 40.0),
    connectivities=(0.4, 1.0),
    sizes=(6, 8),
    insider_sizes=(6, 6),
    quadratic=Training("quadratic", "agent", 20, (1e-2,), 3, schedule="inverse-sqrt"),
    regression=Training("breast-cancer", "agent", 20, (1e-1, 1e-2), 2),
    network=Training("digits", "sample", 5, (1.0,), 2, model="network"),
    softmax=Training("digits", "agent", 5, (1e-1,), 2, model="linear"),
)

PILOTS = replace(
    TINY,
    connectivities=(0.4,),
    regression=Training(
        "breast-cancer", "agent", 20, (3.0, 0.3), 3, seeds_per_cell=1, num_pilots=1
    ),
)
"""The first of three seeds chooses step sizes: large without noise, small with much noise."""
