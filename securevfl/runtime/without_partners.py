"""Evaluation of a saved model without some of its partners.

Nobody is asked and no ledger is charged: the answer lies in the released rows of a frozen run in
blocks, or in the saved models of a simulation without noise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from securevfl.config.federation import FederationConfig, link_spec
from securevfl.core.errors import ConfigError, DataError, PrivacyError
from securevfl.core.progress import Observer, Stage, unheard
from securevfl.data.rows import consecutive_batches
from securevfl.data.tables import PartyTable
from securevfl.federation.base import own_inputs, train_alone
from securevfl.federation.build import bottom_at_work, build_secondary, primary_data
from securevfl.federation.rounds.exchanges import ReleasedRows, without_blocks
from securevfl.federation.rounds.primary import PrimaryData, TopModel
from securevfl.federation.rounds.secondary import Secondary
from securevfl.federation.run_plan import (
    RoundCounter,
    RoundPlan,
    RunPlan,
    plan_prediction,
    plan_run,
    prediction_facts,
    run_facts,
)
from securevfl.federation.saved_model import SavedModel
from securevfl.federation.session.membership import in_blocks
from securevfl.ledger.ledger import Ledger
from securevfl.linkage.spec import LinkedPrimary
from securevfl.linkage.stage.linking import Linker
from securevfl.linkage.stage.party_keys import key_scaler, keys_of, model_keys
from securevfl.models.alone.choice import Used, who_answers
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
from securevfl.runtime.released_table import METADATA, released_table
from securevfl.runtime.run_folder import KeptRun, read_contribution, read_figures
from securevfl.runtime.run_options import device_named
from securevfl.runtime.run_tables import read_party

# Metrics of one or several models on the same test rows, with paired bootstrap intervals.

Coalition = frozenset[str]
"""Names of the partners that take part."""

_LOSS: Final = {"regression": "mse", "binary": "log_loss", "multiclass": "log_loss"}
"""Training loss by task: mean squared error in the label's unit squared, or logarithmic loss in
nats."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CoalitionAnswer:
    """Outputs for the test rows with one coalition."""

    outputs: Outputs
    """As the task's head takes them."""
    threshold: float
    """Probability above which a row counts as the second class, of a binary task."""
    used: Used = "joint"
    """Whether the joint model answers, or the primary's local model alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A figure of the test rows with its bootstrap interval."""

    value: float
    interval: Interval | None
    """From paired resamples of the test rows; None where too few of them define it."""
    standard_error: float | None = None
    """Of sampled permutations, in addition to the interval; None of exact figures."""

    def as_json(self) -> dict[str, Any]:
        """Return the fields by name, without those that are undefined."""
        found: dict[str, Any] = {
            "value": self.value,
            "interval": None if self.interval is None else list(self.interval),
        }
        if self.standard_error is not None:
            found["standard_error"] = self.standard_error
        return found


Figures = Mapping[str, Estimate]
"""By metric."""


class PairedMetrics:
    """Metrics of every coalition, on the test rows and on each resample of them.

    Each resample gives all coalitions one value, so intervals of any linear combination are paired
    by rows.
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
            answers: By coalition.
            head: The task.
            targets: Labels of the test rows, as metrics take them.
            seed: Of resamples.
        """
        loss = _LOSS[head.task]
        self.names = tuple(dict.fromkeys((head.metric_name, loss)))
        self.places = {one: place for place, one in enumerate(answers)}
        higher = {one.name: one.higher_is_better for one in TASK_METRICS[head.task]}
        self.signs = {name: 1.0 if higher.get(name) else -1.0 for name in self.names}
        units = {name: head.in_label_units(name, (0.0, 1.0)) for name in higher}
        deviation = head.label_deviation
        functions: dict[str, Resampled] = {}
        for place, one in enumerate(answers.values()):
            metrics = resampled_metrics(
                head.task, one.outputs, targets, cut=as_logit(one.threshold)
            )
            for name in self.names:
                if name == "mse":
                    functions[f"{place} {name}"] = _times(_squared(metrics["rmse"]), deviation**2)
                    continue
                unit = units[name]
                assert unit is not None, "an interval was given"
                functions[f"{place} {name}"] = _times(metrics[name], unit[1])
        rows = len(targets)
        once = np.ones((1, rows))
        self.values = self._table({name: of(once) for name, of in functions.items()})
        self.draws = self._table(
            bootstrap_draws(
                functions, rows=rows, resamples=resamples_for(rows, head.outputs), seed=seed
            )
        )

    def _table(
        self, found: Mapping[str, Float64[np.ndarray, " draws"]]
    ) -> dict[str, Float64[np.ndarray, "coalitions draws"]]:
        return {
            name: np.stack([found[f"{place} {name}"] for place in self.places.values()])
            for name in self.names
        }

    def of(self, coalition: Coalition) -> Figures:
        """Return the metrics of a coalition with intervals."""
        place = self.places[coalition]
        return {
            name: Estimate(
                value=float(self.values[name][place, 0]),
                interval=percentile_interval(self.draws[name][place]),
            )
            for name in self.names
        }


