"""Proposal for a federation of some tables: keys, features, task, model and promise."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from securevfl.core.conventions import Task
from securevfl.core.errors import ConfigError
from securevfl.data.cells import amounts_of, dates_of, texts_of
from securevfl.data.doubts import TableInUse
from securevfl.data.keys_and_labels import encode_labels, rarer_class
from securevfl.data.scaling import ColumnSettings
from securevfl.desk.setup.check import ExpectedLinks
from securevfl.desk.setup.proposed_columns import (
    Bounds,
    Column,
    Table,
    excluded_because,
    largest_delta,
    no_such_column,
)
from securevfl.desk.setup.proposed_keys import KeyProposal, propose_keys

if TYPE_CHECKING:
    import pandas as pd

_MOST_CLASSES: Final = 20
_TAKEN: Final = "taken from the records"
# Words of fewer rows are not written into a file: they may speak of one person.
_FEW: Final = 10
_OTHER: Final = "other"
# A range leaves out this share of the values at either end, and so many at least: no single
# record decides it.
_OUTER: Final = 0.01
_LEAST_OUTER: Final = 5

Use = Literal["key", "label", "truth", "feature", "excluded"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnUse:
    """Proposed use of one column."""

    column: Column
    use: Use
    why: str
    """Reason in a few words, without figures of the records, since the file goes to others."""

    bounds: Bounds | None = None
    """Declared range of a secondary's numbers or dates; None if it must be filled in."""

    words: tuple[str, ...] | None = None
    """Declared words of a secondary's column; None if they must be filled in."""

    source: str = ""
    """Origin of the bounds or words."""

    may_be_missing: bool = False
    """True if the file says that values of a secondary's column may be missing."""

    gaps_open: bool = False
    """True if values are missing without a declaration that they may be."""

    @property
    def open(self) -> bool:
        """Whether the file needs bounds or words that are not declared."""
        undeclared = self.bounds is None and self.words is None
        return self.use == "feature" and self.source != "" and undeclared

    @property
    def reason(self) -> str:
        """Reason, with a feature's words or bounds and their origin."""
        if self.use != "feature" or not self.source:
            return self.why
        if self.words is not None:
            return f"{self.why}: {len(self.words)} words, {self.source}"
        if self.bounds is not None:
            low, high = (end if isinstance(end, str) else f"{end:.12g}" for end in self.bounds)
            return f"{self.why}: {low} to {high}, {self.source}"
        return f"{self.why}: {self.source}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    """Requests of the user of ``init``."""

    label: str
    keys: tuple[str, ...] = ()
    truth: str | None = None
    task: Task | None = None
    positive: str | None = None
    """Label of a binary task that probabilities are about."""

    epsilon: float = 2.0
    bounds_from_data: bool = False
    name: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """Proposed federation, as ``init`` writes it."""

    wishes: Wishes
    """Requests, completed by what is proposed where none was made."""

    tables: tuple[Table, ...]
    """Tables of all parties, the primary's first."""

    uses: Mapping[str, tuple[ColumnUse, ...]]
    """Use of every column, by party."""

    keys: KeyProposal
    task: Task
    task_reason: str
    some_unlabelled: bool
    """True if rows of the primary lack a label."""

    delta: float
    classes: int | None
    """Number of classes of the label; None: unknown."""

    spelling: Mapping[str, Any] = field(default_factory=dict)
    """Settings of ``[linkage]`` under which keys of tables on this machine are spelled alike."""

    spelling_shares: tuple[str, ...] = ()
    """Effects of ``spelling`` with shares of rows, which must not stand in the shared file."""

    doubts: tuple[str, ...] = ()
    """Doubts about these links with figures of records, which must not stand in the shared file."""

    split_column: str | None = None
    """Key column whose rows stay on one side of the split, as many rows have one key; else None."""

    @property
    def neighbours(self) -> int:
        """K: of a score by keys that are alike, 1, since a row with one record costs less."""
        alone = self.classes == 2 and self.keys.metric != "exact"
        return 1 if alone else self.keys.neighbours

    links: Mapping[str, ExpectedLinks] = field(default_factory=dict)
    """Expected links by secondary, for tables on this machine."""

    @property
    def positive_in_words(self) -> str:
        """The positive class with its share of the rows; empty where it is not known here."""
        column = self.tables[0].column(self.wishes.label)
        if self.task != "binary" or column is None or column.values is None:
            return ""
        labels, classes = encode_labels(
            column.values.dropna(), task="binary", where="--label", positive=self.wishes.positive
        )
        positive = classes[1] if classes else self.wishes.positive
        return f"positive: {positive!r} ({labels.mean():.1%} of the rows)"

    @property
    def left_open(self) -> list[tuple[str, str]]:
        """Party and column of each missing declaration; the file runs without any."""
        label = [] if self.classes is not None else [(self.tables[0].name, self.wishes.label)]
        return label + [
            (name, use.column.name)
            for name, uses in self.uses.items()
            for use in uses
            if use.open or use.gaps_open
        ]

    @property
    def ready(self) -> bool:
        """Whether the file runs as it is."""
        return not self.left_open

    def features(self, party: str) -> list[ColumnUse]:
        """Return the columns of a party that become features."""
        return [use for use in self.uses[party] if use.use == "feature"]

    def as_json(self) -> dict[str, object]:
        """Return the content of ``init --json``."""
        return {
            "ready": self.ready,
            "open": [f"{party}.{column}" for party, column in self.left_open],
            "task": self.task,
            "metric": self.keys.metric,
            "keys": {party: list(names) for party, names in self.keys.columns.items()},
            "reasons": [*self.keys.reasons, *self.spelling_shares],
            "warnings": list(self.doubts),
            "spelling": dict(self.spelling),
            "columns": {
                party: {use.column.name: {"use": use.use, "why": use.reason} for use in uses}
                for party, uses in self.uses.items()
            },
            "epsilon": self.wishes.epsilon,
            "delta": self.delta,
            "bounds_from_data": self.wishes.bounds_from_data,
            "links": {name: links.as_json() for name, links in self.links.items()},
        }


