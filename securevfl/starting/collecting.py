"""A federation file with all that is wrong with it, not only what is met first.

A setting that cannot be read is noted, mended by the name that was meant or left out, and the
reading goes on. What is said of settings that were mended so is not noted again.
"""

import copy
import dataclasses
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from securevfl.config import rules
from securevfl.config.auto import resolved
from securevfl.config.encoder import EncoderSettings
from securevfl.config.federation import FederationConfig
from securevfl.config.linkage import parse_linkage
from securevfl.config.parties import PartySettings
from securevfl.config.reading import parse_federation
from securevfl.config.sections import FederationSettings, RuntimeSettings, TrainingSettings
from securevfl.config.top import without_top
from securevfl.core.errors import ConfigError, PrivacyError
from securevfl.core.files import MOST_OF_SETTINGS, read_text
from securevfl.core.settings import read_settings
from securevfl.dp.privacy import Privacy
from securevfl.models.fedhssl.settings import PretrainingSettings
from securevfl.models.registry import family_named

_MEANT: Final = re.compile(r"did you mean '(\w+)'\?")

# What stands for a required setting that is missing or impossible, so that reading can go on.
_STAND_INS: Final[Mapping[str, Any]] = {
    "federation.name": "federation",
    "federation.task": "regression",
    "privacy.epsilon": 8.0,
    "privacy.links_per_record": 1,
    "linkage.protection": "none",
    "party.name": "a-party",
    "party.role": "secondary",
    "party.address": "127.0.0.1:0",
}
_REQUIRED: Final = ("federation", "model", "privacy", "linkage")

T = TypeVar("T")


@dataclass(kw_only=True)
class Collected:
    """What a federation file says, as far as it can be read, and what is wrong with it."""

    problems: list[str] = field(default_factory=list)
    """One line each: where, what, and what to do."""

    config: FederationConfig | None = None
    """The whole; None where no mending makes one of it."""

    parties: list[PartySettings] = field(default_factory=list)
    """Those that can be read by themselves."""

    mended: set[str] = field(default_factory=set)
    """``section.field`` of what was left out or stood in for."""


def collect(path: Path) -> Collected:
    """Read a federation file and note all that is wrong with it."""
    found = Collected()
    try:
        source = tomllib.loads(read_text(path, most=MOST_OF_SETTINGS))
    except OSError as error:
        found.problems.append(f"federation file {path}: {error.strerror}; check the path")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        found.problems.append(f"federation file {path}: is not TOML: {error}")
    except RecursionError:
        found.problems.append(f"federation file {path}: is nested too deeply to be settings")
    else:
        _collect(source, found)
    return found


def _collect(source: dict[str, Any], found: Collected) -> None:
    mended, chosen = copy.deepcopy(source), dict[str, Any]()
    try:
        filled, chosen = resolved(mended)
        mended = copy.deepcopy(dict(filled))
    except ConfigError as error:
        found.problems.append(str(error))
        found.mended |= {"encoder", "model.family"}
        # Whatever would follow from what is missing: nothing of it is told.
        mended["encoder"] = {"method": "random"}
        mended["privacy"] = {"mechanism": "none", "encoder": "frozen"}
        mended["model"] = {"family": "fet", "release": "pooled"}
    _sections(mended, found)
    tables = mended.get("party", [])
    if isinstance(tables, list):
        for number, table in enumerate(tables):
            if isinstance(table, dict):
                where = f"party[{number}]"
                party = _section(PartySettings, table, where, found)
                if party is not None:
                    found.parties.append(party)
    _whole(mended, found)
    if found.config is not None:
        found.config = dataclasses.replace(found.config, chosen=chosen)


