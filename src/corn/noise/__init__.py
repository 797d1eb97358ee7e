"""Noise that each agent draws by itself: streams, shares, keys, and the ledger of releases."""

from corn.noise.address import NoiseSource, Owner, StreamAddress, Terms
from corn.noise.factor import choose_factors, factor_covariance, pool_groups
from corn.noise.keys import (
    Identity,
    Roster,
    Secret,
    generate_identity,
    load_identity,
    load_roster,
    save_identity,
    save_roster,
)
from corn.noise.ledger import BudgetSpentError, ReleaseLedger, agree_on_nonce, count_remaining
from corn.noise.normals import find_compiled
from corn.noise.seeds import (
    Delivery,
    RefusedPackageError,
    agent_keys,
    check_identity,
    open_seed,
    pair_key,
    seal_seed,
)
from corn.noise.shares import draw_all_shares, draw_share, owners
from corn.noise.simulation import SimulationSource, simulated_keys
from corn.noise.stream import SecureSource

__all__ = [
    "BudgetSpentError",
    "Delivery",
    "Identity",
    "NoiseSource",
    "Owner",
    "RefusedPackageError",
    "ReleaseLedger",
    "Roster",
    "Secret",
    "SecureSource",
    "SimulationSource",
    "StreamAddress",
    "Terms",
    "agent_keys",
    "agree_on_nonce",
    "check_identity",
    "choose_factors",
    "count_remaining",
    "draw_all_shares",
    "draw_share",
    "factor_covariance",
    "find_compiled",
    "generate_identity",
    "load_identity",
    "load_roster",
    "open_seed",
    "owners",
    "pair_key",
    "pool_groups",
    "save_identity",
    "save_roster",
    "seal_seed",
    "simulated_keys",
]
