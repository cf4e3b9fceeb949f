"""What a source of tables is, and tables put together from pieces; Arrow's files.

The columns of every source become one of few kinds: whole numbers (``int64`` or, with gaps,
``Int64``: never floats, which round large ones), ``float64``, ``bool`` (with gaps ``boolean``),
``str``, times, and other objects as they are, each in as little memory as it needs.
"""

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

import numpy as np
import pandas as pd

from securevfl.core.errors import ConfigError, SecureVflError, missing_extra
from securevfl.core.stages import Parts
from securevfl.data.sources.settings import Reading, Wanted

if TYPE_CHECKING:
    import pyarrow as pa


if int(pd.__version__.partition(".")[0]) < 3:
    # There an empty cell of a column of texts would become the word "<NA>", without an error.
    raise ConfigError(
        f"pandas {pd.__version__} is installed, which reads empty cells of texts as words; tables "
        f"need pandas>=3: pip install 'pandas>=3', and no older one ahead of it on PYTHONPATH"
    )

LOST: Final = "lost"
"""Attribute of a frame: what its source shows and its cells lack, by kind and by column. ``words``:
a word that counts as an empty cell; ``formulas`` and ``merged``: how many such cells are empty."""

_FLOAT32_MAX: Final = float(np.finfo(np.float32).max)
_INT32: Final = np.iinfo(np.int32)
_REASON: Final = 200


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
            with reading_column(name):
                values = plain(piece[name].reset_index(drop=True))
                if self._exact is not None and name not in self._exact:
                    values = _narrow(values)
            self._columns.setdefault(name, []).append(values)
            self._kinds.setdefault(name, set()).add(_kind(values))

    @property
    def mixed_columns(self) -> list[str]:
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
            made[name] = _join_pieces(self._columns.pop(name), self._kinds[name] - {"empty"})
        return pd.DataFrame(made, copy=False)


