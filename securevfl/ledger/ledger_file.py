"""A table's chained files (:mod:`securevfl.ledger.chain`): its ledger, and counts of its records.

There is one ledger file a table, for all runs on it. :mod:`securevfl.ledger.ledger` charges
releases in it, and :mod:`securevfl.ledger.book` reads its lines.

Counts say in how many predicted rows of a model each record of a secondary was released. ``table``
lines identify the counted records by a hash of their keys. ``released`` lines name the records of
one release, once for each row, and are on the disk before the release is booked. Each refers to the
ledger's head before the release, and the ledger's line of the release to this file's head after it.
``answers`` lines hold the symbols that keys of the primary were answered with, before they are
sent: a hash stands for each key.
So a missing, cut or outdated file is noticed, and so is an outdated ledger. The line of a release
that was not booked stays: after a crash a count may be too high, never too low. Counts never leave
the party; the length of a line depends on the table's records.
"""

import contextlib
import hashlib
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from jaxtyping import Bool, Int64

from securevfl.core import files
from securevfl.core.checks import strict_json
from securevfl.core.errors import ConfigError, PrivacyError, StorageError
from securevfl.core.formatting import finite_or_none
from securevfl.data.sources.settings import file_behind
from securevfl.data.tables import KeyTable
from securevfl.ledger.book import (
    RESTORED,
    VERSION,
    LabelsSpent,
    LedgerBook,
    Limit,
    ProgramUse,
    Session,
    epsilon_of_sessions,
    labels_spent,
    run_after,
)
from securevfl.ledger.chain import MOST_LEVELS, ChainedFile, now
from securevfl.linkage.links import NO_RECORD, place_in_run


class LedgerFile(ChainedFile):
    """A table's open ledger file, locked against other processes, with the content of its lines."""

    def __init__(self, path: Path | None, *, restores: bool = False, **how: bool) -> None:
        """Open the file and read all lines; see :class:`ChainedFile`.

        Args:
            path: As in :class:`ChainedFile`.
            restores: Whether lines that it lacks are about to be booked.
            **how: ``durable`` and ``read_only``, as in :class:`ChainedFile`.

        Raises:
            ConfigError: If it cannot be opened, is of another version, or another process has
                locked it.
            PrivacyError: If it was changed, or lacks lines that a run has written.
        """
        self.book = LedgerBook()
        """Content of the lines, including those added since the file was opened."""
        super().__init__(path, take=self.book.take, **how)
        if not (restores or self.noted_head is None or self.chain.contains(self.noted_head)):
            self.close()
            raise PrivacyError(
                f"ledger {path}: lacks lines that a run has written ({path}.head names the last); "
                f"what was spent cannot be known. Restore it from the newest copy; if that lacks "
                f"them too, book them: securevfl ledger restored TABLE"
            )

    @property
    def noted_head(self) -> str | None:
        """The head that the file must contain, from its note; empty if it cannot be read.

        None without a note, which only a run that has found the file damaged writes.
        """
        note = None if self.path is None else note_path(self.path)
        if note is None or not os.path.lexists(note):
            return None
        try:
            return note.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def note_head(self, head: str) -> None:
        """Write a head into the note, so that the ledger must contain it when it is next opened."""
        if self.path is None:
            return
        # The damage is reported even if the note cannot be written.
        with contextlib.suppress(StorageError, OSError):
            files.write_text(note_path(self.path), head)
            files.sync_folder(self.path.parent)

    def _find_alteration(self, handle: int, place: Path) -> str | None:
        altered = super()._find_alteration(handle, place)
        if altered is not None:
            # While the file is still locked, before the next run opens it.
            self.note_head(self.head)
        return altered


def note_path(path: Path) -> Path:
    """Return the path of the note about a damaged ledger, next to the ledger at ``path``."""
    return path.with_name(f"{path.name}.head")


_HASH_DIGITS: Final = 16


