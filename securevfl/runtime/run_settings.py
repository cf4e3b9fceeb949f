"""Settings of a run in Python, and the federation file and tables that they stand for."""

import contextlib
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, TypedDict

from securevfl.config import sections
from securevfl.config.encoder import AUTO, EncoderSettings
from securevfl.config.federation import FederationConfig
from securevfl.config.linkage import LinkageSettings
from securevfl.config.presets import PresetSettings, preset, top_source
from securevfl.config.reading import parse_federation, require_own_fields
from securevfl.core import checks
from securevfl.core.conventions import Task
from securevfl.core.errors import ConfigError, SecureVflError
from securevfl.core.settings import default_of
from securevfl.data.frames import from_frame
from securevfl.data.scaling import Bounds, ColumnSettings
from securevfl.data.tables import PartyTable
from securevfl.dp.privacy import Privacy
from securevfl.linkage.stage.linkage_parts import PROTECTIONS
from securevfl.models.family import FamilySettings, PretrainingSettings
from securevfl.models.registry import family_named, family_names, family_of
from securevfl.runtime import run_options


class RunSettings(TypedDict, total=False):
    """Keyword arguments of runs in addition to tables, also of ``ThisParty.train``."""

    privacy: Privacy
    """Privacy guarantee; ``Privacy(mechanism="none")`` gives none."""
    encoder: EncoderSettings | Literal["auto"] | None
    """How frozen encoders are made; default: as the family does. ``"auto"`` takes, with tables, a
    promise and what else is given, the settings of :mod:`securevfl.config.presets`; then ``model``
    may be left out."""
    training: sections.TrainingSettings | None
    """Epochs, batch size and so on."""
    pretraining: PretrainingSettings | None
    """For families that pretrain."""
    linkage: LinkageSettings | None
    """Who chooses links, and by what; default: each row its K nearest records, with the primary's
    keys shown to every secondary."""
    prediction: sections.PredictionSettings | None
    """Limits of what predictions of the model may spend in addition to training."""
    mpc: sections.MpcSettings | None
    """Computation on shares, and its engine."""
    runtime: sections.RuntimeSettings | None
    """Times that parties wait for one another."""
    base: Any
    """Base model that is averaged with the joint one: ``"boosting"``, ``"linear"``, ``"best"`` of
    these and a perceptron (the default), any estimator of scikit-learn (a classifier needs
    ``predict_proba``), or ``"none"``, as in the papers."""
    top: Any
    """With frozen encoders, an estimator in place of the family's top network, fitted to own
    columns, keys and released numbers: ``"boosting"``, ``"linear"`` or any of scikit-learn."""
    task: Task | None
    """Learning task; default: binary or multiclass if the labels are classes, regression
    otherwise."""
    bounds: Mapping[str, Bounds] | Sequence[float] | None
    """``[low, high]`` of all features; or by party name such a pair, or pairs by column. Declared
    ranges do not depend on the data, as a frozen encoder's guarantee needs. Without them each party
    standardises its features by its own statistics."""
    missing_columns: Mapping[str, Sequence[str]] | None
    """Columns of frames whose cells may be empty, by party name, known without looking."""
    seed: int
    """Seed of splits, initialisation, shuffling and dropout; never of noise. Default 0."""
    with_alone: bool
    """Also find the local baseline, the primary's best model alone, to compare with.
    Default true."""
    device: str
    """``"cpu"`` (the default) or ``"cuda"``."""
    record_mib: float | None
    """MiB of what each party receives and holds, which it records in its own folder for
    ``securevfl lab audit``; default: none."""


_OF_FILES: Final = ("data_root", "resume")
_OF_BOTH: Final = ("device", "record_mib", "with_alone")
_FRAMES: Final = ("primary", "secondaries", "label", "key")

