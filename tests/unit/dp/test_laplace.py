"""Laplace sums: their law, their epsilon by brute force, and what plans make of them."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, reduce

import numpy as np
import pytest
from scipy.special import ndtri
from scipy.stats import chi2

from securevfl.core.errors import ConfigError, PrivacyError
from securevfl.dp import Privacy
from securevfl.dp.accountant import epsilon_of
from securevfl.dp.events import GaussianRelease, LaplaceRelease, SymbolRelease
from securevfl.dp.gaussian import composed_multiplier
from securevfl.dp.laplace import GRID, GridScores, LaplacePlan, reach, share_variance
from securevfl.dp.laplace_noise import LaplaceShare, polya_table
from securevfl.dp.pure import largest_loss, pure_delta
from securevfl.dp.release_plan import FittingPlan, ReleasePlan, choose_scores
from securevfl.dp.symbols import SymbolPlan

DELTA = 1e-5
FIT = FittingPlan(share=0.05, steps=3)
LOW, HIGH, NONE = -3.0, 3.0, math.nan


def chances_of(scale: float, honest: int) -> np.ndarray:
    """Return a share's probabilities, from the least to the largest, by the sampling table.

    The last of them, which add up to less than 1e-20, are left out.
    """
    bits = [bits / 2**256 for bits in polya_table(scale, honest)._exact_cumulative]
    polya = np.diff([0.0, *bits])[: math.ceil(50 * scale) + 1]
    return np.convolve(polya, polya[::-1])


@cache
def noise_of(scale: float, honest: int, shares: int) -> np.ndarray:
    """Return the probabilities of a sum of shares."""
    return reduce(np.convolve, [chances_of(scale, honest)] * shares)


def laplace(scale: float, size: int) -> np.ndarray:
    """Return the discrete Laplace law on so many numbers around 0, from its definition."""
    weights = np.exp(-np.abs(np.arange(size) - size // 2) / scale)
    return weights * (1 - math.exp(-1 / scale)) / (1 + math.exp(-1 / scale))


@pytest.mark.parametrize(("parties", "colluding"), [(1, 0), (4, 0), (5, 2), (3, 2)])
@pytest.mark.parametrize("scale", [0.4, 3.0])
def test_shares_of_those_who_do_not_collude_are_one_laplace_noise(
    scale: float, parties: int, colluding: int
) -> None:
    """Number by number; a share of 1/k leaves less than that."""
    honest = parties - colluding
    noise = noise_of(scale, honest, honest)
    law = laplace(scale, len(noise))
    assert noise == pytest.approx(law, abs=1e-13)
    assert share_variance(scale, honest) * honest == pytest.approx(
        (law * (np.arange(len(law)) - len(law) // 2) ** 2).sum(), rel=1e-9
    )
    if colluding:
        few = noise_of(scale, parties, honest)
        assert np.abs(few - laplace(scale, len(few))).max() > 0.01


def test_what_tables_leave_out_is_below_what_is_charged() -> None:
    """Of the ends: less than 2^-256 of every draw, from the next number's weight on."""
    for scale, honest in ((0.1, 1), (5.0, 3), (200.0, 1)):
        last = reach(scale)
        assert len(polya_table(scale, honest).cumulative) == last + 1
        decay = -1 / scale
        assert decay * (last + 1) - math.log(-math.expm1(decay)) <= -256 * math.log(2)
    with pytest.raises(ConfigError, match="at most 4096"):
        polya_table(5000.0, 1)


