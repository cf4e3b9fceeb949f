"""What can survive the noise of a release, unit by unit, as a table; nothing is simulated.

    python research/frontier/surviving.py

The promise is that of research/frontier/README.md's bounds: one record a row (``choose =
"records"``, m = 1), frozen encoders, no fitting, every row released once. ``--fitting 0.05`` takes
what a fitted encoder takes.
"""

import argparse
import math

from securevfl.dp.privacy import Privacy, UnitName
from securevfl.dp.release_plan import FittingPlan, ReleasePlan
from securevfl.lab.advice import noise_a_number, partners_for_half, surviving_share

UNITS: tuple[UnitName, ...] = ("secondary-record", "entity", "linked-row")
_ROWS = 10_000


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
    options = parser.parse_args()
    heads = " | ".join(f"{epsilon:g}" for epsilon in options.epsilons)
    print(f"| unit | delta {options.delta:g}, epsilon | {heads} |")
    print("| --- " * (2 + len(options.epsilons)) + "|")
    for unit in UNITS:
        for what, cells in rows_of(unit, options):
            print(f"| {unit} | {what} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
