"""The model of a run with some of its partners alone, at no cost.

Answers come from rows that the primary has kept, or from a simulation without noise: no party is
asked, nothing is sent and no ledger is charged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from securevfl.config.federation import FederationConfig, link_spec
from securevfl.core.errors import ConfigError, DataError, PrivacyError
from securevfl.core.progress import Observer, Stage, unheard
from securevfl.data.tables import PartyTable, RowSplit, consecutive_batches
from securevfl.federation import run_plan
from securevfl.federation.base import own_inputs, train_alone
from securevfl.federation.build import primary_data
from securevfl.federation.messages import RoundPlan
from securevfl.federation.rounds.exchanges import ReleasedRows, without_blocks
from securevfl.federation.rounds.primary import PrimaryData
from securevfl.federation.rounds.secondary import Secondary
from securevfl.federation.run_plan import prediction_facts, run_facts
from securevfl.federation.saved_model import SavedModel
from securevfl.federation.session.peers import ReplyHere
from securevfl.ledger.ledger import Ledger
from securevfl.linkage.spec import LinkedPrimary
from securevfl.linkage.stage.linking import Linker
from securevfl.linkage.stage.party_keys import key_scaler, keys_of, model_keys
from securevfl.models import task_metrics
from securevfl.models.alone.choice import ERRORS_OF_CHOOSING_ROWS, Used, who_answers
from securevfl.models.tasks import TaskHead, as_logit, on_cpu
from securevfl.runtime import prediction_session
from securevfl.runtime.released_table import METADATA, SavedRun, released_table
from securevfl.runtime.run_folder import CONTRIBUTION, read_figures, read_measured
from securevfl.runtime.run_options import device_named

Coalition = frozenset[str]
"""Names of the partners that take part."""

_LOSS: Final = {"regression": "mse", "binary": "log_loss", "multiclass": "log_loss"}
"""Training loss by task: mean squared error in the label's unit squared, or logarithmic loss in
nats."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CoalitionAnswer:
    """Outputs for the test rows with one coalition."""

    outputs: task_metrics.Outputs
    """As the task's head takes them."""
    threshold: float
    """Probability above which a row counts as the second class, of a binary task."""
    used: Used = "joint"
    """Model that answers: the joint one, or the primary's local one alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A figure of the test rows with its bootstrap interval."""

    value: float
    interval: task_metrics.Interval | None
    """From paired resamples of the test rows; None where too few of them define it."""
    standard_error: float | None = None
    """Standard error over sampled permutations, next to the interval; None of exact figures."""

    def as_json(self) -> dict[str, Any]:
        """Return the fields by name, without those that are undefined."""
        figures: dict[str, Any] = {
            "value": self.value,
            "interval": None if self.interval is None else list(self.interval),
        }
        if self.standard_error is not None:
            figures["standard_error"] = self.standard_error
        return figures


Figures = Mapping[str, Estimate]
"""By metric."""


def metric_functions(
    answer: CoalitionAnswer, head: TaskHead, targets: task_metrics.Targets
) -> dict[str, task_metrics.Resampled]:
    """Return the metric of training and the loss of an answer, as functions of rows' weights.

    Args:
        answer: Of the test rows.
        head: The task.
        targets: Labels of the test rows, as metrics take them.
    """
    cut = as_logit(answer.threshold)
    measures = task_metrics.resampled_metrics(head.task, answer.outputs, targets, cut=cut)
    functions: dict[str, task_metrics.Resampled] = {}
    for name in dict.fromkeys((head.metric_name, _LOSS[head.task])):
        if name == "mse":
            functions[name] = _times(_square_metric(measures["rmse"]), head.label_deviation**2)
        else:
            _, unit = head.in_label_units(name, (0.0, 1.0)) or (0.0, 1.0)
            functions[name] = _times(measures[name], unit)
    return functions


def draws_of(
    functions: Mapping[str, task_metrics.Resampled], head: TaskHead, *, rows: int, seed: int
) -> dict[str, Float64[np.ndarray, " draws"]]:
    """Return metrics on resamples of the test rows, the same resamples for all of them."""
    return task_metrics.bootstrap_draws(
        functions,
        rows=rows,
        resamples=task_metrics.resamples_for(rows, head.outputs),
        seed=seed,
    )


