"""Rules that block: what may be written, and what is refused."""

import sys
from typing import Any

import numpy as np
import pytest
from helpers.blocked import by_rules
from helpers.nearest import nearest_mixed

from securevfl.core.errors import ConfigError
from securevfl.data.tables import KeyTable
from securevfl.linkage.links import NO_RECORD
from securevfl.linkage.metrics.metric import Field, KeySpec
from securevfl.stages.fuzzy_keys.blocking_rules import BlockingRules, RuleCandidates
from securevfl.stages.fuzzy_keys.edits import Levenshtein
from securevfl.stages.fuzzy_keys.mixed import Mixed

KINDS: dict[str, Any] = {"surname": "text", "given name": "text", "born": "number"}


@pytest.mark.parametrize(
    ("rule", "terms"),
    [
        ("surname, left(surname, 3)", ("c0", "left(c0, 3)")),
        ("\"given name\" || 'it''s'", ("(c1 || 'it''s')",)),
        ("floor(born / 7.5) - -1", ("(floor((c2 / 7.5)) - -1)",)),
        ("lower(surname) as s -- a remark", ("lower(c0)",)),
        ("replace(surname, 'ß', 'ss')", ("replace(c0, 'ß', 'ss')",)),
    ],
)
def test_a_rule_is_written_anew(rule: str, terms: tuple[str, ...]) -> None:
    """What is run is made of the parser's tree, never of the user's text."""
    assert BlockingRules.parse([rule], KINDS).terms == (terms,)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("count(*)", "may not call count_star; a term is made of key columns"),
        ("sum(born)", "may not call sum"),
        ("random() + born", "may not call random"),
        ("nextval('s') + born", "may not call nextval"),
        ("read_csv('/etc/passwd') || surname", "may not call read_csv"),
        ("getenv('HOME') || surname", "may not call getenv"),
        ("main.left(surname, 2)", "may not call left"),
        ("lower(distinct surname)", "may not call lower"),
        ("row_number() over (order by surname)", "window is not allowed"),
        ("(select count(*) from columns)", "subquery is not allowed"),
        ("surname = 'x'", "comparison is not allowed"),
        ("case when born > 3 then surname end", "case is not allowed"),
        ("*", "star is not allowed"),
        ("surname from columns", "must be expressions of key columns"),
        ("distinct surname", "must be expressions of key columns"),
        ("surname, born where born > 3", "must be expressions of key columns"),
        ("surname limit 3", "must be expressions of key columns"),
        ("surname; select 1", "must be expressions of key columns"),
        ("surname; drop table columns", "can't be read"),
        ("left(surname, 3", "can't be read: syntax error"),
        ("", "can't be read"),
        ("surname, 1", "names no key column, so all pairs would keep it"),
        ("sirname", "no key column 'sirname'; did you mean 'surname'"),
        ("left(surname, born)", r"No function matches .*left\(VARCHAR, DOUBLE\)"),
        ("lower(surname) || " * 40 + "surname", "longer than 500 characters"),
        (
            "length(replace(replace(replace(surname, 'Ann', 'aaaaaaaaaa'), 'a', 'aaaaaaaaaa'), "
            "'a', 'aaaaaaaaaa'))",
            "more than 100 times as long",
        ),
        ("replace(surname, 'a', \"given name\")", "more than 100 times as long"),
    ],
)
def test_what_looks_beyond_one_row_is_refused(rule: str, message: str) -> None:
    """A cap holds only if a pair is a candidate by its own keys; and no file is ever touched."""
    with pytest.raises(ConfigError, match=rf"^linkage\.blocking: rule .*{message}"):
        BlockingRules.parse(["surname", rule], KINDS)


def test_too_few_and_too_many_rules_are_refused() -> None:
    """None would leave every row without a link."""
    for rules in ([], ["surname"] * 51):
        with pytest.raises(ConfigError, match="1 to 50 rules"):
            BlockingRules.parse(rules, KINDS)


