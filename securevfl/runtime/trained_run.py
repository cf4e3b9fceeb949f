"""A trained run whose parties have saved their models, and its predictions."""

import contextlib
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import pandas as pd
import torch

from securevfl.config.sections import PartySettings
from securevfl.core.errors import ConfigError, DataError, NoRowsError
from securevfl.core.progress import Observer, Warned, unheard
from securevfl.data.frames import as_pandas, library_of, table_path
from securevfl.data.sources.settings import file_behind
from securevfl.data.tables import PartyTable
from securevfl.federation.saved_model import SavedModel
from securevfl.federation.session.membership import absent_names, active_without
from securevfl.runtime import prediction_session, run_options
from securevfl.runtime.coalitions import NEVER_FEWER, worth_without
from securevfl.runtime.launching import predict_in_processes
from securevfl.runtime.prediction_session import KeptSecondary
from securevfl.runtime.predictions import FILE, Predictions, predictions_of, read_predictions
from securevfl.runtime.released_table import SavedRun, released_table
from securevfl.runtime.run_folder import read_figures, simulated_files
from securevfl.runtime.run_tables import read_new_rows, read_party, rows_of_frame, rows_of_table

Way = Literal["alone", "here", "processes", "elsewhere"]
"""Where predictions are answered: by the primary alone, with all parties in this process, in a
process a party on this machine, or by parties that join from elsewhere."""


