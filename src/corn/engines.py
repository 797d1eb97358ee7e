"""One agent's releases under a plan of exact sums, for an engine that carries the messages.

Each round the agent clips its update, adds its share of the noise, rounds the sum to the grid and
hides it under masks. Whoever adds up the integers of all agents modulo 2^B gets the noisy sum.

The guarantee is the plan's, against the server and anybody else who reads all messages and models,
together with as many curious agents as the plan's threat names. Whatever the server asks of whom, a
release is either uniform or part of one sum with the noise of all honest agents in it
(docs/flower.md).
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, TypeGuard, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from corn.checks import FloatArray, require
from corn.distributed.keyring import load_credentials, make_source, open_ledger
from corn.distributed.membership import name_agents
from corn.distributed.recovery import replan
from corn.distributed.rendezvous import check_guarantee, is_public, name_kind
from corn.distributed.requirements import Requirements, compose_total
from corn.errors import CornError, FileFormatError, InvalidArgumentError, PublicError
from corn.files import writing_whole
from corn.learn.batches import AgentData, BatchSampler, require_fitting_samples
from corn.learn.consortium import Consortium, load_consortium
from corn.learn.perturbation import NoiseShare
from corn.learn.problem import DataSource, SweepSettings, TrainingProblem, read_samples
from corn.learn.step import AgentStepper, ClippedGradients, clip_gradients, compute_gradients
from corn.learn.tasks import Gradients, MeanLoss
from corn.learn.tasks.module import make_task
from corn.learn.trained import MODEL_FILE, ModelPromise, TrainedModel, load_model
from corn.learn.workloads import make_named_task
from corn.noise import BudgetSpentError, ReleaseLedger, Roster, agree_on_nonce
from corn.noise.ledger import find_agents, read_history
from corn.noise.masks import WORDS, MaskWords, draw_offset, is_possible, read_average
from corn.noise.stream import NONCE_BYTES, encode_fields
from corn.plan import Plan, fingerprint, load_plan
from corn.topology import load_network
from corn.topology.graphs import add_names, label_agent
from corn.transport import Credentials

FEWEST_AGENTS = 2
# The fields of a hello: a number, three digests and a signature.
_HELLO = struct.Struct(f"<I{NONCE_BYTES}s{NONCE_BYTES}s{NONCE_BYTES}s64s")
NO_MODEL = bytes(NONCE_BYTES)
"""The content of a hello in place of a digest, where the next model is not known yet."""

CONSORTIUM_FILE, PLAN_FILE = "consortium.toml", "plan.corn"
PARAMETERS = "parameters"
"""The one array of a model whose task has no module with names."""

# As they are named in messages: anybody may have sent one.
_WORDS: dict[str, np.dtype[Any]] = {np.dtype(each).str: np.dtype(each) for each in WORDS.values()}
_SUMS_KEPT = 4
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.002, 0.5
_LOGGER = logging.getLogger("corn.engines")


@dataclass(frozen=True, eq=False)
class MaskedUpdate:
    """The message of one agent in one round, which may be public."""

    integers: MaskWords  # modulo 2^B, shape (d,)
    offset_seed: bytes  # 32 random bytes, from which the agent's offset of the grid follows


# A client app is made anew for every message, and verifying a plan takes a while.
@lru_cache(maxsize=64)
def plan_for(plan: Plan, agents: tuple[int, ...]) -> Plan:
    """Return the plan of a round in which some agents take part, renumbered in their order.

    Each release under it keeps the agent's precision cap of the plan of all, against as many
    insiders, or against all other agents of the set.
    """
    if len(agents) == plan.num_agents:
        return plan
    # No message takes the links of a plan here, so they may be any that join these agents.
    network = load_network(f"star:{len(agents)}", mixing="sum")
    source = f"agents {','.join(map(str, agents))} of {plan.network.source}"
    # As many steps as under the plan of all, with the same cap: one ledger counts them together.
    num_steps = plan.budget.num_steps
    return replan(plan, agents, steps_left=num_steps, network=replace(network, source=source))


@lru_cache(maxsize=64)
def _find_precision(plan: Plan, agent: int) -> float:
    return check_guarantee(plan, agent).precision


class TooFewAgentsError(CornError):
    """Fewer agents are left than a sum must have: stop, and keep the model."""


class Hello(NamedTuple):
    """An agent's statement that it is ready for a sum, signed by its key of the roster."""

    agent: int
    plan: bytes  # the fingerprint of its plan of all agents
    model: bytes  # a digest of the model that its update starts from
    nonce: bytes  # its contribution to the nonce of the sum, which it has never used before
    signature: bytes = b""

    @property
    def start(self) -> tuple[bytes, bytes]:
        """The terms that all agents of a sum must have in common."""
        return self.plan, self.model

    def statement(self) -> bytes:
        """Return what is signed."""
        return encode_fields("corn hello 1", *self[:-1])

    def encode(self) -> bytes:
        """Return the message that ``decode_hello`` reads."""
        return _HELLO.pack(*self)


