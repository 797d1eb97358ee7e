"""The lines of a figure: a mechanism, its privacy accounting and the objective of its design."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from corn.checks import require, require_choice
from corn.covariance import (
    EAVESDROPPER,
    ONE_STEP,
    Horizon,
    Mechanism,
    MechanismName,
    ThreatModel,
    default_objective,
    read_mechanism,
)
from corn.covariance.own import digest_source
from corn.errors import CornWarning
from corn.privacy import Accounting, PrivacyBudget, Unit
from corn.privacy.budget import fit_sampling


@dataclass(frozen=True)
class MethodSpec:
    """One line of a figure.

    Attributes:
        name: its name in tables.
        label: its name in legends.
        mechanism: the rule that correlates noise across agents; ``NAME=SOURCE#HASH`` for one of the
            user's own.
        accounting: ``paper`` for eq. (13b), ``rdp`` for Theorem 2, as in the authors' code, ``gdp``
            for the exact one.
        accumulates: whether the design minimises the noise accumulated over a fifth of the run;
            otherwise that of one step, as in the paper.
        max_colluders: the largest coalition of insiders that the design protects against, with a
            seed for every pair of agents; 0 for an eavesdropper only.
        uses_defaults: whether it is trained with gossip as ``corn train`` did by default when the
            results were published: with momentum 0.9 from 200 steps on, a cool-down of one mixing
            time, a design that counts on both, and Poisson sampling for unit sample; otherwise as
            in the paper, without them.
    """

    # Stored cells are found by these fields, `label` excepted: a new or renamed field changes every
    # key of a training cell, and all of them would be computed again.
    name: str
    label: str
    mechanism: str
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
        """Whether it is a line of panels with unit sample only, as those of the authors' code."""
        return self.accounting == "rdp"

    @property
    def is_private(self) -> bool:
        """Whether there is any noise."""
        return self.mechanism != "none"

    @property
    def threat(self) -> ThreatModel:
        """The adversary that its guarantee holds against."""
        # Seeds of pairs keep nearly all of the gain against insiders (docs/theory.md, “Insiders”).
        return ThreatModel(self.max_colluders, "pairs") if self.max_colluders else EAVESDROPPER

    @property
    def against(self) -> str:
        """The adversary that its guarantee holds against, in words."""
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
        sizes: Sequence[int] = (),
    ) -> PrivacyBudget:
        """Return the budget that this line states; samples count at every step, as in the paper.

        For lines with the defaults of ``corn train``, samples count with the probability of Poisson
        sampling, which follows from the ``sizes`` of the agents' data sets.

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
            # Another momentum would compute every published cell again.
            momentum = 0.9 if num_steps >= 200 else 0.0
            return default_objective(num_steps, momentum=momentum)
        # Agents of the paper's experiments use their own models, without a cool-down, so the weight
        # of disagreement stays 1.
        return Horizon(default_objective(num_steps).length) if self.accumulates else ONE_STEP


LDP_PAPER = MethodSpec("ldp-paper", "LDP (paper)", "ldp", "paper")
DECOR_PAPER = MethodSpec("decor-paper", "DECOR (paper)", "decor", "paper")
CORN_PAPER = MethodSpec("corn-paper", "CorN (paper)", "corn", "paper")
LDP_AUTHORS = MethodSpec("ldp-authors", "LDP (authors' code)", "ldp", "rdp")
DECOR_AUTHORS = MethodSpec("decor-authors", "DECOR (authors' code)", "decor", "rdp")
CORN_AUTHORS = MethodSpec("corn-authors", "CorN (authors' code)", "corn", "rdp")
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
CORN_DEFAULTS = MethodSpec(
    "corn-defaults", "CorN, training defaults", "corn", accumulates=True, uses_defaults=True
)
CORN_DEFAULTS_ONE_INSIDER = MethodSpec(
    "corn-defaults-1-insider",
    "CorN, training defaults, 1 insider",
    "corn",
    accumulates=True,
    max_colluders=1,
    uses_defaults=True,
)
CENTRAL = MethodSpec(
    "central", "central DP (trusted server)", "central", accumulates=True, uses_defaults=True
)
NONE = MethodSpec("none", "no noise", "none")

PAIR_SEEDS = MethodSpec("corn-pairs", "CorN, a seed for each pair", "corn", accumulates=True)
LINK_SEEDS = MethodSpec("corn-links", "CorN, a seed for each link", "corn", accumulates=True)

DEFAULT_METHODS = (CORN_DEFAULTS, CORN_DEFAULTS_ONE_INSIDER)
"""CorN as ``corn train`` runs it."""

PAPER_METHODS = (LDP_PAPER, DECOR_PAPER, CORN_PAPER)
"""The paper's constant, eq. (13b), and its one-step objective."""

AUTHORS_METHODS = (LDP_AUTHORS, DECOR_AUTHORS, CORN_AUTHORS)
"""The noise of the authors' public code: one-step designs for Theorem 2, unit sample, each sample
counted at every step. They are drawn if asked for by name, because training cells are found by all
their methods: one more would compute every published cell again."""

ADDED_METHODS = (
    LDP,
    CORN_ONE_STEP,
    DECOR,
    CORN,
    CORN_ONE_INSIDER,
    CORN_TWO_INSIDERS,
    *DEFAULT_METHODS,
    CENTRAL,
    NONE,
)
"""Exact accounting, designs for accumulated noise and against insiders, the defaults of ``corn
train``, and two limits."""

METHODS = (*PAPER_METHODS, *ADDED_METHODS)
"""The lines of the figures, if none are named, except those of seed groups in Figure 2."""


def make_own_method(spec: str) -> MethodSpec:
    """Return the line of a mechanism of the user's own, such as ``mine=R.npy``."""
    mechanism = read_mechanism(spec)
    require(mechanism is not None, "mechanism", "NAME=R.npy or NAME=FILE.py:FUNCTION", repr(spec))
    label, _, source = spec.partition("=")
    known = [method.name for method in (*METHODS, *AUTHORS_METHODS)]
    # Lines of a figure and rows of a table are told apart by this name alone.
    require(label not in known, "mechanism", "a new name", repr(label))
    # Cells are found by this text, from any folder, and a changed file has other results.
    return MethodSpec(label, label, f"{label}={Path(source).resolve()}#{digest_source(spec)}")


def find_mechanism(text: str) -> Mechanism | MechanismName:
    """Return the mechanism of a line: a name, or one of the user's own."""
    # Without the hash of the source, which is there for the key of the cell only.
    return read_mechanism(text.rpartition("#")[0] or text) or cast("MechanismName", text)


def choose_methods(names: Sequence[str]) -> tuple[MethodSpec, ...]:
    """Return the lines with these names, in the order of the figures."""
    known = {method.name: method for method in (*METHODS, *AUTHORS_METHODS)}
    for name in names:
        require_choice("methods", name, known)
    return tuple(method for name, method in known.items() if name in names)
