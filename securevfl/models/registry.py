"""Model families by name: built-in, registered here, of installed packages, of two modules.

A package names its family in ``pyproject.toml``::

    [project.entry-points."securevfl.families"]
    average = "their_package:AverageFamily"

A federation file with ``family = "average"`` then imports that class, and nothing else: a name that
no installed package registers imports nothing.
"""

import copy
import dataclasses
import functools
import inspect
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Final, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from securevfl.core import checks
from securevfl.core.errors import ConfigError, in_one_line
from securevfl.core.stages import load_parts
from securevfl.models import pairs
from securevfl.models.family import AnyFamily, Family, FamilySettings, Step
from securevfl.models.fedhssl import family as fedhssl
from securevfl.models.fedsim import FedSimFamily
from securevfl.models.fet.family import FeTFamily

GROUP: Final = "securevfl.families"
"""The entry points' group."""

_NEEDED: Final = sorted(name for name in vars(FamilySettings) if not name.startswith("_"))


def installed_families() -> Mapping[str, tuple[metadata.EntryPoint, ...]]:
    """Return the entry points of installed packages by family name, without loading them."""
    return _registered_in(tuple((path, _last_change(path)) for path in sys.path))


@functools.cache
def _registered_in(
    _places: tuple[tuple[str, int], ...],
) -> Mapping[str, tuple[metadata.EntryPoint, ...]]:
    """Search all installed packages, once per state of their folders."""
    entries: dict[str, tuple[metadata.EntryPoint, ...]] = {}
    for entry in sorted(metadata.entry_points(group=GROUP), key=lambda point: point.name):
        entries[entry.name] = (*entries.get(entry.name, ()), entry)
    return entries


def _last_change(path: str) -> int:
    try:
        return Path(path).stat().st_mtime_ns
    except OSError:
        return 0


def package_of(entry: metadata.EntryPoint) -> str:
    """Return the name of the installed package that an entry point belongs to."""
    return entry.dist.name if entry.dist is not None else "an unknown package"


@functools.cache
def load_family(entry: metadata.EntryPoint) -> AnyFamily:
    """Import a family and check it.

    Raises:
        ConfigError: If it cannot be imported or is not a family; one line, with the place.
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


def made_of(candidate: object) -> AnyFamily:
    """Return an instance of a family class.

    Raises:
        ConfigError: If it is not a family.
    """
    if not (isinstance(candidate, type) and issubclass(candidate, Family)):
        raise ConfigError(f"must be a subclass of securevfl.models.Family, got {candidate!r}")
    if inspect.isabstract(candidate):
        missing = ", ".join(sorted(candidate.__abstractmethods__))
        raise ConfigError(f"lacks these methods of a family: {missing}")
    for attribute in ("name", "settings_class"):
        if not hasattr(candidate, attribute):
            raise ConfigError(f"lacks {attribute}, which every family has")
    if not candidate.max_distance >= 0:
        raise ConfigError(f"max_distance must be at least 0, got {candidate.max_distance!r}")
    _check_settings(candidate.settings_class)
    _check_pretraining(candidate)
    family: AnyFamily = candidate()
    return family


def _check_settings(kind: object) -> None:
    """Refuse settings that the package cannot read.

    Raises:
        ConfigError: Naming the missing fields.
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
            f"securevfl.models.FamilySettings describes them"
        )
    # An unresolvable hint would only fail once a federation file is read.
    typing.get_type_hints(kind)


def _check_pretraining(family: type[AnyFamily]) -> None:
    unknown = sorted(set(family.pretraining) - set(typing.get_args(Step)))
    if unknown:
        known = ", ".join(map(repr, typing.get_args(Step)))
        raise ConfigError(f"pretraining must be steps of {known}; got {unknown[0]!r}")
    for method in ("build_learner", "load_pretrained"):
        if family.pretraining and getattr(family, method) is getattr(Family, method):
            raise ConfigError(f"names steps of pretraining, and has no {method}")