SECTIONS: Final[Mapping[str, tuple[type[Any], str]]] = {
    "privacy": (Privacy, "sv.dp.Privacy"),
    "encoder": (EncoderSettings, "sv.EncoderSettings"),
    "linkage": (LinkageSettings, "sv.LinkageSettings"),
    "training": (sections.TrainingSettings, "sv.TrainingSettings"),
    "pretraining": (PretrainingSettings, "sv.PretrainingSettings"),
    "prediction": (sections.PredictionSettings, "sv.PredictionSettings"),
    "mpc": (sections.MpcSettings, "sv.MpcSettings"),
    "runtime": (sections.RuntimeSettings, "sv.RuntimeSettings"),
}
"""Class and public name of the settings of each section that is a keyword."""


def estimators_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the estimators among settings, which no federation file can name: base and top."""
    given = {name: settings.get(name) for name in ("base", "top")}
    return {name: value for name, value in given.items() if not isinstance(value, str)}


def resolve_run(
    by: str, given: Mapping[str, Any]
) -> tuple[FederationConfig, Mapping[str, PartyTable] | None, Path | None]:
    """Return the federation, its tables (None: as its file says) and where paths start.

    Args:
        by: The function that was called.
        given: Its arguments by name, without those that are None.

    Raises:
        ConfigError: If the arguments cannot be simulated, naming the first that is wrong.
    """
    settings = {name: value for name, value in given.items() if name != "parties"}
    parties = given.get("parties")
    framed = [name for name in _FRAMES if name in settings]
    if isinstance(parties, run_options.FederationSource):
        wrong = [name for name in settings if name not in (*_OF_FILES, *_OF_BOTH)]
        if wrong:
            raise ConfigError(f"{wrong[0]}: the federation file says it; leave it out")
        config, root = run_options.resolve_federation(parties, settings.get("data_root"))
        return config, None, root
    if any(settings.get(name) for name in _OF_FILES):
        raise ConfigError("resume, data_root: go with a federation file, not with tables")
    frames = {name: settings.pop(name, None) for name in _FRAMES}
    model, settings = with_model(settings.pop("model", None), settings)
    if parties is None:
        listed = tables_of_frames(settings, **frames)
    elif framed:
        raise ConfigError(f"{framed[0]}: goes with frames alone; leave out parties, or {framed[0]}")
    elif settings.get("missing_columns") is not None:
        raise ConfigError("missing_columns: goes with frames alone; from_frame declares a table's")
    else:
        listed = _list_tables(parties)
        _require_by_party(settings, [table.name for table in listed])
    names = _key_names(listed[0])
    source = source_of([TableFacts.of(table) for table in listed], model, settings)
    tables = {table.name: with_keys_called(names, table) for table in listed}
    return parse_federation(source, file=f"{by}()"), tables, None


def with_model(model: Any, settings: Any) -> tuple[FamilySettings | None, Any]:
    """Return a family's settings, and the run's settings with those of its preset.

    Args:
        model: A family's name or settings, or a preset or its name; None with ``"auto"``.
        settings: The other settings by name.

    Raises:
        ConfigError: If one is no such settings, naming it.
    """
    for name, (kind, public) in SECTIONS.items():
        value = settings.get(name)
        if not (value is None or isinstance(value, kind) or (name, value) == ("encoder", AUTO)):
            raise ConfigError(f"{name}: must be {public}(...), got {value!r:.60}")
    if hasattr(model, "columns") and not isinstance(model, FamilySettings):
        raise ConfigError(
            f"model: must be a family's settings, got a {type(model).__name__}; frames go "
            f'in by name: primary=..., secondaries=[...], label="y", key="id"'
        )
    model = None if model is None else model_of(model)
    if not isinstance(model, PresetSettings):
        return model, settings
    fields = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
    own = fields.pop("model")
    return own, {**fields, **{k: value for k, value in settings.items() if value is not None}}


def model_of(model: Any, fields: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Return a family's settings, or a preset's, of either or of its name.

    Args:
        model: ``"fet"``, ``"fedsim-paper"``, a family's settings or a preset.
        fields: Fields of the model that come before its own.

    Raises:
        ConfigError: If there is no such model, or a field is impossible.
    """
    if isinstance(model, str):
        family, _, name = model.partition("-")
        if model in family_names() or not name or family not in family_names():
            require_own_fields(family_named(model), fields)
            return family_named(model).settings_from(fields)
        return preset(family, name, **fields)
    if isinstance(model, PresetSettings):
        return replace(model, model=model_of(model.model, fields))
    if not isinstance(model, FamilySettings):
        raise ConfigError(
            f"model: must be a family's name, its settings or a preset, got a "
            f"{type(model).__name__}"
        )
    if not fields:
        return model
    own = family_of(model)
    require_own_fields(own, fields)
    return own.settings_from({**given_fields(model), **fields})


