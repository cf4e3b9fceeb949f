"""Blocking by rules over key columns: a join that finds candidate pairs.

A rule is a list of terms, each an expression of one row's key columns ("surname, left(given, 2)").
A row and a record are candidates if every term of at least one rule has the same value at both, and
none is missing or blank. So a pair is a candidate by its own two keys alone: terms may call nothing
but functions of one row (:data:`FUNCTIONS`), and are written anew from what DuckDB's parser made of
them, so that nothing else of a federation file is ever run.

DuckDB makes one number of each row's terms, in memory: it reads no file and fetches nothing, and
nothing of a key is written to a disk. Equal numbers are joined by sorting. Memory besides the
tables: 25 bytes a row, record and rule, and :data:`_CHUNK_CELLS` pairs (or one row of them) of
about 100 bytes.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from jaxtyping import Int64

from securevfl.core import checks
from securevfl.core.errors import ConfigError, DataError, of_an_extra
from securevfl.linkage.links import Chosen, RecordsByKey, Sample, batches
from securevfl.linkage.metrics.metric import Columns, KeyKind
from securevfl.linkage.text import present_texts

if TYPE_CHECKING:
    import duckdb

FUNCTIONS: Final = frozenset(
    {
        "abs",
        "ceil",
        "floor",
        "left",
        "length",
        "lower",
        "ltrim",
        "replace",
        "reverse",
        "right",
        "round",
        "rtrim",
        "split_part",
        "strip_accents",
        "substr",
        "substring",
        "trim",
        "upper",
    }
)
"""Functions that a term may call; each depends on its arguments alone."""

_OPERATORS: Final = frozenset(("||", "+", "-", "*", "/", "//", "%"))
_NUMBER: Final = re.compile(r"-?[0-9]{1,15}(\.[0-9]{1,15})?")
_LONGEST_RULE: Final = 500
_MOST_RULES: Final = 50
_LONGEST_REASON: Final = 200

# A key has up to 65,535 characters: a row's text stays below some megabytes.
_MOST_GROWTH: Final = 100
_CHUNK_CELLS: Final = 2**21

# Keys of people stay in memory, for any query.
_SETTINGS: Final = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "python_enable_replacements": "false",
    "temp_directory": "",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockingRules:
    """Rules that were read and found harmless."""

    written: tuple[str, ...]
    """Rules as users wrote them."""

    terms: tuple[tuple[str, ...], ...]
    """Each rule's terms, as expressions of the columns ``c0``, ``c1``, ..."""

    kinds: Mapping[str, KeyKind]
    """Kind of each key column, in order."""

    @classmethod
    def parse(cls, rules: Sequence[str], kinds: Mapping[str, KeyKind]) -> "BlockingRules":
        """Read rules.

        Args:
            rules: As users write them: terms with commas between, in SQL's spelling.
            kinds: Key columns and what they hold.

        Raises:
            ConfigError: If DuckDB is not installed, or naming the rule and what is wrong with it.
        """
        if not 1 <= len(rules) <= _MOST_RULES:
            raise ConfigError(
                f"linkage.blocking: must be 1 to {_MOST_RULES} rules, got {len(rules)}"
            )
        with _database() as database:
            columns = [f"c{i} {_TYPES[kind]}" for i, kind in enumerate(kinds.values())]
            database.execute(f"create table columns ({', '.join(columns)})")
            terms = tuple(_terms_of(rule, list(kinds), database) for rule in rules)
        return cls(written=tuple(rules), terms=terms, kinds=dict(kinds))

    @property
    def keys(self) -> str:
        """The columns of a query that gives each row's value by every rule; NULL for missing.

        Also where a term fails: an error would show the other party that there is such a row.
        """
        return ", ".join(
            # Values of different rows that meet in one number only make a pair more a candidate.
            f"try(case when {' and '.join(_is_there(term) for term in terms)} "
            f"then hash({', '.join(terms)}) end) as k{rule}"
            for rule, terms in enumerate(self.terms)
        )


