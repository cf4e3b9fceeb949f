"""``securevfl ledger forget``: the way out when another party's ledger is new on purpose."""

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="What a table's ledger remembers.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """What a table's ledger remembers."""


@app.command()
def forget(
    ledger: Annotated[
        Path, typer.Argument(metavar="LEDGER", help="The ledger of one's own that remembers.")
    ],
    party: Annotated[str, typer.Option("--party", help="Whose ledger is to be forgotten.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")
    ] = False,
) -> None:
    """Take another party's next ledger as it comes, as when it has a new table.

    Ask that party first: what it spent before is then in no ledger that anybody checks. The line
    that says so stays in one's own ledger.
    """
    from securevfl.federation.countersign import forget_party

    federations = forget_party(ledger, party=party)
    if as_json:
        print(json.dumps({"party": party, "federations": federations}))
        return
    print(
        f"{party!r} is forgotten in {', '.join(map(repr, federations))}; its next ledger is taken"
    )
