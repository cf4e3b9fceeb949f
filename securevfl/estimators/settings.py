"""An estimator's parameters as the settings of a run."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from securevfl.config.base import BaseSettings
from securevfl.config.linkage import LinkageSettings
from securevfl.config.presets import PresetSettings, preset
from securevfl.config.sections import PredictionSettings, TrainingSettings
from securevfl.core.errors import ConfigError
from securevfl.core.settings import read_settings
from securevfl.core.task import Task
from securevfl.dp.privacy import Privacy
from securevfl.models.family import FamilySettings
from securevfl.models.fedhssl.settings import PretrainingSettings
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class EstimatorSettings:
    """What :func:`securevfl.simulate` takes beside tables."""

    model: FamilySettings
    training: TrainingSettings
    pretraining: PretrainingSettings
    privacy: Privacy
    linkage: LinkageSettings
    prediction: PredictionSettings
    base: Any
    """A name, or an estimator of scikit-learn."""

    @property
    def declared(self) -> bool:
        """Whether a promise rests on it that secondaries' features take nothing from records."""
        return self.privacy.encoder != "trained" and self.privacy.mechanism != "none"


def settings_of(params: Mapping[str, Any], *, task: Task, rows: int) -> EstimatorSettings:
    """Return the settings of a run.

    Args:
        params: The estimator's parameters, by name.
        task: What the label is.
        rows: Of training.

    Raises:
        ConfigError: If a setting is impossible.
    """
    base = _model_of(params["model"], _model_fields(params))
    if not isinstance(base, PresetSettings):
        base = PresetSettings(
            model=base,
            training=TrainingSettings(),
            pretraining=PretrainingSettings(),
            privacy=Privacy(mechanism="none"),
            base=BaseSettings().estimator,
        )
    linkage = params["linkage"]
    if isinstance(linkage, str):
        linkage = LinkageSettings(metric=linkage, protection="none")
    kinds = {
        "training": TrainingSettings,
        "pretraining": PretrainingSettings,
        "privacy": Privacy,
    }
    for name, kind in kinds.items():
        if not isinstance(params[name], kind | None):
            raise ConfigError(f"{name}: must be {kind.__name__}(...), got {params[name]!r:.60}")
    if not isinstance(linkage, LinkageSettings):
        raise ConfigError(f"linkage: must be a metric or LinkageSettings(...), got {linkage!r:.60}")
    epsilon = _plain(params["prediction_epsilon"])
    return EstimatorSettings(
        model=base.model,
        training=_training_of(params, params["training"] or base.training, task=task, rows=rows),
        pretraining=params["pretraining"] or base.pretraining,
        privacy=params["privacy"] or base.privacy,
        linkage=linkage,
        base=base.base if params["base"] is None else params["base"],
        prediction=read_settings(
            PredictionSettings,
            {} if epsilon is None else {"epsilon": epsilon},
            where="prediction",
        ),
    )


def _model_fields(params: Mapping[str, Any]) -> dict[str, Any]:
    fields = dict(params["model_settings"] or {})
    if params["neighbours"] is not None:
        fields["neighbours"] = params["neighbours"]
    return {name: _plain(value) for name, value in fields.items()}


def _model_of(model: Any, fields: Mapping[str, Any]) -> FamilySettings | PresetSettings:
    if isinstance(model, str):
        family, _, name = model.partition("-")
        if model in family_names() or not name:
            settings: FamilySettings = family_named(model).settings_from(fields)
            return settings
        return preset(family, name, **fields)
    if isinstance(model, PresetSettings):
        return dataclasses.replace(model, model=_with(model.model, fields))
    if isinstance(model, FamilySettings):
        return _with(model, fields)
    raise ConfigError(
        f"model: must be a family's name, its settings or a preset, got {type(model).__name__}"
    )


def _with(settings: FamilySettings, fields: Mapping[str, Any]) -> FamilySettings:
    changed: FamilySettings = family_of(settings).settings_from({**_given(settings), **fields})
    return changed


def _given(settings: Any) -> dict[str, Any]:
    fields = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    return {name: value for name, value in fields.items() if value is not None}


def _plain(value: Any) -> Any:
    """Return a number of NumPy's, as a search's grid may have it, as Python's own."""
    return value.item() if isinstance(value, np.generic) else value


def _training_of(
    params: Mapping[str, Any], base: TrainingSettings, *, task: Task, rows: int
) -> TrainingSettings:
    given = {name: _plain(params[name]) for name in _TRAINING if params[name] is not None}
    # scikit-learn holds rows out itself: of these, a run takes the one that it can't do without.
    tested = _plain(params["test_fraction"] or 1 / rows)
    fields = {"metric": _CHOOSES[task], **_given(base), **given, "test_fraction": tested}
    training = read_settings(TrainingSettings, fields, where="training")
    if training.validation_fraction * rows < 1:
        training = dataclasses.replace(training, validation_fraction=1 / rows)
    return training
