"""``securevfl ledger``: show, limit and verify what runs on a table have spent.

Imports neither torch nor CrypTen but to verify, and the accountants only to answer.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer
from rich.console import Console

from securevfl.core.command_line import AsJson
from securevfl.core.errors import ConfigError, PrivacyError
from securevfl.core.formatting import epsilon_in_words
from securevfl.core.memory import loading
from securevfl.desk.printing import wrap_text

if TYPE_CHECKING:
    from securevfl.desk.report.verify import Finding
    from securevfl.ledger.book import LabelsSpent
    from securevfl.ledger.ledger_file import LedgerSummary, UnitSpent

app = typer.Typer(
    no_args_is_help=True, help="Show, limit and verify what all runs on a table have spent."
)

_RUN_DIGITS: Final = 8
_DATE: Final = len("2026-01-31")
_WORDS: Final = {True: "good", False: "BAD", None: "-"}

TableFile = Annotated[
    Path, typer.Argument(metavar="TABLE", help="A party's table; its ledger lies next to it.")
]


@app.command()
def show(table: TableFile, as_json: AsJson = False) -> None:
    """Show a table's runs, what each spent, the total for each unit, and the owner's limit."""
    from securevfl.ledger.ledger_file import LedgerFile, ledger_of_table, summary_of

    path = ledger_of_table(table)
    if not path.exists():
        LedgerFile(path).close()  # refuses where a run has noted that there was one
    summary = summary_of(path) if path.exists() else None
    if as_json:
        nothing: dict[str, Any] = {
            "ledger": None,
            "runs": [],
            "units": [],
            "programs": [],
            "programs_allowed": True,
            "labels": None,
            "head": None,
        }
        print(json.dumps({"table": str(table), **(asdict(summary) if summary else nothing)}))
    elif summary is None:
        print(f"{table}: has no ledger; no run has released anything of it, and no limit is set")
    else:
        _print_summary(table, summary)


@app.command()
def limit(
    table: TableFile,
    epsilon: Annotated[
        float | None, typer.Option(help="What all runs on the table may spend together, > 0.")
    ] = None,
    unit: Annotated[
        Literal["secondary-record", "linked-row", "entity"],
        typer.Option(help="What is hidden; runs with a unit that has no limit are then refused."),
    ] = "secondary-record",
    delta: Annotated[float, typer.Option(help="At which epsilon is taken, in (0, 1).")] = 1e-5,
    programs: Annotated[
        Literal["allow", "refuse"] | None,
        typer.Option(
            help="Whether programs (securevfl mpc) may read the table, which no epsilon bounds; "
            "until it is said, a limit refuses them."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Limit what all runs on a table may spend together, and whether programs may read it.

    The limit is a line of the table's ledger. The newest one for a unit holds, so that the owner
    can raise or lower it by the same command; earlier ones stay to be read.
    """
    from securevfl.ledger.book import Limit
    from securevfl.ledger.ledger_file import allow_programs, ledger_of_table, set_limit

    if epsilon is None and programs is None:
        raise ConfigError("ledger limit: give --epsilon, --programs, or both")
    wanted = None if epsilon is None else Limit(unit=unit, epsilon=epsilon, delta=delta)
    path = ledger_of_table(table)
    if programs is not None:
        allow_programs(path, allowed=programs == "allow")
    spent = None if wanted is None else set_limit(path, wanted)
    if as_json:
        spent_figures = {} if spent is None else asdict(spent)
        print(json.dumps({"table": str(table), "programs": programs, **spent_figures}))
        return
    if programs is not None:
        print(f"{table}: programs may {'' if programs == 'allow' else 'not '}read it")
    if spent is not None:
        _print_limit(table, spent)


def _print_limit(table: Path, spent: "UnitSpent") -> None:
    runs = f"{spent.runs} {'run has' if spent.runs == 1 else 'runs have'}"
    print(
        f"{table}: all runs together may spend epsilon = {spent.limit:g} at delta = "
        f"{spent.delta:g} (unit {spent.unit}); {runs} spent {epsilon_in_words(spent.epsilon)}"
    )


@app.command("restored")
def mark_restored(table: TableFile, as_json: AsJson = False) -> None:
    """Book what a ledger may lack that was restored from a copy.

    All that may have been released since the copy was made counts in full: of each run that it
    knows, the training (unless all parties have signed its end) and the predictions of its model.
    Runs that began later are in no line: restore the newest copy there is, as parties/NAME of the
    last run folder has one. The command books again each time it is given.

    Afterwards, parties that remember the lost lines stop the next run. Each of them decides for
    itself to go on: securevfl ledger forget.
    """
    from securevfl.ledger.ledger_file import book_restored, ledger_of_table

    booked = book_restored(ledger_of_table(table))
    if as_json:
        print(json.dumps({"table": str(table), "booked": [asdict(run) for run in booked]}))
        return
    if not booked:
        print(f"{table}: its ledger lacks nothing that is known of; nothing was booked")
    for run in booked:
        print(
            f"{table}: booked epsilon = {epsilon_in_words(run.epsilon)} at delta = {run.delta:g} "
            f"(unit {run.unit}) for what {run.federation} may have released of it"
        )


