"""In how many rows of predictions each of a secondary's records was released, for one kept model.

A chained file of the secondary's own (:mod:`securevfl.ledger.chain`): ``table`` lines say which
records are counted, by a hash of their keys; ``released`` lines name the records of one release,
once a row, and lie on the disk before the release is booked. The ledger's line of that release
holds the head after it, and the line holds the ledger's head before it. So a file that is missing,
cut or older than the ledger is noticed, and so is a ledger that is older than the file. The line of
a release that was not booked stays: a count may be too high after a crash, never too low.

Nothing here leaves the party; how long a line is depends on which records there are.
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
    """The counts, held open: no other process writes to the file until it is closed."""

    def __init__(
        self,
        folder: Path | None,
        ledger: ChainedFile,
        keys: KeyTable,
        *,
        last: str | None,
        lost: bool = False,
    ) -> None:
        """Open the file and check that it is of this table and of the ledger as it is now.

        The table may have new records after those that are counted; their counts are zero.

        Args:
            folder: The secondary's own in the run folder; None keeps the counts in memory only.
            ledger: The secondary's own, open for a request; a line is as durable as its lines.
            keys: The secondary's.
            last: The head of this file that the ledger has; None where it has none.
            lost: Whether the ledger was restored from a copy, and has booked one promise more since
                the last release: then counts of any time go on, also none.

        Raises:
            ConfigError: If the file cannot be opened, or is in use.
            PrivacyError: If it was altered, or is not the one that releases were counted in.
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
        """Count the records of a release, and return in which rows each of them takes part.

        A record takes part in the first of its rows, in the order of the release, until it was
        released in ``most`` rows. That is a function of the rows that linking gave it and of its
        own count: whether another record is there changes nothing of it. Distances would not do,
        since some protections show a record's place among the others in their stead.

        Args:
            records: Record numbers by row; :data:`NO_RECORD` for an empty slot.
            most: N, the rows that a record may be released in.

        Raises:
            PrivacyError: If the file was altered under this process.
            StorageError: If the disk takes no more; nothing is counted then.
        """
        flat = records.ravel()
        taken = np.flatnonzero(flat != NO_RECORD)
        taken = taken[np.argsort(flat[taken], kind="stable")]
        place = place_in_run(np.unique(flat[taken], return_counts=True)[1])
        taken = taken[self._counts[flat[taken]] + place < most]
        released = flat[taken]
        # Also where there is none: whether a line is written depends on no record.
        content = {"ledger": self._ledger.head, "records": released.tolist()}
        self.append({"kind": "released", **content})
        np.add.at(self._counts, released, 1)
        admitted = np.zeros(flat.shape, dtype=np.bool_)
        admitted[taken] = True
        return admitted.reshape(records.shape)

    def _count(self, entry: dict[str, Any], where: str) -> None:
        """Take in a line of the file.

        Raises:
            PrivacyError: If it is none, or the table no longer has the records that it speaks of.
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
        """Return the hash of the keys of the first so many records."""
        kept = {name: values[:records].tolist() for name, values in self._keys.columns.items()}
        return hashlib.sha256(repr(kept).encode()).hexdigest()
