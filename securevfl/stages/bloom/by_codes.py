"""Keys as codes under a secret of the data parties: exact hashes and Bloom filters."""

import hmac
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
from jaxtyping import UInt8

from securevfl.core.errors import ConfigError
from securevfl.data.tables import KeyTable
from securevfl.linkage.cores import parts_of
from securevfl.linkage.metrics.exact import ExactKeys, exact_texts, numbered_keys
from securevfl.linkage.metrics.metric import ComparedKeys, KeySpec, Metric
from securevfl.linkage.protections.protection import (
    BothTables,
    Coordinated,
    DataParty,
    LinkageHelper,
    Take,
)
from securevfl.linkage.spec import LinkageSecret, LinkSpec
from securevfl.linkage.stage.candidates import find_candidates
from securevfl.linkage.stage.link_cache import coordinate, links_key
from securevfl.linkage.stage.messages import Linked, LinkingKind, Lists, MadeSimilarities
from securevfl.linkage.stage.noised_similarities import SimilarLinks
from securevfl.stages.bloom.codes import Bloom as CodeMetric
from securevfl.stages.bloom.codes import CodeKeys, code_bytes, encode, require_coded_ranges
from securevfl.transport.message import DeclaredMessage, Message, MessageKind, TypedMessage

Bytes = UInt8[np.ndarray, "_ code_bytes"]
"""Codes, one a row or record."""


class CodeKind(MessageKind):
    """The kind of message of keys as codes."""

    LINK_CODES = 21
    """Data party to coordinator: codes of its keys under the linkage secret, and a value that
    reveals whether two secrets are equal."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Codes(DeclaredMessage):
    """A party's keys as codes under the linkage secret, and whether two secrets are equal."""

    KIND = CodeKind.LINK_CODES
    WAY = "data party to coordinator"
    COVERS: ClassVar = {"linkage": "codes", "record counts": "lengths", "no record": "check"}

    codes: UInt8[np.ndarray, "_rows code_bytes"]
    """A code for each row."""

    check: str
    """Equal to another party's if and only if their secrets are."""


class ByCodes(Coordinated):
    """Both data parties encode their keys under one secret; the coordinator compares codes."""

    needs_secret: ClassVar[bool] = True
    messages: ClassVar[tuple[type[TypedMessage], ...]] = (Codes, Lists, MadeSimilarities, Linked)

    @abstractmethod
    def encode(self, spec: LinkSpec, keys: KeyTable, secret: LinkageSecret) -> Bytes:
        """Return the codes of a party's keys.

        Raises:
            DataError: If a key cannot be encoded, naming the row.
        """

    @abstractmethod
    def code_bytes(self, spec: LinkSpec) -> int:
        """Return the length of a code."""

    @abstractmethod
    def compare_codes(self, rows: Bytes, records: Bytes) -> ComparedKeys:
        """Return codes with the distance between them."""

    def compare(
        self, spec: LinkSpec, primary: KeyTable, records: KeyTable, secret: LinkageSecret
    ) -> ComparedKeys:
        """Encode both tables and compare their codes."""
        return self.compare_codes(
            self.encode(spec, primary, secret), self.encode(spec, records, secret)
        )

    def record_received(self, tables: BothTables, take: Take) -> None:
        """Record the codes of both tables."""
        rows, records = (
            self.encode(tables.spec, keys, tables.secret) for keys in (tables.primary, tables.own)
        )
        take(Codes.KIND.name, of=tables.own.name, rows=rows, records=records)

    @contextmanager
    def at_primary(self, party: DataParty) -> Iterator[Callable[[str], None]]:
        """Send the primary's codes; there is nothing to do for one secondary after another."""
        self._send(party)
        yield lambda _name: None

    def at_secondary(self, party: DataParty) -> Message:
        """Send the secondary's codes and wait for its lists."""
        self._send(party)
        return party.channels.receive(
            party.spec.roles.helpers["coordinator"], LinkingKind.LINK_LISTS
        )

    def receive_primary(self, helper: LinkageHelper) -> Codes:
        """Return the primary's codes."""
        return self._receive(helper, helper.spec.roles.primary, _rows=helper.rows)

    def find(
        self, helper: LinkageHelper, name: str, received: Codes
    ) -> tuple[Lists, SimilarLinks | None]:
        """Compare the codes of two parties that hold one secret."""
        spec, theirs = helper.spec, self._receive(helper, name)
        if received.check != theirs.check:
            raise ConfigError(
                f"linkage.secret: that of {name!r} differs from that of {spec.roles.primary!r}; "
                f"give both the same file"
            )
        helper.take(Codes.KIND.name, of=name, rows=received.codes, records=theirs.codes)
        metric = self.compare_codes(received.codes, theirs.codes)
        return coordinate(
            spec,
            lambda: find_candidates(spec, metric),
            records=metric.num_records,
            cache=helper.cache,
            key=links_key(spec, received.codes, theirs.codes),
        )

    def _send(self, party: DataParty) -> None:
        assert party.secret is not None, "read before linking begins"
        codes = Codes(
            codes=self.encode(party.spec, party.keys, party.secret),
            check=party.secret.check_value(party.session.hex()),
        )
        party.channels.send(codes.to_message(), party.spec.roles.helpers["coordinator"])

    def _receive(self, helper: LinkageHelper, name: str, **known: int) -> Codes:
        message = helper.channels.receive(name, CodeKind.LINK_CODES)
        return Codes.from_message(message, code_bytes=self.code_bytes(helper.spec), **known)