def given_fields(settings: Any) -> dict[str, Any]:
    """Return a dataclass's fields that are not None, by name."""
    fields = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    return {name: value for name, value in fields.items() if value is not None}


_SETTING: Final = re.compile(
    r"(?:\b({names})\.|\[({names})\] )(\w+) = (\"[^\"]*\"|\[[^\]]*\]|[\w.+-]*\w)".replace(
        "{names}", "|".join((*SECTIONS, "model", "base"))
    )
)


def python_words(text: str, model: Any = None) -> str:
    """Return advice about a federation file's settings as keywords of Python.

    ``training.epochs = 5`` and ``[training] epochs = 5`` become
    ``training=sv.TrainingSettings(epochs=5)``.

    Args:
        text: The advice.
        model: Settings of the run's family, whose class ``model.field`` names.
    """

    def spelled(found: "re.Match[str]") -> str:
        section, field = found[1] or found[2], found[3]
        value = {"true": "True", "false": "False"}.get(found[4], found[4])
        if section == "base":
            return f"{section}={value}"
        kind = (
            type(model).__name__.removesuffix("Config")
            if isinstance(model, FamilySettings)
            else "..."
        )
        public = f"sv.models.{kind}" if section == "model" else SECTIONS[section][1]
        return f"{section}={public}({field}={value})"

    return re.sub(rf"\[({'|'.join(SECTIONS)})\]", r"\1=", _SETTING.sub(spelled, text))


@contextlib.contextmanager
def in_python_words(given: Mapping[str, Any]) -> Iterator[None]:
    """Let errors speak of keywords, where tables came from Python and no file says settings.

    Args:
        given: The arguments of the call.
    """
    try:
        yield
    except SecureVflError as error:
        if not isinstance(given.get("parties"), run_options.FederationSource):
            model = given.get("model")
            with contextlib.suppress(SecureVflError):
                model = with_model(model, {})[0]
            error.args = (python_words(str(error), model), *error.args[1:])
        raise


def _list_tables(parties: Any) -> Sequence[PartyTable]:
    tables = parties if isinstance(parties, list | tuple) else [parties]
    for number, table in enumerate(tables):
        if not isinstance(table, PartyTable):
            raise ConfigError(
                f"parties: number {number + 1} is a {type(table).__name__}, and must be a table of "
                f"securevfl.data.from_frame; frames go in by name: primary=..., "
                f'secondaries=[...], label="y", key="id"'
            )
    if len(tables) < 2:
        raise ConfigError(
            f"parties: must be a list with the primary's table and at least one secondary's, got "
            f"{len(tables)}"
        )
    return tables


_LEFT_TO_AUTO: Final = (
    ("privacy", "encoder", "trained"),
    ("linkage", "choose", "rows"),
    ("training", "batch_size", sections.TrainingSettings().batch_size),
)
"""Table, field and default of the settings that ``auto`` decides unless they are given."""


def _key_names(table: PartyTable) -> tuple[str, ...]:
    return table.key_names if table.link_columns is None else tuple(table.link_columns.columns)


def with_keys_called(names: tuple[str, ...], table: PartyTable) -> PartyTable:
    """Return a table whose keys for linkage alone are called as the primary's are."""
    keys = table.link_columns
    if keys is None or len(keys.columns) != len(names):
        return table
    columns = dict(zip(names, keys.columns.values(), strict=True))
    return replace(table, link_columns=replace(keys, columns=columns))


