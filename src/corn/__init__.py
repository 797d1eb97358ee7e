"""CorN: decentralised learning with noise that agents draw jointly, so that it cancels.

>>> network = load_network("ring:20")
>>> budget = PrivacyBudget(epsilon=10, delta=1e-5, num_steps=5000, clip=0.1)
>>> noise = design(network, budget)
>>> noise.status, round(noise.central_ratio, 2)
('optimal', 1.05)

Names are imported when they are first used. SciPy takes a second to import and torch several, and
the command line must be able to handle Ctrl-C meanwhile (see ``corn.__main__``).
"""

import importlib
from typing import TYPE_CHECKING

from corn.version import __version__

if TYPE_CHECKING:
    from corn.covariance import Decomposition as Decomposition
    from corn.covariance import Design as Design
    from corn.covariance import DesignProblem as DesignProblem
    from corn.covariance import FiniteRun as FiniteRun
    from corn.covariance import Horizon as Horizon
    from corn.covariance import ThreatModel as ThreatModel
    from corn.covariance import design as design
    from corn.covariance import expose as expose
    from corn.errors import CornError as CornError
    from corn.errors import CornWarning as CornWarning
    from corn.learn import compare as compare
    from corn.learn import train as train
    from corn.learn.own_loop import make_private as make_private
    from corn.plan import Plan as Plan
    from corn.plan import load_plan as load_plan
    from corn.plan import make_plan as make_plan
    from corn.plan import save_plan as save_plan
    from corn.plan import verify_plan as verify_plan
    from corn.privacy import PrivacyBudget as PrivacyBudget
    from corn.privacy import account as account
    from corn.topology import Network as Network
    from corn.topology import load_network as load_network
    from corn.topology import spectrum as spectrum

_NAMES = {
    "corn.covariance": (
        *("Decomposition", "Design", "DesignProblem", "FiniteRun", "Horizon", "ThreatModel"),
        *("design", "expose"),
    ),
    "corn.errors": ("CornError", "CornWarning"),
    "corn.learn": ("compare", "train"),
    "corn.learn.own_loop": ("make_private",),
    "corn.plan": ("Plan", "load_plan", "make_plan", "save_plan", "verify_plan"),
    "corn.privacy": ("PrivacyBudget", "account"),
    "corn.topology": ("Network", "load_network", "spectrum"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
_PACKAGES = ("topology", "privacy", "covariance", "noise", "plan", "learn", "distributed", "flower")

__all__ = [*_MODULES, "__version__"]


def __getattr__(name: str) -> object:
    """Import a public name, or a package, when it is first used."""
    value: object
    if name in _MODULES:
        value = getattr(importlib.import_module(_MODULES[name]), name)
    elif name in _PACKAGES:
        value = importlib.import_module(f"corn.{name}")
    else:
        raise AttributeError(f"module 'corn' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
