"""Scales of a reproduction: the paper's settings, and reduced ones that take a few minutes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from corn.checks import require, require_count, require_positive
from corn.errors import InvalidArgumentError
from corn.learn.datasets import ModelName
from corn.learn.schedule import ScheduleName
from corn.privacy import Unit
from corn.topology import load_network
from reproduction.mechanisms import MECHANISMS, Mechanism

PAPER_STEP_SIZES = (1e-1, 5e-2, 1e-2, 5e-3, 1e-3)


@dataclass(frozen=True)
class Training:
    """The settings of one training task.

    Attributes:
        task: a workload: ``quadratic`` or a data set.
        unit: the unit of privacy, which also decides what is clipped.
        num_steps: T.
        step_sizes: the grid. Each mechanism gets the step size with the least mean validation loss
            over the pilot seeds.
        num_seeds: the number of runs of every mechanism, with seeds 0, 1, …
        seeds_per_cell: the number of seeds that are computed and stored together.
        model: the model, or None for the default of the workload.
        schedule: the step-size schedule.
        num_pilots: the number of pilot seeds, or None for all. Pilots run at every step size and
            choose one for each mechanism; all other seeds run at the chosen step size only.
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
        if self.num_pilots is not None:
            require_count("num_pilots", self.num_pilots, advice="None makes every seed a pilot")

    @property
    def pilot_blocks(self) -> tuple[tuple[int, ...], ...]:
        """Pilot seeds, in blocks of one cell each."""
        return self._blocks(0, self._first_repeat)

    @property
    def repeat_blocks(self) -> tuple[tuple[int, ...], ...]:
        """Seeds that run at the chosen step size only, in blocks of one cell each."""
        return self._blocks(self._first_repeat, self.num_seeds)

    @property
    def _first_repeat(self) -> int:
        return self.num_seeds if self.num_pilots is None else min(self.num_pilots, self.num_seeds)

    def _blocks(self, start: int, stop: int) -> tuple[tuple[int, ...], ...]:
        seeds, size = tuple(range(start, stop)), self.seeds_per_cell
        return tuple(seeds[k : k + size] for k in range(0, len(seeds), size))