@app.command()
def forget(
    table: TableFile,
    party: Annotated[str, typer.Option("--party", help="Whose ledger is to be forgotten.")],
    as_json: AsJson = False,
) -> None:
    """Accept another party's next ledger without its history: a new table, or a restored ledger.

    Ask that party first, and whether it has booked what was lost (securevfl ledger restored): no
    later check covers what it spent before. The line that says so stays in the ledger of one's own
    TABLE.
    """
    from securevfl.ledger.countersigning import forget_party
    from securevfl.ledger.ledger_file import ledger_of_table

    federations = forget_party(ledger_of_table(table), party=party)
    if as_json:
        print(json.dumps({"party": party, "federations": federations}))
        return
    names = ", ".join(map(repr, federations))
    print(f"{party!r} is forgotten in {names}; its next ledger is taken")


@app.command()
def verify(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    as_json: AsJson = False,
) -> None:
    """Check a run's ledgers, what parties signed of them, and the figures that they give.

    Chains of lines, signatures, what others countersigned of each ledger that is at hand,
    checkpoints, and the figures in metrics.json, computed again. Exit code 0: all good; 4: not;
    2: nothing to check.

    What this cannot show: that a party added the noise that it booked, or booked every release
    that it made; and nothing against all parties together, who can write and sign all of it anew.
    """
    with loading():
        from securevfl.desk.report.verify import verify_run

    findings = verify_run(run)
    bad = [finding for finding in findings if finding.good is False]
    if as_json:
        checks = [asdict(finding) for finding in findings]
        print(json.dumps({"run": str(run), "good": not bad, "checks": checks}))
    else:
        _print_findings(findings)
    if bad:
        raise typer.Exit(PrivacyError.exit_code)


def _print_findings(findings: "list[Finding]") -> None:
    width = max(len(finding.party) for finding in findings)
    for row in findings:
        print(f"{row.check:<12} {row.party:<{width}}  {_WORDS[row.good]:<4}  {row.text}")
    bad = sorted({finding.party for finding in findings if finding.good is False})
    if bad:
        print(f"verdict: BAD ({', '.join(bad)}): what was spent cannot be relied on")
    else:
        print("verdict: good; for what this cannot show: securevfl ledger verify --help")


def _print_summary(table: Path, summary: "LedgerSummary") -> None:
    console = Console()
    for run in summary.runs:
        sessions = f" in {run.sessions} sessions" if run.sessions > 1 else ""
        # As wide on every terminal: these lines are kept and compared.
        print(
            wrap_text(
                f"{run.began[:_DATE]} run {run.run[:_RUN_DIGITS]}{sessions}: {run.federation} as "
                f"{run.party}, encoder {run.encoder}, unit {run.unit}: {run.row_releases:,} rows, "
                f"epsilon {epsilon_in_words(run.epsilon)}, delta {run.delta:g}"
            )
        )
    if not summary.runs:
        console.print(f"{table}: no run has released anything of it", soft_wrap=True)
    for text in _lines(summary):
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def _lines(summary: "LedgerSummary") -> Iterator[str]:
    """Yield the lines after the table of runs."""
    restored = ", ".join(run.run[:_RUN_DIGITS] for run in summary.runs if run.lost)
    if restored:
        yield f"booked in full when the ledger was restored: {restored}"
    yield from map(_total, summary.units)
    if len(summary.units) > 1:
        yield "Totals of different units stand side by side; they do not add up."
    for use in summary.programs:
        about = f"{use.time[:_DATE]}, with {', '.join(use.peers)}"
        yield f"program {use.program[:_RUN_DIGITS]} ({about}): without bound"
    if not summary.programs_allowed:
        yield "programs may not read the table"
    if summary.labels is not None:
        yield _labels(summary.labels)
    yield f"ledger: {summary.ledger}"
    yield f"head: {summary.head}"


def _total(unit: "UnitSpent") -> str:
    limit = "no limit"
    if unit.limit is not None:
        limit = f"limit {unit.limit:g}, left {unit.left:.4g}"
    runs = f"{unit.runs} run{'' if unit.runs == 1 else 's'}"
    return (
        f"total of {runs} ({unit.unit}): epsilon {epsilon_in_words(unit.epsilon)}, "
        f"delta {unit.delta:g}; {limit}"
    )


def _labels(labels: "LabelsSpent") -> str:
    runs = f"{labels.runs} run{'' if labels.runs == 1 else 's'}"
    if labels.epsilon is None:
        return f"labels towards secondaries, {runs}: without bound, as a run has shown them"
    at = f" at delta = {labels.delta:g}" if labels.delta else ""
    return (
        f"labels towards secondaries, {runs}: epsilon = {epsilon_in_words(labels.epsilon)} "
        f"against one alone, {epsilon_in_words(labels.together)} against all together{at}"
    )
