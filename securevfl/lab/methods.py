"""The ``[methods.NAME]`` tables: settings of one method of a comparison.

Rows, tables, the budget and K are equal for all methods. How links are chosen and how encoders are
made goes with a family, though: what one cannot take is changed for it, and said.

A method is a family of the registry, or one that trains in one place (:data:`IN_ONE_PLACE`).
It gets the federation file with its own family in place of the file's, and with the settings of
its table on top. Fields of ``[training]`` and of the family's settings stand side by side there;
those of ``[pretraining]`` have a table of their own, ``[methods.NAME.pretraining]``.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final

from securevfl.config import presets
from securevfl.config.federation import FederationConfig
from securevfl.config.reading import Findings, read_sections, register_section, require_own_fields
from securevfl.config.sections import TrainingSettings
from securevfl.core import checks
from securevfl.core.errors import ConfigError
from securevfl.core.formatting import toml_value
from securevfl.core.settings import read_settings
from securevfl.dp.regime import REGIMES
from securevfl.models.alone.margins import BaselineConfig
from securevfl.models.family import Preset
from securevfl.models.registry import family_named, family_names


def adapt_to_family(source: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return a method's federation file with what its family can take, and what was changed.

    Args:
        source: The file as the method sees it.

    Raises:
        ConfigError: If its ``[model]`` table is wrong.
    """
    result, notes = dict(source), []
    model, _ = presets.without_top(presets.expand_preset(source)["model"])
    family = family_named(model.pop("family", None))
    require_own_fields(family, model)
    settings = family.settings_from(model)
    regime = REGIMES.get(source["privacy"].get("encoder"))
    frozen = regime is not None and not regime.learns
    pooled = frozen and family.pools_records(settings, frozen=frozen)
    linkage = source["linkage"]
    if linkage.get("choose") == "records" and (not pooled or family.needs_similarities(settings)):
        result["linkage"] = {**linkage, "choose": "rows"}
        notes.append('linkage.choose = "rows", as it does not pool records')
    if "encoder" in source and not pooled:
        del result["encoder"]
        notes.append("no [encoder], which pools records")
    return result, tuple(notes)


@dataclass(frozen=True, kw_only=True, slots=True)
class BoostingConfig:
    """Trees and how they are grown."""

    iterations: checks.Times = 5000
    """Rounds at most, one tree a class each. Validation rows end them earlier."""

    learning_rate: checks.Positive = 0.1
    """Weight of a tree."""

    leaves: tuple[Annotated[int, partial(checks.within, 2, checks.MOST_TIMES)], ...] = (31, 63)
    """Leaves of a tree, at most; validation rows choose."""

    patience: checks.Times = 20
    """Rounds without a better validation loss."""

    smallest_leaf: checks.Count = 5
    """Rows of a leaf, at least."""

    def __post_init__(self) -> None:
        checks.within(1, checks.MOST_LAYERS, numbers_of_leaves=len(self.leaves))
        checks.require_limits(self)


Settings = BaselineConfig | BoostingConfig

_SETTINGS: Final[Mapping[str, type[Settings]]] = {
    "alone": BaselineConfig,
    "solo": BaselineConfig,
    "combine": BaselineConfig,
    "boosting": BoostingConfig,
    "boosting-links": BoostingConfig,
    "boosting-combine": BoostingConfig,
}

IN_ONE_PLACE: Final = tuple(_SETTINGS)
"""Methods that train with all that they need in one place, and need no federation."""

JOINED: Final = ("combine", "boosting-combine")
"""Those of them that join the tables by the true match of every row."""

ALONE: Final = ("alone", "solo", "boosting")
"""Those of them that read the primary's table and no other."""

_SHARED: Final = ("neighbours", "keys_as_features", "hidden", "dropout", "party_dropout")
"""Fields of ``[model]`` that mean the same in every family that has them."""

_INPUTS: Final = ("neighbours", "keys_as_features")
"""Fields of ``[model]`` that are the file's for every method: links and inputs are equal."""

_COMMON: Final = (
    "validation_fraction",
    "test_fraction",
    "split",
    "split_column",
    "labelled_rows",
    "metric",
    "keys_as_features",
)
"""Fields that no method may have for itself: methods are compared on equal rows and inputs, and
by one metric."""


