"""Frames in Python as the parties of a simulation."""

from collections.abc import Mapping, Sequence
from typing import Any

from securevfl.core.errors import ConfigError
from securevfl.data.column_settings import ColumnSettings
from securevfl.data.frame_tables import from_frame
from securevfl.data.tables import PartyTable

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
        named = {str(name): one for name, one in secondaries.items()}
    elif isinstance(secondaries, list | tuple):
        named = {f"secondary-{number}": one for number, one in enumerate(secondaries, 1)}
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


def _columns(settings: Mapping[str, Any], name: str) -> ColumnSettings:
    bounds, privacy = settings.get("bounds"), settings.get("privacy")
    declared = privacy is not None and privacy.encoder != "trained" and privacy.mechanism != "none"
    if name == _PRIMARY or not declared:
        return ColumnSettings()
    own = bounds.get(name) if isinstance(bounds, Mapping) else bounds
    return ColumnSettings(bounds=own, own_statistics=False)
