"""What it takes to predict new rows with a run whose parties have kept their models."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from securevfl.core.errors import ConfigError, DataError
from securevfl.core.progress import Observer, Warned, unheard
from securevfl.data.frame_tables import as_pandas
from securevfl.data.tables import PartyTable
from securevfl.federation.absence import absent_names, active_without, in_blocks
from securevfl.runtime.device import device_named
from securevfl.runtime.kept_run import KeptRun
from securevfl.runtime.launching import predict_in_processes
from securevfl.runtime.new_rows import NamedRows, read_new_rows, rows_of_frame, rows_of_table
from securevfl.runtime.party_job import NewRows, PartyJob
from securevfl.runtime.predicting import answers_alone, made_alone
from securevfl.runtime.predicting_alone import AlonePredictor
from securevfl.runtime.predictions import FILE, Predictions, read_predictions
from securevfl.runtime.predictor import Predictor
from securevfl.runtime.released_table import released_table
from securevfl.runtime.run_folder import read_figures
from securevfl.runtime.tables import read_party
from securevfl.runtime.without_partners import NEVER_FEWER, worth_without


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainedRun(KeptRun):
    """A kept run, and how its parties are asked."""

    identity: Path | None = None
    """The primary's own folder, where the other parties come by themselves."""
    listen: str | None = None
    """Where the primary then listens, if not at its address in the file."""

    def predict(
        self,
        rows: Any,
        *,
        id_column: str | None = None,
        without: Sequence[str] = (),
        out: Path | None = None,
        observe: Observer = unheard,
    ) -> Predictions:
        """Predict new rows of the primary; see :meth:`RunResult.predict`."""
        active = active_without(self.config, without)
        # Before any party is started or waited for: most mistakes are in these rows.
        named = self.named(rows, id_column=id_column)
        _warn_of(named.table, observe)
        model = self.model(self.config.primary.name)
        here = self.identity is None and read_figures(self.folder)["mode"] == "simulated"
        absent = absent_names(self.config, active)
        measured = self._measured_without(absent, observe) if absent else None
        nobody = active is not None and not active
        if nobody or (measured is not None and measured["used"] == "alone"):
            # The primary alone does better than those that are left, or has to.
            model = made_alone(model, threshold=None if measured is None else measured["threshold"])
        alone = nobody or answers_alone(model)
        if (
            absent
            and not alone
            and self.config.model.party_dropout == 0
            and not in_blocks(self.config)
        ):
            observe(Warned(text=NEVER_FEWER))
        if here or alone:
            asker: AlonePredictor | Predictor = (
                AlonePredictor(self.config, model, without=absent)
                if alone
                else self._predictor_without(absent, observe)
            )
            with asker.session() as session:
                predictions = session.ask(
                    named.table,
                    linkable=named.linkable,
                    names=named.names,
                    row_name=named.row_name,
                    observe=observe,
                )
            if out is not None:
                predictions.write(out)
            unknown = named.table.unknown_words
            return replace(predictions, measured_without=measured, unknown_words=unknown)
        if isinstance(rows, PartyTable):
            raise ConfigError(
                "rows: the parties of this run have processes of their own, and the primary's "
                "reads a file; give a frame or a path instead of a PartyTable"
            )
        with tempfile.TemporaryDirectory(prefix="securevfl-") as temporary:
            new = NewRows(
                path=_file_of(rows, Path(temporary)),
                out=(out or Path(temporary) / FILE).resolve(),
                id_column=id_column,
                without=absent,
            )
            if self.identity is None:
                predictions = self._ask_processes(new, observe)
            else:
                predictions = self._ask_others(new, self.identity, observe)
        predictions = replace(
            predictions, measured_without=measured, unknown_words=named.table.unknown_words
        )
        # As the frame has them: a file knows texts alone.
        return predictions if named.names is None else replace(predictions, rows=named.names)

    def _measured_without(
        self, absent: tuple[str, ...], observe: Observer
    ) -> Mapping[str, Any] | None:
        if absent not in self._worths:
            self._worths[absent] = worth_without(self, absent, observe=observe)
        return self._worths[absent]

    def _ask_processes(self, new: NewRows, observe: Observer) -> Predictions:
        told = predict_in_processes(
            self.config,
            self.folder,
            data_root=self.data_root.resolve(),
            new=new,
            device=self.device,
            observe=observe,
        )
        return read_predictions(new.out, told)

    def _ask_others(self, new: NewRows, identity: Path, observe: Observer) -> Predictions:
        from securevfl.runtime.party import run_party

        job = PartyJob(
            config=self.config,
            name=self.config.primary.name,
            run_folder=self.folder,
            identity_folder=identity,
            data_root=self.data_root.resolve(),
            device=device_named(self.device),
            resume=True,
            listen=self.listen,
            serves=True,
            new_rows=new,
        )
        outcome = run_party(job, observe)
        assert isinstance(outcome, Predictions), "a primary that serves returns predictions"
        return outcome

    def named(self, rows: Any, *, id_column: str | None = None) -> NamedRows:
        """Return new rows as the model takes them.

        Args:
            rows: See :meth:`predict`.
            id_column: The column that names rows; None numbers them from 1 on.

        Raises:
            ConfigError: If the run has kept no model.
            DataError: If the rows' columns are not those of training.
        """
        model = self.model(self.config.primary.name)
        if isinstance(rows, PartyTable):
            if id_column is not None:
                raise ConfigError("id_column: goes with a frame or a file; a PartyTable has none")
            return rows_of_table(model, rows)
        if isinstance(rows, str | Path):
            return read_new_rows(self.config, model, Path(rows), id_column=id_column)
        frame = as_pandas(rows, where="new rows")
        return rows_of_frame(self.config, model, frame, id_column=id_column, where="new rows")

    def features(self, *, own: bool = False) -> pd.DataFrame:
        """Return the releases of a frozen run; see :meth:`RunResult.features`."""
        name = self.config.primary.name
        table = (self.tables or {}).get(name)
        if table is None:
            table = read_party(self.config, self.config.primary, self.data_root)
        return released_table(self.config, self.folder, table, own=own)

    @cached_property
    def _predictors(self) -> dict[tuple[str, ...], Predictor]:
        return {}

    @cached_property
    def _worths(self) -> dict[tuple[str, ...], Mapping[str, Any] | None]:
        return {}

    def _predictor_without(self, absent: tuple[str, ...], observe: Observer) -> Predictor:
        if absent not in self._predictors:
            tables = self.tables
            if not tables:
                tables = {
                    party.name: read_party(
                        self.config, party, self.data_root, model=self.model(party.name)
                    )
                    for party in self.config.secondaries
                    if party.name not in absent
                }
                for table in tables.values():
                    _warn_of(table, observe)
            self._predictors[absent] = Predictor(
                self.config,
                self.folder,
                tables,
                device=device_named(self.device),
                without=absent,
            )
        return self._predictors[absent]

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields alone: a loaded model is loaded again."""
        loaded = ("_predictors", "_worths")
        return {name: value for name, value in vars(self).items() if name not in loaded}


def _warn_of(table: PartyTable, observe: Observer) -> None:
    for text in table.notes:
        observe(Warned(text=f"{table.name}: {text}"))


def _file_of(rows: Any, folder: Path) -> Path:
    """Return the file of new rows, written to ``folder`` if they are in memory."""
    if isinstance(rows, str | Path):
        return Path(rows).resolve()
    path = folder / "rows.parquet"
    try:
        as_pandas(rows, where="new rows").to_parquet(path, index=False)
    except ValueError as error:  # what Arrow says of columns that hold several kinds of things
        text = " ".join(str(error).split())
        raise DataError(f"new rows: can't be handed to the primary's process: {text}") from None
    return path