def _sections(source: dict[str, Any], found: Collected) -> None:
    """Read every table by itself, and leave in ``source`` what could be read."""
    classes: dict[str, Callable[[dict[str, Any]], object]] = {
        "federation": _reader(FederationSettings, "federation"),
        "training": _reader(TrainingSettings, "training"),
        "privacy": _reader(Privacy, "privacy"),
        "linkage": parse_linkage,
        "runtime": _reader(RuntimeSettings, "runtime"),
        "pretraining": _reader(PretrainingSettings, "pretraining"),
        "encoder": _reader(EncoderSettings, "encoder"),
        "model": _model,
    }
    for name in [*_REQUIRED, *(name for name in source if name not in _REQUIRED)]:
        if name in ("party", "methods"):
            continue
        if name in source and not isinstance(source[name], dict):
            found.problems.append(f"[{name}]: must be a table of settings, got {source[name]!r}")
            found.mended.add(name)
            source[name] = {}
        if name in classes and name in source and "preset" not in source[name]:
            _read(classes[name], source[name], name, found)


def _reader(cls: type[T], where: str) -> Callable[[dict[str, Any]], T]:
    return lambda table: read_settings(cls, table, where=where)


def _model(table: dict[str, Any]) -> object:
    model, _ = without_top(table)
    return family_named(model.pop("family", None)).settings_from(model)


def _section(cls: type[T], table: dict[str, Any], where: str, found: Collected) -> T | None:
    return _read(_reader(cls, where), table, where, found)


def _read(
    read: Callable[[dict[str, Any]], T], table: dict[str, Any], where: str, found: Collected
) -> T | None:
    """Read one table, mending it in place until it can be read; None if it can't be mended."""
    for _ in range(len(table) + len(_STAND_INS)):
        try:
            return read(table)
        except (ConfigError, PrivacyError) as error:
            text = str(error)
            if text not in found.problems:
                found.problems.append(text)
            if not _mend(table, text, where, found):
                return None
    return None


def _mend(table: dict[str, Any], text: str, where: str, found: Collected) -> bool:
    """Change what an error speaks of; False if that is not told, or changes nothing."""
    named = re.match(rf"{re.escape(where)}\.(\w+)", text)
    if named is None:
        return False
    name = named[1]
    section = where.partition("[")[0]
    found.mended.add(f"{section}.{name}")
    meant = _MEANT.search(text)
    if name in table:
        value = table.pop(name)
        if meant is not None and "no such field" in text and meant[1] not in table:
            table[meant[1]] = value
        return True
    stand_in = _STAND_INS.get(f"{section}.{name}")
    if stand_in is None:
        return False
    table[name] = stand_in
    return True


def _whole(source: dict[str, Any], found: Collected) -> None:
    """Read what was mended as one file, and note what does not go together in it."""
    for _ in range(len(source) + len(_REQUIRED)):
        try:
            found.config = parse_federation(source, file="", only_linkage=True)
            break
        except (ConfigError, PrivacyError) as error:
            text = str(error).removeprefix(": ")
            _note(text, found)
            if not _mend_sections(source, text, found):
                return
    if found.config is None:
        return
    for require in (rules.require_trainable, rules.require_covered_channels):
        try:
            require(found.config)
        except (ConfigError, PrivacyError) as error:
            _note(str(error), found)


def _mend_sections(source: dict[str, Any], text: str, found: Collected) -> bool:
    if (method := re.match(r"method '([^']*)'", text)) is not None:
        return source.get("methods", {}).pop(method[1], None) is not None
    section = re.match(r"\[(\w+)\]: ", text)
    if section is None:
        return False
    name = section[1]
    found.mended.add(name)
    if "is missing" in text:
        stand_ins = {
            "federation": {"name": "federation", "task": "regression"},
            "model": {"family": "fet"},
            "privacy": {"mechanism": "none"},
            "linkage": {"protection": "none"},
        }
        if name not in stand_ins:
            return False
        source[name] = stand_ins[name]
        return True
    return source.pop(name, None) is not None


def _note(text: str, found: Collected) -> None:
    """Note a problem, unless it speaks of something that was mended, or of one noted before."""
    if text in found.problems or any(text.startswith(name) for name in found.mended):
        return
    found.problems.append(text)
