"""The plan of a run: a public file that all agents hold, verify and agree on."""

from corn.plan.file import fingerprint as fingerprint
from corn.plan.file import load_plan as load_plan
from corn.plan.file import save_plan as save_plan
from corn.plan.plan import FloatType as FloatType
from corn.plan.plan import Plan as Plan
from corn.plan.plan import make_plan as make_plan
from corn.plan.verify import AgentGuarantee as AgentGuarantee
from corn.plan.verify import Verification as Verification
from corn.plan.verify import verify_plan as verify_plan