class RunSource(TypedDict, total=False):
    """Where a run's parts are, if not in its folder."""

    federation: run_options.FederationSource | None
    """The federation file; default: that of the run."""
    parties: Iterable[PartyTable] | None
    """The secondaries' tables, of a run that was simulated on tables in memory; others are read
    again."""
    identity: str | Path | None
    """The primary's own folder, as made by ``securevfl provision``."""
    listen: str | None
    """Where the primary listens, if not at its address in the file."""
    data_root: Path | None
    """Where relative data paths start; default: the current folder."""
    device: str
    """``"cpu"`` (the default) or ``"cuda"``."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainedRun(SavedRun):
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
        out: str | Path | None = None,
        observe: Observer = unheard,
    ) -> Predictions:
        """Predict new rows of the primary with the model of this run.

        Every call is a request like one of ``securevfl predict``: under a promise, every party's
        ledger is charged for it, and ``[prediction] epsilon`` is what all of them may spend. A run
        that was simulated predicts in this process, one that was trained on this machine in a
        process a party; with ``identity``, this is the primary, and the other parties join from
        elsewhere (``securevfl party --serve``).

        Args:
            rows: A frame (pandas, polars, pyarrow) or the path of a file, with the columns of the
                table of training, in any order and among others; or a :class:`PartyTable` that is
                encoded as that table was, of a simulation alone. Labels are not needed; with them
                there are metrics.
            id_column: The column that names rows; None numbers them from 1 on.
            without: Secondaries that are absent: they are not asked, and not waited for.
            out: A file that gets the predictions too.
            observe: Called with progress.

        Returns:
            Predictions in the order of the rows.

        Raises:
            BudgetExceededError: If a party's ledger has no room for the request; nothing was
                released then.
            ConfigError: If the run has kept no model, or its folder is gone.
            DataError: If the rows' columns are not those of training.

        Reveals:
            Of a simulation, nothing: everything is in one process. Of a run of ``sv.train``, what
            a real request reveals between this machine's processes.
        """
        file = None if out is None else table_path(out, self.files_read(rows))
        active = active_without(self.config, without)
        # Before any party is started or waited for: most mistakes are in these rows.
        try:
            named = self.name_rows(rows, id_column=id_column)
        except NoRowsError:
            return self._of_no_rows("row" if id_column is None else id_column, file)
        _warn_of(named.table, observe)
        model = self.model(self.config.primary.name)
        absent = absent_names(self.config, active)
        measured = self._measured_without(absent, observe) if absent else None
        none_left = active is not None and not active
        if none_left or (measured is not None and measured["used"] == "alone"):
            # The primary alone does better than those that are left, or has to.
            model = prediction_session.made_alone(
                model, threshold=None if measured is None else measured["threshold"]
            )
        way = "alone" if none_left else self.way(model)
        if (
            absent
            and way != "alone"
            and self.config.model.party_dropout == 0
            and not self.config.in_blocks
        ):
            observe(Warned(text=NEVER_FEWER))
        if way == "alone" or way == "here":
            with (
                contextlib.nullcontext(
                    prediction_session.PredictionSession(self.config, model, active=active)
                )
                if way == "alone"
                else self.session(observe, without=absent)
            ) as session:
                predictions = session.ask(named, observe=observe)
        else:
            predictions = self._ask_primary(named, way, absent, observe)
        if file is not None:
            predictions.write(file)
        return replace(
            predictions,
            measured_without=measured,
            unknown_words=named.table.unknown_words,
            library=library_of(rows),
        )

    def way(self, model: SavedModel) -> Way:
        """Return where requests for predictions of the primary's model are answered."""
        if prediction_session.answers_alone(model):
            return "alone"
        if self.identity is not None:
            return "elsewhere"
        return "here" if read_figures(self.folder)["mode"] == "simulated" else "processes"

    def primary_job(
        self,
        observe: Observer,
        prediction: run_options.PredictionJob | None = None,
    ) -> run_options.PartyJob:
        """Return the job of the primary's process, which serves the model.

        Args:
            observe: Called with progress.
            prediction: The new rows; None where requests come later.
        """
        return run_options.PartyJob(
            **vars(replace(self.options(observe), resume=True)),
            config=self.config,
            name=self.config.primary.name,
            identity_folder=self.identity or self.folder,
            listen=self.listen,
            serves=True,
            table=(self.tables or {}).get(self.config.primary.name),
            prediction=prediction,
        )

    def options(self, observe: Observer) -> run_options.RunOptions:
        """Return the options of processes that serve the models."""
        return run_options.RunOptions(
            run_folder=self.folder,
            data_root=self.data_root.resolve(),
            device=run_options.device_named(self.device),
            observe=observe,
        )

    def _of_no_rows(self, row_name: str, out: Path | None) -> Predictions:
        """Return the answer to no rows: no party is asked, and nothing is charged."""
        part = self.model(self.config.primary.name).primary_part
        predictions = predictions_of(
            torch.empty((0, part.head.outputs)),
            part.head,
            classes=part.classes,
            label_scaler=part.label_scaler,
            threshold=part.threshold,
            rows=[],
        )
        predictions = replace(predictions, row_name=row_name)
        if out is not None:
            predictions.write(out)
        return predictions

    def _measured_without(
        self, absent: tuple[str, ...], observe: Observer
    ) -> Mapping[str, Any] | None:
        if absent not in self._worths:
            self._worths[absent] = worth_without(self, absent, observe=observe)
        return self._worths[absent]

    def _ask_primary(
        self,
        named: prediction_session.NamedRows,
        way: Way,
        absent: tuple[str, ...],
        observe: Observer,
    ) -> Predictions:
        """Have the primary's own process ask the other parties."""
        from securevfl.runtime.launching import run_party

        with tempfile.TemporaryDirectory(prefix="securevfl-") as temporary:
            prediction = run_options.PredictionJob(
                named=named, out=Path(temporary) / FILE, without=absent
            )
            if way == "processes":
                metadata = predict_in_processes(
                    self.config, self.options(observe), prediction, tables=self.tables or {}
                )
                # Names as the frame has them: a file holds texts alone.
                return read_predictions(prediction.out, metadata, rows=named.names)
            outcome = run_party(self.primary_job(observe, prediction))
            assert isinstance(outcome, Predictions), "a primary that serves returns predictions"
            return outcome

    def files_read(self, rows: Any = None) -> Iterator[Path]:
        """Yield the files that a request for predictions of rows, or for releases, may read."""
        tables = [self.data_root / party.data for party in self.config.table_parties]
        for path in [Path(rows), *tables] if isinstance(rows, str | Path) else tables:
            yield path
            with contextlib.suppress(OSError, DataError):
                yield file_behind(path)
        yield from (self.folder / "federation.toml", self.folder / "metrics.json")
        yield from (self.folder / "parties").rglob("*")

    def name_rows(self, rows: Any, *, id_column: str | None = None) -> prediction_session.NamedRows:
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
        return released_table(self, own=own)

    @cached_property
    def _secondaries(self) -> dict[str, KeptSecondary]:
        return {}

    @cached_property
    def _worths(self) -> dict[tuple[str, ...], Mapping[str, Any] | None]:
        return {}

    @contextlib.contextmanager
    def session(
        self, observe: Observer, *, without: Sequence[str] = ()
    ) -> Iterator[prediction_session.SimulatedSession]:
        """Hold the ledgers of all parties of a simulated run, for one request after another.

        Args:
            observe: Called with warnings of tables that are read again.
            without: Secondaries that are absent; neither their tables nor their models are needed.

        Raises:
            ConfigError: If a model is missing or damaged, they are of several runs, too few
                secondaries are left, or a ledger is in use by another run.
        """
        config, active = self.config, active_without(self.config, without)
        primary, absent = self.model(config.primary.name), absent_names(config, active)
        secondaries = {}
        for party in config.secondaries:
            if party.name not in absent:
                secondaries[party.name] = kept = self._secondary(party, observe)
                prediction_session.require_one_model(primary, kept.model.run, party.name)
        there = [config.primary, *(config.party(name) for name in secondaries)]
        with simulated_files(config, there, self.folder, resume=True) as own:
            for files in own.values():
                files.hold_ledger()
            device = run_options.device_named(self.device)
            yield prediction_session.SimulatedSession(
                config, primary, secondaries, own, device=device, active=active
            )

    def _secondary(self, party: PartySettings, observe: Observer) -> KeptSecondary:
        if party.name not in self._secondaries:
            model = self.model(party.name)
            table = (self.tables or {}).get(party.name)
            if table is None:
                table = read_party(self.config, party, self.data_root, model=model)
                _warn_of(table, observe)
            self._secondaries[party.name] = KeptSecondary(
                party, table, model, device=run_options.device_named(self.device)
            )
        return self._secondaries[party.name]

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields alone: a loaded model is loaded again."""
        loaded = ("_secondaries", "_worths")
        return {name: value for name, value in vars(self).items() if name not in loaded}


def _warn_of(table: PartyTable, observe: Observer) -> None:
    for text in table.notes:
        observe(Warned(text=f"{table.name}: {text}"))


def predict(
    run: str | Path,
    rows: Any,
    *,
    id_column: str | None = None,
    without: Sequence[str] = (),
    out: str | Path | None = None,
    observe: Observer = unheard,
    **source: Unpack[RunSource],
) -> Predictions:
    """Predict new rows with the model that a run has saved; see :meth:`TrainedRun.predict`.

    Args:
        run: The run folder.
        rows: As of :meth:`TrainedRun.predict`.
        id_column: The column that names rows; None numbers them from 1 on.
        without: Secondaries that are absent: they are not asked, and not waited for.
        out: A file that gets the predictions too.
        observe: Called with progress.
        **source: Where the run's parts are, if not in its folder; see :class:`RunSource`.

    Raises:
        BudgetExceededError: If a party's ledger does not cover them; nothing was released then.
        ConfigError: If the run has saved no model, or one that does not fit.
        DataError: If the rows' columns are not those of training.

    Reveals:
        On one machine nothing leaves it. With others: what a request for predictions reveals.
    """
    trained = trained_run(run, **source)
    return trained.predict(rows, id_column=id_column, without=without, out=out, observe=observe)


def features(
    run: str | Path,
    *,
    own: bool = False,
    **source: Unpack[RunSource],
) -> pd.DataFrame:
    """Return what a frozen run has released, as a table for models of the primary's own.

    It costs nothing, however often it is asked for: see
    :func:`securevfl.runtime.released_table.released_table`, which says what the columns and
    ``attrs["securevfl"]`` are.

    Args:
        run: The run folder.
        own: Whether the primary's own encoded columns and its label come too.
        **source: See :class:`RunSource`; of ``parties``, it takes the primary's table.

    Raises:
        ConfigError: If the run's encoders are not frozen, the folder is not the primary's, a file
            is damaged, or not all rows are released yet.
        DataError: If the primary's table does not fit.
        PrivacyError: If the primary's ledger was altered.

    Reveals:
        Nothing: it is made of what was released before.
    """
    return trained_run(run, **source).features(own=own)


def trained_run(
    run: Any,
    *,
    federation: run_options.FederationSource | None = None,
    parties: Iterable[PartyTable] | None = None,
    identity: str | Path | None = None,
    listen: str | None = None,
    data_root: Path | None = None,
    device: str = "cpu",
) -> TrainedRun:
    """Return a run whose models are to predict; see :func:`predict`.

    Raises:
        ConfigError: If the folder is not that of a run.
    """
    if not isinstance(run, str | Path):
        raise ConfigError(
            f"run: must be a run folder or the result of sv.simulate, got a {type(run).__name__}"
        )
    path = Path(run) / "federation.toml"
    if federation is None and not path.exists():
        raise ConfigError(f"run folder {run}: has no {path.name}; is it that of a finished run?")
    config, _ = run_options.resolve_federation(path if federation is None else federation, None)
    return TrainedRun(
        config=config,
        place=Path(run),
        data_root=data_root or Path(),
        tables=None if parties is None else {table.name: table for table in parties},
        identity=None if identity is None else Path(identity),
        listen=listen,
        device=device,
    )
