"""Audits: the strongest attackers against the code that runs, next to what was promised."""

from corn.audit.auditing import AuditReport, Finding, audit_plan
from corn.audit.one_run import audit_training
from corn.audit.views import View, find_smallest_break

__all__ = ["AuditReport", "Finding", "View", "audit_plan", "audit_training", "find_smallest_break"]
