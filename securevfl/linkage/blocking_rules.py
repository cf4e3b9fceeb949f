"""Blocking by rules over key columns: a join that finds candidate pairs.

Whether a pair is a candidate depends on the keys of that pair alone: never on other rows or records
of a table, on how common a value is, or on how many candidates there are already. So a record's
choice of rows does not depend on other records, and caps (:mod:`securevfl.linkage.sampling`) and
samples keep their promises, on which the accounting of records stands (docs/privacy.md, section 3).
Every :class:`CandidatePairs` must keep to that.

What blocking loses is measured when it is set up and stays with the keys
(:class:`BlockingQuality`): there is no way to block without it.

A rule is a list of terms, each an expression of one row's key columns ("surname, left(given, 2)").
A row and a record are candidates if every term of at least one rule has the same value at both, and
none is missing or blank. So a pair is a candidate by its own two keys alone: terms may call nothing
but functions of one row (:data:`FUNCTIONS`), and are written anew from what DuckDB's parser made of
them, so that nothing else of a federation file is ever run.

DuckDB joins, in memory: it reads no file and fetches nothing, and nothing of a key is written to a
disk. Memory besides the tables: 9 bytes a row, record and rule, DuckDB's table of the records of
about as much, and :data:`_CHUNK_CELLS` pairs (or one row of them) of about 100 bytes.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float64, Int64, UInt64

from securevfl.core import checks
from securevfl.core.errors import ConfigError, DataError
from securevfl.linkage.links import LinkTable, batches, eligible_ids, empty_links, fill_slots
from securevfl.linkage.metrics.metric import Columns, KeyKind, KeyMetric
from securevfl.linkage.text import present_texts

if TYPE_CHECKING:
    import duckdb

# Nearest keys among candidates: fewer pairs are compared, and some links are lost.

_ROWS_MEASURED: Final = 200


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


@runtime_checkable
class CandidatePairs(Protocol):
    """Which pairs are compared, decided by the keys of a pair alone."""

    def pairs(
        self,
        rows: Int64[np.ndarray, " chosen"] | None,
        eligible: Bool[np.ndarray, " records"] | None,
    ) -> Iterator[Pairs]:
        """Yield the candidates of the chosen rows (None: all) among the eligible records.

        Runs of rows come in order, and are as long as memory for their pairs allows. Rows without
        a candidate may be left out.
        """
        ...

    def swapped(self) -> "CandidatePairs":
        """Return the same with the parties' roles exchanged: the very same pairs."""
        ...

    def figures(self) -> Mapping[str, Any]:
        """Return figures for the log besides :class:`BlockingQuality`."""
        ...


@runtime_checkable
class PairwiseKeys(KeyMetric, Protocol):
    """Keys that can be compared pair by pair."""

    def distances(
        self, rows: Int64[np.ndarray, " pairs"], records: Int64[np.ndarray, " pairs"]
    ) -> Float64[np.ndarray, " pairs"]:
        """Return the distance of each row to the record at its place, as :meth:`nearest` has it."""
        ...

    def swapped(self) -> "PairwiseKeys":
        """Return the same with the parties' roles exchanged."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockingQuality:
    """What blocking found and spared, on rows that were linked both ways."""

    rows_measured: int
    """Rows that were also compared with every record."""

    links_per_row: int
    """K."""

    recall_at_1: float
    """Share of those rows whose nearest link is as near as the nearest record."""

    recall_at_k: float
    """Share of their K nearest that were found; others as near as the K-th count as well."""

    candidates_per_row: float
    """Records that a row was compared with, on average."""

    reduction_ratio: float
    """Share of all pairs that were not compared."""

    def as_json(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        return asdict(self)


class BlockedKeys:
    """Keys that are compared with candidates alone; a row may have fewer than K links.

    Make it with :func:`blocked_keys`.
    """

    def __init__(
        self, keys: PairwiseKeys, candidates: CandidatePairs, quality: BlockingQuality
    ) -> None:
        self.quality = quality
        """What blocking loses; also of the swapped keys, as candidates are symmetric."""
        self._keys = keys
        self._candidates = candidates

    @property
    def num_rows(self) -> int:
        """Primary rows."""
        return self._keys.num_rows

    @property
    def num_records(self) -> int:
        """Records of the secondary."""
        return self._keys.num_records

    def nearest(
        self,
        rows: Int64[np.ndarray, " chosen"] | None,
        k: int,
        *,
        eligible: Bool[np.ndarray, " records"] | None = None,
    ) -> LinkTable:
        """Link the chosen rows (None: all) to their ``k`` nearest eligible candidates."""
        return _nearest_candidates(self._keys, self._candidates, rows, k, eligible=eligible)[0]

    def swapped(self) -> "BlockedKeys":
        """Exchange the parties' roles."""
        return BlockedKeys(self._keys.swapped(), self._candidates.swapped(), self.quality)

    def figures(self) -> Mapping[str, Any]:
        """Return what blocking lost and spared."""
        return {"blocking": {**self.quality.as_json(), **self._candidates.figures()}}

    def __repr__(self) -> str:
        return f"BlockedKeys({self.num_rows} rows, {self.num_records} records, {self.quality})"


