"""Quality of links: figures from a link table and, where known, the truth."""

from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, get_args

import numpy as np
from jaxtyping import Bool, Float64, Int64

from securevfl.core import checks
from securevfl.core.errors import DataError
from securevfl.linkage.links import NO_RECORD, LinkTable

Simpler = Literal["exact", "top1sim", "avgsim"]
"""Methods that FedSim is compared with, by which links they use as matches."""


def estimated_improvement(links: LinkTable, *, over: Simpler) -> float:
    """Return Delta: the similarity that a simpler method loses or blurs, per row.

    ``Delta_i = sum_(matches) (1 - s_ij) + sum_(others) s_ij``, averaged over the rows i. A match
    that is not quite similar is redundant information, a similar record that is no match is lost.

    Args:
        links: K links a row, with their distances. Records beyond the K-th count nothing: FedSim
            does not use them either.
        over: ``exact`` matches links of distance 0, ``top1sim`` the first link, ``avgsim`` all K.

    Returns:
        A number from 0 to K.

    Raises:
        ConfigError: If ``over`` is another method.
        DataError: If there are no links.

    References:
        [FedSim] Definition 1. The paper says "scaled similarity" and not how: here s is 1 for the
        nearest link of all and 0 for the farthest.
    """
    checks.one_of(get_args(Simpler), over=over)
    present = links.present
    if not present.any():
        raise DataError("Delta: there are no links")
    similarity = scaled_similarities(links)
    matches = present.copy()
    if over == "top1sim":
        matches[:, 1:] = False
    elif over == "exact":
        matches &= links.distances == 0
    parts = np.where(matches, 1 - similarity, similarity)
    return float(np.where(present, parts, 0).sum() / links.num_rows)


def scaled_similarities(links: LinkTable) -> Float64[np.ndarray, "rows links"]:
    """Return similarities in [0, 1]: 1 for the nearest link of all, 0 for the farthest and none."""
    present: Bool[np.ndarray, "rows links"] = links.present
    distances = links.distances[present]
    spread = distances.max() - distances.min()
    scaled = np.zeros(links.distances.shape)
    scaled[present] = (distances.max() - distances) / spread if spread > 0 else 1.0
    return scaled


_TOP: Final = 10
_ROWS_OF_A_PIECE: Final = 2**16
_QUANTILES: Final = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkQuality:
    """Figures about one secondary's links; none of them names a row or a record."""

    rows: int
    """Primary rows."""

    records: int
    """Records of the secondary."""

    links_per_row: int
    """K."""

    recall_at_1: float | None
    """Share of rows with a true match whose first link is one; None without truth."""

    recall_at_k: float | None
    """Share of rows with a true match that have one among their links; None without truth."""

    pairs_completeness: float | None
    """Share of all true pairs that are linked; None without truth."""

    rows_with_a_match: int | None
    """Rows whose entity has a record; None without truth."""

    reduction_ratio: float
    """1 - links / (rows x records): the share of all pairs that linkage ruled out."""

    rows_short: int
    """Rows with fewer than K links."""

    rows_without_links: int
    """Rows without a link."""

    tied_rows: int
    """Rows with two equally far links, or whose last link has the key of a record that is left
    out."""

    records_used: int
    """Records with a link."""

    most_used: tuple[int, ...]
    """Number of rows of each of the ten most used records."""

    first_distance_quantiles: dict[str, float]
    """Quantiles over rows of the distance of the first link."""

    last_distance_quantiles: dict[str, float]
    """Quantiles over rows of the distance of the last link."""

    def as_json(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        return asdict(self)


def link_quality(
    links: LinkTable,
    *,
    num_records: int,
    primary_entities: Int64[np.ndarray, " rows"] | None = None,
    record_entities: Int64[np.ndarray, " records"] | None = None,
    tied_beyond: Bool[np.ndarray, " rows"] | None = None,
) -> LinkQuality:
    """Measure links.

    Args:
        links: The links.
        num_records: Records of the secondary.
        primary_entities: True entity of each primary row.
        record_entities: True entity of each record; several may share one.
        tied_beyond: Rows whose last link has the same key as a record beyond K.

    Raises:
        DataError: If truth is given for one party only, or has the wrong length.
    """
    if (primary_entities is None) != (record_entities is None):
        raise DataError("truth: must be known at both parties or at none")
    present = links.present
    per_row = present.sum(axis=1)
    used = np.bincount(links.indices[present], minlength=num_records)
    # Slots are filled from the left, so two neighbouring present slots are compared.
    equal = (links.distances[:, 1:] == links.distances[:, :-1]) & present[:, 1:]
    tied = equal.any(axis=1) if tied_beyond is None else equal.any(axis=1) | tied_beyond
    last = links.distances[np.arange(links.num_rows), np.maximum(per_row, 1) - 1]
    return LinkQuality(
        rows=links.num_rows,
        records=num_records,
        links_per_row=links.num_links,
        **_against_truth(links, primary_entities, record_entities, num_records),
        reduction_ratio=1 - float(present.sum()) / (links.num_rows * num_records),
        rows_short=int((per_row < links.num_links).sum()),
        rows_without_links=int((per_row == 0).sum()),
        tied_rows=int(tied.sum()),
        records_used=int((used > 0).sum()),
        most_used=tuple(int(count) for count in np.sort(used)[::-1][:_TOP]),
        first_distance_quantiles=_quantiles(links.distances[per_row > 0, 0]),
        last_distance_quantiles=_quantiles(last[per_row > 0]),
    )


def _against_truth(
    links: LinkTable,
    primary_entities: Int64[np.ndarray, " rows"] | None,
    record_entities: Int64[np.ndarray, " records"] | None,
    num_records: int,
) -> dict[str, Any]:
    names = ("recall_at_1", "recall_at_k", "pairs_completeness", "rows_with_a_match")
    if primary_entities is None or record_entities is None:
        return dict.fromkeys(names)
    if len(primary_entities) != links.num_rows or len(record_entities) != num_records:
        raise DataError(
            f"truth: has {len(primary_entities)} rows and {len(record_entities)} records, "
            f"the links {links.num_rows} and {num_records}"
        )
    right = np.zeros(links.indices.shape, dtype=np.bool_)
    for start in range(0, links.num_rows, _ROWS_OF_A_PIECE):
        piece = slice(start, start + _ROWS_OF_A_PIECE)
        indices = links.indices[piece]
        # Where there is no link, -1 takes the last record for nothing.
        right[piece] = record_entities[indices] == primary_entities[piece, None]
        right[piece] &= indices != NO_RECORD
    entities, counts = np.unique(record_entities, return_counts=True)
    place = np.minimum(np.searchsorted(entities, primary_entities), len(entities) - 1)
    true_pairs = np.where(entities[place] == primary_entities, counts[place], 0)
    matchable = int((true_pairs > 0).sum())
    if matchable == 0:
        return dict.fromkeys(names[:3]) | {"rows_with_a_match": 0}
    return {
        "recall_at_1": float(right[:, 0].sum()) / matchable,
        "recall_at_k": float(right.any(axis=1).sum()) / matchable,
        "pairs_completeness": float(right.sum()) / int(true_pairs.sum()),
        "rows_with_a_match": matchable,
    }


def _quantiles(values: np.ndarray) -> dict[str, float]:
    if not len(values):
        return {}
    quantiles = np.quantile(values, _QUANTILES)
    return {f"{level:g}": float(value) for level, value in zip(_QUANTILES, quantiles, strict=True)}
