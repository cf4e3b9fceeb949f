"""Game over coalitions of partners: leave-one-out and Shapley values with paired intervals.

A game is a function of coalitions, sets of partners: the value of a model with these and no others.
All results are linear in the values of coalitions, and each resample of the test rows gives every
coalition one value; so intervals are paired by rows, however coalitions are combined.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
from jaxtyping import Float64

from securevfl.core.conventions import stream
from securevfl.models.alone.choice import Used
from securevfl.models.task_metrics import TASK_METRICS, Targets, percentile_interval
from securevfl.models.tasks import TaskHead
from securevfl.runtime.coalitions import (
    Coalition,
    CoalitionAnswer,
    Estimate,
    Figures,
    draws_of,
    metric_functions,
)

LEAST_PERMUTATIONS: Final = 4
"""Two with their reverses, the fewest that give an error."""

Method = Literal["exact", "sampled"]
"""Basis of Shapley values: all coalitions, or permutations that were drawn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Partner:
    """Value of one partner; positive is better for every metric."""

    leave_one_out: Figures
    """Value of all partners minus that of all others."""
    shapley: Figures
    """Mean over all orders of partners of the value that it adds after its predecessors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Worth:
    """Solution of one game."""

    method: Method
    permutations: int | None
    """Number of drawn permutations; None if values are exact."""
    coalitions: int
    """Number of valued coalitions."""
    partners: Mapping[str, Partner]
    all: Figures
    """Metrics with all partners."""
    none: Figures
    """Metrics of the primary alone."""
    gain: Figures
    """``all`` minus ``none``, positive is better; Shapley values add up to it."""
    values: Mapping[Coalition, Figures] = field(repr=False)
    """Metrics of every valued coalition."""
    used: Mapping[Coalition, Used] = field(repr=False)
    """Model that answers with each coalition."""

    def as_json(self) -> dict[str, Any]:
        """Return the content of ``contribution.json``."""
        return {
            "method": self.method,
            "permutations": self.permutations,
            "coalitions": self.coalitions,
            "partners": {
                name: {
                    "leave_one_out": _as_json(partner.leave_one_out),
                    "shapley": _as_json(partner.shapley),
                }
                for name, partner in self.partners.items()
            },
            "all": _as_json(self.all),
            "none": _as_json(self.none),
            "gain": _as_json(self.gain),
            "values": [
                {
                    "partners": sorted(coalition),
                    "used": self.used[coalition],
                    "metrics": _as_json(figures),
                }
                for coalition, figures in self.values.items()
            ],
        }


def _as_json(figures: Figures) -> dict[str, Any]:
    return {name: estimate.as_json() for name, estimate in figures.items()}


def solve(
    partners: Sequence[str],
    value: Callable[[Coalition], CoalitionAnswer],
    head: TaskHead,
    targets: Targets,
    *,
    exact_up_to: int,
    permutations: int,
    seed: int,
    on_progress: Callable[[int, int], None] = lambda _done, _of: None,
) -> Worth:
    """Value coalitions, and return each partner's leave-one-out and Shapley values.

    Args:
        partners: Names of the partners, at least one.
        value: Function that returns the primary's answer with a coalition; called once for each.
        head: The task.
        targets: The test rows' labels, as metrics take them.
        exact_up_to: Largest number of partners without drawn permutations.
        permutations: Number of drawn permutations, at least :data:`LEAST_PERMUTATIONS`; an odd
            number counts as the next even one, since each permutation is followed by its reverse.
        seed: Seed of permutations and resamples.
        on_progress: Callback for the number of valued coalitions and of all.

    References:
        Shapley, A Value for n-Person Games, 1953: the value. Castro, Gomez and Tejada, Polynomial
        calculation of the Shapley value based on sampling, 2009: permutations. Mitchell et al.,
        Sampling Permutations for Shapley Value Estimation, JMLR 2022, section 3: reverses.
    """
    all_partners, no_partners = frozenset(partners), Coalition()
    pairs: list[tuple[tuple[str, ...], ...]] | None = None
    if len(partners) <= exact_up_to:
        sizes = range(len(partners) + 1)
        wanted = [
            frozenset(members) for n in sizes for members in itertools.combinations(partners, n)
        ]
    else:
        pairs = _pairs_of_orders(partners, permutations, seed)
        orders = [order for pair in pairs for order in pair]
        wanted = [no_partners, all_partners, *(all_partners - {partner} for partner in partners)]
        wanted += [frozenset(order[:n]) for order in orders for n in range(1, len(order))]
        wanted = list(dict.fromkeys(wanted))
    valued: dict[Coalition, CoalitionAnswer] = {}
    for coalition in wanted:
        valued[coalition] = value(coalition)
        on_progress(len(valued), len(wanted))
    measured = _Gains(valued, head, targets, seed=seed)
    measured_partners = {}
    for name in partners:
        if pairs is None:
            shapley = measured.gain(_exact_shares(name, partners))
        else:
            shares = [_mean([_marginal(name, order) for order in pair]) for pair in pairs]
            shapley = measured.gain(_mean(shares), drawn=shares)
        left = {all_partners: 1.0, all_partners - {name}: -1.0}
        measured_partners[name] = Partner(leave_one_out=measured.gain(left), shapley=shapley)
    return Worth(
        method="exact" if pairs is None else "sampled",
        permutations=None if pairs is None else 2 * len(pairs),
        coalitions=len(valued),
        partners=measured_partners,
        all=measured.of(all_partners),
        none=measured.of(no_partners),
        gain=measured.gain({all_partners: 1.0, no_partners: -1.0}),
        values={coalition: measured.of(coalition) for coalition in valued},
        used={coalition: outcome.used for coalition, outcome in valued.items()},
    )


Shares = Mapping[Coalition, float]
"""Weights of a sum over coalitions' values."""