def _times(metric: Resampled, factor: float) -> Resampled:
    return lambda weights: factor * metric(weights)


def _squared(metric: Resampled) -> Resampled:
    def measure(weights: Weights) -> Float64[np.ndarray, " resamples"]:
        return np.square(metric(weights))

    return measure


def measure(answer: CoalitionAnswer, head: TaskHead, targets: Targets, *, seed: int) -> Figures:
    """Return the metrics of one answer with intervals; see :class:`PairedMetrics`."""
    one = Coalition()
    return PairedMetrics({one: answer}, head, targets, seed=seed).of(one)


class BaselineOfRun:
    """The primary's local model on the rows of training, to compare a saved model with."""

    def __init__(
        self, config: FederationConfig, table: PartyTable, model: SavedModel, data: PrimaryData
    ) -> None:
        assert model.primary is not None, "the primary's"
        self.part, self.data = model.primary, data
        self.head, device = data.head, data.features.device
        split = data.split
        alone = self.part.alone
        if alone is None:
            alone = train_alone(config, table, data).best.model
        self.margins = torch.from_numpy(alone.margins(own_inputs(table))).to(device)
        """Outputs of the local model for all rows."""
        self.threshold = self.head.choose_threshold(
            self.outputs(split.validation), self.targets(split.validation)
        )

    def outputs(self, rows: Int64[np.ndarray, " some"]) -> Tensor:
        """Return the local model's outputs for rows."""
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
    def test(self) -> CoalitionAnswer:
        """The local model's answer for the test rows."""
        return self.answer(self.outputs(self.data.split.test), self.threshold, "alone")

    def answer(self, outputs: Tensor, threshold: float, used: Used) -> CoalitionAnswer:
        """Return outputs for the test rows as an answer."""
        out, _ = on_cpu(outputs, self.targets(self.data.split.test))
        return CoalitionAnswer(outputs=out, threshold=threshold, used=used)


class Partners:
    """A run's outputs with some of its partners."""

    def __init__(
        self, data: PrimaryData, alone: BaselineOfRun, top: TopModel, *, everybody: Coalition
    ) -> None:
        self.data = data
        self.alone = alone
        self.everybody = everybody
        self.top = top
        """The primary's half of the network; :meth:`exchange` gives it a coalition's averages."""

    def exchange(self, coalition: Coalition) -> ReleasedRows:
        """Return the stored averages over a coalition."""
        raise NotImplementedError

    def outputs(self, coalition: Coalition, rows: Int64[np.ndarray, " some"]) -> Tensor:
        """Return the saved joint model's outputs for rows, with these partners alone."""
        self.top.exchange = self.exchange(coalition)
        return self.top.predict(rows, "test")

    def answer(self, coalition: Coalition) -> CoalitionAnswer:
        """Return the saved model's answer for the test rows with these partners alone.

        With a base, the primary's local model answers where the joint model does not beat it on the
        validation rows by the rule of the run.
        """
        alone, part = self.alone, self.alone.part
        if not coalition or part.used == "alone":
            return alone.test
        split = self.data.split
        # The run has decided for all of its partners.
        if part.base is not None and coalition != self.everybody:
            used = who_answers(
                alone.head,
                joint=self.outputs(coalition, split.validation),
                alone=alone.outputs(split.validation),
                targets=alone.targets(split.validation),
            )
            if used == "alone":
                return alone.test
        return alone.answer(self.outputs(coalition, split.test), part.threshold, "joint")


def ranks_of(plan: RunPlan) -> tuple[int, ...]:
    """Return the ranks of all secondaries."""
    return tuple(sorted(plan.secondaries))


def saved_top(
    config: FederationConfig,
    model: SavedModel,
    table: PartyTable,
    linked: LinkedPrimary,
    *,
    device: torch.device,
) -> TopModel:
    """Return the primary's saved half of the network with all rows of training.

    It has no exchange yet.

    Args:
        config: The federation file.
        model: The primary's.
        table: Its table, as in training.
        linked: Links with all secondaries; a round reads the similarities of its active ones.
        device: Where it computes.
    """
    rows = table.num_rows
    facts = prediction_facts(rows=rows, predicted_rows=rows)
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


# A simulation without noise: its saved models answer for every coalition.


