"""Privacy accounting: from a budget to the noise it needs, and from noise to its privacy.

- ``PrivacyBudget``: (ε, δ) for a run, its unit, and the largest [R⁻¹]_ii that keeps it.
- ``account``, ``account_precision``: from noise to ε(δ), δ(ε) and curves, agent by agent.
- ``check_budget``: whether a covariance keeps a budget, by its ``precision_diagonal``.
- ``ACCOUNTANTS``: exact, Theorem 2 and eq. (13b), each turning two of μ, ε and δ into the third.
- ``gaussian``: exact Gaussian DP, and the trade-off between the two errors of a test.
- ``subsampling``: privacy of one sample under Poisson sampling; needs the extra ``dp``.
"""

from corn.privacy import gaussian, subsampling
from corn.privacy.accountants import ACCOUNTANTS, Accountant, Accounting, is_proved
from corn.privacy.accounting import (
    BudgetCheck,
    PrivacyCurve,
    PrivacyLoss,
    TradeoffCurve,
    account,
    account_precision,
    check_budget,
)
from corn.privacy.budget import PrivacyBudget
from corn.privacy.precision import precision_diagonal
from corn.privacy.query import Adjacency, ClippedQuery, Unit

__all__ = [
    "ACCOUNTANTS",
    "Accountant",
    "Accounting",
    "Adjacency",
    "BudgetCheck",
    "ClippedQuery",
    "PrivacyBudget",
    "PrivacyCurve",
    "PrivacyLoss",
    "TradeoffCurve",
    "Unit",
    "account",
    "account_precision",
    "check_budget",
    "gaussian",
    "is_proved",
    "precision_diagonal",
    "subsampling",
]
