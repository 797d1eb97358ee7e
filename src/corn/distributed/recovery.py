"""Recovery from a lost agent: what survivors agree on, and their new plan.

Survivors stop, and flood all links with what they know, in rounds, until all know the same: the
links that broke, the agents that left, and the highest step that anybody began. Then all go on at
the next step, with a new plan that each computes (:func:`replan`).

A sum that lacks a release is masked, and the step is *void*. But a complete sum may have reached
some agents only, who give it to neighbours that lack it: all survivors apply a step, or none does.
No agent is more than one step ahead, as a sum needs the releases of all. With gossip, agents may be
several steps apart; those behind leave steps out.

Attempts have numbers. An agent that loses another neighbour, or hears of a broken link or a higher
step so late that others may not hear of it, begins the next one, and whoever hears of it follows.
Nobody follows without a reason, or a neighbour could call for ever: news of a break that is new
here; in a recovery also of a later step; or anything learnt on the way in the last attempt. Two
neighbours know by the second round what either knew at the start: an honest agent has a reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, final

import networkx as nx
import numpy as np
import torch
from torch import Tensor

from corn.covariance import ONE_STEP, GivenObjective, Objective, ThreatModel
from corn.distributed.exchange import Exchange, Received
from corn.distributed.membership import Edge, count_begun
from corn.distributed.messages import PREFIX_BYTES, Header, Kind, ProtocolError, Subject
from corn.errors import InfeasibleError
from corn.learn.perturbation import NoiseShare
from corn.plan import Plan, fingerprint, make_plan
from corn.privacy import PrivacyBudget
from corn.privacy.floats import find_promise, set_aside
from corn.threads import one_thread
from corn.topology import Network, load_network
from corn.transport import LinkError

# Of ε, doubled with each attempt: the first ones cost nothing, and a few are enough for rounding.
_SHRINK = 1e-9
_MAX_SHRINKS = 29  # the last one halves ε


@final
@dataclass(frozen=True, eq=False)
class ActivePlan:
    """A plan in force, with this agent's share of the noise.

    ``members`` are the numbers of its agents 0 … m−1 at the start of the run.
    """

    plan: Plan
    members: tuple[int, ...]
    noise: NoiseShare

    @cached_property
    def prefix(self) -> bytes:
        """The first bytes of the plan's fingerprint, for headers."""
        return fingerprint(self.plan)[:PREFIX_BYTES]

    def weights_of(self, agent: int) -> dict[int, float]:
        """Return w_ij for every other member j, by the numbers at the start of the run."""
        row = self.plan.network.mixing_matrix[self.members.index(agent)]
        weights = zip(self.members, row, strict=True)
        return {member: float(weight) for member, weight in weights if member != agent}


def replan(
    plan: Plan,
    survivors: tuple[int, ...],
    *,
    steps_left: int,
    cuts: Collection[Edge] = (),
    network: Network | None = None,
) -> Plan:
    """Return a plan for the survivors, renumbered 0 … m−1 in their order, for the steps left.

    It keeps the precision caps per step: t steps before and T − t after make agent i's μ² as
    planned. Every survivor computes the same plan, to the bit. ``network`` is by default what is
    left.
    """
    with one_thread():  # BLAS threads would change the order of sums, and so the last bits
        return make_plan(
            network or _network_of(plan, survivors, cuts),
            budget_left(plan, survivors, steps_left),
            threat=_threat_for(plan, survivors),
            objective=_objective_for(plan, survivors),
            mechanism=plan.mechanism,
            cooldown_steps=plan.cooldown_steps,
            dtype=plan.dtype,
        )


def budget_left(plan: Plan, survivors: tuple[int, ...], steps_left: int) -> PrivacyBudget:
    """Return the survivors' budget of the steps left: the same caps per step, or slightly less."""
    if plan.budget.num_agents is None:
        return _promise_left(plan.budget, float(plan.precision_caps[0]), steps_left)
    # Each distinct promise is sought once: under Poisson sampling that takes seconds.
    find = cache(_promise_left)
    caps = plan.precision_caps
    left = [find(plan.budget.of_agent(a), float(caps[a]), steps_left) for a in survivors]
    return replace(
        left[0],
        epsilon=tuple(promise.promise.epsilon for promise in left),
        delta=tuple(promise.promise.delta for promise in left),
        sampling_rate=_join([promise.sampling_rate for promise in left]),
        samples_per_agent=_join([promise.samples_per_agent for promise in left]),
    )


def _promise_left(budget: PrivacyBudget, cap: float, steps_left: int) -> PrivacyBudget:
    """Return the budget of agents with one promise for the steps left under their cap."""
    # The precision cap per step is what composes: Δ²b per step, whatever plan a step is under.
    epsilon = find_promise(cap, budget, num_steps=steps_left).promise.epsilon
    # The cap of a budget comes from a search in floats, and may exceed the plan's by rounding: ε is
    # reduced until it does not.
    for attempt in range(_MAX_SHRINKS):
        left = replace(
            budget,
            epsilon=epsilon * (1 - _SHRINK * 2**attempt),
            num_steps=steps_left,
            accounting="gdp",
        )
        if set_aside(left).precision_cap <= cap:
            return left
    raise InfeasibleError(f"no budget for {steps_left} steps keeps the precision cap {cap:.6g}")


