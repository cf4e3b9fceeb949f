"""Value of a saved model with some of its partners: coalitions, leave one out, Shapley values.

A game is a function of coalitions, sets of partners: what a model is worth with these and no
others. Everything here is linear in the values of coalitions, and each resample of the test rows
gives all of them one value; so intervals are paired by rows, however coalitions are combined.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, Protocol, runtime_checkable

import numpy as np
import safetensors
import safetensors.torch
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from securevfl.config.federation import FederationConfig
from securevfl.config.link_spec import link_spec
from securevfl.config.sections import OWN
from securevfl.core import files
from securevfl.core.conventions import stream
from securevfl.core.errors import ConfigError, DataError, PrivacyError
from securevfl.core.progress import Observer, Stage, unheard
from securevfl.data.rows import consecutive_batches
from securevfl.data.tables import PartyTable
from securevfl.federation.base import Base, fit_base
from securevfl.federation.build import bottom_at_work, build_primary, build_secondary, primary_data
from securevfl.federation.exchange import EpochMark, RoundCounter, RoundPlan
from securevfl.federation.own_numbers import own_inputs
from securevfl.federation.rounds.around import without_blocks
from securevfl.federation.rounds.primary import PrimaryData, TopModel
from securevfl.federation.rounds.released_rows import ReleasedRows
from securevfl.federation.rounds.secondary import Secondary
from securevfl.federation.run_plan import RunFacts, RunPlan, plan_prediction, plan_run, run_facts
from securevfl.federation.saved_model import KeptModel
from securevfl.federation.session.membership import in_blocks
from securevfl.ledger.ledger import Ledger
from securevfl.linkage.spec import LinkedPrimary
from securevfl.linkage.stage.linking import Linker
from securevfl.linkage.stage.party_keys import key_scaler, keys_of, model_keys
from securevfl.models.alone.choice import Used, fit_alone, who_answers
from securevfl.models.alone.margins import MarginModel
from securevfl.models.fitted_top import FittedTop
from securevfl.models.task_metrics import (
    TASK_METRICS,
    Interval,
    Outputs,
    Resampled,
    Targets,
    Weights,
    bootstrap_draws,
    percentile_interval,
    resampled_metrics,
    resamples_for,
)
from securevfl.models.tasks import TaskHead, as_logit, on_cpu
from securevfl.runtime.predicting import Request, kept_top, prediction_spec, top_model
from securevfl.runtime.preflight import device_named
from securevfl.runtime.released_table import METADATA, released_table
from securevfl.runtime.run_folder import KeptRun, read_contribution, read_figures
from securevfl.runtime.run_tables import read_party
from securevfl.version import __version__

# What each of several partners adds to a metric: leave one out, and Shapley values.

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


# What a kept model is worth with some of its partners, without asking anybody.


@runtime_checkable
class Partners(Protocol):
    """A run's outputs with some of its partners."""

    def outputs(self, coalition: Coalition, rows: Int64[np.ndarray, " some"]) -> Tensor:
        """Return the kept joint model's outputs for rows, with these partners alone."""
        ...


class BaselineOfRun:
    """The primary alone beside a kept model, on the rows of training."""

    def __init__(
        self, config: FederationConfig, table: PartyTable, model: KeptModel, data: PrimaryData
    ) -> None:
        assert model.primary is not None, "the primary's"
        self.part, self.data = model.primary, data
        self.head, device = data.head, data.features.device
        inputs, split = own_inputs(table), data.split
        alone = self.part.alone
        if alone is None:
            alone = fit_alone(
                inputs,
                data.targets.cpu().numpy(),
                self.head,
                train=split.train,
                validation=split.validation,
                seed=config.federation.seed,
            ).best.model
        self.margins = torch.from_numpy(alone.margins(inputs)).to(device)
        """Of the primary alone, of all rows."""
        self.threshold = self.head.choose_threshold(
            self.outputs(split.validation), self.targets(split.validation)
        )

    def outputs(self, rows: Int64[np.ndarray, " some"]) -> Tensor:
        """Return what the primary alone says of rows."""
        return self.margins[torch.as_tensor(rows, device=self.margins.device)]

    def targets(self, rows: Int64[np.ndarray, " some"]) -> Tensor:
        """Return the labels of rows."""
        return self.data.targets[torch.as_tensor(rows, device=self.data.targets.device)]

    @property
    def tested(self) -> Targets:
        """The test rows' labels, as metrics take them."""
        rows = self.data.split.test
        return on_cpu(self.outputs(rows), self.targets(rows))[1]

    @property
    def test(self) -> Valued:
        """The primary alone on the test rows."""
        return self.valued(self.outputs(self.data.split.test), self.threshold, "alone")

    def valued(self, outputs: Tensor, threshold: float, used: Used) -> Valued:
        """Return outputs for the test rows as they are compared."""
        out, _ = on_cpu(outputs, self.targets(self.data.split.test))
        return Valued(outputs=out, threshold=threshold, used=used)


