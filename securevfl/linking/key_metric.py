"""Keys as whole numbers, whose distances shares and Paillier give."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int64

from securevfl.data.tables import KeyTable
from securevfl.linkage.links import LinkTable
from securevfl.linkage.metrics.euclidean import EuclideanKeys
from securevfl.linkage.metrics.metric import ComparedKeys, KeySpec, numbers_of
from securevfl.linkage.secret import LinkageSecret
from securevfl.linkage.spec import LinkSpec


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class QuantisedKeys:
    """Numeric keys as whole numbers: the distances that shares and Paillier give."""

    units: ComparedKeys
    """Both parties' keys in units of one step, whole numbers in float64."""

    step: float
    """Width of a unit, in the keys' unit."""

    @property
    def num_rows(self) -> int:
        """Primary rows."""
        return self.units.num_rows

    @property
    def num_records(self) -> int:
        """Records of the secondary."""
        return self.units.num_records

    def nearest(
        self,
        rows: Int64[np.ndarray, " chosen"] | None,
        k: int,
        *,
        eligible: Bool[np.ndarray, " records"] | None = None,
    ) -> LinkTable:
        """Link the chosen rows (None: all) to their ``k`` nearest eligible records, exactly."""
        links = self.units.nearest(rows, k, eligible=eligible)
        return LinkTable(indices=links.indices, distances=links.distances * self.step)

    def swapped(self) -> "QuantisedKeys":
        """Exchange the parties' roles."""
        return QuantisedKeys(units=self.units.swapped(), step=self.step)

    def figures(self) -> Mapping[str, Any]:
        """Return nothing: every pair is compared here, whatever the parties spare."""
        return {}


def quantised(spec: KeySpec, keys: KeyTable) -> Int64[np.ndarray, "rows dimension"]:
    """Return numeric keys as whole numbers of 16 bits within the agreed ranges.

    Raises:
        DataError: If a value leaves its range, naming the row.
    """
    return spec.key_range().quantise(numbers_of(keys), whose=keys.name)


def quantised_metric(spec: KeySpec, primary: KeyTable, records: KeyTable) -> QuantisedKeys:
    """Return what shares and Paillier compare, where both parties' keys may be seen.

    Raises:
        DataError: If a value leaves its range.
    """
    return QuantisedKeys(
        units=EuclideanKeys(
            primary=quantised(spec, primary).astype(np.float64),
            records=quantised(spec, records).astype(np.float64),
        ),
        step=spec.key_range().step,
    )


def linkage_secret(spec: LinkSpec, data_root: Path) -> LinkageSecret:
    """Read the linkage secret on a data party's own machine.

    Raises:
        ConfigError: If the file cannot be read or holds something else.
    """
    assert spec.hiding.secret is not None, "required before any party starts"
    return LinkageSecret.from_file(data_root / Path(spec.hiding.secret).expanduser())
