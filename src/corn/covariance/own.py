"""A mechanism of the user's own: a covariance from a file, or from a function of the network.

Only the shape of the covariance counts: it is scaled to the precision caps and checked like every
other design.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, final

import numpy as np
from numpy.typing import ArrayLike

from corn.arrays import FloatArray, as_symmetric_matrix
from corn.checks import require
from corn.covariance.baselines import conclude_in_family
from corn.covariance.decomposition import Decomposition
from corn.covariance.problem import Design, DesignProblem, MechanismName
from corn.covariance.threat import EAVESDROPPER, ThreatModel
from corn.errors import FileFormatError, InvalidArgumentError
from corn.files import load_function
from corn.topology.files import read_matrix

CovarianceRule: TypeAlias = Callable[[FloatArray, FloatArray], ArrayLike]
"""(mixing matrix W, precision caps b) → covariance R of the agents' noise, up to scale."""


@final
@dataclass(frozen=True, eq=False)
class OwnMechanism:
    """Noise with a covariance of the user's own, scaled to the privacy budget.

    All agents draw the noise from one seed that they share, so it holds against an eavesdropper
    only. A diagonal covariance needs no seed and holds against insiders too.

    Attributes:
        covariance: R, shape (n, n), or a rule that computes it from W and the caps b.
        label: its name in tables.
    """

    covariance: ArrayLike | CovarianceRule
    label: str = "own"
    name: ClassVar[MechanismName] = "own"
    default_threat: ClassVar[ThreatModel] = EAVESDROPPER

    def solve(self, problem: DesignProblem) -> Design:
        """Return the covariance, scaled until every agent's cap holds."""
        R = self._find(problem)
        is_independent = not np.any(R - np.diag(R.diagonal()))
        threat = problem.threat
        if threat.max_colluders and not is_independent:
            raise InvalidArgumentError(
                f"mechanism {self.label!r} draws correlated noise from one seed, which holds "
                f"against an eavesdropper only, found max_colluders={threat.max_colluders}: ask "
                "for a threat without insiders (--colluders 0)"
            )
        problem = replace(problem, threat=replace(threat, seeds="global"))
        found = conclude_in_family(problem, R, self.name, "formula", 1)
        # Independent noise needs no seed, so no insider knows any of it.
        shares = Decomposition(found.covariance.diagonal()) if is_independent else None
        return replace(found, status="given", shares=shares)

    def _find(self, problem: DesignProblem) -> FloatArray:
        given: Any = self.covariance
        if callable(given):
            if problem.mixing_matrix is None:
                raise InvalidArgumentError(f"mechanism {self.label!r} needs the mixing matrix")
            # Copies: the user's function must not change the problem.
            given = given(problem.mixing_matrix.copy(), problem.precision_caps.copy())
        R = as_symmetric_matrix(given, name=f"covariance of {self.label!r}")
        n = problem.num_agents
        rule = f"of shape ({n}, {n}), as the network"
        require(R.shape == (n, n), f"covariance of {self.label!r}", rule, R.shape)
        return R


def read_mechanism(spec: str) -> OwnMechanism | None:
    """Return the mechanism of ``NAME=R.npy``, ``NAME=R.csv`` or ``NAME=FILE.py:FUNCTION``.

    None for a text without ``=``, which names one of CorN's own mechanisms.
    """
    label, equals, source = spec.partition("=")
    if not equals:
        return None
    if not label or not source:
        raise FileFormatError(
            f"mechanism must be NAME=R.npy or NAME=FILE.py:FUNCTION, found {spec!r}"
        )
    if ".py:" in source:
        return OwnMechanism(load_function(source), label)
    return OwnMechanism(read_matrix(Path(source), name="a covariance"), label)