@dataclass(frozen=True)
class Scale:
    """The settings of a reproduction; defaults are those of the paper's experiments.

    Attributes:
        name: ``quick`` or ``full``, and ``in part`` with other settings.
        epsilons: values of ε in panels that vary ε, at connectivity ``connectivity``.
        connectivities: values of p in panels that vary p, at ``epsilon``.
        sizes: numbers of agents in Figure 1c.
        insider_sizes: the largest network with a design against 1 insider, and against 2.
        quadratic: the task of Figure 3.
        regression: the task of Figure 4. Figures 1 and 2 use its number of steps.
        network: the task of Figure 5 with unit sample.
        softmax: the task of Figure 5 with unit agent.
        graph_spec: the graph, in which {n}, {p} and {seed} stand for numbers.
        mechanisms: The lines of all figures.
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
    graph_spec: str = "er:n={n},p={p},seed={seed}"
    mechanisms: tuple[Mechanism, ...] = MECHANISMS

    def lines(self, unit: Unit) -> tuple[Mechanism, ...]:
        """Return the mechanisms of a panel with this unit of privacy."""
        return tuple(
            line for line in self.mechanisms if unit == "sample" or not line.is_for_samples
        )

    def graph(self, connectivity: float, num_agents: int | None = None) -> str:
        """Return the spec of the graph: by default an Erdős–Rényi graph of this connectivity."""
        # Not ``str.format``: a file name may contain other braces.
        values = {
            "{n}": str(num_agents or self.num_agents),
            "{p}": f"{connectivity:g}",
            "{seed}": str(self.graph_seed),
        }
        spec = self.graph_spec
        for name, value in values.items():
            spec = spec.replace(name, value)
        return spec

    @property
    def place(self) -> str:
        """The graph of panels that vary neither it nor its size, for titles."""
        if self.graph_spec == Scale.graph_spec:
            return f"p = {self.connectivity:g}"
        return f"graph {self.graph(self.connectivity)}"

    def find_obstacle(self, figure: str) -> str | None:
        """Return the field that the graph lacks for a figure that varies it, or None."""
        # Figures named …b vary p. The letter is the fifth character, and more may follow it.
        needed = "{n}" if figure.startswith("fig1c") else "{p}" if "b" in figure[4:6] else ""
        return None if needed in self.graph_spec else needed

    def restrict(
        self,
        *,
        epsilons: Sequence[float] = (),
        connectivities: Sequence[float] = (),
        num_seeds: int | None = None,
        num_agents: int | None = None,
        num_steps: int | None = None,
        clip: float | None = None,
        graph: str | None = None,
        mechanisms: Sequence[Mechanism] = (),
    ) -> Scale:
        """Return this scale with other settings; its name then says so."""
        is_valid = all(0 < p <= 1 for p in connectivities)
        require(is_valid, "connectivities", "in (0, 1]", tuple(connectivities))
        if num_agents is not None:
            require_count("agents", num_agents)
        if clip is not None:
            require_positive("clip", clip)
        changed: dict[str, Any] = {
            # As floats: 3 and 3.0 would be two places and two keys.
            "epsilons": tuple(sorted(set(map(float, epsilons)))),
            "connectivities": tuple(sorted(set(map(float, connectivities)))),
            "num_agents": num_agents,
            "clip": clip,
            "graph_spec": graph,
            "mechanisms": tuple(mechanisms),
        }
        training = {"num_seeds": num_seeds, "num_steps": num_steps}
        training = {name: value for name, value in training.items() if value is not None}
        if training:
            for name in ("quadratic", "regression", "network", "softmax"):
                changed[name] = replace(getattr(self, name), **training)
        changed = {name: value for name, value in changed.items() if value not in (None, ())}
        if not changed:
            return self
        # A report of other settings must not pass for one of the paper's.
        scale = replace(self, name=f"{self.name}, in part", **changed)
        if "{n}" in scale.graph_spec:
            return scale
        found = load_network(scale.graph(scale.connectivity), mixing="gossip").num_agents
        if num_agents not in (None, found):
            raise InvalidArgumentError(
                f"agents must be {found}, as in the graph, found {num_agents}: leave it out, "
                "or write {n} in --graph"
            )
        return replace(scale, num_agents=found)


FULL = Scale(
    name="full",
    # 30 and 40 are the paper's own, beyond the range that eq. (13b) is proved for (docs/theory.md).
    epsilons=(3, 5, 7, 10, 15, 20, 25, 30, 40),
    connectivities=(0.2, 0.4, 0.6, 0.8, 1.0),
    sizes=(10, 20, 40, 60, 80, 100, 200, 500, 1000),
    # Designs against insiders have a constraint per coalition and agent, hence smaller networks.
    insider_sizes=(40, 20),
    # The standard deviation of the gap over seeds is as large as its mean, and one seed takes about
    # a second: 100 seeds make the intervals narrow.
    quadratic=Training(
        task="quadratic",
        unit="agent",
        num_steps=5000,
        step_sizes=(1e-2,),
        num_seeds=100,
        seeds_per_cell=100,
        schedule="inverse-sqrt",
    ),
    regression=Training(
        task="a9a", unit="agent", num_steps=5000, step_sizes=PAPER_STEP_SIZES, num_seeds=10
    ),
    # With unit sample each gradient is clipped and the mini-batch averaged, as published code for
    # this experiment does. Gradients of norm at most C would leave the paper's step sizes far from
    # any minimum, hence the larger ones. All step sizes of one seed of MNIST take a quarter of an
    # hour, so the first seed chooses them for all.
    network=Training(
        task="mnist",
        unit="sample",
        num_steps=1000,
        step_sizes=(5, 2, 1, 0.5, 0.2),
        num_seeds=10,
        seeds_per_cell=1,
        model="network",
        num_pilots=1,
    ),
    softmax=Training(
        task="mnist",
        unit="agent",
        num_steps=5000,
        step_sizes=PAPER_STEP_SIZES,
        num_seeds=10,
        seeds_per_cell=1,
        model="linear",
        num_pilots=1,
    ),
)
"""The paper's settings on its data sets, with three exceptions: the number of seeds of the
quadratic, step sizes chosen on one seed of MNIST and, for unit sample, the number of steps and the
step sizes.
"""

QUICK = Scale(
    name="quick",
    epsilons=(3, 10, 30),
    connectivities=(0.3, 0.6, 1.0),
    sizes=(10, 20, 50, 100),
    insider_sizes=(20, 12),
    quadratic=Training(
        task="quadratic",
        unit="agent",
        num_steps=1000,
        step_sizes=(1e-2,),
        num_seeds=20,
        schedule="inverse-sqrt",
    ),
    regression=Training(
        task="breast-cancer",
        unit="agent",
        num_steps=500,
        step_sizes=(1e-1, 1e-2, 1e-3),
        num_seeds=10,
    ),
    network=Training(
        task="digits",
        unit="sample",
        num_steps=200,
        step_sizes=(5, 2, 1, 0.5),
        num_seeds=4,
        model="network",
    ),
    softmax=Training(
        task="digits",
        unit="agent",
        num_steps=500,
        step_sizes=(1e-1, 1e-2, 1e-3),
        num_seeds=4,
        model="linear",
    ),
    num_agents=12,
    batch_size=32,
)
"""Every figure at reduced scale, in a few minutes, on data sets that need no download."""
