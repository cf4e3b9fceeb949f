"""Facts of a run that every party must know: the primary's rows, and where the run starts."""

import json
import secrets
from dataclasses import asdict, dataclass, field
from typing import Final

import numpy as np

from securevfl.config.federation import FederationConfig
from securevfl.core.errors import DataError
from securevfl.data.rows import RowSplit, split_rows
from securevfl.data.tables import PartyTable
from securevfl.models.task_metrics import metrics_of

RUN_ID_DIGITS: Final = 32
"""Hexadecimal digits of a run's id."""


def new_run() -> str:
    """Return a fresh run's id, which no other run has."""
    return secrets.token_hex(RUN_ID_DIGITS // 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """What every party must know to do its own accounting before anything is released."""

    rows: int
    """The primary's rows; ids run from 0."""

    train_rows: int
    validation_rows: int
    test_rows: int

    unlabelled_rows: int = 0
    """Training rows whose labels are missing or not used."""

    predicts: bool = False
    """True if a saved model is asked for predictions, and nothing is trained. Rows come with every
    request (:mod:`securevfl.runtime.prediction_session`); there are none before the first."""

    predicted_rows: int = 0
    """How many rows, the last ones, are predicted; the others only take part in linking."""

    active: tuple[int, ...] | None = None
    """Ranks of the secondaries that take part in this session, ascending; None: all."""

    resume_stage: int = 0
    """Steps that are done already of the stage before rounds."""

    resume_epoch: int = 0
    """Epoch to go on from; 0 starts afresh."""

    run: str = field(default_factory=new_run)
    """Names the run in every party's files, so that no run resumes from the state of another."""

    def statement(self) -> bytes:
        """Return all of them as bytes, which go into the keys of a session."""
        return json.dumps(asdict(self), sort_keys=True).encode()


def prediction_facts(
    *,
    rows: int = 0,
    predicted_rows: int = 0,
    run: str = "",
    active: tuple[int, ...] | None = None,
) -> RunFacts:
    """Return the facts of a session, or of one request, that predicts and does not train."""
    return RunFacts(
        run=run,
        rows=rows,
        train_rows=0,
        validation_rows=0,
        test_rows=0,
        predicts=True,
        predicted_rows=predicted_rows,
        active=active,
    )


def run_facts(config: FederationConfig, table: PartyTable) -> tuple[RowSplit, RunFacts]:
    """Split the primary's rows and count them.

    Raises:
        DataError: If there are too few rows for that, a class has too few rows for the metric that
            training goes by, or the table lacks the column that decides.
    """
    training = config.training
    kind = config.split_kind
    by = table.labels if kind == "stratified" else table.split_by
    if kind != "random" and by is None:
        raise DataError(
            f"table of {table.name!r}: has no split_by, which training.split = {kind!r} goes by; "
            f"read the table from a file, or give it one"
        )
    try:
        split = split_rows(
            table.num_rows,
            validation_fraction=training.validation_fraction,
            test_fraction=training.test_fraction,
            seed=config.federation.seed,
            kind=kind,
            by=None if by is None or kind == "random" else by.astype(np.int64),
            labelled_rows=training.labelled_rows,
            labelled=table.labelled,
        )
    except DataError as error:
        raise DataError(f"table of {table.name!r}: {error}") from None
    _require_classes(config, table, split)
    classes = len(table.classes or ()) if config.federation.task == "multiclass" else 1
    config.family.require_outputs(config.model, classes)
    facts = RunFacts(
        rows=table.num_rows,
        train_rows=len(split.train),
        validation_rows=len(split.validation),
        test_rows=len(split.test),
        unlabelled_rows=len(split.unlabelled),
        resume_epoch=0,
    )
    return split, facts


def _require_classes(config: FederationConfig, table: PartyTable, split: RowSplit) -> None:
    """Refuse a split in which some part lacks a class that its metric needs."""
    if table.labels is None or table.classes is None:
        return
    declared = config.federation.classes
    if declared is not None and declared != len(table.classes):
        raise DataError(
            f"table of {table.name!r}: label {config.primary.label!r} has {len(table.classes)} "
            f"classes, and federation.classes says {declared}; correct the file, of every party"
        )
    metric, *_ = metrics_of(config.federation.task, config.training.metric)
    for name in ("train", "validation", "test"):
        part = table.labels[getattr(split, name)]
        if metric.defined(part, len(table.classes)):
            continue
        known = table.labels if table.labelled is None else table.labels[table.labelled]
        counts = np.bincount(known.astype(np.int64), minlength=len(table.classes))
        there = np.bincount(part.astype(np.int64), minlength=len(table.classes))
        rarest = int(np.argmin(np.where(there == 0, counts, len(known) + 1)))
        kind = config.split_kind
        raise DataError(
            f"table of {table.name!r}: label {config.primary.label!r}: {counts[rarest]} of "
            f"{len(known)} rows are of class {table.classes[rarest]!r}, and none of these is for "
            f"{name}, where {metric.name} needs {metric.needs}; "
            + (
                "get more such rows"
                if kind == "stratified"
                else f'get more such rows, or another training.split than "{kind}"'
            )
            + ", or choose another training.metric"
        )
