"""A saved run, and a frozen run's releases as a table of the primary's own, at no cost.

What a program computes from released rows reveals no more of the secondaries' records than these
rows do: no party is asked, nothing is sent and no ledger is charged.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
from jaxtyping import Float32

from securevfl.config.federation import FederationConfig
from securevfl.config.sections import PartySettings
from securevfl.core.errors import ConfigError, DataError, PrivacyError
from securevfl.data.tables import PartyTable, RowSplit, consecutive_batches
from securevfl.federation.checkpoint import DamagedError, StateFolder
from securevfl.federation.rounds.kept_rounds import CachedRows
from securevfl.federation.run_plan import run_facts
from securevfl.federation.saved_model import FOLDER, SavedModel, load_model
from securevfl.ledger.book import LedgerBook, recompute_figures, until_end
from securevfl.ledger.chain import Chain, read_chain
from securevfl.runtime.run_folder import TemporaryFolder
from securevfl.runtime.run_tables import read_party
from securevfl.version import __version__


@dataclass(frozen=True, kw_only=True, eq=False)
class SavedRun:
    """Where the models of a run lie, and where its parties' tables are."""

    config: FederationConfig
    """The federation file."""
    place: Path | TemporaryFolder
    """The run folder."""
    data_root: Path = field(default_factory=Path)
    """Where relative data paths start."""
    tables: Mapping[str, PartyTable] | None = field(default=None, repr=False)
    """The parties' tables by name, where they are in memory; None: they are read."""
    device: str = "cpu"
    """``"cpu"`` or ``"cuda"``, where parties compute."""

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.place.path if isinstance(self.place, TemporaryFolder) else self.place

    def model(self, party: str) -> SavedModel:
        """Read a party's model.

        Raises:
            ConfigError: As :func:`securevfl.federation.saved_model.load_model`.
        """
        return load_model(self.folder / "parties" / party / FOLDER, self.config, party=party)

    def table(self, party: PartySettings) -> PartyTable:
        """Return a party's table as in training, from memory or read again."""
        table = (self.tables or {}).get(party.name)
        return read_party(self.config, party, self.data_root) if table is None else table


METADATA: Final = "securevfl"
"""Under this name a table's metadata lies in ``DataFrame.attrs`` and in a Parquet file's schema."""

COST: Final = "nothing: post-processing of what was released; no ledger is charged, nothing is sent"
"""Cost of a table of releases, in words."""

_FORMAT: Final = 1
_RUN: Final = "run.pt"
_PARTS: Final = ("train", "validation", "test", "unlabelled")


class _Record:
    """Read-only view of a ledger: whether it has the lines that saved rows were charged with."""

    def __init__(self, path: Path, chain: Chain) -> None:
        self._path = path
        self._chain = chain

    @property
    def head(self) -> str:
        """Hash of the last line."""
        return self._chain.head.hex()

    def require_history(self, head: str) -> None:
        """Refuse if the line of that hash is not in the ledger."""
        if not self._chain.contains(head):
            raise PrivacyError(
                f"ledger {self._path}: lacks releases that the kept rows were made with; it was "
                f"cut or exchanged. Put a copy of this file back; what the table's own ledger "
                f"lacks is booked by securevfl ledger restored TABLE"
            )


def released_table(saved: SavedRun, *, own: bool = False) -> pd.DataFrame:
    """Return the released numbers of all rows of the primary.

    What is kept is checked against the run's plan (rows, shape, settings, the ledger's lines), and
    no file is believed for its name.

    Args:
        saved: The primary's; it may still be training.
        own: Whether the primary's own columns, as they are encoded, and its label come too.

    Returns:
        One row a row of the primary, in the table's order. ``row`` counts from 1, as in
        ``predictions.csv``; ``part`` is ``train``, ``validation``, ``test`` or ``unlabelled``; then
        the released numbers, float32: ``SECONDARY_0`` and so on where each secondary has
        coordinates of its own (``encoder.layout = "blocks"``); ``class_means_CLASS`` of
        class-mean encoders, from ``class_means_0``, for the lowest labels, where labels are
        numbers; else ``released_0`` and so on. The last two kinds are averages over the
        secondaries. With
        ``own``: ``own_NAME`` for every encoded column and numeric key, unscaled, and ``label`` in
        its own words or unit, empty where a row has none.
        ``attrs["securevfl"]`` has the promise, as :func:`_metadata` says.

    Raises:
        ConfigError: If the run's encoders are not frozen, the folder is not the primary's, a file
            is damaged, or not all rows are released yet.
        DataError: If the table does not fit, or columns of the result would share a name.
        PrivacyError: If the ledger was altered, or lacks releases that the rows were made with.

    Reveals:
        Nothing: it is made of what was released before.
    """
    config = saved.config
    if config.regime.learns:
        raise ConfigError(
            f'privacy.encoder: rows of a "{config.regime.name}" encoder are released anew in '
            f'every epoch and not kept; only a run with "frozen" has releases as a table'
        )
    table = saved.table(config.primary)
    folder = saved.folder / "parties" / config.primary.name
    state, run = _state_of(folder, config)
    ledger = folder / "ledger.jsonl"
    if not ledger.exists():
        raise ConfigError(f"{ledger}: is missing; the promise of the releases stands in it")
    chain, entries = read_chain(ledger)
    state.guard(_Record(ledger, chain))
    parts = consecutive_batches(np.arange(table.num_rows), batch_size=config.training.batch_size)
    kept = CachedRows(state, parts, shape=config.family.cut_shape(config.model))
    kept.require_all()
    split, _ = run_facts(config, table)
    released = kept.all().flatten(1).numpy()
    columns: dict[str, Any] = {
        "row": np.arange(1, table.num_rows + 1),
        "part": _parts_of(split, table.num_rows),
    }
    _add(columns, zip(_names(config, table, released.shape[1]), released.T, strict=True))
    if own:
        _add(columns, _own_columns(table))
    frame = pd.DataFrame(columns)
    booked = until_end(entries, run)
    head = chain.head_at(len(booked))
    if head is None:
        raise PrivacyError(f"{ledger}: was altered while it was read; read the table again")
    metadata = _metadata(config, booked, run, released)
    frame.attrs[METADATA] = {**metadata, "ledger_head": head.hex(), "cost": COST}
    return frame


