"""``encoder.method = "auto"``: the settings of frozen encoders that follow from the promise.

They are filled in where a file leaves them out, by one rule (docs/votes.md has the measurements
behind it), before anything else is read: a run's own file names what was chosen.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from securevfl.core.errors import ConfigError
from securevfl.core.task import Task

AUTO: Final = "auto"
CLASSES_OF_NUMBERS: Final = 5
"""Votes of a label that is a number: its classes have equally many rows."""
_NEIGHBOURS: Final = 4
_FEW_SECONDARIES: Final = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """What settings follow from."""

    task: Task
    classes: int
    """Of the label; of a number, of its votes."""
    secondaries: int
    dealer: bool
    """Whether there is a party that deals masks."""
    promised: bool
    """Whether noise is added."""


Settings = dict[str, dict[str, Any]]
"""Settings by table and name."""


def winning_settings(situation: Situation) -> Settings:
    """Return the settings that did best where a situation like this one was measured.

    From two secondaries on they vote: what they agree on adds up, and the noise is paid once. One
    alone has nobody to agree with, and gives a few principal components.

    Args:
        situation: What is known before anything is computed.
    """
    votes = situation.secondaries > 1
    few = situation.secondaries < _FEW_SECONDARIES
    width = situation.classes if votes else (4 if few else 2) * situation.secondaries
    encoder: dict[str, Any] = {"method": "principal", "layout": "blocks"}
    if votes:
        labels = "shares" if situation.dealer else "randomised"
        encoder = {"method": "votes", "layout": "sum", "labels": labels}
    return {
        "model": {
            "family": "fet",
            "neighbours": _NEIGHBOURS,
            "hidden": width,
            "heads": 1,
            "release": "pooled",
            "top": "tied",
            "average_positions_every": 0,
        },
        "encoder": encoder,
        "privacy": {"encoder": "frozen", **({"links_per_record": 1} if situation.promised else {})},
        "linkage": {"choose": "records"} if situation.promised else {},
    }


def resolved(source: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Return a parsed federation file with what it leaves to the rule written out.

    Args:
        source: The file; each table is one.

    Returns:
        The file, as it was if it asks for nothing, and what was chosen: a value by ``table.name``.

    Raises:
        ConfigError: If the rule needs what the file does not say.
    """
    encoder = source.get("encoder")
    if not isinstance(encoder, Mapping) or encoder.get("method") != AUTO:
        return source, {}
    said = {name: value for name, value in encoder.items() if name != "method"}
    written = {**source, "encoder": said}
    filled: dict[str, Any] = {**written}
    chosen: dict[str, Any] = {}
    for table, fields in winning_settings(_situation(source)).items():
        own = written.get(table, {})
        if not isinstance(own, Mapping):
            raise ConfigError(f"[{table}]: must be a table of settings, got {own!r}")
        new = {name: value for name, value in fields.items() if name not in own}
        filled[table] = {**own, **new}
        chosen |= {f"{table}.{name}": value for name, value in new.items()}
    return filled, chosen


def _situation(source: Mapping[str, Any]) -> Situation:
    federation, privacy = (source.get(name) for name in ("federation", "privacy"))
    if not isinstance(federation, Mapping) or not isinstance(privacy, Mapping):
        raise ConfigError(
            'encoder.method: "auto" follows from [federation] and [privacy]; write them'
        )
    task: Any = federation.get("task")
    roles = [party.get("role") for party in source.get("party", []) if isinstance(party, Mapping)]
    classes: Any = federation.get("classes")
    if task == "multiclass" and not isinstance(classes, int):
        raise ConfigError(
            'federation.classes: is missing; encoder.method = "auto" gives a label\'s classes a '
            "number each, so say how many classes there are"
        )
    if task != "multiclass":
        classes = 2 if task == "binary" else CLASSES_OF_NUMBERS
    return Situation(
        task=task,
        classes=classes,
        secondaries=roles.count("secondary"),
        dealer="dealer" in roles,
        promised=privacy.get("mechanism") != "none",
    )
