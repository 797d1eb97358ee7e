"""The plan of a run: a public file that all agents hold, verify and agree on."""

from corn.plan.file import fingerprint, load_plan, save_plan
from corn.plan.plan import FloatType, Plan, make_plan
from corn.plan.verify import AgentGuarantee, Verification, verify_plan

__all__ = [
    "AgentGuarantee",
    "FloatType",
    "Plan",
    "Verification",
    "fingerprint",
    "load_plan",
    "make_plan",
    "save_plan",
    "verify_plan",
]