def decode_hello(found: object) -> Hello:
    """Return a hello out of what somebody sent, without verifying its signature."""
    if not isinstance(found, bytes) or len(found) != _HELLO.size:
        raise PublicError("refuses a message that is not the hello of an agent")
    return Hello(*_HELLO.unpack(found))


def read_hello(found: object, roster: Roster) -> Hello:
    """Return a hello out of what somebody sent, or raise ``PublicError``."""
    hello = decode_hello(found)
    is_known = hello.agent < roster.num_agents
    if not is_known or not roster.verify(hello.agent, hello.signature, hello.statement()):
        who = label_agent(roster.names, hello.agent)
        raise PublicError(f"refuses a hello that agent {who} of the roster did not sign")
    return hello


@final
class AgentRelease:
    """One agent's releases under a plan of exact sums, for a transport that CorN does not run.

    An agent says hello before each release, with a new nonce. Client apps may live for one message
    only, so the agent's ledger keeps that nonce until it is used.

    Args:
        plan: The plan of all agents.
        agent: This agent's number or name.
        keys: The folder of ``agent-I.key``, ``roster.json`` and the ledger.
        requirements: The owner's requirements of this plan and of all releases of this data.

    Raises:
        RequirementError: The plan does not meet the requirements.
    """

    def __init__(
        self, plan: Plan, agent: int | str, keys: Path, *, requirements: Requirements | None = None
    ) -> None:
        require_masks(plan)
        self.plan = plan
        self.agent = plan.network.find_agent(agent)
        self._keys = keys
        self._required = requirements or Requirements()
        self._required.check(plan, self.agent)

    def say_hello(self, model: bytes = NO_MODEL) -> Hello:
        """Begin a run of one sum from a model with this digest; see :meth:`release`."""
        # The ledger has a new nonce whenever it is opened so. That of the run is then new too,
        # whatever the server claims about other agents' nonces.
        with self._open(_find_precision(self.plan, self.agent)) as ledger:
            nonce = ledger.nonce
            if ledger.remaining == 0:
                raise BudgetSpentError(
                    f"{self._keys}: all {self.plan.budget.num_steps} releases of the plan are spent"
                )
        hello = Hello(self.agent, fingerprint(self.plan), model, nonce)
        own = self._credentials
        own.roster.require_names(self.plan.network.agent_names)
        return hello._replace(signature=own.identity.sign(hello.statement()))

    def read_hellos(self, hellos: Sequence[object], model: bytes = NO_MODEL) -> dict[int, bytes]:
        """Return the nonces of the agents that said these hellos, or raise ``PublicError``.

        Each agent must have signed that it starts from the same model under the same plan. So a
        server that shows agents different sums or models has no sum of them together afterwards.
        """
        if not FEWEST_AGENTS <= len(hellos) <= self.plan.num_agents:
            raise PublicError(
                f"refuses to release: a sum must have from {FEWEST_AGENTS} to "
                f"{self.plan.num_agents} hellos, found {len(hellos)}"
            )
        roster = self._credentials.roster
        said = [read_hello(each, roster) for each in hellos]
        start = fingerprint(self.plan), model
        if other := [hello.agent for hello in said if hello.start != start]:
            who = add_names(name_agents(other), roster.names)
            raise PublicError(f"refuses to release: {who} have another plan or model")
        nonces = {hello.agent: hello.nonce for hello in said}
        if len(nonces) != len(said) or self.agent not in nonces:
            raise PublicError("refuses to release: there must be one hello of each agent, its own")
        return nonces

    def release(self, clipped: ClippedGradients, nonces: Mapping[int, bytes]) -> MaskedUpdate:
        """Return an update with this agent's noise of a sum, on the grid, under masks.

        Args:
            clipped: One gradient, clipped as the plan's unit demands.
            nonces: Those of :meth:`read_hellos`; this agent's must be that of its last hello.

        Formal guarantee:
            Whatever nonces a server names to whom, the messages of honest agents are uniform but
            for complete sums: those of all honest agents in ``nonces`` for the same ``nonces``. A
            complete sum has Gaussian noise of the plan's precision cap at most, and an agent is in
            at most as many of them as its plan has steps.

        Raises:
            PublicError: The server named nonces under which nothing may be released.
            BudgetSpentError: Nothing of the budget is left.
        """
        agents = tuple(sorted(nonces))
        plan, place = plan_for(self.plan, agents), agents.index(self.agent)
        size = clipped.values.numel()
        plan.check_parameters(size)
        # It binds the set: masks of agents that were told of different sets do not cancel.
        run = agree_on_nonce(nonces, plan_fingerprint=fingerprint(self.plan))
        with self._open(_find_precision(plan, place), continues=True) as ledger:
            # Before anything is reserved: without keys there is no noise, and no release.
            source = make_source(self._credentials, plan, agents)
            # A server that repeats an old list of nonces would get the old noise on a new update:
            # the difference of two releases would show the data.
            if nonces[self.agent] != ledger.nonce or ledger.next_step > 0:
                raise PublicError(
                    "refuses to release: the nonce of this agent is not that of its last hello, or "
                    "was used"
                )
            # Each agent draws its own offset, at the last moment. An offset that follows from the
            # nonces would be the choice of a server that tries many of them.
            offset_seed = secrets.token_bytes(NONCE_BYTES)
            noise = NoiseShare(
                plan, place, source, nonce=run, num_parameters=size, offset_seed=offset_seed
            )
            stepper = AgentStepper(plan.budget.of_agent(place).query, ledger.reserve)
            # On the disk before noise is drawn: after a crash the nonce counts as used.
            stepper.begin(0, noise)
        stepper.hand_over(clipped)
        return MaskedUpdate(stepper.release_masked(observe=False), offset_seed)

    def clip_update(self, update: NDArray[np.float64]) -> ClippedGradients:
        """Clip the difference of two models, shape (d,), to the plan's C: for unit agent.

        A difference that is not finite counts as zero.
        """
        unit = self.plan.budget.unit
        require(unit == "agent", "unit", "agent: an update is one gradient", unit)
        # A copy, as values that are not finite are set to zero in place. In float64 throughout:
        # docs/floats.md.
        values = torch.from_numpy(np.array(update, dtype=np.float64)).view(1, 1, -1)
        clip = torch.tensor([self.plan.budget.clip], dtype=torch.float64)
        return clip_gradients(Gradients(values), clip, clips_samples=False)

    def get_epsilon(self, delta: float = 1e-5) -> float:
        """Return the ε of all releases of this agent's data, under all plans of its keys.

        It holds for the unit, the adjacency and the adversary that ``corn keys ledger`` names.
        """
        history = read_history([self._keys], self.agent)
        if history.problems:
            raise FileFormatError(f"the total is not known: {history.problems[0]}")
        return history.compose(delta).epsilon

    @property
    def _credentials(self) -> Credentials:
        return load_credentials(self._keys, self.agent, self.plan.num_agents)

    @contextmanager
    def _open(self, precision: float, *, continues: bool = False) -> Iterator[ReleaseLedger]:
        own = self._keys, self.agent, self.plan
        with open_ledger(*own, precision=precision, continues=continues) as ledger:
            if self._required.total_epsilon is not None:
                # As if all rounds of the plan were released, so that no run ends in the middle.
                compose_total(
                    self.plan,
                    self.agent,
                    keys=self._keys,
                    ledger=ledger,
                    requirements=self._required,
                    num_steps=self.plan.budget.num_steps,
                )
            yield ledger


