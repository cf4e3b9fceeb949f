"""How many rows one record serves, and what a limit on that leaves of the links."""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from securevfl.core.errors import SecureVflError
from securevfl.data.tables import KeyTable
from securevfl.linkage.spec import LinkSpec
from securevfl.linking.in_process import Linker

LIMITS: Final = (1, 2, 4)
"""Values of ``links_per_record`` that are compared."""

# Texts are compared at some million pairs a second: more are not compared only to say this.
_MOST_PAIRS: Final = 4_000_000
# Below this share of rows with a link, a warning.
_FEW: Final = 0.5
_OFTEN: Final = 90

WHAT_MORE_COSTS: Final = (
    "Two rows a record take 1.4 times the noise for the same epsilon, four take twice the noise, "
    "and where it was measured they gained less than they cost: stay at 1 under a promise. Without "
    'one (mechanism = "none"), leave links_per_record and linkage.choose out'
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsServed:
    """What linking one secondary without a limit, and with several, found."""

    median: float
    """Rows whose nearest record it is, of a record that is nearest to any: half serve no more."""

    often: float
    """The same of nine in ten of these records."""

    linked: tuple[float, ...]
    """The share of rows that get a link, for each of :data:`LIMITS`."""

    def in_words(self) -> str:
        """Return one sentence."""
        first, *others = (f"{share:.0%}" for share in self.linked)
        more = ", ".join(f"{share} at {m}" for m, share in zip(LIMITS[1:], others, strict=True))
        return (
            f"a record that is nearest to any row is nearest to {_rows(self.median)} in the "
            f"median, nine in ten to at most {self.often:.0f}; {first} of the rows get a link at "
            f"links_per_record = {LIMITS[0]}, {more}"
        )

    @property
    def few(self) -> bool:
        """Whether most rows go without a link where a record has one row."""
        return self.linked[0] < _FEW

    def warning(self, party: str) -> str | None:
        """Return what to think of where most rows get no link; None if enough do."""
        if not self.few:
            return None
        return (
            f"{party}: at links_per_record = 1 only {self.linked[0]:.0%} of the rows get a link; "
            f"the others gain nothing. {WHAT_MORE_COSTS}"
        )


def rows_served(spec: LinkSpec, primary: KeyTable, own: KeyTable) -> RowsServed | None:
    """Link a secondary's records to the primary's rows; None if it can't be said, or takes long.

    Args:
        spec: How the proposed federation file links.
        primary: The primary's keys.
        own: The secondary's.

    Reveals:
        Nothing leaves the process, which holds both tables.
    """
    if not spec.keys.metric.quick and primary.num_rows * own.num_rows > _MOST_PAIRS:
        return None
    try:
        metric = Linker(spec, primary).metric(own)
        nearest = metric.nearest(None, 1)
        picked = metric.swapped().nearest(None, min(max(LIMITS), metric.num_rows))
    except SecureVflError:
        return None  # check names what is wrong with them
    found = nearest.indices[nearest.present]
    if not len(found):
        return None
    served = np.bincount(found)
    served = served[served > 0]
    rows = metric.num_rows
    return RowsServed(
        median=float(np.median(served)),
        often=math.floor(np.percentile(served, _OFTEN)),
        linked=tuple(
            len(np.unique(picked.indices[:, :limit][picked.present[:, :limit]])) / rows
            for limit in LIMITS
        ),
    )


def _rows(count: float) -> str:
    return f"{count:g} row" + ("" if count == 1 else "s")
