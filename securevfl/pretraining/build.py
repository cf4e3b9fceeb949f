"""Build each party's part of pretraining from the federation file."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from securevfl.config.federation import FederationConfig
from securevfl.core.errors import DataError
from securevfl.data.rows import RowSplit
from securevfl.data.tables import PartyTable
from securevfl.federation.checkpoint import Checkpoints
from securevfl.federation.rounds import RoundCounter
from securevfl.linkage.sources import LinkSource
from securevfl.pretraining.exchange import PretrainingExchange
from securevfl.pretraining.learner_with_records import LearnerWithRecords
from securevfl.pretraining.rows import even_batches, pretraining_rows
from securevfl.pretraining.run import PretrainingRun
from securevfl.pretraining.secondary import PretrainingSecondary
from securevfl.pretraining.sending import sending

Observer = Callable[[Mapping[str, object]], None]


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
        observe({"event": "warning", "text": f"{table.name}: {text}"})


def build_pretraining_secondary(
    config: FederationConfig,
    table: PartyTable,
    features: Tensor,
    links: LinkSource,
    *,
    primary_rows: int,
    checkpoints: Checkpoints,
    start: int,
    observe: Observer,
) -> PretrainingSecondary:
    """Return a secondary's part.

    Args:
        config: The federation file.
        table: The party's table.
        features: Its features, scaled, on its device.
        links: Its links.
        primary_rows: Rows of the primary.
        checkpoints: Where its iterations are saved.
        start: Iterations that are done already.
        observe: Hears of warnings.
    """
    name = table.name

    _warn(config, table, observe)

    def build(own: npt.NDArray[np.int64]) -> LearnerWithRecords:
        return build_learner(config, features, own, table=table)

    return PretrainingSecondary(
        name,
        links=links,
        records=table.num_rows,
        primary_rows=primary_rows,
        build=build,
        save=checkpoints.save_pretraining,
        observe=observe,
        start=checkpoints.load_pretraining(start) if start else None,
    )


def build_run(
    config: FederationConfig,
    table: PartyTable,
    features: Tensor,
    split: RowSplit,
    exchange: PretrainingExchange,
    *,
    rounds: RoundCounter,
    folder: Path,
    checkpoints: Checkpoints,
    start: int,
    observe: Observer,
) -> PretrainingRun:
    """Return the primary's part.

    Args:
        config: The federation file.
        table: The primary's table.
        features: The primary's features, scaled, on its device.
        split: Its rows.
        exchange: Where the secondaries are.
        rounds: Numbers of rounds.
        folder: The primary's own folder.
        checkpoints: Where its iterations are saved.
        start: Iterations that are done already.
        observe: Hears of progress.

    Raises:
        DataError: If there are too few rows.
    """
    settings, name = config.pretraining, config.primary.name
    _warn(config, table, observe)
    rows = pretraining_rows(split, aligned=settings.aligned, seed=config.federation.seed)
    learning = build_learner(config, features, rows.own, table=table)
    run = PretrainingRun(
        learning,
        exchange,
        rows,
        steps=config.family.pretraining,
        sending=sending(
            settings,
            batches=len(even_batches(rows.aligned, batch_size=settings.batch_size)),
            rows=len(rows.aligned),
            folder=folder,
            party=name,
        ),
        rounds=rounds,
        seed=config.federation.seed,
        save=checkpoints.save_pretraining,
        observe=observe,
    )
    if start:
        run.load_state(checkpoints.load_pretraining(start))
    return run
