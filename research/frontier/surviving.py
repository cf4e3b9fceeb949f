"""What can survive a release, by symbols and behind noise, as tables; nothing is simulated.

    python research/frontier/surviving.py --keep

The promise is that of research/frontier/README.md's bounds: one record a row (``choose =
"records"``, m = 1), frozen encoders, every row released once. The first table is of one score, with
a fitted encoder and the number of linked rows, as ``encoder = "auto"`` plans it; the second one of
vectors behind noise, without a fitting (``--fitting 0.05`` takes what a fitted encoder takes).
"""

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy.optimize import linprog

sys.path.append(str(Path(__file__).parents[2]))

from research.common.figure_files import keep
from securevfl.core import checks
from securevfl.dp.gaussian import gaussian_delta, gaussian_noise_multiplier
from securevfl.dp.laplace import LaplacePlan
from securevfl.dp.privacy import Privacy, UnitName
from securevfl.dp.release_plan import FittingPlan, ReleasePlan, choose_scores
from securevfl.dp.symbols import CELLS, SymbolPlan, cell_probabilities, normal_scores

UNITS: tuple[UnitName, ...] = ("secondary-record", "entity", "linked-row")
SECONDARIES = (2, 4, 10)
_ROWS = 10_000
_SCORE_FIT = FittingPlan(share=0.05, steps=3)
_SCORE_DELTA = 1e-5
# Windows of so many quantiles; a plan's largest number of cells.
_QUANTILES = 64
# More secondaries than this are no federation.
_MOST_PARTNERS = 10_000
_HALF = 0.5


def noise_a_number(
    plan: ReleasePlan, noise_share_std: float, *, secondaries: int | None = None
) -> float:
    """Return z: the deviation of one released number's noise, over a record's length in the sum.

    A record writes a vector of length C, or C/K if a row is the mean over K slots; the sum carries
    the noise of all secondaries' shares, helpers of the primary included, since the top model knows
    none of them. With another number of secondaries the noise multiplier stays, and the noise
    follows the sensitivity: for ``secondary-record`` it does not grow with them, for the other
    units it does (:func:`securevfl.dp.sensitivity.row_change`).

    Args:
        plan: Plan of the releases.
        noise_share_std: ``tau`` of that plan; 0 without noise.
        secondaries: Number of secondaries instead of the plan's; more than ``colluding``.

    Returns:
        Dimensionless, >= 0.
    """
    checks.non_negative(noise_share_std=noise_share_std)
    record = plan.privacy.clip_norm / (plan.links if plan.pooled else 1)
    noise = noise_share_std * math.sqrt(plan.parties)
    if secondaries is not None:
        colluding = plan.privacy.colluding
        other = replace(plan, parties=secondaries, min_active=secondaries)
        noise *= other.sensitivity() / plan.sensitivity()
        # Of k shares k - c must do; the sum carries all k.
        noise *= math.sqrt(
            (secondaries / (secondaries - colluding)) * (plan.parties - colluding) / plan.parties
        )
    return noise / record


def surviving_share(
    *,
    noise: float,
    numbers: int = 1,
    secondaries: int = 1,
    agreement: float = 0.0,
    sampling_rate: float = 1.0,
) -> float:
    """Return the share of signal in a released number's variance: s^2 / (s^2 + z^2).

    The numbers of a record share its length, so each has a deviation of at most 1/sqrt(w) of it.
    Where k secondaries write into one number, their signals add up against noise that is paid
    once: to k times the variance of one where they are uncorrelated, and to k^2 times where all
    write the same. Of records that are drawn at a rate of q, so much of the signal is not there.

    Args:
        noise: ``z``, from :func:`noise_a_number`; of the sum that all of them write into.
        numbers: ``w``, over which the length is spread evenly, >= 1; 1 has all of it in one.
        secondaries: ``k`` that share the number, >= 1; 1 for coordinates of a secondary's own.
        agreement: Correlation between two secondaries' signals, in [0, 1].
        sampling_rate: ``q``, of the secret sample of records; 1 has all of them.

    Returns:
        In [0, 1]. No linear reader, and of a normal quantity no reader at all, explains more of
        the signal's variance.

    References:
        [CT06] sections 9.1 (capacity) and 10.3.2 (rate distortion); research/frontier/README.md,
        "What can survive".

    Examples:
        >>> surviving_share(noise=1.0)
        0.5
        >>> surviving_share(noise=2.0, secondaries=4)
        0.5
        >>> surviving_share(noise=2.0, secondaries=4, agreement=1.0)
        0.8
    """
    checks.non_negative(noise=noise)
    checks.whole(numbers=numbers, secondaries=secondaries)
    checks.at_least(1, numbers=numbers, secondaries=secondaries)
    checks.rate(sampling_rate=sampling_rate)
    others = (secondaries - 1) * agreement
    signal = secondaries * (1 + others) / numbers
    written = sampling_rate * secondaries * (1 + sampling_rate * others) / numbers
    return sampling_rate**2 * signal / (written + noise**2)


