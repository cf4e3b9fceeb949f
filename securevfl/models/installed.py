"""Families that other installed packages bring along, by entry point.

A package names its family in ``pyproject.toml``::

    [project.entry-points."securevfl.families"]
    average = "their_package:AverageFamily"

A federation file that says ``family = "average"`` then imports that, and nothing else: a name
that no installed package registers leads to no import.
"""

import dataclasses
import inspect
import sys
import typing
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Final

from securevfl.core.errors import ConfigError, in_one_line
from securevfl.models.family import AnyFamily, Family, FamilySettings
from securevfl.models.learner import Step

GROUP: Final = "securevfl.families"
"""The entry points' group."""

_NEEDED: Final = sorted(name for name in vars(FamilySettings) if not name.startswith("_"))


def installed_families() -> Mapping[str, tuple[metadata.EntryPoint, ...]]:
    """Return what installed packages register, by name in alphabetical order; nothing is loaded."""
    return _registered_in(tuple((path, _last_change(path)) for path in sys.path))


@cache
def _registered_in(
    _places: tuple[tuple[str, int], ...],
) -> Mapping[str, tuple[metadata.EntryPoint, ...]]:
    """Look through all installed packages, once for each state of the folders they lie in."""
    found: dict[str, tuple[metadata.EntryPoint, ...]] = {}
    for entry in sorted(metadata.entry_points(group=GROUP), key=lambda one: one.name):
        found[entry.name] = (*found.get(entry.name, ()), entry)
    return found


def _last_change(path: str) -> int:
    try:
        return Path(path).stat().st_mtime_ns
    except OSError:
        return 0


def package_of(entry: metadata.EntryPoint) -> str:
    """Return the name of the installed package that an entry point belongs to."""
    return entry.dist.name if entry.dist is not None else "an unknown package"


@cache
def load_family(entry: metadata.EntryPoint) -> AnyFamily:
    """Import a family and check it.

    Raises:
        ConfigError: If it cannot be imported, or is no family; in one line, with the place.
    """
    where = (
        f"model.family: {entry.name!r}, {entry.value} of the installed package "
        f"{package_of(entry)!r}: "
    )
    try:
        family = made_of(entry.load())
    except ConfigError as error:
        raise ConfigError(f"{where}{error}") from None
    except Exception as error:
        raise ConfigError(
            f"{where}can't be loaded: {in_one_line(error)}; repair or uninstall the package"
        ) from error
    if family.name != entry.name:
        raise ConfigError(f"{where}calls itself {family.name!r}; the two names must be equal")
    return family


def made_of(found: object) -> AnyFamily:
    """Return an instance of a class that was found, if it is a family."""
    if not (isinstance(found, type) and issubclass(found, Family)):
        raise ConfigError(f"must be a subclass of securevfl.models.Family, got {found!r}")
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise ConfigError(f"does not say what these methods of a family do: {missing}")
    for attribute in ("name", "settings_class"):
        if not hasattr(found, attribute):
            raise ConfigError(f"has no {attribute}, which every family has")
    if not found.max_distance >= 0:
        raise ConfigError(f"max_distance must be at least 0, got {found.max_distance!r}")
    _check_settings(found.settings_class)
    _check_pretraining(found)
    family: AnyFamily = found()
    return family


def _check_settings(kind: object) -> None:
    """Refuse settings that the rest of the package could not read.

    Raises:
        ConfigError: Naming what is missing.
    """
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        raise ConfigError(f"settings_class must be a frozen dataclass, got {kind!r}")
    if not kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise ConfigError(f"settings_class must be a frozen dataclass, and {kind!r} is not frozen")
    fields = {field.name for field in dataclasses.fields(kind)}
    missing = [name for name in _NEEDED if name not in fields and not hasattr(kind, name)]
    if missing:
        raise ConfigError(
            f"its settings {kind.__name__} lack {', '.join(missing)}; "
            f"securevfl.models.FamilySettings says what each of them is"
        )
    # A hint that names nothing would only fail once a federation file is read.
    typing.get_type_hints(kind)


def _check_pretraining(family: type[AnyFamily]) -> None:
    unknown = sorted(set(family.pretraining) - set(typing.get_args(Step)))
    if unknown:
        known = ", ".join(map(repr, typing.get_args(Step)))
        raise ConfigError(f"pretraining must be steps of {known}; got {unknown[0]!r}")
    for method in ("build_learner", "load_pretrained"):
        if family.pretraining and getattr(family, method) is getattr(Family, method):
            raise ConfigError(f"names steps of pretraining, and has no {method}")
