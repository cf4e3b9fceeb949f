"""Manifests of the optional parts of a run, one for each folder of ``securevfl.stages``.

The ``STAGE`` of a folder names what it adds as ``module:object``. A process loads the parts that
its run has, and no others.
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
    """The manifest of a stage; a value is a ``module:object`` of the stage's own folder."""

    metrics: Mapping[str, str] = field(default_factory=dict)
    """Metrics of keys (:class:`~securevfl.linkage.metrics.metric.Metric`) by name."""

    protections: Mapping[str, str] = field(default_factory=dict)
    """Protections of linkage by name (:mod:`~securevfl.linkage.protections.protection`)."""

    families: Mapping[str, str] = field(default_factory=dict)
    """Model families by name (:class:`~securevfl.models.family.Family`)."""

    sources: Mapping[str, str] = field(default_factory=dict)
    """Readers of tables by kind of source."""

    policy: str | None = None
    """Rules and disclosure (:class:`~securevfl.config.stage_policy.StagePolicy`); None for none."""

    run: str | None = None
    """Part of a run (:class:`~securevfl.federation.stage.RunStage`), where the policy applies."""

    session: str | None = None
    """Function that runs a party's session in place of a run; None for a stage without one."""


@cache
def stages() -> Mapping[str, Stage]:
    """Return the manifest of every stage, by the name of its folder."""
    names = sorted(
        module.name for module in pkgutil.iter_modules(importlib.import_module(_FOLDER).__path__)
    )
    folders = {name: importlib.import_module(f"{_FOLDER}.{name}") for name in names}
    return {name: getattr(folder, "STAGE", Stage()) for name, folder in folders.items()}


def load_part(stage: str, reference: str) -> Any:
    """Return what a manifest's ``module:object`` names."""
    module, name = reference.split(":")
    return getattr(importlib.import_module(f"{_FOLDER}.{stage}.{module}"), name)


def part_names(kind: str) -> set[str]:
    """Return the names of all parts of one kind, such as ``"families"``, without loading any."""
    return {name for manifest in stages().values() for name in getattr(manifest, kind)}


def load_session() -> Any:
    """Return the function that runs a party's session in place of a run."""
    sessions = {name: manifest.session for name, manifest in stages().items()}
    return next(load_part(name, session) for name, session in sessions.items() if session)


def load_parts(kind: str) -> dict[str, Any]:
    """Return all parts of one kind, such as ``"metrics"``, by their names."""
    return {
        name: load_part(stage, reference)
        for stage, manifest in stages().items()
        for name, reference in getattr(manifest, kind).items()
    }
