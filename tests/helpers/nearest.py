"""Two tables of keys, linked as their metric links them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from securevfl.linkage.links import LinkTable
from securevfl.linkage.metrics.metric import Columns, Field
from securevfl.linkage.metrics.points import EuclideanKeys
from securevfl.stages.bloom.codes import Backend, CodeKeys
from securevfl.stages.fuzzy_keys.edits import TextKeys
from securevfl.stages.fuzzy_keys.mixed import MixedKeys


def nearest_records(
    primary: np.ndarray, records: np.ndarray, k: int, *, eligible: np.ndarray | None = None
) -> LinkTable:
    """Link points by Euclidean distance."""
    return EuclideanKeys(primary=primary, records=records).nearest(None, k, eligible=eligible)


def nearest_texts(
    primary: Sequence[Any], records: Sequence[Any], k: int, *, eligible: np.ndarray | None = None
) -> LinkTable:
    """Link texts by edits."""
    return TextKeys.of(primary, records).nearest(None, k, eligible=eligible)


def nearest_mixed(
    primary: Columns,
    records: Columns,
    fields: Sequence[Field],
    k: int,
    *,
    missing_similarity: float = 0.5,
    eligible: np.ndarray | None = None,
) -> LinkTable:
    """Link rows of several fields."""
    keys = MixedKeys.of(primary, records, fields, missing_similarity=missing_similarity)
    return keys.nearest(None, k, eligible=eligible)


def nearest_codes(
    primary: np.ndarray,
    records: np.ndarray,
    k: int,
    *,
    eligible: np.ndarray | None = None,
    backend: Backend = "auto",
) -> LinkTable:
    """Link codes by the bits in which they differ."""
    keys = CodeKeys(primary=primary, records=records, backend=backend)
    return keys.nearest(None, k, eligible=eligible)