class Gone:
    """Values of coalitions by the model that was kept: the others are gone tomorrow."""

    def __init__(self, alone: BaselineOfRun, partners: Partners, *, everybody: Coalition) -> None:
        self._alone = alone
        self._partners = partners
        self._everybody = everybody

    def __call__(self, coalition: Coalition) -> Valued:
        """Return what answers with these partners alone, and what it says of the test rows.

        With a base, the primary alone answers where the joint model does not beat it on the
        validation rows by the rule of the run.
        """
        alone, part = self._alone, self._alone.part
        if not coalition or part.used == "alone":
            return alone.test
        split = alone.data.split
        # The run has decided for all of its partners.
        if part.base is not None and coalition != self._everybody:
            used = who_answers(
                alone.head,
                joint=self._partners.outputs(coalition, split.validation),
                alone=alone.outputs(split.validation),
                targets=alone.targets(split.validation),
            )
            if used == "alone":
                return alone.test
        outputs = self._partners.outputs(coalition, split.test)
        return alone.valued(outputs, part.threshold, "joint")


def ranks_of(plan: RunPlan) -> tuple[int, ...]:
    """Return the ranks of all secondaries."""
    return tuple(sorted(plan.secondaries))


def at_work(
    config: FederationConfig,
    model: KeptModel,
    table: PartyTable,
    linked: LinkedPrimary,
    *,
    device: torch.device,
) -> TopModel:
    """Return the kept half of the primary with all rows of training; it has no exchange yet.

    Args:
        config: The federation file.
        model: The primary's.
        table: Its table, as in training.
        linked: Links with all secondaries; a round reads the similarities of its active ones.
        device: Where it computes.
    """
    rows = table.num_rows
    facts = facts_of(rows)
    keys = keys_of(prediction_spec(config, model).keys, table)
    everybody = tuple(config.ranks[party.name] for party in config.secondaries)
    nothing = ReleasedRows(
        torch.empty(0, 1, 1), ranks=everybody, rounds=RoundCounter(), device=device
    )
    return top_model(
        config,
        model,
        kept_top(config, model, table, device=device),
        table,
        linked,
        nothing,
        request=Request(facts=facts, keys=keys),
        device=device,
    )


def facts_of(rows: int) -> RunFacts:
    """Return what a session is that asks for predictions of so many rows."""
    return RunFacts(
        rows=rows, train_rows=0, validation_rows=0, test_rows=0, predicts=True, predicted_rows=rows
    )


# A simulation that promises nothing: its kept models say what every set of partners is worth.


