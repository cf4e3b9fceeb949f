"""Where a trained run is used, from Python and from the command line alike."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from securevfl.config.federation import FederationConfig
from securevfl.core import files
from securevfl.core.errors import ConfigError
from securevfl.core.progress import Observer, unheard
from securevfl.data.tables import PartyTable
from securevfl.runtime.entry import FederationSource, opened
from securevfl.runtime.predictions import Predictions
from securevfl.runtime.trained_run import TrainedRun


def predict(
    run: str | Path,
    rows: Any,
    *,
    federation: FederationSource | None = None,
    parties: Iterable[PartyTable] | None = None,
    id_column: str | None = None,
    without: Sequence[str] = (),
    out: str | Path | None = None,
    identity: str | Path | None = None,
    listen: str | None = None,
    data_root: Path | None = None,
    device: str = "cpu",
    observe: Observer = unheard,
) -> Predictions:
    """Predict new rows of the primary with the model that a run has kept.

    Every call is a request: under a promise, every party's ledger is charged for it. A run that was
    simulated predicts in this process, one that was trained on this machine in a process a party;
    with ``identity``, this is the primary, and the others come by themselves
    (``securevfl party --serve``).

    Args:
        run: The run folder.
        rows: A frame (pandas, polars, pyarrow), the path of a file, or, of a simulation, a
            :class:`PartyTable` that is encoded as the table of training was.
        federation: The federation file; default: that of the run.
        parties: The secondaries' tables, of a run that was simulated on tables in memory; others
            are read again.
        id_column: The column that names rows; None numbers them from 1 on.
        without: Secondaries that are absent: they are not asked, and not waited for.
        out: A file that gets the predictions too.
        identity: The primary's own folder, as made by ``securevfl provision``.
        listen: Where the primary listens, if not at its address in the file.
        data_root: Where relative data paths start; default: the current folder.
        device: ``"cpu"`` or ``"cuda"``.
        observe: Hears of progress.

    Raises:
        BudgetExceededError: If a party's ledger has no room for them; nothing was released then.
        ConfigError: If the run has kept no model, or one that does not fit.
        DataError: If the rows' columns are not those of training.

    Reveals:
        On one machine nothing leaves it. With others: what a request for predictions reveals.
    """
    trained = trained_run(
        run,
        federation=federation,
        parties=parties,
        identity=identity,
        listen=listen,
        data_root=data_root,
        device=device,
    )
    return trained.predict(
        rows,
        id_column=id_column,
        without=without,
        out=None if out is None else Path(out),
        observe=observe,
    )


def features(
    run: str | Path,
    *,
    own: bool = False,
    federation: FederationSource | None = None,
    parties: Iterable[PartyTable] | None = None,
    data_root: Path | None = None,
) -> pd.DataFrame:
    """Return what a frozen run has released, as a table for models of the primary's own.

    It costs nothing, however often it is asked for: see
    :func:`securevfl.runtime.released_table.released_table`, which says what the columns and
    ``attrs["securevfl"]`` are.

    Args:
        run: The run folder.
        own: Whether the primary's own encoded columns and its label come too.
        federation: The federation file; default: that of the run.
        parties: The primary's table, of a run that was simulated on tables in memory; others are
            read again.
        data_root: Where relative data paths start; default: the current folder.

    Raises:
        ConfigError: If the run's encoders are not frozen, the folder is not the primary's, a file
            is damaged, or not all rows are released yet.
        DataError: If the primary's table does not fit.
        PrivacyError: If the primary's ledger was altered.

    Reveals:
        Nothing: it is made of what was released before.
    """
    trained = trained_run(run, federation=federation, parties=parties, data_root=data_root)
    return trained.features(own=own)


def trained_run(
    run: str | Path,
    *,
    federation: FederationSource | None = None,
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
    path = Path(run) / "federation.toml"
    if federation is None and not path.exists():
        raise ConfigError(f"run folder {run}: has no {path.name}; is it that of a finished run?")
    config, _ = opened(path if federation is None else federation, None)
    return TrainedRun(
        config=config,
        place=Path(run),
        data_root=data_root or Path(),
        tables=None if parties is None else {table.name: table for table in parties},
        identity=None if identity is None else Path(identity),
        listen=listen,
        device=device,
    )


def predict_file(
    config: FederationConfig,
    run_folder: Path,
    *,
    rows: Path,
    out: Path,
    id_column: str | None = None,
    without: Sequence[str] = (),
    identity: Path | None = None,
    listen: str | None = None,
    data_root: Path | None = None,
    device: str = "cpu",
    observe: Observer = unheard,
) -> Predictions:
    """Predict a file of new rows, and write the predictions; see :func:`predict`.

    Args:
        config: The federation file.
        run_folder: Of the run that trained.
        rows: The file of new rows.
        out: Where predictions go.
        id_column: The column that names rows; None numbers them from 1 on.
        without: Secondaries that are absent.
        identity: The primary's own folder, as made by ``securevfl provision``.
        listen: Where the primary listens, if not at its address in the file.
        data_root: Where relative data paths start.
        device: ``"cpu"`` or ``"cuda"``.
        observe: Hears of progress.

    Raises:
        BudgetExceededError: If a party's ledger has no room for them; nothing was released then.
        ConfigError: If the run has kept no model, or one that does not fit.
        DataError: If the rows' columns are not those of training.

    Reveals:
        On one machine nothing leaves it. With others: what a request for predictions reveals.
    """
    files.require_writable_folder(out.parent, what="folder of --out")
    if not rows.exists():
        raise ConfigError(f"--rows: there is no file {rows}")
    return predict(
        run_folder,
        rows,
        federation=config,
        id_column=id_column,
        without=without,
        out=out,
        identity=identity,
        listen=listen,
        data_root=data_root,
        device=device,
        observe=observe,
    )
