"""``corn check``: check one site of a consortium before anything is released, or all results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from corn.cli.options import JsonOption
from corn.cli.output import print_error, print_json, print_note, print_table, save_json, working
from corn.distributed.check import (
    Finding,
    SiteReport,
    check_site,
    compare_reports,
    load_report,
)
from corn.learn.consortium import load_consortium

EXAMPLE = "corn check consortium.toml --agent lake --data lake.csv --keys keys --out lake.json"


def check(
    consortium: Annotated[Path, typer.Argument(help="Consortium file (.toml).")],
    results: Annotated[
        list[Path] | None,
        typer.Argument(help="Results of all sites (--out), for one page of the whole consortium."),
    ] = None,
    *,
    agent: Annotated[str | None, typer.Option(help="Name or number of this site.")] = None,
    data: Annotated[Path | None, typer.Option(help="Data file of this site.")] = None,
    keys: Annotated[
        Path | None,
        typer.Option(envvar="CORN_KEYS", help="Folder of this site's key and roster.json."),
    ] = None,
    wait: Annotated[
        float,
        typer.Option(
            min=0, max=3600, help="Seconds to keep ports open and to try those of other sites."
        ),
    ] = 0.0,
    out: Annotated[
        Path | None,
        typer.Option(help="File for the part of the result that others may see."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Check a site before a run: data, plan, keys, ledger and ports.

    Nothing is released. Exit 1 if something would stop a run.
    """
    agreed = load_consortium(consortium)
    if results:
        reports = [load_report(path) for path in results]
        _print_page(reports, compare_reports(agreed, reports), as_json=json)
        return
    if agent is None or data is None or keys is None:
        raise typer.BadParameter("give --agent, --data and --keys, or the results of all sites")
    with working("checking"):
        report = check_site(agreed, agreed.find_site(agent), data=data, keys=keys, wait=wait)
    if out is not None:
        save_json(report.to_shared(), out)
    if json:
        private = {own.name: own.private for own in report.findings if own.private}
        print_json({**report.to_shared(), "passed": report.passed, "private": private})
    else:
        print_table(
            f"checks of {report.site}, plan {report.plan[:16] or 'none'}, corn {report.version}",
            ["check", "status", "found"],
            [[own.name, own.status, own.text] for own in report.findings],
        )
    for own in report.findings:
        if own.private:
            print_note(f"private, do not publish: {own.name}: {own.private}")
    if out is not None:
        print_note(f"wrote {out}, without the private part; send it to the person who collects all")
    _end(report.findings)


def _print_page(reports: list[SiteReport], common: list[Finding], *, as_json: bool) -> None:
    """Print one page for the whole consortium."""
    findings = [*common, *(own for report in reports for own in report.findings)]
    if as_json:
        sites = [report.to_shared() for report in reports]
        passed = all(own.status != "problem" for own in findings)
        print_json({"sites": sites, "common": [vars(own) for own in common], "passed": passed})
    else:
        names = list(dict.fromkeys(own.name for report in reports for own in report.findings))
        print_table(
            "checks of the consortium",
            ["site", *names, "plan", "roster", "corn", "time"],
            [
                [
                    report.site,
                    *(_worst(report, name) for name in names),
                    report.plan[:8],
                    report.roster[:8],
                    report.version.partition(",")[0],
                    report.time,
                ]
                for report in reports
            ],
        )
        for report in reports:
            for own in report.findings:
                if own.status == "warning":
                    print_note(f"{report.site}: {own.name}: {own.text}")
    _end(findings)


def _worst(report: SiteReport, name: str) -> str:
    order = ("problem", "warning", "ok")
    found = {own.status for own in report.findings if own.name == name}
    return next((status for status in order if status in found), "not checked")


def _end(findings: list[Finding] | tuple[Finding, ...]) -> None:
    problems = [own for own in findings if own.status == "problem"]
    for own in problems:
        print_error(f"{own.name}: {own.text}")
    if problems:
        raise typer.Exit(1)