class KeptModels:
    """A simulation of which nothing is promised: its kept models, and everybody's table."""

    def __init__(
        self,
        config: FederationConfig,
        tables: Mapping[str, PartyTable],
        models: Mapping[str, KeptModel],
        *,
        device: torch.device,
    ) -> None:
        """Ask every secondary's kept model for its part of the validation and test rows, once.

        Args:
            config: The federation file.
            tables: Every party's table by name, as in training.
            models: Every party's model by name.
            device: Where models compute.

        Reveals:
            Nothing leaves the process, which holds everybody's table.
        """
        self._config = config
        table, model = tables[config.primary.name], models[config.primary.name]
        split, facts = run_facts(config, table)
        plan = plan_prediction(config, facts_of(facts.rows), noise_share_std=model.noise_share_std)
        spec = prediction_spec(config, model)
        link = Linker(spec, keys_of(spec.keys, table))
        self._rows = np.union1d(split.validation, split.test)
        self._parts = {
            party.name: self._part(
                plan,
                build_secondary(
                    plan,
                    party,
                    tables[party.name],
                    link(
                        keys_of(spec.keys, tables[party.name]),
                        similarity_scale=models[party.name].similarity_scale,
                    ),
                    # In memory: nothing leaves this process, and no table's ledger is charged.
                    Ledger(
                        None,
                        party=party.name,
                        plan=plan.releases,
                        noise_share_std=plan.noise_share_std,
                    ),
                    device=device,
                    kept_bottom=bottom_at_work(
                        plan, party, tables[party.name], device=device, model=models[party.name]
                    ),
                ),
            )
            for party in config.secondaries
        }
        self.data = primary_data(config, table, split, link.primary, device=device)
        self.alone = BaselineOfRun(config, table, model, self.data)
        self._at_work = at_work(config, model, table, link.primary, device=device)

    def gone(self) -> Gone:
        """Return the values of coalitions by the kept models."""
        return Gone(self.alone, self, everybody=frozenset(self._parts))

    def outputs(self, coalition: Coalition, rows: Int64[np.ndarray, " some"]) -> Tensor:
        """Return the kept joint model's outputs for the average over these partners."""
        ranks = self._config.ranks
        ordered = sorted(coalition, key=ranks.__getitem__)
        self._at_work.exchange = _SomeRows(
            torch.stack([self._parts[one] for one in ordered]).mean(dim=0),
            ranks=tuple(ranks[one] for one in ordered),
            rounds=RoundCounter(),
            device=self.data.features.device,
        ).of(self._rows)
        return self._at_work.predict(rows, "test")

    def _part(self, plan: RunPlan, secondary: Secondary) -> Float[Tensor, "known positions width"]:
        """Return what one secondary says of the rows, without noise: there is none."""
        parts = consecutive_batches(self._rows, batch_size=plan.config.training.batch_size)
        ranks = ranks_of(plan)
        found = []
        for number, rows in enumerate(parts, 1):
            asked = RoundPlan(round_number=number, rows=rows, active=ranks, purpose="predict")
            words = secondary.answer(asked)
            found.append(plan.cut.decode(words, rows=len(rows), active=1))
        secondary.close()
        return torch.cat(found)


class _SomeRows(ReleasedRows):
    """Averages of some rows, asked for by the ids that these have among all."""

    def of(self, rows: Int64[np.ndarray, " known"]) -> "_SomeRows":
        """Take the ids of the rows, ascending."""
        self._known = rows
        return self

    def release(self, plan: RoundPlan) -> Float[Tensor, "batch positions width"]:
        """Return the stored averages of the rows.

        Reveals:
            Nothing: nobody is asked.
        """
        return super().release(replace(plan, rows=np.searchsorted(self._known, plan.rows)))


# A frozen run in blocks: what was released says what every set of partners is worth.

CACHE: Final = "contribution"
"""The primary's folder with what was trained again, so that a measurement that is cut goes on."""


class Releases:
    """A frozen run whose every released number is one secondary's."""

    def __init__(
        self,
        config: FederationConfig,
        table: PartyTable,
        model: KeptModel,
        released: Float[Tensor, "rows positions width"],
        *,
        device: torch.device,
    ) -> None:
        """Make it.

        Args:
            config: The federation file.
            table: The primary's table, as in training.
            model: The primary's.
            released: What was released, of all rows.
            device: Where top models compute.
        """
        self._config, self._table, self._model = config, table, model
        self._released, self._device = released, device
        split, facts = run_facts(config, table)
        self._plan = plan_run(config, facts)
        spec = prediction_spec(config, model)
        keys = keys_of(spec.keys, table)
        linked = LinkedPrimary(keys=model_keys(key_scaler(spec, keys), keys))
        self.data = primary_data(config, table, split, linked, device=device)
        self.alone = BaselineOfRun(config, table, model, self.data)
        self._at_work = at_work(config, model, table, linked, device=device)

    def outputs(self, coalition: Coalition, rows: Int64[np.ndarray, " some"]) -> Tensor:
        """Return the kept joint model's outputs, with zeros for the partners that are gone."""
        self._at_work.exchange = self._exchange(coalition)
        return self._at_work.predict(rows, "test")

    def gone(self) -> Gone:
        """Return the values of coalitions by the kept model."""
        return Gone(self.alone, self, everybody=self.everybody)

    @property
    def everybody(self) -> Coalition:
        """All secondaries."""
        return frozenset(party.name for party in self._config.secondaries)

    def again(self, folder: Path) -> Callable[[Coalition], Valued]:
        """Return the values of coalitions by top models that are trained again, on their numbers.

        All else is as in the run: its seed, rows, settings, base, and the rule of who answers. With
        all partners that is the run itself.

        Args:
            folder: The primary's own, of the run. What is trained is kept there.
        """
        base = None
        part = self.alone.part
        if part.base is not None:
            # A named one is fitted by its name again.
            named = self._config.base.estimator != OWN
            fitted = part.base if isinstance(part.base, MarginModel) else None
            own = None if named or fitted is None else fitted.estimator
            base = fit_base(self._config, self._table, self.data, own)
        kept = _KeptOutputs(folder / CACHE, self._model)
        gone = self.gone()

        def value(coalition: Coalition) -> Valued:
            if not coalition or coalition == self.everybody:
                return gone(coalition)
            found = kept.read(coalition)
            if found is None:
                found = self._trained(coalition, base)
                kept.write(coalition, found)
            return found

        return value

    def _trained(self, coalition: Coalition, base: Base | None) -> Valued:
        exchange = self._exchange(coalition)
        top, own = self._at_work.top, None
        if isinstance(top, FittedTop) and top.model is not None:
            named = self._config.top is not None and self._config.top.name != OWN
            own = None if named else top.model.estimator
        primary = build_primary(
            self._plan, self._table, self.data, exchange, observe=unheard, estimator=own
        )
        if base is not None:
            primary.take_base(base.margins)
        primary.train(after_epoch=_nothing)
        primary.restore_best()
        if base is not None:
            decision = primary.decide(self.alone.margins, base_is_alone=base.alone is not None)
            if decision.used == "alone":
                return self.alone.test
        outputs = primary.predict(self.data.split.test, "test")
        return self.alone.valued(outputs, primary.threshold, "joint")

    def _exchange(self, coalition: Coalition) -> ReleasedRows:
        ranks = self._config.ranks
        masked = without_blocks(
            self._released,
            [ranks[one] - 1 for one in self.everybody - coalition],
            blocks=len(ranks_of(self._plan)),
        )
        return ReleasedRows(
            masked, ranks=ranks_of(self._plan), rounds=RoundCounter(), device=self._device
        )


