"""What ``fit`` and ``predict`` are given, as frames and parties' tables."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pandas as pd
from sklearn.utils.validation import validate_data

from securevfl.config.linkage import LinkageSettings
from securevfl.core.errors import ConfigError
from securevfl.data.column_settings import ColumnSettings
from securevfl.data.frame_tables import as_pandas, from_frame
from securevfl.data.key_tables import KeyKind
from securevfl.data.scaling import Bounds
from securevfl.data.sources.read import read_frame
from securevfl.data.tables import PartyTable
from securevfl.linkage.metrics.metric import KeySpec
from securevfl.linkage.metrics.table import METRICS

PRIMARY: Final = "primary"
"""What the party is called whose rows ``X`` has."""


def frame_of(estimator: Any, X: Any, *, reset: bool) -> pd.DataFrame:
    """Return the rows of ``X``, checked as scikit-learn checks them.

    Args:
        estimator: Whose ``n_features_in_`` and ``feature_names_in_`` they must have.
        X: A frame of any library, or an array or nested lists of numbers, whose columns are then
            called ``x0``, ``x1`` and so on. Cells may be missing.
        reset: Whether the estimator takes its columns from these rows.

    Raises:
        ValueError: If they are no such rows, or have other columns.
    """
    if not hasattr(X, "columns"):
        values = validate_data(
            estimator, X, reset=reset, dtype="numeric", ensure_all_finite="allow-nan"
        )
        return pd.DataFrame(values, columns=[f"x{number}" for number in range(values.shape[1])])
    validate_data(estimator, X, reset=reset, skip_check_array=True)
    return plain_frame(X)


def plain_frame(X: Any) -> pd.DataFrame:
    """Return a frame of any library as pandas' own, without an index.

    Raises:
        DataError: If it is no frame.
        ValueError: If it is empty.
    """
    frame = as_pandas(
        X.reset_index(drop=True) if isinstance(X, pd.DataFrame) else X,
        where="X",
    )
    for what, number in (("sample", len(frame)), ("feature", frame.shape[1])):
        if number == 0:
            raise ValueError(f"X has 0 {what}(s), while a minimum of 1 is required")
    return frame


def key_columns(
    key: Any, frame: pd.DataFrame, linkage: LinkageSettings
) -> Sequence[str] | dict[str, KeyKind]:
    """Return the names of the key columns, with their kinds where some are texts.

    Args:
        key: What the estimator was told: a column, several, or None for none.
        frame: The primary's.
        linkage: Whose metric says what keys are.

    Raises:
        ConfigError: If a column is not there.
    """
    if isinstance(key, Mapping):
        return dict(key)
    columns = list(frame.columns)
    chosen = [] if key is None else [key] if isinstance(key, str | int) else list(key)
    names = []
    for one in chosen:
        if isinstance(one, str) and one in columns:
            names.append(one)
        elif isinstance(one, int) and 0 <= one < len(columns):
            names.append(columns[one])
        else:
            raise ConfigError(f"key: X has no column {one!r}; it has {', '.join(columns[:20])}")
    spec = KeySpec(
        columns=tuple(names),
        metric=METRICS[linkage.metric],
        fields=None if linkage.fields is None else linkage.field_list(),
    )
    kinds = dict(spec.kinds)
    return kinds if "text" in kinds.values() else names


def primary_table(
    frame: pd.DataFrame, key: Sequence[str] | dict[str, KeyKind], *, exclude: Sequence[str]
) -> PartyTable:
    """Return the primary's table, without labels.

    Raises:
        DataError: As :func:`securevfl.data.from_frame`.
        ValueError: If no column is a feature.
    """
    if not set(frame.columns) - {*key, *exclude}:
        raise ValueError(
            f"X has {frame.shape[1]} feature(s), and they are all keys or excluded; the primary "
            f"needs one of its own"
        )
    return from_frame(frame, name=PRIMARY, key=key, exclude=exclude)


def partner_tables(
    secondaries: Any,
    key: Sequence[str] | dict[str, KeyKind],
    *,
    declared: bool,
    bounds: Any,
) -> list[PartyTable]:
    """Return the other parties' tables.

    Args:
        secondaries: A list, or a mapping by name, of frames, paths and tables. Frames and files
            have key columns of the same names as ``X``; a table says its own.
        key: These columns.
        declared: Whether a promise rests on it that features take nothing from the records.
        bounds: What the estimator was told of declared ranges.

    Raises:
        ConfigError: If it is none of these.
        DataError: If a table can't be used.
    """
    if hasattr(secondaries, "columns") or isinstance(secondaries, str | Path | PartyTable):
        raise ConfigError("secondaries: must be a list of tables, or tables by name; put it in []")
    named = dict(secondaries) if isinstance(secondaries, Mapping) else _names(list(secondaries))
    tables = []
    for name, source in named.items():
        if isinstance(source, PartyTable):
            tables.append(replace(source, name=name))
            continue
        if not key:
            raise ConfigError('key: must name the columns that parties link by, such as key=["id"]')
        own: Bounds | None = bounds.get(name) if _by_party(bounds) else bounds
        where = f"table {source} of {name!r}"
        frame = read_frame(Path(source), where=where) if isinstance(source, str | Path) else source
        settings = ColumnSettings(bounds=own, own_statistics=not declared)
        tables.append(from_frame(frame, name=name, key=key, columns=settings))
    return tables


def _names(sources: Sequence[Any]) -> dict[str, Any]:
    named = {
        one.name if isinstance(one, PartyTable) else f"secondary-{number}": one
        for number, one in enumerate(sources, 1)
    }
    if len(named) < len(sources):
        raise ConfigError("secondaries: two tables have one name")
    return named


def _by_party(bounds: Any) -> bool:
    return isinstance(bounds, Mapping)
