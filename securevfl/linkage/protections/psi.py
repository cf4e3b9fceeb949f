"""Private set intersection of exact keys: no third party, and no secret that parties share.

Diffie-Hellman PSI on ristretto255, between the primary and each secondary by itself. H maps a key
to a point of the group; a and b are fresh secrets of the primary and of the secondary.

1. The primary sends ``a H(x_i)`` of its rows, in their order.
2. The secondary sends ``b H(y_j)`` of its different keys, shuffled, with random points up to the
   number that it announces.
3. The primary returns ``a b H(y_j)``, in the order in which they came.
4. The secondary computes ``b a H(x_i)``; equal points are equal keys.

Steps 2 and 3 happen once a session: later requests for predictions send their rows alone. So a
session tests as many keys as were announced, however many requests it has.

To whoever has no discrete logarithms, points under a secret look random ([RFC9496]; decisional
Diffie-Hellman). The primary never sees the points of step 4, so it learns the announced number
alone: whether a record is there stays under the run's epsilon. The secondary learns the links,
which it needs to train, and which rows have equal keys. It can test as many keys as it announces.

H hashes the session, the secondary's name and the key by SHA-512 to the group. Secrets are drawn
for each secondary and session, so messages of two sessions, or to two secondaries, have nothing in
common. ``rbcl`` (libsodium) computes, refuses what is no point, and is imported nowhere else.

References:
    [Mea86] C. Meadows. A More Efficient Cryptographic Matchmaking Protocol. IEEE S&P 1986.
    [RFC9496] The ristretto255 and decaf448 Groups. 2023.
"""

import hashlib
import secrets
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
from jaxtyping import UInt8

from securevfl.core.checks import MOST_KEYS
from securevfl.core.errors import DataError, ProtocolError, of_an_extra
from securevfl.core.progress import CiphertextsMade, Pace
from securevfl.data.tables import KeyTable
from securevfl.linkage.metrics.metric import ComparedKeys, KeySpec
from securevfl.linkage.metrics.texts import exact_texts, numbered_keys
from securevfl.linkage.protections import protection
from securevfl.linkage.protections.paillier import Apply, on_cores
from securevfl.linkage.protections.plaintext import KeysAsTheyAre
from securevfl.linkage.spec import LinkageSecret, LinkedPrimary, LinkedSecondary, LinkSpec
from securevfl.linkage.stage.candidates import source_of_metric, tells_apart
from securevfl.linkage.stage.link_cache import LinkCache
from securevfl.linkage.stage.messages import Linked, LinkingKind
from securevfl.transport.channels import receive_from
from securevfl.transport.message import DeclaredMessage, TypedMessage, wire

_LABEL: Final = b"securevfl/linkage/psi/v1"

_POINT: Final = 32
"""Bytes of a point."""

_BLOCK: Final = 1 << 14
"""Points of one message: 0.5 MiB, and half a second of one core."""

_IN_PLACE: Final = 4
"""Blocks that take less time than it takes to start a process on every core."""

Points = UInt8[np.ndarray, "points 32"]

# Messages: each carries some points of a table.


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class RowPoints(DeclaredMessage):
    """Some of the primary's keys as points, under a secret of the primary."""

    KIND = LinkingKind.LINK_POINTS
    WAY = "primary to a secondary"

    points: Points


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class RecordPoints(DeclaredMessage):
    """Some of a secondary's different keys as points, shuffled, under a secret of its own."""

    KIND = LinkingKind.LINK_POINTS
    WAY = "secondary to primary"

    count: int = wire(least=1, most=MOST_KEYS)
    """Points in all, padding among them."""

    points: UInt8[np.ndarray, "some_points 32"]


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class ReturnedPoints(DeclaredMessage):
    """A secondary's points, in the order in which they came, under the primary's secret too."""

    KIND = LinkingKind.LINK_POINTS
    WAY = "primary to the secondary"

    points: Points


# Points of keys, and points under a secret.


def hashed(texts: Sequence[str | None], context: bytes) -> bytes:
    """Return the point of each key; a missing one is a random point, which equals no other.

    Args:
        texts: Keys, None where one is missing.
        context: Of the session and the secondary: the same at both parties, and nowhere else.
    """
    library = _rbcl()
    return b"".join(
        library.crypto_core_ristretto255_random()
        if text is None
        # A lone surrogate is no UTF-8, but may stand in a text that Python read.
        else library.crypto_core_ristretto255_from_hash(
            hashlib.sha512(context + text.encode(errors="surrogatepass")).digest()
        )
        for text in texts
    )


