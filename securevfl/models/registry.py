"""Model families by the name that a federation file gives them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from securevfl.core import checks
from securevfl.core.errors import ConfigError
from securevfl.models.baselines.linked import (
    AvgSimFamily,
    ExactFamily,
    FeatureSimFamily,
    Top1SimFamily,
)
from securevfl.models.family import AnyFamily, Family
from securevfl.models.fedhssl.family import (
    FedCSSLFamily,
    FedGSSLFamily,
    FedHSSLFamily,
    FedLocalSSLFamily,
    FedSplitNNFamily,
)
from securevfl.models.fedsim.family import FedSimFamily
from securevfl.models.fet.family import FeTFamily
from securevfl.models.installed import (
    GROUP,
    installed_families,
    load_family,
    made_of,
    package_of,
)

F = TypeVar("F", bound=Family[Any])

_OWN: tuple[AnyFamily, ...] = (
    FeTFamily(),
    FedSimFamily(),
    ExactFamily(),
    Top1SimFamily(),
    AvgSimFamily(),
    FeatureSimFamily(),
    FedHSSLFamily(),
    FedGSSLFamily(),
    FedCSSLFamily(),
    FedLocalSSLFamily(),
    FedSplitNNFamily(),
)

FAMILIES: Mapping[str, AnyFamily] = MappingProxyType({family.name: family for family in _OWN})
"""The package's own families; others come by entry point, see :mod:`securevfl.models.installed`."""

_REGISTERED: dict[str, AnyFamily] = {}
# Families of this process alone.

_ONE_PARTY = ("alone", "solo", "combine")
# Methods of comparisons that are no families, and whose names mean them alone.
_METHODS = (*_ONE_PARTY, "boosting", "boosting-combine", "fedcvt")


def family_names() -> tuple[str, ...]:
    """Return every name that a federation file may give: own families first, nothing is loaded."""
    return tuple(dict.fromkeys([*FAMILIES, *_REGISTERED, *installed_families()]))


def is_built_in(family: AnyFamily) -> bool:
    """Return whether a family is the package's own, whose models the tests hold to their word."""
    return FAMILIES.get(family.name) is family


def family_named(name: object) -> AnyFamily:
    """Return the family called ``name`` in a federation file.

    Raises:
        ConfigError: If there is none of that name, the message lists those there are; or if it is
            another package's and can't be loaded, or several have it.
    """
    known = ", ".join(map(repr, family_names()))
    if name is None:
        raise ConfigError(f"model.family: is missing; available: {known}")
    if name in _ONE_PARTY:
        raise ConfigError(
            f"model.family: {name!r} trains on one table and needs no federation; `securevfl "
            f"compare` trains it. Available: {known}"
        )
    installed = installed_families().get(name, ()) if isinstance(name, str) else ()
    owners = [repr(package_of(entry)) for entry in installed]
    if isinstance(name, str) and name in _REGISTERED and not installed:
        return _REGISTERED[name]
    if not isinstance(name, str) or not (name in FAMILIES or installed):
        near = checks.did_you_mean(name, family_names())
        raise ConfigError(f"model.family: must be one of {known}; got {name!r}{near}")
    if name in FAMILIES or name in _METHODS:
        owners.insert(0, "securevfl itself")
    if len(owners) > 1:
        raise ConfigError(
            f"model.family: {name!r} is registered by {' and by '.join(owners)} (entry points "
            f"{GROUP!r}); rename all but one, or uninstall"
        )
    return FAMILIES[name] if name in FAMILIES else load_family(installed[0])


def register(family: type[F]) -> type[F]:
    """Let this process know a family of your own, without a package of your own.

    ``securevfl.simulate`` then takes its settings, and federation files its name. Parties' and
    workers' processes don't know it: ``train`` and ``compare`` need an entry point. A family of the
    same name that was registered before is replaced, as a notebook does whose cell runs again.

    Args:
        family: A subclass of :class:`Family`.

    Returns:
        The same class: this may be its decorator.

    Raises:
        ConfigError: If it is no family, or its name is that of the package's own, of a method of
            comparisons or of an installed one.
    """
    try:
        made = made_of(family)
    except ConfigError as error:
        raise ConfigError(f"models.register: {error}") from None
    if made.name in (*FAMILIES, *_ONE_PARTY, *_METHODS) or made.name in installed_families():
        raise ConfigError(f"models.register: the name {made.name!r} is taken; choose another")
    _REGISTERED[made.name] = made
    return family


def require_installed(family: AnyFamily, *, by: str) -> None:
    """Refuse a family that other processes don't know.

    Args:
        family: The family.
        by: What starts processes.

    Raises:
        ConfigError: If it is registered in this process alone.
    """
    if family in _REGISTERED.values():
        raise ConfigError(
            f"model.family: {family.name!r} is registered in this process alone, and {by} starts "
            f"others; make it an entry point of {GROUP!r} (docs/extending.md), or stay in this "
            f"process (simulate, or compare with one job)"
        )


def family_of(settings: object) -> AnyFamily:
    """Return the family that an instance of its settings belongs to.

    Of other packages' families, those are loaded that the package of ``settings`` brings along.

    Raises:
        ConfigError: If there is none.
    """
    kind = type(settings)
    for family in (*FAMILIES.values(), *_REGISTERED.values()):
        if kind is family.settings_class:
            return family
    package = kind.__module__.partition(".")[0]
    for entries in installed_families().values():
        for entry in entries:
            if entry.module.partition(".")[0] == package:
                family = load_family(entry)
                if kind is family.settings_class:
                    return family
    known = ", ".join(family.settings_class.__name__ for family in FAMILIES.values())
    raise ConfigError(
        f"model: must be one of {known}, or the settings of a family that "
        f"securevfl.models.register was given, or that an installed package registers as an entry "
        f"point of {GROUP!r}; got {kind.__name__}"
    )
