"""The federation file: the TOML file that all parties of a federation agree on (DESIGN 5.2)."""

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
from securevfl.models.registry import Family, family_named

Task = Literal["regression", "binary", "multiclass"]

_NAME_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")
_LONGEST_NAME = 40


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


@dataclass(frozen=True, kw_only=True, slots=True)
class PartySettings:
    """One ``[[party]]`` table."""

    name: str
    """Unique in the federation; also the party's folder in the run folder."""

    role: Literal["primary", "secondary"]
    """Who holds the labels."""

    data: str
    """The party's table, resolved on its own machine only."""

    key: tuple[str, ...]
    """Columns that parties link by."""

    label: str | None = None
    """The primary's label column."""

    address: str | None = None
    """The primary's ``host:port``; secondaries only dial out."""

    identity: str | None = None
    """``ed25519:…``, the party's long-term public key (``securevfl provision``)."""

    scaling: Literal["standard", "bounds", "none"] = "standard"
    """``standard``: own mean and deviation; ``bounds``: declared ranges, the same for any data."""

    bounds: tuple[float, ...] | dict[str, tuple[float, ...]] | None = None
    """For ``scaling = "bounds"``: ``[low, high]`` of every feature, or such a pair by column."""

    categories: dict[str, tuple[str, ...]] | None = None
    """Words of text columns by column, agreed without looking at the data."""

    exclude: tuple[str, ...] = ()
    """Columns that are neither keys nor features."""

    def __post_init__(self) -> None:
        if not self.name or len(self.name) > _LONGEST_NAME or set(self.name) - _NAME_LETTERS:
            raise ConfigError(
                f"name: must be 1 to {_LONGEST_NAME} letters, digits, '-' or '_', got {self.name!r}"
            )
        if not self.key:
            raise ConfigError("key: must name at least one column")
        if self.role == "primary":
            if self.label is None:
                raise ConfigError("label: the primary must name its label column")
            if self.address is None:
                raise ConfigError('address: the primary needs one, for example "127.0.0.1:7431"')
            parse_address(self.address)
        elif self.label is not None:
            raise ConfigError("label: only the primary holds labels")
        if (self.scaling == "bounds") != (self.bounds is not None):
            raise ConfigError('bounds: goes with scaling = "bounds", and only with it')
        pairs = self.bounds.values() if isinstance(self.bounds, dict) else [self.bounds]
        for pair in pairs:
            if pair is not None and not (len(pair) == 2 and pair[0] < pair[1]):
                raise ConfigError(f"bounds: must be [low, high], got {list(pair)}")


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


def parse_address(address: str) -> tuple[str, int]:
    """Split ``host:port``; port 0 lets the system choose one.

    Raises:
        ConfigError: If it is not of that form.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f'address: must be "host:port", got {address!r}')
    return host.strip("[]"), int(port)


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
    sections = {"federation", "model", "training", "privacy", "linkage", "runtime", "party"}
    unknown = sorted(set(source) - sections)
    if unknown:
        close = difflib.get_close_matches(unknown[0], sections, n=1)
        hint = f"did you mean [{close[0]}]? " if close else ""
        raise ConfigError(
            f"{file}: [{unknown[0]}]: no such section; {hint}Allowed: {', '.join(sorted(sections))}"
        )
    try:
        return _parse_sections(source)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


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
        parties=_parse_parties(source.get("party", [])),
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


def _parse_parties(tables: Any) -> tuple[PartySettings, ...]:
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError("[[party]]: must be a list of tables, one a party")
    parties = tuple(
        read_settings(PartySettings, table, where=f"party[{i}]") for i, table in enumerate(tables)
    )
    names = [party.name for party in parties]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"party.name: two parties are called {name!r}")
    primaries = [party.name for party in parties if party.role == "primary"]
    if len(primaries) != 1:
        found = "none has" if not primaries else f"{' and '.join(primaries)} have"
        raise ConfigError(f'party.role: exactly one party must be "primary"; {found} that role')
    if len(parties) < 2:
        raise ConfigError("[[party]]: at least one secondary is needed")
    dimensions = {party.name: len(party.key) for party in parties}
    if len(set(dimensions.values())) > 1:
        text = ", ".join(f"{name} has {count}" for name, count in dimensions.items())
        raise ConfigError(f"party.key: keys must have the same dimension at all parties; {text}")
    return parties
