"""Read a table of settings into a frozen dataclass, refusing what does not belong.

The names of fields, their types and their defaults are those of the dataclass; its own
``__post_init__`` checks values. Every message names the field as ``section.field``.
"""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from securevfl.core import checks
from securevfl.core.errors import ConfigError, PrivacyError

T = TypeVar("T")


def read_settings(cls: type[T], table: Mapping[str, Any], *, where: str) -> T:
    """Build ``cls`` from ``table``.

    Args:
        cls: A dataclass whose fields are str, int, float, bool, ``Literal``, ``None`` unions or
            tuples of these, dicts from str to these, or such dataclasses themselves.
        table: Parsed TOML or JSON.
        where: What the table is called in messages, for example ``"privacy"``.

    Raises:
        ConfigError: For an unknown or missing field, a wrong type or an impossible value.
        PrivacyError: As ``cls`` raises it, with ``where`` in front.
    """
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    unknown = sorted(set(table) - set(fields))
    if unknown:
        close = checks.nearest(unknown[0], fields)
        hint = f"did you mean {close!r}? " if close else ""
        raise ConfigError(
            f"{where}.{unknown[0]}: no such field; {hint}Allowed: {', '.join(sorted(fields))}"
        )
    for name, field in fields.items():
        required = (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        if required and name not in table:
            raise ConfigError(f"{where}.{name}: is missing and has no default")
    hints = get_type_hints(cls)
    values = {
        name: _convert(value, hints[name], f"{where}.{name}") for name, value in table.items()
    }
    try:
        return cls(**values)
    except (ConfigError, PrivacyError) as error:
        text = str(error)
        raise type(error)(text if text.startswith(where) else f"{where}.{text}") from None


def _convert(value: Any, hint: Any, where: str) -> Any:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _convert_union(value, get_args(hint), where)
    if origin is Literal:
        if value not in get_args(hint):
            near = checks.did_you_mean(value, _words_of(hint))
            raise ConfigError(f"{where}: must be {_name(hint)}; got {value!r:.200}{near}")
        return value
    if origin is tuple and isinstance(value, list | tuple):
        item = get_args(hint)[0]
        return tuple(_convert(entry, item, f"{where}[{i}]") for i, entry in enumerate(value))
    if origin is dict and isinstance(value, Mapping):
        item = get_args(hint)[1]
        return {str(key): _convert(entry, item, f"{where}.{key}") for key, entry in value.items()}
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return read_settings(hint if isinstance(hint, type) else type(hint), value, where=where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f"{where}: must be below 1e308") from None
    if hint is Any or (origin is None and isinstance(value, hint) and _is_number(value, hint)):
        return value
    raise ConfigError(f"{where}: must be {_name(hint)}, got {value!r:.200}")


def _is_number(value: Any, hint: Any) -> bool:
    """Return whether a value may stand for a number; to Python, True and False are ints too."""
    return hint is not int or not isinstance(value, bool)


def _convert_union(value: Any, choices: tuple[Any, ...], where: str) -> Any:
    options = [option for option in choices if option is not type(None)]
    if value is None and len(options) < len(choices):
        return None
    for option in options:
        try:
            return _convert(value, option, where)
        except ConfigError:
            continue
    names = " or ".join(_name(option) for option in options)
    near = checks.did_you_mean(value, [word for option in options for word in _words_of(option)])
    raise ConfigError(f"{where}: must be {names}, got {value!r:.200}{near}")


def _words_of(hint: Any) -> list[str]:
    """Return the words that a ``Literal`` allows; none of another type."""
    return [word for word in get_args(hint) if get_origin(hint) is Literal and type(word) is str]


def _name(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(repr, get_args(hint)))}"
    words = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
    shapes = {tuple: "a list", dict: "a table"}
    if dataclasses.is_dataclass(hint):
        return "a table"
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(repr, get_args(hint)))}"
    return words.get(hint) or shapes.get(get_origin(hint)) or str(hint)