def _rule_values(
    rules: BlockingRules, columns: Columns, *, whose: str
) -> list["np.ma.MaskedArray[Any, Any]"]:
    """Return a number for each row by every rule: equal for equal values of all of its terms."""
    import duckdb
    import pyarrow as pa  # slow to load; reading a table has loaded it

    arrays = [
        pa.array(present_texts(columns[name], whose=whose), pa.string())
        if kind == "text"
        else pa.array(columns[name], pa.float64(), from_pandas=True)
        for name, kind in rules.kinds.items()
    ]
    table = pa.table(arrays, names=[f"c{i}" for i in range(len(arrays))])
    query = f"select {rules.keys} from columns"  # noqa: S608 - terms are written anew
    with _database() as database:
        database.register("columns", table)
        try:
            rule_columns = database.execute(query).fetchnumpy()
        except duckdb.Error as error:
            raise DataError(f"keys of {whose}: linkage.blocking: {_reason(error)}") from None
    return [np.ma.asarray(rule_columns[f"k{rule}"], np.uint64) for rule in range(len(rules.terms))]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pairs:
    """The candidate pairs of a run of chosen rows."""

    start: int
    """Place of the first row of the run among the chosen ones."""

    end: int
    """Place behind its last row."""

    row: Int64[np.ndarray, " pairs"]
    """Place of each pair's row, counted from ``start``."""

    record: Int64[np.ndarray, " pairs"]
    """Record of each pair; no pair occurs twice."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RuleCandidates:
    """Pairs of a row and a record that keep one of the rules. Make it with :meth:`of`."""

    primary: list["np.ma.MaskedArray[Any, Any]"]
    """For each rule a number of each row, masked where a term is missing or blank."""

    records: list["np.ma.MaskedArray[Any, Any]"]
    """The same of the secondary's records."""

    rules: BlockingRules
    """Rules that select the pairs to compare."""

    @classmethod
    def of(cls, rules: BlockingRules, primary: Columns, records: Columns) -> "RuleCandidates":
        """Apply the rules to each row of both tables.

        Args:
            rules: Which pairs are compared.
            primary: The primary's key columns.
            records: The secondary's.

        Raises:
            DataError: If a value of a text column is no text, or too long.
        """
        return cls(
            rules=rules,
            primary=_rule_values(rules, primary, whose="the primary"),
            records=_rule_values(rules, records, whose="the secondary"),
        )

    def pairs(self, rows: Chosen | None, eligible: Sample | None) -> Iterator[Pairs]:
        """Yield the candidates of the chosen rows (None: all) among the eligible records.

        Runs of rows come in order, and are as long as memory for their pairs allows. Rows without
        a candidate may be left out.
        """
        among = self._all_records if eligible is None else self._sort_records(eligible)
        spans = self._spans(among, rows)
        records = len(self.records[0])
        # A pair may come of several rules.
        most = np.sum([count for _, count in spans], axis=0)
        for start, end in batches(most, _CHUNK_CELLS):
            rule_pairs = [
                by_value.pairs(first[start:end], count[start:end])
                for by_value, (first, count) in zip(among, spans, strict=True)
            ]
            pairs = np.unique(
                np.concatenate([row * records + record for row, record in rule_pairs])
            )
            row, record = np.divmod(pairs, records)
            yield Pairs(start=start, end=end, row=row, record=record)

    def swap_roles(self) -> "RuleCandidates":
        """Return the same with the parties' roles exchanged: the very same pairs."""
        return replace(self, primary=self.records, records=self.primary)

    def figures(self) -> Mapping[str, Any]:
        """Return how many pairs each rule alone finds."""
        pair_counts = [int(count.sum()) for _, count in self._spans(self._all_records, None)]
        return {"pairs_by_rule": dict(zip(self.rules.written, pair_counts, strict=True))}

    @cached_property
    def _all_records(self) -> list[RecordsByKey]:
        """Kept because rows are often linked part by part."""
        return self._sort_records(np.ones(len(self.records[0]), dtype=np.bool_))

    def _sort_records(self, eligible: Sample) -> list[RecordsByKey]:
        """Return the eligible records by the values of each rule."""
        return [
            RecordsByKey.of(values.data, np.flatnonzero(eligible & ~np.ma.getmaskarray(values)))
            for values in self.records
        ]

    def _spans(
        self, among: Sequence[RecordsByKey], rows: Chosen | None
    ) -> list[tuple[Int64[np.ndarray, " rows"], Int64[np.ndarray, " rows"]]]:
        """Return, for each rule, where the chosen rows' records begin, and how many there are."""
        spans = []
        for by_value, values in zip(among, self.primary, strict=True):
            mine = values if rows is None else values[rows]
            first, count = by_value.spans(mine.data)
            spans.append((first, np.where(np.ma.getmaskarray(mine), 0, count)))
        return spans


_TYPES: Final[Mapping[KeyKind, str]] = {"text": "varchar", "number": "double"}


def _is_there(term: str) -> str:
    return f"cast({term} as varchar) <> ''"


def _database() -> "duckdb.DuckDBPyConnection":
    """Return an empty database in memory.

    Raises:
        ConfigError: If DuckDB is not installed.
    """
    duckdb = of_an_extra("duckdb", use="linkage.blocking: a rule")
    return duckdb.connect(":memory:", config={**_SETTINGS, "threads": 1})