@dataclass(frozen=True, kw_only=True, slots=True)
class TableFacts:
    """What a federation file has to say of a table in memory."""

    name: str
    """The party."""
    keys: Sequence[str]
    """Its key columns, in the order that all parties agreed on."""
    classes: int | None
    """How many classes its label has; None of a regression's and of a secondary's."""

    @classmethod
    def of(cls, table: PartyTable) -> "TableFacts":
        """Return those of a table."""
        classes = None if table.classes is None else len(table.classes)
        return cls(name=table.name, keys=_key_names(table), classes=classes)

    @property
    def task(self) -> Task:
        """What the primary's label is, if it is not said."""
        if self.classes is None:
            return "regression"
        return "binary" if self.classes == 2 else "multiclass"


def helpers_of(settings: "RunSettings") -> list[str]:
    """Return the roles of parties without a table that settings need; they are named so."""
    encoder, helpers = (
        settings.get("encoder"),
        PROTECTIONS[_linkage_of(settings).protection].helpers,
    )
    deals = isinstance(encoder, EncoderSettings) and encoder.labels == "shares"
    return list(dict.fromkeys([*helpers, *(["dealer"] if deals else [])]))


def _linkage_of(settings: "RunSettings") -> LinkageSettings:
    return settings.get("linkage") or LinkageSettings(protection="none")


def source_of(
    parties: Sequence[TableFacts], model: FamilySettings | None, settings: RunSettings
) -> dict[str, Any]:
    """Return the federation file that a run on tables in memory stands for."""
    encoder, bounds = settings.get("encoder"), settings.get("bounds")
    base, top = settings.get("base"), settings.get("top")
    auto = encoder == AUTO
    if model is None and not auto:
        raise ConfigError('model: must be given, such as "fet" or securevfl.models.FeT()')
    privacy = settings.get("privacy")
    if privacy is None:
        raise ConfigError('privacy: must be given; Privacy(mechanism="none") promises nothing')
    tables = []
    for number, party in enumerate(parties):
        own = bounds.get(party.name) if isinstance(bounds, Mapping) else bounds
        tables.append(
            {
                "name": party.name,
                "role": "secondary" if number else "primary",
                "data": sections.IN_MEMORY,
                "key": list(party.keys),
                **({} if number else {"label": "label", "address": "127.0.0.1:0"}),
                **({"scaling": "bounds", "bounds": _plain(own)} if own is not None else {}),
            }
        )
    tables += [{"name": role, "role": role} for role in helpers_of(settings)]
    kind = settings.get("task") or parties[0].task
    several = {"classes": parties[0].classes} if kind == "multiclass" and auto else {}
    family = {} if model is None else {"family": family_of(model).name, **_as_table(model)}
    source: dict[str, Any] = {
        "federation": {
            "name": "simulation",
            "task": kind,
            "seed": settings.get("seed") or 0,
            **several,
        },
        "model": {**family, **({} if top is None else {"top": top_source(top)})},
        "training": _as_table(settings.get("training") or sections.TrainingSettings()),
        "pretraining": _as_table(settings.get("pretraining") or PretrainingSettings()),
        "privacy": _as_table(privacy),
        "prediction": _as_table(settings.get("prediction") or sections.PredictionSettings()),
        **{
            name: _as_table(settings[name])
            for name in ("mpc", "runtime")
            if settings.get(name) is not None
        },
        "base": sections.base_source(sections.BaseSettings().estimator if base is None else base),
        "linkage": _as_table(_linkage_of(settings)),
        "party": tables,
    }
    if source["linkage"]["metric"] == "exact" and model is not None:
        # As below: of equal ids one is right, unless another K was given.
        default = default_of(type(model), "neighbours")
        if default is not None and model.neighbours == default:
            del source["model"]["neighbours"]
    if encoder is not None:
        source["encoder"] = {"method": AUTO} if auto else _as_table(encoder)
    if auto:
        # Defaults of Python's dataclasses are no settings that were given.
        for table, name, default in _LEFT_TO_AUTO:
            if source[table].get(name) == default:
                del source[table][name]
    return source


def _plain(bounds: Bounds) -> Any:
    """Return bounds as a federation file holds them."""
    if isinstance(bounds, Mapping):
        return {column: list(pair) for column, pair in bounds.items()}
    return list(bounds)