def average_updates(plan: Plan, updates: Sequence[MaskedUpdate]) -> FloatArray | None:
    """Return the average of all agents' noisy updates, or None where their masks did not cancel.

    ``plan`` is ``plan_for`` the agents of the round.
    """
    require(len(updates) == plan.num_agents, "updates", f"{plan.num_agents}", len(updates))
    total = np.zeros(len(updates[0].integers), WORDS[plan.mask_bits])
    for update in updates:
        total += update.integers
    return _read_sum(plan, total, [update.offset_seed for update in updates])


def _read_sum(plan: Plan, total: MaskWords, offset_seeds: Sequence[bytes]) -> FloatArray | None:
    # In the order of agents, so that offsets add up to the same bits everywhere.
    offset = np.zeros(len(total))
    for seed in offset_seeds:
        # A seed is of one release, so that there are no other steps to keep apart.
        offset += draw_offset(seed, 0, len(total))
    if not is_possible(total, plan.largest_sum):
        return None
    n = plan.num_agents
    return read_average(total, num_agents=n, grid=plan.grid, offset=offset / n)


def is_seed(found: object) -> TypeGuard[bytes]:
    """Return whether somebody sent the seed of an offset."""
    return isinstance(found, bytes) and len(found) == NONCE_BYTES


@final
class SumRounds:
    """Sums at a server that agents ask: who is ready, then the sum of their messages.

    A sum is of agents that start from one model under one plan. It begins when all agents of the
    roster are ready, or those that were in the last sum, or after ``wait`` seconds at least two. It
    is void where one of them sends nothing within ``wait`` seconds.
    """

    def __init__(self, roster: Roster, *, wait: float = 600.0) -> None:
        require(wait > 0, "wait", "positive", wait)
        self._roster = roster
        self._wait = wait
        self._lock = threading.Lock()
        self._awaited = set(range(roster.num_agents))
        self._ready: dict[int, _Ready] = {}
        self._sums: dict[int, _Sum] = {}
        self._num_sums = 0

    def answer(self, request: Mapping[str, Any], sender: str = "") -> dict[str, Any]:
        """Return the answer to one message of an agent; anybody may have sent it.

        ``request`` has an encoded hello; or the number of a sum, and masked integers. ``sender`` is
        the name by which the engine knows the site that sent it: messages of one agent in one sum
        must come from one site.
        """
        with self._lock:
            try:
                if "hello" in request:
                    return self._meet(read_hello(request["hello"], self._roster), sender)
                return self._add(request, sender)
            except PublicError as error:
                return {"status": "refused", "reason": str(error)}

    def _meet(self, hello: Hello, sender: str) -> dict[str, Any]:
        for known in self._sums.values():
            if hello.agent in known.members and known.members[hello.agent].hello == hello:
                return known.announce()
            if hello.start == known.start and not known.check_deadline():
                # An agent that comes back is awaited from the next sum on.
                self._awaited.add(hello.agent)
                return {"status": "late"}
        now = time.monotonic()
        # The last one counts: an agent that was restarted has a new nonce.
        if hello.agent not in self._ready or self._ready[hello.agent].hello != hello:
            self._ready[hello.agent] = _Ready(hello, sender, now)
        ready = sorted(self._ready.items())
        group = {agent: each for agent, each in ready if each.hello.start == hello.start}
        is_enough = len(group) >= FEWEST_AGENTS
        is_late = now - min(each.since for each in group.values()) > self._wait
        if not (is_enough and self._awaited <= group.keys()) and not is_late:
            return {"status": "wait"}
        for agent in group:
            del self._ready[agent]
        if not is_enough:
            absent = set(range(self._roster.num_agents)) - group.keys()
            return {"status": "few", "absent": sorted(absent)}
        self._awaited = set(group)
        self._num_sums += 1
        begun = _Sum(self._num_sums, group, deadline=now + self._wait)
        self._sums[self._num_sums] = begun
        # Slower agents may still ask for the sum before; nobody needs older ones.
        self._sums.pop(self._num_sums - _SUMS_KEPT, None)
        return begun.announce()

    def _add(self, request: Mapping[str, Any], sender: str) -> dict[str, Any]:
        agent, number = request.get("agent"), request.get("sum")
        known = self._sums.get(number) if type(number) is int else None
        if known is None or type(agent) is not int or agent not in known.members:
            raise PublicError("refuses a message to a sum that its sender is not in")
        if known.members[agent].sender != sender:
            raise PublicError("refuses a message to a sum from another sender than its hello")
        if not known.check_deadline() and "integers" in request:
            known.add(agent, request)
        if known.is_void:
            lost = sorted(known.members.keys() - known.seeds.keys())
            self._awaited.difference_update(lost)
            return {"status": "void", "lost": lost}
        if not known.is_complete:
            return {"status": "wait"}
        seeds = [known.seeds[each] for each in known.members]
        return {"status": "sum", "integers": known.total.tobytes(), "offset_seeds": seeds}