class _KeptOutputs:
    """What was trained again, a file for each set of partners; a damaged one is trained anew."""

    def __init__(self, folder: Path, model: KeptModel) -> None:
        self._folder = folder
        self._of = [model.run, model.digest, __version__]

    def read(self, coalition: Coalition) -> Valued | None:
        """Return what was kept, None if there is nothing."""
        try:
            state = safetensors.torch.load(self._path(coalition).read_bytes())
            return Valued(
                outputs=state["outputs"].numpy(),
                threshold=float(state["threshold"]),
                used="joint" if bool(state["joint"]) else "alone",
            )
        except (OSError, KeyError, ValueError, safetensors.SafetensorError):
            return None

    def write(self, coalition: Coalition, found: Valued) -> None:
        """Keep it, for this user alone.

        Raises:
            StorageError: If the disk takes no more.
        """
        state = {
            "outputs": torch.from_numpy(np.ascontiguousarray(found.outputs)),
            "threshold": torch.tensor(found.threshold, dtype=torch.float64),
            "joint": torch.tensor(found.used == "joint"),
        }
        files.write_bytes(self._path(coalition), safetensors.torch.save(state))

    def _path(self, coalition: Coalition) -> Path:
        text = json.dumps([*self._of, sorted(coalition)])
        digest = hashlib.sha256(text.encode()).hexdigest()
        return self._folder / f"{digest[:32]}.safetensors"


def _nothing(_mark: EpochMark) -> None:
    """Keep no checkpoint: a set of partners is trained from its beginning."""


# What a run's model answers with fewer partners, and what that is worth on its test rows.

NEVER_FEWER: Final = (
    "the model was trained without party dropout and has never met an average over fewer "
    "secondaries; with model.party_dropout it would have"
)
"""What there is to say of an average over fewer secondaries than in training."""


def worth_without(
    run: KeptRun, absent: Sequence[str], *, observe: Observer = unheard
) -> dict[str, Any] | None:
    """Return what the kept model is worth on the run's test rows without some partners.

    Args:
        run: The run.
        absent: Names of those that are gone.
        observe: Hears that it is measured.

    Returns:
        ``used``, who answers then (the primary alone where that is better on validation rows);
        ``threshold`` of the primary alone; ``metrics``, each with ``value`` and ``interval``. From
        ``contribution.json``, or measured now where that is free; None where it is neither.

    Reveals:
        Nothing: nobody is asked, and no ledger is charged.
    """
    config = run.config
    model = run.model(config.primary.name)
    present = {party.name for party in config.secondaries} - set(absent)
    kept = read_contribution(run.folder, run=model.run)
    if kept is not None:
        for one in kept["gone"]["values"]:
            if set(one["partners"]) == present:
                found = {name: one[name] for name in ("used", "metrics")}
                return {**found, "threshold": kept["threshold"]}
    try:
        source = source_of(run, model, read_figures(run.folder))
    except (ConfigError, DataError, PrivacyError):
        # It would take releases, or what it takes is not here.
        return None
    observe(Stage(text="measuring the model without them"))
    valued = source.gone()(frozenset(present))
    figures = measure(valued, source.data.head, source.alone.tested, seed=config.federation.seed)
    return {
        "used": valued.used,
        "metrics": {name: figure.as_json() for name, figure in figures.items()},
        "threshold": source.alone.threshold,
    }


