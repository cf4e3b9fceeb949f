"""Read Parquet, Arrow and Feather files, and turn Arrow's columns into pandas' ones."""

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pandas as pd

from securevfl.data.sources.pieces import Pieces
from securevfl.data.sources.settings import Wanted

if TYPE_CHECKING:
    import pyarrow as pa

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
    except Exception as error:  # noqa: BLE001 - readers believe what a file says of itself
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


def _unreadable(error: Exception) -> OSError:
    if isinstance(error, OSError) and error.strerror:
        return error
    return OSError(f"{type(error).__name__}: {error}")


class _Opened:
    """An open file whose pieces are read when its columns are chosen."""

    def __init__(self, path: Path, kind: str) -> None:
        self._path, self._kind = path, kind

    def __call__(self, columns: list[str]) -> Iterator["pa.Table"]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        if self._kind == "parquet":
            # Ahead of the reader, a whole row group would be in memory as it is in the file.
            with pq.ParquetFile(self._path, pre_buffer=False) as file:
                read = False
                for batch in file.iter_batches(_ROWS_OF_A_PIECE, columns=columns):
                    read = True
                    yield pa.Table.from_batches([batch])
                if not read:
                    yield file.schema_arrow.empty_table().select(columns)
        elif self._kind == "stream":
            with pa.OSFile(str(self._path)) as source, pa.ipc.open_stream(source) as reader:
                yield reader.schema.empty_table().select(columns)
                for batch in reader:
                    yield pa.Table.from_batches([batch]).select(columns)
        else:
            with pa.OSFile(str(self._path)) as source:
                reader = pa.ipc.open_file(source)
                places = [reader.schema.get_field_index(name) for name in columns]
                options = pa.ipc.IpcReadOptions(included_fields=places)
                reader = pa.ipc.open_file(source, options=options)
                yield reader.schema.empty_table().select(columns)
                for number in range(reader.num_record_batches):
                    yield pa.Table.from_batches([reader.get_batch(number)]).select(columns)


def _open(path: Path) -> tuple[list[str], _Opened]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with path.open("rb"):
        pass  # the system's own reason, if there is one
    if path.suffix.lower() == ".parquet":
        with pq.ParquetFile(path) as file:
            return list(file.schema_arrow.names), _Opened(path, "parquet")
    with pa.OSFile(str(path)) as source:
        try:
            return list(pa.ipc.open_file(source).schema.names), _Opened(path, "file")
        except pa.ArrowInvalid:
            source.seek(0)
            return list(pa.ipc.open_stream(source).schema.names), _Opened(path, "stream")


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
