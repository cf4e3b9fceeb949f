"""Figures, results and settings as text for people: at a prompt, in notebooks and in files."""

import dataclasses
import html
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, time
from typing import Final, TypeGuard

_SMALLEST: Final = 1e-3
_LARGEST: Final = 1e7


def epsilon_in_words(epsilon: float | None) -> str:
    """Return an epsilon in words; None and infinity have no bound."""
    return "without bound" if epsilon is None or math.isinf(epsilon) else f"{epsilon:.4g}"


def finite_or_none(value: float) -> float | None:
    """Return a figure for JSON, where None stands for infinity."""
    return value if math.isfinite(value) else None


def format_figure(
    value: float, *, sign: str = "", beside: Iterable[float] = (), digits: int = 4
) -> str:
    """Return a figure with fixed decimals, or with significant digits if it is very large or small.

    Args:
        value: The figure.
        sign: ``"+"`` also marks positive figures.
        beside: Figures of the same unit that appear next to it, with the same format.
        digits: Decimals of a figure of usual size: from 0.001 to below 10 million, or 0.
    """
    largest = max(
        (abs(number) for number in (value, *beside) if math.isfinite(number)), default=0.0
    )
    if largest != 0 and not _SMALLEST <= largest < _LARGEST:
        return f"{value:{sign}.4g}"
    # Not "-0.0000".
    return f"{round(value, digits) + 0.0:{sign}.{digits}f}"


_LONGEST_REPR: Final = 90


class Summarised:
    """Base of results with a short ``repr``: a heading and a few figures."""

    __slots__ = ()

    def summary(self) -> tuple[str, Mapping[str, str]]:
        """Return a heading, and figures by name."""
        raise NotImplementedError

    def __repr__(self) -> str:
        heading, figures = self.summary()
        lines = [f"{type(self).__name__}({heading})"]
        return "\n".join([*lines, *(f"  {name}: {text}" for name, text in figures.items())])

    def _repr_html_(self) -> str:
        """Return a small HTML table for notebooks."""
        heading, figures = self.summary()
        rows = "".join(
            f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>"
            for name, text in figures.items()
        )
        caption = html.escape(f"{type(self).__name__}: {heading}")
        return f"<table><caption>{caption}</caption>{rows}</table>"


def short_repr(value: object) -> str:
    """Return a value's repr in one short line: shapes of frames, and fields that were changed."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (
            f"{field.name}={short_repr(getattr(value, field.name))}"
            for field in dataclasses.fields(value)
            if field.repr and getattr(value, field.name) != field.default
        )
        text = f"{type(value).__name__}({', '.join(fields)})"
    elif (shape := getattr(value, "shape", None)) is not None:
        text = f"<{type(value).__name__} {' x '.join(map(str, shape))}>"
    elif isinstance(value, list | tuple):
        text = f"[{', '.join(map(short_repr, value))}]"
    elif isinstance(value, Mapping):
        pairs = (f"{name!r}: {short_repr(item)}" for name, item in value.items())
        text = f"{{{', '.join(pairs)}}}"
    else:
        text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST_REPR else f"{text[: _LONGEST_REPR - 4]} ..."


def toml_key(name: str) -> str:
    """Return a name as a TOML key."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml_value(name)


def toml_value(value: object) -> str:
    """Return a value as TOML, on one line."""
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{toml_key(name)} = {toml_value(item)}" for name, item in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, float):
        return str(value)
    # For other values, JSON is TOML, except that TOML requires DEL to be escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_text(source: Mapping[str, object]) -> str:
    """Return a TOML document with a table for each section and one setting on each line."""
    blocks = [("", source)]
    for name, value in source.items():
        if isinstance(value, Mapping):
            blocks.append((f"[{toml_key(name)}]", value))
        elif _is_tables(value):
            blocks += [(f"[[{toml_key(name)}]]", table) for table in value]
    texts = []
    for heading, settings in blocks:
        lines = [heading] if heading else []
        for name, value in settings.items():
            if heading or not (isinstance(value, Mapping) or _is_tables(value)):
                lines.append(f"{toml_key(name)} = {toml_value(value)}")
        texts.append("\n".join(lines))
    return "\n\n".join(filter(None, texts)) + "\n"


def _is_tables(value: object) -> TypeGuard[Sequence[Mapping[str, object]]]:
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(isinstance(item, Mapping) for item in value)
    )