class _Ready(NamedTuple):
    hello: Hello
    sender: str
    since: float


@dataclass(eq=False)
class _Sum:
    """One sum at a server: who is in it, and what was added so far."""

    number: int
    members: dict[int, _Ready]
    deadline: float
    total: MaskWords = field(default_factory=lambda: np.empty(0, np.uint16))
    seeds: dict[int, bytes] = field(default_factory=dict)
    is_void: bool = False

    @property
    def is_complete(self) -> bool:
        return len(self.seeds) == len(self.members)

    @property
    def start(self) -> tuple[bytes, bytes]:
        return next(iter(self.members.values())).hello.start

    def check_deadline(self) -> bool:
        """Return whether the sum is void: for all agents once it is for one of them."""
        self.is_void |= time.monotonic() > self.deadline and not self.is_complete
        return self.is_void

    def announce(self) -> dict[str, Any]:
        said = [each.hello.encode() for each in self.members.values()]
        return {"status": "begun", "sum": self.number, "hellos": said}

    def add(self, agent: int, message: Mapping[str, Any]) -> None:
        """Add an agent's message, once, or raise ``PublicError``."""
        if agent in self.seeds:
            return
        seed, data = message.get("offset_seed"), message["integers"]
        words = _WORDS.get(str(message.get("words")))
        is_whole = words is not None and isinstance(data, bytes) and not len(data) % words.itemsize
        if not is_whole or not is_seed(seed):
            raise PublicError("refuses a message that has no masked integers and seed of an offset")
        integers = np.frombuffer(data, words)
        if self.seeds and (integers.shape, words) != (self.total.shape, self.total.dtype):
            # Which of them is wrong cannot be known here.
            self.is_void = True
            return
        self.total = self.total + integers if self.seeds else integers
        self.seeds[agent] = seed


