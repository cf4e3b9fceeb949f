"""Model families by the name that a federation file gives them."""

from collections.abc import Mapping
from types import MappingProxyType

from securevfl.core.errors import ConfigError
from securevfl.models.baselines.linked import (
    AvgSimFamily,
    ExactFamily,
    FeatureSimFamily,
    Top1SimFamily,
)
from securevfl.models.family import AnyFamily
from securevfl.models.fedhssl.family import (
    FedCSSLFamily,
    FedGSSLFamily,
    FedHSSLFamily,
    FedLocalSSLFamily,
    FedSplitNNFamily,
)
from securevfl.models.fedsim.family import FedSimFamily
from securevfl.models.fet.family import FeTFamily
from securevfl.models.installed import GROUP, installed_families, load_family, package_of

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

_ONE_PARTY = ("solo", "combine")
# Methods of comparisons that are no families, and whose names mean them alone.
_METHODS = (*_ONE_PARTY, "boosting", "fedcvt")


def family_names() -> tuple[str, ...]:
    """Return every name that a federation file may give: own families first, nothing is loaded."""
    return tuple(dict.fromkeys([*FAMILIES, *installed_families()]))


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
            f"model.family: {name!r} trains on one table and needs no federation; every run "
            f"reports it beside its own result. Available: {known}"
        )
    installed = installed_families().get(name, ()) if isinstance(name, str) else ()
    owners = [repr(package_of(entry)) for entry in installed]
    if not isinstance(name, str) or not (name in FAMILIES or installed):
        raise ConfigError(f"model.family: must be one of {known}; got {name!r}")
    if name in FAMILIES or name in _METHODS:
        owners.insert(0, "securevfl itself")
    if len(owners) > 1:
        raise ConfigError(
            f"model.family: {name!r} is registered by {' and by '.join(owners)} (entry points "
            f"{GROUP!r}); rename all but one, or uninstall"
        )
    return FAMILIES[name] if name in FAMILIES else load_family(installed[0])


def family_of(settings: object) -> AnyFamily:
    """Return the family that an instance of its settings belongs to.

    Of other packages' families, those are loaded that the package of ``settings`` brings along.

    Raises:
        ConfigError: If there is none.
    """
    kind = type(settings)
    for family in FAMILIES.values():
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
        f"model: must be one of {known}, or the settings of a family that an installed package "
        f"registers as an entry point of {GROUP!r}; got {kind.__name__}"
    )
