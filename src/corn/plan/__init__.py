"""The plan: the public artefact that all agents of a run hold, verify and agree on."""

from corn.plan.codec import load_plan, save_plan
from corn.plan.record import Certificate, Plan, make_plan
from corn.plan.verification import AgentGuarantee, Verification, verify_plan

__all__ = [
    "AgentGuarantee",
    "Certificate",
    "Plan",
    "Verification",
    "load_plan",
    "make_plan",
    "save_plan",
    "verify_plan",
]