def source_of(run: KeptRun, model: KeptModel, figures: Mapping[str, Any]) -> Releases | KeptModels:
    """Return where outputs with fewer partners come from.

    Raises:
        ConfigError: Like DataError and PrivacyError, if they cannot be had for nothing.
    """
    if _in_blocks(run.config):
        return _releases(run, model)
    return _kept_models(run, figures)


def _in_blocks(config: FederationConfig) -> bool:
    if config.privacy.encoder != "frozen":
        return False
    return len(config.secondaries) == 1 or in_blocks(config)


def _releases(run: KeptRun, model: KeptModel) -> Releases:
    config = run.config
    if config.training.rows == "aligned":
        raise ConfigError(
            'training.rows = "aligned": which rows were trained on is not kept, so nothing can be '
            'trained again; run with training.rows = "all"'
        )
    if config.family.needs_similarities(config.model):
        raise ConfigError(
            f"model.family: {config.family.name!r} reads similarities, which are not kept; the "
            f"value of partners can be measured of families that read releases alone"
        )
    table = (run.tables or {}).get(config.primary.name)
    if table is None:
        table = read_party(config, config.primary, run.data_root)
    frame = released_table(config, run.folder, table)
    shape = frame.attrs[METADATA]["shape"]
    numbers = frame.iloc[:, -int(np.prod(shape)) :].to_numpy(dtype=np.float32, copy=True)
    return Releases(
        config,
        table,
        model,
        torch.from_numpy(numbers.reshape(len(frame), *shape)),
        device=device_named(run.device),
    )


def _kept_models(run: KeptRun, figures: Mapping[str, Any]) -> KeptModels:
    config = run.config
    if config.privacy.mechanism != "none":
        raise PrivacyError(_what_it_would_take(run, figures))
    if figures["mode"] != "simulated":
        raise ConfigError(
            "run: its parties have processes and tables of their own; simulate the same file, or "
            'take privacy.encoder = "frozen" with encoder.layout = "blocks", of which everything '
            "lies at the primary"
        )
    similarities = link_spec(config).similarities
    if similarities is not None and (similarities.noise or similarities.tau is not None):
        raise ConfigError(
            "linkage.similarity_noise, similarity_tau: the noise of similarities is drawn once and "
            "not kept, so the run's model cannot be measured again; simulate it with "
            "similarity_noise = 0"
        )
    tables = run.tables or {
        party.name: read_party(config, party, run.data_root) for party in config.table_parties
    }
    models = {party.name: run.model(party.name) for party in config.table_parties}
    return KeptModels(config, tables, models, device=device_named(run.device))


def _what_it_would_take(run: KeptRun, figures: Mapping[str, Any]) -> str:
    config, rows = run.config, figures["evaluation"]["rows"]
    passes = len(config.secondaries)
    model = run.model(config.primary.name)
    facts = RunFacts(
        rows=rows,
        train_rows=0,
        validation_rows=0,
        test_rows=0,
        predicts=True,
        predicted_rows=rows,
    )
    plan = plan_prediction(config, facts, noise_share_std=model.noise_share_std)
    once = plan.releases
    several = replace(
        once,
        min_active=max(1, passes - 1),
        rounds=passes * once.rounds,
        row_releases=passes * once.row_releases,
        releases_per_row=passes,
    )
    epsilon = several.epsilon(plan.noise_share_std)
    own_numbers = '[encoder] layout = "blocks"'
    if config.encoder is not None and config.encoder.method == "votes":
        own_numbers = f'{own_numbers} (method = "principal"; votes share their numbers)'
    return (
        f"contribution: this run's releases are sums over the secondaries, and leaving out each "
        f"of {passes} would take {passes} more releases of the {rows} test rows, epsilon "
        f'{epsilon:.3g} beside the run\'s; a run with privacy.encoder = "frozen" and '
        f"{own_numbers} has the answer in what it releases, for nothing"
    )