def _terms_of(
    rule: str, columns: Sequence[str], database: "duckdb.DuckDBPyConnection"
) -> tuple[str, ...]:
    """Return a rule's terms, written anew.

    Raises:
        ConfigError: Naming the rule and what is wrong with it.
    """
    import duckdb

    where = f"linkage.blocking: rule {rule[:_LONGEST_RULE]!r}"
    if len(rule) > _LONGEST_RULE:
        raise ConfigError(f"{where}: is longer than {_LONGEST_RULE} characters")
    parsed, plain = (_parse_expression(text, database) for text in (rule, "1"))
    if parsed["error"]:
        raise ConfigError(f"{where}: can't be read: {_reason(parsed['error_message'])}")
    nodes = [statement["node"] for statement in parsed["statements"]]
    expected = plain["statements"][0]["node"]
    if len(nodes) != 1 or {**nodes[0], "select_list": None} != {**expected, "select_list": None}:
        raise ConfigError(f"{where}: must be expressions of key columns, with commas between")
    terms = []
    for node in nodes[0]["select_list"]:
        used: set[str] = set()
        terms.append(_expression_text(node, columns, used, where=where))
        if not used:
            raise ConfigError(f"{where}: a term names no key column, so all pairs would keep it")
        if _growth(node) > _MOST_GROWTH:
            raise ConfigError(
                f"{where}: may make a text more than {_MOST_GROWTH} times as long, so that a party "
                f"with a certain key runs out of memory; replace takes a short text for another"
            )
    try:
        database.execute(f"select {', '.join(terms)} from columns")  # noqa: S608 - written anew
    except duckdb.Error as error:
        reason = _reason(error)
        for number, name in enumerate(columns):
            reason = re.sub(rf"\bc{number}\b", name, reason)
        raise ConfigError(f"{where}: {reason}") from None
    return tuple(terms)


def _growth(node: Mapping[str, Any]) -> float:
    """Return how many times as long as a key a text of the parser's tree may be, at most."""
    parts = [part["expression"] for part in node.get("arguments", ())]
    grown = [_growth(part) for part in parts] or [1.0]
    name = node.get("function_name", "").lower()
    if name == "replace" and len(parts) > 2:
        old, new = (
            float(len(part["literal"]["text"])) if "literal" in part else math.inf
            for part in parts[1:]
        )
        return grown[0] * max(1.0, new / (old if 1 < old < math.inf else 1))
    return sum(grown) if name == "||" else max(grown)


def _reason(error: object) -> str:
    return str(error).strip().split("\n")[0][:_LONGEST_REASON]


def _parse_expression(text: str, database: "duckdb.DuckDBPyConnection") -> dict[str, Any]:
    [(serialised,)] = database.execute(
        "select json_serialize_sql(?)", [f"select {text}"]
    ).fetchall()
    tree: dict[str, Any] = json.loads(serialised)
    return tree


def _expression_text(
    node: Mapping[str, Any], columns: Sequence[str], used: set[str], *, where: str
) -> str:
    """Return an expression of the parser's tree as text again, if it is one of a single row.

    Args:
        node: The tree.
        columns: Key columns.
        used: Gets the columns that it names.
        where: Name of the rule in messages.

    Raises:
        ConfigError: If it is anything but columns, texts, numbers and :data:`FUNCTIONS`.
    """
    if node["class"] == "COLUMN_REF":
        name = ".".join(node["column_names"])
        if name not in columns:
            near = checks.did_you_mean(name, columns)
            raise ConfigError(f"{where}: has no key column {name!r}{near}: {', '.join(columns)}")
        used.add(name)
        return f"c{columns.index(name)}"
    if node["class"] == "CONSTANT" and "literal" in node:
        kind, text = node["literal"]["kind"], node["literal"]["text"]
        if kind == "STRING":
            quoted = text.replace("'", "''")
            return f"'{quoted}'"
        if kind != "STRING" and _NUMBER.fullmatch(text):
            return str(text)
    if node["class"] == "FUNCTION":
        name = node["function_name"].lower()
        plain = not (node["filter"] or node["order_bys"]["orders"] or node["distinct"])
        plain &= not node["schema"] and not node["catalog"]
        if plain and name in FUNCTIONS | _OPERATORS:
            parts = [
                _expression_text(part["expression"], columns, used, where=where)
                for part in node["arguments"]
            ]
            if name in FUNCTIONS:
                return f"{name}({', '.join(parts)})"
            return f"({f' {name} '.join(parts)})" if len(parts) > 1 else f"({name} {parts[0]})"
        raise ConfigError(
            f"{where}: may not call {name}; a term is made of key columns, texts, numbers, "
            f"{' '.join(sorted(_OPERATORS))} and {', '.join(sorted(FUNCTIONS))}"
        )
    raise ConfigError(
        f"{where}: {node['class'].lower().replace('_', ' ')} is not allowed; a term is made of key "
        f"columns, texts, numbers, {' '.join(sorted(_OPERATORS))} and functions of one row"
    )
