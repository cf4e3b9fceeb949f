"""One reader of settings: what is wrong with a table, all of it, in words."""

import copy
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from securevfl.core.errors import ConfigError
from securevfl.core.settings import SettingsError, problems_of, read_settings


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    separator: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Outer:
    name: str
    rate: float = 1.0
    rows: int | None = None
    kind: Literal["near", "far"] = "near"
    keys: tuple[str, ...] = ()
    inner: Inner = Inner()

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise ConfigError(f"rate: must be >= 0, got {self.rate}")


def wrong(table: dict[str, Any]) -> SettingsError:
    with pytest.raises(SettingsError) as caught:
        read_settings(Outer, table, where="outer")
    return caught.value


def test_lists_and_whole_numbers_become_what_is_wanted() -> None:
    read = read_settings(Outer, {"name": "n", "rate": 2, "keys": ["a"]}, where="outer")

    assert read == Outer(name="n", rate=2.0, keys=("a",))
    assert type(read.rate) is float


def test_every_problem_is_there_and_the_text_is_the_first() -> None:
    """A misspelt setting is not missing too."""
    error = wrong({"nmae": "n", "rows": True, "kind": "nera", "keys": [1], "rate": "2"})

    assert [one.text for one in error.problems] == [
        "outer.nmae: no such field; did you mean 'name'? Allowed: inner, keys, kind, name, rate, "
        "rows",
        "outer.rate: must be a number, got '2'",
        "outer.rows: must be a whole number, got True",
        "outer.kind: must be one of 'near', 'far'; got 'nera'; did you mean 'near'?",
        "outer.keys[0]: must be text, got 1",
    ]
    assert str(error) == error.problems[0].text
    assert error.problems[0].instead == {"name": "n"}
    assert error.problems[3].instead == {"kind": "near"}


@pytest.mark.parametrize(
    ("table", "text", "instead"),
    [
        ({}, "outer.name: is missing and has no default", {}),
        ({"name": "n", "keys": "a"}, "outer.keys: must be a list, got 'a'", {"keys": ["a"]}),
        ({"name": "n", "rate": 10**400}, "outer.rate: must be below 1e308", {}),
        ({"name": "n", "rate": -1}, "outer.rate: must be >= 0, got -1.0", {}),
        (
            {"name": "n", "inner": {"separatr": ";"}},
            "outer.inner.separatr: no such field; did you mean 'separator'? Allowed: separator",
            {},
        ),
        ({"name": "n", "inner": 3}, "outer.inner: must be a table, got 3", {}),
    ],
)
def test_one_problem(table: dict[str, Any], text: str, instead: dict[str, Any]) -> None:
    (problem,) = wrong(table).problems

    assert (problem.text, problem.instead) == (text, instead)
    assert problem.field == text.removeprefix("outer.").split(":")[0].split(".")[0]


def test_it_is_copied_whole() -> None:
    """As when it goes from a worker's process to the one that asked."""
    error = wrong({})

    copied = copy.copy(error)

    assert (str(copied), copied.problems) == (str(error), error.problems)


def test_an_error_of_a_rule_names_the_setting_that_it_begins_with() -> None:
    (named,) = problems_of(ConfigError("outer.keys[1] must be text"), where="outer")
    (unnamed,) = problems_of(ConfigError("outer: has too many rows"), where="outer")

    assert (named.field, unnamed.field) == ("keys", None)