@pytest.mark.parametrize(("scale", "honest"), [(0.5, 1), (6.0, 3)])
def test_draws_follow_the_table(scale: float, honest: int) -> None:
    """By a chi-square test of 50,000 draws, whose seed is fixed; by chance 1 in 10,000 would."""
    draws = LaplaceShare(scale, honest, grid_unit=7, insecure_seed=3).sample((50_000, 1)).numpy()
    assert (draws % 7 == 0).all()
    chances = chances_of(scale, honest)
    middle = len(chances) // 2
    counts = np.bincount(draws.ravel() // 7 + middle, minlength=len(chances))
    common = 50_000 * chances > 10
    expected = np.append(chances[common], 1 - chances[common].sum()) * 50_000
    seen = np.append(counts[common], counts[~common].sum())
    kept = expected > 5
    statistic = ((seen - expected)[kept] ** 2 / expected[kept]).sum()
    assert statistic < chi2.isf(1e-4, kept.sum() - 1)


def test_ties_of_64_bits_are_settled_by_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number whose first 64 bits are a boundary's is below it or not by what follows."""
    share = LaplaceShare(1.0, 2, insecure_seed=0)
    table = polya_table(1.0, 2)
    boundary = table._exact_cumulative[0]
    for more, place in ((0, 0), (2**192 - 1, 1)):
        monkeypatch.setattr(
            share._bits,
            "take",
            lambda count: np.array([boundary >> 192] * (count // 8), np.uint64).view(np.uint8),
        )
        monkeypatch.setattr(share._bits, "integer", lambda bits, more=more: more % 2**bits)
        assert share._polya(3).tolist() == [place] * 3


def brute_delta(
    pairs: Sequence[tuple[np.ndarray, np.ndarray]], *, epsilon: float, mu: float | None = None
) -> float:
    """Return delta of independent numbers, outcome by outcome, beside one Gaussian number."""
    there, gone = np.ones(1), np.ones(1)
    for first, second in pairs:
        there, gone = np.outer(there, first).ravel(), np.outer(gone, second).ravel()
    if mu is not None:
        grid = np.arange(-8, 8 + mu, 1e-2)
        densities = (np.exp(-((grid - shift) ** 2) / 2) for shift in (mu, 0.0))
        shifted, centred = (density * 1e-2 / math.sqrt(2 * math.pi) for density in densities)
        there, gone = np.outer(there, shifted), np.outer(gone, centred)
    return float(np.maximum(there - math.exp(epsilon) * gone, 0).sum())


def moved(scale: float, shift: int, *, size: int = 161) -> tuple[np.ndarray, np.ndarray]:
    """Return a sum's law with a unit and without it."""
    law = laplace(scale, size + 2 * shift)
    return law[shift : shift + size], law[:size] if shift > 0 else law


@pytest.mark.parametrize("mu", [None, 0.3])
@pytest.mark.parametrize(("shift", "scale", "count"), [(1, 0.5, 1), (4, 2.0, 1), (2, 0.8, 2)])
def test_delta_is_that_of_brute_force(
    shift: int, scale: float, count: int, mu: float | None
) -> None:
    """In both directions, which are alike; beside a Gaussian release, too."""
    size = 161 if count == 1 else 41
    pairs = [moved(scale, shift, size=size)] * count
    release = LaplaceRelease(shift=shift, scale=scale, count=count)
    top = largest_loss(release)
    assert top == pytest.approx(count * shift / scale)
    for epsilon in (0.0, 0.4 * top, 0.9 * top):
        for each in (pairs, [pair[::-1] for pair in pairs]):
            exact = brute_delta(each, epsilon=epsilon, mu=mu)
            delta = pure_delta([release], epsilon=epsilon, noise_multiplier=mu and 1 / mu)
            assert delta == pytest.approx(exact, rel=2e-4, abs=1e-9)
    assert pure_delta([release], epsilon=top * (1 + 1e-9), noise_multiplier=None) < 1e-20


def test_smaller_moves_and_moves_by_parts_are_covered() -> None:
    """One number that moves by the whole is at least as telling as several that move by parts."""
    for epsilon in (0.0, 0.5, 1.5, 2.5, 2.9):
        whole = brute_delta([moved(2.0, 6)], epsilon=epsilon)
        for parts in ((3, 3), (5, 1), (4,), (2, 2, 2)):
            pairs = [moved(2.0, part, size=41 if len(parts) == 3 else 81) for part in parts]
            assert brute_delta(pairs, epsilon=epsilon) <= whole + 1e-6


def test_many_outcomes_are_rounded_up() -> None:
    """Of unlike releases, whose epsilon stays close to that of their exact sum; and of many."""
    exact = [LaplaceRelease(shift=GRID, scale=scale) for scale in (4.0, 5.0)]
    more = [
        *exact,
        LaplaceRelease(shift=GRID, scale=6.0),
        SymbolRelease(cells=4, odds=0.2, exchanged=False),
    ]
    for multiplier in (None, 5.0):
        for releases in (more, [*more, more[0]]):
            delta = pure_delta(releases, epsilon=6.0, noise_multiplier=multiplier)
            fine = pure_delta(releases, epsilon=6.02, noise_multiplier=multiplier)
            assert 0 < fine < delta
    many = LaplaceRelease(shift=GRID, scale=400.0, count=1000)
    assert epsilon_of([many], delta=DELTA) == pytest.approx(largest_loss(many), rel=1e-3)


# What a whole run of few rows shows, number by number, against what its plan charges.


def plan_of(
    epsilon: float,
    scores: LaplacePlan,
    *,
    parties: int = 3,
    releases: int | None = None,
    min_active: int | None = None,
    **privacy: object,
) -> ReleasePlan:
    """Return a run of class-mean encoders behind Laplace noise."""
    settings = {"encoder": "frozen", "links_per_record": 1, "delta": DELTA, **privacy}
    return ReleasePlan(
        privacy=Privacy(epsilon=epsilon, **settings),
        parties=parties,
        min_active=min_active or parties,
        rounds=4,
        rows_per_round=100,
        row_releases=400,
        releases_per_row=1,
        links=4 if scores.exchanged else 1,
        pooled=True,
        contested=False,
        fitting=None if releases else FIT,
        linked_rows=None if releases else 400,
        releases_per_record=releases,
        laplace=scores,
    )


def shown(units: np.ndarray, noise: np.ndarray) -> list[np.ndarray]:
    """Return the law of each number of a run's rows, before others' terms, which are known."""
    padded = np.pad(noise, GRID)
    return [np.roll(padded, int(unit)) for unit in units.ravel()]


def law_delta(plan: ReleasePlan, worlds: list[np.ndarray], *, epsilon: float, share: int) -> float:
    """Return the exact delta of two worlds of one secondary's rows, as c colluders see them."""
    assert plan.laplace is not None
    largest = plan.laplace.largest
    scale = plan.noise_share_std() * largest
    # What the primary and c helpers see: the terms of others, without their own noise.
    noise = noise_of(scale, share, plan.honest)
    known = [GridScores(plan=plan.laplace, unit=1.0).units_of(world) for world in worlds]
    laws = [shown(units, noise) for units in known]
    changed = [
        pair
        for pair, *units in zip(zip(*laws, strict=True), *(k.ravel() for k in known), strict=True)
        if units[0] != units[1]
    ]
    deltas = [
        brute_delta(pairs, epsilon=epsilon) for pairs in (changed, [pair[::-1] for pair in changed])
    ]
    return max(deltas)


VOTES = [[[2.0, 0, 0], [NONE] * 3]], [[[NONE] * 3, [NONE] * 3]], [[[0, 0, 2.0], [NONE] * 3]]


@pytest.mark.parametrize(
    ("classes", "exchanged", "worlds"),
    [
        (None, False, ([[[LOW]]], [[[NONE]]])),
        (None, False, ([[[HIGH], [LOW]]], [[[NONE], [LOW]]])),
        (None, True, ([[[LOW], [NONE]]], [[[HIGH], [NONE]]])),
        (3, False, (VOTES[0], VOTES[1])),
        (3, True, (VOTES[0], VOTES[2])),
    ],
    ids=["score", "brought forward", "score exchanged", "vote", "vote exchanged"],
)
@pytest.mark.parametrize("colluding", [0, 2])
def test_a_run_number_by_number_keeps_what_is_charged(
    classes: int | None, exchanged: bool, worlds: tuple[list, list], colluding: int
) -> None:
    """All that a record moves, in both directions; and planted mistakes are seen."""
    plan = plan_of(1.0, LaplacePlan(classes=classes, exchanged=exchanged), colluding=colluding)
    level = plan.noise_share_std()
    release = plan.release(level, rounds=4, row_releases=400)
    pair = [np.array(world) for world in worlds]
    for epsilon in (0.0, 0.5, 0.9, 1.5):
        charged = pure_delta([release], epsilon=epsilon, noise_multiplier=None)
        exact = law_delta(plan, pair, epsilon=epsilon, share=plan.honest)
        assert exact <= charged + 1e-9
        if epsilon < largest_loss(release):
            # It is reached, so that no smaller noise would do.
            assert exact > 0.9 * charged
    if colluding:
        # Shares of 1/k in place of 1/(k - c).
        charged = pure_delta([release], epsilon=0.5, noise_multiplier=None)
        assert law_delta(plan, pair, epsilon=0.5, share=plan.parties) > 1.5 * charged
    if exchanged:
        # Noise for a removal in place of an exchange.
        removed = plan_of(1.0, LaplacePlan(classes=classes, exchanged=False), colluding=colluding)
        few = removed.release(level, rounds=4, row_releases=400)
        charged = pure_delta([few], epsilon=0.5, noise_multiplier=None)
        assert law_delta(plan, pair, epsilon=0.5, share=plan.honest) > 1.5 * charged


def test_a_row_without_a_record_is_zero() -> None:
    """So is one of several where records are not exchanged, and one that is not finite."""
    for exchanged in (False, True):
        scores = GridScores(plan=LaplacePlan(exchanged=exchanged), unit=0.5)
        rows = np.array([[[NONE], [NONE]], [[math.inf], [NONE]], [[LOW], [HIGH]], [[HIGH], [NONE]]])
        assert scores.units_of(rows)[:, 0].tolist() == [0, 0, 0, GRID]
        votes = GridScores(plan=LaplacePlan(classes=2, exchanged=exchanged), unit=0.5)
        rows = np.array([[[NONE, NONE]] * 2, [[1.0, NONE]] * 2, [[0.5, 0.7]] * 2])
        voted = [0, 1] if exchanged else [0, 0]
        assert votes.units_of(rows).tolist() == [[0, 0], [0, 0], voted]


def test_scores_are_whole_steps_of_the_rank_rounded_towards_zero() -> None:
    """``1.25 (2 r - 1)`` of the rank r, within [-1, 1]."""
    scores = GridScores(plan=LaplacePlan(exchanged=False), unit=1.0)
    ranks = np.array([0.01, 0.1, 0.3, 0.49, 0.5, 0.51, 0.8, 0.9, 0.99])
    normal = ndtri(ranks)
    wanted = [-16, -16, -8, 0, 0, 0, 12, 16, 16]
    found = scores.units_of(normal[:, None, None])[:, 0].tolist()
    # Ranks 0.3 and 0.8 are at a boundary, to within a float.
    assert np.abs(np.array(found) - wanted).max() <= 1
    assert [found[place] for place in (0, 3, 4, 5, 8)] == [-16, 0, 0, 0, 16]


@pytest.mark.parametrize(
    ("parties", "survives"),
    [(4, (0.907, 0.839, 0.645, 0.335)), (10, (0.921, 0.892, 0.790, 0.544))],
)
def test_what_survives_at_each_epsilon(parties: int, survives: tuple[float, ...]) -> None:
    """Of a sum of normal scores, beside the fit and the number of linked rows."""
    plans = [
        plan_of(epsilon, LaplacePlan(exchanged=False), parties=parties)
        for epsilon in (8.0, 4.0, 2.0, 1.0)
    ]
    left = [plan.laplace.surviving_share(plan.noise_share_std(), honest=parties) for plan in plans]
    assert left == pytest.approx(survives, abs=1e-3)


def test_surviving_share_is_the_squared_correlation() -> None:
    """Of 400,000 made-up rows (fixed seed), within four errors of a correlation."""
    draws = np.random.default_rng(1)
    plan = LaplacePlan(exchanged=False)
    scores = GridScores(plan=plan, unit=1.0)
    normal = draws.normal(size=(4, 100_000))
    units = sum(scores.units_of(each[:, None, None])[:, 0] for each in normal)
    share = LaplaceShare(0.6 * GRID, 3, insecure_seed=2)
    noised = units + sum(share.sample((100_000,)).numpy() for _ in range(4))
    found = np.corrcoef(noised, normal.sum(axis=0))[0, 1]
    assert found**2 == pytest.approx(plan.surviving_share(0.6, honest=3), abs=0.01)
    assert plan.surviving_share(300.0) == 0


@pytest.mark.parametrize(
    ("parties", "epsilon", "classes", "kind"),
    [
        (1, 8.0, 1, "symbols"),
        (1, 1.0, 1, "symbols"),
        (2, 2.0, 1, "symbols"),
        (4, 4.0, 1, "symbols"),
        (4, 2.0, 1, "laplace"),
        (10, 1.0, 1, "laplace"),
        (4, 8.0, 10, "symbols"),
        (2, 2.0, 10, "laplace"),
        (6, 1.0, 10, "laplace"),
        (4, 50.0, 10, None),
        (16, 2.0, 10, "laplace"),
        (17, 2.0, 10, None),
    ],
)
def test_the_plan_alone_chooses(
    parties: int, epsilon: float, classes: int, kind: str | None
) -> None:
    """Whatever survives more; colluders leave less of a Laplace sum, and cost symbols nothing."""
    privacy = Privacy(epsilon=epsilon, delta=DELTA, encoder="frozen", links_per_record=1)
    choose = {"parties": parties, "exchanged": False, "classes": classes}
    chosen = choose_scores(privacy, FIT, **choose)
    assert (chosen and chosen.kind) == kind
    if parties == 4 and kind == "laplace":
        few = choose_scores(replace(privacy, colluding=3), FIT, **choose)
        assert few is not None
        assert few.kind == "symbols"


@pytest.mark.parametrize(
    ("scores", "changed", "event"),
    [
        ({}, {}, (16, 1)),
        ({}, {"links_per_record": 3}, (16, 3)),
        ({"exchanged": True}, {"links_per_record": 3}, (32, 3)),
        ({}, {"links_per_record": 3, "unit": "entity"}, (16 * 9, 1)),
        ({}, {"releases": 7}, (16, 7)),
        ({"classes": 5}, {"links_per_record": 3}, (1, 3)),
        ({"classes": 5, "exchanged": True}, {"links_per_record": 3}, (1, 6)),
        ({"classes": 5, "exchanged": True}, {"releases": 7, "unit": "entity"}, (42, 1)),
    ],
)
def test_what_one_unit_moves_is_charged(
    scores: dict[str, object], changed: dict[str, object], event: tuple[int, int]
) -> None:
    """In m rows or, over all predictions, N; of an entity all of them in one number."""
    plan = plan_of(2.0, LaplacePlan(**{"exchanged": False, **scores}), **changed)
    level = plan.noise_share_std()
    assert plan.release(level, rounds=4, row_releases=400) == LaplaceRelease(
        shift=event[0], scale=level * plan.laplace.largest, count=event[1]
    )
    assert plan.epsilon(level) <= 2.0
    assert plan.epsilon(level * 0.99) > 2.0


def test_shares_are_made_for_those_who_answer_and_do_not_collude() -> None:
    """The fewest of them; with none the plan is refused."""
    plan = plan_of(2.0, LaplacePlan(exchanged=False), parties=5, min_active=3, colluding=1)
    assert plan.honest == 2
    with pytest.raises(PrivacyError, match="colluding"):
        plan_of(2.0, LaplacePlan(exchanged=False), parties=2, colluding=2).check()


def test_noise_multipliers_and_useless_fits_are_refused() -> None:
    """As of symbols."""
    plan = plan_of(2.0, LaplacePlan(exchanged=False))
    privacy = Privacy(noise_multiplier=1.0, delta=DELTA, encoder="frozen", links_per_record=1)
    with pytest.raises(ConfigError, match=r"give privacy\.epsilon instead$"):
        replace(plan, privacy=privacy)
    with pytest.raises(PrivacyError, match=r"lower encoder\.share"):
        replace(plan, fitting=replace(FIT, share=0.999)).noise_share_std()
    assert plan.epsilon_as_published(0.5) == math.inf
    assert "Laplace noise reaches this limit" in plan.statement(plan.noise_share_std()).text


def test_symbols_stay_equal_beside_a_laplace_sum() -> None:
    """Epsilon of both is at most what either costs by itself, and more than the larger."""
    both = [
        LaplaceRelease(shift=GRID, scale=GRID / 1.5),
        SymbolRelease(cells=5, odds=0.1, exchanged=False),
    ]
    beside = GaussianRelease(noise_multiplier=composed_multiplier(9.0, 30.0))
    alone = [epsilon_of([each, beside], delta=DELTA) for each in both]
    together = epsilon_of([*both, beside], delta=DELTA)
    assert max(alone) < together < sum(alone)
    assert SymbolPlan(cells=5, exchanged=False).release(0.1, rows=2, parties=3).count == 6