def raised(secret: bytes, points: bytes) -> bytes:
    """Return points under a secret.

    Raises:
        ProtocolError: If one is no point of the group, or its neutral element, which would be the
            same under every secret.
    """
    multiply = _rbcl().crypto_scalarmult_ristretto255
    try:
        return b"".join(
            multiply(secret, points[start : start + _POINT])
            for start in range(0, len(points), _POINT)
        )
    except RuntimeError:
        raise ProtocolError("received what is no point of the group") from None


def _blinded(task: tuple[bytes, bytes, Sequence[str | None]]) -> bytes:
    secret, context, texts = task
    return raised(secret, hashed(texts, context))


def _raised(task: tuple[bytes, bytes]) -> bytes:
    return raised(*task)


def _rbcl() -> Any:
    """Return libsodium's functions of the group.

    Raises:
        ConfigError: If rbcl is not installed.
    """
    return of_an_extra("rbcl", use='linkage.protection = "psi"')


def _context(party: protection.DataParty, secondary: str) -> bytes:
    name = secondary.encode()
    return _LABEL + party.session + struct.pack(">I", len(name)) + name


def _secret() -> bytes:
    return bytes(_rbcl().crypto_core_ristretto255_scalar_random())


def _sizes(count: int) -> list[int]:
    return [min(_BLOCK, count - start) for start in range(0, count, _BLOCK)]


def _array(points: bytes) -> Points:
    return np.frombuffer(points, dtype=np.uint8).reshape(-1, _POINT)


def _each(points: bytes) -> list[bytes]:
    return [points[start : start + _POINT] for start in range(0, len(points), _POINT)]


# The protection.


