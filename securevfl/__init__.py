"""Vertical federated learning on fuzzily linked tables.

Names are loaded on first use: the budget calculator must not wait for torch and CrypTen.
"""

from typing import TYPE_CHECKING

from securevfl.core.stages import on_first_use
from securevfl.version import __version__

if TYPE_CHECKING:
    from securevfl import callbacks, data, dp, linkage, models, mpc, testing
    from securevfl.config.encoder import EncoderSettings
    from securevfl.config.linkage import LinkageSettings
    from securevfl.config.presets import preset
    from securevfl.config.reading import read_federation
    from securevfl.config.sections import (
        MpcSettings,
        PredictionSettings,
        RuntimeSettings,
        TrainingSettings,
    )
    from securevfl.core import progress
    from securevfl.core.errors import SecureVflError
    from securevfl.desk.estimators import FederatedClassifier, FederatedRegressor
    from securevfl.lab import datasets
    from securevfl.lab.audit.audit_report import audit
    from securevfl.lab.audit.audit_statistics import AuditSettings
    from securevfl.lab.comparison import compare
    from securevfl.lab.contribution import Contribution, contribution
    from securevfl.lab.links_alone import link
    from securevfl.lab.one_run import StudyOptions
    from securevfl.lab.sweep import sweep
    from securevfl.models.family import PretrainingSettings
    from securevfl.runtime.entry import simulate, train
    from securevfl.runtime.predictions import Predictions
    from securevfl.runtime.simulation import RunResult
    from securevfl.runtime.trained_run import features, predict
    from securevfl.stages.programs.scripts import ThisParty, party_program

__all__ = [
    "AuditSettings",
    "Contribution",
    "EncoderSettings",
    "FederatedClassifier",
    "FederatedRegressor",
    "LinkageSettings",
    "MpcSettings",
    "PredictionSettings",
    "Predictions",
    "PretrainingSettings",
    "RunResult",
    "RuntimeSettings",
    "SecureVflError",
    "StudyOptions",
    "ThisParty",
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
    "mpc",
    "party_program",
    "predict",
    "preset",
    "progress",
    "read_federation",
    "simulate",
    "sweep",
    "testing",
    "train",
]

__getattr__, __dir__ = on_first_use(__name__, __file__, __all__)