F = TypeVar("F", bound=Family[Any])

_OWN: tuple[AnyFamily, ...] = (
    FeTFamily(),
    FedSimFamily(),
    pairs.ExactFamily(),
    pairs.Top1SimFamily(),
    pairs.AvgSimFamily(),
    pairs.FeatureSimFamily(),
    fedhssl.FedHSSLFamily(),
    fedhssl.FedGSSLFamily(),
    fedhssl.FedCSSLFamily(),
    fedhssl.FedLocalSSLFamily(),
    fedhssl.FedSplitNNFamily(),
)

FAMILIES: Mapping[str, AnyFamily] = MappingProxyType(
    {
        **{family.name: family for family in _OWN},
        **{name: kind() for name, kind in load_parts("families").items()},
    }
)
"""The package's own families, with those of stages; others come by entry point."""

_REGISTERED: dict[str, AnyFamily] = {}
# Families registered in this process only.

_ONE_PARTY = ("alone", "solo", "combine")
# Methods of comparisons that are not families; their names are reserved.
_METHODS = (*_ONE_PARTY, "boosting", "boosting-links", "boosting-combine")


def family_names() -> tuple[str, ...]:
    """Return every family name that a federation file may give, built-in families first."""
    return tuple(dict.fromkeys([*FAMILIES, *_REGISTERED, *installed_families()]))


def is_built_in(family: AnyFamily) -> bool:
    """Return whether a family is built in, so that the package's tests cover it."""
    return FAMILIES.get(family.name) is family


def family_named(name: object) -> AnyFamily:
    """Return the family called ``name`` in a federation file.

    Raises:
        ConfigError: If there is no such family, it can't be loaded, or several packages register
            the name.
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
    """Register a custom family in this process, without a package.

    ``securevfl.simulate`` then accepts its settings, and federation files its name; so does
    ``securevfl.train``, whose processes import its module or script. Commands don't know it, and
    ``compare`` with several jobs needs an entry point. An earlier registration of the same name is
    replaced, so that a notebook cell may run again.

    Args:
        family: A subclass of :class:`Family`.

    Returns:
        The same class, so that this can be used as a decorator.

    Raises:
        ConfigError: If it is not a family, or its name belongs to a built-in or installed family or
            to a method of comparisons.
    """
    try:
        made = made_of(family)
    except ConfigError as error:
        raise ConfigError(f"models.register: {error}") from None
    if made.name in (*FAMILIES, *_ONE_PARTY, *_METHODS) or made.name in installed_families():
        raise ConfigError(f"models.register: the name {made.name!r} is taken; choose another")
    _REGISTERED[made.name] = made
    return family


def registration(family: AnyFamily) -> Callable[[], object] | None:
    """Return a function that registers a family in another process; None if not needed.

    It can be pickled if the family's classes and modules can be imported there.
    """
    if family not in _REGISTERED.values():
        return None
    made_by: Callable[[], object] | None = getattr(family, "made_by", None)
    return made_by or functools.partial(register, type(family))


def require_installed(family: AnyFamily, *, by: str) -> None:
    """Refuse a family that is registered in this process only.

    Args:
        family: The family.
        by: Name of the command that starts processes.

    Raises:
        ConfigError: If it is registered in this process only.
    """
    if family in _REGISTERED.values():
        raise ConfigError(
            f"model.family: {family.name!r} is registered in this process only, and {by} starts "
            f"others; put its class into an installed package whose pyproject.toml says under "
            f'[project.entry-points."{GROUP}"]: {family.name} = "MODULE:CLASS" '
            f"(docs/extending.md), or stay in this process (simulate, or compare with one job)"
        )


def family_of(settings: object) -> AnyFamily:
    """Return the family of an instance of its settings.

    Families of the package that defines ``settings`` are loaded.

    Raises:
        ConfigError: If there is no such family.
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