def ledger_of_table(table: Path) -> Path:
    """Return the path of a table's ledger, which may not exist yet.

    It is next to the table, ``bank.csv.ledger.jsonl``, or, if the table's folder cannot be written,
    in the user's state folder, with a name made from the table's path. Links and source files are
    followed first, so that a table has one ledger under all its names. A database's ledger is next
    to the source file with its address.

    Args:
        table: The party's table; a relative path starts at the working directory.

    Raises:
        ConfigError: If there are ledgers in both places, or no such table.
    """
    try:
        table = file_behind(table).resolve(strict=True)
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "its links run in a circle"
        raise ConfigError(f"table {table}: has no ledger ({reason})") from None
    beside = table.with_name(f"{table.name}.ledger.jsonl")
    name = hashlib.sha256(str(table).encode()).hexdigest()[:_HASH_DIGITS]
    away = _state_folder() / "ledgers" / f"{table.stem}-{name}.ledger.jsonl"
    if beside.exists() and away.exists():
        raise ConfigError(
            f"table {table}: has two ledgers, {beside} and {away}, and what was spent is in both; "
            f"move one away, and set a limit that leaves room for what it holds"
        )
    if away.exists():
        return away
    return beside if beside.exists() or _takes_files(table.parent) else away


def _state_folder() -> Path:
    """Return this system's folder for the state of a user's programs."""
    chosen = os.environ.get("XDG_STATE_HOME", "").strip()
    if sys.platform == "win32":
        return Path(os.environ["LOCALAPPDATA"], "securevfl", "securevfl")
    if chosen:
        return Path(chosen, "securevfl")
    usual = "Library/Application Support" if sys.platform == "darwin" else ".local/state"
    return Path.home() / usual / "securevfl"


def _takes_files(folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpent:
    """The spending of one run."""

    run: str
    federation: str
    party: str
    """Name of the table's party in the federation."""
    began: str
    """Start of the run, in UTC."""
    sessions: int
    unit: str
    encoder: str
    epsilon: float | None
    """Epsilon of all its sessions together; None: no bound."""
    delta: float
    releases: int
    row_releases: int
    lost: bool
    """True if releases of the run may have no line, since the ledger was restored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitSpent:
    """The spending of all runs for one unit; units cannot be added up."""

    unit: str
    epsilon: float | None
    """Total epsilon; None: no bound, for example after a program has read the table."""
    delta: float
    """Delta of the limit; without a limit, the smallest delta of the runs."""
    runs: int
    limit: float | None
    """The owner's limit; None without one."""
    left: float | None
    """Epsilon left of the limit; programs that the owner allows take nothing of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerSummary:
    """Summary of a ledger."""

    ledger: str
    runs: tuple[RunSpent, ...]
    """Spending of each run, in the order of their start."""
    units: tuple[UnitSpent, ...]
    programs: tuple[ProgramUse, ...]
    """Programs that have read the table, in the order in which they ran."""
    programs_allowed: bool
    """True if the next program may read the table."""
    labels: LabelsSpent | None
    """Releases of the table's own labels, which only a primary has; None where there was none."""
    head: str
    """Hash of the last line."""


def summary_of(path: Path) -> LedgerSummary:
    """Read a ledger that no run is using, and return its summary; nothing is written.

    Raises:
        ConfigError: If it cannot be opened, is in use, or is of another version.
        PrivacyError: If it was changed.
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
            programs=tuple(book.programs),
            programs_allowed=book.allows_programs,
            labels=labels_spent(book.sessions),
            head=file.head,
        )
    finally:
        file.close()


def set_limit(path: Path, limit: Limit) -> UnitSpent:
    """Append a limit to a table's ledger, creating the file if needed; the newest limit counts.

    Returns:
        The spending for its unit.

    Raises:
        ConfigError: If the ledger cannot be opened or written, is in use, or is of another version.
        PrivacyError: If it was changed.
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


def allow_programs(path: Path, *, allowed: bool) -> None:
    """Append whether programs may read a table, creating the file if needed; the newest counts.

    Raises:
        ConfigError: As :func:`set_limit`.
        PrivacyError: As :func:`set_limit`.
    """
    with contextlib.closing(LedgerFile(path)) as file:
        file.append({"kind": "programs", "version": VERSION, "allowed": allowed, "time": now()})


def book_restored(path: Path) -> list[RunSpent]:
    """Book the releases that a ledger restored from a copy may lack: every open promise.

    Each of :meth:`LedgerBook.open_promises` counts once more, in full. Calling it twice books
    twice, since something may have been released in between. Only a ledger that ends with the head
    in its note lacks nothing, and gets no line.

    Returns:
        The booked spending of each promise.

    Raises:
        ConfigError: If there is no ledger, or it cannot be opened or written, or is in use.
        PrivacyError: If it was changed.
    """
    if not path.exists():
        raise ConfigError(f"ledger {path}: is not there; put the newest copy of it there first")
    with contextlib.closing(LedgerFile(path, restores=True)) as file:
        book, promises = file.book, file.book.open_promises()
        before = len(book.sessions)
        if promises and file.noted_head != file.head:
            line = {"kind": RESTORED, "version": VERSION, "time": now(), "promises": promises}
            file.append(line)
            book.take(line, f"ledger {path}")
        try:
            note_path(path).unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(
                f"ledger {path}: is booked; remove {note_path(path)} by hand ({error.strerror})"
            ) from None
        return [_run_spent([session]) for session in book.sessions[before:]]


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
        epsilon=finite_or_none(epsilon),
        delta=privacy.delta,
        releases=sum(session.rounds for session in sessions),
        row_releases=sum(session.row_releases for session in sessions),
        lost=any(session.lost for session in sessions),
    )