def _as_table(settings: Any) -> dict[str, Any]:
    # TOML has no null: a setting that is None is one that is not there.
    fields = dataclasses.asdict(settings)
    return {name: value for name, value in fields.items() if value is not None}


_PRIMARY = "primary"


def tables_of_frames(
    settings: Mapping[str, Any], *, primary: Any, secondaries: Any, label: Any, key: Any
) -> Sequence[PartyTable]:
    """Return the primary's table and the secondaries', made of frames.

    Args:
        settings: With the promise and declared ``bounds``, on which it depends what features may
            take from the records.
        primary: The primary's frame, or a table.
        secondaries: The others', in a list or by name.
        label: The primary's label column.
        key: Key columns of all, or by party name.

    Raises:
        ConfigError: If one is missing or of the wrong type, naming the argument.
        DataError: If a frame can't be used.
    """
    if primary is None:
        raise ConfigError("primary: must be given, a DataFrame with the label (or give parties)")
    if isinstance(secondaries, Mapping):
        named = {str(name): table for name, table in secondaries.items()}
    elif isinstance(secondaries, list | tuple):
        named = {f"secondary-{number}": table for number, table in enumerate(secondaries, 1)}
    else:
        raise ConfigError(
            f"secondaries: must be a list of frames, or frames by name, got a "
            f"{type(secondaries).__name__}"
        )
    if not named or _PRIMARY in named:
        raise ConfigError(
            f"secondaries: must have at least one frame, and none called {_PRIMARY!r}"
        )
    if not isinstance(label, str):
        raise ConfigError(
            f"label: must be the name of the primary's label column, got {label!r:.60}"
        )
    frames = {_PRIMARY: primary, **named}
    _require_by_party(settings, frames)
    if len({id(frame) for frame in frames.values()}) < len(frames):
        raise ConfigError("secondaries: two parties have one frame; each party needs its own")
    return [
        from_frame(
            frame,
            name=name,
            key=_key_of(key, name, frames),
            label=label if name == _PRIMARY else None,
            task=settings.get("task") if name == _PRIMARY else None,
            columns=_columns(settings, name),
        )
        for name, frame in frames.items()
    ]


def _key_of(key: Any, name: str, parties: Mapping[str, Any]) -> Any:
    if key is None:
        raise ConfigError('key: must name the columns that parties link by, such as key="id"')
    if not isinstance(key, Mapping) or not set(key) <= set(parties):
        return key
    if name not in key:
        raise ConfigError(f"key: has none for {name!r}; it has {', '.join(map(repr, key))}")
    return key[name]


def _require_by_party(settings: Mapping[str, Any], names: Iterable[str]) -> None:
    """Refuse declarations about unknown parties, which would be ignored in silence.

    Raises:
        ConfigError: Naming the setting, and the name that was probably meant.
    """
    parties = list(names)
    for setting in ("bounds", "missing_columns"):
        declared = settings.get(setting)
        if setting == "missing_columns" and not isinstance(declared, Mapping | None):
            raise ConfigError(
                f'missing_columns: must be lists of columns by party name, such as {{"bank": '
                f'["income"]}}, got a {type(declared).__name__}'
            )
        for name in declared if isinstance(declared, Mapping) else ():
            if name not in parties:
                raise ConfigError(
                    f"{setting}: {name!r} is no party; they are {', '.join(map(repr, parties))}"
                    f"{checks.did_you_mean(name, parties)}"
                )


def _columns(settings: Mapping[str, Any], name: str) -> ColumnSettings:
    bounds, privacy = settings.get("bounds"), settings.get("privacy")
    if name == _PRIMARY or privacy is None or privacy.mechanism == "none":
        return ColumnSettings()
    if not privacy.regime.caps_records and settings.get("encoder") != AUTO:
        return ColumnSettings()
    own = bounds.get(name) if isinstance(bounds, Mapping) else bounds
    missing = (settings.get("missing_columns") or {}).get(name, ())
    return ColumnSettings(bounds=own, missing_columns=missing, own_statistics=False)
