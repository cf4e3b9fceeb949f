"""The federation file: the TOML file that all parties of a federation agree on (DESIGN 5.2)."""

import dataclasses
import difflib
import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from securevfl.core import checks
from securevfl.core.errors import ConfigError
from securevfl.core.settings import read_settings
from securevfl.dp.privacy import Privacy
from securevfl.federation.methods import ONE_TABLE, baseline_settings, method_family, method_source
from securevfl.federation.party_settings import PartySettings, parse_address, parse_parties
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

    def __post_init__(self) -> None:
        checks.at_least(1, epochs=self.epochs, batch_size=self.batch_size, patience=self.patience)
        checks.positive(learning_rate=self.learning_rate)
        checks.non_negative(weight_decay=self.weight_decay)
        checks.open_unit(
            validation_fraction=self.validation_fraction, test_fraction=self.test_fraction
        )
        if not self.validation_fraction + self.test_fraction < 1:
            raise ConfigError("test_fraction plus validation_fraction must be below 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkageSettings:
    """The ``[linkage]`` table."""

    metric: Literal["euclidean"] = "euclidean"
    """How far two keys are apart."""

    protection: Literal["none"]
    """How keys are hidden while linking. ``none``: every secondary sees the primary's keys."""

    choose: Literal["rows", "records"] = "rows"
    """Who chooses: each primary row its K nearest records, or each record its
    ``privacy.links_per_record`` nearest rows. The latter halves what one record can change, and
    needs a frozen encoder with pooled rows."""

    truth: str | None = None
    """Column that tells true matches; never a feature."""


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
    def ranks(self) -> dict[str, int]:
        """Name to rank: the primary is 0, secondaries count from 1."""
        return {
            self.primary.name: 0,
            **{party.name: rank for rank, party in enumerate(self.secondaries, 1)},
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


def read_federation_file(path: Path) -> FederationConfig:
    """Read and check a federation file.

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
    return parse_federation(source, file=str(path))


def parse_federation(source: Mapping[str, Any], *, file: str) -> FederationConfig:
    """Check a parsed federation file; see :func:`read_federation_file`."""
    sections = {
        "federation",
        "model",
        "training",
        "privacy",
        "linkage",
        "runtime",
        "party",
        "methods",
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
    if method_family(config.source, name) in ONE_TABLE:
        baseline_settings(config.source, name)
    try:
        return _parse_sections(source)
    except ConfigError as error:
        raise ConfigError(f"method {name!r}: {error}") from None


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
        linkage=_parse_linkage(source["linkage"]),
        runtime=read_settings(RuntimeSettings, source.get("runtime", {}), where="runtime"),
        parties=parse_parties(source.get("party", [])),
        family=family,
        model=read_settings(family.config_class, model, where="model"),
        source=source,
    )
    _check_choice(config)
    return config


def _check_choice(config: FederationConfig) -> None:
    frozen = config.privacy.encoder == "frozen"
    if config.linkage.choose == "records" and not (
        frozen
        and config.family.pooled(config.model, frozen=frozen)
        and config.privacy.links_per_record
    ):
        raise ConfigError(
            'linkage.choose: "records" needs privacy.encoder = "frozen", '
            'model.release = "pooled" and privacy.links_per_record'
        )


# Named in the plan of the project, and refused by name until they are built.
_PLANNED_PROTECTIONS = ("bloom", "paillier", "shares")
_PLANNED_METRICS = ("levenshtein", "bloom")


def _parse_linkage(table: Mapping[str, Any]) -> LinkageSettings:
    protection = table.get("protection")
    if protection in _PLANNED_PROTECTIONS:
        raise ConfigError(
            f"linkage.protection: {protection!r} is not available yet; "
            f'"none" shows the primary\'s keys to every secondary, and must be written out'
        )
    if protection is None:
        raise ConfigError(
            'linkage.protection: is missing; write protection = "none" to accept that '
            "the primary's keys are shown to every secondary"
        )
    if table.get("metric") in _PLANNED_METRICS:
        raise ConfigError(f"linkage.metric: {table['metric']!r} is not available yet")
    return read_settings(LinkageSettings, table, where="linkage")
