"""Build each party's part of pretraining from the federation file."""

from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from securevfl.config.federation import FederationConfig
from securevfl.core.errors import DataError
from securevfl.core.progress import Observer, Warned
from securevfl.data.tables import PartyTable
from securevfl.federation.checkpoint import Checkpoints
from securevfl.federation.party_files import PartyFiles
from securevfl.federation.primary import Primary
from securevfl.federation.secondary import SecondaryData
from securevfl.linkage.alignment import Alignment
from securevfl.pretraining.exchange import PretrainingExchange
from securevfl.pretraining.learner_with_records import LearnerWithRecords
from securevfl.pretraining.rows import even_batches, pretraining_rows
from securevfl.pretraining.run import PretrainingRun
from securevfl.pretraining.secondary import PretrainingSecondary
from securevfl.pretraining.sending import sending


def build_learner(
    config: FederationConfig,
    features: Tensor,
    own: npt.NDArray[np.int64],
    *,
    table: PartyTable,
) -> LearnerWithRecords:
    """Return a party's learner with its records.

    Args:
        config: The federation file.
        features: The party's features, scaled, on its device.
        own: Its records that it may learn from.
        table: The party's table, for its name and its columns.

    Raises:
        DataError: If there are too few records.
        ConfigError: If the encoder does not fit the features.
    """
    name = table.name
    if "local" in config.family.pretraining and len(own) < 2:
        raise DataError(
            f"pretraining: {name!r} has {len(own)} records of its own to learn from; at least 2"
        )
    learner = config.family.build_learner(
        config.model,
        config.pretraining,
        features=features[torch.as_tensor(own, device=features.device)],
        feature_names=table.feature_names,
        party=name,
        seed=config.federation.seed,
    )
    return LearnerWithRecords(learner, features, own, name=name, seed=config.federation.seed)


def _warn(config: FederationConfig, table: PartyTable, observe: Observer) -> None:
    text = config.family.pretraining_warning(config.model, table.feature_names)
    if text is not None:
        observe(Warned(text=f"{table.name}: {text}"))


def build_pretraining_secondary(
    config: FederationConfig,
    table: PartyTable,
    data: SecondaryData,
    checkpoints: Checkpoints,
    *,
    start: int,
    observe: Observer,
) -> PretrainingSecondary:
    """Return a secondary as it takes part in pretraining.

    Args:
        config: The federation file.
        table: The party's table.
        data: The same as tensors, with its links.
        checkpoints: Where its iterations are saved.
        start: Iterations that are done already.
        observe: Hears of warnings.
    """
    _warn(config, table, observe)

    def build(own: npt.NDArray[np.int64]) -> LearnerWithRecords:
        return build_learner(config, data.features, own, table=table)

    return PretrainingSecondary(
        data,
        build=build,
        save=checkpoints.save_pretraining,
        observe=observe,
        restore=partial(checkpoints.load_pretraining, start) if start else None,
    )


def build_run(
    config: FederationConfig,
    table: PartyTable,
    primary: Primary,
    exchange: PretrainingExchange,
    files: PartyFiles,
    *,
    alignment: Alignment | None,
    start: int,
    observe: Observer,
) -> PretrainingRun:
    """Return the primary's run of pretraining.

    Args:
        config: The federation file.
        table: The primary's table.
        primary: The primary with its data and its exchange.
        exchange: How pretraining reaches the secondaries.
        files: The primary's own.
        alignment: Which rows are linked where; None where nothing is learned across parties.
        start: Iterations that are done already.
        observe: Hears of progress.

    Raises:
        DataError: If there are too few rows.
    """
    settings, data = config.pretraining, primary.data
    _warn(config, table, observe)
    rows = pretraining_rows(
        data.split,
        linked=None if alignment is None else alignment.everywhere,
        aligned=settings.aligned,
        seed=config.federation.seed,
    )
    run = PretrainingRun(
        build_learner(config, data.features, rows.own, table=table),
        exchange,
        rows,
        steps=config.family.pretraining,
        sending=sending(
            settings,
            batches=len(even_batches(rows.aligned, batch_size=settings.batch_size)),
            rows=len(rows.aligned),
            ledger=files.ledger_path("pretraining-ledger"),
            run=files.ledger.run,
            party=config.primary.name,
        ),
        rounds=primary.exchange.rounds,
        seed=config.federation.seed,
        save=files.checkpoints.save_pretraining,
        observe=observe,
    )
    if start:
        files.checkpoints.load_pretraining(start, run.load_state)
    return run
