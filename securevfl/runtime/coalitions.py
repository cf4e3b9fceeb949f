"""What a kept model is worth with some of its partners, without asking anybody."""

from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from securevfl.config.federation import FederationConfig
from securevfl.data.tables import PartyTable
from securevfl.federation.exchange_of_released_rows import ReleasedRows
from securevfl.federation.kept_model import KeptModel
from securevfl.federation.own_numbers import own_inputs
from securevfl.federation.primary import PrimaryData
from securevfl.federation.rounds import RoundCounter
from securevfl.federation.run_plan import RunFacts, RunPlan
from securevfl.federation.top_model import TopModel
from securevfl.linkage.linked import LinkedPrimary
from securevfl.linking.keys import keys_of
from securevfl.models.alone.choice import fit_alone
from securevfl.models.alone.rule import Used, who_answers
from securevfl.models.contribution import Coalition, Valued
from securevfl.models.task_metrics import Targets
from securevfl.models.tasks import on_cpu
from securevfl.runtime.predicting import Request, kept_top, prediction_spec, top_model


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
