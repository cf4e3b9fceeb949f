"""Bytes on the wire of a whole run between processes, as formulas of its sizes.

Of FeT and of every family that exchanges what FeT does, with keys that are shown: a frame is its
header, a head that describes its arrays, and these. TLS adds 22 bytes to every 16,384; heartbeats,
of 56 bytes, come where nothing else was sent for some seconds. Neither is in here.

k = secondaries, N = rows of the primary, D = key columns, E = epochs, B = rows of a batch,
L x H = numbers of a released row, l = numbers in a word.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from securevfl.federation.messages import PROTOCOL_VERSION, EpochMark
from securevfl.federation.run_plan import RunFacts

_HEADER: Final = 52
_ALIGNMENT: Final = 16
_EMPTY: Final = _HEADER + len("{}") + 2
_KEY: Final = ((1, 32), (1, 64))
_DIGEST: Final = "0" * 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Bytes:
    """What one secondary sends and receives; the primary does the opposite with each."""

    sent: int = 0
    received: int = 0

    def __add__(self, other: "Bytes") -> "Bytes":
        """Return both."""
        return Bytes(sent=self.sent + other.sent, received=self.received + other.received)

    def __mul__(self, times: int) -> "Bytes":
        """Return so many of them."""
        return Bytes(sent=self.sent * times, received=self.received * times)


@dataclass(frozen=True, kw_only=True, slots=True)
class WiredRun:
    """The sizes that a run's bytes follow from. All secondaries take part in every round."""

    facts: RunFacts
    """Rows, and how many of them are for what."""
    primary: str
    secondaries: Sequence[str]
    keys: int
    """D, key columns, all of them numbers."""
    cut: tuple[int, int]
    """(L, H)."""
    lanes: int
    """l."""
    batch_size: int
    positions: Mapping[str, tuple[int, ...]]
    """Shapes of the positional encoding's weights, by name."""
    average_every: int
    """T_pe; 0 never averages."""
    best_epochs: Sequence[bool]
    """One flag for each epoch that ran: True if it was the best so far."""

    @property
    def ranks(self) -> list[int]:
        """Of the secondaries."""
        return list(range(1, len(self.secondaries) + 1))

    def total(self, secondary: str) -> Bytes:
        """Return all that one secondary sends and receives."""
        return sum(self.stages(secondary).values(), start=Bytes())

    def stages(self, secondary: str) -> dict[str, Bytes]:
        """Return the same by stage: handshake, linking, training, averaging, and so on."""
        epochs, facts = len(self.best_epochs), self.facts
        averages = epochs // self.average_every if self.average_every else 0
        return {
            "handshake": self._handshake(secondary),
            "linking": self.linking(),
            "training": self._rounds("train", facts.train_rows) * epochs,
            "averaging": self.average() * averages,
            "evaluation": self._rounds("validation", facts.validation_rows) * epochs
            + self._rounds("test", facts.test_rows),
            "countersigning": self._countersigning(secondary),
            "marks": self._marks(),
        }

    def round(self, purpose: str, rows: int) -> Bytes:
        """Return one round's: row ids, masked words, and a gradient if it trains.

        With frames of some hundred bytes left out: 8 ceil(rows L H / l) sent, 8 rows received, and
        4 rows L H if it trains.
        """
        words = math.ceil(rows * math.prod(self.cut) / self.lanes)
        figures = {"active": self.ranks, "purpose": purpose}
        received = frame(figures, {"rows": (8, rows)})
        if purpose == "train":
            received += frame({}, {"gradient": (4, rows, *self.cut)})
        return Bytes(sent=frame({}, {"words": (8, words)}), received=received)

    def average(self) -> Bytes:
        """Return those of one average of P weights: 8 (P + 1) sent, 4 P received, and frames."""
        weights = sum(math.prod(shape) for shape in self.positions.values())
        mean = {name: (4, *shape) for name, shape in self.positions.items()}
        return Bytes(sent=frame({}, {"words": (8, weights + 1)}), received=_EMPTY + frame({}, mean))

    def linking(self) -> Bytes:
        """Return those of keys that are shown, all rows linked: 8 N D received, and frames."""
        columns = {f"number:{number}": (8, self.facts.rows) for number in range(self.keys)}
        statistics = {"centre": (8, self.keys), "width": (8, self.keys)}
        return Bytes(
            sent=_EMPTY + frame({"linked": self.facts.rows}, {}),
            received=frame({}, {**columns, **statistics}) + _EMPTY,
        )

    def _rounds(self, purpose: str, rows: int) -> Bytes:
        full, rest = divmod(rows, self.batch_size)
        last = self.round(purpose, rest) if rest else Bytes()
        return self.round(purpose, self.batch_size) * full + last

    def _handshake(self, secondary: str) -> Bytes:
        hello = {
            "digest": _DIGEST,
            "protocol": PROTOCOL_VERSION,
            "epochs": [],
            "stage_steps": [],
            "run": "",
        }
        public, signature = _KEY
        welcome = {
            f"{what}:{name}": of
            for name in self.secondaries
            for what, of in (("public", public), ("signature", signature))
        }
        sent = frame(hello, {"public": public, "signature": signature})
        return Bytes(
            sent=sent + _EMPTY + self._memories([secondary]),
            received=frame({"rank": 1 + self.secondaries.index(secondary)}, {})
            + frame({**asdict(self.facts), "active": None}, welcome)
            + self._memories(self._parties),
        )

    @property
    def _parties(self) -> list[str]:
        return [self.primary, *self.secondaries]

    def _memories(self, names: Sequence[str]) -> int:
        known = len(self._parties)
        arrays: dict[str, tuple[int, ...]] = {}
        for name in names:
            arrays[f"nonce:{name}"] = (1, 16)
            arrays[f"signature:{name}"] = (1, 64)
            arrays[f"heads:{name}"] = (1, known, 32)
            arrays[f"lines:{name}"] = (8, known)
        return frame({}, arrays)

    def _countersigning(self, secondary: str) -> Bytes:
        """Every meeting proves the ledger's lines since the last: 32 bytes each, of all parties."""
        meetings = list(self._new_lines())
        asked = frame({"point": "end"}, {})
        return Bytes(
            sent=sum(_heads([secondary], lines) for lines in meetings),
            received=asked + sum(_heads(self._parties, lines) for lines in meetings),
        )

    def _new_lines(self) -> Iterator[int]:
        """Return how many lines every ledger has grown by: one a round, one the last meeting.

        Before the first round also one for the number of linked rows.
        """
        yield 0
        facts, batch = self.facts, self.batch_size
        each = math.ceil(facts.train_rows / batch) + math.ceil(facts.validation_rows / batch)
        for epoch in range(len(self.best_epochs)):
            yield each + 1 + (epoch == 0)
        yield math.ceil(facts.test_rows / batch) + 1

    def _marks(self) -> Bytes:
        """Return the ends of epochs, the return to the best one, and of the run."""
        marks = [
            EpochMark(epoch=number, best=best) for number, best in enumerate(self.best_epochs, 1)
        ]
        best = max(number for number, best in enumerate(self.best_epochs, 1) if best)
        marks.append(EpochMark(epoch=best, best=False, restore_best=True))
        done = _EMPTY
        leave = _EMPTY
        return Bytes(received=sum(frame(asdict(mark), {}) for mark in marks) + done + leave)


def frame(figures: Mapping[str, Any], arrays: Mapping[str, tuple[int, ...]]) -> int:
    """Return the bytes of one message.

    Args:
        figures: What it says beside arrays.
        arrays: By name: bytes of an element, then the lengths of its dimensions.
    """
    head = 2 + len(json.dumps(dict(figures), separators=(",", ":")))
    body = 0
    for name, (element, *lengths) in arrays.items():
        head += 1 + len(name.encode()) + 2 + 8 * len(lengths)
        body += -body % _ALIGNMENT + element * math.prod(lengths)
    return _HEADER + head + body


def _heads(names: Sequence[str], lines: int) -> int:
    arrays: dict[str, tuple[int, ...]] = {}
    for name in names:
        arrays[f"head:{name}"] = (1, 32)
        arrays[f"lines:{name}"] = (8, 2)
        arrays[f"signature:{name}"] = (1, 64)
        arrays[f"proof:{name}"] = (1, lines, 32)
    return frame({}, arrays)
