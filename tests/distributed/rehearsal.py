"""Agents that draw the noise and the batches of a simulation, to compare them with it.

No agent of the library draws public noise. Here functions of this process are replaced.
"""

import hashlib
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from corn.covariance import Decomposition
from corn.distributed import agent as agent_module
from corn.distributed import rendezvous as rendezvous_module
from corn.distributed.keyring import make_keys
from corn.distributed.rendezvous import Rendezvous
from corn.learn.batches import BatchSampler, SeededChoices
from corn.learn.perturbation import simulation_nonce
from corn.learn.problem import SweepSettings, TrainingProblem
from corn.noise import (
    Identity,
    ReleaseLedger,
    Roster,
    Secret,
    SecureSource,
    owners,
    simulated_keys,
)
from corn.plan import Plan
from corn.transport import Credentials

_MOST_AGENTS = 4


def make_public_credentials(seed: int, agent: int, num_agents: int) -> Credentials:
    """Return keys that follow from a public seed, so that processes agree on them."""
    secrets_of_all = [
        Secret(hashlib.sha256(f"corn rehearsal {seed} {each}".encode()).digest())
        for each in range(num_agents)
    ]
    identities = [Identity(secret) for secret in secrets_of_all]
    roster = Roster(tuple(own.public_key for own in identities))
    return Credentials(agent, identities[agent], roster)


def make_public_source(decomposition: Decomposition, agent: int, *, seed: int) -> SecureSource:
    """Return an agent's keys in a simulation with this seed."""
    everyone = simulated_keys(decomposition, seed=seed)
    return SecureSource({owner: everyone[owner] for owner in owners(decomposition, [agent])})


@contextmanager
def rehearsing(seed: int) -> Iterator[None]:
    """Let agents of this process draw what a simulation with a seed draws."""
    make_choices = ReleaseLedger.make_choices

    def make_source(
        credentials: Credentials, plan: Plan, members: tuple[int, ...], _: object
    ) -> SecureSource:
        return make_public_source(plan.decomposition, members.index(credentials.agent), seed=seed)

    def choose(ledger: ReleaseLedger, data: bytes | None) -> SeededChoices:
        make_choices(ledger, data)
        return SeededChoices(seed)

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "keys"
        make_keys(folder, _MOST_AGENTS)
        for owner, name, function in (
            (agent_module, "make_source", make_source),
            (ReleaseLedger, "make_choices", choose),
            (BatchSampler, "of_agent", _sample_as_simulated),
        ):
            stack.enter_context(mock.patch.object(owner, name, function))
        nonce = simulation_nonce(seed)
        stack.enter_context(
            mock.patch.object(rendezvous_module, "agree_on_nonce", return_value=nonce)
        )
        open_rendezvous = Rendezvous.__post_init__

        def give_keys(own: Rendezvous) -> None:
            open_rendezvous(own)
            if own.keys is None:
                own.keys = folder

        stack.enter_context(mock.patch.object(Rendezvous, "__post_init__", give_keys))
        yield


def _sample_as_simulated(
    query: Any, data: Any, choices: Any, *, batch_size: int | None = None
) -> BatchSampler:
    return BatchSampler(data, (query,), batch_size=batch_size, choices=choices)


@contextmanager
def sharing_batches(plan: Plan, everyone: TrainingProblem, agents: Sequence[int]) -> Iterator[None]:
    """Let the agent of this process take its batches from those of all agents.

    A simulation draws one batch for all agents from one generator. An agent can repeat its part of
    that only with the data of all.
    """
    (agent,) = agents
    data, _ = everyone.place(SweepSettings(plan.budget.num_steps, dtype=plan.dtype))

    def sample(_: Any, __: Any, choices: Any, *, batch_size: int | None = None) -> Any:
        sampler = BatchSampler(data, plan.budget.queries, batch_size=batch_size, choices=choices)
        return SimpleNamespace(draw=lambda number: sampler.draw(number).split(1)[agent])

    with mock.patch.object(BatchSampler, "of_agent", sample):
        yield