def test_a_missing_duckdb_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the extra that brings it."""
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(ConfigError, match=r"pip install 'securevfl\[sql\]'"):
        BlockingRules.parse(["surname"], KINDS)


@pytest.mark.parametrize(
    "rule",
    [
        "length(surname) * 999999999999999 * 2500",
        "1 // (born - 1987)",
        "born // (length(surname) - 4)",
    ],
)
def test_a_value_that_a_term_cannot_take_is_missing(rule: str) -> None:
    """An error would show the primary, which writes the rule, that there is such a record."""
    rules = BlockingRules.parse([rule], KINDS)
    columns = {"surname": ["anna", "bo"], "given name": ["a", "b"], "born": np.array([1987.0, 1.0])}
    (values,) = RuleCandidates.of(rules, columns, columns).records
    assert np.ma.getmaskarray(values).tolist() == [True, False]


def test_any_rule_and_all_of_its_terms() -> None:
    """Missing and blank values equal none, and letters are compared as the metric does."""
    primary: dict[str, list[str | None]] = {
        "name": ["Ann", "Bob", "Eve", None, " "],
        "code": ["1", "2", None, "4", "5"],
    }
    records: dict[str, list[str | None]] = {
        "name": ["ANN ", "ann", "eve", None, ""],
        "code": ["9", "1", None, "4", "6"],
    }
    keys = by_rules(primary, records, ["name, left(code, 1)", "reverse(code)"], 5)
    found = [
        sorted(record for record in row if record != NO_RECORD)
        for row in keys.nearest(None, 5).indices.tolist()
    ]
    assert found == [[1], [], [], [3], []]
    assert keys.figures()["blocking"]["pairs_by_rule"] == {
        "name, left(code, 1)": 1,
        "reverse(code)": 2,
    }


def test_rules_take_links_away_and_move_none() -> None:
    """Of weighted fields too, with numbers and missing values: links of candidates alone."""
    rng = np.random.default_rng(1)
    fields = (
        Field(name="name", kind="text"),
        Field(name="born", kind="number", scale=10.0),
        Field(name="state", kind="exact", weight=2.0),
    )
    tables = [
        KeyTable(
            name="party",
            columns={
                "name": np.array(
                    ["".join(rng.choice(list("abc"), 4)) for _ in range(rows)], object
                ),
                "born": np.where(rng.random(rows) < 0.2, np.nan, rng.integers(1980, 1990, rows)),
                "state": np.array(
                    [str(state) if state else None for state in rng.integers(0, 4, rows)], object
                ),
            },
        )
        for rows in (20, 30)
    ]
    spec = KeySpec(
        columns=("name", "born", "state"),
        metric=Mixed(),
        fields=fields,
        blocking=("state", "floor(born / 3)"),
    )
    spec.metric.check(spec)
    eligible = rng.random(30) < 0.8
    mine, theirs = (table.columns for table in tables)
    every = nearest_mixed(mine, theirs, fields, 30, eligible=eligible)
    keys = spec.metric.compare(spec, *tables, neighbours=3)
    near = keys.nearest(None, 3, eligible=eligible)

    def kept(row: int, record: int) -> bool:
        born = mine["born"][row] // 3 == theirs["born"][record] // 3
        state = mine["state"][row]
        return bool(born or (state is not None and theirs["state"][record] == state))

    for row in range(20):
        pairs = zip(every.indices[row].tolist(), every.distances[row].tolist(), strict=True)
        expected = [pair for pair in pairs if pair[0] != NO_RECORD and kept(row, pair[0])][:3]
        there = near.present[row]
        found = zip(near.indices[row][there].tolist(), near.distances[row][there], strict=True)
        assert list(found) == expected
    assert 0 < keys.figures()["blocking"]["recall_at_k"] < 1
    assert not near.present.all()


def test_a_rule_is_checked_with_the_file() -> None:
    """Before a table is read."""
    spec = KeySpec(columns=("name",), metric=Levenshtein(), blocking=("nom",))
    with pytest.raises(ConfigError, match="no key column 'nom'"):
        spec.metric.check(spec)
