"""One agent's releases under a plan of exact sums, for an engine that carries the messages.

CorN runs neither the server nor the connections of such an engine (Flower, NVFlare). Each round the
agent clips its update, adds its share of the noise, rounds the sum to the grid and hides it under
masks. Whoever adds up the integers of all agents modulo 2^B gets the noisy sum and nothing else.

The guarantee is the plan's, against the server and anybody else who reads all messages and models,
together with as many curious agents as the plan's threat names. The server need not follow the
protocol: whatever it asks of whom, a release is either uniform or part of one sum with the noise of
all honest agents in it (docs/flower.md). It could spoil the model.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from corn.checks import FloatArray, require
from corn.covariance import ThreatModel
from corn.distributed.handshake import check_guarantee
from corn.distributed.keyring import load_credentials, make_source, open_ledger
from corn.distributed.recovery import budget_left
from corn.distributed.requirements import Requirements, compose_total
from corn.errors import FileFormatError, InvalidArgumentError, PublicError
from corn.learn.step import clip_batch_gradients, release_masked
from corn.noise import ReleaseLedger, agree_on_nonce, draw_share
from corn.noise.ledger import LAST_STEP, compose_history, read_history
from corn.noise.masks import WORDS, MaskWords, draw_mask, draw_offset, is_possible, read_average
from corn.noise.stream import NONCE_BYTES
from corn.plan import Plan, fingerprint, make_plan
from corn.threads import one_thread
from corn.topology import load_network

# Seeds of larger groups would need messages between agents, which an engine does not carry.
_LARGEST_GROUP = 2
FEWEST_AGENTS = 2


@dataclass(frozen=True, eq=False)
class MaskedUpdate:
    """The message of one agent in one round. All of it may be public.

    Attributes:
        integers: the noisy update on the grid, under masks, modulo 2^B, shape (d,).
        offset_seed: 32 random bytes, from which the agent's offset of the grid follows.
    """

    integers: MaskWords
    offset_seed: bytes


# A client app is made anew for every message, and verifying a plan takes a while.
@lru_cache(maxsize=64)
def plan_for(plan: Plan, agents: tuple[int, ...]) -> Plan:
    """Return the plan of a round in which some agents take part, renumbered in their order.

    It follows from the plan of all and from the set alone, so that every client computes it for
    itself. Each release under it keeps the agent's precision cap of the plan of all, against as
    many insiders, or against all other agents of the set.
    """
    if len(agents) == plan.num_agents:
        return plan
    # No message takes the links of a plan here, so they may be any that join these agents.
    network = load_network(f"star:{len(agents)}", mixing="sum")
    source = f"agents {','.join(map(str, agents))} of {plan.network.source}"
    with one_thread():  # BLAS threads would change the order of sums, and so the last bits
        return make_plan(
            replace(network, source=source),
            # For as many steps as the plan of all: the cap on each step is the same, and one ledger
            # counts the releases under all of these plans together.
            budget_left(plan, agents, plan.budget.num_steps),
            threat=ThreatModel(min(plan.threat.max_colluders, len(agents) - 1)),
            dtype=plan.dtype,
        )


@lru_cache(maxsize=64)
def _find_precision(plan: Plan, agent: int) -> float:
    return check_guarantee(plan, agent).precision


@final
class AgentRelease:
    """One agent's releases under a plan of exact sums, for a transport that CorN does not run.

    Client apps may live for one message only, so the agent's ledger keeps the nonce that it
    contributed to the present run, the nonces of the others, and the last round that it released.

    Args:
        plan: The plan of all agents.
        agent: This agent's number.
        keys: The folder of ``agent-I.key``, ``roster.json`` and the ledger.
        requirements: The owner's requirements of this plan and of all releases of this data.

    Raises:
        RequirementError: The plan does not meet the requirements.
    """

    def __init__(
        self, plan: Plan, agent: int, keys: Path, *, requirements: Requirements | None = None
    ) -> None:
        require(plan.budget.unit == "agent", "unit", "agent: updates are clipped once", "sample")
        require_masks(plan)
        self._plan, self._agent, self._keys = plan, agent, keys
        self._required = requirements or Requirements()
        self._required.check(plan, agent)

    def introduce(self) -> tuple[bytes, int]:
        """Begin a run; return this agent's contribution to its nonce, and the releases left."""
        # The ledger has a new nonce whenever it is opened so. With it the nonce of the run is new,
        # whatever the server claims about other agents' nonces.
        with self._open(_find_precision(self._plan, self._agent)) as ledger:
            return ledger.nonce, ledger.remaining

    def release(
        self, update: NDArray[np.float64], *, round_number: int, nonces: Mapping[int, bytes]
    ) -> MaskedUpdate:
        """Return an update, clipped, with this agent's noise of a round, on the grid, under masks.

        Args:
            update: The difference of the client's model from the server's, shape (d,).
            round_number: From 1, larger than in every earlier release of the run.
            nonces: The contribution of each agent that takes part in the run; this agent's must be
                the one that it made.

        Formal guarantee:
            Whatever rounds and nonces a server names to whom, the messages of honest agents are
            uniform but for complete sums: those of all honest agents in ``nonces`` for one round
            and the same ``nonces``. A complete sum has Gaussian noise of the plan's precision cap
            at most, and an agent is in at most as many of them as its plan has steps.

        Raises:
            PublicError: The server named a round or nonces under which nothing may be released.
            BudgetSpentError: Nothing of the budget is left.
        """
        agents = require_agents(sorted(nonces), self._plan.num_agents, self._agent)
        require_round(round_number)
        plan, place, size = plan_for(self._plan, agents), agents.index(self._agent), len(update)
        plan.check_parameters(size)
        # A hash of all contributions and of the plan, which every client computes for itself. It
        # binds the set: masks of agents that were told of different sets do not cancel.
        run = agree_on_nonce(nonces, plan_fingerprint=fingerprint(self._plan))
        own = load_credentials(self._keys, self._agent, self._plan.num_agents)
        with self._open(_find_precision(plan, place), continues=True) as ledger:
            # Before anything is reserved: without keys there is no noise, and no release.
            source = make_source(own, plan, agents)
            self._check_run(ledger, run, round_number, nonces)
            # On the disk before noise is drawn: after a crash the round counts as released.
            ledger.reserve(round_number)
        noise = draw_share(
            plan.decomposition, place, source=source, nonce=run, step=round_number, stop=size
        )
        mask = draw_mask(
            plan.decomposition,
            place,
            source=source,
            nonce=run,
            step=round_number,
            size=size,
            bits=plan.mask_bits,
        )
        # Each agent draws its own offset, at the last moment. An offset that follows from the
        # nonces would be the choice of a server that tries many of them.
        offset_seed = secrets.token_bytes(NONCE_BYTES)
        # A copy: gradients that are not finite are set to zero in place.
        values = torch.from_numpy(np.array(update, dtype=np.float64)).view(1, 1, -1)
        # float64 throughout, as the proof for floats assumes (docs/floats.md).
        found = clip_batch_gradients(
            values, torch.tensor([self._plan.budget.clip], dtype=torch.float64)
        )
        integers = release_masked(
            found.values.view(-1),
            found.factors.view(-1),
            torch.from_numpy(noise),
            grid=plan.grid,
            offset=_expand(offset_seed, size),
            mask=mask,
        )
        return MaskedUpdate(integers, offset_seed)

    def get_epsilon(self, delta: float = 1e-5) -> float:
        """Return the ε of all releases of this agent's data, under all plans of its keys.

        It holds for the unit, the adjacency and the adversary that ``corn keys ledger`` names.
        """
        history = read_history([self._keys], self._agent)
        if history.problems:
            raise FileFormatError(f"the total is not known: {history.problems[0]}")
        return compose_history(history, delta).total.epsilon

    def _check_run(
        self, ledger: ReleaseLedger, run: bytes, round_number: int, nonces: Mapping[int, bytes]
    ) -> None:
        """Raise if the noise of a round may have been released."""
        # A server that repeats an old list of nonces would get the old noise on a new update.
        if nonces[self._agent] != ledger.nonce:
            raise PublicError(
                "refuses to release: the nonce of this agent is not the one it contributed to this "
                "run"
            )
        if round_number < ledger.next_step:
            raise PublicError(
                f"refuses to release round {round_number} again: with the same noise, the "
                "difference of two releases would show the data"
            )
        # The first release fixes agents and nonces of the run: a round under other ones would be a
        # run that no other agent is in.
        try:
            ledger.keep_nonce(run)
        except InvalidArgumentError as error:
            raise PublicError(
                "refuses to release: the agents or their nonces changed during the run"
            ) from error

    def _open(self, precision: float, *, continues: bool = False) -> ReleaseLedger:
        ledger = open_ledger(
            self._keys, self._agent, self._plan, precision=precision, continues=continues
        )
        if self._required.total_epsilon is not None:
            try:
                # As if all rounds of the plan were released, so that no run ends in the middle.
                compose_total(
                    self._plan,
                    self._agent,
                    keys=self._keys,
                    ledger=ledger,
                    requirements=self._required,
                    num_steps=self._plan.budget.num_steps,
                )
            except BaseException:
                ledger.close()
                raise
        return ledger