def _join(values: list[Any]) -> Any:
    """Return one value for all agents, which a budget states as one, or one for each."""
    return values[0] if len(set(values)) == 1 else tuple(values)


def _network_of(plan: Plan, survivors: tuple[int, ...], cuts: Collection[Edge]) -> Network:
    """Return the survivors' network, with Metropolis weights and as many rounds as before."""
    left = nx.Graph(plan.network.graph)
    left.remove_edges_from(cuts)
    places = {agent: place for place, agent in enumerate(survivors)}
    graph = nx.empty_graph(len(survivors))
    # Sorted, as fingerprints must agree: networkx keeps the order of insertion.
    edges = (sorted((places[i], places[j])) for i, j in left.subgraph(survivors).edges)
    graph.add_edges_from(sorted(edges))
    # Metropolis weights of a connected graph are symmetric and mix: Chebyshev rounds need that.
    before = plan.network
    network = load_network(graph, gossip=before.gossip, mixing=before.mixing)
    return replace(network, source=f"survivors {','.join(map(str, survivors))} of {before.source}")


def _threat_for(plan: Plan, survivors: tuple[int, ...]) -> ThreatModel:
    """Return the threat with as many insiders as before, but fewer than there are survivors."""
    threat = plan.threat
    # Masks must join all survivors. Seeds of pairs do, and follow from the keys at once.
    seeds = "auto" if plan.decomposition.is_masked else threat.seeds
    # Groups that were listed by their members keep those that survive.
    if not isinstance(seeds, str):
        places = {agent: place for place, agent in enumerate(survivors)}
        left = [[places[a] for a in group if a in places] for group in seeds]
        seeds = tuple(tuple(group) for group in left if group)
    # At least one agent must be left to protect, or the threat model has no meaning.
    colluders = min(threat.max_colluders, len(survivors) - 1)
    return replace(threat, seeds=seeds, max_colluders=colluders)


def _objective_for(plan: Plan, survivors: tuple[int, ...]) -> Objective:
    """Return the plan's objective; of a given matrix, the survivors' block."""
    if not isinstance(plan.objective, GivenObjective):
        return plan.objective
    block = plan.objective.given[np.ix_(survivors, survivors)]
    # A run must not end because only lost agents had weight, nor for exact sums, where A is idle.
    is_unused = plan.network.mixing == "sum" or not block.any()
    return ONE_STEP if is_unused else GivenObjective(block)


class _Restart(Exception):  # noqa: N818 - a signal, not an error
    """Another attempt has begun."""

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt
        super().__init__()


