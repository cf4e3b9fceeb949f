"""Text keys: one form for what is one text, and refusal of what is none."""

import pytest
from helpers.nearest import nearest_texts

from securevfl.core.errors import DataError
from securevfl.linkage.text import checked_texts, normalise_text


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Amélie", "Ame\u0301lie"),
        ("STRASSE", "straße"),
        ("\uff21\uff22\uff23", "abc"),
        ("  a \t b\n", "a b"),
        ("ﬁ", "FI"),
        ("İ", "i\u0307"),
    ],
)
def test_spellings_of_one_text_are_equal(one: str, other: str) -> None:
    """Composition, case, width and blanks do not tell texts apart."""
    assert normalise_text(one) == normalise_text(other)


def test_normalising_twice_changes_nothing() -> None:
    """A normal form is one."""
    for text in ("ΐ", "ǰ", "ß", "\u0345\u03b1", "\u2167"):
        assert normalise_text(normalise_text(text)) == normalise_text(text)


def test_accents_are_kept() -> None:
    """An accent is one edit, not nothing."""
    links = nearest_texts(["jose"], ["josé", "josef", "jose"], 3)

    assert links.indices.tolist() == [[2, 0, 1]]
    assert links.distances.tolist() == [[0, 1, 1]]


def test_long_texts_are_compared_and_too_long_ones_refused() -> None:
    """10,000 characters are no problem; 65,536 are one, named with the row."""
    links = nearest_texts(["a" * 10_000], ["a" * 9_000, "b" * 10_000], 2)

    assert links.distances.tolist() == [[1_000, 10_000]]
    with pytest.raises(DataError, match="keys of the secondary: row 2: has 65536 characters"):
        nearest_texts(["a"], ["a", "a" * 65_536], 1)


def test_empty_texts_are_texts() -> None:
    """An empty text is as far from another as that one is long."""
    assert nearest_texts(["", "ab"], ["abc", ""], 2).distances.tolist() == [[0, 3], [1, 2]]


@pytest.mark.parametrize("value", [3, 2.5, None, float("nan"), b"bytes"])
def test_mixed_types_are_refused(value: object) -> None:
    """The row and the type are named."""
    with pytest.raises(DataError, match=f"row 2: must be text, got {type(value).__name__}"):
        checked_texts(["a", value], whose="agency")


def test_empty_tables_are_refused() -> None:
    """No rows, no linkage."""
    with pytest.raises(DataError, match="keys of the primary: has no rows"):
        nearest_texts([], ["a"], 1)
    with pytest.raises(DataError, match=r"K = 2 links .* only 1 records"):
        nearest_texts(["a"], ["a"], 2)
