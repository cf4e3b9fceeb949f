"""``NAME.source.toml``: files of one party alone that say where its table lies."""

import contextlib
import tomllib
from pathlib import Path

from securevfl.core.errors import ConfigError, DataError
from securevfl.core.files import MOST_OF_SETTINGS, read_text
from securevfl.core.settings import read_settings
from securevfl.data.sources.settings import SOURCE_SUFFIX, Source


def is_source_file(path: Path) -> bool:
    """Return whether a file names the location of a table, and is no table."""
    return path.name.endswith(SOURCE_SUFFIX)


def read_source(path: Path, *, where: str) -> Source:
    """Read a ``NAME.source.toml`` file.

    Raises:
        OSError: If there is no such file.
        DataError: If it is no TOML, or a setting is wrong. Values are not shown.
    """
    try:
        table = tomllib.loads(read_text(path, most=MOST_OF_SETTINGS))
    except ValueError as error:  # a number of thousands of digits is no TOMLDecodeError
        raise DataError(f"{where}: is not TOML: {error}") from None
    except RecursionError:
        raise DataError(f"{where}: is nested too deeply to be settings") from None
    try:
        return read_settings(Source, table, where="source")
    except ConfigError as error:
        raise DataError(f"{where}: {str(error).removeprefix('source.')}") from None


def file_behind(path: Path) -> Path:
    """Return the file that holds a party's table: for most, the path itself.

    A source file with an address of a database stands for its table itself.

    Raises:
        OSError: If there is no such source file.
        DataError: As :func:`read_source`.
    """
    if not is_source_file(path):
        return path
    source = read_source(path, where=f"table {path}")
    return path if source.file is None else file_named(path, source.file)


def query_behind(path: Path) -> str | None:
    """Return the query that gives a party's table; None without one, or without a readable file.

    What can't be read is refused where the table is read.
    """
    with contextlib.suppress(OSError, DataError):
        return read_source(path, where="").query if is_source_file(path) else None
    return None


def file_named(path: Path, file: str) -> Path:
    """Return the file that a source file names; relative to its own folder, if it is relative."""
    return path.parent / Path(file).expanduser()