def partners_for_half(plan: ReleasePlan, noise_share_std: float, *, numbers: int = 1) -> int | None:
    """Return the fewest secondaries whose signals, in shared coordinates, half survive.

    Their signals are taken as uncorrelated; the noise grows with their number.

    Args:
        plan: Plan of the releases of secondaries that share coordinates (``disjoint`` is False).
        noise_share_std: ``tau`` of that plan.
        numbers: As for :func:`surviving_share`.

    Returns:
        None if no number is enough, as for units whose noise grows with every secondary.
    """

    def share(secondaries: int) -> float:
        noise = noise_a_number(plan, noise_share_std, secondaries=secondaries)
        return surviving_share(
            noise=noise,
            numbers=numbers,
            secondaries=secondaries,
            sampling_rate=plan.privacy.sampling_rate,
        )

    fewest = plan.privacy.colluding + 1
    # Where the noise grows with their number, the first is the best of all.
    if plan.privacy.unit != "secondary-record":
        return fewest if share(fewest) >= _HALF else None
    if share(_MOST_PARTNERS) < _HALF:
        return None
    low, high = fewest - 1, _MOST_PARTNERS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if share(middle) >= _HALF else (middle, high)
    return high


def plan_of(
    unit: UnitName, epsilon: float, options: argparse.Namespace, *, disjoint: bool
) -> ReleasePlan:
    """Return the plan of one release a row; of a pass over the rows, their number is no matter."""
    return ReleasePlan(
        privacy=Privacy(
            epsilon=epsilon, delta=options.delta, unit=unit, encoder="frozen", links_per_record=1
        ),
        parties=options.secondaries,
        min_active=options.secondaries,
        rounds=1,
        rows_per_round=_ROWS,
        row_releases=_ROWS,
        releases_per_row=1,
        links=1,
        pooled=True,
        contested=False,
        disjoint=disjoint,
        fitting=FittingPlan(share=options.fitting) if options.fitting else None,
    )


def score_plan(
    unit: UnitName, epsilon: float, *, secondaries: int, exchanged: bool, laplace: bool = False
) -> ReleasePlan:
    """Return the plan of one score a record, as a symbol or behind Laplace noise made by all."""
    options = argparse.Namespace(delta=_SCORE_DELTA, secondaries=secondaries, fitting=0.0)
    plan = plan_of(unit, epsilon, options, disjoint=False)
    planned = replace(plan, fitting=_SCORE_FIT, linked_rows=_ROWS)
    if laplace:
        return replace(planned, laplace=LaplacePlan(exchanged=exchanged))
    plans = [
        replace(planned, symbols=SymbolPlan(cells=cells, exchanged=exchanged)) for cells in CELLS
    ]
    return max(plans, key=_survives)


def _survives(plan: ReleasePlan) -> float:
    assert plan.scores is not None, "a plan of scores"
    return plan.scores.surviving_share(plan.noise_share_std(), honest=plan.honest)