def _times(metric: task_metrics.Resampled, factor: float) -> task_metrics.Resampled:
    return lambda weights: factor * metric(weights)


def _square_metric(metric: task_metrics.Resampled) -> task_metrics.Resampled:
    def measure(weights: task_metrics.Weights) -> Float64[np.ndarray, " resamples"]:
        return np.square(metric(weights))

    return measure


def measure(
    answer: CoalitionAnswer, head: TaskHead, targets: task_metrics.Targets, *, seed: int
) -> Figures:
    """Return the metrics of one answer with intervals of resampled test rows."""
    functions, rows = metric_functions(answer, head, targets), len(targets)
    draws = draws_of(functions, head, rows=rows, seed=seed)
    return {
        name: Estimate(
            value=float(of(np.ones((1, rows)))[0]),
            interval=task_metrics.percentile_interval(draws[name]),
        )
        for name, of in functions.items()
    }


class BaselineOfRun:
    """The primary's local model on the rows of training, to compare a saved model with."""

    def __init__(
        self, config: FederationConfig, table: PartyTable, model: SavedModel, data: PrimaryData
    ) -> None:
        self.part, self.data = model.primary_part, data
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
    def test_targets(self) -> task_metrics.Targets:
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
        self,
        config: FederationConfig,
        table: PartyTable,
        model: SavedModel,
        linked: LinkedPrimary,
        split: RowSplit,
        *,
        device: torch.device,
    ) -> None:
        """Build the primary's half of the network with all rows of training.

        Args:
            config: The federation file.
            table: The primary's table, as in training.
            model: The primary's.
            linked: Links with all secondaries; a round reads the similarities of its active ones.
            split: Of the rows.
            device: Where models compute.
        """
        self.config, self.table, self.model = config, table, model
        self.data = primary_data(config, table, split, linked, device=device)
        self.alone = BaselineOfRun(config, table, model, self.data)
        self.everybody = frozenset(party.name for party in config.secondaries)
        rows = table.num_rows
        self.top = prediction_session.top_model(
            config,
            model,
            prediction_session.kept_top(config, model, table, device=device),
            table,
            linked,
            self._stored_rows(torch.empty(0, 1, 1), self.everybody),
            request=prediction_session.Request(
                facts=prediction_facts(rows=rows, predicted_rows=rows),
                keys=keys_of(prediction_session.prediction_spec(config, model).keys, table),
            ),
            device=device,
        )
        """The primary's half of the network; :meth:`exchange` gives it a coalition's averages."""

    def _stored_rows(
        self, averages: Float[Tensor, "rows positions width"], coalition: Coalition
    ) -> ReleasedRows:
        return ReleasedRows(
            averages,
            ranks=tuple(sorted(self.config.ranks[name] for name in coalition)),
            rounds=run_plan.RoundCounter(),
            device=self.data.features.device,
        )

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
                errors=ERRORS_OF_CHOOSING_ROWS if self.config.top is None else 1.0,
            )
            if used == "alone":
                return alone.test
        return alone.answer(self.outputs(coalition, split.test), part.threshold, "joint")


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
        table, model = tables[config.primary.name], models[config.primary.name]
        split, facts = run_facts(config, table)
        plan = run_plan.plan_prediction(
            config,
            prediction_facts(rows=facts.rows, predicted_rows=facts.rows),
            noise_share_std=model.noise_share_std,
        )
        spec = prediction_session.prediction_spec(config, model)
        link = Linker(spec, keys_of(spec.keys, table))
        linked = {
            party.name: link(
                keys_of(spec.keys, tables[party.name]),
                similarity_scale=models[party.name].similarity_scale,
            )
            for party in config.secondaries
        }
        super().__init__(config, table, model, link.primary, split, device=device)
        asked = np.union1d(split.validation, split.test)
        self._parts = {}
        for party in config.secondaries:
            kept = prediction_session.KeptSecondary(
                party, tables[party.name], models[party.name], device=device
            )
            # In memory: nothing leaves this process, and no table's ledger is charged.
            ledger = Ledger(
                None,
                party=party.name,
                plan=plan.releases,
                noise_share_std=plan.noise_share_std,
            )
            secondary = kept.with_links(plan, linked[party.name], ledger)
            self._parts[party.name] = _representations(plan, secondary, asked)
            secondary.close()

    def exchange(self, coalition: Coalition) -> ReleasedRows:
        """Return the average of these partners' representations."""
        ordered = sorted(coalition, key=self.config.ranks.__getitem__)
        averages = torch.stack([self._parts[name] for name in ordered]).mean(dim=0)
        return self._stored_rows(averages, coalition)


