"""The mechanisms of the figures: a rule for the noise, its accounting and its objective."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from corn import covariance
from corn.checks import require, require_choice
from corn.covariance import (
    EAVESDROPPER,
    ONE_STEP,
    Horizon,
    ThreatModel,
    default_objective,
    read_mechanism,
)
from corn.errors import CornWarning
from corn.privacy import Accounting, PrivacyBudget, Unit
from corn.privacy.budget import fit_sampling


@dataclass(frozen=True)
class Mechanism:
    """One mechanism, which is a line of every figure.

    Attributes:
        name: Its name in tables.
        label: Its name in figures.
        rule: The rule that correlates noise across agents: a mechanism of ``corn.covariance``, or
            ``NAME=SOURCE#HASH`` for a covariance of the user's.
        accounting: ``paper`` for eq. (13b), ``rdp`` for Theorem 2, as in the authors' code, ``gdp``
            for the exact one.
        accumulates: Whether the design minimises the noise accumulated over a fifth of the run;
            otherwise that of one step, as in the paper.
        max_colluders: The largest coalition of insiders that the design protects against, with a
            seed for every pair of agents; 0 for an eavesdropper only.
        uses_defaults: Whether it is trained with gossip as ``corn train`` does by default: with
            momentum, a cool-down of one mixing time, a design that counts on both, and Poisson
            sampling for unit sample; otherwise as in the paper, without them.
    """

    name: str
    label: str
    rule: str
    accounting: Accounting = "gdp"
    accumulates: bool = False
    max_colluders: int = 0
    uses_defaults: bool = False

    @property
    def is_in_paper(self) -> bool:
        """Whether the paper has this line."""
        return self.accounting == "paper"

    @property
    def is_for_samples(self) -> bool:
        """Whether only panels with unit sample have it, as those of the authors' code."""
        return self.accounting == "rdp"

    @property
    def is_private(self) -> bool:
        """Whether there is any noise."""
        return self.rule != "none"

    @property
    def threat(self) -> ThreatModel:
        """The adversary that its guarantee holds against."""
        # Seeds of pairs keep nearly all of the gain against insiders (docs/theory.md, “Insiders”).
        return ThreatModel(self.max_colluders, "pairs") if self.max_colluders else EAVESDROPPER

    @property
    def against(self) -> str:
        """The adversary that its guarantee holds against, in words."""
        if self.rule == "none":
            return "nobody"
        if self.rule == "central":
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
        sizes: Sequence[int] = (),
    ) -> PrivacyBudget:
        """Return the budget that this line states; samples count at every step, as in the paper.

        With the defaults of ``corn train``, samples count with the probability of Poisson sampling,
        which follows from the ``sizes`` of the agents' data sets.

        The paper's constant may spend more than the budget outside its proven range. The claims
        check that, so the warning is suppressed here: it would appear for every point of a figure.
        """
        rate = None
        if self.uses_defaults and unit == "sample" and batch_size is not None:
            rate, _ = fit_sampling(sizes, batch_size, "poisson")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CornWarning)
            return PrivacyBudget(
                epsilon,
                delta,
                num_steps,
                clip,
                unit,
                self.accounting,
                batch_size=batch_size,
                sampling="every-step" if rate is None else "poisson",
                sampling_rate=rate,
            )

    def objective(self, num_steps: int) -> Horizon:
        """Return the objective of its design for a run of ``num_steps`` steps."""
        if self.uses_defaults:
            return default_objective(num_steps, mixing="gossip")
        # Agents of the paper's experiments use their own models, without a cool-down, so the weight
        # of disagreement stays 1.
        return Horizon(default_objective(num_steps).length) if self.accumulates else ONE_STEP