class SavedModels(Partners):
    """All saved models of a simulation without noise, with every party's table."""

    def __init__(
        self,
        config: FederationConfig,
        tables: Mapping[str, PartyTable],
        models: Mapping[str, SavedModel],
        *,
        device: torch.device,
    ) -> None:
        """Compute every secondary's representations of the validation and test rows, once.

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
        plan = plan_prediction(
            config,
            prediction_facts(rows=facts.rows, predicted_rows=facts.rows),
            noise_share_std=model.noise_share_std,
        )
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
        data = primary_data(config, table, split, link.primary, device=device)
        super().__init__(
            data,
            BaselineOfRun(config, table, model, data),
            saved_top(config, model, table, link.primary, device=device),
            everybody=frozenset(self._parts),
        )

    def exchange(self, coalition: Coalition) -> ReleasedRows:
        """Return the average of these partners' representations."""
        ranks = self._config.ranks
        ordered = sorted(coalition, key=ranks.__getitem__)
        return _SomeRows(
            torch.stack([self._parts[one] for one in ordered]).mean(dim=0),
            ranks=tuple(ranks[one] for one in ordered),
            rounds=RoundCounter(),
            device=self.data.features.device,
        ).of(self._rows)

    def _part(self, plan: RunPlan, secondary: Secondary) -> Float[Tensor, "known positions width"]:
        """Return one secondary's representations of the rows; there is no noise."""
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
            Nothing: no party is asked.
        """
        return super().release(replace(plan, rows=np.searchsorted(self._known, plan.rows)))


# A frozen run in blocks: its released rows answer for every coalition.


class BlockReleases(Partners):
    """A frozen run whose every released number is one secondary's."""

    def __init__(
        self,
        config: FederationConfig,
        table: PartyTable,
        model: SavedModel,
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
        self.config, self.table, self.model = config, table, model
        self._released, self._device = released, device
        split, facts = run_facts(config, table)
        self.plan = plan_run(config, facts)
        spec = prediction_spec(config, model)
        keys = keys_of(spec.keys, table)
        linked = LinkedPrimary(keys=model_keys(key_scaler(spec, keys), keys))
        data = primary_data(config, table, split, linked, device=device)
        super().__init__(
            data,
            BaselineOfRun(config, table, model, data),
            saved_top(config, model, table, linked, device=device),
            everybody=frozenset(party.name for party in config.secondaries),
        )

    def exchange(self, coalition: Coalition) -> ReleasedRows:
        """Return the released averages, with zeros in the blocks of absent partners."""
        ranks = self.config.ranks
        masked = without_blocks(
            self._released,
            [ranks[one] - 1 for one in self.everybody - coalition],
            blocks=len(ranks_of(self.plan)),
        )
        return ReleasedRows(
            masked, ranks=ranks_of(self.plan), rounds=RoundCounter(), device=self._device
        )


# The model of a run without some of its partners, measured on its test rows.

NEVER_FEWER: Final = (
    "the model was trained without party dropout and has never met an average over fewer "
    "secondaries; with model.party_dropout it would have"
)
"""What there is to say of an average over fewer secondaries than in training."""


def worth_without(
    run: KeptRun, absent: Sequence[str], *, observe: Observer = unheard
) -> dict[str, Any] | None:
    """Return the saved model's metrics on the run's test rows without some partners.

    Args:
        run: The run.
        absent: Names of those that are gone.
        observe: Called when it is measured.

    Returns:
        ``used``, who answers then (the primary alone where that is better on validation rows);
        ``threshold`` of the primary alone; ``metrics``, each with ``value`` and ``interval``. From
        ``contribution.json``, or measured now where that is free; None where it is neither.

    Reveals:
        Nothing: no party is asked, and no ledger is charged.
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
        source = partners_of(run, model, read_figures(run.folder))
    except (ConfigError, DataError, PrivacyError):
        # It would take releases, or what it takes is not here.
        return None
    observe(Stage(text="measuring the model without them"))
    answer = source.answer(frozenset(present))
    figures = measure(answer, source.data.head, source.alone.tested, seed=config.federation.seed)
    return {
        "used": answer.used,
        "metrics": {name: figure.as_json() for name, figure in figures.items()},
        "threshold": source.alone.threshold,
    }


def partners_of(
    run: KeptRun, model: SavedModel, figures: Mapping[str, Any]
) -> BlockReleases | SavedModels:
    """Return where outputs with fewer partners come from.

    Raises:
        ConfigError: Like DataError and PrivacyError, if they cannot be had for nothing.
    """
    if answers_in_blocks(run.config):
        return _releases(run, model)
    return _kept_models(run, figures)


def answers_in_blocks(config: FederationConfig) -> bool:
    """Whether a run's releases hold each secondary's numbers apart from the others'."""
    if config.privacy.encoder != "frozen":
        return False
    return len(config.secondaries) == 1 or in_blocks(config)


def _releases(run: KeptRun, model: SavedModel) -> BlockReleases:
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
    return BlockReleases(
        config,
        table,
        model,
        torch.from_numpy(numbers.reshape(len(frame), *shape)),
        device=device_named(run.device),
    )


def _kept_models(run: KeptRun, figures: Mapping[str, Any]) -> SavedModels:
    config = run.config
    if config.privacy.mechanism != "none":
        raise PrivacyError(
            "privacy.mechanism: the value of partners behind noise would take further releases"
        )
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
    return SavedModels(config, tables, models, device=device_named(run.device))
