"""Privacy accounting: from a budget to the noise it needs, and from noise to its privacy.

`PrivacyBudget` is the promise. `account` and its variants go from noise to ε(δ) and δ(ε), agent by
agent; `compose_expenses` adds up several plans, whose noise, clipping and sampling may differ.
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