def scores(epsilons: list[float]) -> dict[str, list[str]]:
    """Return what survives of a normal score, by what it is released with; one cell an epsilon."""

    def symbols(unit: UnitName, secondaries: int, *, exchanged: bool = False) -> list[str]:
        shares = []
        for epsilon in epsilons:
            plan = score_plan(unit, epsilon, secondaries=secondaries, exchanged=exchanged)
            sent = plan.symbols
            assert sent is not None, "scores are sent as symbols"
            shares.append(f"{_survives(plan):.3f} ({sent.cells})")
        return shares

    def laplace(unit: UnitName, secondaries: int, *, exchanged: bool = False) -> list[str]:
        plans = [
            score_plan(unit, epsilon, secondaries=secondaries, exchanged=exchanged, laplace=True)
            for epsilon in epsilons
        ]
        return [f"{_survives(plan):.3f}" for plan in plans]

    def chosen(secondaries: int, *, classes: int) -> list[str]:
        kinds = list[str]()
        for epsilon in epsilons:
            plan = score_plan(record, epsilon, secondaries=secondaries, exchanged=False)
            fit = replace(_SCORE_FIT, steps=_SCORE_FIT.steps if classes == 1 else 1)
            best = choose_scores(
                plan.privacy, fit, parties=secondaries, exchanged=False, classes=classes
            )
            kinds.append(best.kind if best else "vectors")
        return kinds

    def noised(unit: UnitName, secondaries: int, *, any_reader: bool = False) -> list[str]:
        options = argparse.Namespace(
            delta=_SCORE_DELTA, secondaries=secondaries, fitting=_SCORE_FIT.share
        )
        shares = []
        for epsilon in epsilons:
            noise = _noise(plan_of(unit, epsilon, options, disjoint=False))
            share = surviving_share(noise=noise, secondaries=secondaries)
            shares.append(f"{any_code(noise) if any_reader else share:.3f}")
        return shares

    record: UnitName = "secondary-record"
    return {
        "symbol (cells), a record removed": symbols(record, 1),
        "symbol (cells), exchanged": symbols(record, 1, exchanged=True),
        "any windows of quantiles, pure epsilon": [f"{windows(each):.3f}" for each in epsilons],
        "Gaussian, linear": noised(record, 1),
        "Gaussian, any code": noised(record, 1, any_reader=True),
        **{f"Laplace, sum of {k}": laplace(record, k) for k in (1, 2, 3, 4, 6, 10, 28)},
        **{
            f"Laplace, sum of {k}, exchanged": laplace(record, k, exchanged=True)
            for k in SECONDARIES
        },
        **{f"the plan's choice of {k}, a score": chosen(k, classes=1) for k in SECONDARIES},
        **{f"the plan's choice of {k}, ten classes": chosen(k, classes=10) for k in SECONDARIES},
        **{f"Gaussian, sum of {k}": noised(record, k) for k in SECONDARIES},
        **{f"entity at {k}, symbols (cells)": symbols("entity", k) for k in SECONDARIES},
        **{f"entity at {k}, Laplace": laplace("entity", k) for k in SECONDARIES},
        **{f"entity at {k}, Gaussian": noised("entity", k) for k in SECONDARIES},
        "advantage of the best test, symbol": [f"{advantage(each):.2f}" for each in epsilons],
        "advantage of the best test, Gaussian": [
            f"{_gaussian_advantage(each):.2f}" for each in epsilons
        ],
    }


def advantage(epsilon: float) -> float:
    """Return how much likelier the best test says "there" of a record that is than of none.

    It is ``p - 1/M``, by the record's symbol; its part of the encoder's fit adds next to nothing.
    """
    plan = score_plan("secondary-record", epsilon, secondaries=1, exchanged=False)
    assert plan.symbols is not None
    own, _ = cell_probabilities(plan.symbols.cells, plan.noise_share_std())
    return own - 1 / plan.symbols.cells


def _gaussian_advantage(epsilon: float) -> float:
    multiplier = gaussian_noise_multiplier(epsilon=epsilon, delta=_SCORE_DELTA)
    return gaussian_delta(epsilon=0.0, noise_multiplier=multiplier)


