"""Symbols: their epsilon by brute force, what is drawn word by word, and what plans make of them.

No test here has a chance to fail: draws are enumerated, and nothing is sampled.
"""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from securevfl.core.errors import ConfigError, PrivacyError
from securevfl.dp import Privacy
from securevfl.dp.accountant import epsilon_of
from securevfl.dp.events import GaussianRelease, SampledRelease, SymbolRelease
from securevfl.dp.gaussian import composed_multiplier
from securevfl.dp.labels import slots
from securevfl.dp.pure import largest_loss, pure_delta
from securevfl.dp.release_plan import FittingPlan, ReleasePlan, choose_scores
from securevfl.dp.symbols import CELLS, SymbolNoise, SymbolPlan, normal_scores, uniform_words
from securevfl.federation.messages import RoundPlan
from securevfl.federation.rounds.cut import CutLayer, MeanOfPooledRecords
from securevfl.federation.rounds.release import KeySymbols, SecondaryRelease
from securevfl.ledger.ledger import Ledger
from securevfl.mpc.codec import RingFormat

DELTA = 1e-5
FIT = FittingPlan(share=0.05, steps=3)


def symbol(cells: int, odds: float, *, count: int = 1, exchanged: bool = False) -> SymbolRelease:
    return SymbolRelease(cells=cells, odds=odds, exchanged=exchanged, count=count)


# By brute force, every word here is written without the accountant's formulas.


def rows_of(release: SymbolRelease) -> tuple[np.ndarray, np.ndarray]:
    """Return the probabilities of a row's cells with the unit, and without it or with another."""
    own = 1 / (1 + (release.cells - 1) * release.odds)
    there = np.full(release.cells, release.odds * own)
    there[0] = own
    return there, there[::-1] if release.exchanged else np.full(release.cells, 1 / release.cells)


def brute_delta(
    pairs: Sequence[tuple[np.ndarray, np.ndarray]], *, epsilon: float, mu: float | None
) -> float:
    """Return delta of rows, cell by cell, beside one Gaussian number on a grid."""
    gone, there = np.ones(1), np.ones(1)
    for first, second in pairs:
        there, gone = np.outer(there, first).ravel(), np.outer(gone, second).ravel()
    if mu is not None:
        step = 1e-3
        grid = np.arange(-12, 12 + mu, step)
        densities = (np.exp(-((grid - shift) ** 2) / 2) for shift in (mu, 0.0))
        shifted, centred = (density * step / math.sqrt(2 * math.pi) for density in densities)
        there, gone = np.outer(there, shifted), np.outer(gone, centred)
    return float(np.maximum(there - math.exp(epsilon) * gone, 0).sum())


@pytest.mark.parametrize("mu", [None, 0.12, 0.7])
@pytest.mark.parametrize(
    "releases",
    [
        [symbol(5, 0.05)],
        [symbol(3, 0.3, count=2)],
        [symbol(4, 0.2, count=3)],
        [symbol(6, 0.1, exchanged=True)],
        [symbol(2, 0.3, count=3, exchanged=True)],
        [symbol(4, 0.2, count=2), symbol(3, 0.4)],
        [symbol(4, 0.2), symbol(5, 0.3, exchanged=True)],
    ],
    ids=lambda releases: "+".join(
        f"{release.count}x{release.cells}{'e' if release.exchanged else ''}" for release in releases
    ),
)
def test_delta_is_that_of_brute_force(releases: list[SymbolRelease], mu: float | None) -> None:
    """Removal and exchange, in both directions; little above, since directions may be mixed."""
    pairs = [rows_of(release) for release in releases for _ in range(release.count)]
    back = [(second, first) for first, second in pairs]
    top = sum(map(largest_loss, releases))
    for epsilon in (0.0, 0.4 * top, 0.9 * top):
        exact = max(brute_delta(each, epsilon=epsilon, mu=mu) for each in (pairs, back))
        delta = pure_delta(releases, epsilon=epsilon, noise_multiplier=mu and 1 / mu)
        assert exact * (1 - 1e-6) - 1e-15 <= delta <= exact * 1.2 + 1e-15


