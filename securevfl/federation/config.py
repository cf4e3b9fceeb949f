"""The federation file: the TOML file that all parties of a federation agree on (DESIGN 5.2)."""

import dataclasses
import difflib
import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from securevfl.core import checks
from securevfl.core.errors import ConfigError
from securevfl.core.settings import read_settings
from securevfl.dp.privacy import Privacy
from securevfl.federation.encoder import EncoderSettings, require_encodable
from securevfl.federation.linking.settings import LinkageSettings, parse_linkage
from securevfl.federation.methods import (
    IN_ONE_PLACE,
    baseline_settings,
    method_family,
    method_source,
)
from securevfl.federation.party_settings import PartySettings, parse_address, parse_parties
from securevfl.models.fedhssl.settings import PretrainingSettings
from securevfl.models.registry import Family, family_named

__all__ = [
    "FederationConfig",
    "FederationSettings",
    "LinkageSettings",
    "PartySettings",
    "RuntimeSettings",
    "Task",
    "TrainingSettings",
    "method_config",
    "parse_address",
    "parse_federation",
    "read_federation_file",
]

Task = Literal["regression", "binary", "multiclass"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FederationSettings:
    """The ``[federation]`` table."""

    name: str
    """What the federation is called in reports and logs."""

    task: Task
    """What the label is."""

    seed: int = 0
    """Run seed of initialisation, shuffling and dropout; noise never comes from it."""

    def __post_init__(self) -> None:
        checks.at_least(0, seed=self.seed)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSettings:
    """The ``[training]`` table."""

    epochs: int = 20
    """Passes over the primary's training rows, at most."""

    batch_size: int = 128
    """Primary rows a round."""

    learning_rate: float = 1e-3
    """Step size of every party's optimizer."""

    optimizer: Literal["adamw", "adam", "lamb", "sgd"] = "adamw"
    """Every party's optimizer."""

    weight_decay: float = 0.0
    """Decoupled weight decay of every party's optimizer."""

    patience: int = 10
    """Epochs without a better validation metric before training stops."""

    validation_fraction: float = 0.1
    """Share of the primary's rows that choose the best epoch."""

    test_fraction: float = 0.2
    """Share of the primary's rows that are held out to the end."""

    labelled_rows: int | None = None
    """How many training rows keep their labels; default: all. Pretraining uses the others too."""

    empty_labels: Literal["refuse", "unlabelled"] = "refuse"
    """What an empty label cell is: a mistake, or a training row without a label, for pretraining.
    Validation and test rows are drawn from those that have one."""

    def __post_init__(self) -> None:
        checks.at_least(1, epochs=self.epochs, batch_size=self.batch_size, patience=self.patience)
        checks.positive(learning_rate=self.learning_rate)
        checks.non_negative(weight_decay=self.weight_decay)
        checks.open_unit(
            validation_fraction=self.validation_fraction, test_fraction=self.test_fraction
        )
        if not self.validation_fraction + self.test_fraction < 1:
            raise ConfigError("test_fraction plus validation_fraction must be below 1")
        if self.labelled_rows is not None:
            checks.at_least(1, labelled_rows=self.labelled_rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeSettings:
    """The ``[runtime]`` table: how long a party waits before it gives another one up."""

    join_timeout_s: float = 120.0
    """Until every party has joined."""

    round_timeout_s: float = 120.0
    """For the next message of a round."""

    idle_timeout_s: float = 3600.0
    """For the primary's next round, while heartbeats say that it is alive."""

    silence_timeout_s: float = 10.0
    """Without a heartbeat, after which a party counts as lost."""

    def __post_init__(self) -> None:
        checks.positive(
            join_timeout_s=self.join_timeout_s,
            round_timeout_s=self.round_timeout_s,
            idle_timeout_s=self.idle_timeout_s,
            silence_timeout_s=self.silence_timeout_s,
        )


@dataclass(frozen=True, kw_only=True)
class FederationConfig:
    """A whole federation file, checked."""

    federation: FederationSettings
    training: TrainingSettings
    privacy: Privacy
    linkage: LinkageSettings
    runtime: RuntimeSettings
    parties: tuple[PartySettings, ...]
    family: Family
    model: Any
    """The family's own settings, an instance of ``family.config_class``."""
    pretraining: PretrainingSettings
    """How families with pretraining pretrain; others read nothing of it."""
    encoder: EncoderSettings | None
    """How frozen encoders are made; None leaves that to the family."""
    source: Mapping[str, Any] = field(repr=False)
    """The parsed file, for the hash that parties compare."""

    @property
    def primary(self) -> PartySettings:
        """The party that holds the labels."""
        return next(party for party in self.parties if party.role == "primary")

    @property
    def secondaries(self) -> tuple[PartySettings, ...]:
        """The other parties, in the order of the file; the first has rank 1."""
        return tuple(party for party in self.parties if party.role == "secondary")

    @property
    def table_parties(self) -> tuple[PartySettings, ...]:
        """The parties that hold a table, in the order of the file."""
        return tuple(party for party in self.parties if not party.is_helper)

    @property
    def callers(self) -> tuple[PartySettings, ...]:
        """Everybody who dials the primary: the secondaries by rank, then those who help to link."""
        helpers = (party for party in self.parties if party.is_helper)
        return (*self.secondaries, *helpers)

    def helper(self, role: Literal["coordinator", "dealer"]) -> PartySettings | None:
        """Return the party that only helps to link in a certain way, if there is one."""
        return next((party for party in self.parties if party.role == role), None)

    @property
    def ranks(self) -> dict[str, int]:
        """Name to rank: the primary is 0, secondaries count from 1, helpers come after them."""
        return {
            self.primary.name: 0,
            **{party.name: rank for rank, party in enumerate(self.callers, 1)},
        }

    def party(self, name: str) -> PartySettings:
        """Return the settings of one party.

        Raises:
            ConfigError: If no party has that name.
        """
        for party in self.parties:
            if party.name == name:
                return party
        names = ", ".join(party.name for party in self.parties)
        raise ConfigError(f"party {name!r}: is not in the federation file, which has {names}")

    @property
    def digest(self) -> str:
        """SHA-256 of the file's content (not its spelling), hex; parties compare it."""
        return _digest(self.source)

    @property
    def settings_digest(self) -> str:
        """Like :attr:`digest`, without addresses and identities, which a restart may change."""
        source = dict(self.source)
        source["party"] = [
            {key: value for key, value in party.items() if key not in ("address", "identity")}
            for party in source["party"]
        ]
        return _digest(source)


def _digest(source: Mapping[str, Any]) -> str:
    text = json.dumps(source, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_federation_file(path: Path, *, only_linkage: bool = False) -> FederationConfig:
    """Read and check a federation file.

    Args:
        path: The file.
        only_linkage: Whether nothing will be trained, so that no label is needed.

    Raises:
        ConfigError: Naming the file, the field, the rule and the value.
        PrivacyError: If the privacy settings contradict one another.
    """
    try:
        source = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"federation file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"federation file {path}: is not TOML: {error}") from None
    return parse_federation(source, file=str(path), only_linkage=only_linkage)


def parse_federation(
    source: Mapping[str, Any], *, file: str, only_linkage: bool = False
) -> FederationConfig:
    """Check a parsed federation file; see :func:`read_federation_file`."""
    sections = {
        "federation",
        "model",
        "encoder",
        "training",
        "privacy",
        "linkage",
        "runtime",
        "party",
        "methods",
        "pretraining",
    }
    unknown = sorted(set(source) - sections)
    if unknown:
        close = difflib.get_close_matches(unknown[0], sections, n=1)
        hint = f"did you mean [{close[0]}]? " if close else ""
        raise ConfigError(
            f"{file}: [{unknown[0]}]: no such section; {hint}Allowed: {', '.join(sorted(sections))}"
        )
    try:
        config = _parse_sections(source)
        if not only_linkage:
            _rules().require_trainable(config)
        for name in source.get("methods", {}):
            method_config(config, name)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    return config


def method_config(config: FederationConfig, name: str) -> FederationConfig:
    """Return the federation as one method of a comparison trains it.

    Raises:
        ConfigError: If there is no such method, or its ``[methods.NAME]`` table is wrong.
        PrivacyError: If the privacy settings do not go with it.
    """
    fields = frozenset(field.name for field in dataclasses.fields(TrainingSettings))
    source = method_source(config.source, name, training_fields=fields)
    if method_family(config.source, name) in IN_ONE_PLACE:
        baseline_settings(config.source, name)
    try:
        trained = _parse_sections(source)
        _rules().require_trainable(trained)
    except ConfigError as error:
        raise ConfigError(f"method {name!r}: {error}") from None
    return trained


def _parse_sections(source: Mapping[str, Any]) -> FederationConfig:
    for required in ("federation", "model", "privacy", "linkage"):
        if required not in source:
            raise ConfigError(f"[{required}]: this section is missing")
    for name, table in source.items():
        if name != "party" and not isinstance(table, Mapping):
            raise ConfigError(f"[{name}]: must be a table of settings, got {table!r}")
    model = dict(source["model"])
    family = family_named(model.pop("family", None))
    config = FederationConfig(
        federation=read_settings(FederationSettings, source["federation"], where="federation"),
        training=read_settings(TrainingSettings, source.get("training", {}), where="training"),
        privacy=read_settings(Privacy, source["privacy"], where="privacy"),
        linkage=parse_linkage(source["linkage"]),
        runtime=read_settings(RuntimeSettings, source.get("runtime", {}), where="runtime"),
        parties=parse_parties(source.get("party", [])),
        family=family,
        model=read_settings(family.config_class, model, where="model"),
        pretraining=read_settings(
            PretrainingSettings, source.get("pretraining", {}), where="pretraining"
        ),
        encoder=read_settings(EncoderSettings, source["encoder"], where="encoder")
        if "encoder" in source
        else None,
        source=source,
    )
    _rules().require_linkable(config)
    if config.encoder is not None:
        frozen = config.privacy.encoder == "frozen"
        require_encodable(
            config.encoder,
            pooled=frozen and family.pooled(config.model, frozen=frozen),
            width=family.cut_shape(config.model)[1],
            secondaries=len(config.secondaries),
        )
    return config


def _rules() -> ModuleType:
    """Return the rules of linkage, which speak of the whole file and so import this module."""
    return import_module("securevfl.federation.linking.rules")