LENGTH: Final = ("epochs", "batch_size", "patience")
"""Fields of ``[training]`` that are the file's, and not a preset's: equal work for all methods."""


def known_methods(source: Mapping[str, Any]) -> tuple[str, ...]:
    """Return every name that a comparison of this federation file understands."""
    own = (*IN_ONE_PLACE, *family_names(), *presets.methods_with_presets())
    return tuple(dict.fromkeys([*own, *source.get("methods", {})]))


def method_family(source: Mapping[str, Any], name: str) -> str:
    """Return the family of a method: what its table says, its preset's, or its own name.

    Raises:
        ConfigError: If no family, baseline or table has that name; those there are are listed.
    """
    table = _table(source, name)
    meant = presets.methods_with_presets().get(name, {})
    family = table.get("family", meant.get("family", name))
    if meant and family != meant["family"]:
        raise ConfigError(f"methods.{name}.family: {name!r} can't be {family!r}; rename it")
    trainable = {*IN_ONE_PLACE, *family_names()}
    if name in trainable:
        if family != name:
            raise ConfigError(f"methods.{name}.family: {name!r} can't be {family!r}; rename it")
    else:
        checks.plain_name(**{f"methods.{name}": name})
    if family not in trainable:
        known = known_methods(source)
        raise ConfigError(
            f"method {name!r}: is neither a family nor a [methods.NAME] table with "
            f"family = one of them; there are {', '.join(map(repr, known))}"
            f"{checks.did_you_mean(family, known)}"
        )
    return str(family)


