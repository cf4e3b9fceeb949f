"""What linking leaves at the primary and at each secondary, however it was done."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32

from securevfl.core.progress import LinksCounted
from securevfl.linkage.alignment import Alignment
from securevfl.linkage.similarities import SimilarityScale
from securevfl.linkage.sources import LinkSource
from securevfl.linkage.spec import KeyScale


@dataclass(frozen=True, kw_only=True, eq=False)
class LinkedPrimary:
    """What linking leaves at the primary."""

    keys: Float32[np.ndarray, "rows dimension"]
    """The primary's keys as a model takes them."""

    key_scale: KeyScale | None = None
    """How they were scaled; None for texts."""

    similarities: Float32[np.ndarray, "rows secondaries links"] | None = None
    """One a link, NaN where a slot holds no record; None if the family reads none."""

    alignment: Alignment | None = None
    """Which rows are linked, at which secondary; None where nobody asks."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LinkedSecondary:
    """What linking leaves at one secondary."""

    source: LinkSource
    """Where a round's links come from."""

    keys: Float32[np.ndarray, "records dimension"]
    """The secondary's keys as a model takes them, scaled as the primary's are."""

    key_scale: KeyScale | None = None
    """How they were scaled; None for texts."""

    primary_rows: int
    """How many rows the primary has; links may be asked for no others."""

    similarities: Float32[np.ndarray, "rows links"] | None = None
    """What the primary gets, in the order of the links; None if the family reads none."""

    similarity_scale: SimilarityScale | None = None
    """What similarities were scaled by, where this party has made them."""

    apart: bool = False
    """Whether some row's first link has another key than the row, where that decides what counts as
    aligned: where rows are told and no largest distance is set."""

    meet: bool = True
    """Whether numeric keys of both parties have common ranges, where this party sees both."""

    counts: LinksCounted | None = None
    """How many rows and records are linked; None where nobody has counted."""

    figures: Mapping[str, Any]
    """What the party's log says of its links: counts, never a row or a record."""

    def linked_rows(self) -> Bool[np.ndarray, " rows"]:
        """Return which of the primary's rows have a link."""
        rows = np.arange(self.primary_rows, dtype=np.int64)
        return np.asarray(self.source.link(rows).present.any(axis=1))
