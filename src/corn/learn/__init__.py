"""Learning: DSGD with clipped, noisy gradients, batched over agents, mechanisms and seeds.

- ``train``: your own model, loss and per-agent data sets.
- ``make_workload``, ``tune``, ``run_sweep``: the paper's tasks, many runs at once.
- ``Method``: a mechanism's noise under a budget; ``Trial``: a method with a step-size schedule.

The public names are in :mod:`corn.learn.api`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from corn.learn.api import *  # noqa: F403


# Importing torch takes seconds, which commands such as ``corn graph`` need not wait for. So the
# names are loaded when one of them is first used.
def __getattr__(name: str) -> object:
    if not name.startswith("_"):
        api = importlib.import_module("corn.learn.api")
        if hasattr(api, name):
            return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(importlib.import_module("corn.learn.api"))})
