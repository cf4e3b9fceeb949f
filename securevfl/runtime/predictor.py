"""Requests for predictions of a kept model with all parties in this process."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor, nn

from securevfl.config.federation import FederationConfig
from securevfl.core.progress import Observer, Stage, unheard
from securevfl.data.tables import PartyTable
from securevfl.federation.absence import absent_names, active_without
from securevfl.federation.build import BottomAtWork, bottom_at_work, build_secondary
from securevfl.federation.exchange_in_process import SimulatedExchange
from securevfl.federation.kept_model import FOLDER, load_model
from securevfl.federation.party_files import PartyFiles
from securevfl.federation.prediction_budget import PredictionBudget
from securevfl.federation.rounds import EpochMark
from securevfl.federation.run_plan import plan_prediction
from securevfl.linking.in_process import Linker
from securevfl.linking.keys import keys_of
from securevfl.runtime.charged_exchange import ChargedExchange
from securevfl.runtime.predicting import (
    answered,
    kept_top,
    prediction_spec,
    request_of,
    require_one_model,
    top_model,
    warn_of_few_links,
)
from securevfl.runtime.predictions import Predictions


class Predictor:
    """A trained federation whose parties all share this process, as a simulation's do.

    Ledgers are charged for every request as those of real parties are.
    """

    def __init__(
        self,
        config: FederationConfig,
        run_folder: Path,
        tables: Mapping[str, PartyTable],
        *,
        device: torch.device,
        without: Sequence[str] = (),
    ) -> None:
        """Load the model of every party that is there.

        Args:
            config: The federation file.
            run_folder: Of the run that trained.
            tables: The secondaries' tables, by name, encoded as their models' schemas say.
            device: Where models and noise are computed.
            without: Secondaries that are absent; neither their tables nor their models are needed.

        Raises:
            ConfigError: If a model is missing or damaged, they are of several runs, or too few
                secondaries are left.
        """
        self.active = active_without(config, without)
        self.absent = absent_names(config, self.active)
        self.secondaries = [one for one in config.secondaries if one.name not in self.absent]
        self.config = config
        self.run_folder = run_folder
        self.tables = tables
        self.device = device
        self.models = {
            party.name: load_model(
                run_folder / "parties" / party.name / FOLDER, config, party=party.name
            )
            for party in (config.primary, *self.secondaries)
        }
        self.primary = self.models[config.primary.name]
        for name, model in self.models.items():
            require_one_model(self.primary, model.run, name)

    def predict(
        self,
        new: PartyTable,
        *,
        linkable: Bool[np.ndarray, " rows"] | None = None,
        names: Sequence[Any] | None = None,
        row_name: str = "row",
        observe: Observer = unheard,
    ) -> Predictions:
        """Return predictions of new rows of the primary.

        Args:
            new: The rows, encoded as the primary's schema says; labels are not needed.
            linkable: Which rows have a key to be linked by; None: all. The others are predicted
                without the secondaries, and cost nothing.
            names: What the rows are called; None numbers them from 1 on.
            row_name: What these names are called.
            observe: Hears of progress.

        Raises:
            BudgetExceededError: If a party's ledger has no room for the request; nothing was
                released then.
            DataError: If the rows have other features than the model.

        Reveals:
            Everything is in one process: a simulation protects nobody's table.
        """
        with self.session() as session:
            return session.ask(
                new, linkable=linkable, names=names, row_name=row_name, observe=observe
            )

    @contextlib.contextmanager
    def session(self) -> "Iterator[SimulatedSession]":
        """Hold every party's ledger open, for one request after another.

        Raises:
            ConfigError: If a ledger is in use by another run.
        """
        with contextlib.ExitStack() as opened:
            own = {
                party.name: opened.enter_context(
                    PartyFiles(
                        self.run_folder / "parties" / party.name,
                        self.config,
                        party=party.name,
                        resume=True,
                        simulated=True,
                    )
                )
                for party in (self.config.primary, *self.secondaries)
            }
            for files in own.values():
                files.hold_ledger()
            yield SimulatedSession(self, own)


class SimulatedSession:
    """Requests for predictions, one after another, with all parties in this process."""

    def __init__(self, predictor: Predictor, own: Mapping[str, PartyFiles]) -> None:
        self._predictor = predictor
        self._own = own
        self._bottoms: dict[str, BottomAtWork] = {}
        self._top: nn.Module | None = None

    @property
    def broken(self) -> bool:
        """Whether parties were left in the middle of a request: never, all of them are here."""
        return False

    def check(self) -> None:
        """Do nothing: no party can be lost."""

    def budgets(self) -> list[PredictionBudget]:
        """Return what predictions have spent at every party, and what is left."""
        model = self._predictor.primary.run
        return [files.prediction_budget(model) for files in self._own.values()]

    def ask(
        self,
        new: PartyTable,
        *,
        linkable: Bool[np.ndarray, " rows"] | None = None,
        names: Sequence[Any] | None = None,
        row_name: str = "row",
        observe: Observer = unheard,
    ) -> Predictions:
        """Return predictions of new rows; see :meth:`Predictor.predict`."""
        predictor = self._predictor
        return answered(
            predictor.config,
            predictor.primary,
            new,
            lambda rows: self._released(rows, observe),
            linkable=linkable,
            names=names,
            row_name=row_name,
            device=predictor.device,
            without=predictor.absent,
        )

    def _released(self, new: PartyTable, observe: Observer) -> tuple[Tensor, float]:
        """Return the outputs for rows that are linked, and what releasing them cost."""
        predictor = self._predictor
        config, primary, device = predictor.config, predictor.primary, predictor.device
        spec = prediction_spec(config, primary, active=predictor.active)
        request = request_of(config, primary, keys_of(spec.keys, new), active=predictor.active)
        plan = plan_prediction(config, request.facts, noise_share_std=primary.noise_share_std)
        observe(Stage(text="linking", of=len(predictor.secondaries)))
        with contextlib.ExitStack() as opened:
            ledgers = {
                name: files.open_prediction(plan, model=primary.run)
                for name, files in self._own.items()
            }
            link = Linker(spec, request.keys)
            parties = {}
            for party in predictor.secondaries:
                table, model = predictor.tables[party.name], predictor.models[party.name]
                if party.name not in self._bottoms:
                    self._bottoms[party.name] = bottom_at_work(
                        plan, party, table, device=device, model=model
                    )
                linked = link(keys_of(spec.keys, table), similarity_scale=model.similarity_scale)
                warn_of_few_links(
                    party.name,
                    linked,
                    predicted=request.facts.predicted_rows,
                    least=config.linkage.least_linked,
                    observe=observe,
                )
                secondary = build_secondary(
                    plan,
                    party,
                    table,
                    linked,
                    ledgers[party.name],
                    device=device,
                    kept_bottom=self._bottoms[party.name],
                )
                opened.callback(secondary.close)
                parties[plan.ranks[party.name]] = secondary
            exchange = ChargedExchange(
                SimulatedExchange(parties, plan.cut, end_epoch=_no_epochs),
                ledgers[config.primary.name],
                lambda _epsilon: None,
            )
            if self._top is None:
                self._top = kept_top(config, primary, new, device=device)
            top = top_model(
                config,
                primary,
                self._top,
                new,
                link.primary,
                exchange,
                request=request,
                device=device,
            )
            outputs = top.predict(request.rows, "predict")
            spent = max(ledger.spent for ledger in ledgers.values())
        return outputs, spent


def _no_epochs(_mark: EpochMark) -> None:
    """Nothing is trained, so no epoch ends."""