class Reduction(Protocol):
    """The seam between an agent's releases and whatever carries and adds up messages."""

    def meet(self, hello: Hello) -> Sequence[object] | None:
        """Return encoded hellos of all agents of the next sum; None if it begins without this."""

    def add_up(self, agent: int, message: MaskedUpdate) -> tuple[MaskWords, Sequence[bytes]] | None:
        """Return the sum of all agents' integers, and their seeds; None if an agent was lost."""


@final
class ServerSums:
    """Sums at a server, through messages to :meth:`SumRounds.answer`.

    ``ask`` sends a message and returns its answer, or None if the server was not reached; after
    ``wait`` seconds it is given up. An error of ``ask`` ends the wait for other agents.
    """

    def __init__(
        self, ask: Callable[[dict[str, Any]], Mapping[str, Any] | None], wait: float = 600.0
    ) -> None:
        self._ask = ask
        self._wait = wait
        self._number = 0

    def meet(self, hello: Hello) -> Sequence[object] | None:
        """See ``Reduction``."""
        begun = self._ask_until({"hello": hello.encode()}, "begun")
        if begun["status"] == "late":
            return None
        self._number = begun["sum"]
        return list(begun["hellos"])

    def add_up(self, agent: int, message: MaskedUpdate) -> tuple[MaskWords, Sequence[bytes]] | None:
        """See ``Reduction``."""
        place, dtype = {"sum": self._number, "agent": agent}, message.integers.dtype
        sent = {"words": dtype.str, "integers": message.integers.tobytes()}
        first = {**place, **sent, "offset_seed": message.offset_seed}
        done = self._ask_until(first, "sum", again=place)
        if done["status"] == "void":
            _LOGGER.warning("a sum lacks agents %s", done.get("lost"))
            return None
        data = done["integers"]
        if not isinstance(data, bytes) or len(data) != message.integers.nbytes:
            raise PublicError("refuses a sum of another size than its own message")
        return np.frombuffer(data, dtype), done["offset_seeds"]

    def _ask_until(
        self, request: dict[str, Any], status: str, *, again: dict[str, Any] | None = None
    ) -> Mapping[str, Any]:
        """Ask until an answer is final: ``again`` follows a request once the server has it."""
        deadline, pause = time.monotonic() + self._wait, _SHORTEST_PAUSE
        while True:
            answer = self._ask(request) or {}
            found = answer.get("status")
            if found in (status, "void", "late"):
                return answer
            if found == "refused":
                raise PublicError(f"the server refuses: {answer.get('reason')}")
            if found == "few":
                raise TooFewAgentsError(f"too few agents are ready, without {answer.get('absent')}")
            if found == "wait":
                # The server has its own limit, after which it answers otherwise.
                deadline, request = time.monotonic() + self._wait, again or request
            elif time.monotonic() > deadline:
                raise CornError(f"the server that adds up was not reached for {self._wait:g} s")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


