"""Figures for people: digits that say something, in whatever unit a label has."""

import math
import tomllib
from datetime import date, datetime, time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from securevfl.core.formatting import format_figure, toml_text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.87654, "0.8765"),
        (0.0, "0.0000"),
        (27.15, "27.1500"),
        (1.2345678e-7, "1.235e-07"),
        (-0.00001234, "-1.234e-05"),
        (1.5e30, "1.5e+30"),
        (float("nan"), "nan"),
    ],
)
def test_a_figure_has_digits_that_say_something(value: float, text: str) -> None:
    assert format_figure(value) == text


def test_figures_that_stand_together_are_written_alike() -> None:
    """An end near zero, of an interval whose other end is not, stays a decimal number."""
    interval = (-0.0000001, 0.02)
    assert [format_figure(one, sign="+", beside=interval) for one in interval] == [
        "+0.0000",
        "+0.0200",
    ]
    assert format_figure(0.0, beside=(2e-7,)) == "0"


WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
VALUES = st.recursive(
    st.one_of(
        WORDS,
        st.booleans(),
        st.integers(-(2**63), 2**63 - 1),
        st.floats(allow_nan=False),
        st.dates(date(1, 1, 1)),
        st.datetimes(),
        st.times(),
    ),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(WORDS, parts, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(WORDS, VALUES, max_size=4))
def test_what_toml_can_hold_comes_back(source: dict[str, object]) -> None:
    """Under any name, and in tables within tables."""
    assert tomllib.loads(toml_text(source)) == source


def test_a_federation_file_has_a_setting_a_line() -> None:
    party = {"name": "bank", "bounds": {"late bills": [0, 1.5]}}
    source = {"party": [party], "name": 'a "run"', "model": {"hidden": 8}, "seed": math.inf}
    assert toml_text(source) == (
        'name = "a \\"run\\""\nseed = inf\n\n'
        '[[party]]\nname = "bank"\nbounds = { "late bills" = [0, 1.5] }\n\n[model]\nhidden = 8\n'
    )
    assert toml_text({"at": datetime(2026, 1, 2, 3), "on": date(2026, 1, 2), "by": time(3)}) == (
        "at = 2026-01-02T03:00:00\non = 2026-01-02\nby = 03:00:00\n"
    )