Half: TypeAlias = nn.Module | Callable[[int, int], nn.Module]
"""A module, or a function of its numbers of inputs and outputs that returns one."""


@dataclass(frozen=True, kw_only=True)
class SplitSettings:
    """The ``[model]`` table of a family that :func:`split_model` has made."""

    neighbours: int = 1
    """K, links of a row at every secondary."""

    width: int = 8
    """Numbers that a secondary's module returns for a row."""

    party_dropout: float = 0.0
    """Share of the secondaries left out of a training round."""

    keys_as_features: ClassVar[bool] = False
    average_positions_every: ClassVar[int] = 0

    @property
    def cut_shape(self) -> tuple[int, int]:
        """Every row becomes one vector."""
        return 1, self.width


def split_model(
    bottom: Half,
    top: Half,
    *,
    neighbours: int = 1,
    width: int = 8,
    party_dropout: float = 0.0,
    name: str = "split",
) -> SplitSettings:
    """Register two torch modules as a model family in this process, and return its settings.

    The modules are checked like every family: shapes are tried on two rows, and in a private run a
    bottom module that mixes rows is refused. ``securevfl.train`` accepts the settings too, if its
    processes can import the functions or modules from a file.

    Args:
        bottom: Every secondary's module, or a function of the numbers of inputs and outputs that
            returns it. Inputs are the features of a row's K links, nearest first, with zeros for
            absent links; outputs are ``width`` numbers.
        top: The primary's module, likewise: from its features followed by the ``width`` averaged
            numbers to the task's outputs.
        neighbours: K, links of a row at every secondary.
        width: Numbers that a secondary releases for a row.
        party_dropout: Share of the secondaries left out of a training round.
        name: The family's name; an earlier registration in this process is replaced.

    Returns:
        The ``model`` argument of ``securevfl.simulate`` or ``train``. Each party gets a copy of its
        module, with linear layers, 2-D convolutions and embeddings initialised from the run's seed.

    Raises:
        ConfigError: If the name is taken.
    """
    settings = _register_family(bottom, top, name)
    return settings(neighbours=neighbours, width=width, party_dropout=party_dropout)


def _register_family(bottom: Half, top: Half, name: str) -> type[SplitSettings]:
    """Register the family in this process, or in one that it has started."""

    class Settings(SplitSettings):
        """Settings class of this family alone, by which the family is looked up."""

    class Split(Family[SplitSettings]):
        """``split_model``'s family."""

        settings_class = Settings
        made_by = staticmethod(functools.partial(_register_family, bottom, top, name))

        def build_bottom(self, settings: SplitSettings, **sizes: Any) -> nn.Module:
            return _Bottom(
                _built(bottom, settings.neighbours * sizes["num_features"], settings.width)
            )

        def build_top(self, settings: SplitSettings, **sizes: Any) -> nn.Module:
            inputs = sizes["num_features"] + settings.width
            return _Top(_built(top, inputs, sizes["outputs"]))

    Split.name = name
    register(Split)
    return Settings


def _built(half: Half, inputs: int, outputs: int) -> nn.Module:
    return copy.deepcopy(half) if isinstance(half, nn.Module) else half(inputs, outputs)


class _Half(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.positions = nn.Identity()  # no positional encoding


class _Bottom(_Half):
    recordwise = False  # the vector depends on all linked records together

    def forward(self, features: Tensor, keys: Tensor, present: Tensor) -> Tensor:
        """Return (rows, 1, width)."""
        vector: Tensor = self.module((features * present.unsqueeze(-1)).flatten(1))
        return vector.unsqueeze(1)


class _Top(_Half):
    def forward(self, features: Tensor, keys: Tensor, aggregate: Tensor, links: None) -> Tensor:
        """Return (rows, outputs)."""
        outputs: Tensor = self.module(torch.cat([features, aggregate.flatten(1)], dim=1))
        return outputs
