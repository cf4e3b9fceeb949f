"""Which columns of a source are read."""

import difflib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from securevfl.core.errors import DataError

_SHOWN = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What is read of a table's columns; others are never in memory."""

    columns: Sequence[str] | None = None
    """These alone, in this order; None: all that there are."""

    if_there: Collection[str] = ()
    """With ``columns``, these too, as far as they are there."""

    exclude: Collection[str] = ()
    """Without these, which must be there nevertheless."""

    needed: Collection[str] = ()
    """These must be there."""

    expected: Collection[str] = ()
    """By these the header of a text file is known, beside those that must be there."""

    as_text: Collection[str] = ()
    """Columns of a text file that keep their spelling ("0123" stays a text)."""

    exact: Collection[str] | None = None
    """Columns whose numbers keep float64 and int64; others become float32 features anyway. None:
    all."""

    words: Mapping[str, Collection[str]] = field(default_factory=dict)
    """Words by column: a cell of a text file that is one is never empty, whatever it is called."""

    def choose(self, names: Sequence[str], *, where: str) -> list[str]:
        """Return the columns to read.

        Args:
            names: The table's columns.
            where: What messages call the table.

        Raises:
            DataError: If two columns have one name, or one that must be there is not.
        """
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise DataError(f"{where}: two columns are called {twice[0]!r}; rename one")
        require_names(names, [*self.needed, *(self.columns or ()), *self.exclude], where=where)
        if self.columns is not None:
            known = set(names)
            there = [name for name in self.if_there if name in known]
            return list(dict.fromkeys([*self.columns, *there]))
        excluded = set(self.exclude)
        return [name for name in names if name not in excluded]

    def chosen(self, columns: Sequence[str]) -> "Wanted":
        """Return what is wanted of a source that gives the chosen columns alone."""
        return replace(self, columns=columns, if_there=(), exclude=(), needed=())


def require_names(names: Sequence[str], columns: Sequence[str], *, where: str) -> None:
    """Check that all columns are there.

    Raises:
        DataError: Naming the first that is not, the nearest name, and those that there are.
    """
    known = set(names)
    for column in columns:
        if column not in known:
            close = difflib.get_close_matches(column, names, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            shown = ", ".join(names[:_SHOWN]) + more
            raise DataError(f"{where}: has no column {column!r}; {hint}It has {shown}")