def _representations(
    plan: run_plan.RunPlan, secondary: Secondary, asked: Int64[np.ndarray, " asked"]
) -> Float[Tensor, "rows positions width"]:
    """Return one secondary's representations of the rows that are asked for, zeros of others.

    There is no noise.
    """
    representations = torch.zeros((plan.facts.rows, *plan.cut.shape))
    parts = consecutive_batches(asked, batch_size=plan.config.training.batch_size)
    for number, rows in enumerate(parts, 1):
        asked_round = RoundPlan(
            round_number=number,
            rows=rows,
            active=tuple(sorted(plan.secondaries)),
            purpose="predict",
        )
        reply = ReplyHere()
        secondary.hear_round(asked_round, reply)
        (words,) = reply.words
        decoded = plan.cut.decode(
            words, rows=len(rows), active=(secondary.name,), round_number=number
        )
        representations[rows] = decoded.cpu()
    return representations


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
        self._released = released
        split, facts = run_facts(config, table)
        self.plan = run_plan.plan_run(config, facts)
        spec = prediction_session.prediction_spec(config, model)
        keys = keys_of(spec.keys, table)
        linked = LinkedPrimary(keys=model_keys(key_scaler(spec, keys), keys))
        super().__init__(config, table, model, linked, split, device=device)

    def exchange(self, coalition: Coalition) -> ReleasedRows:
        """Return the released averages, with zeros in the blocks of absent partners."""
        absent = [self.config.ranks[name] - 1 for name in self.everybody - coalition]
        masked = without_blocks(self._released, absent, blocks=len(self.everybody))
        return self._stored_rows(masked, self.everybody)


NEVER_FEWER: Final = (
    "the model was trained without party dropout and has never met an average over fewer "
    "secondaries; with model.party_dropout it would have"
)
"""Remark on an average over fewer secondaries than in training."""


def worth_without(
    run: SavedRun, absent: Sequence[str], *, observe: Observer = unheard
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
    kept = read_measured(run.folder, CONTRIBUTION, run=model.run)
    if kept is not None:
        for entry in kept["gone"]["values"]:
            if set(entry["partners"]) == present:
                measured_figures = {name: entry[name] for name in ("used", "metrics")}
                return {**measured_figures, "threshold": kept["threshold"]}
    try:
        source = partners_of(run, model, read_figures(run.folder))
    except (ConfigError, DataError, PrivacyError):
        # It would take releases, or what it takes is not here.
        return None
    observe(Stage(text="measuring the model without them"))
    answer = source.answer(frozenset(present))
    figures = measure(
        answer, source.data.head, source.alone.test_targets, seed=config.federation.seed
    )
    return {
        "used": answer.used,
        "metrics": {name: figure.as_json() for name, figure in figures.items()},
        "threshold": source.alone.threshold,
    }


def partners_of(
    run: SavedRun, model: SavedModel, figures: Mapping[str, Any]
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
    if config.regime.learns:
        return False
    return len(config.secondaries) == 1 or config.in_blocks


def _releases(run: SavedRun, model: SavedModel) -> BlockReleases:
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
    frame = released_table(run)
    shape = frame.attrs[METADATA]["shape"]
    numbers = frame.iloc[:, -int(np.prod(shape)) :].to_numpy(dtype=np.float32, copy=True)
    return BlockReleases(
        config,
        run.table(config.primary),
        model,
        torch.from_numpy(numbers.reshape(len(frame), *shape)),
        device=device_named(run.device),
    )


def _kept_models(run: SavedRun, figures: Mapping[str, Any]) -> SavedModels:
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
    tables = {party.name: run.table(party) for party in config.table_parties}
    models = {party.name: run.model(party.name) for party in config.table_parties}
    return SavedModels(config, tables, models, device=device_named(run.device))
