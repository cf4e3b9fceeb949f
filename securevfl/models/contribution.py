"""What each of several partners adds to a metric: leave one out, and Shapley values.

A game is a function of coalitions, sets of partners: what a model is worth with these and no
others. Everything here is linear in the values of coalitions, and each resample of the test rows
gives all of them one value; so intervals are paired by rows, however coalitions are combined.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
from jaxtyping import Float64

from securevfl.core.seeds import stream
from securevfl.models.alone.rule import Used
from securevfl.models.bootstrap import (
    Interval,
    Resampled,
    Weights,
    bootstrap_draws,
    percentile_interval,
    resampled_metrics,
    resamples_for,
)
from securevfl.models.task_metrics import TASK_METRICS, Outputs, Targets
from securevfl.models.tasks import TaskHead
from securevfl.models.threshold import as_logit

LEAST_PERMUTATIONS: Final = 4
"""Two with their reverses, of which an error can be told."""

Coalition = frozenset[str]
"""Names of the partners that are there."""

Method = Literal["exact", "sampled"]
"""Of Shapley values: from all coalitions, or from permutations that were drawn."""

_LOSS: Final = {"regression": "mse", "binary": "log_loss", "multiclass": "log_loss"}
"""The metric that is the loss of training: mean squared error in the label's unit squared, or the
logarithmic loss in nats."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Valued:
    """What the primary would use with a coalition, on the test rows."""

    outputs: Outputs
    """As the task's head takes them."""
    threshold: float
    """Of a binary task, the probability above which a row counts as one of the second class."""
    used: Used = "joint"
    """Whether partners have a part in it, or the primary alone answers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A figure of the test rows, and how sure it is for rows like these."""

    value: float
    interval: Interval | None
    """Of paired resamples of the test rows; None where too few of them define it."""
    standard_error: float | None = None
    """Of the permutations that were drawn, over and above the interval; None of exact figures."""

    def as_json(self) -> dict[str, Any]:
        """Return it by name, without what it has not."""
        found: dict[str, Any] = {
            "value": self.value,
            "interval": None if self.interval is None else list(self.interval),
        }
        if self.standard_error is not None:
            found["standard_error"] = self.standard_error
        return found


Figures = Mapping[str, Estimate]
"""By metric."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Partner:
    """What one partner adds; positive is better, whichever way the metric counts."""

    leave_one_out: Figures
    """The value of all partners less the value of all others."""
    shapley: Figures
    """The mean, over all orders in which partners may come, of what it adds when it comes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Worth:
    """One game, solved."""

    method: Method
    permutations: int | None
    """So many were drawn; None where values are exact."""
    coalitions: int
    """So many were valued."""
    partners: Mapping[str, Partner]
    all: Figures
    """The metric itself with all partners."""
    none: Figures
    """Of the primary alone."""
    gain: Figures
    """The one less the other; positive is better. Shapley values add up to it."""
    values: Mapping[Coalition, Figures] = field(repr=False)
    """The metric itself of every coalition that was valued."""
    used: Mapping[Coalition, Used] = field(repr=False)
    """Whose predictions they are."""

    def as_json(self) -> dict[str, Any]:
        """Return it as ``contribution.json`` has it."""
        return {
            "method": self.method,
            "permutations": self.permutations,
            "coalitions": self.coalitions,
            "partners": {
                name: {
                    "leave_one_out": _as_json(one.leave_one_out),
                    "shapley": _as_json(one.shapley),
                }
                for name, one in self.partners.items()
            },
            "all": _as_json(self.all),
            "none": _as_json(self.none),
            "gain": _as_json(self.gain),
            "values": [
                {"partners": sorted(one), "used": self.used[one], "metrics": _as_json(figures)}
                for one, figures in self.values.items()
            ],
        }


def _as_json(figures: Figures) -> dict[str, Any]:
    return {name: one.as_json() for name, one in figures.items()}


