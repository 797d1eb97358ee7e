"""Settings of a run: those that all agents must share, and those of one agent's process."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from corn.checks import require_choice, require_count
from corn.errors import InvalidArgumentError
from corn.learn.schedule import Constant, Schedule
from corn.plan import Plan
from corn.version import __version__

if TYPE_CHECKING:  # torch takes seconds to import, and every command reads this module
    from corn.distributed.planning import PlanningRequest
    from corn.distributed.requirements import Requirements
    from corn.learn.workloads import ProblemSource

DropoutPolicy: TypeAlias = Literal["replan", "stop"]

_MAX_TIMEOUT = 1e6


@dataclass(frozen=True)
class RunSettings:
    """Settings of a run, the same for all agents.

    Attributes:
        schedule: step sizes.
        num_steps: T; at most the plan's, and by default the plan's.
        batch_size: samples per mini-batch; by default the budget's, or an agent's whole data.
        seed: the seed of the initial models; it is public.
        on_dropout: what the others do when an agent is lost: ``replan`` their noise for the
            surviving graph, or ``stop``; by default ``replan`` where the seeds allow it, and
            ``stop`` otherwise.
        timeout: seconds without a message after which an agent is lost.
        checkpoint_every: steps between checkpoints.
        evaluate_at: steps to measure at; by default 0, the last, and 19 between.
        resume: continue from the newest checkpoint that every agent has.
    """

    schedule: Schedule = field(default_factory=lambda: Constant(0.01))
    num_steps: int | None = None
    batch_size: int | None = None
    seed: int = 0
    on_dropout: DropoutPolicy | None = None
    timeout: float = 60.0
    checkpoint_every: int = 100
    evaluate_at: tuple[int, ...] | None = None
    resume: bool = False

    def __post_init__(self) -> None:
        if self.on_dropout is not None:
            require_choice("on_dropout", self.on_dropout, get_args(DropoutPolicy))
        require_count("checkpoint_every", self.checkpoint_every)
        if not 0 < self.timeout <= _MAX_TIMEOUT:
            rule = f"timeout must be positive seconds, at most {_MAX_TIMEOUT:g}"
            raise InvalidArgumentError(f"{rule}, found {self.timeout}")

    def steps_of(self, plan: Plan) -> int:
        """Return T: as given, or as planned."""
        # Fewer steps spend less of the budget. More would exceed it.
        planned = plan.budget.num_steps
        steps = planned if self.num_steps is None else self.num_steps
        if not 1 <= steps <= planned:
            rule = f"num_steps must be from 1 to {planned}, for which the plan was made"
            raise InvalidArgumentError(f"{rule}, found {steps}")
        return steps

    def policy_for(self, plan: Plan) -> DropoutPolicy:
        """Return what survivors of a loss do: as given, or what the plan allows."""
        can_replan = plan.decomposition.is_masked or has_pair_seeds(plan)
        if self.on_dropout == "replan" and not can_replan:
            require_pair_seeds(plan, "on_dropout='replan'")
        return self.on_dropout or ("replan" if can_replan else "stop")

    def precision_of(self, plan: Plan, agent: int, planned: float) -> float:
        """Return the largest [R⁻¹]_ii that an agent may release with, ``planned`` or the cap."""
        # New plans for survivors give an agent other noise, of which only the cap is the same.
        if self.policy_for(plan) == "replan":
            return max(planned, float(plan.precision_caps[agent]))
        return planned

    def batch_of(self, plan: Plan) -> int | None:
        """Return the batch size; the budget's, where privacy was counted for one."""
        # In a smaller batch than the one counted each sample would weigh more than noise covers.
        counted = plan.budget.batch_size
        if counted is not None and self.batch_size not in (None, counted):
            rule = f"batch_size must be {counted}, for which privacy was counted"
            raise InvalidArgumentError(f"{rule}, found {self.batch_size}")
        return self.batch_size if counted is None else counted

    def evaluation_steps(self, plan: Plan) -> frozenset[int]:
        """Return the steps to measure at."""
        from corn.learn.metrics import choose_evaluation_steps

        return choose_evaluation_steps(self.evaluate_at, self.steps_of(plan))

    def describe(self, plan: Plan) -> dict[str, str]:
        """Return everything that all agents must agree on, by name, as text."""
        return {
            "step sizes": repr(self.schedule),
            "steps": str(self.steps_of(plan)),
            "batch size": str(self.batch_of(plan)),
            "seed of initial models": str(self.seed),
            "type of models": plan.dtype,
            "policy on dropout": self.policy_for(plan),
            "time-out": f"{self.timeout:g} s",
            "checkpoints every": str(self.checkpoint_every),
            "measurements": ",".join(map(str, sorted(self.evaluation_steps(plan)))),
            "resume": str(self.resume),
            # Messages and their meaning may change with a minor version, and do not otherwise.
            "version of CorN": ".".join(__version__.split(".")[:2]),
        }


def has_pair_seeds(plan: Plan) -> bool:
    """Return whether agents derive all seeds from two keys each, without messages to others."""
    return all(len(group) <= 2 for group in plan.decomposition.seed_groups)


def require_pair_seeds(plan: Plan, option: str) -> None:
    """Raise unless agents derive all seeds from their keys, without messages to absent ones."""
    if not has_pair_seeds(plan):
        raise InvalidArgumentError(
            f"{option} needs seeds of pairs or links, as larger groups would have to share new "
            "seeds: plan with --seeds pairs"
        )


@dataclass(frozen=True)
class AgentConfig:
    """Everything that one agent's process needs to start.

    ``source`` is the file of a plan, or a request for one that agents make together; then
    ``neighbours`` is all that the agent knows of the graph. At ``status`` it serves its status.
    """

    source: Path | PlanningRequest
    workload: ProblemSource
    settings: RunSettings
    out: Path
    agent: int
    num_agents: int
    store: tuple[str, int]
    keys: Path
    names: tuple[str, ...] = ()
    neighbours: tuple[int, ...] = ()
    opens_store: bool | None = None
    wait: float | None = None
    requirements: Requirements | None = None
    listen: tuple[str, int] | None = None
    advertise: tuple[str, int] | None = None
    rejoins: bool = False
    status: tuple[str, int] | None = None
