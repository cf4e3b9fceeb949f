"""Where a table's ledger lies, so that every later run on that table finds it again."""

import hashlib
import tempfile
from pathlib import Path
from typing import Final, Literal

import platformdirs

from securevfl.core.errors import ConfigError
from securevfl.data.sources.source_files import file_behind

Book = Literal["ledger", "pretraining-ledger"]
"""``ledger`` books what a run's averages tell of secondaries' records; ``pretraining-ledger`` what
the primary's own vectors tell of its rows."""

_HASH_DIGITS: Final = 16


def ledger_of_table(table: Path, *, book: Book = "ledger") -> Path:
    """Return the path of a table's ledger, be it there yet or not.

    It lies beside the table, ``bank.csv.ledger.jsonl``. Where the table's folder cannot be written
    it lies in the user's state folder, under a name made of the table's own path. Links are
    followed first, and source files too: one table has one ledger, by whatever name it is called.
    That of a database lies beside the source file that has its address.

    Args:
        table: The party's table; relative to the working directory, if it is relative.
        book: Which of the two.

    Raises:
        ConfigError: If there is one in both places, or no such table.
    """
    try:
        table = file_behind(table).resolve(strict=True)
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "its links run in a circle"
        raise ConfigError(f"table {table}: has no ledger ({reason})") from None
    beside = table.with_name(f"{table.name}.{book}.jsonl")
    name = hashlib.sha256(str(table).encode()).hexdigest()[:_HASH_DIGITS]
    states = platformdirs.user_state_path("securevfl") / "ledgers"
    away = states / f"{table.stem}-{name}.{book}.jsonl"
    if beside.exists() and away.exists():
        raise ConfigError(
            f"table {table}: has two ledgers, {beside} and {away}, and what was spent is in both; "
            f"move one away, and set a limit that leaves room for what it holds"
        )
    if away.exists():
        return away
    return beside if beside.exists() or _takes_files(table.parent) else away


def _takes_files(folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
