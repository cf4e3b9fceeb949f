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
CLASSES_OF_NUMBERS: Final = 2
"""Votes of a label that is a number: for its lower and for its upper half."""
_NEIGHBOURS: Final = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """What settings follow from."""

    task: Task
    classes: int
    """Of the label; of a number, of its votes."""
    dealer: bool
    """Whether there is a party that deals masks."""


Settings = dict[str, dict[str, Any]]
"""Settings by table and name."""


def winning_settings(situation: Situation) -> Settings:
    """Return the settings that did best where a situation like this one was measured.

    Encoders vote, with one secondary too: what all of them write has as many numbers as the label
    has classes, so nothing is spent on what says nothing of it.

    Args:
        situation: What is known before anything is computed.
    """
    labels = "shares" if situation.dealer else "randomised"
    return {
        "model": {
            "family": "fet",
            "neighbours": _NEIGHBOURS,
            "hidden": situation.classes,
            "heads": 1,
            "release": "pooled",
            "top": "tied",
        },
        "encoder": {"method": "votes", "layout": "sum", "labels": labels},
        "privacy": {"encoder": "frozen", "links_per_record": 1},
        "linkage": {"choose": "records"},
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


def as_asked(source: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file as it was before :func:`resolved`, which chooses anew where it is changed.

    Args:
        source: What :func:`resolved` returned.
        chosen: The same.
    """
    if not chosen:
        return dict(source)
    said = {
        table: {name: value for name, value in fields.items() if f"{table}.{name}" not in chosen}
        if isinstance(fields, Mapping)
        else fields
        for table, fields in source.items()
    }
    return {**said, "encoder": {**said["encoder"], "method": AUTO}}


def _situation(source: Mapping[str, Any]) -> Situation:
    federation = source.get("federation")
    if not isinstance(federation, Mapping):
        raise ConfigError('encoder.method: "auto" follows from [federation]; write it')
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
        dealer="dealer" in roles,
    )
