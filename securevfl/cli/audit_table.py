"""An audit's outcome as a table for people."""

from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from securevfl.lab.audit.audit_report import AuditReport
from securevfl.lab.audit.audit_statistics import FALSE_FAILURE

_RELEASES: Final = {
    "sequence": "rows clipped whole, released again in every round",
    "pooled": "means of clipped records, each released once",
    "class_sums": "for votes: one record there or not, as a primary sees it",
    "label_sums": "for votes: one row's label exchanged, as a secondary sees it",
    "drawn_labels": "for votes: labels by randomised response",
}


def print_audit(report: AuditReport) -> None:
    """Print every test's statistic, threshold, power and verdict, and then the verdict of all."""
    console = Console()
    for release, tests in report.tests.items():
        table = Table(title=f"{release}: {_RELEASES[release]}", title_justify="left")
        table.add_column("test", no_wrap=True)
        for column in ("statistic", "threshold", "power"):
            table.add_column(column, justify="right", no_wrap=True)
        table.add_column("verdict", no_wrap=True)
        for test in tests:
            sign = ">=" if test.passes_if == "at least" else "<="
            table.add_row(
                test.name,
                f"{test.statistic:.4g}",
                f"{sign} {test.threshold:.4g}",
                # Rounded down: 0.99996 must not be shown as certainty.
                f"{int(test.power * 1e4) / 1e4:.4f}",
                test.verdict if test.verdict == "pass" else "[bold red]FAIL[/bold red]",
            )
        console.print(table)
    console.print("power: the probability that a test fails the mechanism if")
    against = {one.name: one.against for tests in report.tests.values() for one in tests}
    for name, mistake in against.items():
        console.print(f"  {name}: {mistake}", highlight=False, soft_wrap=True)
    settings = report.settings
    if report.refusal is not None:
        console.print("rounds_finished: [bold red]FAIL[/bold red]:", escape(report.refusal))
    console.print(
        f"{report.rows:,} rows of {settings.secondaries} secondaries between processes, "
        f"{report.round_seconds or 0:.1f} s of rounds, {report.seconds:.1f} s in all; a right "
        f"mechanism fails a test with probability at most {FALSE_FAILURE:g}.\n"
        f"verdict: [bold]{report.verdict}[/bold]",
        highlight=False,
        soft_wrap=True,
    )
