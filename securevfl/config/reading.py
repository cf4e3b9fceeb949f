"""Read a federation file, and refuse what does not go together.

One traversal reads a file for a run, which ends with the first mistake, and for ``securevfl
check``, which lists all of them: what a mistake does is up to :class:`Findings`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from securevfl.config import rules, sections
from securevfl.config.encoder import EncoderSettings, resolve
from securevfl.config.federation import FederationConfig
from securevfl.config.linkage import parse_linkage
from securevfl.config.presets import expand_preset, without_top
from securevfl.core import checks
from securevfl.core.errors import ConfigError
from securevfl.core.files import read_toml
from securevfl.core.settings import default_of, read_settings
from securevfl.dp.privacy import Privacy
from securevfl.models.family import AnyFamily, FamilySettings, PretrainingSettings
from securevfl.models.registry import FAMILIES, family_named

T = TypeVar("T")

_REQUIRED: Final = ("federation", "model", "privacy", "linkage")
_SECTIONS: Final = (
    *_REQUIRED,
    "encoder",
    "training",
    "base",
    "mpc",
    "prediction",
    "runtime",
    "party",
    "methods",
    "pretraining",
)


_REGISTERED: Final[dict[str, Callable[[FederationConfig, str], None]]] = {}
"""Checks of sections of named tables that no run reads, by section."""


def register_section(section: str, check: Callable[[FederationConfig, str], None]) -> None:
    """Have a section checked whose tables no run reads; until then it is passed through.

    Args:
        section: Its name.
        check: Called with a federation and the name of a table; raises ``ConfigError``.
    """
    _REGISTERED[section] = check


def section_checks(config: FederationConfig) -> list[Callable[[], None]]:
    """Return a check of each table of the registered sections."""
    return [
        partial(check, config, name)
        for section, check in _REGISTERED.items()
        for name in config.source.get(section, {})
    ]


class Findings:
    """Mistakes of a federation file. The first one is raised; a subclass collects them."""

    def wrong(self, error: Exception, about: str) -> None:  # noqa: ARG002
        """Take an error about a section or a ``section.field``; a subclass may collect it."""
        raise error

    def settings(self, kind: type[T], tables: Mapping[str, Any], name: str) -> T:
        """Return the settings of the section called ``name``; of one that is missing, defaults."""
        return read_settings(kind, tables.get(name, {}), where=name)

    def table(self, read: Callable[[dict[str, Any]], T], table: Mapping[str, Any], name: str) -> T:
        """Return what ``read`` makes of the table of settings called ``name``."""
        del name
        return read(dict(table))

    def attempt(self, work: Callable[[], T], *, otherwise: T, about: str) -> T:
        """Return what ``work`` returns, or ``otherwise`` where its error is collected."""
        del otherwise, about
        return work()


def read_federation(path: str | Path, *, only_linkage: bool = False) -> FederationConfig:
    """Read and check a federation file.

    Args:
        path: The file.
        only_linkage: Whether nothing will be trained, so that no label is needed.

    Raises:
        ConfigError: Naming the file, the field, the rule and the value.
        PrivacyError: If the privacy settings contradict one another.
    """
    return parse_federation(load_federation(path), file=str(path), only_linkage=only_linkage)


def load_federation(path: str | Path) -> dict[str, Any]:
    """Return the content of a federation file, unchecked.

    Raises:
        ConfigError: If there is no such file, or it is not TOML.
    """
    try:
        return read_toml(Path(path))
    except OSError as error:
        raise ConfigError(f"federation file {path}: {error.strerror}; check the path") from None
    except ValueError as error:
        raise ConfigError(f"federation file {path}: {error}") from None


def parse_federation(
    source: Mapping[str, Any], *, file: str, only_linkage: bool = False
) -> FederationConfig:
    """Check a parsed federation file; see :func:`read_federation`."""
    try:
        config = linkable_config(source)
        if not only_linkage:
            rules.require_trainable(config)
        for check in section_checks(config):
            check()
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    return config


def linkable_config(source: Mapping[str, Any]) -> FederationConfig:
    """Return what a parsed file says, checked for linking alone; see :func:`parse_federation`."""
    config = read_sections(source, Findings())
    rules.require_linkable(config)
    return config


def read_sections(source: Mapping[str, Any], findings: Findings) -> FederationConfig:
    """Read every section of a parsed federation file, each for itself.

    Args:
        source: The file.
        findings: What a mistake does.

    Raises:
        ConfigError: As ``findings`` says.
        PrivacyError: If the privacy settings contradict one another.
    """
    for name in sorted(set(source) - set(_SECTIONS)):
        close = checks.nearest(name, _SECTIONS)
        hint = f"did you mean [{close}]? " if close else ""
        allowed = ", ".join(sorted(_SECTIONS))
        error = ConfigError(f"[{name}]: no such section; {hint}Allowed: {allowed}")
        findings.wrong(error, name)
    source, chosen = resolve(source)
    written = dict(source)
    for name in _REQUIRED:
        if name not in source:
            findings.wrong(ConfigError(f"[{name}]: this section is missing; add it"), name)
            written[name] = {}
    for name, table in source.items():
        if name != "party" and not isinstance(table, Mapping):
            error = ConfigError(f"[{name}]: must be a table of settings, got {table!r}")
            findings.wrong(error, name)
            written[name] = {}
    plain = {name: value for name, value in written["model"].items() if name != "preset"}
    tables = findings.attempt(
        lambda: dict(expand_preset(written)),
        otherwise={**written, "model": plain},
        about="model.preset",
    )

    model, top = without_top(tables["model"])
    exact = tables["linkage"].get("metric") == "exact"
    family, settings = findings.table(partial(_read_model, exact=exact), model, "model")
    return FederationConfig(
        federation=findings.settings(sections.FederationSettings, tables, "federation"),
        training=findings.settings(sections.TrainingSettings, tables, "training"),
        base=findings.settings(sections.BaseSettings, tables, "base"),
        privacy=findings.settings(Privacy, tables, "privacy"),
        mpc=findings.settings(sections.MpcSettings, tables, "mpc"),
        linkage=findings.table(parse_linkage, tables["linkage"], "linkage"),
        prediction=findings.settings(sections.PredictionSettings, tables, "prediction"),
        runtime=findings.settings(sections.RuntimeSettings, tables, "runtime"),
        parties=_parties(tables.get("party", []), findings),
        family=family,
        model=settings,
        top=top,
        pretraining=findings.settings(PretrainingSettings, tables, "pretraining"),
        encoder=findings.settings(EncoderSettings, tables, "encoder")
        if "encoder" in tables
        else None,
        source=written,
        chosen=chosen,
    )


def require_own_fields(family: AnyFamily, model: Mapping[str, Any]) -> None:
    """Refuse a field of ``[model]`` that another family has, and say where it would go.

    Args:
        family: The one that the file names.
        model: The table, without ``family``.

    Raises:
        ConfigError: With the fields that the family has, and the nearest of them.
    """
    own = _fields(family)
    others = {
        field: [other.name for other in FAMILIES.values() if field in _fields(other)]
        for field in sorted(set(model) - set(own))
    }
    for field, owners in others.items():
        if not owners:
            continue
        fixed = getattr(family.settings_class, field, None)
        always = isinstance(fixed, int | float | str)
        why = f"{field} is always {fixed!r} there" if always else f"{', '.join(owners)} have it"
        owner = "NAME" if always else owners[0]
        near = checks.nearest(field, own)
        hint = "" if near is None else f"the nearest is {near!r}; "
        raise ConfigError(
            f"model.{field}: no such field of family {family.name!r}: {why}; leave it out, or for "
            f"a comparison write it in [methods.{owner}]; {hint}{family.name} has: "
            f"{', '.join(sorted(own))}"
        )


def _fields(family: AnyFamily) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(family.settings_class) if field.init)


def _read_model(table: dict[str, Any], *, exact: bool) -> tuple[AnyFamily, FamilySettings]:
    family = family_named(table.pop("family", None))
    require_own_fields(family, table)
    if exact and default_of(family.settings_class, "neighbours") is not None:
        # Of equal ids, one is right.
        table.setdefault("neighbours", 1)
    return family, family.settings_from(table)


def _parties(tables: Any, findings: Findings) -> tuple[sections.PartySettings, ...]:
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        findings.wrong(ConfigError("[[party]]: must be a list of tables, one a party"), "party")
        return ()
    parties = tuple(
        findings.table(partial(read_settings, sections.PartySettings, where=where), table, where)
        for where, table in ((f"party[{place}]", table) for place, table in enumerate(tables))
    )
    findings.attempt(
        lambda: sections.require_one_federation(parties), otherwise=None, about="parties"
    )
    return parties