LDP_PAPER = Mechanism("ldp-paper", "LDP (paper)", "ldp", "paper")
DECOR_PAPER = Mechanism("decor-paper", "DECOR (paper)", "decor", "paper")
CORN_PAPER = Mechanism("corn-paper", "CorN (paper)", "corn", "paper")
LDP_AUTHORS = Mechanism("ldp-authors", "LDP (authors' code)", "ldp", "rdp")
DECOR_AUTHORS = Mechanism("decor-authors", "DECOR (authors' code)", "decor", "rdp")
CORN_AUTHORS = Mechanism("corn-authors", "CorN (authors' code)", "corn", "rdp")
LDP = Mechanism("ldp", "LDP", "ldp")
DECOR = Mechanism("decor", "DECOR, accumulated noise", "decor", accumulates=True)
CORN_ONE_STEP = Mechanism("corn-one-step", "CorN, one step", "corn")
CORN = Mechanism("corn", "CorN, accumulated noise", "corn", accumulates=True)
CORN_ONE_INSIDER = Mechanism(
    "corn-1-insider", "CorN, 1 insider", "corn", accumulates=True, max_colluders=1
)
CORN_TWO_INSIDERS = Mechanism(
    "corn-2-insiders", "CorN, 2 insiders", "corn", accumulates=True, max_colluders=2
)
CORN_DEFAULTS = Mechanism(
    "corn-defaults", "CorN, training defaults", "corn", accumulates=True, uses_defaults=True
)
CORN_DEFAULTS_ONE_INSIDER = Mechanism(
    "corn-defaults-1-insider",
    "CorN, training defaults, 1 insider",
    "corn",
    accumulates=True,
    max_colluders=1,
    uses_defaults=True,
)
CENTRAL = Mechanism(
    "central", "central DP (trusted server)", "central", accumulates=True, uses_defaults=True
)
NONE = Mechanism("none", "no noise", "none")

PAIR_SEEDS = Mechanism("corn-pairs", "CorN, a seed for each pair", "corn", accumulates=True)
LINK_SEEDS = Mechanism("corn-links", "CorN, a seed for each link", "corn", accumulates=True)

PAPER_MECHANISMS = (LDP_PAPER, DECOR_PAPER, CORN_PAPER)
"""The paper's constant, eq. (13b), and its one-step objective."""

AUTHORS_MECHANISMS = (LDP_AUTHORS, DECOR_AUTHORS, CORN_AUTHORS)
"""The noise of the authors' public code: one-step designs for Theorem 2, unit sample, each sample
counted at every step. They are drawn if asked for by name."""

MECHANISMS = (
    *PAPER_MECHANISMS,
    LDP,
    CORN_ONE_STEP,
    DECOR,
    CORN,
    CORN_ONE_INSIDER,
    CORN_TWO_INSIDERS,
    CORN_DEFAULTS,
    CORN_DEFAULTS_ONE_INSIDER,
    CENTRAL,
    NONE,
)
"""The lines of the figures, if none are named, except those of seed groups in Figure 2: the
paper's, exact accounting, designs for accumulated noise and against insiders, the defaults of
``corn train``, and two limits."""


def choose_mechanisms(texts: Sequence[str]) -> tuple[Mechanism, ...]:
    """Return the mechanisms with these names, in the order of the figures, then the user's.

    A covariance of the user's is ``mine=R.npy`` or ``mine=FILE.py:FUNCTION``.
    """
    known = {mechanism.name: mechanism for mechanism in (*MECHANISMS, *AUTHORS_MECHANISMS)}
    added = [text for text in texts if "=" in text]
    for name in set(texts) - set(added):
        require_choice("mechanisms", name, known)
    chosen = [mechanism for name, mechanism in known.items() if name in texts]
    for text in added:
        read_mechanism(text)  # raises if its source cannot be read
        label, _, source = text.partition("=")
        # Lines of a figure and rows of a table are told apart by this name alone.
        is_new = label not in (*known, *(mechanism.name for mechanism in chosen))
        require(is_new, "mechanisms", "given with different names", repr(label))
        # Cells are found by this text, from any folder, and a changed file has other results.
        file = Path(source.rpartition(":")[0] if ".py:" in source else source)
        digest = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
        rule = f"{label}={Path(source).resolve()}#{digest}"
        chosen.append(Mechanism(label, label, rule))
    return tuple(chosen)


def find_rule(rule: str) -> covariance.Mechanism:
    """Return the rule of a mechanism, as ``corn.covariance.design`` takes it."""
    # Without the hash of the source, which is there for the key of the cell only.
    return read_mechanism(rule.rpartition("#")[0] or rule)
