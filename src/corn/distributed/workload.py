"""A workload by name, as every agent makes it for itself: it takes its own part of the data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from corn.learn.batches import AgentData
from corn.learn.names import ModelName
from corn.learn.problem import TrainingProblem
from corn.learn.workloads import make_workload


@dataclass(frozen=True)
class Workload:
    """What to train; see :func:`corn.learn.workloads.make_workload`."""

    name: str
    model: ModelName | None = None
    partition: str = "dirichlet:10"
    seed: int = 0
    l2: float = 1e-4
    directory: Path | None = None
    stand_in: bool = True

    def build(self, num_agents: int) -> TrainingProblem:
        """The problem of all agents."""
        return make_workload(
            self.name,
            num_agents,
            model=self.model,
            partition=self.partition,
            seed=self.seed,
            l2=self.l2,
            directory=self.directory,
            stand_in=self.stand_in,
        )

    def describe(self, problem: TrainingProblem) -> str:
        """How the problem's data was chosen and dealt out, by which agents know it is the same."""
        stand_in = "".join(f"; {note}" for note in problem.notes)
        return f"{self.name}, {self.partition}, seed {self.seed}{stand_in}"


def own_part(problem: TrainingProblem, agent: int) -> TrainingProblem:
    """The same problem with one agent's training data and nobody else's."""
    data = problem.data
    rows = slice(data.offsets[agent], data.offsets[agent + 1])
    own = AgentData.from_parts([(data.inputs[rows].clone(), data.targets[rows].clone())])
    return replace(problem, data=own)
