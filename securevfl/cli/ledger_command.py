"""``securevfl ledger``: show, limit and verify what runs on a table have spent.

Imports neither torch nor CrypTen but to verify, and the accountants only to answer.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer
from rich.console import Console
from rich.table import Table

from securevfl.core.command_line import AsJson
from securevfl.core.errors import PrivacyError
from securevfl.core.formatting import epsilon_in_words
from securevfl.core.memory import loading

if TYPE_CHECKING:
    from securevfl.ledger.ledger import Book, LabelsSpent, LedgerSummary, UnitSpent
    from securevfl.report.verify import Finding

app = typer.Typer(
    no_args_is_help=True,
    help="Show, limit and verify what all runs on a table have spent.",
)

_RUN_DIGITS: Final = 8
_DATE: Final = len("2026-01-31")
_WIDTH: Final = 80
_WORDS: Final = {True: "good", False: "BAD", None: "-"}

TableFile = Annotated[
    Path, typer.Argument(metavar="TABLE", help="A party's table; its ledger lies next to it.")
]
OfPretraining = Annotated[
    bool,
    typer.Option(
        "--pretraining", help="The ledger of what pretraining sends of the primary's own rows."
    ),
]


@app.command()
def show(table: TableFile, pretraining: OfPretraining = False, as_json: AsJson = False) -> None:
    """Show a table's runs, what each spent, the total for each unit, and the owner's limit."""
    from securevfl.ledger.ledger import ledger_of_table, summary_of

    path = ledger_of_table(table, book=_book(pretraining))
    summary = summary_of(path) if path.exists() else None
    if as_json:
        nothing: dict[str, Any] = {
            "ledger": None,
            "runs": [],
            "units": [],
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
        float, typer.Option(help="What all runs on the table may spend together, > 0.")
    ],
    unit: Annotated[
        Literal["secondary-record", "linked-row", "entity"],
        typer.Option(help="What is hidden; runs with a unit that has no limit are then refused."),
    ] = "secondary-record",
    delta: Annotated[float, typer.Option(help="At which epsilon is taken, in (0, 1).")] = 1e-5,
    pretraining: OfPretraining = False,
    as_json: AsJson = False,
) -> None:
    """Limit what all runs on a table may spend together.

    The limit is a line of the table's ledger. The newest one for a unit holds, so that the owner
    can raise or lower it by the same command; earlier ones stay to be read.
    """
    from securevfl.ledger.book import Limit
    from securevfl.ledger.ledger import ledger_of_table, set_limit

    wanted = Limit(unit=unit, epsilon=epsilon, delta=delta)
    spent = set_limit(ledger_of_table(table, book=_book(pretraining)), wanted)
    if as_json:
        print(json.dumps({"table": str(table), **asdict(spent)}))
        return
    runs = f"{spent.runs} {'run has' if spent.runs == 1 else 'runs have'}"
    print(
        f"{table}: all runs together may spend epsilon = {epsilon:g} at delta = {delta:g} (unit "
        f"{unit}); {runs} spent {epsilon_in_words(spent.epsilon)}"
    )


@app.command()
def forget(
    table: TableFile,
    party: Annotated[str, typer.Option("--party", help="Whose ledger is to be forgotten.")],
    as_json: AsJson = False,
) -> None:
    """Accept another party's next ledger without its history, for a new table.

    Ask that party first: no later check covers what it spent before. The line
    that says so stays in the ledger of one's own TABLE.
    """
    from securevfl.ledger.countersigning import forget_party
    from securevfl.ledger.ledger import ledger_of_table

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
        from securevfl.report.verify import verify_run

    findings = verify_run(run)
    bad = [one for one in findings if one.good is False]
    if as_json:
        checks = [asdict(one) for one in findings]
        print(json.dumps({"run": str(run), "good": not bad, "checks": checks}))
    else:
        _print_findings(findings)
    if bad:
        raise typer.Exit(PrivacyError.exit_code)


def _print_findings(findings: "list[Finding]") -> None:
    width = max(len(one.party) for one in findings)
    for one in findings:
        print(f"{one.check:<12} {one.party:<{width}}  {_WORDS[one.good]:<4}  {one.text}")
    bad = sorted({one.party for one in findings if one.good is False})
    if bad:
        print(f"verdict: BAD ({', '.join(bad)}): what was spent cannot be relied on")
    else:
        print("verdict: good; for what this cannot show: securevfl ledger verify --help")


def _book(pretraining: bool) -> "Book":
    return "pretraining-ledger" if pretraining else "ledger"


def _print_summary(table: Path, summary: "LedgerSummary") -> None:
    console = Console()
    runs = Table(box=None, pad_edge=False, collapse_padding=True)
    for name in ("began", "run", "federation", "as", "encoder", "unit"):
        runs.add_column(name, no_wrap=name not in ("run", "federation", "as"), overflow="fold")
    for name in ("rows", "epsilon", "delta"):
        runs.add_column(name, justify="right", no_wrap=True)
    for one in summary.runs:
        runs.add_row(
            one.began[:_DATE],
            one.run[:_RUN_DIGITS] + (f" in {one.sessions} sessions" if one.sessions > 1 else ""),
            one.federation,
            one.party,
            one.encoder,
            one.unit,
            f"{one.row_releases:,}",
            epsilon_in_words(one.epsilon),
            f"{one.delta:g}",
        )
    if summary.runs:
        # As wide on narrow terminals too: these lines are kept and compared.
        Console(width=_WIDTH).print(runs)
    else:
        console.print(f"{table}: no run has released anything of it", soft_wrap=True)
    for unit in summary.units:
        console.print(_total(unit), markup=False, highlight=False, soft_wrap=True)
    if len(summary.units) > 1:
        console.print("Totals of different units stand side by side; they do not add up.")
    if summary.labels is not None:
        text = _labels(summary.labels)
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    for label, text in (("ledger", summary.ledger), ("head", summary.head)):
        console.print(f"{label}: {text}", markup=False, highlight=False, soft_wrap=True)


def _total(unit: "UnitSpent") -> str:
    limit = "no limit"
    if unit.limit is not None:
        left = None if unit.epsilon is None else max(0.0, unit.limit - unit.epsilon)
        limit = f"limit {unit.limit:g}" + ("" if left is None else f", left {left:.4g}")
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