class Psi(KeysAsTheyAre):
    """Equal keys alone are found, by the secondary; the primary learns a number of keys."""

    name: ClassVar[str] = "psi"
    keeps_links: ClassVar[bool] = False
    learned: ClassVar[Mapping[str, str]] = {
        "primary": "how many different keys each secondary has, or linkage.pad_to where that is "
        "more",
        "secondary": "for each primary row, which of its own records have the same key; which rows "
        "have equal keys; and of as many keys as it announces, whether the primary has them",
    }
    messages: ClassVar[tuple[type[TypedMessage], ...]] = (
        *(RowPoints, RecordPoints, ReturnedPoints),
        Linked,
    )

    def check(self, keys: KeySpec) -> None:
        """Ask for a metric of equal keys alone."""
        self.require_equal_only(keys)

    def link_in_process(
        self,
        spec: LinkSpec,
        primary: KeyTable,
        own: KeyTable,
        *,
        secret: LinkageSecret,
        cache: LinkCache,
    ) -> LinkedSecondary:
        """Link as every secondary does, without cryptography."""
        return self._linked(spec, self.compare(spec, primary, own), own)

    def link_as_primary(self, party: protection.DataParty) -> LinkedPrimary:
        """Send blinded rows, and return each secondary's points; see :class:`Protection`.

        Reveals:
            To every secondary: points that show it which rows have one of its keys, and which rows
            have equal keys.
        """
        spec, lines, names = party.spec, party.lines, party.spec.roles.present
        texts = exact_texts(spec.keys, party.keys)
        parts = [texts[start : start + _BLOCK] for start in range(0, len(texts), _BLOCK)]
        owed = {name: party.memory.get(name) or _secret() for name in names}
        linked = []
        with on_cores(-1, after=_IN_PLACE) as apply:
            for name, own in owed.items():
                pace = Pace(party.observe, CiphertextsMade, name=name)
                tasks = [(own, _context(party, name), part) for part in parts]
                for number, points in enumerate(apply(_blinded, tasks), 1):
                    lines.send(RowPoints(points=_array(points)).to_message(), name)
                    pace(min(number * _BLOCK, party.rows), party.rows)
            for name, own in owed.items():
                if name not in party.memory:
                    self._return_points(party, name, own, apply)
                    party.memory[name] = own
                linked.append(self.await_done(party, name)[1])
        return protection.linked_primary(spec, party.keys, [], linked)

    def _return_points(
        self, party: protection.DataParty, name: str, own: bytes, apply: Apply
    ) -> None:
        """Return a secondary's points under the primary's secret.

        Raises:
            ProtocolError: If one is no point, or came before: keys are different.
        """
        first = receive_from(party.lines, name, RecordPoints)
        pace = Pace(party.observe, CiphertextsMade, name=name)
        blocks, seen, done = [first], set[bytes](), 0
        due = _sizes(first.count)
        blocks += (receive_from(party.lines, name, RecordPoints) for _ in due[1:])
        for size, block in zip(due, blocks, strict=True):
            if (block.count, len(block.points)) != (first.count, size):
                raise ProtocolError(f"{name}: sent other points than it announced")
            seen.update(_each(block.points.tobytes()))
        if len(seen) != first.count:
            raise ProtocolError(f"{name}: sent a point twice")
        tasks = [(own, block.points.tobytes()) for block in blocks]
        for points in apply(_raised, tasks):
            party.lines.send(ReturnedPoints(points=_array(points)).to_message(), name)
            done += len(points) // _POINT
            pace(done, first.count)

    def link_as_secondary(self, party: protection.DataParty) -> LinkedSecondary:
        """Send blinded keys, and find the rows that have one of them; see :class:`Protection`.

        Reveals:
            To the primary: how many different keys there are, or ``linkage.pad_to``; that linkage
            is done; and, where the file asks for it, which rows are linked.
        """
        spec, lines, primary = party.spec, party.lines, party.spec.roles.primary
        texts = exact_texts(spec.keys, party.keys)
        rows = [
            receive_from(lines, primary, RowPoints, points=size).points.tobytes()
            for size in _sizes(party.rows)
        ]
        with on_cores(-1, after=_IN_PLACE) as apply:
            if primary not in party.memory:
                different = dict.fromkeys(text for text in texts if text is not None)
                sent = self._shuffled(spec, list(different), whose=party.keys.name)
                party.memory[primary] = self._meet(party, sent, apply)
            own, keys = party.memory[primary]
            pace = Pace(party.observe, CiphertextsMade, name=party.keys.name)
            found: list[str | None] = []
            for points in apply(_raised, [(own, part) for part in rows]):
                found += map(keys.get, _each(points))
                pace(len(found), party.rows)
        return self.report_done(
            party, self._linked(spec, numbered_keys(found, texts), party.keys), Linked()
        )

    def _meet(
        self, party: protection.DataParty, sent: list[str | None], apply: Apply
    ) -> tuple[bytes, dict[bytes, str | None]]:
        """Send blinded keys, and return this party's secret and the keys by their common points.

        Raises:
            ProtocolError: If what comes back is not as many different points.
        """
        lines, primary = party.lines, party.spec.roles.primary
        own, context = _secret(), _context(party, party.keys.name)
        pace = Pace(party.observe, CiphertextsMade, name=party.keys.name)
        parts = [sent[start : start + _BLOCK] for start in range(0, len(sent), _BLOCK)]
        done = 0
        for points in apply(_blinded, [(own, context, part) for part in parts]):
            block = RecordPoints(count=len(sent), points=_array(points))
            lines.send(block.to_message(), primary)
            pace(done := done + len(block.points), len(sent))
        returned = [
            point
            for size in _sizes(len(sent))
            for point in _each(
                receive_from(lines, primary, ReturnedPoints, points=size).points.tobytes()
            )
        ]
        keys = dict(zip(returned, sent, strict=True))
        if len(keys) != len(sent):
            raise ProtocolError(f"{primary}: returned a point twice")
        return own, keys

    def _shuffled(self, spec: LinkSpec, keys: list[str], *, whose: str) -> list[str | None]:
        """Return keys in a secret order, None where padding stands in for one.

        Raises:
            DataError: If there are more than may be announced.
        """
        padded = max(1, spec.hiding.pad_to or len(keys))
        if len(keys) > MOST_KEYS:
            raise DataError(
                f"keys of {whose}: {len(keys):,} are different, and one run takes {MOST_KEYS:,}"
            )
        if len(keys) > padded:
            raise DataError(
                f"keys of {whose}: {len(keys):,} are different, and linkage.pad_to hides up to "
                f"{padded:,}; agree on a larger one"
            )
        sent: list[str | None] = [*keys, *[None] * (padded - len(keys))]
        secrets.SystemRandom().shuffle(sent)
        return sent

    def _linked(self, spec: LinkSpec, metric: ComparedKeys, own: KeyTable) -> LinkedSecondary:
        source = source_of_metric(spec, metric)
        apart = spec.tells_rows and tells_apart(spec, source.link(np.arange(metric.num_rows)))
        return protection.linked_secondary(own, source, None, rows=metric.num_rows, apart=apart)
