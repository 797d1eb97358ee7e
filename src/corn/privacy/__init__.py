"""Privacy accounting: from a budget to the noise it needs, and from noise to its privacy."""

from corn.privacy import gaussian as gaussian
from corn.privacy import subsampling as subsampling
from corn.privacy.accounting import PrivacyLoss as PrivacyLoss
from corn.privacy.accounting import account as account
from corn.privacy.accounting import account_precision as account_precision
from corn.privacy.accounting import account_promises as account_promises
from corn.privacy.accounting import precision_diagonal as precision_diagonal
from corn.privacy.budget import Adjacency as Adjacency
from corn.privacy.budget import ClippedQuery as ClippedQuery
from corn.privacy.budget import PrivacyBudget as PrivacyBudget
from corn.privacy.budget import Sampling as Sampling
from corn.privacy.budget import Unit as Unit
from corn.privacy.composition import Expense as Expense
from corn.privacy.composition import PlanTerms as PlanTerms
from corn.privacy.composition import TotalLoss as TotalLoss
from corn.privacy.composition import compose_expenses as compose_expenses
from corn.privacy.gaussian import ACCOUNTANTS as ACCOUNTANTS
from corn.privacy.gaussian import Accounting as Accounting
from corn.privacy.gaussian import is_proved as is_proved
from corn.privacy.rounding import round_up as round_up
