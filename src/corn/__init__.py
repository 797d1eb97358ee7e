"""CorN: decentralised learning with noise that agents draw jointly, so that it cancels.

>>> network = load_network("ring:20")
>>> budget = PrivacyBudget(epsilon=10, delta=1e-5, num_steps=5000, clip=0.1)
>>> noise = design(network.mixing_matrix, budget.precision_cap, objective=Horizon(1000))
>>> noise.status, round(noise.central_ratio, 2)
('optimal', 1.54)
"""

from typing import TYPE_CHECKING

from corn.covariance import Decomposition, Design, Horizon, ThreatModel, design, expose
from corn.errors import CornError, CornWarning
from corn.plan import Plan, load_plan, make_plan, save_plan, verify_plan
from corn.privacy import PrivacyBudget, account
from corn.topology import Network, load_network, spectrum
from corn.version import __version__

if TYPE_CHECKING:
    from corn.learn import train as train

__all__ = [
    "CornError",
    "CornWarning",
    "Decomposition",
    "Design",
    "Horizon",
    "Network",
    "Plan",
    "PrivacyBudget",
    "ThreatModel",
    "__version__",
    "account",
    "design",
    "expose",
    "load_network",
    "load_plan",
    "make_plan",
    "save_plan",
    "spectrum",
    "train",
    "verify_plan",
]


def __getattr__(name: str) -> object:
    """Import ``train`` when it is first used: torch takes seconds that a design need not wait."""
    if name == "train":
        from corn.learn import train

        return train
    raise AttributeError(f"module 'corn' has no attribute {name!r}")
