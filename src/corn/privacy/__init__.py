"""Privacy accounting: from a budget to the noise it needs, and from noise to its privacy.

- ``PrivacyBudget``: (ε, δ) for a run, one for all agents or one for each; its unit, its sampling,
  and the largest [R⁻¹]_ii that keeps it.
- ``account``, ``account_precision``: from noise to ε(δ) and δ(ε), agent by agent;
  ``account_promises``: each agent's ε at the δ that a budget promises it.
- ``compose_expenses``: one total ε of several phases or plans, whose noise, clipping, sampling rate
  and number of steps may differ.
- ``compare_samplings``: the noise that each sampling needs for the same promise.
- ``read_promises``: ε of each agent by name, from a file.
- ``round_up``: ε as text, never less than it is.
- ``ACCOUNTANTS``: exact, Theorem 2 and eq. (13b), each from μ to ε and back, at a δ.
- ``gaussian``: exact Gaussian DP, and the trade-off between the two errors of a test.
- ``subsampling``: privacy of one sample under Poisson sampling.
"""

from corn.privacy import gaussian, subsampling
from corn.privacy.accounting import (
    PrivacyLoss,
    account,
    account_precision,
    account_promises,
    compare_samplings,
    precision_diagonal,
)
from corn.privacy.budget import (
    Adjacency,
    AgentPromise,
    ClippedQuery,
    PrivacyBudget,
    Sampling,
    Unit,
    read_promises,
)
from corn.privacy.composition import Expense, PlanTerms, TotalLoss, compose_expenses
from corn.privacy.gaussian import ACCOUNTANTS, Accounting, is_proved
from corn.privacy.rounding import round_up

__all__ = [
    "ACCOUNTANTS",
    "Accounting",
    "Adjacency",
    "AgentPromise",
    "ClippedQuery",
    "Expense",
    "PlanTerms",
    "PrivacyBudget",
    "PrivacyLoss",
    "Sampling",
    "TotalLoss",
    "Unit",
    "account",
    "account_precision",
    "account_promises",
    "compare_samplings",
    "compose_expenses",
    "gaussian",
    "is_proved",
    "precision_diagonal",
    "read_promises",
    "round_up",
    "subsampling",
]
