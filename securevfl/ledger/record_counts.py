"""Counts of a secondary's records: in how many predicted rows of a model each was released.

They are in a chained file of the secondary (:mod:`securevfl.ledger.chain`). ``table`` lines
identify the counted records by a hash of their keys. ``released`` lines name the records of one
release, once for each row, and are on the disk before the release is booked. Each refers to the
ledger's head before the release, and the ledger's line of the release to this file's head after it.
So a missing, cut or outdated file is noticed, and so is an outdated ledger. The line of a release
that was not booked stays: after a crash a count may be too high, never too low.

Nothing here leaves the party; the length of a line depends on the table's records.
"""

import hashlib
from pathlib import Path
from typing import Any, Final

import numpy as np
from jaxtyping import Bool, Int64

from securevfl.core.errors import PrivacyError
from securevfl.data.tables import KeyTable
from securevfl.ledger.chain import ChainedFile
from securevfl.linkage.links import NO_RECORD, place_in_run

FILE: Final = "records-ledger.jsonl"


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

    def _count(self, entry: dict[str, Any], where: str) -> None:
        """Add a line of the file.

        Raises:
            PrivacyError: If the line is invalid, or the table no longer has its records.
        """
        try:
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
        except (KeyError, TypeError, ValueError, IndexError, OverflowError):
            raise PrivacyError(f"{where}: is no line that counts records") from None

    def _digest(self, records: int) -> str:
        """Return the hash of the keys of the first ``records`` records."""
        kept = {name: values[:records].tolist() for name, values in self._keys.columns.items()}
        return hashlib.sha256(repr(kept).encode()).hexdigest()