def blocked_keys(
    keys: PairwiseKeys,
    candidates: CandidatePairs,
    k: int,
    *,
    rows_measured: int = _ROWS_MEASURED,
) -> BlockedKeys:
    """Link by candidates, and measure what that loses.

    Args:
        keys: Both parties' keys.
        candidates: Which pairs of them are compared.
        k: Links a row for which recall is measured.
        rows_measured: Rows, evenly spread over the table, that are compared with every record.

    Raises:
        ConfigError: If ``rows_measured`` is below 1.
        DataError: If there are fewer than ``k`` records.
    """
    checks.at_least(1, rows_measured=rows_measured)
    chosen = np.unique(np.linspace(0, keys.num_rows - 1, rows_measured).astype(np.int64))
    exact = keys.nearest(chosen, k)
    found, pairs = _nearest_candidates(keys, candidates, chosen, k)
    per_row = pairs / len(chosen)
    quality = BlockingQuality(
        rows_measured=len(chosen),
        links_per_row=k,
        recall_at_1=float((found.distances[:, 0] == exact.distances[:, 0]).mean()),
        recall_at_k=float((found.distances <= exact.distances[:, -1:]).mean()),
        candidates_per_row=per_row,
        reduction_ratio=1 - per_row / keys.num_records,
    )
    return BlockedKeys(keys, candidates, quality)


def _nearest_candidates(
    keys: PairwiseKeys,
    candidates: CandidatePairs,
    rows: Int64[np.ndarray, " chosen"] | None,
    k: int,
    *,
    eligible: Bool[np.ndarray, " records"] | None = None,
) -> tuple[LinkTable, int]:
    """Return the ``k`` nearest candidates of each row, and how many pairs were compared."""
    eligible_ids(keys.num_records, k, eligible)
    indices, distances = empty_links(keys.num_rows if rows is None else len(rows), k)
    compared = 0
    for pairs in candidates.pairs(rows, eligible):
        place = pairs.start + pairs.row
        apart = keys.distances(place if rows is None else rows[place], pairs.record)
        order = np.lexsort((pairs.record, apart, pairs.row))
        links = fill_slots(
            pairs.end - pairs.start, k, pairs.row[order], pairs.record[order], apart[order]
        )
        indices[pairs.start : pairs.end] = links.indices
        distances[pairs.start : pairs.end] = links.distances
        compared += len(apart)
    return LinkTable(indices=indices, distances=distances), compared


# Candidates by written rules over key columns: a join, in time that grows with what it finds.

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
"""What a term may call, each a function of its arguments alone."""

