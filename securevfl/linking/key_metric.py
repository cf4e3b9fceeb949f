"""What a federation file compares: keys as they are, their codes, or quantised numbers."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from jaxtyping import Bool, Int64, UInt8

from securevfl.data.tables import KeyTable
from securevfl.linkage.blocking import QGramBlocking, block_texts
from securevfl.linkage.bloom import Code, NumberCode, TextCode, encode_keys
from securevfl.linkage.links import LinkTable
from securevfl.linkage.metrics import (
    CodeKeys,
    EarthKeys,
    EuclideanKeys,
    KeyMetric,
    MixedKeys,
    TextKeys,
)
from securevfl.linkage.point_codes import PointCode
from securevfl.linkage.quantised import KeyRange
from securevfl.linkage.secret import LinkageSecret
from securevfl.linkage.spec import LinkSpec
from securevfl.linking.keys import numbers_of

# The one field of codes of texts that are read as one.
_JOINED: Final = "all key columns"

# Codes that protect nobody: for metric = "bloom" without protection, where keys are shown anyway.
_PUBLIC_CODES: Final = LinkageSecret(hashlib.sha256(b"securevfl public codes").digest())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class QuantisedKeys:
    """Numeric keys as whole numbers: the distances that shares and Paillier give."""

    units: EuclideanKeys
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


def key_metric(spec: LinkSpec, primary: KeyTable, records: KeyTable) -> KeyMetric:
    """Return both parties' keys with the distance between them, where both may be seen.

    Raises:
        DataError: If keys are not what the metric needs.
    """
    keys = spec.keys
    if "bloom" in (spec.hiding.protection, keys.metric):
        return CodeKeys(
            primary=encode(spec, primary, _PUBLIC_CODES),
            records=encode(spec, records, _PUBLIC_CODES),
        )
    if keys.blocking is not None:
        return block_texts(
            primary.joined(),
            records.joined(),
            spec.choice.neighbours,
            blocking=QGramBlocking(least_overlap=keys.blocking),
        )
    if keys.metric == "levenshtein":
        return TextKeys(primary=primary.joined(), records=records.joined())
    if keys.metric == "mixed":
        return MixedKeys(
            primary=primary.columns,
            records=records.columns,
            fields=keys.fields or (),
            missing_similarity=keys.missing_similarity,
        )
    kind = EarthKeys if keys.metric == "great-circle" else EuclideanKeys
    return kind(primary=numbers_of(primary), records=numbers_of(records))


def quantised(spec: LinkSpec, keys: KeyTable) -> Int64[np.ndarray, "rows dimension"]:
    """Return numeric keys as whole numbers of 16 bits within the agreed ranges.

    Raises:
        DataError: If a value leaves its range, naming the row.
    """
    return spec.keys.key_range().quantise(numbers_of(keys), whose=keys.name)


def quantised_metric(spec: LinkSpec, primary: KeyTable, records: KeyTable) -> QuantisedKeys:
    """Return what shares and Paillier compare, where both parties' keys may be seen.

    Raises:
        DataError: If a value leaves its range.
    """
    return QuantisedKeys(
        units=EuclideanKeys(
            primary=quantised(spec, primary).astype(np.float64),
            records=quantised(spec, records).astype(np.float64),
        ),
        step=spec.keys.key_range().step,
    )


def encode(
    spec: LinkSpec, keys: KeyTable, secret: LinkageSecret
) -> UInt8[np.ndarray, "rows code_bytes"]:
    """Return the Bloom-filter codes of a party's keys; a missing text counts as an empty one.

    Raises:
        DataError: If a number is missing or leaves its agreed range, naming the row.
    """
    codes = key_codes(spec)
    columns: dict[str, np.ndarray] = {}
    for name, code in codes.items():
        if isinstance(code, PointCode):
            columns[name] = numbers_of(keys)
        elif name == _JOINED:
            columns[name] = np.array(keys.joined(), dtype=object)
        elif isinstance(code, TextCode):
            texts = ["" if text is None else text for text in keys.columns[name].tolist()]
            columns[name] = np.array(texts, dtype=object)
        else:
            columns[name] = keys.columns[name]
    return encode_keys(columns, codes, secret, whose=keys.name)


def key_codes(spec: LinkSpec) -> dict[str, Code]:
    """Return how each field becomes bits; a weight makes a field's code longer."""
    keys, kinds = spec.keys, spec.keys.kinds
    if keys.fields is None and "text" in kinds.values():
        return {_JOINED: _text_code(keys.code_bits or 1024, keys.code_concentration)}
    if keys.fields is None:
        box = keys.key_range()
        return {"point": _point_code(box, keys.code_bits or 2048, keys.code_concentration)}
    weights = {field.name: field.weight for field in keys.fields}
    ranges = iter(keys.ranges or ())
    codes: dict[str, Code] = {}
    for name, kind in kinds.items():
        bits = max(8, 8 * round((keys.code_bits or 1024) * weights[name] / 8))
        if kind == "text":
            codes[name] = _text_code(bits, keys.code_concentration)
        else:
            codes[name] = _number_code(next(ranges), bits, keys.code_concentration)
    return codes


def _text_code(bits: int, share: float | None) -> TextCode:
    return TextCode(bits=bits) if share is None else TextCode(bits=bits, concentration=share)


def _point_code(box: KeyRange, bits: int, share: float | None) -> PointCode:
    if share is None:
        return PointCode(low=box.low, high=box.high, bits=bits)
    return PointCode(low=box.low, high=box.high, bits=bits, concentration=share)


def _number_code(pair: tuple[float, ...], bits: int, share: float | None) -> NumberCode:
    low, high = pair
    if share is None:
        return NumberCode(low=low, high=high, bits=bits)
    return NumberCode(low=low, high=high, bits=bits, concentration=share)


def code_bytes(spec: LinkSpec) -> int:
    """Return the length of a row's code."""
    return sum(code.bits for code in key_codes(spec).values()) // 8


def linkage_secret(spec: LinkSpec, data_root: Path) -> LinkageSecret:
    """Read the linkage secret on a data party's own machine.

    Raises:
        ConfigError: If the file cannot be read or holds something else.
    """
    assert spec.hiding.secret is not None, "required before any party starts"
    return LinkageSecret.from_file(data_root / Path(spec.hiding.secret).expanduser())
