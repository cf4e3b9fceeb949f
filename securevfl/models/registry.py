"""Model families by the name that a federation file gives them: an explicit table."""

from collections.abc import Mapping
from types import MappingProxyType

from securevfl.core.errors import ConfigError
from securevfl.models.baselines.linked import AVGSIM, EXACT, FEATURESIM, TOP1SIM
from securevfl.models.family import Family
from securevfl.models.fedhssl.family import FEDHSSL_FAMILIES
from securevfl.models.fedsim.family import FEDSIM
from securevfl.models.fet.family import FET

__all__ = ["FAMILIES", "Family", "family_named"]

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.name: family
        for family in (FET, FEDSIM, EXACT, TOP1SIM, AVGSIM, FEATURESIM, *FEDHSSL_FAMILIES)
    }
)
"""Every family that can be trained; a new one is one folder and one line here."""

_ONE_PARTY = ("solo", "combine")


def family_named(name: object) -> Family:
    """Return the family called ``name`` in a federation file.

    Raises:
        ConfigError: If there is none of that name; the message lists those there are.
    """
    known = ", ".join(map(repr, FAMILIES))
    if name is None:
        raise ConfigError(f"model.family: is missing; available: {known}")
    if name in _ONE_PARTY:
        raise ConfigError(
            f"model.family: {name!r} trains on one table and needs no federation; every run "
            f"reports it beside its own result. Available: {known}"
        )
    if not isinstance(name, str) or name not in FAMILIES:
        raise ConfigError(f"model.family: must be one of {known}; got {name!r}")
    return FAMILIES[name]
