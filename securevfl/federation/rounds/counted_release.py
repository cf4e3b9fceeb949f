"""Releases for predictions where each record has a number of them: counted, charged, released."""

from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int64

from securevfl.core.errors import PrivacyError
from securevfl.ledger.ledger import Ledger
from securevfl.linkage.links import LinkTable
from securevfl.linkage.sampling import LinkSource


@dataclass(eq=False)
class CountedRelease:
    """One secondary's answers to requests: a record that had its releases leaves its slot empty.

    The row then has the other records, or noise alone, and nobody is told. What one record adds to
    all answers together, whatever is asked for and in whatever order, is at most N times what it
    adds to a row: docs/privacy.md, section 3.
    """

    links: LinkSource
    """Source of the request's links, in which records chose rows."""
    ledger: Ledger
    """The secondary's own, which counts how often each record was released."""
    most: int
    """N, rows that a record may be released in."""
    _charged: LinkTable | None = field(default=None, init=False)
    """Links of the round that is paid for."""

    def charge(
        self, *, round_number: int, rows: Int64[np.ndarray, " batch"], purpose: str
    ) -> float:
        """Count the round's records, then book it; see :meth:`Ledger.charge`.

        Raises:
            PrivacyError: If the counts were altered under this process.
        """
        links = self.links.link(rows)
        admitted = self.ledger.record_counts.admit(links.indices, most=self.most)
        epsilon = self.ledger.charge(round_number=round_number, rows=rows, purpose=purpose)
        self._charged = links.only(admitted)
        return epsilon

    def link(self, rows: Int64[np.ndarray, " chosen"]) -> LinkTable:
        """Return the links of the round that is charged, without those that had their releases.

        Raises:
            PrivacyError: If other rows than these were charged.
        """
        if self._charged is None or len(rows) != self._charged.num_rows:
            raise PrivacyError("links were asked for of rows that were not charged")
        return self._charged
