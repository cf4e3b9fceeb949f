"""Settings of a linkage, and its result at each party.

:mod:`securevfl.config.federation` takes the settings from a federation file.
"""

import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from jaxtyping import Bool, Float32, Int64

from securevfl.core import files
from securevfl.core.errors import ConfigError
from securevfl.core.progress import LinksCounted
from securevfl.core.waits import Wait
from securevfl.data.scaling import KeyScaler
from securevfl.linkage.links import Alignment, SimilarityScale
from securevfl.linkage.metrics.metric import KeySpec
from securevfl.linkage.sampling import LinkSource

CACHE_FOLDER: Final = "linkage.cache"
"""Folder in a party's own data root where links are kept between runs, if its user has made it."""


@dataclass(frozen=True, kw_only=True)
class HidingSpec:
    """Protection of keys while they are compared."""

    protection: str = "none"
    """Name of the protection."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the file that the protection reads, by name."""


@dataclass(frozen=True, kw_only=True)
class ChoiceSpec:
    """Choice of links among the records near to a row."""

    neighbours: int
    """K, the links of a row."""

    by: Literal["rows", "records"] = "rows"
    """Side that chooses: each row its nearest records, or each record its nearest rows."""

    links_per_record: int | None = None
    """m, the most rows that a record may be linked to; None for no cap."""

    sampling_rate: float = 1.0
    """q, the probability with which a record is in a secret sample."""

    once: bool = False
    """Link all rows once, in one sample, as frozen encoders require."""

    max_distance: float = math.inf
    """The farthest that a record may be linked, in the unit of what is compared."""

    counted: bool = False
    """True if each secondary counts its links for its own operator, as in runs; false for
    predictions, where a row may well have no link."""

    @property
    def is_fixed(self) -> bool:
        """Whether one link table serves all rounds; a secret sample is drawn anew in every run."""
        return self.sampling_rate == 1 and self.by == "rows"


@dataclass(frozen=True, kw_only=True)
class SimilaritySpec:
    """How similarities are noised; neither value means no noise."""

    noise: float | None = None
    """sigma, in units of sigma_0."""

    tau: float | None = None
    """Bound on one greedy attacker, from which sigma follows."""


@dataclass(frozen=True, kw_only=True)
class SplitSpec:
    """Which rows a random split trains on: similarities are scaled by the links of these."""

    seed: int
    validation_fraction: float | None
    """None: as :func:`securevfl.data.tables.split_rows` chooses it."""
    test_fraction: float


@dataclass(frozen=True, kw_only=True)
class LinkRoles:
    """Parties that take part in linking, by name."""

    primary: str
    secondaries: tuple[str, ...]
    """Secondaries in the order of their ranks."""

    helpers: Mapping[str, str] = field(default_factory=dict)
    """Parties without a table by role, in the order of their ranks."""

    absent: frozenset[str] = frozenset()
    """Secondaries that take no part; they keep their ranks."""

    @property
    def present(self) -> tuple[str, ...]:
        """The secondaries that take part, in the order of their ranks."""
        return tuple(name for name in self.secondaries if name not in self.absent)

    @property
    def ranks(self) -> dict[str, int]:
        """Name to rank of those that take part.

        The primary is 0, secondaries count from 1, helpers come after them.
        """
        names = (self.primary, *self.secondaries, *self.helpers.values())
        return {name: rank for rank, name in enumerate(names) if name not in self.absent}


@dataclass(frozen=True, kw_only=True)
class LinkSpec:
    """Settings of a linkage, from a federation file."""

    keys: KeySpec
    hiding: HidingSpec
    choice: ChoiceSpec
    roles: LinkRoles
    split: SplitSpec | None
    """None if the rows that train depend on the primary's table, so that others don't know them:
    similarities are then scaled by the links of all rows."""

    similarities: SimilaritySpec | None = None
    """None if the model's family reads none."""

    key_scale: KeyScaler | None = None
    """Statistics that a kept model was trained with; None takes them from the keys at hand."""

    similarity_scale: SimilarityScale | None = None
    """mu_0 and sigma_0 of a kept model; None takes them from the links of training rows."""

    tells_rows: bool = False
    """True if every secondary reports to the primary which rows have a link."""

    wait: Wait = field(default_factory=lambda: Wait(primary_s=3600.0, for_primary_s=3720.0))
    """Bounds of the wait for another party's next message."""

    written: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The ``[linkage]`` table as it was written: kept links belong to one such text."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LinkedPrimary:
    """Result of linking at the primary."""

    keys: Float32[np.ndarray, "rows dimension"]
    """The primary's keys as a model takes them."""

    key_scale: KeyScaler | None = None
    """Scaling of these keys; None for texts."""

    similarities: Float32[np.ndarray, "rows secondaries links"] | None = None
    """Similarity of each link, NaN where a slot holds no record; None if the family reads none."""

    announced: Mapping[str, int] | None = None
    """Number of keys that each secondary announced; None where none does."""

    firsts: Int64[np.ndarray, " rows"] | None = None
    """First row of each row's key, where records choose rows."""

    alignment: Alignment | None = None
    """Linked rows at each secondary; None where no model needs them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LinkedSecondary:
    """Result of linking at one secondary."""

    source: LinkSource
    """Source of the links of a round."""

    keys: Float32[np.ndarray, "records dimension"]
    """The secondary's keys as a model takes them, scaled as the primary's are."""

    firsts: Int64[np.ndarray, " rows"] | None = None
    """First row of each row's key, where records choose rows and this party sees which of the
    primary's keys are equal."""

    texts: Sequence[str | None] | None = None
    """Key of each row as it is compared, where records choose rows, only equal keys are linked, and
    this party sees the primary's; None for a missing one."""

    key_scale: KeyScaler | None = None
    """Scaling of these keys; None for texts."""

    primary_rows: int
    """Number of the primary's rows; links may be asked for no others."""

    similarities: Float32[np.ndarray, "rows links"] | None = None
    """Similarities for the primary, in the order of the links; None if the family reads none."""

    similarity_scale: SimilarityScale | None = None
    """Scale of the similarities, where this party has computed them."""

    apart: bool = False
    """True if some row's first link has another key than the row, where that decides what counts as
    aligned: where rows are reported and no largest distance is set."""

    meet: bool = True
    """True if numeric keys of both parties have common ranges, where this party sees both."""

    counts: LinksCounted | None = None
    """Counts of linked rows and records; None where links are not counted."""

    figures: Mapping[str, Any]
    """Figures of the links for the party's log: counts, never a row or a record."""

    def linked_rows(self) -> Bool[np.ndarray, " rows"]:
        """Return which of the primary's rows have a link."""
        rows = np.arange(self.primary_rows, dtype=np.int64)
        return np.asarray(self.source.link(rows).present.any(axis=1))