def solve(
    partners: Sequence[str],
    value: Callable[[Coalition], Valued],
    head: TaskHead,
    targets: Targets,
    *,
    exact_up_to: int,
    permutations: int,
    seed: int,
    heard: Callable[[int, int], None] = lambda _done, _of: None,
) -> Worth:
    """Value coalitions, and share out what they are worth.

    Args:
        partners: Names, one at least.
        value: What the primary would use with a coalition; asked once for each.
        head: The task.
        targets: The test rows' labels, as metrics take them.
        exact_up_to: From more partners than these on, permutations are drawn.
        permutations: How many then, at least :data:`LEAST_PERMUTATIONS`; an odd number counts as
            the next even one, since each permutation is followed by its reverse.
        seed: Of permutations and of resamples.
        heard: Told how many coalitions are valued, and how many there will be.

    References:
        Shapley, A Value for n-Person Games, 1953: the value. Castro, Gomez and Tejada, Polynomial
        calculation of the Shapley value based on sampling, 2009: permutations. Mitchell et al.,
        Sampling Permutations for Shapley Value Estimation, JMLR 2022, section 3: reverses.
    """
    everybody, nobody = frozenset(partners), Coalition()
    pairs: list[tuple[tuple[str, ...], ...]] | None = None
    if len(partners) <= exact_up_to:
        sizes = range(len(partners) + 1)
        wanted = [frozenset(one) for n in sizes for one in itertools.combinations(partners, n)]
    else:
        pairs = _pairs_of_orders(partners, permutations, seed)
        orders = [order for pair in pairs for order in pair]
        wanted = [nobody, everybody, *(everybody - {one} for one in partners)]
        wanted += [frozenset(order[:n]) for order in orders for n in range(1, len(order))]
        wanted = list(dict.fromkeys(wanted))
    valued: dict[Coalition, Valued] = {}
    for one in wanted:
        valued[one] = value(one)
        heard(len(valued), len(wanted))
    measured = _Measured(valued, head, targets, seed=seed)
    found = {}
    for name in partners:
        if pairs is None:
            shapley = measured.gain(_exact_shares(name, partners))
        else:
            shares = [_mean([_marginal(name, order) for order in pair]) for pair in pairs]
            shapley = measured.gain(_mean(shares), drawn=shares)
        left = {everybody: 1.0, everybody - {name}: -1.0}
        found[name] = Partner(leave_one_out=measured.gain(left), shapley=shapley)
    return Worth(
        method="exact" if pairs is None else "sampled",
        permutations=None if pairs is None else 2 * len(pairs),
        coalitions=len(valued),
        partners=found,
        all=measured.of(everybody),
        none=measured.of(nobody),
        gain=measured.gain({everybody: 1.0, nobody: -1.0}),
        values={one: measured.of(one) for one in valued},
        used={one: outcome.used for one, outcome in valued.items()},
    )


def measure(valued: Valued, head: TaskHead, targets: Targets, *, seed: int) -> Figures:
    """Return the metrics of one coalition with intervals; arguments as of :func:`solve`."""
    one = Coalition()
    return _Measured({one: valued}, head, targets, seed=seed).of(one)


Shares = Mapping[Coalition, float]
"""A sum over coalitions: what each one's value is multiplied by."""


def _exact_shares(name: str, partners: Sequence[str]) -> Shares:
    others = [one for one in partners if one != name]
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


class _Measured:
    """Metrics of every coalition, of the test rows and of each resample of them."""

    def __init__(
        self, valued: Mapping[Coalition, Valued], head: TaskHead, targets: Targets, *, seed: int
    ) -> None:
        loss = _LOSS[head.task]
        self._names = tuple(dict.fromkeys((head.metric_name, loss)))
        self._places = {one: place for place, one in enumerate(valued)}
        higher = {one.name: one.higher_is_better for one in TASK_METRICS[head.task]}
        self._signs = {name: 1.0 if higher.get(name) else -1.0 for name in self._names}
        units = {name: head.in_label_units(name, (0.0, 1.0)) for name in higher}
        deviation = head.label_deviation
        functions: dict[str, Resampled] = {}
        for place, one in enumerate(valued.values()):
            metrics = resampled_metrics(
                head.task, one.outputs, targets, cut=as_logit(one.threshold)
            )
            for name in self._names:
                if name == "mse":
                    functions[f"{place} {name}"] = _times(_squared(metrics["rmse"]), deviation**2)
                    continue
                unit = units[name]
                assert unit is not None, "an interval was given"
                functions[f"{place} {name}"] = _times(metrics[name], unit[1])
        rows = len(targets)
        once = np.ones((1, rows))
        self._values = self._table({name: of(once) for name, of in functions.items()})
        self._draws = self._table(
            bootstrap_draws(
                functions, rows=rows, resamples=resamples_for(rows, head.outputs), seed=seed
            )
        )

    def _table(
        self, found: Mapping[str, Float64[np.ndarray, " draws"]]
    ) -> dict[str, Float64[np.ndarray, "coalitions draws"]]:
        return {
            name: np.stack([found[f"{place} {name}"] for place in self._places.values()])
            for name in self._names
        }

    def of(self, coalition: Coalition) -> Figures:
        """Return the metrics of a coalition with intervals."""
        place = self._places[coalition]
        return {
            name: Estimate(
                value=float(self._values[name][place, 0]),
                interval=percentile_interval(self._draws[name][place]),
            )
            for name in self._names
        }

    def gain(self, shares: Shares, *, drawn: Sequence[Shares] = ()) -> Figures:
        """Return a sum over coalitions, turned so that positive is better.

        Args:
            shares: The sum.
            drawn: Independent sums of which it is the mean, if they were drawn.
        """
        found = {}
        for name, sign in self._signs.items():
            values, draws = sign * self._values[name], sign * self._draws[name]
            error = None
            if drawn:
                several = [float(self._sum(values, one)[0]) for one in drawn]
                error = float(np.std(several, ddof=1)) / math.sqrt(len(several))
            found[name] = Estimate(
                value=float(self._sum(values, shares)[0]),
                interval=percentile_interval(self._sum(draws, shares)),
                standard_error=error,
            )
        return found

    def _sum(
        self, values: Float64[np.ndarray, "coalitions draws"], shares: Shares
    ) -> Float64[np.ndarray, " draws"]:
        places = [self._places[one] for one in shares]
        return np.array(list(shares.values())) @ values[places]


def _times(metric: Resampled, factor: float) -> Resampled:
    return lambda weights: factor * metric(weights)


def _squared(metric: Resampled) -> Resampled:
    def measure(weights: Weights) -> Float64[np.ndarray, " resamples"]:
        return np.square(metric(weights))

    return measure
