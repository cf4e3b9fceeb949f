"""What a column's name says: places, people, numbers of customers, or nothing."""

from collections.abc import Sequence
from typing import Final, Literal

from securevfl.core.column_names import axis_of, words_of

Meaning = Literal["longitude", "latitude", "identity", "person", "none"]

_IDENTITY: Final = frozenset(
    {"id", "ids", "uid", "uuid", "guid", "ssn", "iban", "rowid", "identifier", "passport"}
    | {"email", "mail", "phone", "telephone", "account"}
)
_ROW_NUMBERS: Final = frozenset({"index", "unnamed", "row"})
_PERSON: Final = frozenset(
    {"name", "surname", "firstname", "lastname", "given", "forename", "family", "street", "address"}
    | {"suburb", "city", "town", "village", "postcode", "postal", "zip", "zipcode"}
    | {"birth", "dob", "birthday", "birthdate", "born", "company"}
)
_DIGITS: Final = frozenset(
    {"postcode", "postal", "zip", "zipcode", "birth", "dob", "birthday", "birthdate", "born"}
)
_NUMBERS_OF_PEOPLE: Final = frozenset(
    {"card", "client", "customer", "kunde", "kunden", "member", "patient", "user", "nachname"}
    | {"vorname", "strasse", "plz", "geburtsdatum"}
)
_FILLERS: Final = frozenset({"key", "full"})


def canonical(name: str) -> str:
    """Return what equal columns of two parties have in common."""
    words = [word for word in words_of(name) if word not in _FILLERS] or words_of(name)
    meaning = meaning_of(name)
    return meaning if meaning in ("longitude", "latitude") else "_".join(words)


def meaning_of(name: str) -> Meaning:
    """Return what the name says that the column holds."""
    if (axis := axis_of(name)) is not None:
        return axis
    words = set(words_of(name))
    last = words_of(name)[-1:] or [""]
    alone = {word for word in words if not word.isdigit()} <= _ROW_NUMBERS and words
    if last[0] in _IDENTITY or alone or (name.isalpha() and name.endswith(("Id", "ID"))):
        return "identity"
    if words & _PERSON:
        return "person"
    return "none"


def spelled_in_digits(name: str) -> bool:
    """Return whether what tells a person apart may be a number: a postcode, a date of birth."""
    return bool(set(words_of(name)) & _DIGITS)


def keys_in_clear(protection: str, columns: Sequence[str]) -> str | None:
    """Return what there is to warn of where people's keys are shown to partners; None if nothing.

    Args:
        protection: ``linkage.protection``.
        columns: The primary's key columns.
    """
    people = [
        name
        for name in columns
        if meaning_of(name) in ("identity", "person") or set(words_of(name)) & _NUMBERS_OF_PEOPLE
    ]
    if protection != "none" or not people:
        return None
    tells = "tells" if len(people) == 1 else "tell"
    return (
        f'linkage.protection = "none": every secondary sees the keys of all rows of the primary in '
        f'clear, and {", ".join(map(repr, people))} {tells} who a row is about; "bloom", or '
        f'"hashes" for equal ids, hides them with a coordinator\'s help (docs/linkage.md)'
    )
