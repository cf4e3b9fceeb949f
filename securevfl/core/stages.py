"""Manifests of a run's optional parts, one for each folder of ``securevfl.stages``.

A folder's ``STAGE`` names its additions as ``module:object``. A process loads only the parts that
its run uses.
"""

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

_FOLDER: Final = "securevfl.stages"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The manifest of a stage; a value is a ``module:object`` in the stage's folder."""

    metrics: Mapping[str, str] = field(default_factory=dict)
    """Metrics of keys (:class:`~securevfl.linkage.metrics.metric.Metric`) by name."""

    protections: Mapping[str, str] = field(default_factory=dict)
    """Protections of linkage by name (:mod:`~securevfl.linkage.protections.protection`)."""

    families: Mapping[str, str] = field(default_factory=dict)
    """Model families by name (:class:`~securevfl.models.family.Family`)."""

    sources: Mapping[str, str] = field(default_factory=dict)
    """Readers of tables by kind of source."""

    run: str | None = None
    """Part of a run between linking and the first round; None for a stage without one."""


@cache
def stages() -> Mapping[str, Stage]:
    """Return the manifest of every stage, by the name of its folder."""
    names = sorted(
        module.name for module in pkgutil.iter_modules(importlib.import_module(_FOLDER).__path__)
    )
    return {name: importlib.import_module(f"{_FOLDER}.{name}").STAGE for name in names}


def load_part(stage: str, reference: str) -> Any:
    """Return the object that a manifest's ``module:object`` names."""
    module, name = reference.split(":")
    return getattr(importlib.import_module(f"{_FOLDER}.{stage}.{module}"), name)


def load_parts(kind: str) -> dict[str, Any]:
    """Return all parts of one kind, such as ``"metrics"``, by their names."""
    return {
        name: load_part(stage, reference)
        for stage, manifest in stages().items()
        for name, reference in getattr(manifest, kind).items()
    }