@final
class RankSums:
    """Sums by ``all_reduce`` of ``torch.distributed``, for agents that are the ranks of a cluster.

    A rank that is lost ends the others, as it does with ``torch.distributed`` itself.
    """

    def meet(self, hello: Hello) -> Sequence[object]:
        """See ``Reduction``."""
        return self._gather(hello.encode())

    def add_up(self, agent: int, message: MaskedUpdate) -> tuple[MaskWords, Sequence[bytes]]:
        """See ``Reduction``."""
        # Gloo adds up signed integers, which overflow modulo 2⁶⁴ and so modulo 2^B.
        total = torch.from_numpy(message.integers.astype(np.int64))
        torch.distributed.all_reduce(total)
        seeds = dict(self._gather((agent, message.offset_seed)))
        return total.numpy().astype(message.integers.dtype), [seeds[each] for each in sorted(seeds)]

    def _gather(self, value: object) -> list[Any]:
        gathered: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(gathered, value)
        return gathered


def sum_releases(
    own: AgentRelease, clipped: ClippedGradients, *, model: bytes, reduction: Reduction
) -> FloatArray | None:
    """Release a gradient into a sum; return the average of all agents, shape (d,).

    None stands for a sum that began without this agent, or for a void one, which counts as
    released: an agent was lost on the way, or the integers do not add up to a possible sum. If only
    some honest agents apply a sum, their models differ, and they refuse each other from then on.

    ``clipped`` is one gradient, clipped as the plan's unit demands. ``model`` is a digest of the
    public model at which it was computed and of the number of sums before it: no two sums begin at
    the same. ``reduction`` is trusted with nothing: ``PublicError`` says that nothing may be
    released with what others sent.
    """
    hellos = reduction.meet(own.say_hello(model))
    if hellos is None:
        _LOGGER.warning("a sum began without this agent: nothing was released")
        return None
    nonces = own.read_hellos(hellos, model)
    done = reduction.add_up(own.agent, own.release(clipped, nonces))
    if done is None:
        _LOGGER.warning("a sum is void: the release counts")
        return None
    total, seeds = done
    if len(seeds) != len(nonces) or not all(map(is_seed, seeds)):
        raise PublicError("refuses a sum without the seed of the offset of each agent")
    average = _read_sum(plan_for(own.plan, tuple(sorted(nonces))), total, seeds)
    if average is None:
        _LOGGER.warning("a sum of %s agents is void, as its masks did not cancel", len(nonces))
    return average


@final
class GradientSteps:
    """One agent's gradient steps under a plan, whose sums a server adds up; for both units.

    Batches are drawn by secret coins. ``problem`` has this agent's samples alone; ``step_size`` is
    0 where somebody else takes the steps.
    """

    def __init__(
        self, own: AgentRelease, problem: TrainingProblem, *, step_size: float = 0.0
    ) -> None:
        budget = own.plan.budget.of_agent(own.agent)
        query = budget.query
        # The order of a pass lasts as long as its run, and a run here is one sum.
        is_by_coins = query.steps_per_pass is None
        require(is_by_coins, "sampling", "by coins: plan with --sampling poisson", "passes")
        require_fitting_samples(budget, list(problem.data.sizes), first=own.agent)
        size = query.batch_size
        settings = SweepSettings(1, size, dtype=own.plan.dtype)
        data, _ = problem.place(settings)
        self._own = own
        self._task = problem.task
        self._query = query
        self._step_size = step_size
        self._batches = BatchSampler.of_agent(query, data, batch_size=size)
        self._dtype = settings.torch_dtype
        # Of it only the step along an average is used: releases are those of ``own``.
        num_parameters, momentum = problem.task.num_parameters, own.plan.momentum
        self._stepper = AgentStepper(query, int, num_parameters=num_parameters, momentum=momentum)
        self._num_drawn = 0

    @torch.no_grad()
    def differentiate(self, parameters: Tensor) -> ClippedGradients:
        """Return the gradient of a new batch at a model, shape (d,), clipped for the unit."""
        model = parameters.to(self._dtype).view(1, 1, -1)
        batch = self._batches.draw(self._num_drawn)
        self._num_drawn += 1
        clip = torch.tensor([self._query.clip], dtype=torch.float64)
        is_sample = self._query.unit == "sample"
        return compute_gradients(self._task, model, batch, clip, clips_samples=is_sample)

    def take(
        self, parameters: Tensor, clipped: ClippedGradients, *, step: int, reduction: Reduction
    ) -> Tensor | None:
        """Return the model after a step along ``clipped``, shape (d,), or None for a void sum."""
        model = parameters.to(self._dtype)
        state = hashlib.sha256(encode_fields("step", step))
        state.update(model.numpy().data)
        average = sum_releases(self._own, clipped, model=state.digest(), reduction=reduction)
        if average is None:
            return None
        self._stepper.parameters = model
        return self._stepper.move(torch.from_numpy(average).to(model), step_size=self._step_size)