def propose(tables: Sequence[Table], wishes: Wishes) -> Proposal:
    """Propose a federation file.

    Args:
        tables: The primary's table, then the secondaries'.
        wishes: The user's requests.

    Raises:
        ConfigError: If the label or the truth is missing, a key cannot be found, a secondary would
            have no feature, or a positive class is wished for a task without one.
        DataError: If no row has the positive class.
    """
    primary, *secondaries = tables
    label = _column(primary, "--label", wishes.label)
    for table in tables if wishes.truth else ():
        _column(table, "--truth", wishes.truth or "")
    special = [name for name in (wishes.truth,) if name is not None]
    without = _without_column(tables, wishes.label, special)
    keys = propose_keys(without, asked=wishes.keys, without=special)
    uses = {
        table.name: tuple(
            _use_of(column, table is primary, keys.columns[table.name], wishes)
            for column in table.columns
        )
        for table in tables
    }
    task, why = _task_of(label) if wishes.task is None else (wishes.task, "as you asked")
    _require_positive(wishes.positive, label, task)
    positive = wishes.positive
    if positive is None and task == "binary" and label.values is not None:
        positive = rarer_class(label.values)
    counts = {name: sum(use.use == "feature" for use in own) for name, own in uses.items()}
    for name, count in counts.items():
        # A primary may have keys and labels alone; a secondary has nothing else to give.
        if count == 0 and name != primary.name:
            raise ConfigError(
                f"party {name!r}: no column is left that could be a feature; keys are "
                f"{', '.join(keys.columns[name])}. Name fewer by --key, or give it more columns"
            )
    return Proposal(
        wishes=replace(wishes, name=wishes.name or primary.name, positive=positive),
        tables=tuple(tables),
        uses=uses,
        keys=keys,
        task=task,
        task_reason=why,
        some_unlabelled=bool(label.inferred and label.inferred.missing),
        delta=min(table.delta or largest_delta(table.rows) for table in secondaries),
        classes=_classes_of(label, task),
    )


def declared_uses(table: Table) -> list[ColumnUse]:
    """Return what a secondary's columns would be, before keys are chosen."""
    return [_use_of(column, False, (), Wishes(label="")) for column in table.columns]


def table_in_use(
    table: Table, *, key: Sequence[str] = (), label: str | None = None, task: Task | None = None
) -> TableInUse | None:
    """Return a table with the columns that could be features, to ask it for doubts.

    Args:
        table: The table; None is returned where it is not on this machine.
        key: Its key columns.
        label: Its label.
        task: Kind of the label.
    """
    if table.frame is None:
        return None
    columns = [
        column
        for column in table.columns
        if column.name not in (*key, label) and excluded_because(column) is None
    ]
    return TableInUse(
        frame=table.frame,
        key=key,
        label=label,
        numeric_label=task == "regression",
        features={column.name: column.inferred for column in columns if column.inferred},
        settings=ColumnSettings(
            bounds={column.name: column.bounds for column in columns if column.bounds},
            categories={column.name: column.words for column in columns if column.words},
        ),
        random_split=True,
    )


def _column(table: Table, option: str, name: str) -> Column:
    if (column := table.column(name)) is not None:
        return column
    known = [column.name for column in table.columns]
    raise ConfigError(f"{option} {name}: of {table.name!r}, {no_such_column(name, known)}")


def _without_column(tables: Sequence[Table], label: str, special: Sequence[str]) -> list[Table]:
    """Return the tables without the primary's label, which is no key."""
    primary, *others = tables
    kept = tuple(c for c in primary.columns if c.name != label and c.name not in special)
    stripped = Table(name=primary.name, data=primary.data, columns=kept, rows=primary.rows)
    return [stripped, *others]