def average_updates(plan: Plan, updates: Sequence[MaskedUpdate]) -> FloatArray | None:
    """Return the average of all agents' noisy updates, or None where their masks did not cancel.

    ``plan`` is that of the round, ``plan_for`` its agents, each of which has one message.
    """
    require(len(updates) == plan.num_agents, "updates", f"{plan.num_agents}", len(updates))
    size = len(updates[0].integers)
    total, offset = np.zeros(size, WORDS[plan.mask_bits]), np.zeros(size)
    for update in updates:
        total += update.integers
        offset += _expand(update.offset_seed, size)
    if not is_possible(total, plan.largest_sum):
        return None
    n = plan.num_agents
    return read_average(total, num_agents=n, grid=plan.grid, offset=offset / n)


def require_masks(plan: Plan) -> None:
    """Raise unless a plan has exact sums under masks of pairs."""
    if not plan.decomposition.is_masked:
        raise InvalidArgumentError(
            f"a plan behind a server must have exact sums under masks, found mixing "
            f"{plan.network.mixing!r} of mechanism {plan.mechanism!r}: plan with --mixing sum"
        )
    largest = max(map(len, plan.decomposition.seed_groups), default=0)
    if largest > _LARGEST_GROUP:
        raise InvalidArgumentError(
            "seeds must be those of pairs, which follow from keys without a message, found a "
            f"group of {largest}: plan with --seeds pairs"
        )


