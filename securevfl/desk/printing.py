"""Printing of text and of tables of figures by commands."""

import textwrap
from collections.abc import Iterator, Sequence
from typing import Final, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

_BESIDE_TEXT: Final = 3
"""Characters of a column beyond its text: a space at both ends, and a line."""


def say(console: Console, head: str, text: str, *, style: str = "") -> None:
    """Print a text after a bold head, wrapped between words."""
    if console.is_terminal:
        console.print(Text.assemble((head, f"bold {style}".strip()), text))
    else:
        # Rich would break paths that are longer than a line.
        console.print(wrap_text(head + text), markup=False, highlight=False, soft_wrap=True)


def wrap_text(text: str) -> str:
    """Return a text wrapped to 80 columns with hanging indent; words and paths stay whole."""
    return textwrap.fill(
        text, 80, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def print_figures(
    console: Console, table: Sequence[Sequence[str]], *, title: str = "", names: int = 1
) -> None:
    """Print a table of figures, split by columns if the console is too narrow.

    Args:
        console: The terminal or file.
        table: A row of headings, which may wrap between words, then rows of as many cells, which do
            not wrap.
        title: Title above the first piece.
        names: Number of leading columns that identify a row; every piece repeats them.
    """
    head, *rows = table
    widths = [
        max(len(text) for text in (*heading.split(), *(row[column] for row in rows)))
        for column, heading in enumerate(head)
    ]
    for number, columns in enumerate(_pieces(widths, console.width, names=names)):
        piece = Table(title=Text(title) if title and not number else None, title_justify="left")
        whole = sum(max(widths[column], len(head[column])) + _BESIDE_TEXT for column in columns)
        for column in columns:
            # Without a width, rich would wrap cells as well as headings.
            width = widths[column] if whole >= console.width else None
            justify: Literal["left", "right"] = "left" if column < names else "right"
            piece.add_column(Text(head[column]), justify=justify, width=width)
        for row in rows:
            piece.add_row(*(Text(row[column]) for column in columns))
        console.print(piece)


def _pieces(widths: Sequence[int], limit: int, *, names: int) -> Iterator[list[int]]:
    """Yield the columns of each piece: the leading ones, and as many others as fit."""
    room = limit - 1 - sum(width + _BESIDE_TEXT for width in widths[:names])
    piece, used = list(range(names)), 0
    for column, width in enumerate(widths[names:], names):
        if used and used + width + _BESIDE_TEXT > room:
            yield piece
            piece, used = list(range(names)), 0
        piece.append(column)
        used += width + _BESIDE_TEXT
    yield piece