@dataclass(frozen=True, eq=False)
class SiteProblem:
    """The training of a site, and its parameters' shapes by name, in their order in messages."""

    problem: TrainingProblem
    shapes: Mapping[str, tuple[int, ...]]

    def read(self, arrays: Mapping[str, NDArray[Any]]) -> Tensor:
        """Return the parameters in a server's arrays, shape (d,), or raise ``PublicError``."""
        if {name: arrays[name].shape for name in self.shapes if name in arrays} != self.shapes:
            raise PublicError("the server's model must have all trained parameters of the site's")
        flat = np.concatenate([arrays[name].reshape(-1) for name in self.shapes])
        return torch.from_numpy(flat.astype(np.float64))


@dataclass(frozen=True, eq=False)
class SiteFolder:
    """The folder of one site: its key, its ledger, ``roster.json``, and what all sites agreed on.

    That is either ``plan.corn``, or ``consortium.toml`` with its plan and its public test data.
    Then the site's rows are in ``data.csv``, ``.tsv`` or ``.parquet``, and nothing else is
    configured. Only the owner can open the folder.
    """

    path: Path
    agent: int
    plan: Plan
    consortium: Consortium | None

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read the folder; nothing of the data is read yet."""
        agents = find_agents(path)
        if len(agents) != 1:
            raise FileFormatError(f"{path}: must have the key of one agent, found {len(agents)}")
        file = path / CONSORTIUM_FILE
        if not file.exists():
            return cls(path, agents[0], load_plan(path / PLAN_FILE), None)
        consortium = load_consortium(file)
        return cls(path, agents[0], consortium.load_plan(), consortium)

    def make_release(self, requirements: Requirements | None = None) -> AgentRelease:
        """Return the releases of this site."""
        return AgentRelease(self.plan, self.agent, self.path, requirements=requirements)

    def load_problem(
        self, make: Callable[[], tuple[Any, MeanLoss, DataSource]] | None = None
    ) -> SiteProblem:
        """Return what the consortium file describes, with the rows of this site.

        Without a consortium file it is what ``make`` returns: module, loss of a batch, data set.
        """
        if self.consortium is None and make is not None:
            module, loss, dataset = make()
            data = AgentData.from_parts([read_samples(dataset)])
            trained = [own for own in module.named_parameters() if own[1].requires_grad]
            shapes = {name: tuple(each.shape) for name, each in trained}
            return SiteProblem(TrainingProblem(make_task(module, loss), data), shapes)
        found = sorted(self.path.glob("data.*"))
        if self.consortium is None or len(found) != 1:
            rule = f"must have {CONSORTIUM_FILE} and one file data.csv, .tsv or .parquet"
            raise FileFormatError(f"{self.path}: {rule}, found {len(found)} files of data")
        workload = self.consortium.make_workload(found[0])
        problem = workload.build(self.plan.num_agents, [self.agent])
        return SiteProblem(problem, {PARAMETERS: (problem.task.num_parameters,)})


def save_model(problem: TrainingProblem, parameters: Tensor, plan: Plan, folder: Path) -> None:
    """Write ``model.pt``, which has the promise of its plan."""
    model = TrainedModel.from_problem(problem, parameters, ModelPromise.of_plan(plan))
    if model is not None:
        model.save(folder / MODEL_FILE)


@final
class ConsortiumModel:
    """The public model of a consortium at a server, which keeps it after every round.

    The folder ``out`` gets ``model.pt`` and, for a server that was killed, ``parameters.npy``.
    """

    def __init__(self, consortium: Path, out: Path) -> None:
        agreed = load_consortium(consortium)
        self.plan = agreed.load_plan()
        self.step_size = agreed.step_size
        schema = agreed.data
        num_inputs = len(schema.features)
        task = make_named_task(agreed.training.model, (num_inputs,), len(schema.classes) or None)
        # A server has nobody's rows: one of zeros shows their shape.
        rows = AgentData(torch.zeros(1, num_inputs), torch.zeros(1), (0, 1))
        self._problem = TrainingProblem(task, rows, schema=schema)
        self._out = out

    def load(self) -> NDArray[Any]:
        """Return the last parameters that were kept, or else the first, shape (d,)."""
        file = self._out / "parameters.npy"
        if not file.exists():
            return self._problem.task.initialize(0).numpy().astype(self.plan.dtype)
        if load_model(self._out).promise.plan != fingerprint(self.plan).hex():
            raise FileFormatError(f"{self._out}: has the model of another plan: move it away")
        parameters: NDArray[Any] = np.load(file, allow_pickle=False)
        return parameters

    def save(self, parameters: NDArray[Any]) -> None:
        """Keep the parameters after a round."""
        # First what training goes on from: a crash between the two leaves an older model.pt.
        self._out.mkdir(parents=True, exist_ok=True)
        with writing_whole(self._out / "parameters.npy") as partial, partial.open("wb") as stream:
            np.save(stream, parameters)
        save_model(self._problem, torch.from_numpy(parameters), self.plan, self._out)


@contextmanager
def hiding_errors() -> Iterator[None]:
    """Replace errors that may quote data or name private files: engines send texts to servers."""
    try:
        yield
    except Exception as error:
        if is_public(error):
            raise
        # Not as an error: an engine may send its log of errors to the server.
        _LOGGER.warning("the site failed", exc_info=True)
        # Without its cause: a chained traceback would carry the text.
        raise PublicError(f"the site failed: {name_kind(error)}") from None


# Torch has one generator in a process: sites in threads of a simulator would take each other's
# draws for randomness of their models, which is refused.
_USERS_CODE = threading.RLock()


@contextmanager
def calling_users_code() -> Iterator[None]:
    """Let one site of a process at a time run a user's code, and make all of its errors private."""
    with _USERS_CODE:
        try:
            yield
        except Exception as error:  # also a ``PublicError``, about the user's data
            raise CornError("the site's own code failed") from error