def _task_of(label: Column) -> tuple[Task, str]:
    if label.inferred is None or label.values is None:
        if label.kind == "boolean":
            return "binary", "the label is true or false"
        task: Task = "multiclass" if label.kind == "words" else "regression"
        return task, f"the label holds {label.kind}, by the column list"
    if label.inferred.kind in (None, "date") or label.inferred.problem:
        raise ConfigError(
            f"--label {label.name}: {label.inferred.problem or 'holds dates'}; a label is a "
            f"number, or one of few words"
        )
    if label.inferred.sign:
        raise ConfigError(
            f"--label {label.name}: holds numbers with the sign {label.inferred.sign!r}; write "
            f"labels as numbers without one, in the unit that predictions are to have"
        )
    if label.inferred.different == 2:
        return "binary", "the label has two values"
    if label.inferred.kind == "words":
        return "multiclass", "the label is one of several words"
    present = label.values.dropna().astype(float)
    if label.inferred.different <= _MOST_CLASSES and bool((present % 1 == 0).all()):
        return "multiclass", 'the label has few whole numbers; write "regression" if they are sizes'
    return "regression", "the label is a number"


def _require_positive(positive: str | None, label: Column, task: Task) -> None:
    """Refuse an invalid positive class, as far as the label's values are known."""
    if positive is None:
        return
    if task != "binary":
        raise ConfigError(f"--positive {positive}: is one of two classes; the task is {task}")
    if label.values is not None:
        where = f"--label {label.name}"
        encode_labels(label.values.dropna(), task=task, where=where, positive=positive)


def _classes_of(label: Column, task: Task) -> int | None:
    """Return the number of class means; None if it is unknown."""
    if task == "multiclass":
        return None if label.inferred is None else label.inferred.different
    return 2


def _use_of(column: Column, primary: bool, keys: Sequence[str], wishes: Wishes) -> ColumnUse:
    def as_(use: Use, why: str) -> ColumnUse:
        return ColumnUse(column=column, use=use, why=why)

    if primary and column.name == wishes.label:
        return as_("label", "as you said")
    if column.name == wishes.truth:
        return as_("truth", "as you said; for figures of linkage alone")
    if column.name in keys:
        return as_("key", "parties link by it")
    if (why := excluded_because(column)) is not None:
        return as_("excluded", why)
    if primary:
        return as_("feature", column.kind)
    return _declare_use(column, wishes)


def _declare_use(column: Column, wishes: Wishes) -> ColumnUse:
    """Return a secondary's feature with its declared values, or marked as open."""
    gaps = column.inferred is not None and column.inferred.missing > 0
    missing = column.may_be_missing or (gaps and wishes.bounds_from_data)

    def feature(source: str, **what: Any) -> ColumnUse:
        return ColumnUse(
            column=column,
            use="feature",
            why=column.kind,
            source=source,
            may_be_missing=missing,
            gaps_open=gaps and not missing,
            **what,
        )

    if column.bounds is not None or column.words is not None:
        return feature(column.declared_by, bounds=column.bounds, words=column.words)
    if column.kind == "boolean":
        return feature("")
    if wishes.bounds_from_data and column.values is not None:
        if column.kind == "words":
            return feature(_TAKEN, words=frequent_words(column.values))
        return feature(_TAKEN, bounds=rounded_range(column, column.values))
    return feature("not declared")


def frequent_words(values: "pd.Series[Any]") -> tuple[str, ...]:
    """Return the words of at least ten rows, and "other" for all others."""
    places, texts = texts_of(values)
    counts = np.bincount(places[places >= 0], minlength=len(texts))
    common = sorted(text for text, count in zip(texts, counts, strict=True) if count >= _FEW)
    return (*(word for word in common if word != _OTHER), _OTHER)


def rounded_range(column: Column, values: "pd.Series[Any]") -> Bounds:
    """Return the range of nearly all of a column's values, rounded outwards.

    One value in a hundred lies outside at either end, and five at least; where nothing is left
    between these, the extremes are the ends. They are rounded to one digit of their distance; of
    dates, to whole years.
    """
    if column.kind == "date":
        dates = dates_of(values)
        years = dates[~np.isnat(dates)].astype("datetime64[Y]").astype(np.int64) + 1970
        first, last = _inner(np.sort(years))
        return f"{first:04.0f}-01-01", f"{last:04.0f}-12-31"
    numbers = amounts_of(values, "" if column.inferred is None else column.inferred.sign)
    low, high = _inner(np.sort(numbers[np.isfinite(numbers)]))
    step = 10.0 ** math.floor(math.log10(high - low))
    low, high = math.floor(low / step) * step, math.ceil(high / step) * step
    digits = max(0, -math.floor(math.log10(step)))
    return round(low, digits), round(high, digits)


def _inner(ordered: np.ndarray) -> tuple[float, float]:
    """Return the ends of sorted values after the outer ones are left out."""
    outside = min(max(_LEAST_OUTER, round(len(ordered) * _OUTER)), (len(ordered) - 1) // 2)
    low, high = float(ordered[outside]), float(ordered[-1 - outside])
    return (low, high) if low < high else (float(ordered[0]), float(ordered[-1]))
