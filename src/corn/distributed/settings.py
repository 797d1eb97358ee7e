"""How agents run: what all of them must agree on, and what is each one's own."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, get_args

from corn.errors import InvalidArgumentError
from corn.learn.schedule import Constant, Schedule
from corn.plan import Plan

DropoutPolicy: TypeAlias = Literal["continue", "replan", "stop"]

_MAX_TIMEOUT = 1e6
_REPLAN_LIMIT = 2


@dataclass(frozen=True)
class RunSettings:
    """How to run a plan; the same for all agents.

    Attributes:
        schedule: step sizes.
        num_steps: T; at most the plan's, and by default that.
        batch_size: samples a mini-batch; by default the budget's, or an agent's whole data.
        seed: of the initial models; public.
        gossip_rounds: mixing rounds a step; by default what the plan was designed for.
        cooldown_rounds: mixing rounds after the last step; by default the plan's.
        on_dropout: what the others do when an agent is lost: ``continue`` on the surviving graph,
            ``replan`` their noise for it, or ``stop``.
        timeout: seconds of silence after which an agent is given up.
        checkpoint_every: steps between checkpoints.
        evaluate_at: steps to measure at; by default 0, the last, and some twenty between.
        resume: go on from the newest checkpoint that every agent has.
        rehearsal_seed: take keys, nonce and batches from this public seed, as a simulation with
            ``noise_keys="seed"`` does, to compare with it. **Protects nothing.**
    """

    schedule: Schedule = field(default_factory=lambda: Constant(0.01))
    num_steps: int | None = None
    batch_size: int | None = None
    seed: int = 0
    gossip_rounds: int | None = None
    cooldown_rounds: int | None = None
    on_dropout: DropoutPolicy = "continue"
    timeout: float = 60.0
    checkpoint_every: int = 100
    evaluate_at: tuple[int, ...] | None = None
    resume: bool = False
    rehearsal_seed: int | None = None

    def __post_init__(self) -> None:
        if self.on_dropout not in get_args(DropoutPolicy):
            raise InvalidArgumentError(
                f"on_dropout must be continue, replan or stop, found {self.on_dropout!r}"
            )
        if not 0 < self.timeout <= _MAX_TIMEOUT:
            raise InvalidArgumentError(
                f"timeout must be positive seconds, at most {_MAX_TIMEOUT:g}, found {self.timeout}"
            )
        if self.checkpoint_every < 1:
            raise InvalidArgumentError(
                f"checkpoint_every must be at least 1, found {self.checkpoint_every}"
            )

    @property
    def is_rehearsal(self) -> bool:
        """Whether noise comes from a public seed, and protects nothing."""
        return self.rehearsal_seed is not None

    def steps_of(self, plan: Plan) -> int:
        """T: as asked for, or as planned."""
        planned = plan.budget.num_steps
        steps = planned if self.num_steps is None else self.num_steps
        if not 1 <= steps <= planned:
            raise InvalidArgumentError(
                f"num_steps must be from 1 to {planned}, for which the plan was made, found {steps}"
            )
        return steps

    def rounds_of(self, plan: Plan) -> tuple[int, int]:
        """Mixing rounds a step and at the end: as asked for, or as the noise was designed for."""
        planned = plan.objective
        gossip = int(getattr(planned, "gossip_rounds", 1))
        cooldown = int(getattr(planned, "cooldown_rounds", 0))
        return (
            gossip if self.gossip_rounds is None else self.gossip_rounds,
            cooldown if self.cooldown_rounds is None else self.cooldown_rounds,
        )

    def batch_of(self, plan: Plan) -> int | None:
        """The batch size; the budget's, where privacy was counted for one."""
        counted = plan.budget.query.batch_size
        if counted is not None and self.batch_size not in (None, counted):
            raise InvalidArgumentError(
                f"batch_size must be {counted}, for which privacy was counted, found "
                f"{self.batch_size}"
            )
        return self.batch_size if counted is None else counted

    def evaluation_steps(self, plan: Plan) -> frozenset[int]:
        """Return the steps to measure at."""
        from corn.learn.metrics import choose_evaluation_steps

        return choose_evaluation_steps(self.evaluate_at, self.steps_of(plan))

    def describe(self, plan: Plan) -> dict[str, str]:
        """What all agents must agree on, by name, as text."""
        gossip, cooldown = self.rounds_of(plan)
        return {
            "step sizes": repr(self.schedule),
            "steps": str(self.steps_of(plan)),
            "batch size": str(self.batch_of(plan)),
            "seed of initial models": str(self.seed),
            "gossip rounds": str(gossip),
            "cool-down rounds": str(cooldown),
            "type of models": plan.dtype,
            "policy on dropout": self.on_dropout,
            "time-out": f"{self.timeout:g} s",
            "checkpoints every": str(self.checkpoint_every),
            "measurements": ",".join(map(str, sorted(self.evaluation_steps(plan)))),
            "resume": str(self.resume),
            "rehearsal": str(self.rehearsal_seed),
        }

    def with_seed(self, seed: int) -> RunSettings:
        """The same with a seed that agents drew together, unless this is a rehearsal."""
        return self if self.rehearsal_seed is not None else replace(self, seed=seed)

    def check_plan(self, plan: Plan) -> None:
        """Refuse a policy that cannot be kept under this plan."""
        if plan.network.graph.is_directed() and self.on_dropout != "stop":
            raise InvalidArgumentError(
                "on_dropout must be 'stop' where links are one-way: both ends of a link must hear "
                f"each other to agree on new weights, found {self.on_dropout!r}"
            )
        largest = max(map(len, plan.decomposition.seed_groups), default=0)
        if self.on_dropout == "replan" and largest > _REPLAN_LIMIT:
            raise InvalidArgumentError(
                "on_dropout='replan' needs seeds of pairs or links, as larger groups would have "
                f"to be dealt new seeds, found a group of {largest}: plan with --seeds pairs, or "
                "use continue"
            )
