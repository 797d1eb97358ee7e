"""Checks of one site before anything is released: data, plan, keys, ledger and connections."""

from __future__ import annotations

import hashlib
import platform
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeAlias

from corn.distributed.keyring import load_credentials
from corn.errors import CornError, FileFormatError
from corn.learn.batches import require_fitting_samples
from corn.learn.consortium import Consortium
from corn.noise.keys import find_pinned_roster
from corn.noise.ledger import read_history
from corn.parsing import build, parse_address, read_json
from corn.plan import Plan, fingerprint, verify_plan
from corn.topology import list_connections
from corn.transport.listener import open_port
from corn.version import __version__

Status: TypeAlias = Literal["ok", "warning", "problem"]

_CONNECT_SECONDS = 3.0


@dataclass(frozen=True)
class Finding:
    """The result of one check: a ``problem`` would stop the run.

    ``text`` is for all sites, and tells of the data only whether it can be used; ``private`` is for
    the owner alone.
    """

    name: str
    status: Status
    text: str
    private: str = ""


@dataclass(frozen=True)
class SiteReport:
    """The findings at one site, and the fingerprints that all sites must have in common, if any."""

    site: str
    consortium: str
    plan: str
    roster: str
    version: str
    time: str
    findings: tuple[Finding, ...]
    format: Literal["corn check 2"] = "corn check 2"

    @property
    def passed(self) -> bool:
        """Whether nothing would stop the run."""
        return all(own.status != "problem" for own in self.findings)

    def to_shared(self) -> dict[str, Any]:
        """Return the part that the site may send to others."""
        shared = tuple(replace(own, private="") for own in self.findings)
        return asdict(replace(self, findings=shared))


def load_report(path: Path) -> SiteReport:
    """Read the shared part of a report."""
    document = read_json(path, kind="the result of a check")
    try:
        # Every file of results has the version, which ``version`` states with that of Python.
        fields = {name: value for name, value in document.items() if name != "corn_version"}
        report: SiteReport = build(SiteReport, fields, "the result")
    except (AttributeError, CornError) as error:
        raise FileFormatError(f"{path}: not the result of a check: {error}") from error
    return report


def compare_reports(consortium: Consortium, reports: Sequence[SiteReport]) -> list[Finding]:
    """Return what the sites do not have in common, and the sites that are missing."""
    findings = []
    present = {report.site for report in reports}
    if absent := [site.name for site in consortium.sites if site.name not in present]:
        findings.append(Finding("sites", "problem", f"no result of {', '.join(absent)}"))
    for name in ("consortium", "plan", "roster", "version"):
        owners: dict[str, list[str]] = {}
        for report in reports:
            value = getattr(report, name)
            # Agents of one minor version may run together.
            value = ".".join(value.split(".")[:2]) if name == "version" else value[:16]
            owners.setdefault(value or "none", []).append(report.site)
        if len(owners) > 1:
            found = "; ".join(f"{value}: {', '.join(who)}" for value, who in owners.items())
            text = f"must be the same everywhere, found {found}"
            findings.append(Finding(name, "problem", text))
    return findings


def check_site(
    consortium: Consortium, agent: int, *, data: Path, keys: Path, wait: float = 0.0
) -> SiteReport:
    """Check one site; nothing is released or recorded.

    The port stays open for ``wait`` seconds, so that sites that check together reach each other.
    """
    findings = [_check_data(consortium, agent, data)]
    plan, found = _check_plan(consortium)
    findings.append(found)
    roster, found = _check_keys(consortium, agent, keys)
    findings.append(found)
    if plan is not None:
        if keys.is_dir():
            findings.append(_check_ledger(plan, agent, keys))
        findings += _check_connections(consortium, plan, agent, wait)
    # A hash of the text, which editors of other systems do not change by saving it.
    text = consortium.path.read_text(encoding="utf-8-sig")
    return SiteReport(
        site=consortium.sites[agent].name,
        consortium=hashlib.sha256(text.encode()).hexdigest(),
        plan="" if plan is None else fingerprint(plan).hex(),
        roster=roster,
        version=f"{__version__}, Python {platform.python_version()}",
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        findings=tuple(findings),
    )


def _check_data(consortium: Consortium, agent: int, data: Path) -> Finding:
    try:
        problem = consortium.make_workload(data).build(len(consortium.sites), [agent])
        require_fitting_samples(consortium.make_budget(), problem.data.sizes, first=agent)
    except CornError as error:
        text = "the file does not fit the public schema or the plan"
        return Finding("data", "problem", text, str(error))
    private = [f"{sum(problem.data.sizes):,} rows to train on", *problem.private_notes]
    return Finding("data", "ok", "the file fits the public schema", "; ".join(private))


