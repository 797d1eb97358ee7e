"""Noise that each agent draws by itself: streams, shares, keys, and the ledger of releases."""

from corn.noise.keys import (
    Identity,
    Secret,
    generate_identity,
    list_used_plans,
    load_identity,
    record_use,
    save_identity,
)
from corn.noise.ledger import (
    BudgetSpentError,
    ReleaseLedger,
    agree_on_nonce,
    read_history,
    read_ledger,
)
from corn.noise.normals import load_compiled
from corn.noise.roster import (
    Roster,
    Site,
    load_roster,
    pin_roster,
    rotate_key,
    save_roster,
)
from corn.noise.seeds import (
    RefusedPackageError,
    agent_keys,
    check_identity,
    open_seed,
    pair_key,
    seal_seed,
)
from corn.noise.shares import (
    SimulationSource,
    choose_factors,
    draw_all_shares,
    draw_share,
    factor_covariance,
    owners,
    simulated_keys,
)
from corn.noise.stream import NoiseSource, Owner, SecureSource, StreamAddress, Terms

__all__ = [
    "BudgetSpentError",
    "Identity",
    "NoiseSource",
    "Owner",
    "RefusedPackageError",
    "ReleaseLedger",
    "Roster",
    "Secret",
    "SecureSource",
    "SimulationSource",
    "Site",
    "StreamAddress",
    "Terms",
    "agent_keys",
    "agree_on_nonce",
    "check_identity",
    "choose_factors",
    "draw_all_shares",
    "draw_share",
    "factor_covariance",
    "generate_identity",
    "list_used_plans",
    "load_compiled",
    "load_identity",
    "load_roster",
    "open_seed",
    "owners",
    "pair_key",
    "pin_roster",
    "read_history",
    "read_ledger",
    "record_use",
    "rotate_key",
    "save_identity",
    "save_roster",
    "seal_seed",
    "simulated_keys",
]
