"""Private set intersection of exact keys: no third party, and no secret that parties share.

An oblivious pseudorandom function (2HashDH [JKK14], [RFC9497]) on ristretto255, between the primary
and each secondary by itself. The primary draws the function's key k, a fresh one for each secondary
and session. With H1 to the group and H2 to 16 bytes,

    F(x) = H2(x, k H1(x)).

1. The primary sends F(x_i) of its rows, in their order.
2. The secondary announces a number, and sends b_j H1(y_j) of its different keys, shuffled, each
   under a fresh blind b_j, with random inputs up to that number.
3. The primary returns k b_j H1(y_j), in the order in which they came.
4. The secondary takes b_j away and has F(y_j); equal values are equal keys.

Steps 2 and 3 happen once a session: later requests for predictions send their rows alone.

**What the primary learns.** The announced number alone, whatever it can compute: a blinded point is
uniform. It never sees values of step 4, so whether a record is there stays under the run's epsilon.

**What a secondary learns.** The links, which it needs to train, and which rows have equal keys. To
whoever has no discrete logarithms F is a random function, one value of which takes one answer of
step 3 (one-more gap Diffie-Hellman, H1 and H2 random oracles [JKK14]): it tests as many keys as it
announced, whatever points it sends. Values of H2 say nothing of sums of keys, as points would.

**Truncation.** Two different keys have one value with probability 2^-128, so n rows and m keys have
a false link with probability n m 2^-128 at most: 2^-76 at 2^26 each.

**The standard.** An input is the SHA-512 of session, secondary's name and key, which separates
sessions and secondaries and has one length. From there on blinding, evaluation and finalisation are
OPRF(ristretto255, SHA-512) of [RFC9497] to the letter, but that outputs are cut to 16 bytes, and
that the primary evaluates inputs of its own too
(:mod:`~securevfl.stages.psi.oprf`).

References:
    [JKK14] S. Jarecki, A. Kiayias, H. Krawczyk. Round-Optimal Password-Protected Secret Sharing and
        T-PAKE in the Password-Only Model. ASIACRYPT 2014.
    [RFC9496] The ristretto255 and decaf448 Groups. 2023.
    [RFC9497] Oblivious Pseudorandom Functions Using Prime-Order Groups. 2023.
"""

import itertools
import secrets
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import numpy as np
from jaxtyping import UInt8

from securevfl.core.checks import MOST_KEYS
from securevfl.core.errors import ConfigError, DataError, ProtocolError
from securevfl.core.progress import CiphertextsMade, KeysAnnounced, Pace
from securevfl.data.tables import KeyTable
from securevfl.linkage.cores import Apply, on_cores, parts_of
from securevfl.linkage.links import first_of_key
from securevfl.linkage.metrics.exact import exact_texts, numbered_keys
from securevfl.linkage.metrics.metric import ComparedKeys, Metric
from securevfl.linkage.protections import protection
from securevfl.linkage.protections.plaintext import KeysAsTheyAre
from securevfl.linkage.spec import LinkedPrimary, LinkedSecondary, LinkSpec
from securevfl.linkage.stage.candidates import source_of_metric, tells_apart
from securevfl.linkage.stage.messages import Linked
from securevfl.stages.psi.oprf import (
    POINT_BYTES,
    VALUE_BYTES,
    blind,
    evaluate,
    evaluate_blinded,
    fresh_scalar,
    unblind,
)
from securevfl.transport.channels import receive_from
from securevfl.transport.message import Cover, DeclaredMessage, MessageKind, TypedMessage, wire

_LABEL: Final = b"securevfl/linkage/psi/v2"

_BLOCK: Final = 1 << 12
"""Points of one message: 128 KiB, and a quarter of a second of one core."""

_IN_PLACE: Final = 16
"""Blocks that take less time than it takes to start a process on every core."""

_BATCH: Final = 32
"""Blocks that the primary answers together, on all cores: 4 MiB."""

_AHEAD: Final = 2 * _BATCH
"""Blocks that a secondary sends before it takes the first one's answer."""


