"""What a column's name says of it: its words, and whether it is a longitude or a latitude."""

import re
from typing import Final, Literal

_WORDS: Final = re.compile(r"[a-z]+|\d+")
_CAMEL: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_AXES: Final[dict[Literal["longitude", "latitude"], frozenset[str]]] = {
    "longitude": frozenset({"lon", "lng", "long", "longitude", "longitud", "laengengrad"}),
    "latitude": frozenset({"lat", "latitude", "latitud", "breitengrad"}),
}


def words_of(name: str) -> list[str]:
    """Return the words of a column's name: ``custBirthDate`` and ``cust_birth-date`` alike."""
    return _WORDS.findall(_CAMEL.sub(" ", name).lower())


def axis_of(name: str) -> Literal["longitude", "latitude"] | None:
    """Return which axis of the earth a column's name says that it holds; None for neither.

    Examples:
        >>> axis_of("homeLatitude")
        'latitude'
    """
    words = set(words_of(name))
    return next((axis for axis, known in _AXES.items() if words & known), None)
