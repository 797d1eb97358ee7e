"""The plan of a run: a public file that all agents hold, verify and agree on."""

from corn.plan.file import fingerprint, load_plan, save_plan
from corn.plan.plan import Certificate, FloatType, Plan, make_plan
from corn.plan.verify import AgentGuarantee, Verification, guarantees_against, verify_plan

__all__ = [
    "AgentGuarantee",
    "Certificate",
    "FloatType",
    "Plan",
    "Verification",
    "fingerprint",
    "guarantees_against",
    "load_plan",
    "make_plan",
    "save_plan",
    "verify_plan",
]
