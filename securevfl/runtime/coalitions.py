"""What a run's model is worth with some of its partners: by the kept model, and trained again.

Neither asks anybody. A frozen run whose secondaries write into coordinates of their own has
released each one's numbers by themselves, and a simulation holds all tables.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

import numpy as np
import safetensors
import safetensors.torch
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from securevfl.config.base import OWN
from securevfl.config.federation import FederationConfig
from securevfl.core import files
from securevfl.core.progress import unheard
from securevfl.data.rows import consecutive_batches
from securevfl.data.tables import PartyTable
from securevfl.federation.base import fit_base
from securevfl.federation.build import (
    bottom_at_work,
    build_primary,
    build_secondary,
    primary_data,
)
from securevfl.federation.exchange_of_present_blocks import without_blocks
from securevfl.federation.exchange_of_released_rows import ReleasedRows
from securevfl.federation.kept_model import KeptModel
from securevfl.federation.ledger import Ledger
from securevfl.federation.own_numbers import own_inputs
from securevfl.federation.primary import PrimaryData
from securevfl.federation.rounds import EpochMark, RoundCounter, RoundPlan
from securevfl.federation.run_plan import RunFacts, RunPlan, plan_prediction, plan_run, run_facts
from securevfl.federation.secondary import Secondary
from securevfl.federation.top_model import TopModel
from securevfl.linkage.linked import LinkedPrimary
from securevfl.linking.in_process import Linker
from securevfl.linking.keys import key_scaler, keys_of, model_keys
from securevfl.models.alone.choice import fit_alone
from securevfl.models.alone.rule import Used, who_answers
from securevfl.models.contribution import Coalition, Valued
from securevfl.models.fitted_top import FittedTop
from securevfl.models.task_metrics import Targets
from securevfl.models.tasks import on_cpu
from securevfl.runtime.predicting import Request, kept_top, prediction_spec, top_model
from securevfl.version import __version__

CACHE: Final = "contribution"
"""The primary's folder with what was trained again, so that a measurement that is cut goes on."""


@runtime_checkable
class Partners(Protocol):
    """A run's outputs with some of its partners."""

    def outputs(self, coalition: Coalition, rows: Int64[np.ndarray, " some"]) -> Tensor:
        """Return the kept joint model's outputs for rows, with these partners alone."""
        ...


class Alone:
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
            self.margins[split.validation], self.targets(split.validation)
        )

    def targets(self, rows: Int64[np.ndarray, " some"]) -> Tensor:
        """Return the labels of rows."""
        return self.data.targets[torch.as_tensor(rows, device=self.data.targets.device)]

    @property
    def tested(self) -> Targets:
        """The test rows' labels, as metrics take them."""
        rows = self.data.split.test
        return on_cpu(self.margins[rows], self.targets(rows))[1]

    @property
    def test(self) -> Valued:
        """The primary alone on the test rows."""
        return self.valued(self.margins[self.data.split.test], self.threshold, "alone")

    def valued(self, outputs: Tensor, threshold: float, used: Used) -> Valued:
        """Return outputs for the test rows as they are compared."""
        out, _ = on_cpu(outputs, self.targets(self.data.split.test))
        return Valued(outputs=out, threshold=threshold, used=used)


class Gone:
    """Values of coalitions by the model that was kept: the others are gone tomorrow."""

    def __init__(self, alone: Alone, partners: Partners, *, everybody: Coalition) -> None:
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
                alone=alone.margins[split.validation],
                targets=alone.targets(split.validation),
            )
            if used == "alone":
                return alone.test
        outputs = self._partners.outputs(coalition, split.test)
        return alone.valued(outputs, part.threshold, "joint")


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
        self.alone = Alone(config, table, model, self.data)
        self._at_work = _at_work(config, model, table, linked, device=device)

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
        margins = None
        part = self.alone.part
        if part.base is not None:
            own = part.base.estimator if self._config.base.estimator == OWN else None
            fitted = fit_base(self._config, self._table, self.data, own)
            margins = torch.from_numpy(fitted.margins).to(self._device)
        kept = _KeptOutputs(folder / CACHE, self._model)
        gone = self.gone()

        def value(coalition: Coalition) -> Valued:
            if not coalition or coalition == self.everybody:
                return gone(coalition)
            found = kept.read(coalition)
            if found is None:
                found = self._trained(coalition, margins)
                kept.write(coalition, found)
            return found

        return value

    def _trained(self, coalition: Coalition, base: Tensor | None) -> Valued:
        exchange = self._exchange(coalition)
        top, own = self._at_work.top, None
        if isinstance(top, FittedTop) and top.model is not None:
            named = self._config.top is not None and self._config.top.name != OWN
            own = None if named else top.model.estimator
        primary = build_primary(
            self._plan, self._table, self.data, exchange, observe=unheard, estimator=own
        )
        if base is not None:
            primary.take_base(base)
        primary.train(after_epoch=_nothing)
        primary.restore_best()
        if base is not None and primary.decide(self.alone.margins).used == "alone":
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


def ranks_of(plan: RunPlan) -> tuple[int, ...]:
    """Return the ranks of all secondaries."""
    return tuple(sorted(plan.secondaries))


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
        plan = plan_prediction(config, _facts(facts.rows), noise_share_std=model.noise_share_std)
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
        self.alone = Alone(config, table, model, self.data)
        self._at_work = _at_work(config, model, table, link.primary, device=device)

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


def _at_work(
    config: FederationConfig,
    model: KeptModel,
    table: PartyTable,
    linked: LinkedPrimary,
    *,
    device: torch.device,
) -> TopModel:
    """Return the kept half of the primary with all rows of training; it has no exchange yet."""
    rows = table.num_rows
    facts = _facts(rows)
    keys = keys_of(prediction_spec(config, model).keys, table)
    nobody = ReleasedRows(torch.empty(0, 1, 1), ranks=(), rounds=RoundCounter(), device=device)
    return top_model(
        config,
        model,
        kept_top(config, model, table, device=device),
        table,
        linked,
        nobody,
        request=Request(facts=facts, keys=keys),
        device=device,
    )


def _facts(rows: int) -> RunFacts:
    """Return what a session is that asks for predictions of so many rows."""
    return RunFacts(
        rows=rows, train_rows=0, validation_rows=0, test_rows=0, predicts=True, predicted_rows=rows
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