def require_masks(plan: Plan) -> None:
    """Raise unless a plan has exact sums under masks of pairs."""
    shares = plan.decomposition
    # Seeds of larger groups would need messages between agents, which an engine does not carry.
    if not shares.is_masked or max(map(len, shares.seed_groups), default=0) > 2:
        raise InvalidArgumentError(
            "a plan behind a server must have exact sums under masks of pairs, found mixing "
            f"{plan.network.mixing!r} of mechanism {plan.mechanism!r}: plan with --seeds pairs"
        )


def flatten(arrays: Sequence[NDArray[Any]], *, like: Sequence[NDArray[Any]]) -> NDArray[np.float64]:
    """Return all floating-point arrays as one vector; the others are not trained."""
    if [a.shape for a in arrays] != [a.shape for a in like]:
        raise PublicError("the client app must answer with arrays of the shapes that it was sent")
    pairs = zip(arrays, like, strict=True)
    # Which arrays are trained follows from the types of the server's, which are public.
    parts = [a.reshape(-1).astype(np.float64) for a, b in pairs if b.dtype.kind == "f"]
    return np.concatenate(parts) if parts else np.empty(0)


def add_to_arrays(
    arrays: Sequence[NDArray[Any]], vector: NDArray[np.float64]
) -> list[NDArray[Any]]:
    """Return the arrays plus the pieces of a vector, in their own types."""
    moved, start = [], 0
    for array in arrays:
        if array.dtype.kind != "f":
            # The server's own array: a counter that the client changed would leave without noise.
            moved.append(array)
            continue
        piece = vector[start : start + array.size].reshape(array.shape)
        # Rounded to the model's type after the release: post-processing of public numbers.
        moved.append((array.astype(np.float64) + piece).astype(array.dtype))
        start += array.size
    return moved
