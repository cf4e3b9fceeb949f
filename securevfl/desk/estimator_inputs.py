"""Inputs of the scikit-learn estimators, as a run's settings and parties' tables."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
from sklearn.utils.validation import validate_data

from securevfl.config.linkage import LinkageSettings
from securevfl.config.presets import PresetSettings, preset
from securevfl.config.reading import require_own_fields
from securevfl.config.sections import BaseSettings, TrainingSettings
from securevfl.core.conventions import Task
from securevfl.core.errors import ConfigError
from securevfl.core.settings import read_settings
from securevfl.data.frames import as_pandas, from_frame
from securevfl.data.keys_and_labels import KeyKind
from securevfl.data.scaling import Bounds, ColumnSettings
from securevfl.data.sources.read import read_frame
from securevfl.data.tables import PartyTable
from securevfl.dp.privacy import Privacy
from securevfl.linkage.metrics.metric import KeySpec
from securevfl.linkage.stage.linkage_parts import METRICS
from securevfl.models.family import FamilySettings
from securevfl.models.pretraining import PretrainingSettings
from securevfl.models.registry import family_named, family_names, family_of

_TRAINING: Final = (
    "epochs",
    "batch_size",
    "learning_rate",
    "patience",
    "validation_fraction",
    "metric",
)
"""Parameters of an estimator that are fields of ``[training]``, None by default."""

# Defined for any rows, where few rows are held out and each class may be rare.
_CHOOSES: Final[Mapping[Task, str]] = {
    "regression": "rmse",
    "binary": "log_loss",
    "multiclass": "log_loss",
}


def settings_of(params: Mapping[str, Any], *, task: Task, rows: int) -> PresetSettings:
    """Return a run's model and settings from an estimator's parameters.

    Args:
        params: The estimator's parameters, by name.
        task: Kind of label.
        rows: Number of training rows.

    Raises:
        ConfigError: If a setting is impossible.
    """
    fields = dict(params["model_settings"] or {})
    if params["neighbours"] is not None:
        fields["neighbours"] = params["neighbours"]
    base = _model_of(params["model"], {name: plain_value(value) for name, value in fields.items()})
    if not isinstance(base, PresetSettings):
        base = PresetSettings(
            model=base,
            training=TrainingSettings(),
            pretraining=PretrainingSettings(),
            privacy=Privacy(mechanism="none"),
            base=BaseSettings().estimator,
        )
    kinds = {
        "training": TrainingSettings,
        "pretraining": PretrainingSettings,
        "privacy": Privacy,
    }
    for name, kind in kinds.items():
        if not isinstance(params[name], kind | None):
            raise ConfigError(f"{name}: must be {kind.__name__}(...), got {params[name]!r:.60}")
    return replace(
        base,
        training=_training_of(params, params["training"] or base.training, task=task, rows=rows),
        pretraining=params["pretraining"] or base.pretraining,
        privacy=params["privacy"] or base.privacy,
    )


def linkage_of(linkage: Any) -> LinkageSettings:
    """Return linkage settings from a metric's name or from settings.

    Raises:
        ConfigError: If it is neither.
    """
    if isinstance(linkage, str):
        return LinkageSettings(metric=linkage, protection="none")
    if not isinstance(linkage, LinkageSettings):
        raise ConfigError(f"linkage: must be a metric or LinkageSettings(...), got {linkage!r:.60}")
    return linkage


def _model_of(model: Any, fields: Mapping[str, Any]) -> FamilySettings | PresetSettings:
    if isinstance(model, str):
        family, _, name = model.partition("-")
        if model in family_names() or not name:
            require_own_fields(family_named(model), fields)
            settings: FamilySettings = family_named(model).settings_from(fields)
            return settings
        return preset(family, name, **fields)
    if isinstance(model, PresetSettings):
        return replace(model, model=_with(model.model, fields))
    if isinstance(model, FamilySettings):
        return _with(model, fields)
    raise ConfigError(
        f"model: must be a family's name, its settings or a preset, got {type(model).__name__}"
    )


def _with(settings: FamilySettings, fields: Mapping[str, Any]) -> FamilySettings:
    require_own_fields(family_of(settings), fields)
    changed: FamilySettings = family_of(settings).settings_from(
        {**_given_settings(settings), **fields}
    )
    return changed


def _given_settings(settings: Any) -> dict[str, Any]:
    fields = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    return {name: value for name, value in fields.items() if value is not None}


def plain_value(value: Any) -> Any:
    """Return a NumPy number as a Python number; a search's grid may hold such."""
    return value.item() if isinstance(value, np.generic) else value


def _training_of(
    params: Mapping[str, Any], base: TrainingSettings, *, task: Task, rows: int
) -> TrainingSettings:
    given = {name: plain_value(params[name]) for name in _TRAINING if params[name] is not None}
    # scikit-learn holds rows out itself: of these, a run takes the one that it can't do without.
    tested = plain_value(params["test_fraction"] or 1 / rows)
    fields = {"metric": _CHOOSES[task], **_given_settings(base), **given, "test_fraction": tested}
    training = read_settings(TrainingSettings, fields, where="training")
    if training.validation_fraction * rows < 1:
        training = replace(training, validation_fraction=1 / rows)
    return training


PRIMARY: Final = "primary"
"""Name of the party whose rows ``X`` has."""


def frame_of(estimator: Any, X: Any, *, reset: bool) -> pd.DataFrame:
    """Return the rows of ``X``, checked as scikit-learn checks them.

    Args:
        estimator: Estimator with the required ``n_features_in_`` and ``feature_names_in_``.
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
        key: Key parameter of the estimator: a column, several, or None.
        frame: Rows of the primary.
        linkage: Settings of linkage, whose metric decides the kinds of keys.

    Raises:
        ConfigError: If a column is not there.
    """
    if isinstance(key, Mapping):
        return dict(key)
    columns = list(frame.columns)
    chosen = [] if key is None else [key] if isinstance(key, str | int) else list(key)
    names = []
    for choice in chosen:
        if isinstance(choice, str) and choice in columns:
            names.append(choice)
        elif isinstance(choice, int) and 0 <= choice < len(columns):
            names.append(columns[choice])
        else:
            raise ConfigError(f"key: X has no column {choice!r}; it has {', '.join(columns[:20])}")
    spec = KeySpec(
        columns=tuple(names),
        metric=METRICS[linkage.metric],
        fields=None if linkage.fields is None else linkage.field_list(),
    )
    kinds = dict(spec.kinds)
    return kinds if "text" in kinds.values() else names


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
        key: Key columns of ``X``.
        declared: Whether a promise requires features that do not depend on the records.
        bounds: Declared ranges, as the estimator's parameter.

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
        own: Bounds | None = bounds.get(name) if isinstance(bounds, Mapping) else bounds
        where = f"table {source} of {name!r}"
        frame = read_frame(Path(source), where=where) if isinstance(source, str | Path) else source
        settings = ColumnSettings(bounds=own, own_statistics=not declared)
        tables.append(from_frame(frame, name=name, key=key, columns=settings))
    return tables


def _names(sources: Sequence[Any]) -> dict[str, Any]:
    named = {
        source.name if isinstance(source, PartyTable) else f"secondary-{number}": source
        for number, source in enumerate(sources, 1)
    }
    if len(named) < len(sources):
        raise ConfigError("secondaries: two tables have one name")
    return named
