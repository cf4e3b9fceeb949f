"""A table's ledger as its owner reads it: runs, totals, limits; and how the owner sets one."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from securevfl.core.errors import ConfigError
from securevfl.core.strict_json import strict_json
from securevfl.federation.chain import MOST_LEVELS
from securevfl.federation.chained_file import now
from securevfl.federation.ledger_book import LedgerBook, Limit, Session, epsilon_of_sessions
from securevfl.federation.ledger_file import LedgerFile
from securevfl.federation.told_labels import LabelsSpent, labels_spent


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpent:
    """What one run spent."""

    run: str
    federation: str
    party: str
    """What the federation calls the table's party."""
    began: str
    """In UTC."""
    sessions: int
    unit: str
    encoder: str
    epsilon: float | None
    """All its sessions together; None: no bound."""
    delta: float
    releases: int
    row_releases: int


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitSpent:
    """What all runs spent for one unit; totals of different units do not add up."""

    unit: str
    epsilon: float | None
    """None: no bound."""
    delta: float
    """The limit's; without one, the smallest of the runs'."""
    runs: int
    limit: float | None
    """None: the owner has set none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerSummary:
    """What a ledger says."""

    ledger: str
    runs: tuple[RunSpent, ...]
    """In the order in which they began."""
    units: tuple[UnitSpent, ...]
    labels: LabelsSpent | None
    """Of the table's own labels, which only a primary has; None where nobody was told of them."""
    head: str
    """Hash of the last line."""


def summary_of(path: Path) -> LedgerSummary:
    """Read a ledger while no run holds it; nothing is written.

    Raises:
        ConfigError: If it cannot be opened, is in use, or is of another version.
        PrivacyError: If it was altered.
    """
    file = LedgerFile(path, read_only=True)
    try:
        book = file.book
        runs = [_run_spent(sessions) for sessions in book.runs().values()]
        units = [_unit_spent(book, unit) for unit in book.units]
        return LedgerSummary(
            ledger=str(path),
            runs=tuple(runs),
            units=tuple(units),
            labels=labels_spent(book.sessions),
            head=file.head,
        )
    finally:
        file.close()


def set_limit(path: Path, limit: Limit) -> UnitSpent:
    """Append a limit to a table's ledger, making one if there is none; the newest one holds.

    Returns:
        What is spent of it.

    Raises:
        ConfigError: If the ledger cannot be opened or written, is in use, or is of another version.
        PrivacyError: If it was altered.
    """
    file = LedgerFile(path)
    try:
        book = file.book
        limit = replace(limit, time=now())
        file.append(limit.line())
        book.limits[limit.unit] = limit
        return _unit_spent(book, limit.unit)
    finally:
        file.close()


def _run_spent(sessions: list[Session]) -> RunSpent:
    first, privacy = sessions[0], sessions[-1].plan.privacy
    epsilon = epsilon_of_sessions(sessions, delta=privacy.delta)
    return RunSpent(
        run=first.run,
        federation=first.federation,
        party=first.party,
        began=first.time,
        sessions=len(sessions),
        unit=privacy.unit,
        encoder=privacy.encoder,
        epsilon=epsilon if math.isfinite(epsilon) else None,
        delta=privacy.delta,
        releases=sum(one.rounds for one in sessions),
        row_releases=sum(one.row_releases for one in sessions),
    )


def _unit_spent(book: LedgerBook, unit: str) -> UnitSpent:
    runs, limit = book.runs(unit=unit), book.limits.get(unit)
    deltas = [one.plan.privacy.delta for sessions in runs.values() for one in sessions]
    delta = limit.delta if limit else min(deltas)
    epsilon = book.total(unit, delta=delta)
    return UnitSpent(
        unit=unit,
        epsilon=epsilon if math.isfinite(epsilon) else None,
        delta=delta,
        runs=len(runs),
        limit=limit.epsilon if limit else None,
    )


def lines_of_run(path: Path, run: str) -> list[dict[str, Any]]:
    """Return what a ledger holds of one run, one mapping a line, as its sessions wrote them.

    Raises:
        ConfigError: If there is no ledger.
    """
    try:
        text = path.read_text(encoding="utf-8")
        lines = [strict_json(line, depth=MOST_LEVELS) for line in text.splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"ledger {path}: cannot be read ({error})") from None
    found, current = [], ""
    for line in lines:
        if line["kind"] == "open":
            current = line["run"]
        if line["kind"] != "limit" and current == run:
            found.append(line)
    return found