@final
class Recovery:
    """One agent's part in all recoveries of a run; ``attempt`` is that of the last one."""

    def __init__(self, exchange: Exchange, note_dropout: Callable[[int, LinkError], None]) -> None:
        self._exchange = exchange
        self._membership = exchange.membership
        self._note_dropout = note_dropout
        self._num_agents = n = exchange.membership.num_agents
        # Each reason for another attempt is new to somebody, so there are not that many.
        self._max_attempts = 4 * (n + exchange.membership.num_links)
        # A chain of all agents, one round in which losses may be noticed, and one to tell the step.
        self._num_rounds = n + 2
        self._is_running = False
        self._payload_bytes = 0
        # The sum of the step under way, once a neighbour has given it.
        self._total: Tensor | None = None
        # What this agent has learnt on the way in the last attempt.
        self._has_learnt_breaks = self._has_learnt_steps = False
        self.attempt = 0

    def run(
        self,
        step: int,
        make_header: Callable[[], Header],
        *,
        has_released: bool,
        before: Tensor | None = None,
        payload_bytes: int = 0,
    ) -> tuple[int, Tensor | None]:
        """Return the first step that no survivor has begun, and the sum of the own step, if any.

        This agent is in ``step``, or about to begin it; ``before`` is the sum of the step before.
        """
        self.attempt += 1
        self._is_running = True
        self._payload_bytes = payload_bytes
        self._membership.note(Kind.BEGUN, step + has_released)
        self._total = None
        for _ in range(self._max_attempts):
            try:
                self._flood(step, before, make_header)
                break
            except _Restart as restart:
                self.attempt = restart.attempt
        else:
            raise ProtocolError(f"the recovery of step {step} failed {self._max_attempts} times")
        next_step = count_begun(self._membership.news)
        self._membership.forget_before(next_step)
        self._is_running = False
        self._has_learnt_steps = False
        return next_step, self._total

    def check_call(self, header: Header) -> None:
        """Raise ``ProtocolError`` unless a call for a recovery is the next one, with a reason."""
        who = f"agent {header.sender}"
        own = self._membership
        # A neighbour sends a message in every attempt, so none can skip one.
        if header.attempt != self.attempt + 1:
            raise ProtocolError(f"{who} called for recovery {header.attempt} of {self.attempt}")
        is_later = self._is_running and count_begun(header.news) > count_begun(own.news)
        has_learnt = self._has_learnt_breaks or self._has_learnt_steps
        if not (is_later or has_learnt or own.learns_from(header.news)):
            raise ProtocolError(f"{who} called for recovery {header.attempt} without a reason")

    def _flood(self, step: int, before: Tensor | None, make_header: Callable[[], Header]) -> None:
        """Run all rounds of an attempt."""
        own = self._membership
        # With the sum of its step, this agent is where those are that had it before.
        step += self._total is not None
        held, step_held = (before if self._total is None else self._total), step - 1
        steps: dict[int, int] = {}
        self._has_learnt_breaks = self._has_learnt_steps = False
        for number in range(self._num_rounds):
            header = replace(make_header(), step=step, mixing_round=number, attempt=self.attempt)
            lacking = [peer for peer, theirs in steps.items() if theirs == step_held]
            self._send(header, held, lacking)
            if held is not None:
                # Once is enough.
                steps = {peer: theirs for peer, theirs in steps.items() if peer not in lacking}
            for peer, found in self._receive_all(number, step).items():
                breaks, begun = own.breaks, count_begun(own.news)
                own.merge(found.header.news)
                if number == 0:
                    steps[peer] = found.header.step
                    continue
                if found.header.payload_bytes and self._total is None:
                    held, step_held = found.parameters.clone(), step
                    self._total = held
                has_new = own.breaks != breaks, count_begun(own.news) != begun
                self._has_learnt_breaks |= has_new[0]
                self._has_learnt_steps |= has_new[1]
                # What an honest agent knew in the second round has reached all by round n − 1.
                if any(has_new) and number >= self._num_agents:
                    raise _Restart(self.attempt + 1)

    def _send(self, header: Header, total: Tensor | None, lacking: list[int]) -> None:
        neighbours = {*self._exchange.neighbours}
        given = neighbours & {*lacking} if total is not None else set[int]()
        nothing = torch.empty(0)
        for peers, values in ((neighbours - given, nothing), (given, total)):
            if values is not None:
                self._exchange.send(peers, replace(header, payload_bytes=values.nbytes), values)

    def _receive_all(self, number: int, step: int) -> dict[int, Received]:
        """Return the message of this round of each neighbour that is left."""

        def check(header: Header) -> None:
            if header.attempt > self.attempt:
                self.check_call(header)
            elif header.attempt == self.attempt:
                self._check(header, number, step)

        received = {}
        began = time.monotonic()
        for peer in self._exchange.neighbours:
            try:
                received[peer] = self._receive(peer, check, number, began)
            except LinkError as error:
                self._exchange.drop(peer)
                self._note_dropout(peer, error)
                # News of the first round still reaches all in time; later news needs all rounds.
                if number > 0:
                    raise _Restart(self.attempt + 1) from error
        return received

    def _receive(
        self, peer: int, check: Callable[[Header], None], number: int, began: float
    ) -> Received:
        # One limit for all that is skipped: a neighbour could send old messages for ever. It grows
        # with the rounds: whoever waits for an agent that waits for another is a round ahead of it,
        # and must not lose patience first.
        deadline = began + self._exchange.patience + number * self._exchange.timeout
        while True:
            found = self._exchange.receive(peer, check, since=began, deadline=deadline)
            if found.header.attempt > self.attempt:
                self._membership.merge(found.header.news)
                self._exchange.put_back(peer, found)
                raise _Restart(found.header.attempt)
            # Others were under way: of a step, or of an attempt that was given up.
            if found.header.attempt == self.attempt:
                return found

    def _check(self, header: Header, number: int, step: int) -> None:
        """Raise ``ProtocolError`` unless a message belongs to this round."""
        who = f"agent {header.sender}"
        if header.mixing_round != number:
            why = f"{who} is in round {header.mixing_round} of a recovery, not in round {number}"
            raise ProtocolError(why)
        # Only its neighbours can tell whether an agent may have begun the steps that it says. Those
        # that have recovered already, and went on, have begun one more than all others.
        own = Subject(Kind.BEGUN, header.sender, header.sender, header.sender)
        others = count_begun(self._membership.news, without=header.sender)
        if own not in header.news or header.news[own].step > max(step, others) + 2:
            raise ProtocolError(f"{who} has not begun the steps that it says")
        if header.payload_bytes not in (0, self._payload_bytes):
            why = f"{who} passed on a sum of {header.payload_bytes} bytes"
            raise ProtocolError(f"{why}, not {self._payload_bytes}")