def _check_plan(consortium: Consortium) -> tuple[Plan | None, Finding]:
    try:
        plan = consortium.load_plan()
    except CornError as error:
        return None, Finding("plan", "problem", str(error))
    problems = verify_plan(plan).problems
    if problems:
        return plan, Finding("plan", "problem", "; ".join(problems))
    return plan, Finding("plan", "ok", f"verified: {plan.describe()}")


def _check_keys(consortium: Consortium, agent: int, keys: Path) -> tuple[str, Finding]:
    """Return the fingerprint of the roster, empty without a usable one, and the finding."""
    try:
        roster = load_credentials(keys, agent, len(consortium.sites), pins=False).roster
    except CornError as error:
        return "", Finding("keys", "problem", "the key or the roster cannot be used", str(error))
    shown = roster.fingerprint.hex()
    pinned = find_pinned_roster(keys / f"agent-{agent}.key")
    if pinned is not None and not roster.follows(bytes.fromhex(pinned)):
        text = f"the key was used with another roster, {pinned[:16]}: somebody exchanged it"
        return shown, Finding("keys", "problem", text)
    if list(roster.accepts) != list(consortium.accepts):
        text = "the roster and the consortium file differ in which sites accept connections"
        return shown, Finding("keys", "problem", text)
    text = f"roster {shown[:16]}: compare it with the others by telephone"
    return shown, Finding("keys", "ok", text)


def _check_ledger(plan: Plan, agent: int, keys: Path) -> Finding:
    own = fingerprint(plan).hex()
    history = read_history([keys], agent)
    if history.problems:
        text = "a ledger is missing or damaged: make a new key and a new plan"
        return Finding("ledger", "problem", text, "; ".join(history.problems))
    # A start that failed leaves a ledger without releases.
    used = [record.plan for record in history.records if record.expense.num_releases]
    if own in used:
        text = "releases of this plan were made before: start agents with --resume or --rejoin"
        return Finding("ledger", "warning", text)
    private = f"releases under {len(used)} other plans add to the total" if used else ""
    return Finding("ledger", "ok", "nothing was released under this plan", private)


def _check_connections(
    consortium: Consortium, plan: Plan, agent: int, wait: float
) -> Iterator[Finding]:
    """Yield a finding for each port that the site opens or must reach."""
    sites, store = consortium.sites, consortium.store
    pairs = list_connections(plan.network.graph, consortium.accepts)
    is_host = agent == consortium.accepts.index(True)
    # Each address, what it is for, and whether this site listens there.
    needs = [(sites[b].address, sites[b].name, False) for a, b in pairs if a == agent]
    if coming := ", ".join(sites[a].name for a, b in pairs if b == agent):
        needs.append((sites[agent].address, f"from {coming}", True))
    needs.append((store, "from all sites (store)" if is_host else "the store", is_host))
    if missing := [who for address, who, _ in needs if address is None]:
        text = f"the consortium file has no address: {'; '.join(missing)}"
        yield Finding("port", "warning", text)
    listening = {address: who for address, who, listens in needs if address and listens}
    reach = {address: who for address, who, listens in needs if address and not listens}
    with ExitStack() as stack:
        for address, who in listening.items():
            try:
                # The system completes connections by itself, which is all there is to find out.
                stack.enter_context(closing(open_port(parse_address(address))))
                yield Finding("port", "ok", f"listens at {address}, {who}")
            except (OSError, CornError) as error:
                why = getattr(error, "strerror", None) or error
                text = f"cannot listen at {address} ({why}): free the port, or correct address"
                yield Finding("port", "problem", text)
        end = time.monotonic() + wait
        for address, who in reach.items():
            yield _reach(address, f"{sites[agent].name} must reach {who} at {address}", end)
        # Others may come later.
        time.sleep(max(0.0, end - time.monotonic()) if listening else 0.0)


def _reach(address: str, task: str, end: float) -> Finding:
    """Connect until it works or the time is over."""
    while True:
        try:
            with socket.create_connection(parse_address(address), timeout=_CONNECT_SECONDS):
                return Finding("port", "ok", f"{task}, and does")
        except ConnectionRefusedError:
            text = f"{task}, where nothing listens yet: check at the same time with --wait 60"
            found = Finding("port", "warning", text)
        except OSError as error:
            found = Finding("port", "problem", f"{task}: {error}: open or correct the port")
        if time.monotonic() >= end:
            return found
        time.sleep(0.5)
