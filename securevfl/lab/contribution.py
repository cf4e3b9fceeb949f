"""Value of each partner of a finished run, with the saved model and with a retrained one.

A game is a function of coalitions, sets of partners: the value of a model with these and no others.
All results are linear in the values of coalitions, and each resample of the test rows gives every
coalition one value; so intervals are paired by rows, however coalitions are combined.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from jaxtyping import Float64

from securevfl.config.sections import OWN
from securevfl.core import checks, files
from securevfl.core.conventions import stream
from securevfl.core.errors import ConfigError, PrivacyError
from securevfl.core.formatting import Summarised
from securevfl.core.progress import CoalitionsValued, Observer, Pace, Stage, unheard
from securevfl.data.tables import PartyTable
from securevfl.federation.base import fit_base
from securevfl.federation.build import build_primary
from securevfl.federation.messages import EpochMark
from securevfl.federation.run_plan import plan_prediction, prediction_facts
from securevfl.models.alone.choice import Used
from securevfl.models.alone.margins import MarginModel
from securevfl.models.fitted_top import FittedTop
from securevfl.models.task_metrics import LEVEL, Targets, metrics_of, percentile_interval
from securevfl.models.tasks import TaskHead
from securevfl.runtime.coalitions import (
    NEVER_FEWER,
    BlockReleases,
    Coalition,
    CoalitionAnswer,
    Estimate,
    Figures,
    SavedModels,
    answers_in_blocks,
    draws_of,
    metric_functions,
    partners_of,
)
from securevfl.runtime.released_table import COST
from securevfl.runtime.run_folder import CONTRIBUTION, MEASURED_FORMAT, read_figures
from securevfl.runtime.run_options import FederationSource
from securevfl.runtime.simulation import RunResult
from securevfl.runtime.trained_run import TrainedRun, trained_run

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
        higher = {metric.name: metric.higher_is_better for metric in metrics_of(head.task, None)}
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


class Retrained:
    """Answers of top models that are trained again on the released rows of a coalition.

    Seed, rows, settings, base and the choice of the answering model are those of the run. With all
    partners the answer is the run's own.
    """

    def __init__(self, source: BlockReleases) -> None:
        """Fit the base of a run again, if there is one."""
        self._source = source
        self._base = None
        part = source.alone.part
        if part.base is not None:
            # A named one is fitted by its name again.
            named = source.config.base.estimator != OWN
            fitted = part.base if isinstance(part.base, MarginModel) else None
            own = None if named or fitted is None else fitted.estimator
            self._base = fit_base(source.config, source.table, source.data, own)

    def __call__(self, coalition: Coalition) -> CoalitionAnswer:
        """Return the answer with these partners alone."""
        source, base = self._source, self._base
        if not coalition or coalition == source.everybody:
            return source.answer(coalition)
        top, own = source.top.top, None
        if isinstance(top, FittedTop) and top.model is not None:
            named = source.config.top is not None and source.config.top.name != OWN
            own = None if named else top.model.estimator
        primary = build_primary(
            source.plan,
            source.table,
            source.data,
            source.exchange(coalition),
            observe=unheard,
            estimator=own,
        )
        if base is not None:
            primary.take_base(base.margins)
        primary.train(after_epoch=_nothing)
        primary.restore_best()
        if base is not None:
            decision = primary.decide(source.alone.margins, base_is_alone=base.alone is not None)
            if decision.used == "alone":
                return source.alone.test
        outputs = primary.predict(source.data.split.test, "test")
        return source.alone.answer(outputs, primary.threshold, "joint")


def _nothing(_mark: EpochMark) -> None:
    """Keep no checkpoint: a coalition is always trained from the beginning."""


PERMUTATIONS: Final = 32
"""Number of drawn permutations if there are too many partners for exact Shapley values."""

EXACT_TRAINED: Final = 5
"""Largest number of partners for which all coalitions are trained again: 30 trainings for five."""

EXACT_KEPT: Final = 10
"""Largest number of partners for which the saved model answers all coalitions."""

_NOT_SENT: Final = "nothing: the run promises nothing, and all of it is computed in this process"


@dataclass(frozen=True, kw_only=True, repr=False)
class Contribution(Summarised):
    """Value of each partner of a run for its model."""

    run: str
    """The run's id."""
    metric: str
    """The metric of training; figures also have the loss."""
    higher_is_better: bool
    rows: int
    """Test rows."""
    seed: int
    """Seed of permutations and of resamples."""
    threshold: float
    """Decision threshold of the primary alone, for a binary task."""
    gone: Worth
    """Values if a partner is absent: the saved model answers without it."""
    again: Worth | None
    """Values if a partner leaves and the model is trained again; None if that needs another run."""
    cost: str
    """Cost of measuring this, in words."""
    notes: tuple[str, ...]
    """Notes that a reader must know."""

    def summary(self) -> tuple[str, dict[str, str]]:
        """Return what each partner adds to the metric, and what measuring that has cost."""
        shown = {
            f"{name}, if {question}": f"{partner.leave_one_out[self.metric].value:+.4f} "
            f"(Shapley {partner.shapley[self.metric].value:+.4f})"
            for question, worth in (("gone tomorrow", self.gone), ("never there", self.again))
            if worth is not None
            for name, partner in worth.partners.items()
        }
        return f"{self.metric} on {self.rows:,} test rows", {**shown, "cost": self.cost}

    def as_json(self) -> dict[str, Any]:
        """Return the content of ``contribution.json``."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            **plain,
            "level": LEVEL,
            "gone": self.gone.as_json(),
            "again": None if self.again is None else self.again.as_json(),
            "notes": list(self.notes),
        }


def contribution(
    run: Any,
    *,
    permutations: int = PERMUTATIONS,
    seed: int | None = None,
    federation: FederationSource | None = None,
    parties: Iterable[PartyTable] | None = None,
    data_root: Path | None = None,
    device: str = "cpu",
    observe: Observer = unheard,
) -> Contribution:
    """Measure each secondary's value for the model of a finished run, on its test rows.

    Two questions have two answers. *Gone tomorrow*: the model that was kept answers without the
    secondary. *Trained again*: the secondary leaves, and the top model is trained again on the
    others' released numbers. Each has the value of all partners less that of all others (leave one
    out), and Shapley values, which add up to what the joint model gains over the primary alone;
    both with intervals of paired resamples of the test rows.

    It is free where the answer lies at the primary: a frozen run whose secondaries write into
    coordinates of their own (``encoder.layout = "blocks"``, or a single secondary). Of a simulation
    without a promise the kept models say who is missed tomorrow. The result is written to
    ``contribution.json`` in the run folder.

    Args:
        run: The run folder, or the result of :func:`securevfl.simulate`.
        permutations: Orders that Shapley values are taken over, where there are more than
            :data:`EXACT_TRAINED` partners (:data:`EXACT_KEPT` for the kept model).
        seed: Seed of permutations and resamples; None: the run's.
        federation: The federation file; default: that of the run.
        parties: The parties' tables, of a run that was simulated on tables in memory; others are
            read again.
        data_root: Folder at which relative data paths start; default: the current folder.
        device: ``"cpu"`` or ``"cuda"``.
        observe: Receives progress events.

    Raises:
        ConfigError: If the folder is not that of a finished run, or it would take another run.
        DataError: If a table is not the one of training.
        PrivacyError: If it would take further releases, or the primary's ledger was altered.

    Reveals:
        Nothing: no party receives a request, and no ledger is charged.

    References:
        Ghorbani and Zou, Data Shapley, ICML 2019: a model's metric as the game. Wang et al.,
        A Principled Approach to Data Valuation for Federated Learning, 2020: parties as players.
    """
    if isinstance(run, RunResult):
        if run.trained is None:
            raise ConfigError("the run has pretrained encoders, and no model to measure")
        trained = run.trained
    else:
        trained = trained_run(
            run, federation=federation, parties=parties, data_root=data_root, device=device
        )
    measured = _measure_partners(trained, permutations=permutations, seed=seed, observe=observe)
    figures = {"format": MEASURED_FORMAT, **measured.as_json()}
    files.write_json(trained.folder / CONTRIBUTION, figures, for_others=True)
    return measured


def _measure_partners(
    trained: TrainedRun, *, permutations: int, seed: int | None, observe: Observer
) -> Contribution:
    # Before anything long begins.
    checks.whole(permutations=permutations)
    checks.at_least(LEAST_PERMUTATIONS, permutations=permutations)
    config, folder = trained.config, trained.folder
    figures = read_figures(folder)
    if "untested" in figures:
        raise ConfigError(f"run folder {folder}: {figures['untested']}, so nothing can be compared")
    model = trained.model(config.primary.name)
    seed = config.federation.seed if seed is None else seed
    again, notes = None, []
    if config.privacy.mechanism != "none" and not answers_in_blocks(config):
        raise PrivacyError(_refusal(trained, figures))
    source = partners_of(trained, model, figures)
    cost = COST if isinstance(source, BlockReleases) else _NOT_SENT
    if isinstance(source, SavedModels) and config.model.party_dropout == 0:
        notes.append(NEVER_FEWER)
    if config.privacy.mechanism != "none":
        notes.append(
            "noise of the released numbers is that of all secondaries, also where one is taken "
            "out: with fewer, predictions would have a little less of it"
        )
    data, names = source.data, [party.name for party in config.secondaries]
    targets = source.alone.test_targets
    common = {"permutations": permutations, "seed": seed}
    gone = solve(
        names,
        source.answer,
        data.head,
        targets,
        exact_up_to=EXACT_KEPT,
        on_progress=Pace(observe, CoalitionsValued, name="without partners"),
        **common,
    )
    if isinstance(source, BlockReleases):
        observe(Stage(text="training without partners"))
        again = solve(
            names,
            Retrained(source),
            data.head,
            targets,
            exact_up_to=EXACT_TRAINED,
            on_progress=Pace(observe, CoalitionsValued, name="training without partners"),
            **common,
        )
    if gone.used[frozenset(names)] == "alone":
        notes.append(
            "the primary alone answers in this run, so no partner is missed, and all values are 0"
        )
    return Contribution(
        run=model.run,
        metric=data.head.metric_name,
        higher_is_better=data.head.higher_is_better,
        rows=len(targets),
        seed=seed,
        threshold=source.alone.threshold,
        gone=gone,
        again=again,
        cost=cost,
        notes=tuple(notes),
    )


def _refusal(run: TrainedRun, figures: Mapping[str, Any]) -> str:
    config, rows = run.config, figures["evaluation"]["rows"]
    passes = len(config.secondaries)
    model = run.model(config.primary.name)
    plan = plan_prediction(
        config,
        prediction_facts(rows=rows, predicted_rows=rows),
        noise_share_std=model.noise_share_std,
    )
    once = plan.releases
    several = replace(
        once,
        min_active=max(1, passes - 1),
        rounds=passes * once.rounds,
        row_releases=passes * once.row_releases,
        releases_per_row=passes,
        releases_per_record=None,
    )
    epsilon = several.epsilon(plan.noise_share_std)
    own_numbers = '[encoder] layout = "blocks"'
    if config.encoder_reads_labels:
        own_numbers = f'{own_numbers} (method = "principal"; class means share their numbers)'
    return (
        f"contribution: this run's releases are sums over the secondaries, and leaving out each "
        f"of {passes} would take {passes} more releases of the {rows} test rows, epsilon "
        f'{epsilon:.3g} beside the run\'s; a run with privacy.encoder = "frozen" and '
        f"{own_numbers} has the answer in what it releases, for nothing"
    )