def _unit_spent(book: LedgerBook, unit: str) -> UnitSpent:
    runs, limit = book.runs(unit=unit), book.limits.get(unit)
    deltas = [session.plan.privacy.delta for sessions in runs.values() for session in sessions]
    delta = limit.delta if limit else min(deltas)
    epsilon = book.total(unit, delta=delta)
    return UnitSpent(
        unit=unit,
        epsilon=finite_or_none(epsilon),
        delta=delta,
        runs=len(runs),
        limit=limit.epsilon if limit else None,
        left=book.epsilon_left(unit),
    )


def lines_of_run(path: Path, run: str) -> list[dict[str, Any]]:
    """Return a ledger's lines of one run, one mapping for each line.

    Raises:
        ConfigError: If there is no ledger.
    """
    try:
        text = path.read_text(encoding="utf-8")
        lines = [strict_json(line, depth=MOST_LEVELS) for line in text.splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"ledger {path}: cannot be read ({error})") from None
    run_lines, current = [], ""
    for line in lines:
        current = run_after(line, current)
        if current == run:
            run_lines.append(line)
    return run_lines


FILE: Final = "records-ledger.jsonl"

_KEY_BYTES: Final = 16
"""Bytes of a hash that stands for a key of the primary."""


class RecordCounts(ChainedFile):
    """The open file of record counts, locked against other processes."""

    def __init__(
        self,
        folder: Path | None,
        ledger: ChainedFile,
        keys: KeyTable,
        *,
        last: str | None,
        lost: bool = False,
    ) -> None:
        """Open the file and check that it belongs to this table and to the ledger's present state.

        The table may have new records after the counted ones; their counts are zero.

        Args:
            folder: The secondary's folder in the run folder; None keeps the counts in memory only.
            ledger: The secondary's ledger, open for a request; lines here are as durable as its
                lines.
            keys: The secondary's keys.
            last: The head of this file in the ledger; None if the ledger has none.
            lost: Whether the ledger was restored from a copy and has booked another promise since
                the last release, so that outdated or missing counts are accepted.

        Raises:
            ConfigError: If the file cannot be opened, or is in use.
            PrivacyError: If it was changed, or is not the file in which releases were counted.
        """
        path = None if folder is None else folder / FILE
        self._ledger, self._keys = ledger, keys
        self._counts = np.zeros(keys.num_rows, dtype=np.int64)
        self._known = 0
        """Records that the file speaks of."""
        self._salt = b""
        """Key of the hashes of the primary's keys: the digest of the first counted table."""
        self._answers: dict[str, tuple[int, int]] = {}
        """Last symbol, and number of answers, by the hash of a key."""
        self._booked = ledger.head
        """The ledger's head before the last release that was counted."""
        super().__init__(path, durable=ledger.durable, take=self._count)
        try:
            known = last is None or self.chain.contains(last)
            if not (lost or (known and ledger.chain.contains(self._booked))):
                raise PrivacyError(
                    f"{path}: this file and the ledger {ledger.path} are not of the same time, or "
                    f"one is missing: how often records were released cannot be known, and none is "
                    f"released. If the newer one cannot be had back, book what is lost (securevfl "
                    f"ledger restored TABLE), or train another model"
                )
            if self._known < keys.num_rows:
                self._known = keys.num_rows
                digest = self._digest(self._known)
                self._salt = self._salt or bytes.fromhex(digest)
                self.append({"kind": "table", "records": self._known, "digest": digest})
        except BaseException:
            self.close()
            raise

    def admit(
        self, records: Int64[np.ndarray, "rows slots"], *, most: int
    ) -> Bool[np.ndarray, "rows slots"]:
        """Count the records of a release, and return a mask of the slots that take part.

        A record takes part in its first rows, in the order of the release, until it was released in
        ``most`` rows. This depends only on the record's linked rows and its count, not on other
        records. Distances are not used, since some protections replace them by a rank among
        records.

        Args:
            records: Record numbers by row; :data:`NO_RECORD` for an empty slot.
            most: N, the number of rows that a record may be released in.

        Raises:
            PrivacyError: If another process changed the file.
            StorageError: If the file cannot be written; nothing is counted then.
        """
        flat = records.ravel()
        taken = np.flatnonzero(flat != NO_RECORD)
        taken = taken[np.argsort(flat[taken], kind="stable")]
        place = place_in_run(np.unique(flat[taken], return_counts=True)[1])
        taken = taken[self._counts[flat[taken]] + place < most]
        released = flat[taken]
        # Written even without a record, so that the number of lines depends on no record.
        content = {"ledger": self._ledger.head, "records": released.tolist()}
        self.append({"kind": "released", **content})
        np.add.at(self._counts, released, 1)
        admitted = np.zeros(flat.shape, dtype=np.bool_)
        admitted[taken] = True
        return admitted.reshape(records.shape)

    def answers_to(self, key: str) -> int:
        """Return how often a key of the primary was answered."""
        return self._answers.get(self._hash(key), (0, 0))[1]

    def last_answer_to(self, key: str) -> int:
        """Return the last symbol of a key that was answered."""
        return self._answers[self._hash(key)][0]

    def keep_answers(self, symbols: Mapping[str, int]) -> None:
        """Keep a symbol for each of some keys, which are on the disk when this returns.

        Raises:
            PrivacyError: If another process changed the file.
            StorageError: If the file cannot be written; nothing may be sent then.
        """
        hashed = {self._hash(key): symbol for key, symbol in symbols.items()}
        self.append({"kind": "answers", "symbols": hashed})
        self._take_answers(hashed)

    def _take_answers(self, hashed: Mapping[str, int]) -> None:
        for name, symbol in hashed.items():
            if type(symbol) is not int or symbol < 0:
                raise ValueError("no symbol")
            self._answers[name] = symbol, self._answers.get(name, (0, 0))[1] + 1

    def _hash(self, key: str) -> str:
        text = key.encode(errors="surrogatepass")
        return hashlib.blake2b(text, key=self._salt, digest_size=_KEY_BYTES).hexdigest()

    def _count(self, entry: dict[str, Any], where: str) -> None:
        """Add a line of the file.

        Raises:
            PrivacyError: If the line is invalid, or the table no longer has its records.
        """
        try:
            if entry["kind"] == "answers":
                self._take_answers(entry["symbols"])
                return
            records = entry["records"]
            if entry["kind"] == "released":
                np.add.at(self._counts[: self._known], np.array(records, dtype=np.int64), 1)
                self._booked = str(entry["ledger"])
            elif records > self._keys.num_rows or entry["digest"] != self._digest(records):
                raise PrivacyError(
                    f"{where}: counts {records} records whose keys the table no longer has in that "
                    f"order; keep every record at its place, and add new ones at the end. Restore "
                    f"the table, or train another model"
                )
            else:
                self._known = records
                self._salt = self._salt or bytes.fromhex(entry["digest"])
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError):
            raise PrivacyError(f"{where}: is no line that counts records") from None

    def _digest(self, records: int) -> str:
        """Return the hash of the keys of the first ``records`` records."""
        kept = {name: values[:records].tolist() for name, values in self._keys.columns.items()}
        return hashlib.sha256(repr(kept).encode()).hexdigest()
