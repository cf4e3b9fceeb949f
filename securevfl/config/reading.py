"""Read a federation file, and refuse what does not go together."""

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from securevfl.config import rules
from securevfl.config.encoder import EncoderSettings, resolved
from securevfl.config.federation import FederationConfig
from securevfl.config.linkage import parse_linkage
from securevfl.config.methods import (
    IN_ONE_PLACE,
    adapted,
    baseline_settings,
    method_family,
    method_source,
    require_own_fields,
)
from securevfl.config.parties import parse_parties
from securevfl.config.presets import expanded, without_top
from securevfl.config.rules import require_encodable, require_maskable
from securevfl.config.sections import (
    BaseSettings,
    FederationSettings,
    PredictionSettings,
    RuntimeSettings,
    TrainingSettings,
)
from securevfl.core import checks
from securevfl.core.errors import ConfigError
from securevfl.core.files import MOST_OF_SETTINGS, read_text
from securevfl.core.settings import read_settings
from securevfl.dp.privacy import Privacy
from securevfl.models.fedhssl.settings import PretrainingSettings
from securevfl.models.registry import family_named


def read_federation(path: str | Path, *, only_linkage: bool = False) -> FederationConfig:
    """Read and check a federation file.

    Args:
        path: The file.
        only_linkage: Whether nothing will be trained, so that no label is needed.

    Raises:
        ConfigError: Naming the file, the field, the rule and the value.
        PrivacyError: If the privacy settings contradict one another.
    """
    try:
        source = tomllib.loads(read_text(Path(path), most=MOST_OF_SETTINGS))
    except OSError as error:
        raise ConfigError(f"federation file {path}: {error.strerror}") from None
    except ValueError as error:  # a number of thousands of digits is no TOMLDecodeError
        raise ConfigError(f"federation file {path}: is not TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"federation file {path}: is nested too deeply to be settings") from None
    return parse_federation(source, file=str(path), only_linkage=only_linkage)


def parse_federation(
    source: Mapping[str, Any], *, file: str, only_linkage: bool = False
) -> FederationConfig:
    """Check a parsed federation file; see :func:`read_federation`."""
    sections = {
        "federation",
        "model",
        "encoder",
        "training",
        "base",
        "privacy",
        "linkage",
        "prediction",
        "runtime",
        "party",
        "methods",
        "pretraining",
    }
    unknown = sorted(set(source) - sections)
    if unknown:
        close = checks.nearest(unknown[0], sections)
        hint = f"did you mean [{close}]? " if close else ""
        raise ConfigError(
            f"{file}: [{unknown[0]}]: no such section; {hint}Allowed: {', '.join(sorted(sections))}"
        )
    try:
        config = _parse_sections(source)
        if not only_linkage:
            rules.require_trainable(config)
        for name in source.get("methods", {}):
            _require_readable(config, name)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    return config


def method_config(config: FederationConfig, name: str) -> FederationConfig:
    """Return the federation as one method of a comparison trains it.

    Raises:
        ConfigError: If there is no such method, its ``[methods.NAME]`` table is wrong, or it does
            not go with the rest of the file.
        PrivacyError: If the privacy settings do not go with it.
    """
    source, _ = _method_source(config, name)
    try:
        trained = _parse_sections(source)
        rules.require_trainable(trained)
    except ConfigError as error:
        raise ConfigError(f"method {name!r}: {error}") from None
    return trained


def method_adaptations(config: FederationConfig, name: str) -> tuple[str, ...]:
    """Return what one method of a comparison has otherwise than the file says, in words.

    Raises:
        ConfigError: If there is no such method, or its ``[methods.NAME]`` table is wrong.
    """
    return _method_source(config, name)[1]


def _method_source(config: FederationConfig, name: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the file as a method sees it, and what it has otherwise than the file says."""
    fields = frozenset(one.name for one in dataclasses.fields(TrainingSettings))
    source, dropped = method_source(config.source, name, training_fields=fields)
    if method_family(config.source, name) in IN_ONE_PLACE:
        baseline_settings(config.source, name)
        return source, ()
    try:
        source, changed = adapted(source)
    except ConfigError as error:
        raise ConfigError(f"method {name!r}: {error}") from None
    return source, (*dropped, *changed)


def _require_readable(config: FederationConfig, name: str) -> None:
    """Refuse a method whose settings are impossible by themselves, whatever the file asks for."""
    source, _ = _method_source(config, name)
    try:
        _read_sections(source)
    except ConfigError as error:
        raise ConfigError(f"method {name!r}: {error}") from None


def _parse_sections(source: Mapping[str, Any]) -> FederationConfig:
    config = _read_sections(source)
    rules.require_linkable(config)
    require_maskable(config)
    if config.encoder is not None:
        frozen = config.privacy.encoder == "frozen"
        require_encodable(
            config.encoder,
            pooled=frozen and config.family.pooled(config.model, frozen=frozen),
            width=config.family.cut_shape(config.model)[1],
            secondaries=len(config.secondaries),
        )
    return config


def _read_sections(source: Mapping[str, Any]) -> FederationConfig:
    source, chosen = resolved(source)
    for required in ("federation", "model", "privacy", "linkage"):
        if required not in source:
            raise ConfigError(f"[{required}]: this section is missing")
    for name, table in source.items():
        if name != "party" and not isinstance(table, Mapping):
            raise ConfigError(f"[{name}]: must be a table of settings, got {table!r}")
    filled = expanded(source)
    model, top = without_top(filled["model"])
    family = family_named(model.pop("family", None))
    require_own_fields(family, model)
    return FederationConfig(
        federation=read_settings(FederationSettings, filled["federation"], where="federation"),
        training=read_settings(TrainingSettings, filled.get("training", {}), where="training"),
        base=read_settings(BaseSettings, filled.get("base", {}), where="base"),
        privacy=read_settings(Privacy, filled["privacy"], where="privacy"),
        linkage=parse_linkage(filled["linkage"]),
        prediction=read_settings(
            PredictionSettings, filled.get("prediction", {}), where="prediction"
        ),
        runtime=read_settings(RuntimeSettings, filled.get("runtime", {}), where="runtime"),
        parties=parse_parties(filled.get("party", [])),
        family=family,
        model=family.settings_from(model),
        top=top,
        pretraining=read_settings(
            PretrainingSettings, filled.get("pretraining", {}), where="pretraining"
        ),
        encoder=read_settings(EncoderSettings, filled["encoder"], where="encoder")
        if "encoder" in filled
        else None,
        source=source,
        chosen=chosen,
    )