def windows(epsilon: float) -> float:
    """Return the most that survives of a normal score under windows of quantiles, at pure epsilon.

    An answer y of such a mechanism is ``e^epsilon`` times as likely of a record in its window as of
    a row without one, and ``e^-epsilon`` times of any other; or, for the windows that hold all
    quantiles or none, alike of all. Randomised response is one of them, each window one cell. The
    chances of answers are free, but that those of each quantile add up to 1, and those of a row
    without a record; what y explains of the score, its posterior mean squared, is linear in them.
    """
    first, last = np.triu_indices(_QUANTILES)
    quantiles = np.arange(_QUANTILES)
    inside = (first[:, None] <= quantiles) & (quantiles <= last[:, None])
    ratios = np.where(inside, math.exp(epsilon), math.exp(-epsilon))
    none = np.full((1, _QUANTILES), math.exp(-epsilon))
    ratios = np.vstack([ratios, none, np.ones_like(none)])
    # By the chance of an answer over all records, so that columns are of one size.
    mean = ratios.mean(axis=1)
    of_quantiles = ratios / mean[:, None]
    explained = (of_quantiles * normal_scores(_QUANTILES)).mean(axis=1) ** 2
    sums = np.vstack([of_quantiles.T, 1 / mean])
    found = linprog(-explained, A_eq=sums, b_eq=np.ones(_QUANTILES + 1), method="highs")
    if found.fun is None:
        raise RuntimeError(found.message)
    return float(-found.fun)


def rows_of(unit: UnitName, options: argparse.Namespace) -> list[tuple[str, list[str]]]:
    """Return what is told of a unit, and its cells, one an epsilon."""
    own = [plan_of(unit, epsilon, options, disjoint=True) for epsilon in options.epsilons]
    shared = [plan_of(unit, epsilon, options, disjoint=False) for epsilon in options.epsilons]
    k = options.secondaries

    def shares(
        plans: list[ReleasePlan], *, numbers: int = 1, together: int = 1, agreement: float = 0.0
    ) -> list[str]:
        found = [
            surviving_share(
                noise=_noise(plan), numbers=numbers, secondaries=together, agreement=agreement
            )
            for plan in plans
        ]
        return [f"{share:.2f}" for share in found]

    partners = [partners_for_half(plan, plan.noise_share_std()) for plan in shared]
    return [
        ("noise a number, blocks", [f"{_noise(plan):.2f}" for plan in own]),
        ("blocks, all in one number", shares(own)),
        ("blocks, four numbers alike", shares(own, numbers=4)),
        ("blocks, any code", [f"{any_code(_noise(plan)):.2f}" for plan in own]),
        ("noise a number, shared", [f"{_noise(plan):.2f}" for plan in shared]),
        (f"shared by {k}, uncorrelated", shares(shared, together=k)),
        (f"shared by {k}, all alike", shares(shared, together=k, agreement=1.0)),
        ("secondaries for half", [str(one or "no number") for one in partners]),
    ]


def any_code(noise: float) -> float:
    """Return the most that any code of one record and any reader explain of a normal quantity.

    A vector x of length 1 behind noise of standard deviation z a number, in any number of numbers,
    tells at most ``E |x|^2 / (2 z^2) = 1 / (2 z^2)`` nats: the divergence from the noise alone,
    averaged over x, is no less than the information. To explain the share r of a normal quantity
    takes ``-1/2 ln(1 - r)`` nats, so r is at most ``1 - exp(-1 / z^2)``.

    Args:
        noise: z, in lengths of a record's vector, > 0.

    References:
        [CT06] sections 2.8 and 10.3.2.
    """
    return -math.expm1(-(noise**-2))


def _noise(plan: ReleasePlan) -> float:
    return noise_a_number(plan, plan.noise_share_std())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--delta", type=float, default=1e-6)
    parser.add_argument("--epsilons", type=float, nargs="+", default=[16, 8, 4, 2, 1])
    parser.add_argument("--secondaries", type=int, default=4)
    parser.add_argument("--fitting", type=float, default=0.0, help="share of the privacy, < 1")
    parser.add_argument("--keep", action="store_true", help="write the first table's figures")
    options = parser.parse_args()
    found = {"epsilons": options.epsilons, "rows": scores(options.epsilons)}
    heads = " | ".join(f"{epsilon:g}" for epsilon in options.epsilons)
    print(f"| one score, delta {_SCORE_DELTA:g}, epsilon | {heads} |")
    print("| --- " * (1 + len(options.epsilons)) + "|")
    for what, cells in found["rows"].items():
        print(f"| {what} | {' | '.join(cells)} |")
    print()
    if options.keep:
        keep("surviving", found, seeds=[], code=("securevfl/dp",))
    print(f"| unit | delta {options.delta:g}, epsilon | {heads} |")
    print("| --- " * (2 + len(options.epsilons)) + "|")
    for unit in UNITS:
        for what, cells in rows_of(unit, options):
            print(f"| {unit} | {what} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
