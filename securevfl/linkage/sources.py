"""Where the links of a round come from."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from securevfl.linkage.capped import EligiblePairs
from securevfl.linkage.links import LinkTable
from securevfl.linkage.sampling import PoissonSampler


@runtime_checkable
class LinkSource(Protocol):
    """Where a round's links come from."""

    def link(self, rows: npt.NDArray[np.int64]) -> LinkTable:
        """Return the links of the given primary rows."""
        ...


@runtime_checkable
class SampleLinker(Protocol):
    """Links of rows within a sample of the records."""

    def link(self, rows: npt.NDArray[np.int64], sample: npt.NDArray[np.bool_]) -> LinkTable:
        """Return the nearest sampled records of the given primary rows."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedLinks:
    """One link table for every round."""

    table: LinkTable
    """Links of all primary rows."""

    def link(self, rows: npt.NDArray[np.int64]) -> LinkTable:
        """Return the links of the given primary rows."""
        return self.table.take(rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class PickedLinks:
    """All records that picked a row: as many slots as the fullest row of the batch needs."""

    pairs: EligiblePairs
    """Which records picked which row."""

    sample: npt.NDArray[np.bool_]
    """The secret sample; drawn once, for one pass over all rows."""

    def link(self, rows: npt.NDArray[np.int64]) -> LinkTable:
        """Return every sampled record that picked one of the rows."""
        counts = self.pairs.starts[rows + 1] - self.pairs.starts[rows]
        return self.pairs.links(rows, max(1, int(counts.max())), sample=self.sample)


@dataclass(frozen=True, kw_only=True, slots=True)
class FreshlySampledLinks:
    """A new secret sample of the secondary's records in every round ([FeT] Algorithm 1, line 5)."""

    linker: SampleLinker
    sampler: PoissonSampler

    def link(self, rows: npt.NDArray[np.int64]) -> LinkTable:
        """Draw a sample and return the links of the given primary rows within it."""
        return self.linker.link(rows, self.sampler.draw())
