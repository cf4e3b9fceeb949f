"""A frozen run in blocks: what was released says what every set of partners is worth."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Final

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
from securevfl.data.tables import PartyTable
from securevfl.federation.base import Base, fit_base
from securevfl.federation.build import (
    build_primary,
    primary_data,
)
from securevfl.federation.exchange_of_present_blocks import without_blocks
from securevfl.federation.exchange_of_released_rows import ReleasedRows
from securevfl.federation.kept_model import KeptModel
from securevfl.federation.rounds import EpochMark, RoundCounter
from securevfl.federation.run_plan import plan_run, run_facts
from securevfl.linkage.linked import LinkedPrimary
from securevfl.linking.keys import key_scaler, keys_of, model_keys
from securevfl.models.alone.margins import MarginModel
from securevfl.models.contribution import Coalition, Valued
from securevfl.models.fitted_top import FittedTop
from securevfl.runtime.coalitions import Alone, Gone, at_work, ranks_of
from securevfl.runtime.predicting import prediction_spec
from securevfl.version import __version__

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
        self.alone = Alone(config, table, model, self.data)
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
