"""Tables of figures on a terminal: in pieces where they are too wide, and no figure cut short."""

from collections.abc import Iterator, Sequence
from typing import Final, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

_BESIDE_TEXT: Final = 3
"""Of a column: a space at both ends and the line beside it."""


def print_figures(
    console: Console, table: Sequence[Sequence[str]], *, title: str = "", names: int = 1
) -> None:
    """Print figures below their headings, in as many pieces as the console's width asks for.

    Args:
        console: Where to.
        table: Headings, which may be broken between words, and then rows of as many cells, which
            may not.
        title: Stands above the first piece.
        names: How many columns say what a row is; every piece begins with them.
    """
    head, *rows = table
    widths = [
        max(len(text) for text in (*heading.split(), *(row[column] for row in rows)))
        for column, heading in enumerate(head)
    ]
    for number, columns in enumerate(_pieces(widths, console.width, names=names)):
        piece = Table(title=Text(title) if title and not number else None, title_justify="left")
        whole = sum(max(widths[one], len(head[one])) + _BESIDE_TEXT for one in columns)
        for one in columns:
            # What rich would do itself breaks cells, too, where headings have to be broken.
            width = widths[one] if whole >= console.width else None
            justify: Literal["left", "right"] = "left" if one < names else "right"
            piece.add_column(Text(head[one]), justify=justify, width=width)
        for row in rows:
            piece.add_row(*(Text(row[one]) for one in columns))
        console.print(piece)


def _pieces(widths: Sequence[int], limit: int, *, names: int) -> Iterator[list[int]]:
    """Say which columns stand beside one another: names, and as many more as there is room for."""
    room = limit - 1 - sum(width + _BESIDE_TEXT for width in widths[:names])
    piece, used = list(range(names)), 0
    for column, width in enumerate(widths[names:], names):
        if used and used + width + _BESIDE_TEXT > room:
            yield piece
            piece, used = list(range(names)), 0
        piece.append(column)
        used += width + _BESIDE_TEXT
    yield piece
