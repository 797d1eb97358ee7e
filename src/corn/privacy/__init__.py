"""Privacy accounting: what a budget allows, and what noise protects.

- ``PrivacyBudget``: (ε, δ) for a run, its unit, and the largest [R⁻¹]_ii that keeps it.
- ``account``, ``account_precision``: from noise to ε(δ), δ(ε) and curves, agent by agent.
- ``check_budget``: whether a covariance keeps a budget; ``precision_diagonal`` is what it reads.
- ``gaussian`` (exact), ``renyi`` (Theorem 2), ``paper`` (eq. 13b): μ, ε and δ from each other.
- ``subsampling``: one sample of a Poisson-sampled batch; needs the extra ``dp``.
"""

from corn.privacy import gaussian, paper, renyi, subsampling
from corn.privacy.accountants import ACCOUNTANTS, Accountant, Accounting
from corn.privacy.accounting import (
    PrivacyCurve,
    PrivacyLoss,
    TradeoffCurve,
    account,
    account_precision,
)
from corn.privacy.budget import PrivacyBudget
from corn.privacy.precision import precision_diagonal
from corn.privacy.query import Adjacency, ClippedQuery, Unit
from corn.privacy.verification import BudgetCheck, check_budget

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
    "paper",
    "precision_diagonal",
    "renyi",
    "subsampling",
]
