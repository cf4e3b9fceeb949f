"""One way in which a party learns something: a row of what every run folder discloses."""

from dataclasses import dataclass
from typing import Final, Literal

from securevfl.transport.message import Cover

NOT_COVERED: Final = "not covered"
ISO: Final = "heuristic: ISO noise promises nothing, and its size shows"


@dataclass(frozen=True, slots=True)
class Channel:
    """One way in which a party learns something."""

    channel: Cover
    """Its name, by which fields of messages refer to it."""

    reveals: str
    """Who learns what."""

    guarantee: str
    """Statement of the promise that covers it, if any does."""

    whose: Literal["secondaries", "primary", "all"]
    """Whose rows, records or weights are learned about."""

    to: Literal["primary", "secondaries", "all", "recipients", "nobody"]
    """Who learns it; ``recipients`` are those who get the model."""

    stated: bool = False
    """True for a channel that no epsilon covers and no promise refuses; the promise's statement and
    docs/privacy.md name it."""

    refusal: str = ""
    """Sentence that refuses a promise with this channel: the setting, what it shows, and what to
    write instead."""
