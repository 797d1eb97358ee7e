"""``corn check``: check one site of a consortium before anything is released, or all results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from corn.cli.options import JSON, argument, option
from corn.cli.output import print_error, print_json, print_note, print_table, save_json, working
from corn.distributed.logs import PRIVATE_MARK
from corn.learn.consortium import Consortium, load_consortium

if TYPE_CHECKING:
    from corn.distributed.check import Finding, SiteReport


def check(
    consortium: Path = argument("Consortium file (.toml)."),
    results: list[Path] | None = argument(
        "Results of all sites (--out), for one page of the whole consortium.", default=None
    ),
    *,
    agent: str | None = option("Name or number of this site."),
    data: Path | None = option("Data file of this site."),
    keys: Path | None = option("Folder of this site's key and roster.json.", envvar="CORN_KEYS"),
    wait: float = option(
        "Seconds to keep ports open and to try those of other sites.", default=0.0, min=0, max=3600
    ),
    out: Path | None = option("File for the part of the result that others may see."),
    json: bool = JSON,
) -> None:
    """Check a site before a run: data, plan, keys, ledger and ports.

    Nothing is released. Exit 1 if something would stop a run.
    """
    # Imported here, because torch takes seconds that other commands save.
    from corn.distributed.check import check_site, load_report

    agreed = load_consortium(consortium)
    if results:
        findings = _print_page(agreed, [load_report(path) for path in results], as_json=json)
    elif agent is None or data is None or keys is None:
        raise typer.BadParameter("give --agent, --data and --keys, or the results of all sites")
    else:
        with working("checking"):
            report = check_site(agreed, agreed.find_site(agent), data=data, keys=keys, wait=wait)
        findings = report.findings
        private = {own.name: own.private for own in findings if own.private}
        if json:
            print_json({**report.to_shared(), "passed": report.passed, "private": private})
        else:
            title = f"checks of {report.site}, plan {report.plan[:16] or 'none'}"
            rows = [[own.name, own.status, own.text] for own in findings]
            print_table(f"{title}, corn {report.version}", ["check", "status", "found"], rows)
        for name, text in private.items():
            print_note(f"{PRIVATE_MARK}{name}: {text}")
        if out is not None:
            save_json(report.to_shared(), out)
            print_note(f"wrote {out}, without the private part: send it to who collects all")
    problems = [own for own in findings if own.status == "problem"]
    for own in problems:
        print_error(f"{own.name}: {own.text}")
    if problems:
        raise typer.Exit(1)


def _print_page(
    agreed: Consortium, reports: list[SiteReport], *, as_json: bool
) -> tuple[Finding, ...]:
    """Print one page for the whole consortium, and return all findings."""
    from corn.distributed.check import compare_reports

    common = compare_reports(agreed, reports)
    findings = (*common, *(own for report in reports for own in report.findings))
    if as_json:
        sites = [report.to_shared() for report in reports]
        passed = all(own.status != "problem" for own in findings)
        print_json({"sites": sites, "common": [vars(own) for own in common], "passed": passed})
        return findings
    names = list(dict.fromkeys(own.name for report in reports for own in report.findings))
    rows = []
    for report in reports:
        checked = [_find_worst(report, name) for name in names]
        corn = report.version.partition(",")[0]
        rows.append([report.site, *checked, report.plan[:8], report.roster[:8], corn, report.time])
    columns = ["site", *names, "plan", "roster", "corn", "time"]
    print_table("checks of the consortium", columns, rows)
    for report in reports:
        for own in report.findings:
            if own.status == "warning":
                print_note(f"{report.site}: {own.name}: {own.text}")
    return findings


def _find_worst(report: SiteReport, name: str) -> str:
    found = {own.status for own in report.findings if own.name == name}
    order = ("problem", "warning", "ok")
    return next((status for status in order if status in found), "not checked")