def most_keys(rows: int) -> int:
    """Return the default of ``linkage.most_keys``: the most keys that a secondary may announce.

    With more than a hundred a row, fewer than one in a hundred can be linked: a table of another
    order, which its owner can name before, or guesses. A small table takes 100,000 all the same.

    Args:
        rows: The primary's, of training.
    """
    return max(100_000, 100 * rows)


class PsiKind(MessageKind):
    """The kind of message of private set intersection."""

    LINK_POINTS = 62
    """Between the primary and a secondary: a pseudorandom function's values at the primary's keys;
    a secondary's keys as blinded points of a group, and these times the function's key."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class RowValues(DeclaredMessage):
    """The function's values at some of the primary's keys, 16 bytes each."""

    KIND = PsiKind.LINK_POINTS
    WAY = "primary to a secondary"
    COVERS: ClassVar = {"linkage": "values", "sizes and times": "lengths"}

    values: UInt8[np.ndarray, "values 16"]


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class BlindedPoints(DeclaredMessage):
    """Some of a secondary's different keys as points, shuffled, each under a blind of its own."""

    KIND = PsiKind.LINK_POINTS
    WAY = "secondary to primary"
    COVERS: ClassVar = {"record counts": "count lengths", "masks": "points"}

    count: int = wire(least=1, most=MOST_KEYS)
    """Points in all, padding among them."""

    points: UInt8[np.ndarray, "some_points 32"]


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class EvaluatedPoints(DeclaredMessage):
    """A secondary's points, in the order in which they came, times the primary's key."""

    KIND = PsiKind.LINK_POINTS
    WAY = "primary to the secondary"
    COVERS: ClassVar = {"masks": "points", "record counts": "lengths"}

    points: UInt8[np.ndarray, "points 32"]


def _context(party: protection.DataParty, secondary: str) -> bytes:
    name = secondary.encode()
    return _LABEL + party.session + struct.pack(">I", len(name)) + name


def _sizes(count: int) -> list[int]:
    return [min(_BLOCK, count - start) for start in range(0, count, _BLOCK)]


def _array(content: bytes, width: int) -> UInt8[np.ndarray, "_ _"]:
    return np.frombuffer(content, dtype=np.uint8).reshape(-1, width)