_OPERATORS: Final = frozenset(("||", "+", "-", "*", "/", "//", "%"))
_NUMBER: Final = re.compile(r"-?[0-9]{1,15}(\.[0-9]{1,15})?")
_LONGEST_RULE: Final = 500
_MOST_RULES: Final = 50
_LONGEST_REASON: Final = 200
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
    """As users wrote them."""

    terms: tuple[tuple[str, ...], ...]
    """Each rule's terms, as expressions of the columns ``c0``, ``c1``, ..."""

    kinds: Mapping[str, KeyKind]
    """What each key column holds, in order."""

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
                f"linkage.blocking: must be a number, or 1 to {_MOST_RULES} rules, got {len(rules)}"
            )
        with _database() as database:
            columns = [f"c{i} {_TYPES[kind]}" for i, kind in enumerate(kinds.values())]
            database.execute(f"create table columns ({', '.join(columns)})")
            terms = tuple(_terms_of(rule, list(kinds), database) for rule in rules)
        return cls(written=tuple(rules), terms=terms, kinds=dict(kinds))

    @property
    def keys(self) -> str:
        """The columns of a query that gives each row's value by every rule; NULL for missing."""
        return ", ".join(
            # Values of different rows that meet in one number only make a pair more a candidate.
            f"case when {' and '.join(_is_there(term) for term in terms)} "
            f"then hash({', '.join(terms)}) end as k{rule}"
            for rule, terms in enumerate(self.terms)
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _RuleValues:
    """One number for each row and rule; equal numbers are equal values of all of its terms."""

    values: UInt64[np.ndarray, "rules rows"]
    missing: Bool[np.ndarray, "rules rows"]

    @classmethod
    def of(cls, rules: BlockingRules, columns: Columns, *, whose: str) -> "_RuleValues":
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
                found = database.execute(query).fetchnumpy()
            except duckdb.Error as error:
                raise DataError(f"keys of {whose}: linkage.blocking: {_reason(error)}") from None
        parts = [np.ma.asarray(found[f"k{rule}"]) for rule in range(len(rules.terms))]
        return cls(
            values=np.stack([part.filled(0).astype(np.uint64) for part in parts]),
            missing=np.stack([np.ma.getmaskarray(part) for part in parts]),
        )

    def table(self, rows: np.ndarray | slice, numbers: np.ndarray) -> Any:
        """Return the chosen rows as a table for DuckDB, numbered as given."""
        import pyarrow as pa

        arrays = [pa.array(numbers, pa.int64())] + [
            pa.array(values[rows], pa.uint64(), mask=missing[rows])
            for values, missing in zip(self.values, self.missing, strict=True)
        ]
        return pa.table(arrays, names=["number", *(f"k{i}" for i in range(len(self.values)))])


@dataclass(frozen=True, kw_only=True, eq=False)
class RuleCandidates:
    """Pairs of a row and a record that keep one of the rules. Make it with :meth:`of`."""

    rules: BlockingRules
    """Which pairs are compared."""

    primary: _RuleValues
    """What the rules make of the primary's keys."""

    records: _RuleValues
    """What they make of the secondary's."""

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
            primary=_RuleValues.of(rules, primary, whose="the primary"),
            records=_RuleValues.of(rules, records, whose="the secondary"),
        )

    def pairs(
        self,
        rows: Int64[np.ndarray, " chosen"] | None,
        eligible: Bool[np.ndarray, " records"] | None,
    ) -> Iterator[Pairs]:
        """Yield candidates; see :class:`~securevfl.linkage.blocking_rules.CandidatePairs`."""
        database = self._all_records if eligible is None else self._loaded(eligible)
        most = self._most_pairs if rows is None else self._most_pairs[rows]
        each = " union ".join(
            f"select a.number as place, r.number as record from asked a join records r using (k{i})"  # noqa: S608
            for i in range(len(self.rules.terms))
        )
        for start, end in batches(most, _CHUNK_CELLS):
            part = slice(start, end) if rows is None else rows[start:end]
            asked = self.primary.table(part, np.arange(end - start, dtype=np.int64))
            database.register("asked_rows", asked)
            # DuckDB knows the size of its own tables, and looks the larger one up by the smaller.
            database.execute("create or replace table asked as from asked_rows")
            found = database.execute(each).fetchnumpy()
            database.unregister("asked_rows")
            yield Pairs(
                start=start,
                end=end,
                row=np.asarray(found["place"]),
                record=np.asarray(found["record"]),
            )

    def swapped(self) -> "RuleCandidates":
        """Exchange the parties' roles."""
        return replace(self, primary=self.records, records=self.primary)

    def figures(self) -> Mapping[str, Any]:
        """Return how many pairs each rule alone finds."""
        found = self._pairs_by_rule.sum(axis=1).tolist()
        return {"pairs_by_rule": dict(zip(self.rules.written, found, strict=True))}

    @cached_property
    def _all_records(self) -> "duckdb.DuckDBPyConnection":
        return self._loaded(None)

    def _loaded(self, eligible: Bool[np.ndarray, " records"] | None) -> "duckdb.DuckDBPyConnection":
        """Return a database of the eligible records (None: all)."""
        ids = np.arange(self.records.values.shape[1], dtype=np.int64)
        if eligible is not None:
            ids = ids[eligible]
        database = _database()
        database.register("given", self.records.table(ids, ids))
        database.execute("create table records as from given")
        database.unregister("given")
        return database

    @cached_property
    def _pairs_by_rule(self) -> Int64[np.ndarray, "rules rows"]:
        """How many records each rule gives each row."""
        counts = np.zeros(self.primary.values.shape, dtype=np.int64)
        for rule, (values, missing) in enumerate(
            zip(self.records.values, self.records.missing, strict=True)
        ):
            there, number = np.unique(values[~missing], return_counts=True)
            mine = self.primary.values[rule]
            place = np.minimum(np.searchsorted(there, mine), max(len(there) - 1, 0))
            if len(there):
                counts[rule] = np.where(there[place] == mine, number[place], 0)
            counts[rule, self.primary.missing[rule]] = 0
        return counts

    @cached_property
    def _most_pairs(self) -> Int64[np.ndarray, " rows"]:
        """The most pairs of each row: some may come of several rules."""
        return self._pairs_by_rule.sum(axis=0)