SECRET_FILE: Final = "linkage.secret"  # noqa: S105 - a file's name
"""File of the linkage secret in a data party's own data root: no partner's file says where."""

_FEWEST_BYTES: Final = 16
_FRESH_BYTES: Final = 32
_MOST_BYTES: Final = hashlib.blake2b.MAX_KEY_SIZE


class LinkageSecret:
    """A key of at least 128 bits; everything that encodings depend on is derived from it.

    A holder can encode guesses and compare them with encodings. Data parties share it outside the
    federation, and the coordinator must not have it.
    """

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        """Take a key of 16 to 64 random bytes.

        Raises:
            ConfigError: If it is shorter or longer.
        """
        if not _FEWEST_BYTES <= len(key) <= _MOST_BYTES:
            raise ConfigError(
                f"linkage secret: must have {_FEWEST_BYTES} to {_MOST_BYTES} bytes, got {len(key)}"
            )
        self._key = key

    @classmethod
    def fresh(cls) -> "LinkageSecret":
        """Draw a new secret of 256 bits from the operating system."""
        return cls(os.urandom(_FRESH_BYTES))

    @classmethod
    def from_file(cls, path: Path) -> "LinkageSecret":
        """Read a secret that is written as hexadecimal digits.

        Raises:
            ConfigError: If the file cannot be read or holds something else.
        """
        try:
            return cls(bytes.fromhex(files.read_text(path).strip()))
        except OSError as error:
            raise ConfigError(
                f"linkage secret {path}: {error.strerror}; one of the data parties makes it "
                f"(openssl rand -hex 32 > {SECRET_FILE}), and each saves a copy in its --data-root"
            ) from None
        except ConfigError:
            raise
        except ValueError:
            raise ConfigError(f"linkage secret {path}: must be hexadecimal digits") from None

    def subkey(self, *purpose: str) -> bytes:
        """Return the 32-byte key of one purpose; other purposes' keys reveal nothing about it."""
        return self._hash("subkey", *purpose)

    def check_value(self, session: str) -> str:
        """Return what parties compare before linking: equal if and only if their secrets are.

        Args:
            session: Differs from run to run, so that values cannot be recognised or replayed.

        Reveals:
            To the receiver: nothing but whether two secrets are equal.
        """
        return self._hash("check", session).hex()

    def _hash(self, *words: str) -> bytes:
        text = "\x1f".join(("securevfl-linkage", *words))
        return hashlib.blake2b(text.encode(), key=self._key, digest_size=32).digest()

    def __repr__(self) -> str:
        return f"LinkageSecret({8 * len(self._key)} bits)"


_FEW_LINKED: Final = 0.8


def few_links_doubt(spec: LinkSpec, share: float) -> str:
    """Return the likeliest cause of few links, as the end of a sentence; empty if they are many.

    Args:
        spec: Settings of the linkage.
        share: Share of the primary's rows that have a record.
    """
    if share >= _FEW_LINKED:
        return ""
    cause = "linkage.max_distance leaves out those that are far"
    if spec.keys.metric.equal_only:
        spelled = ("fold", "strip_zeros", "digits_only", "dates")
        unset = [name for name in spelled if name not in spec.keys.spelling.settings]
        settings = ", ".join(name for name in unset if name != "fold" or not spec.keys.fold)
        cause = (
            f"equal keys are written differently, which linkage.{settings} may mend "
            f"(securevfl columns shows the form of a party's keys)"
        )
    elif spec.choice.links_per_record is not None:
        cause = (
            f"a record serves at most {spec.choice.links_per_record} rows "
            f"(privacy.links_per_record), and a larger number takes more noise"
        )
    elif math.isinf(spec.choice.max_distance):
        cause = "keys are missing"
    return (
        f"the other rows gain nothing. Likeliest cause, if the parties have the same people or "
        f"places: {cause}"
    )