def _method_source(source: Mapping[str, Any], name: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the federation file as one method sees it, and what of it is left out.

    A family other than the file's own takes from ``[model]`` what means the same in both. A preset
    of its table comes before what the file says, but for what is equal for all methods, and for how
    long they train.

    Args:
        source: The parsed federation file.
        name: The method.

    Raises:
        ConfigError: If there is no such method, or its table sets what all must share.
    """
    family = method_family(source, name)
    own = _settings(source, name)
    pretraining = own.pop("pretraining", {})
    for field in _COMMON:
        if field in own:
            section = "model" if field == "keys_as_features" else "training"
            raise ConfigError(
                f"methods.{name}.{field}: must be the same for all methods; set {section}.{field}"
            )
    result = {key: value for key, value in source.items() if key != "methods"}
    if family in IN_ONE_PLACE:
        return result, ()
    preset = own.pop("preset", None)
    inherited, notes = _inherited_settings(source["model"], family)
    training_fields = {field.name for field in dataclasses.fields(TrainingSettings)}
    training = source.get("training", {})
    wider = source.get("pretraining", {})
    if preset is not None:
        chosen = presets.preset_named(family_named(family), preset)
        inherited.pop("preset", None)
        inherited |= {key: value for key, value in chosen.model.items() if key not in _INPUTS}
        training = training | {
            k: v for k, v in chosen.training.items() if k not in (*_COMMON, *LENGTH)
        }
        notes = (*notes, *_preset_notes(source, chosen, own))
        wider = {**wider, **presets.pretraining_of(chosen, {**wider, **pretraining})}
        result["privacy"] = presets.privacy_of(chosen, source["privacy"])
        # What a file chooses as a base for its own family is not meant for a paper's protocol.
        result["base"] = presets.base_of(chosen, {})
    result["model"] = {
        **inherited,
        **{key: value for key, value in own.items() if key not in training_fields},
        "family": family,
    }
    if wider or pretraining:
        result["pretraining"] = {**wider, **pretraining}
    result["training"] = {
        **training,
        **{key: value for key, value in own.items() if key in training_fields},
    }
    return result, notes


def _preset_notes(
    source: Mapping[str, Any], chosen: Preset, own: Mapping[str, Any]
) -> Iterator[str]:
    """Yield a preset's changes of the file, and the settings that stay the file's."""
    changed = {
        "model": {k: v for k, v in chosen.model.items() if k not in _INPUTS},
        "training": {k: v for k, v in chosen.training.items() if k not in (*_COMMON, *LENGTH)},
        "base": {"estimator": chosen.base},
    }
    for section, fields in changed.items():
        written = source.get(section, {})
        differing = [
            f"{name} = {toml_value(value)}"
            for name, value in fields.items()
            if name not in own and written.get(name) != value
        ]
        if differing:
            yield f"[{section}] {', '.join(differing)} by its preset"
    published = [
        f"{name} = {chosen.training[name]}"
        for name in LENGTH
        if name in chosen.training
        and name not in own
        and source.get("training", {}).get(name) != chosen.training[name]
    ]
    if published:
        yield f"not the published {', '.join(published)}: the file's, unless its table has them"


def as_published_source(source: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return a federation file in which methods by preset train for as long as published.

    Args:
        source: The parsed federation file.
        names: The methods.
    """
    methods = dict(source.get("methods", {}))
    for name in names:
        called = _settings(source, name).get("preset")
        if called is not None:
            training = presets.preset_named(
                family_named(method_family(source, name)), called
            ).training
            length = {field: training[field] for field in LENGTH if field in training}
            methods[name] = {**length, **methods.get(name, {})}
    return {**source, "methods": methods}


def baseline_settings(source: Mapping[str, Any], name: str) -> Settings:
    """Return how a method that trains in one place is trained.

    Raises:
        ConfigError: For an unknown field or an impossible value.
    """
    kind = _SETTINGS[method_family(source, name)]
    return read_settings(kind, _settings(source, name), where=f"methods.{name}")


def _table(source: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = source.get("methods", {}).get(name, {})
    if not isinstance(table, Mapping):
        raise ConfigError(f"methods.{name}: must be a table of settings, got {table!r}")
    return table


def _settings(source: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a method's own settings; a variant has those of its family's table beneath."""
    family = method_family(source, name)
    meant = presets.methods_with_presets().get(name, {})
    # A preset is the paper's own: what the file tunes for the family is not meant for it.
    beneath = meant or _table(source, family)
    own = _table(source, name)
    merged = {**beneath, **own}
    if "pretraining" in beneath and isinstance(own.get("pretraining"), Mapping):
        merged["pretraining"] = {**beneath["pretraining"], **own["pretraining"]}
    return {key: value for key, value in merged.items() if key != "family"}


def _inherited_settings(
    model: Mapping[str, Any], family: str
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return what a family takes from ``[model]``, and what it does not, in words."""
    given = {key: value for key, value in model.items() if key != "family"}
    if model.get("family") == family:
        return given, ()
    base = family_named(model.get("family")).settings_class
    other = family_named(family)
    own = other.settings_class
    has = {field.name for field in dataclasses.fields(own)}
    if any(issubclass(own, kind) for kind in base.__mro__ if dataclasses.is_dataclass(kind)):
        # One network with other steps before it; which of its encoders are used may differ.
        return {key: value for key, value in given.items() if key in has and key != "encoders"}, ()
    # Inputs and links are equal for all methods even where their families' defaults differ.
    defaults = {
        field.name: field.default
        for field in dataclasses.fields(base)
        if field.name in _INPUTS and field.default is not dataclasses.MISSING
    }
    shared = {
        key: value for key, value in {**defaults, **given}.items() if key in _SHARED and key in has
    }
    notes = []
    if other.links_to_one:
        shared.pop("neighbours", None)
        notes.append("one link a row, for any model.neighbours")
    left_out = sorted(key for key in given if key not in shared and key != "neighbours")
    if left_out:
        notes.append(
            f"without {', '.join(left_out)} of [model], which {model['family']!r} has for itself"
        )
    return shared, tuple(notes)


def require_method(config: FederationConfig, name: str) -> None:
    """Refuse a ``[NAME]`` table whose settings are impossible in any file.

    Raises:
        ConfigError: Naming the method and the setting.
    """
    source, _ = method_source_of(config, name)
    try:
        read_sections(source, Findings())
    except ConfigError as error:
        raise ConfigError(f"method {name!r}: {error}") from None


def method_source_of(config: FederationConfig, name: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the file as a method sees it, and what it has otherwise than the file says."""
    source, dropped = _method_source(config.source, name)
    if method_family(config.source, name) in IN_ONE_PLACE:
        baseline_settings(config.source, name)
        return source, ()
    try:
        source, changed = adapt_to_family(source)
    except ConfigError as error:
        raise ConfigError(f"method {name!r}: {error}") from None
    return source, (*dropped, *changed)


register_section("methods", require_method)