_TYPES: Final[Mapping[KeyKind, str]] = {"text": "varchar", "number": "double"}


def _is_there(term: str) -> str:
    return f"cast({term} as varchar) <> ''"


def _database() -> "duckdb.DuckDBPyConnection":
    """Return an empty database in memory.

    Raises:
        ConfigError: If DuckDB is not installed.
    """
    try:
        import duckdb
    except ImportError:
        raise ConfigError(
            "linkage.blocking: rules need DuckDB, which is not installed: "
            "pip install 'securevfl[sql]'"
        ) from None
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
    parsed, plain = (_parsed(text, database) for text in (rule, "1"))
    if parsed["error"]:
        raise ConfigError(f"{where}: can't be read: {_reason(parsed['error_message'])}")
    nodes = [statement["node"] for statement in parsed["statements"]]
    expected = plain["statements"][0]["node"]
    if len(nodes) != 1 or {**nodes[0], "select_list": None} != {**expected, "select_list": None}:
        raise ConfigError(f"{where}: must be expressions of key columns, with commas between")
    terms = []
    for node in nodes[0]["select_list"]:
        used: set[str] = set()
        terms.append(_written(node, columns, used, where=where))
        if not used:
            raise ConfigError(f"{where}: a term names no key column, so all pairs would keep it")
    try:
        database.execute(f"select {', '.join(terms)} from columns")  # noqa: S608 - written anew
    except duckdb.Error as error:
        reason = _reason(error)
        for number, name in enumerate(columns):
            reason = re.sub(rf"\bc{number}\b", name, reason)
        raise ConfigError(f"{where}: {reason}") from None
    return tuple(terms)


def _reason(error: object) -> str:
    return str(error).strip().split("\n")[0][:_LONGEST_REASON]


def _parsed(text: str, database: "duckdb.DuckDBPyConnection") -> dict[str, Any]:
    found = database.execute("select json_serialize_sql(?)", [f"select {text}"]).fetchone()
    assert found is not None, "one row"
    tree: dict[str, Any] = json.loads(found[0])
    return tree


def _written(node: Mapping[str, Any], columns: Sequence[str], used: set[str], *, where: str) -> str:
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
                _written(part["expression"], columns, used, where=where)
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
