"""Symbols of keys: all that small runs can send, with its exact probability, whatever is asked for.

A key's bits are one uniform draw. Every value of every draw is played through, with a record and
without it, against primaries that choose requests by what they were sent.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.linking import link_spec

from securevfl.core.errors import PrivacyError
from securevfl.data.tables import KeyTable
from securevfl.dp import symbols
from securevfl.dp.events import SymbolRelease
from securevfl.dp.labels import slots
from securevfl.dp.pure import largest_loss, pure_delta
from securevfl.dp.symbols import SymbolNoise, SymbolPlan
from securevfl.federation.rounds.cached_release import CachedRelease, CountedRelease
from securevfl.federation.rounds.release import KeySymbols
from securevfl.ledger.chain import ChainedFile
from securevfl.ledger.ledger import Ledger
from securevfl.ledger.ledger_file import RecordCounts
from securevfl.linkage.metrics.metric import KeySpec
from securevfl.linkage.protections.protection import BothTables
from securevfl.linkage.spec import ChoiceSpec, LinkageSecret, LinkedSecondary
from securevfl.linkage.stage.link_cache import LinkCache
from securevfl.linkage.stage.linkage_parts import METRICS, protection_of

CELLS, ODDS = 2, 0.25
NOISE = SymbolNoise(plan=SymbolPlan(cells=CELLS, exchanged=False), odds=ODDS, unit=1.0)
OWN, OTHER = slots(-math.log(ODDS), CELLS)

Sent = tuple[int, ...]
Asks = Callable[[Sent], Sequence[str] | None]
"""Returns the next request's keys, given all symbols so far; None at the end."""


class Draws:
    """Every value of every draw, one play after another."""

    def __init__(self) -> None:
        self.tape: list[int] = []
        self._given: dict[tuple[bytes, int], int] = {}

    def rewind(self) -> None:
        """Begin a play."""
        self._given = {}

    def advance(self) -> bool:
        """Go on to the next play; False after the last."""
        del self.tape[len(self._given) :]
        while self.tape and self.tape[-1] == 2 * CELLS - 1:
            self.tape.pop()
        if self.tape:
            self.tape[-1] += 1
        return bool(self.tape)

    def chance(self) -> Fraction:
        """Return the probability of this play."""
        sizes = [OTHER, OWN]
        chosen = (sizes[choice % 2] for choice in self.tape[: len(self._given)])
        return math.prod((Fraction(size, CELLS * 2**63) for size in chosen), start=Fraction(1))

    def uniform_words(self, secret: bytes, keys: np.ndarray, *, draw: int) -> np.ndarray:
        """Return a word that turns a cell or leaves it, and a number that is a cell."""
        assert draw == 0
        words = np.empty((len(keys), 2), dtype=np.uint64)
        for row, key in enumerate(keys.tolist()):
            place = self._given.setdefault((secret, key), len(self._given))
            if place == len(self.tape):
                self.tape.append(0)
            choice = self.tape[place]
            words[row] = (2**64 - 1 if choice % 2 else 0), choice // 2
        return words


@cache
def linked(asked: tuple[str, ...], records: tuple[str, ...], kind: str) -> LinkedSecondary:
    """Return the links of keys as a secondary finds them; ``near`` ones are numbers."""
    near = kind == "near"
    columns = [
        {"id": np.array([float(key) for key in keys] if near else [*keys], float if near else "O")}
        for keys in (asked, records)
    ]
    primary, own = (
        KeyTable(name=name, columns=column)
        for name, column in zip(("agency", "bank"), columns, strict=True)
    )
    spec = link_spec(
        "psi" if kind == "psi" else "none",
        keys=KeySpec(columns=("id",), metric=METRICS["euclidean" if near else "exact"]),
        choice=ChoiceSpec(neighbours=1, by="records", links_per_record=1, once=True),
    )
    secret, cache = LinkageSecret.fresh(), LinkCache(None)
    tables = BothTables(spec=spec, primary=primary, own=own, secret=secret, cache=cache)
    return protection_of(spec).link_in_process(tables)


def ask(release: Any, rows: Sequence[int], number: int) -> list[int]:
    """Return the symbols of a round; records' scores are in the upper cell."""
    asked = np.array(rows, dtype=np.int64)
    release.charge(round_number=number, rows=asked, purpose="predict")
    present = release.link(release.first_rows(asked)).present
    values = torch.from_numpy(np.where(present, 2.0, math.nan)[..., None]).float()
    sent = KeySymbols(noise=NOISE, keys=release, clip_norm=1.0).draw(values, asked).sum(dim=(1, 2))
    return [int(score > 0) for score in sent]