class BloomProtection(ByCodes):
    """Bloom-filter codes: near keys have near codes."""

    name: ClassVar[str] = "bloom"
    learned: ClassVar[Mapping[str, str]] = {
        "primary": "nothing of a secondary's records",
        "secondary": "for each primary row, which of its own records are nearest, in order and "
        "without distances: roughly where the row lies among its own records",
        "coordinator": "the codes of all keys: every Hamming distance between any two rows; which "
        "keys are equal and how often; the order and spacing of numbers up to an affine map; with "
        "a few known rows, much more. Without the linkage secret it cannot encode guesses",
    }

    def objection_to(self, metric: Metric) -> str | None:
        """Return whether codes show more than equal keys, or do not follow the metric."""
        if metric.equal_only:
            return "links similar keys, and would reveal more than equal ones"
        if not metric.coded:
            return (
                "has no Bloom-filter code for such keys (project them first, and use "
                'metric = "euclidean" with ranges of one width)'
            )
        return None

    def check(self, keys: KeySpec) -> None:
        """Ask for ranges of numbers."""
        super().check(keys)
        require_coded_ranges(keys)

    def check_distance(self, keys: KeySpec, distance: float) -> None:
        """Refuse what no number of differing bits is: the keys' own metric is not compared."""
        CodeMetric().check_distance(distance)

    def unit(self, spec: LinkSpec) -> str:
        """Return that codes differ in bits."""
        return CodeMetric.unit

    def encode(self, spec: LinkSpec, keys: KeyTable, secret: LinkageSecret) -> Bytes:
        """Return Bloom-filter codes of the agreed length."""
        return encode(spec.keys, keys, secret)

    def code_bytes(self, spec: LinkSpec) -> int:
        """Return the length of all fields' codes together."""
        return code_bytes(spec.keys)

    def compare_codes(self, rows: Bytes, records: Bytes) -> CodeKeys:
        """Count the bits in which codes differ."""
        return CodeKeys(primary=rows, records=records)


_HASH_BYTES: Final = 32


class Hashes(ByCodes):
    """HMAC-SHA256 of exact keys: equal keys are linked, and of others nothing can be compared."""

    name: ClassVar[str] = "hashes"
    learned: ClassVar[Mapping[str, str]] = {
        "primary": "nothing of a secondary's records",
        "secondary": "for each primary row, which of its own records have the same key: so the "
        "keys of the rows that it shares with the primary, and that it has no record of the others",
        "coordinator": "which keys are equal, within a table and between tables, and how often "
        "each occurs; nothing else of a key. Without the linkage secret it cannot hash guesses",
    }

    def objection_to(self, metric: Metric) -> str | None:
        """Return that only equal keys have equal hashes."""
        return None if metric.equal_only else "finds equal keys alone"

    def encode(self, spec: LinkSpec, keys: KeyTable, secret: LinkageSecret) -> Bytes:
        """Return a hash a row; that of a missing key equals no other, and looks like any."""
        raw = b"".join(self._hashes(spec.keys, keys, secret))
        return np.frombuffer(raw, dtype=np.uint8).reshape(-1, _HASH_BYTES)

    def code_bytes(self, spec: LinkSpec) -> int:
        """Return the length of a hash."""
        return _HASH_BYTES

    def compare_codes(self, rows: Bytes, records: Bytes) -> ExactKeys:
        """Ask which hashes are equal."""
        return numbered_keys(*(parts_of(part.tobytes(), _HASH_BYTES) for part in (rows, records)))

    def _hashes(self, spec: KeySpec, keys: KeyTable, secret: LinkageSecret) -> Iterator[bytes]:
        there, missing = secret.subkey("hashes"), secret.subkey("hashes", "missing", keys.name)
        for row, text in enumerate(exact_texts(spec, keys)):
            key, words = (missing, str(row)) if text is None else (there, text)
            # A lone surrogate is no UTF-8, but may stand in a text that Python read.
            yield hmac.digest(key, words.encode(errors="surrogatepass"), "sha256")