def test_a_removal_may_empty_one_row_and_show_a_record_in_another() -> None:
    """A row with two records has the other one to itself then: both directions in one removal."""
    release = symbol(40, 0.0915, count=2)
    there, gone = rows_of(release)
    mixed = brute_delta([(there, gone), (gone, there)], epsilon=1.97, mu=None)
    assert mixed * (1 - 1e-6) <= pure_delta([release], epsilon=1.97, noise_multiplier=None)


def test_without_noise_beside_epsilon_is_the_pure_formula() -> None:
    """``e^a = M e^epsilon - M + 1``; a count multiplies it, and beyond it delta is nothing."""
    for cells, epsilon in ((2, 0.5), (5, 1.6), (24, 3.2)):
        odds = 1 / (cells * math.exp(epsilon) - cells + 1)
        release = symbol(cells, odds, count=3)
        assert largest_loss(release) == pytest.approx(3 * epsilon, rel=1e-9)
        beyond = largest_loss(release) * (1 + 1e-9)
        assert pure_delta([release], epsilon=beyond, noise_multiplier=None) == 0
        assert epsilon_of([release], delta=1e-12) == pytest.approx(3 * epsilon, rel=1e-6)


def test_more_symbols_and_smaller_odds_cost_more() -> None:
    """With a fitting beside, from nothing at all on; a sampled release adds the pure epsilon."""
    fit, sampled = (
        GaussianRelease(noise_multiplier=8.0),
        SampledRelease(sampling_rate=0.1, noise_multiplier=2.0, count=10),
    )
    alone = epsilon_of([fit], delta=DELTA)
    for exchanged in (False, True):
        costs = [
            epsilon_of([fit, symbol(6, odds, count=count, exchanged=exchanged)], delta=DELTA)
            for odds, count in ((0.5, 0), (1.0, 1), (0.5, 1), (0.1, 1), (0.1, 2))
        ]
        assert costs[0] == alone
        assert costs[1] == pytest.approx(alone, abs=1e-4)
        assert costs[1:] == sorted(set(costs[1:]))
        release = symbol(6, 0.1, count=2, exchanged=exchanged)
        assert epsilon_of([sampled, release], delta=DELTA) == pytest.approx(
            epsilon_of([sampled], delta=DELTA) + largest_loss(release), rel=1e-12
        )