def _expand(offset_seed: bytes, size: int) -> FloatArray:
    # A seed is of one release, so that there are no other steps to keep apart.
    return draw_offset(offset_seed, 0, size)


def require_round(found: object) -> int:
    """Return the number of a round that a server named, or raise ``PublicError``."""
    # By exact type: a bool is an integer to Python.
    if type(found) is not int or not 1 <= found <= LAST_STEP:
        raise PublicError(
            f"refuses to release: the round must be a whole number from 1 to {LAST_STEP:,}"
        )
    return found


def require_agents(found: Sequence[object], num_agents: int, agent: int) -> tuple[int, ...]:
    """Return the agents of a round that a server named, or raise ``PublicError``."""
    agents = tuple(each for each in found if type(each) is int and 0 <= each < num_agents)
    is_set = len(agents) == len(found) and all(a < b for a, b in pairwise(agents))
    if not is_set or len(agents) < FEWEST_AGENTS or agent not in agents:
        raise PublicError(
            f"refuses to release: agents must be at least {FEWEST_AGENTS} of 0 … {num_agents - 1} "
            f"in increasing order, agent {agent} among them, found another list of {len(found)}"
        )
    return agents


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


def count_trained(arrays: Sequence[NDArray[Any]]) -> int:
    """Return the length of the vector that ``flatten`` returns for arrays like these."""
    return sum(array.size for array in arrays if array.dtype.kind == "f")
