"""A simulation that promises nothing: its kept models say what every set of partners is worth."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from securevfl.config.federation import FederationConfig
from securevfl.data.rows import consecutive_batches
from securevfl.data.tables import PartyTable
from securevfl.federation.build import (
    bottom_at_work,
    build_secondary,
    primary_data,
)
from securevfl.federation.exchange_of_released_rows import ReleasedRows
from securevfl.federation.kept_model import KeptModel
from securevfl.federation.ledger import Ledger
from securevfl.federation.rounds import RoundCounter, RoundPlan
from securevfl.federation.run_plan import RunPlan, plan_prediction, run_facts
from securevfl.federation.secondary import Secondary
from securevfl.linking.in_process import Linker
from securevfl.linking.keys import keys_of
from securevfl.models.contribution import Coalition
from securevfl.runtime.coalitions import Alone, Gone, at_work, facts_of, ranks_of
from securevfl.runtime.predicting import prediction_spec


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
        self.alone = Alone(config, table, model, self.data)
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
