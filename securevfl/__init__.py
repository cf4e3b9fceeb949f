"""Vertical federated learning on fuzzily linked tables.

Names are loaded on first use: the budget calculator must not wait for torch and CrypTen.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from securevfl.version import __version__

if TYPE_CHECKING:
    from securevfl import callbacks, data, dp, linkage, models
    from securevfl.config.encoder import EncoderSettings
    from securevfl.config.linkage import LinkageSettings
    from securevfl.config.presets import preset
    from securevfl.config.reading import read_federation
    from securevfl.config.sections import PredictionSettings, TrainingSettings
    from securevfl.core import progress
    from securevfl.core.errors import SecureVflError
    from securevfl.estimators.federated import FederatedClassifier, FederatedRegressor
    from securevfl.lab import datasets
    from securevfl.lab.audit.audit_report import audit
    from securevfl.lab.audit.settings import AuditSettings
    from securevfl.lab.contribution import Contribution, contribution
    from securevfl.lab.entry_points import compare, link, sweep
    from securevfl.lab.study import StudyOptions
    from securevfl.models.family import PretrainingSettings
    from securevfl.runtime.entry import simulate, train
    from securevfl.runtime.predictions import Predictions
    from securevfl.runtime.simulation import RunResult
    from securevfl.runtime.trained_run import features, predict

__all__ = [
    "AuditSettings",
    "Contribution",
    "EncoderSettings",
    "FederatedClassifier",
    "FederatedRegressor",
    "LinkageSettings",
    "PredictionSettings",
    "Predictions",
    "PretrainingSettings",
    "RunResult",
    "SecureVflError",
    "StudyOptions",
    "TrainingSettings",
    "__version__",
    "audit",
    "callbacks",
    "compare",
    "contribution",
    "data",
    "datasets",
    "dp",
    "features",
    "link",
    "linkage",
    "models",
    "predict",
    "preset",
    "progress",
    "read_federation",
    "simulate",
    "sweep",
    "train",
]

_HOME = {
    "AuditSettings": "securevfl.lab.audit.settings",
    "Contribution": "securevfl.lab.contribution",
    "FederatedClassifier": "securevfl.estimators.federated",
    "FederatedRegressor": "securevfl.estimators.federated",
    "EncoderSettings": "securevfl.config.encoder",
    "LinkageSettings": "securevfl.config.linkage",
    "PredictionSettings": "securevfl.config.sections",
    "Predictions": "securevfl.runtime.predictions",
    "PretrainingSettings": "securevfl.models.family",
    "RunResult": "securevfl.runtime.simulation",
    "SecureVflError": "securevfl.core.errors",
    "StudyOptions": "securevfl.lab.study",
    "TrainingSettings": "securevfl.config.sections",
    "audit": "securevfl.lab.audit.audit_report",
    "compare": "securevfl.lab.entry_points",
    "contribution": "securevfl.lab.contribution",
    "features": "securevfl.runtime.trained_run",
    "link": "securevfl.lab.entry_points",
    "predict": "securevfl.runtime.trained_run",
    "preset": "securevfl.config.presets",
    "read_federation": "securevfl.config.reading",
    "simulate": "securevfl.runtime.entry",
    "sweep": "securevfl.lab.entry_points",
    "train": "securevfl.runtime.entry",
}
_MODULES = {
    "callbacks": "securevfl.callbacks",
    "data": "securevfl.data",
    "datasets": "securevfl.lab.datasets",
    "dp": "securevfl.dp",
    "linkage": "securevfl.linkage",
    "models": "securevfl.models",
    "progress": "securevfl.core.progress",
}


def __getattr__(name: str) -> object:
    """Import a public name from its home module on first use."""
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name not in _HOME:
        raise AttributeError(f"module 'securevfl' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    """Name everything public, loaded yet or not."""
    return __all__