class FreeLedger(Ledger):
    """A ledger that charges nothing, with the counts of one table."""

    released_rows = np.zeros(0, np.int64)
    epsilon_spent = 0.0
    record_counts = None

    def __init__(self, counts: RecordCounts | None = None) -> None:
        self.record_counts = counts

    def charge(self, **_: Any) -> float:
        return 0.0

    def require_same_release(self, digest: str) -> None:
        del digest


def predicted(asks: Asks, records: Sequence[str], kind: str, most: int) -> Sent:
    """Return what a secondary sends to a primary that asks on and on, two rows a round."""
    own = KeyTable(name="bank", columns={"id": np.array([*records], object)})
    counts = RecordCounts(None, ChainedFile(None), own, last=None)
    ledger = FreeLedger(counts)
    sent: Sent = ()
    while (asked := asks(sent)) is not None:
        links = linked(tuple(asked), tuple(records), kind)
        release = CountedRelease(links.source, ledger, most, firsts=links.firsts, texts=links.texts)
        for first in range(0, len(asked), 2):
            rows = [*range(first, min(first + 2, len(asked)))]
            sent += tuple(ask(release, rows, first + 1))
    return sent


def trained(asks: Asks, records: Sequence[str], kind: str, most: int) -> Sent:
    """Return what a run sends for its rows, in two rounds."""
    del most
    asked = asks(()) or ()
    links = linked(tuple(asked), tuple(records), kind)
    release = CachedRelease(
        None,
        FreeLedger(),
        bottom=torch.nn.Linear(1, 1),
        links=links.source,
        records={},
        firsts=links.firsts,
    )
    release.settle()
    half = len(asked) // 2
    rounds = ([*range(half, len(asked))], [*range(half)])
    return tuple(
        symbol for number, rows in enumerate(rounds, 1) for symbol in ask(release, rows, number)
    )


def chances(patch: pytest.MonkeyPatch, play: Callable[..., Sent], *of: Any) -> dict[Sent, Fraction]:
    """Return everything that is sent, and how probable it is."""
    draws, found = Draws(), defaultdict[Sent, Fraction](Fraction)
    patch.setattr(symbols, "uniform_words", draws.uniform_words)
    while True:
        draws.rewind()
        sent = play(*of)
        found[sent] += draws.chance()
        if not draws.advance():
            break
    assert sum(found.values()) == 1
    return found


def each(*requests: Sequence[str]) -> Asks:
    """Return a primary that asks for these."""
    return lambda sent: next(
        (
            request
            for number, request in enumerate(requests)
            if len(sent) == sum(map(len, requests[:number]))
        ),
        None,
    )


def follows(sent: Sent) -> Sequence[str] | None:
    """Ask for the key again, spelled otherwise, where an invented one had its symbol too."""
    if not sent:
        return ["a", "x"]
    if len(sent) == 2:
        return [" a", "a\ufeff"] if sent[0] == sent[1] else ["x", "z"]
    return ["a"] if len(sent) == 4 and sent[2] else None


WORLDS = (["a", "b"], ["b"]), (["b", "a", "a"], ["b", "a"])
"""A record is there, and gone; or leaves another one of its key to itself."""


def require_within(first: dict[Sent, Fraction], second: dict[Sent, Fraction], count: int) -> None:
    """Check that two worlds are no further apart than is charged for so many symbols."""
    release = SymbolRelease(cells=CELLS, odds=ODDS, exchanged=False, count=count)
    bound = largest_loss(release)
    assert set(first) == set(second)
    for here, there in ((first, second), (second, first)):
        assert max(math.log(here[sent] / there[sent]) for sent in here) <= bound + 1e-12
        for epsilon in np.linspace(0, bound, 9):
            factor = Fraction(math.exp(epsilon))
            delta = float(sum(max(here[sent] - factor * there[sent], 0) for sent in here))
            charged = pure_delta([release], epsilon=float(epsilon), noise_multiplier=None)
            assert delta <= charged + 1e-12


GAMES: dict[str, tuple[Callable[..., Sent], Asks, str, int]] = {
    "training": (trained, each(["a", "x", " a", "b", "a", "x"]), "exact", 1),
    "training by values": (trained, each(["a", "x", " a", "a"]), "psi", 1),
    "spelled alike": (predicted, each(["a", " a", "a\ufeff", "a "]), "exact", 1),
    "again and again": (predicted, each(["a"], ["x", "a"], ["x"]), "exact", 1),
    "by what was sent": (predicted, follows, "exact", 1),
    "twice": (predicted, each(["a"], ["a", "a"], ["a"], ["a"]), "exact", 2),
    "by values": (predicted, each(["a", "a"], ["x", "a"]), "psi", 1),
    "values twice": (predicted, each(["a", "a"], ["a"], ["a"]), "psi", 2),
}


