"""Keys of two parties, and what linking needs to know of them."""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from securevfl.data.tables import KeyTable
from securevfl.linkage.metrics.metric import KeySpec
from securevfl.linkage.metrics.points import EuclideanKeys
from securevfl.linkage.sampling import RoundLinker
from securevfl.linkage.spec import ChoiceSpec, HidingSpec, LinkRoles, LinkSpec, SplitSpec
from securevfl.linkage.stage.linkage_parts import METRICS

RANGES = ((0.0, 10.0), (0.0, 10.0))
SHORT_KEY = 512
"""Bits of a Paillier key that takes a tenth of the time, and packs six numbers instead of 27."""
HELPERS = {"coordinator": "coordinator", "dealer": "dealer"}
_HIDING = ("cell", "key_bits", "pad_to", "most_keys")


def link_spec(protection: str = "none", **changes: Any) -> LinkSpec:
    """Return how ``agency`` and ``bank`` link by two columns: K = 4 of all records."""
    keys: dict[str, Any] = {
        name: changes.pop(name) for name in ("fields", "ranges") if name in changes
    }
    metric = METRICS[changes.pop("metric", "euclidean")]
    hiding = {name: changes.pop(name) for name in _HIDING if name in changes}
    choice = {
        name: changes.pop(name)
        for name in ("links_per_record", "sampling_rate", "max_distance")
        if name in changes
    }
    spec = LinkSpec(
        keys=KeySpec(columns=("lon", "lat"), metric=metric, **keys),
        hiding=HidingSpec(protection=protection, settings=hiding),
        choice=ChoiceSpec(neighbours=4, **choice),
        roles=LinkRoles(primary="agency", secondaries=("bank",)),
        split=SplitSpec(seed=3, validation_fraction=0.1, test_fraction=0.2),
    )
    return replace(spec, **changes)


def round_linker(
    rows: npt.NDArray[np.float64], records: npt.NDArray[np.float64], k: int, **how: Any
) -> RoundLinker:
    """Return what links numeric keys by Euclidean distance within every round's sample."""
    return RoundLinker(EuclideanKeys(primary=rows, records=records), k, **how)


def hidden_spec(protection: str, **changes: Any) -> LinkSpec:
    """Return the same for ``agency``, ``bank``, ``shop`` and the third parties."""
    roles = LinkRoles(primary="agency", secondaries=("bank", "shop"), helpers=HELPERS)
    return link_spec(protection, **{"ranges": RANGES, "roles": roles, **changes})


def key_table(name: str, rows: int, *, seed: int) -> KeyTable:
    """Return points of a square of width 10."""
    points = np.random.default_rng(seed).uniform(0, 10, (rows, 2))
    return KeyTable(name=name, columns={"lon": points[:, 0].copy(), "lat": points[:, 1].copy()})


def text_table(name: str, rows: int, *, seed: int) -> KeyTable:
    """Return long words of which those of one row are alike at all parties."""
    letters = np.random.default_rng(0).integers(97, 123, (rows, 30))
    words = ["".join(map(chr, row)) for row in letters.tolist()]
    distorted = [f"{word[:seed]}x{word[seed + 1 :]}" for word in words]
    columns = {"lon": distorted, "lat": [word[:4] for word in words]}
    return KeyTable(
        name=name,
        columns={key: np.array(column, dtype=object) for key, column in columns.items()},
    )
