"""Keys become codes under a secret that the coordinator does not have: it compares the codes."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import UInt8

from securevfl.core.errors import ConfigError
from securevfl.data.tables import KeyTable
from securevfl.linkage.metrics.bloom import Bloom as CodeMetric
from securevfl.linkage.metrics.bloom import CodeKeys, code_bytes, encode, require_coded_ranges
from securevfl.linkage.metrics.metric import KeyMetric, KeySpec
from securevfl.linkage.secret import LinkageSecret
from securevfl.linkage.spec import LinkSpec
from securevfl.linking.candidates import Candidates, find_candidates
from securevfl.linking.kept_links import coordinate, links_key
from securevfl.linking.messages import Linked, LinkingKind, Lists, MadeSimilarities
from securevfl.linking.protections.protection import Coordinated, DataParty, Helper
from securevfl.linking.similar_links import SimilarLinks
from securevfl.transport.message import Message, TypedMessage

Bytes = UInt8[np.ndarray, "_ code_bytes"]
"""Codes, one a row or record."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Codes(TypedMessage):
    """What a party's keys become under the linkage secret, and whether two secrets are equal."""

    KIND = LinkingKind.LINK_CODES
    WAY = "data party to coordinator"

    codes: Bytes
    """One a row."""

    check: str
    """Equal to another party's if and only if their secrets are."""

    def to_message(self) -> Message:
        """Return it as it is sent."""
        return Message(kind=self.KIND, meta={"check": self.check}, tensors={"codes": self.codes})

    @classmethod
    def from_message(cls, message: Message, *, rows: int | None, width: int) -> "Codes":
        """Check received codes.

        Args:
            message: What came.
            rows: How many there must be; None for any number.
            width: Bytes of a code.

        Raises:
            ProtocolError: If they are not what was agreed on.
        """
        return cls(
            codes=message.tensor("codes", dtype=np.uint8, shape=(rows, width)),
            check=message.figure("check", str),
        )


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
    def compare_codes(self, rows: Bytes, records: Bytes) -> KeyMetric:
        """Return codes with the distance between them."""

    def compare(
        self, spec: LinkSpec, primary: KeyTable, records: KeyTable, secret: LinkageSecret
    ) -> KeyMetric:
        """Encode both tables and compare their codes."""
        return self.compare_codes(
            self.encode(spec, primary, secret), self.encode(spec, records, secret)
        )

    @contextmanager
    def at_primary(self, party: DataParty) -> Iterator[Callable[[str], None]]:
        """Send the primary's codes; there is nothing to do for one secondary after another."""
        self._send(party)
        yield lambda _name: None

    def at_secondary(self, party: DataParty) -> Message:
        """Send the secondary's codes and wait for its lists."""
        self._send(party)
        return party.lines.receive(party.spec.roles.helpers["coordinator"], LinkingKind.LINK_LISTS)

    def hear_primary(self, helper: Helper) -> Codes:
        """Return the primary's codes."""
        return self._receive(helper, helper.spec.roles.primary, rows=helper.rows)

    def find(
        self, helper: Helper, name: str, heard: Codes
    ) -> tuple[Candidates, SimilarLinks | None]:
        """Compare the codes of two parties that hold one secret."""
        spec, theirs = helper.spec, self._receive(helper, name, rows=None)
        if heard.check != theirs.check:
            raise ConfigError(
                f"linkage.secret: that of {name!r} differs from that of {spec.roles.primary!r}; "
                f"give both the same file"
            )
        metric = self.compare_codes(heard.codes, theirs.codes)
        return coordinate(
            spec,
            lambda: find_candidates(spec, metric),
            cache=helper.cache,
            key=links_key(spec, heard.codes, theirs.codes),
        )

    def _send(self, party: DataParty) -> None:
        assert party.secret is not None, "read before linking begins"
        codes = Codes(
            codes=self.encode(party.spec, party.keys, party.secret),
            check=party.secret.check_value(party.session.hex()),
        )
        party.lines.send(codes.to_message(), party.spec.roles.helpers["coordinator"])

    def _receive(self, helper: Helper, name: str, *, rows: int | None) -> Codes:
        message = helper.lines.receive(name, LinkingKind.LINK_CODES)
        return Codes.from_message(message, rows=rows, width=self.code_bytes(helper.spec))


class Bloom(ByCodes):
    """Bloom-filter codes, of which near ones belong to near keys."""

    name: ClassVar[str] = "bloom"
    learned: ClassVar[Mapping[str, str]] = {
        "primary": "nothing of a secondary's records",
        "secondary": "for each primary row, which of its own records are nearest, in order and "
        "without distances: roughly where the row lies among its own records",
        "coordinator": "the codes of all keys: every Hamming distance between any two rows; which "
        "keys are equal and how often; the order and spacing of numbers up to an affine map; with "
        "a few known rows, much more. Without the linkage secret it cannot encode guesses",
    }

    def check(self, keys: KeySpec) -> None:
        """Ask for a metric that codes follow, and for ranges of numbers."""
        metric = keys.metric
        if metric.equal_only:
            raise ConfigError(
                f'linkage.protection: "{self.name}" is for keys that are alike; with metric = '
                f'"{metric.name}" use "hashes", which shows equal keys and no other likeness'
            )
        if not metric.coded:
            raise ConfigError(
                f'linkage.metric: "{metric.name}" has no Bloom-filter code; use "euclidean" with '
                f"ranges of one width, or project the keys first"
            )
        super().check(keys)
        require_coded_ranges(keys)

    def check_distance(self, keys: KeySpec, distance: float) -> None:  # noqa: ARG002
        """Refuse what no number of differing bits is: the keys' own metric is not compared."""
        CodeMetric().check_distance(distance)

    def unit(self, spec: LinkSpec) -> str:  # noqa: ARG002
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