def _state_of(folder: Path, config: FederationConfig) -> tuple[StateFolder, str]:
    """Return the primary's state files, and the id of the run that they are of."""
    if not folder.is_dir():
        raise ConfigError(
            f"run folder {folder.parent.parent}: has no folder of the primary, "
            f"{config.primary.name!r}; released rows lie with the primary alone"
        )
    state = StateFolder(folder, settings_digest=config.settings_digest)
    try:
        run, _, _ = state.examine(_RUN)
    except FileNotFoundError:
        raise ConfigError(f"run folder {folder.parent.parent}: holds no run") from None
    except DamagedError:
        raise ConfigError(f"{folder / _RUN}: is damaged; restore it from a copy") from None
    state.run = run
    return state, run


def _metadata(
    config: FederationConfig,
    booked: Sequence[Mapping[str, Any]],
    run: str,
    released: Float32[np.ndarray, "rows numbers"],
) -> dict[str, Any]:
    """Return what is promised about the numbers, as the ledger's lines give it.

    ``noise_deviation`` is that of the Gaussian noise in each number: every one of S secondaries
    adds ``tau`` to its own term of the average, so it is ``tau / sqrt(S)``; of symbols and
    Laplace sums it is None, and ``cells`` is their number of cells. ``unlinked_rows``
    counts rows of zeros, behind which there is no record; behind noise that cannot be seen,
    and it is None.
    """
    figures = recompute_figures(booked, run)
    book = LedgerBook()
    book.read(booked, where="the ledger")
    last = [session for session in book.sessions if session.run == run][-1]
    if (figures["row_releases"] or 0) < len(released):
        raise PrivacyError(
            f"the ledger has booked {figures['row_releases']} rows of run {run}, and "
            f"{len(released)} lie in its folder; put a copy of the run's ledger back (what the "
            f"table's own lacks is booked by securevfl ledger restored TABLE)"
        )
    privacy, tau, symbols = last.plan.privacy, last.noise_share_std, last.plan.symbols
    spent = figures["epsilon"] or 0.0
    total = figures["total_epsilon"] if len(book.runs(unit=privacy.unit)) > 1 else None
    statement = last.plan.statement(tau, spent=spent, total_epsilon=total)
    return {
        "format": _FORMAT,
        "version": __version__,
        "federation": config.federation.name,
        "run": run,
        "statement": statement.text,
        "warning": statement.warning,
        "mechanism": privacy.mechanism,
        "epsilon": figures["epsilon"],
        "delta": privacy.delta,
        "unit": privacy.unit,
        "links_per_record": privacy.links_per_record,
        "links": config.model.neighbours,
        "clip_norm": privacy.clip_norm,
        "cells": symbols.cells if symbols else None,
        "noise_deviation": None if last.plan.scores else tau / math.sqrt(last.plan.parties),
        "secondaries": [party.name for party in config.secondaries],
        "shape": list(config.family.cut_shape(config.model)),
        "unlinked_rows": None if tau else int((~released.any(axis=1)).sum()),
    }


def _parts_of(split: RowSplit, rows: int) -> np.ndarray:
    parts = np.empty(rows, dtype=object)
    for name in _PARTS:
        parts[getattr(split, name)] = name
    return parts


def _names(config: FederationConfig, table: PartyTable, numbers: int) -> list[str]:
    if config.scores:
        return ["score"]
    if config.encoder_reads_labels:
        # Each class has its number (federation.class_means); a regression's have no names.
        return [f"class_means_{label}" for label in table.classes or range(numbers)]
    if config.encoder is None or not config.encoder.in_blocks:
        return [f"released_{number}" for number in range(numbers)]
    # In the order of ranks, as encoders write (federation.encoder_fitting.build_encoder).
    names = [party.name for party in config.secondaries]
    each = numbers // len(names)
    return [f"{name}_{number}" for name in names for number in range(each)]


def _own_columns(table: PartyTable) -> Iterable[tuple[str, Any]]:
    for name, column in zip(table.feature_names, table.features.T, strict=True):
        yield f"own_{name}", column
    for name, key in zip(table.key_names, table.keys.T, strict=True):
        yield f"own_{name}", key
    labels: Any = table.labels
    if labels is None:
        return
    if table.classes is not None:
        labels = np.array(table.classes, dtype=object)[labels.astype(np.int64)]
    if table.labelled is not None:
        labels = labels.astype(object)
        labels[~table.labelled] = None
    yield "label", labels


def _add(columns: dict[str, Any], more: Iterable[tuple[str, Any]]) -> None:
    for name, column in more:
        if name in columns:
            raise DataError(f"column {name!r}: two columns of the table would be called so")
        columns[name] = column