class NoCharge:
    """Rows that each have a key of their own."""

    def take_secret(self) -> bytes:
        return bytes(32)

    def charge(self, **_: object) -> float:
        return 0.0

    def first_rows(self, rows: np.ndarray) -> np.ndarray:
        return rows

    def keep_symbols(self, firsts: np.ndarray, drawn: np.ndarray) -> np.ndarray:
        del firsts
        return drawn


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Return cells that a secondary sends from given numbers for uniform cells and given words."""
    given: dict[str, np.ndarray] = {}

    def uniform_words(_secret: bytes, keys: np.ndarray, *, draw: int) -> np.ndarray:
        # Each draw after the first one has the numbers of another row.
        uniform = np.roll(given["uniform"], -draw)[keys]
        return np.stack([given["words"][keys] << np.uint64(1), uniform], axis=1)

    monkeypatch.setattr("securevfl.dp.symbols.uniform_words", uniform_words)

    def draw(
        noise: SymbolNoise, values: np.ndarray, uniform: Sequence[int], words: np.ndarray
    ) -> list[int]:
        given["uniform"] = np.array(uniform, dtype=np.uint64)
        given["words"] = words.astype(np.uint64)
        ring = RingFormat.choose(clip_norm=1.0, noise_share_std=0.0, parties=2)
        cut = CutLayer(ring=ring, slots=1, shape=(1, 1), clip_norm=1.0)
        keys = NoCharge()
        part = SecondaryRelease(
            MeanOfPooledRecords(cut),
            noise=None,
            scores=KeySymbols(noise=noise, keys=keys, clip_norm=1.0),
            ledger=keys,
        )
        rows = np.arange(len(values), dtype=np.int64)
        plan = RoundPlan(round_number=1, rows=rows, active=(1,), purpose="release")
        tensor = torch.from_numpy(values).float().unsqueeze(2)
        sent = part.release(plan, lambda _: tensor, learns=False).clipped.sum(dim=(1, 2)).numpy()
        scores = normal_scores(noise.plan.cells)
        cells = np.abs(sent[:, None] - scores / scores[-1]).argmin(axis=1)
        assert sent == pytest.approx((scores / scores[-1])[cells], abs=1e-6)
        return cells.tolist()

    return draw


LOW, MIDDLE, HIGH, NONE = -2.0, 0.0, 2.0, math.nan


def exact_chances(
    drawn: Callable[..., list[int]], noise: SymbolNoise, rows: list[list[float]]
) -> dict[tuple[int, ...], Fraction]:
    """Return the probability of everything that a run of a few rows may send, as a fraction.

    Each row takes one number below M of those that :func:`test_absent_rows_are_exactly_uniform`
    counts, and a word from each class of those that act alike, both of its ends.
    """
    cells, count = noise.plan.cells, len(rows)
    own, other = slots(-math.log(noise.odds), cells)
    starts = [0, *(turned * other for turned in range(1, cells))]
    ends = [*(turned * other - 1 for turned in range(1, cells)), own + (cells - 1) * other - 1]
    sizes = [end - start + 1 for start, end in zip(starts, ends, strict=True)]
    classes = [*itertools.product(range(cells), repeat=count)]
    runs = [*itertools.product(classes, classes)]
    values = np.array(rows * len(runs))
    uniform = [number for numbers_of, _ in runs for number in numbers_of]
    chances: dict[tuple[int, ...], Fraction] = defaultdict(Fraction)
    each = []
    for edge in (starts, ends):
        words = np.array([edge[kind] for _, kinds in runs for kind in kinds], dtype=np.uint64)
        each.append(drawn(noise, values, uniform, words))
    assert each[0] == each[1]
    for number, (_, kinds) in enumerate(runs):
        sent = tuple(each[0][number * count : (number + 1) * count])
        chances[sent] += math.prod(
            (Fraction(sizes[kind], 2**63 * cells) for kind in kinds), start=Fraction(1)
        )
    assert sum(chances.values()) == 1
    return chances


SHARED = [[LOW, NONE], [LOW, HIGH]], [[NONE, NONE], [NONE, HIGH]]
"""One record alone in a row and beside another one in a second row; and without it."""


@pytest.mark.parametrize(
    ("exchanged", "worlds", "count"),
    [
        (False, ([[LOW]], [[NONE]]), 1),
        (False, ([[LOW], [LOW]], [[NONE], [NONE]]), 2),
        (False, ([[LOW, HIGH]], [[NONE, HIGH]]), 1),
        (False, ([[math.inf, HIGH]], [[NONE, HIGH]]), 0),
        (False, SHARED, 2),
        (True, ([[LOW, HIGH]], [[HIGH, HIGH]]), 1),
        (True, ([[LOW, NONE]], [[HIGH, NONE]]), 1),
        (True, ([[LOW, HIGH], [LOW, NONE]], [[NONE, HIGH], [NONE, NONE]]), 2),
    ],
    ids=["alone", "rows", "shared", "infinite", "mixed", "of two", "exchanged", "forward"],
)
def test_runs_word_by_word_keep_what_is_charged(
    drawn: Callable[..., list[int]],
    exchanged: bool,
    worlds: tuple[list[list[float]], list[list[float]]],
    count: int,
) -> None:
    """No ratio of two worlds exceeds the charge, nor does delta at a smaller epsilon."""
    noise = SymbolNoise(plan=SymbolPlan(cells=3, exchanged=exchanged), odds=0.2, unit=1.0)
    first, second = (exact_chances(drawn, noise, rows) for rows in worlds)
    release = symbol(3, 0.2, count=count, exchanged=exchanged)
    assert set(first) == set(second) == {*itertools.product(range(3), repeat=len(worlds[0]))}

    assert largest_loss(release) < 4
    for one, another in ((first, second), (second, first)):
        largest = max(math.log(one[sent] / another[sent]) for sent in one)
        assert largest <= largest_loss(release) + 1e-12
        for epsilon in np.linspace(0, 4, 41):
            factor = Fraction(math.exp(epsilon))
            delta = float(sum(max(one[sent] - factor * another[sent], 0) for sent in one))
            charged = pure_delta([release], epsilon=epsilon, noise_multiplier=None)
            assert delta <= charged + 1e-12


@pytest.mark.parametrize("cells", CELLS)
def test_absent_rows_are_exactly_uniform(drawn: Callable[..., list[int]], cells: int) -> None:
    """Numbers below the last multiple of M count by their rest, and others are drawn again."""
    noise = SymbolNoise(plan=SymbolPlan(cells=cells, exchanged=False), odds=1e-6, unit=1.0)
    fair = 2**64 // cells * cells
    beyond = [fair, fair, 2**64 - 1] if fair < 2**64 else []
    given = [*beyond, *range(fair - cells, fair), *range(cells)]
    # A row's own number, or the next one of the list that is taken.
    wanted = [next(n for n in (given * 2)[at:] if n < fair) % cells for at in range(len(given))]
    values = np.array(([[NONE, NONE], [LOW, HIGH]] * len(given))[: len(given)])
    # The last words of all leave a cell as it is.
    assert drawn(noise, values, given, np.full(len(given), 2**63 - 1)) == wanted
    assert Counter(wanted[len(beyond) :]) == dict.fromkeys(range(cells), 2)


@pytest.mark.parametrize("cells", [2, 5, 64])
def test_a_record_is_in_the_cell_of_its_rank(drawn: Callable[..., list[int]], cells: int) -> None:
    """Cells are equally likely for normal scores, which are in units of the encoder."""
    noise = SymbolNoise(plan=SymbolPlan(cells=cells, exchanged=False), odds=1e-6, unit=0.25)
    ranks = (np.arange(4 * cells) + 0.5) / (4 * cells)
    scores = 0.25 * torch.special.ndtri(torch.from_numpy(ranks)).numpy()
    words = np.full(len(ranks), 2**63 - 1, dtype=np.uint64)
    uniform = [0] * len(scores)
    assert drawn(noise, scores[:, None], uniform, words) == [*np.repeat(np.arange(cells), 4)]


@pytest.mark.parametrize("exchanged", [False, True])
def test_a_rows_class_is_the_one_that_its_records_are_most_like(exchanged: bool) -> None:
    """The mean of several where records are exchanged; else such a row is one without a record."""
    noise = SymbolNoise(
        plan=SymbolPlan(cells=3, exchanged=exchanged, classes=True), odds=0.2, unit=1.0
    )
    none, first, last = [NONE] * 3, [0.6, 0.1, -0.2], [-0.9, 0.0, 0.8]
    values = np.array(
        [[first, none], [none, last], [none, none], [first, last], [last, [NONE, 1, 1]]]
    )
    assert noise.cells_of(values).tolist() == [0, 2, -1, 2 if exchanged else -1, 2]


def test_classes_are_votes_and_absent_rows_vote_uniformly() -> None:
    """Of 4,000 rows each: counts are within 5 deviations of their means (fixed secret)."""
    noise = SymbolNoise(plan=SymbolPlan(cells=4, exchanged=False, classes=True), odds=0.1, unit=1.0)
    for cell, chances in ((-1, [1 / 4] * 4), (2, [1 / 13, 1 / 13, 10 / 13, 1 / 13])):
        cells = np.full(4000, cell, dtype=np.int64)
        drawn = noise.draw(cells, np.arange(4000), secret=bytes(range(32)))
        votes = noise.values_of(drawn)
        assert votes.shape == (4000, 4)
        assert set(votes.ravel()) == {0.0, 1.0}
        deviations = np.sqrt(4000 * np.array(chances) * (1 - np.array(chances)))
        assert (np.abs(votes.sum(axis=0) - 4000 * np.array(chances)) < 5 * deviations).all()
        assert (votes.sum(axis=1) == 1).all()


def test_classes_are_votes_where_more_survives_of_them_than_of_vectors() -> None:
    """By the plan alone: not at an epsilon at which vectors have hardly any noise."""
    for epsilon, parties, chosen in ((50.0, 4, False), (8.0, 4, True), (2.0, 4, True)):
        plan = choose_scores(
            privacy_of(epsilon),
            FittingPlan(share=0.05, steps=1),
            parties=parties,
            exchanged=False,
            classes=10,
        )
        assert (plan is not None) is chosen
    assert SymbolPlan(cells=7, exchanged=False, classes=True).surviving_share(0.0) == 1
    with pytest.raises(ConfigError, match="cells"):
        SymbolPlan(cells=1, exchanged=False, classes=True)


def privacy_of(epsilon: float) -> Privacy:
    return Privacy(epsilon=epsilon, delta=DELTA, encoder="frozen", links_per_record=1)


def test_numbers_follow_from_the_secret_and_the_key_alone() -> None:
    """Whatever else is asked for; another secret, key or draw has others."""
    secrets_of = (bytes(32), bytes([1]) + bytes(31))
    first, other = (uniform_words(secret, np.arange(500), draw=0) for secret in secrets_of)
    later = uniform_words(secrets_of[0], np.arange(500), draw=1)
    some = np.array([7, 499, 7])
    assert (uniform_words(secrets_of[0], some, draw=0) == first[some]).all()
    assert len({*first.ravel(), *other.ravel(), *later.ravel()}) == 3000
    # AES-256 of a block of zeros under a key of zeros: FIPS 197's function, by any tool.
    assert first[0].tobytes().hex() == "dc95c078a2408989ad48a21492842087"


def best_of(promise: Privacy, *, parties: int, exchanged: bool) -> SymbolPlan:
    symbols = choose_scores(promise, FIT, parties=parties, exchanged=exchanged, classes=1)
    assert isinstance(symbols, SymbolPlan)
    return symbols


def plan_of(
    epsilon: float,
    *,
    exchanged: bool = False,
    parties: int = 1,
    releases: int | None = None,
    cells: int | None = None,
    **privacy: object,
) -> ReleasePlan:
    """Return a run of class-mean encoders, as ``encoder = "auto"`` plans it."""
    settings = {"encoder": "frozen", "links_per_record": 1, "delta": DELTA, **privacy}
    promise = Privacy(epsilon=epsilon, **settings)
    symbols = None if cells is None else SymbolPlan(cells=cells, exchanged=exchanged)
    return ReleasePlan(
        privacy=promise,
        parties=parties,
        min_active=parties,
        rounds=4,
        rows_per_round=100,
        row_releases=400,
        releases_per_row=1,
        links=4 if exchanged else 1,
        pooled=True,
        contested=False,
        fitting=None if releases else FIT,
        linked_rows=None if releases else 400,
        releases_per_record=releases,
        symbols=symbols or best_of(promise, parties=parties, exchanged=exchanged),
    )


@pytest.mark.parametrize(
    ("exchanged", "survives"),
    [(False, (0.993, 0.906, 0.566, 0.237)), (True, (0.931, 0.624, 0.276, 0.090))],
    ids=["removed", "exchanged"],
)
def test_what_survives_at_each_epsilon(exchanged: bool, survives: tuple[float, ...]) -> None:
    """Of a normal score, beside the fit and the number of linked rows; as documents say."""
    plans = [plan_of(epsilon, exchanged=exchanged) for epsilon in (8.0, 4.0, 2.0, 1.0)]
    left = [plan.symbols.surviving_share(plan.noise_share_std()) for plan in plans if plan.symbols]
    assert left == pytest.approx(survives, abs=6e-4)


@pytest.mark.parametrize("exchanged", [False, True])
@pytest.mark.parametrize("epsilon", [8.0, 2.0])
def test_calibrated_odds_keep_epsilon_and_waste_nothing(epsilon: float, exchanged: bool) -> None:
    """By brute force, with what else the plan releases; one per cent less of odds is too little."""
    plan = plan_of(epsilon, exchanged=exchanged)
    odds = plan.noise_share_std()
    assert plan.epsilon(odds) <= epsilon

    beside = [*plan.fitting_releases(), *plan.link_count_releases(odds)]
    multipliers = [event.noise_multiplier / math.sqrt(event.count) for event in beside]
    assert len(beside) == 2
    for share, enough in ((1.0, True), (0.99, False)):
        pair = rows_of(plan.release(odds * share, rounds=4, row_releases=400))
        delta = max(
            brute_delta([each], epsilon=epsilon, mu=1 / composed_multiplier(*multipliers))
            for each in (pair, pair[::-1])
        )
        assert (delta <= DELTA * (1 + 1e-6)) == enough


@pytest.mark.parametrize(
    ("changed", "count", "exchanged"),
    [
        ({}, 1, False),
        ({"links_per_record": 3, "parties": 5}, 3, False),
        ({"links_per_record": 3, "parties": 5, "unit": "entity", "colluding": 4}, 15, False),
        ({"links_per_record": 3, "releases": 7, "exchanged": True}, 7, True),
        ({"releases": 7, "unit": "entity", "parties": 5}, 35, False),
    ],
)
def test_each_linked_row_is_a_draw_at_each_party(
    changed: dict[str, object], count: int, exchanged: bool
) -> None:
    """There are m or, over all predictions, N; how many parties collude costs nothing."""
    plan = plan_of(8.0, cells=6, **changed)
    release = plan.release(0.25, rounds=1, row_releases=100)
    assert release == symbol(6, 0.25, count=count, exchanged=exchanged)


def test_noise_multipliers_are_of_gaussian_noise() -> None:
    """One line says so, in plans and where symbols are chosen."""
    privacy = Privacy(noise_multiplier=1.0, delta=DELTA, encoder="frozen", links_per_record=1)
    with pytest.raises(
        ConfigError, match=r"^privacy\.noise_multiplier: .*give privacy\.epsilon instead$"
    ):
        choose_scores(privacy, FIT, parties=1, exchanged=False, classes=1)
    with pytest.raises(
        ConfigError, match=r"^privacy\.noise_multiplier: .*give privacy\.epsilon instead$"
    ):
        replace(plan_of(8.0, cells=6), privacy=privacy)


def test_a_fit_that_leaves_nothing_is_refused() -> None:
    """Its own noise is all that epsilon allows."""
    with pytest.raises(PrivacyError, match=r"lower encoder\.share"):
        replace(plan_of(1.0, cells=2), fitting=replace(FIT, share=0.999)).noise_share_std()


def opened(path: Path, plan: ReleasePlan, odds: float, **session: str) -> Ledger:
    return Ledger(path, party="bank", plan=plan, noise_share_std=odds, federation="f", **session)


def test_ledgers_add_up_runs_with_symbols(tmp_path: Path) -> None:
    """Written and read back: what two runs released is composed; it nearly doubles epsilon."""
    path, plan = tmp_path / "ledger.jsonl", plan_of(4.0, cells=24)
    odds = plan.noise_share_std()
    for run in "ab":
        ledger = opened(path, plan, odds, run=run)
        ledger.charge_fitting()
        ledger.charge_link_count(lambda: None)
        for number in range(4):
            rows = np.arange(100 * number, 100 * number + 100)
            ledger.charge(round_number=number + 1, rows=rows, purpose="release")
        assert ledger.epsilon_spent == plan.epsilon(odds) <= 4.0
        ledger.close()

    once = [*plan.fitting_releases(), *plan.link_count_releases(odds)]
    once.append(plan.release(odds, rounds=4, row_releases=400))
    ledger = opened(path, plan, odds, run="c")
    assert ledger.total == pytest.approx(epsilon_of(once * 2, delta=DELTA), rel=1e-12)
    assert 1.5 * 4 < ledger.total < 2 * 4
    ledger.close()


def test_predictions_cost_n_symbols_whatever_is_asked_for(tmp_path: Path) -> None:
    """With the first row, and no more for ten requests, also after the file is read back."""
    path, plan = tmp_path / "ledger.jsonl", plan_of(8.0, cells=24, releases=2)
    for request in "ab":
        ledger = opened(path, plan, 0.002, run=request, model="f")
        for number in range(5):
            rows = np.arange(9) + 9 * number
            ledger.charge(round_number=number + 1, rows=rows, purpose="predict")
        assert ledger.total == epsilon_of([symbol(24, 0.002, count=2)], delta=DELTA) > 0
        ledger.close()