@contextmanager
def reading_column(name: str) -> Iterator[None]:
    """Name the column in any error of reading its cells.

    Raises:
        OSError: As readers of files raise it, in place of any other exception.
    """
    try:
        yield
    except (SecureVflError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - libraries raise what they like for their own types
        reason = " ".join(str(error).split())[:_REASON]
        raise OSError(
            f"column {name!r} is of a kind that is not known ({type(error).__name__}: {reason}); "
            f"exclude it, or make it numbers, dates or texts"
        ) from None


def plain(values: "pd.Series[Any]") -> "pd.Series[Any]":
    """Return a column as one of the kinds above: without gaps, of numpy's types."""
    kind: Any = values.dtype
    if isinstance(kind, pd.SparseDtype):
        values = pd.Series(np.asarray(values.array), values.index)
        kind = values.dtype
    if isinstance(kind, pd.ArrowDtype):
        import pyarrow as pa

        column = to_pandas(pa.table({"": pa.array(values.array)}))[""]
        values = column.set_axis(values.index)
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


def _join_pieces(pieces: list["pd.Series[Any]"], kinds: set[str]) -> "pd.Series[Any]":
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


COLUMNAR_SUFFIXES: Final = (".parquet", ".arrow", ".feather", ".ipc")
"""Files that hold columns with types."""

# What pandas calls a stored index that has no name.
_ROW_NUMBERS: Final = re.compile(r"__index_level_\d+__")
_ROWS_OF_A_PIECE: Final = 1 << 16


def read_columnar(path: Path, wanted: Wanted, *, where: str) -> pd.DataFrame:
    """Read the wanted columns of a file, piece by piece; other columns are not read at all.

    Raises:
        OSError: If it cannot be read.
        DataError: If a column is missing or named twice.
    """
    try:
        names, opened = _open(path)
    except Exception as error:  # noqa: BLE001 - readers trust a file's own description
        raise _unreadable(error) from None
    columns = wanted.choose([name for name in names if not _ROW_NUMBERS.match(name)], where=where)
    pieces = Pieces(exact=wanted.exact)
    try:
        for piece in opened(columns):
            # A damaged file can name places outside of its own memory; nothing else looks.
            piece.validate(full=True)
            pieces.add(to_pandas(piece, as_text=wanted.as_text))
        return pieces.frame()[columns]
    except Exception as error:  # noqa: BLE001 - as above
        raise _unreadable(error) from None


def _unreadable(error: Exception) -> Exception:
    if (lacks := missing_extra(error)) is not None:
        return lacks
    if isinstance(error, OSError):
        return error
    return OSError(f"{type(error).__name__}: {error}")


def _open(path: Path) -> tuple[list[str], "Callable[[list[str]], Iterator[pa.Table]]"]:
    """Return the columns of a file, and what reads pieces of the chosen ones."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with path.open("rb"):
        pass  # the system's own reason, if there is one
    if path.suffix.lower() == ".parquet":
        with pq.ParquetFile(path) as file:
            return list(file.schema_arrow.names), partial(_parquet, path)
    with pa.OSFile(str(path)) as source:
        try:
            return list(pa.ipc.open_file(source).schema.names), partial(_arrow_file, path)
        except pa.ArrowInvalid:
            source.seek(0)
            return list(pa.ipc.open_stream(source).schema.names), partial(_arrow_stream, path)


def _parquet(path: Path, columns: list[str]) -> Iterator["pa.Table"]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    # Ahead of the reader, a whole row group would be in memory as it is in the file.
    with pq.ParquetFile(path, pre_buffer=False) as file:
        read = False
        for batch in file.iter_batches(_ROWS_OF_A_PIECE, columns=columns):
            read = True
            yield pa.Table.from_batches([batch])
        if not read:
            yield file.schema_arrow.empty_table().select(columns)


def _arrow_stream(path: Path, columns: list[str]) -> Iterator["pa.Table"]:
    import pyarrow as pa

    with pa.OSFile(str(path)) as source, pa.ipc.open_stream(source) as reader:
        yield reader.schema.empty_table().select(columns)
        for batch in reader:
            yield pa.Table.from_batches([batch]).select(columns)


def _arrow_file(path: Path, columns: list[str]) -> Iterator["pa.Table"]:
    import pyarrow as pa

    with pa.OSFile(str(path)) as source:
        reader = pa.ipc.open_file(source)
        places = [reader.schema.get_field_index(name) for name in columns]
        options = pa.ipc.IpcReadOptions(included_fields=places)
        reader = pa.ipc.open_file(source, options=options)
        yield reader.schema.empty_table().select(columns)
        for number in range(reader.num_record_batches):
            yield pa.Table.from_batches([reader.get_batch(number)]).select(columns)


def to_pandas(table: "pa.Table", *, as_text: Collection[str] = ()) -> pd.DataFrame:
    """Return an Arrow table as pandas', whole numbers with gaps being whole numbers still.

    Decimal numbers without a fraction become whole numbers, or texts where int64 is too short for
    them; others become float64. Bytes become texts. What pandas noted in the table is not believed:
    an index that was stored is a column like any other.

    Args:
        table: The table.
        as_text: Columns whose decimal numbers keep all digits.
    """
    import pyarrow as pa

    types = {
        getattr(pa, name.lower())(): getattr(pd, f"{name}Dtype")()
        for name in ("Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64")
    }
    types |= {pa.bool_(): pd.BooleanDtype()}
    for place, field in enumerate(table.schema):
        if field.name in as_text:
            continue  # keys are spelled later, from all their digits
        column = _without_decimals(table.column(place))
        table = table.set_column(place, field.name, column)
    frame: pd.DataFrame = table.replace_schema_metadata(None).to_pandas(
        types_mapper=types.get, date_as_object=False, self_destruct=True, split_blocks=True
    )
    for field in table.schema:
        if _is_binary(field.type):
            frame[field.name] = frame[field.name].map(_text, na_action="ignore").astype("str")
    return frame


def _without_decimals(column: "pa.ChunkedArray") -> "pa.ChunkedArray":
    import pyarrow as pa
    import pyarrow.types as kinds

    kind = column.type
    if kinds.is_dictionary(kind) and kinds.is_decimal(kind.value_type):
        column, kind = column.cast(kind.value_type), kind.value_type
    if not kinds.is_decimal(kind):
        return column
    if kind.scale > 0:
        return column.cast(pa.float64())
    try:
        return column.cast(pa.int64())
    except pa.ArrowInvalid:
        return column.cast(pa.string())


def _is_binary(kind: "pa.DataType") -> bool:
    import pyarrow.types as kinds

    return bool(
        kinds.is_binary(kind) or kinds.is_large_binary(kind) or kinds.is_fixed_size_binary(kind)
    )


def _text(cell: bytes | str) -> str:
    # Some programs write texts so; what is no text is at least shown and compared as one.
    return cell if isinstance(cell, str) else cell.decode("utf-8", errors="backslashreplace")


IN_ROWS: Final = ("skip_lines", "header", "empty", "dates")
"""Settings of sources that hold cells as users wrote them, row by row."""


@runtime_checkable
class ReadTable(Protocol):
    """Reads a table or a part of one."""

    def __call__(self, path: Path, reading: Reading, wanted: Wanted, *, where: str) -> pd.DataFrame:
        """Return the wanted columns.

        Args:
            path: The table's file; of a table at an address, the ``NAME.source.toml`` with it.
            reading: Settings of the source.
            wanted: Which columns.
            where: Name of the source in messages.

        Raises:
            DataError: If it cannot be read, or a column is missing or named twice.
            OSError: If there is no such file.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSource:
    """One kind of source."""

    kind: str
    """Noun for messages."""

    settings: tuple[str, ...]
    """Settings of ``reading`` that go with it."""

    read: ReadTable
    """Reader of its tables."""


SOURCES: Final = Parts[TableSource]("sources", {})
"""Sources by the suffix of a file; ``"url"``: the address in a ``NAME.source.toml``."""

FRAMES_OF_ROWS: Final = Parts[Callable[..., pd.DataFrame | None]]("rows", {})
"""Functions that return rows in memory of a library, which are no frame, as one."""
