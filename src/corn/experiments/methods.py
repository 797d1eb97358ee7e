"""The lines of a figure: a mechanism, how its privacy is counted, and what it is designed for."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from corn.covariance import Horizon, MechanismName, ThreatModel
from corn.covariance.threat import EAVESDROPPER
from corn.errors import CornWarning
from corn.privacy import Accounting, PrivacyBudget, Unit


@dataclass(frozen=True)
class MethodSpec:
    """One line of a figure.

    Attributes:
        name: what tables call it.
        label: what legends call it.
        mechanism: how noise is correlated across agents.
        accounting: ``paper`` is eq. (13b), ``gdp`` exact.
        accumulates: designed for the noise that accumulates over a fifth of the run; otherwise for
            one step, as in the paper.
        max_colluders: insiders it is designed against, with a seed for each pair of agents.
    """

    name: str
    label: str
    mechanism: MechanismName
    accounting: Accounting = "gdp"
    accumulates: bool = False
    max_colluders: int = 0

    @property
    def is_in_paper(self) -> bool:
        """Whether the paper has this line."""
        return self.accounting == "paper"

    @property
    def is_private(self) -> bool:
        """Whether there is noise at all."""
        return self.mechanism != "none"

    @property
    def threat(self) -> ThreatModel:
        """Who its guarantee holds against."""
        return ThreatModel(self.max_colluders, "pairs") if self.max_colluders else EAVESDROPPER

    @property
    def against(self) -> str:
        """Whom it protects against, in words."""
        if self.mechanism == "none":
            return "nobody"
        if self.mechanism == "central":
            return "those who see the server's models, and none of the agents' messages"
        return self.threat.describe()

    def budget(
        self,
        epsilon: float,
        delta: float,
        num_steps: int,
        clip: float,
        unit: Unit = "agent",
        batch_size: int | None = None,
    ) -> PrivacyBudget:
        """What it promises: though beyond its range the paper's constant may break it.

        That is a claim to be checked, so the warning it would otherwise cause at every point of
        every figure is left out.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CornWarning)
            return PrivacyBudget(
                epsilon, delta, num_steps, clip, unit, self.accounting, batch_size=batch_size
            )

    def objective(self, num_steps: int) -> Horizon:
        """What its covariance minimises in a run of so many steps."""
        return Horizon(max(1.0, num_steps / 5) if self.accumulates else 1.0)


LDP_PAPER = MethodSpec("ldp-paper", "LDP (paper)", "ldp", "paper")
DECOR_PAPER = MethodSpec("decor-paper", "DECOR (paper)", "decor", "paper")
CORN_PAPER = MethodSpec("corn-paper", "CorN (paper)", "corn", "paper")
LDP = MethodSpec("ldp", "LDP", "ldp")
DECOR = MethodSpec("decor", "DECOR, accumulated noise", "decor", accumulates=True)
CORN_ONE_STEP = MethodSpec("corn-one-step", "CorN, one step", "corn")
CORN = MethodSpec("corn", "CorN, accumulated noise", "corn", accumulates=True)
CORN_ONE_INSIDER = MethodSpec(
    "corn-1-insider", "CorN, 1 insider", "corn", accumulates=True, max_colluders=1
)
CORN_TWO_INSIDERS = MethodSpec(
    "corn-2-insiders", "CorN, 2 insiders", "corn", accumulates=True, max_colluders=2
)
CENTRAL = MethodSpec("central", "central DP (trusted server)", "central")
NONE = MethodSpec("none", "no noise", "none")

PAPER_METHODS = (LDP_PAPER, DECOR_PAPER, CORN_PAPER)
"""The paper's constant and its one-step objective."""

ADDED_METHODS = (
    LDP,
    CORN_ONE_STEP,
    DECOR,
    CORN,
    CORN_ONE_INSIDER,
    CORN_TWO_INSIDERS,
    CENTRAL,
    NONE,
)
"""Exact accounting, designs for accumulated noise, insiders, and the two limits."""

METHODS = (*PAPER_METHODS, *ADDED_METHODS)
