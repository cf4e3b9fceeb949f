"""About how many links a federation will have, found by linking where all tables are here."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from securevfl.config.federation import FederationConfig
from securevfl.config.link_spec import link_spec
from securevfl.core.progress import LinksCounted, links_in_words, told
from securevfl.data.tables import KeyTable
from securevfl.linkage.links import LinkTable
from securevfl.linkage.spec import LinkSpec
from securevfl.linking.in_process import Linker
from securevfl.linking.link_counts import count_links, doubts_about, most_rows
from securevfl.linking.protections.table import protection_of
from securevfl.starting.spellings import BetterSpelling, better_spelling

# Texts are compared at some million pairs a second: more pairs are not compared only to look.
_MOST_PAIRS: Final = 4_000_000
_LEAST: Final = 200
# Below this share of rows with a link, a warning.
_FEW: Final = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedLinks:
    """What linking one secondary gives, of all rows and records or of a part of them."""

    counts: LinksCounted
    """Of the rows and records that were linked to find this out."""

    all_rows: int
    all_records: int
    share: float
    """Of all rows, those that get a link: estimated where a part was linked."""

    enough: float
    """What a run holds against ``linkage.least_linked``, estimated likewise."""

    better: BetterSpelling | None = None
    """Settings by which more rows have a record of an equal key."""

    doubts: tuple[str, ...] = ()
    """What to think of before training on such links."""

    @property
    def complete(self) -> bool:
        """Whether all rows and records were linked."""
        return (self.counts.rows, self.counts.records) == (self.all_rows, self.all_records)

    def in_words(self) -> str:
        """Return one line for people, without the secondary's name."""
        if self.complete:
            return links_in_words(self.counts).partition(": ")[2]
        near = ""
        if self.counts.median_distance is not None:
            near = f"; half of the nearest within {self.counts.median_distance:.4g} "
            near += self.counts.unit
        return (
            f"about {self.share:.0%} of {self.all_rows:,} rows get a link (estimated from "
            f"{self.counts.rows:,} rows and {self.counts.records:,} records, drawn at random){near}"
        )

    def as_json(self) -> dict[str, Any]:
        """Return all of it for ``--json``."""
        return {
            **told(self.counts),
            "all_rows": self.all_rows,
            "all_records": self.all_records,
            "share": self.share,
            "better": None if self.better is None else dataclasses.asdict(self.better),
            "doubts": list(self.doubts),
        }

    def problem(self, config: FederationConfig) -> str | None:
        """Return why a run would refuse these links; None if it would not."""
        least = config.linkage.least_linked * config.privacy.sampling_rate
        if self.enough >= least:
            return None
        cure = "compare how both parties write their keys"
        if self.better is not None:
            cure = self.better.in_words()
        return (
            f"links of {self.counts.name}: {self.in_words()}; less than linkage.least_linked = "
            f"{config.linkage.least_linked:g}, so a run refuses them; {cure}"
        )

    def warnings(self, config: FederationConfig) -> list[str]:
        """Return what to think of before training on these links, one sentence each."""
        found, name = list(self.doubts), self.counts.name
        if self.better is not None:
            found.append(f"{name}: {self.better.in_words()}")
        elif self.share < _FEW:
            text = f"{name}: only {self.share:.0%} of the rows get a link; the others gain nothing"
            if config.privacy.links_per_record is not None and config.linkage.metric != "exact":
                text += (
                    "; where one record serves many rows, a larger privacy.links_per_record links "
                    "more of them, for more noise than that gains at the same epsilon"
                )
            found.append(text)
        return found


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
    better = better_spelling(spec.keys, primary, own)
    mine, theirs = primary, own
    if not spec.keys.metric.quick and rows * records > _MOST_PAIRS:
        # Whoever chooses is drawn from, among all of the others: a choice stays what it is.
        if config.linkage.choose == "records":
            theirs = _some(own, _MOST_PAIRS // rows)
        else:
            mine = _some(primary, _MOST_PAIRS // records)
    linked = Linker(spec, mine)(theirs)
    counts = count_links(spec, theirs, linked, unit=_unit(spec))
    share, enough = counts.rows_linked / counts.rows, counts.share
    if theirs.num_rows < records:
        links = linked.source.link(np.arange(rows, dtype=np.int64))
        share = _share_of_all(links, drawn=theirs.num_rows, records=records)
        enough = share * rows / most_rows(spec, rows, records)
    return ExpectedLinks(
        counts=counts,
        all_rows=rows,
        all_records=records,
        share=share,
        enough=enough,
        better=better,
        doubts=tuple(doubts_about(spec, theirs, counts, meet=linked.meet)),
    )


def _unit(spec: LinkSpec) -> str | None:
    protection = protection_of(spec)
    return None if protection.helpers else protection.unit(spec)


def _share_of_all(links: LinkTable, *, drawn: int, records: int) -> float:
    """Return the share of rows that all records would link, of those that a part of them links.

    How many rows are within reach is estimated after Chao (1984, doi:10.2307/4615964) from rows
    with one and with two of the drawn records; all records then meet them as if by chance. Where no
    two met in a row, every further record has a row of its own.
    """
    per_row = links.present.sum(axis=1)
    found, once, twice = (int((per_row >= 1).sum()), *((per_row == n).sum() for n in (1, 2)))
    if not found:
        return 0.0
    picks = records * float(per_row.sum()) / drawn
    reach = found + once**2 / (2 * twice) if twice else math.inf
    expected = picks if math.isinf(reach) else reach * -math.expm1(-picks / reach)
    return float(min(max(expected, found), links.num_rows)) / links.num_rows


def _some(keys: KeyTable, count: int) -> KeyTable:
    drawn = np.random.default_rng(0).permutation(keys.num_rows)[: max(count, _LEAST)]
    return keys.take(np.sort(drawn))
