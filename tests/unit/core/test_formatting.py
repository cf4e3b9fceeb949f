"""Figures for people: digits that say something, in whatever unit a label has."""

import pytest

from securevfl.core.formatting import written


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
    assert written(value) == text


def test_figures_that_stand_together_are_written_alike() -> None:
    """An end near zero, of an interval whose other end is not, stays a decimal number."""
    interval = (-0.0000001, 0.02)
    assert [written(one, sign="+", beside=interval) for one in interval] == ["+0.0000", "+0.0200"]
    assert written(0.0, beside=(2e-7,)) == "0"