class Psi(KeysAsTheyAre):
    """Equal keys alone are found, by the secondary; the primary learns a number of keys."""

    name: ClassVar[str] = "psi"
    learned: ClassVar[Mapping[str, str]] = {
        "primary": "how many different keys each secondary has, or linkage.pad_to where that is "
        "set",
        "secondary": "for each primary row, which of its own records have the same key; which rows "
        "have equal keys; and of as many keys as it announces, whether the primary has them",
    }
    messages: ClassVar[tuple[type[TypedMessage], ...]] = (
        *(RowValues, BlindedPoints, EvaluatedPoints),
        Linked,
    )

    reads: ClassVar[frozenset[str]] = frozenset({"pad_to", "most_keys"})
    changeable: ClassVar[frozenset[str]] = frozenset({"most_keys"})

    def objection_to(self, metric: Metric) -> str | None:
        """Return that only equal keys have equal values."""
        return None if metric.equal_only else "finds equal keys alone"

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Refuse a bound where the number itself is given."""
        if None not in (settings["pad_to"], settings["most_keys"]):
            raise ConfigError("most_keys: pad_to is the number itself; give one of them")

    def settings_for_new_rows(
        self, settings: Mapping[str, Any], *, trained_rows: int | None
    ) -> Mapping[str, Any]:
        """Bound announced keys by the rows of training: a few new rows say nothing of them."""
        trained = MOST_KEYS if trained_rows is None else most_keys(trained_rows)
        return {**settings, "most_keys": settings["most_keys"] or trained}

    def closed_channels(self, settings: Mapping[str, Any]) -> frozenset[Cover]:
        """Return that padded numbers of keys are no counts of records."""
        return frozenset() if settings["pad_to"] is None else frozenset({"record counts"})

    def link_in_process(self, tables: protection.BothTables) -> LinkedSecondary:
        """Link as every secondary does, without cryptography."""
        spec, primary, own = tables.spec, tables.primary, tables.own
        _different(spec, own, rows=primary.num_rows)
        seen = exact_texts(spec.keys, primary)
        return self._link(spec, self.compare(spec, primary, own), own, seen)

    def link_as_primary(self, party: protection.DataParty) -> LinkedPrimary:
        """Send values, and evaluate each secondary's points; see :class:`Protection`.

        Reveals:
            To every secondary: values that show it which rows have one of its keys, and which rows
            have equal keys.
        """
        spec, channels, names = party.spec, party.channels, party.spec.roles.present
        parts = parts_of(exact_texts(spec.keys, party.keys), _BLOCK)
        announced, linked = dict[str, int](), []
        # A secondary whose keys were evaluated before in this session asks for no more.
        keys = {n: party.memory[n][0] if n in party.memory else fresh_scalar() for n in names}
        with on_cores(-1, after=_IN_PLACE, check=channels.check) as apply:
            for name, key in keys.items():
                pace = Pace(party.observe, CiphertextsMade, name=name)
                tasks = [(key, _context(party, name), part) for part in parts]
                for number, values in enumerate(apply(evaluate, tasks), 1):
                    channels.send(RowValues(values=_array(values, VALUE_BYTES)).to_message(), name)
                    pace(min(number * _BLOCK, party.rows), party.rows)
            for name, key in keys.items():
                if name not in party.memory:
                    party.memory[name] = key, self._evaluate(party, name, key, apply)
                announced[name] = party.memory[name][1]
                linked.append(self.await_done(party, name)[1])
        made = protection.linked_primary(spec, party.keys, [], linked)
        return replace(made, announced=announced)

    def _evaluate(self, party: protection.DataParty, name: str, key: bytes, apply: Apply) -> int:
        """Return a secondary's points times the key, a batch at a time, and how many these were.

        Raises:
            ProtocolError: If it announces more than was agreed on, sends another number than it
                announced, or what is no point.
        """
        came = receive_from(party.channels, name, BlindedPoints)
        count, done = came.count, 0
        if (refusal := _not_agreed(party.spec, count, rows=party.rows)) is not None:
            raise ProtocolError(f"{name}: announces {count:,} keys, and {refusal}")
        party.observe(KeysAnnounced(name=name, keys=count, rows=party.rows))
        pace = Pace(party.observe, CiphertextsMade, name=name)
        for sizes in parts_of(_sizes(count), _BATCH):
            tasks = list[tuple[bytes, bytes]]()
            for size in sizes:
                block = receive_from(party.channels, name, BlindedPoints) if done or tasks else came
                if (block.count, len(block.points)) != (count, size):
                    raise ProtocolError(f"{name}: sent other points than it announced")
                tasks.append((key, block.points.tobytes()))
            for points in apply(evaluate_blinded, tasks):
                answer = EvaluatedPoints(points=_array(points, POINT_BYTES))
                party.channels.send(answer.to_message(), name)
                pace(done := done + len(answer.points), count)
        return count

    def link_as_secondary(self, party: protection.DataParty) -> LinkedSecondary:
        """Have own keys evaluated, and find the rows that have one; see :class:`Protection`.

        Reveals:
            To the primary: how many different keys there are, or ``linkage.pad_to``; that linkage
            is done; and, where the file asks for it, which rows are linked.
        """
        spec, channels, primary = party.spec, party.channels, party.spec.roles.primary
        texts = exact_texts(spec.keys, party.keys)
        rows = list[bytes]()
        for size in _sizes(party.rows):
            block = receive_from(channels, primary, RowValues, values=size)
            rows += parts_of(block.values.tobytes(), VALUE_BYTES)
        if primary not in party.memory:
            party.memory[primary] = self._evaluate_keys(party)
        keys: dict[bytes, str | None] = party.memory[primary]
        metric = numbered_keys([keys.get(value) for value in rows], texts)
        # Missing keys have random values, so no two of them are equal.
        return self.report_done(party, self._link(spec, metric, party.keys, rows), Linked())

    def _evaluate_keys(self, party: protection.DataParty) -> dict[bytes, str | None]:
        """Have own keys evaluated by the primary, and return them by their values.

        Raises:
            DataError: If there are more than may be announced.
            ProtocolError: If what comes back is not as many points.
        """
        spec, channels, primary = party.spec, party.channels, party.spec.roles.primary
        keys = _different(spec, party.keys, rows=party.rows)
        padding = max(1, spec.hiding.settings.get("pad_to") or len(keys)) - len(keys)
        sent: list[str | None] = [*keys, *[None] * padding]
        secrets.SystemRandom().shuffle(sent)
        context, parts = _context(party, party.keys.name), parts_of(sent, _BLOCK)
        pace = Pace(party.observe, CiphertextsMade, name=party.keys.name)
        inverses, answers, values = list[bytes](), list[bytes](), list[bytes]()

        def take_answer() -> None:
            size = len(parts[len(answers)])
            block = receive_from(channels, primary, EvaluatedPoints, points=size)
            answers.append(block.points.tobytes())
            pace(min(len(answers) * _BLOCK, len(sent)), 2 * len(sent))

        with on_cores(-1, after=_IN_PLACE, check=channels.check) as apply:
            for points, inverse in apply(blind, [(context, part) for part in parts]):
                if len(inverses) == len(answers) + _AHEAD:
                    take_answer()
                block = BlindedPoints(count=len(sent), points=_array(points, POINT_BYTES))
                channels.send(block.to_message(), primary)
                inverses.append(inverse)
            while len(answers) < len(parts):
                take_answer()
            tasks = zip(itertools.repeat(context), parts, inverses, answers, strict=False)
            for block in apply(unblind, tasks):
                values += parts_of(block, VALUE_BYTES)
                pace(len(sent) + len(values), 2 * len(sent))
        return dict(zip(values, sent, strict=True))

    def _link(
        self, spec: LinkSpec, metric: ComparedKeys, own: KeyTable, seen: Sequence[Any]
    ) -> LinkedSecondary:
        """Return the links; rows for which equal keys or values were seen have one key."""
        source, rows, firsts = source_of_metric(spec, metric), metric.num_rows, None
        if spec.choice.by == "records":
            firsts = first_of_key(numbered_keys(seen, []).primary)
        apart = spec.tells_rows and tells_apart(spec, source.link(np.arange(rows)))
        return protection.linked_secondary(own, source, None, rows=rows, apart=apart, firsts=firsts)


def _not_agreed(spec: LinkSpec, count: int, *, rows: int) -> str | None:
    """Return which setting a number of announced keys breaks, and how; None if none."""
    agreed = spec.hiding.settings.get("pad_to")
    most = spec.hiding.settings.get("most_keys") or most_keys(rows)
    if agreed is not None:
        return None if count == agreed else f"linkage.pad_to is {agreed:,}"
    allows = f"linkage.most_keys allows {most:,} for {rows:,} rows; agree on another, or on pad_to"
    return None if count <= most else allows


def _different(spec: LinkSpec, own: KeyTable, *, rows: int) -> list[str]:
    """Return the different keys of a table.

    Raises:
        DataError: If there are more than may be announced.
    """
    keys = list(dict.fromkeys(text for text in exact_texts(spec.keys, own) if text is not None))
    agreed, count = spec.hiding.settings.get("pad_to"), len(keys)
    if count > MOST_KEYS:
        refusal: str | None = f"one run takes {MOST_KEYS:,}"
    elif agreed is not None and count > agreed:
        refusal = f"linkage.pad_to hides up to {agreed:,}; agree on a larger one"
    else:
        refusal = _not_agreed(spec, agreed or count, rows=rows)
    if refusal is not None:
        raise DataError(f"keys of {own.name}: {count:,} are different, and {refusal}")
    return keys
