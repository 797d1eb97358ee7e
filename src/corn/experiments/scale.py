"""How much of the matrix is run: the paper's settings, or a few minutes' worth of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from corn.errors import InvalidArgumentError
from corn.learn.names import ModelName
from corn.learn.schedule import ScheduleName
from corn.privacy import Unit

PAPER_STEP_SIZES = (1e-1, 5e-2, 1e-2, 5e-3, 1e-3)


@dataclass(frozen=True)
class Training:
    """One training task of the paper, as it is run.

    Attributes:
        task: a workload: ``quadratic`` or a data set.
        unit: whose data is protected, and so what is clipped.
        num_steps: T.
        step_sizes: each method gets the one with the least mean validation loss over the pilots.
        num_seeds: runs of every method, with seeds 0, 1, …
        seeds_per_cell: how many of them are computed, kept and lost together.
        model: the default of the workload if None.
        schedule: how step sizes go on.
        num_pilots: how many of the seeds, the first, run at every step size and choose it for all;
            the others run at the chosen one only. None: all of them.
    """

    task: str
    unit: Unit
    num_steps: int
    step_sizes: tuple[float, ...]
    num_seeds: int
    seeds_per_cell: int = 10
    model: ModelName | None = None
    schedule: ScheduleName = "constant"
    num_pilots: int | None = None

    def __post_init__(self) -> None:
        if self.num_pilots is not None and self.num_pilots < 1:
            raise InvalidArgumentError(
                f"num_pilots must be at least 1, or None for all seeds, found {self.num_pilots}"
            )

    @property
    def pilot_blocks(self) -> tuple[tuple[int, ...], ...]:
        """The seeds that run at every step size, as they are computed together."""
        return self._blocks(0, self._first_repeat)

    @property
    def repeat_blocks(self) -> tuple[tuple[int, ...], ...]:
        """The seeds that run at the chosen step size only, as they are computed together."""
        return self._blocks(self._first_repeat, self.num_seeds)

    @property
    def _first_repeat(self) -> int:
        return self.num_seeds if self.num_pilots is None else min(self.num_pilots, self.num_seeds)

    def _blocks(self, start: int, stop: int) -> tuple[tuple[int, ...], ...]:
        seeds, size = tuple(range(start, stop)), self.seeds_per_cell
        return tuple(seeds[k : k + size] for k in range(0, len(seeds), size))


@dataclass(frozen=True)
class Scale:
    """The settings of a reproduction; those of the paper's experiments unless said otherwise.

    Attributes:
        name: ``quick`` or ``full``.
        epsilons: of the panels that vary ε, at connectivity ``connectivity``.
        connectivities: of the panels that vary p, at ``epsilon``.
        sizes: numbers of agents of Figure 1c.
        insider_sizes: the largest of them with a design against 1 and 2 insiders.
        quadratic, regression, network, softmax: the tasks of Figures 3, 4, and 5 twice.
    """

    name: str
    epsilons: tuple[float, ...]
    connectivities: tuple[float, ...]
    sizes: tuple[int, ...]
    insider_sizes: tuple[int, int]
    quadratic: Training
    regression: Training
    network: Training
    softmax: Training
    num_agents: int = 20
    epsilon: float = 10.0
    connectivity: float = 0.5
    delta: float = 1e-5
    clip: float = 0.1
    batch_size: int = 128
    partition: str = "dirichlet:10"
    graph_seed: int = 1
    data_seed: int = 1

    def graph(self, connectivity: float, num_agents: int | None = None) -> str:
        """The Erdős–Rényi graph of a connectivity, as a spec."""
        return f"er:n={num_agents or self.num_agents},p={connectivity:g},seed={self.graph_seed}"

    def restrict(
        self,
        *,
        epsilons: Sequence[float] = (),
        connectivities: Sequence[float] = (),
        num_seeds: int | None = None,
    ) -> Scale:
        """The same with other values of ε and p, and other numbers of seeds, where given."""
        if any(not 0 < p <= 1 for p in connectivities):
            raise InvalidArgumentError(
                f"connectivities must be in (0, 1], found {tuple(connectivities)}"
            )
        tasks = {
            name: replace(getattr(self, name), num_seeds=num_seeds)
            for name in ("quadratic", "regression", "network", "softmax")
            if num_seeds is not None
        }
        changed = epsilons or connectivities or num_seeds is not None
        return replace(
            self,
            name=f"{self.name}, in part" if changed else self.name,
            epsilons=_in_order(epsilons) or self.epsilons,
            connectivities=_in_order(connectivities) or self.connectivities,
            **tasks,
        )


def _in_order(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(sorted({float(value) for value in values}))


FULL = Scale(
    "full",
    epsilons=(3, 5, 7, 10, 15, 20, 25, 30, 40),
    connectivities=(0.2, 0.4, 0.6, 0.8, 1.0),
    sizes=(10, 20, 40, 60, 80, 100, 200, 500, 1000),
    insider_sizes=(40, 20),
    # The gap varies between seeds as much as its mean, and a seed costs a second: so more of them.
    quadratic=Training(
        "quadratic", "agent", 5000, (1e-2,), 100, seeds_per_cell=100, schedule="inverse-sqrt"
    ),
    regression=Training("a9a", "agent", 5000, PAPER_STEP_SIZES, 10),
    # Samples are clipped one by one and averaged, as published code for this experiment does. With
    # gradients of at most C, the paper's step sizes would end far from any minimum. All step sizes
    # of a seed of MNIST take a quarter of an hour: the first seed chooses them for the others.
    network=Training(
        "mnist",
        "sample",
        1000,
        (5, 2, 1, 0.5, 0.2),
        10,
        seeds_per_cell=1,
        model="network",
        num_pilots=1,
    ),
    softmax=Training(
        "mnist",
        "agent",
        5000,
        PAPER_STEP_SIZES,
        10,
        seeds_per_cell=1,
        model="linear",
        num_pilots=1,
    ),
)
"""The paper's settings on the real data sets, but for the number of seeds of the quadratic, the
choice of step sizes on one seed of MNIST and, at sample level, the number of steps and their sizes.
"""

QUICK = Scale(
    "quick",
    epsilons=(3, 10, 30),
    connectivities=(0.3, 0.6, 1.0),
    sizes=(10, 20, 50, 100),
    insider_sizes=(20, 12),
    quadratic=Training("quadratic", "agent", 1000, (1e-2,), 20, schedule="inverse-sqrt"),
    regression=Training("breast-cancer", "agent", 500, (1e-1, 1e-2, 1e-3), 10),
    network=Training("digits", "sample", 200, (5, 2, 1, 0.5), 4, model="network"),
    softmax=Training("digits", "agent", 500, (1e-1, 1e-2, 1e-3), 4, model="linear"),
    num_agents=12,
    batch_size=32,
)
"""A few minutes, with data sets that are always there: the shape of every figure."""
