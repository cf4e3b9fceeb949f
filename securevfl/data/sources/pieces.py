"""Put a table together from pieces of it, each column in as little memory as it needs.

Whatever a source holds becomes few kinds of columns: whole numbers (``int64`` or, with gaps,
``Int64``: never floats, which do not tell all of them apart), ``float64``, ``bool`` (with gaps
``boolean``), ``str``, times, and whatever else there is, as it is.
"""

from collections.abc import Collection
from typing import Any, Final

import numpy as np
import pandas as pd

from securevfl.core.errors import ConfigError

if int(pd.__version__.partition(".")[0]) < 3:
    # There an empty cell of a column of texts would become the word "<NA>", without an error.
    raise ConfigError(
        f"pandas {pd.__version__} is installed, which reads empty cells of texts as words; tables "
        f"need pandas>=3: pip install 'pandas>=3', and no older one ahead of it on PYTHONPATH"
    )

_FLOAT32_MAX: Final = float(np.finfo(np.float32).max)
_INT32: Final = np.iinfo(np.int32)


class Pieces:
    """The pieces of one table that were read so far."""

    def __init__(self, *, exact: Collection[str] | None) -> None:
        """Begin a table.

        Args:
            exact: Columns that keep float64 and int64; of all others, which become features in
                float32 anyway, only float32 and int32 is kept, where a value fits. None: all.
        """
        self._exact = exact
        self._columns: dict[str, list[pd.Series[Any]]] = {}
        self._kinds: dict[str, set[str]] = {}

    def add(self, piece: pd.DataFrame) -> None:
        """Add the next rows; every piece has the same columns."""
        for name in piece.columns:
            values = plain(piece[name].reset_index(drop=True))
            if self._exact is not None and name not in self._exact:
                values = _narrow(values)
            self._columns.setdefault(name, []).append(values)
            self._kinds.setdefault(name, set()).add(_kind(values))

    @property
    def mixed(self) -> list[str]:
        """Columns that are numbers in one piece and words in another: texts, all in all."""
        return [name for name, kinds in self._kinds.items() if _is_mixed(kinds - {"empty"})]

    def replace(self, name: str, values: "pd.Series[Any]") -> None:
        """Take other values for a column."""
        self._columns[name] = [plain(values)]
        self._kinds[name] = {_kind(values)}

    def frame(self) -> pd.DataFrame:
        """Return the table; the pieces are given up column by column."""
        made = {}
        for name in list(self._columns):
            made[name] = _joined(self._columns.pop(name), self._kinds[name] - {"empty"})
        return pd.DataFrame(made, copy=False)


def plain(values: "pd.Series[Any]") -> "pd.Series[Any]":
    """Return a column as one of the kinds above: without gaps, of numpy's types."""
    kind: Any = values.dtype
    if isinstance(kind, pd.ArrowDtype):
        values = values.convert_dtypes(dtype_backend="numpy_nullable")
        kind = values.dtype
    if isinstance(kind, pd.StringDtype):
        return values.astype("str")
    if not pd.api.types.is_extension_array_dtype(kind):
        return values
    if pd.api.types.is_float_dtype(kind):
        return values.astype(kind.numpy_dtype)
    whole = pd.api.types.is_integer_dtype(kind) or pd.api.types.is_bool_dtype(kind)
    if whole and not values.isna().any():
        return values.astype(kind.numpy_dtype)
    return values


def _as_text(values: "pd.Series[Any]") -> "pd.Series[Any]":
    if isinstance(values.dtype, pd.StringDtype):
        return values
    present = values.notna()
    texts = pd.Series(None, index=values.index, dtype="str")
    texts[present] = [str(value) for value in values[present]]
    return texts


def _kind(values: "pd.Series[Any]") -> str:
    if values.isna().all():  # also of no rows
        return "empty"
    kind = values.dtype
    if pd.api.types.is_bool_dtype(kind):
        return "bool"
    if pd.api.types.is_integer_dtype(kind):
        return "int"
    if pd.api.types.is_float_dtype(kind):
        return "float"
    return str(kind)


def _is_mixed(kinds: set[str]) -> bool:
    return len(kinds) > 1 and kinds != {"int", "float"}


def _narrow(values: "pd.Series[Any]") -> "pd.Series[Any]":
    if values.dtype == np.float64:
        finite = values.to_numpy()[np.isfinite(values.to_numpy())]
        fits = not len(finite) or float(np.abs(finite).max()) <= _FLOAT32_MAX
        return values.astype(np.float32) if fits else values
    if values.dtype == np.int64 and len(values):
        fits = _INT32.min <= values.min() and values.max() <= _INT32.max
        return values.astype(np.int32) if fits else values
    return values


def _joined(pieces: list["pd.Series[Any]"], kinds: set[str]) -> "pd.Series[Any]":
    if len(pieces) == 1:
        return pieces[0] if kinds else _nothing(len(pieces[0]))
    if not kinds:
        return _nothing(sum(map(len, pieces)))
    if _is_mixed(kinds):
        pieces = [_as_text(piece) for piece in pieces]
    elif kinds == {"int", "float"}:
        pieces = [pd.Series(piece.to_numpy(dtype=np.float64, na_value=np.nan)) for piece in pieces]
    elif kinds == {"float"}:
        widest = np.result_type(*(p.to_numpy() for p in pieces if _kind(p) == "float"))
        pieces = [pd.Series(piece.to_numpy(dtype=widest, na_value=np.nan)) for piece in pieces]
    elif any(_kind(piece) == "empty" for piece in pieces):
        whole = next(piece for piece in pieces if _kind(piece) != "empty").dtype
        gaps: Any = {"int": "Int64", "bool": "boolean"}.get(next(iter(kinds)), whole)
        pieces = [
            pd.Series(None, index=piece.index, dtype=gaps)
            if _kind(piece) == "empty"
            else piece.astype(gaps)
            for piece in pieces
        ]
    return pd.concat(pieces, ignore_index=True)


def _nothing(rows: int) -> "pd.Series[Any]":
    return pd.Series(np.full(rows, np.nan))