@pytest.mark.parametrize("worlds", WORLDS, ids=["removed", "one of two"])
@pytest.mark.parametrize("game", GAMES)
def test_no_primary_learns_more_of_a_record_than_is_charged(
    game: str, worlds: tuple[list[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training counts one symbol of a record, and all predictions N."""
    play, asks, kind, most = GAMES[game]
    first, second = (chances(monkeypatch, play, asks, world, kind, most) for world in worlds)
    require_within(first, second, most)
    # And all N are needed: a symbol tells that much.
    assert first != second


@pytest.mark.parametrize("most", [1, 2])
def test_different_keys_of_one_record_are_releases_each(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Near keys reach it one after another, until it had its N."""
    asks = each(["1.0", "1.0"], ["1.1"], ["0.9"], ["1.0"])
    first, second = (
        chances(monkeypatch, predicted, asks, world, "near", most)
        for world in (["1.05", "9.0"], ["9.0"])
    )
    require_within(first, second, most)


def test_a_key_that_was_asked_for_has_one_symbol_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether its record is there or not, however it is spelled, in whatever request."""
    asks = each(["a", "x"], [" a", "x ", "a"])
    for sent in chances(monkeypatch, predicted, asks, ["a", "b"], "exact", 1):
        assert (sent[2], sent[4], sent[3]) == (sent[0], sent[0], sent[1])


@pytest.mark.parametrize("play", [trained, predicted])
@pytest.mark.parametrize(
    ("rows", "pairs"),
    [(["a", "x", " a", "x "], [(0, 2), (1, 3)]), (["a", " a", "x", "x "], [(0, 1), (2, 3)])],
    ids=["two rounds", "one round"],
)
def test_rows_of_one_key_have_one_symbol(
    play: Callable[..., Sent],
    rows: list[str],
    pairs: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However it is spelled, with a record and without."""
    for sent in chances(monkeypatch, play, each(rows), ["a", "b"], "exact", 1):
        assert all(sent[one] == sent[other] for one, other in pairs)


def count_nothing(patch: pytest.MonkeyPatch) -> None:
    """Let every record take part for ever."""
    patch.setattr(RecordCounts, "admit", lambda _, records, *, most: (records >= 0) & (most > 0))


def built(patch: pytest.MonkeyPatch, change: Callable[..., dict[str, Any]]) -> None:
    """Build releases with other links, firsts or texts."""
    init = CountedRelease.__init__

    def other(release: CountedRelease, source: Any, *parts: Any, **more: Any) -> None:
        more |= change(source, **more)
        init(release, more.pop("source", source), *parts, **more)

    patch.setattr(CountedRelease, "__init__", other)


def forgets_absent(patch: pytest.MonkeyPatch) -> None:
    """Keep symbols of keys with a record alone."""

    def change(source: Any, *, texts: list[str], firsts: Any) -> dict[str, Any]:
        there = source.link(firsts).present.any(axis=1)
        return {
            "texts": [text if known else None for text, known in zip(texts, there, strict=True)]
        }

    built(patch, change)


def forgets_all(patch: pytest.MonkeyPatch) -> None:
    """Draw afresh for every request, and count nothing."""
    built(patch, lambda *_, **__: {"texts": None})
    count_nothing(patch)


def draws_twice(patch: pytest.MonkeyPatch) -> None:
    """Take each spelling for a key of its own, and count nothing."""

    def change(source: Any, *, texts: Any, firsts: np.ndarray) -> dict[str, Any]:
        del texts
        alike = SimpleNamespace(link=lambda rows: source.link(firsts[rows]))
        return {"source": alike, "firsts": None, "texts": None}

    built(patch, change)
    count_nothing(patch)


@pytest.mark.parametrize(
    ("hole", "asks"),
    [
        (forgets_absent, each(["a"], ["a"])),
        (forgets_all, each(["a"], ["a"])),
        (draws_twice, each(["a", " a"])),
    ],
)
def test_a_hole_is_found(
    hole: Callable[[pytest.MonkeyPatch], None], asks: Asks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These tests see it when a part of the mechanism is taken out."""
    hole(monkeypatch)
    first, second = (
        chances(monkeypatch, predicted, asks, world, "exact", 1) for world in WORLDS[0]
    )
    with pytest.raises(AssertionError):
        require_within(first, second, 1)


def test_no_symbol_but_the_agreed_ones_is_sent() -> None:
    """In one line, and before anything is sent."""
    with pytest.raises(PrivacyError, match=r"^a symbol is not from 0 to 1; nothing is sent$"):
        NOISE.values_of(np.array([0, 2]))
