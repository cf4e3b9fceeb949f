"""About how many links a federation will have, found by linking where all tables are here."""

import dataclasses
from dataclasses import dataclass
from typing import Final

import numpy as np

from securevfl.config.federation import FederationConfig
from securevfl.config.link_spec import link_spec
from securevfl.data.tables import KeyTable
from securevfl.linking.in_process import Linker
from securevfl.linking.protections.table import protection_of

# Texts are compared at some million pairs a second: more pairs are not compared only to look.
_MOST_PAIRS: Final = 4_000_000
_LEAST: Final = 200
# Below this share of rows with a link, a warning.
_FEW: Final = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedLinks:
    """What linking one secondary gives, of all rows and records or of a part of them."""

    rows: int
    """Rows of the primary that were linked to find this out."""

    all_rows: int
    records: int
    """Records of the secondary that were linked."""

    all_records: int
    rows_with_links: int
    """Of these rows, those that get a link to one of these records."""

    links: int
    median_distance: float | None
    """Of each row's nearest link; None without links."""

    unit: str
    """Of that distance."""

    @property
    def complete(self) -> bool:
        """Whether all rows and records were linked."""
        return self.rows == self.all_rows and self.records == self.all_records

    def in_words(self) -> str:
        """Return one line for people."""
        share = f"{self.rows_with_links / self.rows:.0%}"
        what = f"{self.rows_with_links:,} of {self.rows:,} rows ({share}) get a link"
        if self.complete:
            what += f"; {self.links:,} links to {self.records:,} records"
        else:
            what = f"of {self.records:,} records and {self.rows:,} rows, drawn at random: {what}"
        if self.median_distance is not None:
            what += f"; half of the nearest are within {self.median_distance:.4g} {self.unit}"
        return what

    def warning(self, name: str) -> str | None:
        """Return what to think of before training on so few links; None if there are enough."""
        if not self.complete or self.rows_with_links >= _FEW * self.rows:
            return None
        return (
            f"{name}: only {self.rows_with_links / self.rows:.0%} of the rows get a link, so the "
            f"others gain nothing; where one record serves many rows, a larger "
            f"privacy.links_per_record links more of them, for more noise than that gains at the "
            f"same epsilon"
        )


def expected_links(config: FederationConfig, primary: KeyTable, own: KeyTable) -> ExpectedLinks:
    """Link one secondary as a run would, or a part of it where that would take long.

    Args:
        config: The federation file.
        primary: The primary's keys.
        own: The secondary's.

    Raises:
        DataError: If the tables can't be linked.

    Reveals:
        Nothing leaves the process, which holds both tables.
    """
    spec = dataclasses.replace(link_spec(config), cache=None)
    rows, records = primary.num_rows, own.num_rows
    if not spec.keys.metric.quick and rows * records > _MOST_PAIRS:
        # Whoever chooses is drawn from, among all of the others: a choice stays what it is.
        if config.linkage.choose == "records":
            own = _some(own, _MOST_PAIRS // rows)
        else:
            primary = _some(primary, _MOST_PAIRS // records)
    linked = Linker(spec, primary)(own)
    links = linked.source.link(np.arange(primary.num_rows, dtype=np.int64))
    there = links.present.any(axis=1)
    nearest = np.where(links.present, links.distances, np.inf).min(axis=1)[there]
    return ExpectedLinks(
        rows=primary.num_rows,
        all_rows=rows,
        records=own.num_rows,
        all_records=records,
        rows_with_links=int(there.sum()),
        links=int(links.present.sum()),
        median_distance=float(np.median(nearest)) if len(nearest) else None,
        unit=protection_of(spec).unit(spec),
    )


def _some(keys: KeyTable, count: int) -> KeyTable:
    drawn = np.random.default_rng(0).permutation(keys.num_rows)[: max(count, _LEAST)]
    return keys.take(np.sort(drawn))
