"""Names of columns: their words, and the meaning of the column that they suggest."""

import re
from collections.abc import Sequence
from typing import Final, Literal

_WORDS: Final = re.compile(r"[a-z]+|\d+")
_CAMEL: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_AXES: Final[dict[Literal["longitude", "latitude"], frozenset[str]]] = {
    "longitude": frozenset({"lon", "lng", "long", "longitude", "longitud", "laengengrad"}),
    "latitude": frozenset({"lat", "latitude", "latitud", "breitengrad"}),
}


def words_of(name: str) -> list[str]:
    """Return the lower-case words of a column's name, in camel case or with separators."""
    return _WORDS.findall(_CAMEL.sub(" ", name).lower())


def axis_of(name: str) -> Literal["longitude", "latitude"] | None:
    """Return the geographic axis that a column's name suggests; None for neither.

    Examples:
        >>> axis_of("homeLatitude")
        'latitude'
    """
    words = set(words_of(name))
    return next((axis for axis, known in _AXES.items() if words & known), None)


Meaning = Literal["longitude", "latitude", "identity", "person", "time", "none"]

_IDENTITY: Final = frozenset(
    {"id", "ids", "uid", "uuid", "guid", "ssn", "iban", "rowid", "identifier", "passport"}
    | {"email", "mail", "phone", "telephone", "username", "account"}
    | {"telefon", "handy", "konto", "kontonummer", "kundennummer", "kartennummer"}
    | {"telefonnummer", "steuernummer", "versicherungsnummer"}
)
# Words before a word for number: card number, Kunden-Nr.
_NUMBERED: Final = frozenset(
    {"card", "customer", "client", "member", "mobile", "patient", "policy", "contract"}
    | {"security", "tax", "licence", "license"}
    | {"karten", "karte", "kunden", "kunde", "mitglieds", "vertrags"}
)
_NUMBER: Final = frozenset({"number", "num", "no", "nr", "nummer"})
_ROW_NUMBERS: Final = frozenset({"index", "unnamed", "row"})
ONE_PERSON: Final = frozenset(
    {"name", "surname", "firstname", "lastname", "fullname", "forename", "street", "address"}
    | {"vorname", "nachname", "familienname", "anschrift", "adresse", "strasse"}
)
"""Words for what identifies or locates one person."""

BIRTH: Final = frozenset({"birth", "dob", "birthday", "birthdate", "born", "geburtsdatum"})
"""Words for a date of birth."""

# Words for what many people share.
_OF_MANY: Final = frozenset(
    {"suburb", "city", "town", "village", "postcode", "postal", "zip", "zipcode", "plz", "company"}
)
_PERSON: Final = ONE_PERSON | BIRTH | _OF_MANY | {"given", "family"}
_TIME: Final = frozenset({"time", "timestamp", "datetime", "zeit", "zeitpunkt", "zeitstempel"})


def meaning_of(name: str) -> Meaning:
    """Return the meaning that a column's name suggests."""
    if (axis := axis_of(name)) is not None:
        return axis
    in_order = words_of(name)
    words = set(in_order)
    alone = {word for word in words if not word.isdigit()} <= _ROW_NUMBERS and words
    ends_in_id = name.isalpha() and name.endswith(("Id", "ID"))
    if _numbers_something(in_order) or alone or ends_in_id:
        return "identity"
    if words & _PERSON:
        return "person"
    return "time" if in_order[-1:] and in_order[-1] in _TIME else "none"


def _numbers_something(words: list[str]) -> bool:
    stems = list(words)
    while len(stems) > 1 and stems[-1] in _NUMBER:
        stems.pop()
    if not stems:
        return False
    return stems[-1] in _IDENTITY or (len(stems) < len(words) and stems[-1] in _NUMBERED)


def keys_in_clear(protection: str, columns: Sequence[str]) -> str | None:
    """Return a warning if keys of people or of places are visible to partners, else None.

    Args:
        protection: ``linkage.protection``.
        columns: The primary's key columns.
    """
    people = [
        name
        for name in columns
        if meaning_of(name) in ("identity", "person") or set(words_of(name)) & _NUMBERED
    ]
    places = [name for name in columns if axis_of(name) is not None]
    if protection != "none" or not (people or places):
        return None
    tell = "tells" if len(people or places) == 1 else "tell"
    what = "who a row is about" if people else "where a row is: of homes, who lives there"
    hidden = (
        '"bloom", or "hashes" for equal ids, hides' if people else '"shares" or "paillier" hides'
    )
    return (
        f'linkage.protection = "none": every secondary sees the keys of all rows of the primary in '
        f"clear, and {', '.join(map(repr, people or places))} {tell} {what}; {hidden} them with a "
        f"helper (docs/linkage.md)"
    )