def _exact_shares(name: str, partners: Sequence[str]) -> Shares:
    others = [partner for partner in partners if partner != name]
    shares: dict[Coalition, float] = {}
    for size in range(len(partners)):
        # The share of all orders in which these and no others come before.
        share = 1 / (len(partners) * math.comb(len(others), size))
        for before in itertools.combinations(others, size):
            shares[frozenset(before)] = -share
            shares[frozenset(before) | {name}] = share
    return shares


def _marginal(name: str, order: Sequence[str]) -> Shares:
    place = order.index(name)
    return {frozenset(order[: place + 1]): 1.0, frozenset(order[:place]): -1.0}


def _mean(several: Sequence[Shares]) -> Shares:
    total: dict[Coalition, float] = {}
    for shares in several:
        for coalition, share in shares.items():
            total[coalition] = total.get(coalition, 0.0) + share / len(several)
    return total


def _pairs_of_orders(
    partners: Sequence[str], permutations: int, seed: int
) -> list[tuple[tuple[str, ...], ...]]:
    """Return random orders, each with its reverse."""
    random = stream(seed, "permutations")
    orders = (tuple(random.permutation(list(partners)).tolist()) for _ in range(permutations))
    return [(order, order[::-1]) for order in itertools.islice(orders, (permutations + 1) // 2)]


class _Gains:
    """Metrics of every coalition, and gains of weighted sums over coalitions.

    Each resample of the test rows gives all coalitions one value, so intervals of any linear
    combination are paired by rows.
    """

    def __init__(
        self,
        answers: Mapping[Coalition, CoalitionAnswer],
        head: TaskHead,
        targets: Targets,
        *,
        seed: int,
    ) -> None:
        """Measure all answers.

        Args:
            answers: Answer of each coalition.
            head: The task.
            targets: Labels of the test rows, as metrics take them.
            seed: Seed of resamples.
        """
        self._places = {answer: place for place, answer in enumerate(answers)}
        measured = [metric_functions(answer, head, targets) for answer in answers.values()]
        higher = {metric.name: metric.higher_is_better for metric in TASK_METRICS[head.task]}
        self._signs = {name: 1.0 if higher.get(name) else -1.0 for name in measured[0]}
        functions = {
            f"{place} {name}": of
            for place, of_one in enumerate(measured)
            for name, of in of_one.items()
        }
        once = np.ones((1, len(targets)))
        self._values = self._table({name: of(once) for name, of in functions.items()})
        self._draws = self._table(draws_of(functions, head, rows=len(targets), seed=seed))

    def _table(
        self, samples: Mapping[str, Float64[np.ndarray, " draws"]]
    ) -> dict[str, Float64[np.ndarray, "coalitions draws"]]:
        return {
            name: np.stack([samples[f"{place} {name}"] for place in self._places.values()])
            for name in self._signs
        }

    def of(self, coalition: Coalition) -> Figures:
        """Return the metrics of a coalition with intervals."""
        place = self._places[coalition]
        return {
            name: Estimate(
                value=float(self._values[name][place, 0]),
                interval=percentile_interval(self._draws[name][place]),
            )
            for name in self._signs
        }

    def gain(self, shares: Shares, *, drawn: Sequence[Shares] = ()) -> Figures:
        """Return a weighted sum over coalitions with intervals; positive is better.

        Args:
            shares: The sum.
            drawn: Independent sums of which it is the mean, if they were drawn.
        """
        gains = {}
        for name, sign in self._signs.items():
            values, draws = sign * self._values[name], sign * self._draws[name]
            error = None
            if drawn:
                several = [float(self._sum(values, draw)[0]) for draw in drawn]
                error = float(np.std(several, ddof=1)) / math.sqrt(len(several))
            gains[name] = Estimate(
                value=float(self._sum(values, shares)[0]),
                interval=percentile_interval(self._sum(draws, shares)),
                standard_error=error,
            )
        return gains

    def _sum(
        self, values: Float64[np.ndarray, "coalitions draws"], shares: Shares
    ) -> Float64[np.ndarray, " draws"]:
        places = [self._places[coalition] for coalition in shares]
        return np.array(list(shares.values())) @ values[places]
