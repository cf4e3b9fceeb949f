"""Build each party's part of pretraining from the federation file."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from securevfl.config.federation import FederationConfig
from securevfl.data.rows import RowSplit
from securevfl.data.tables import PartyTable
from securevfl.federation.checkpoint import Checkpoints
from securevfl.federation.rounds import RoundCounter
from securevfl.linkage.sources import LinkSource
from securevfl.models.fedhssl.augment import Augmentation, CorruptedFeatures
from securevfl.models.fedhssl.augment_images import AugmentedImages
from securevfl.models.fedhssl.columns import CategoricalColumn, one_hot_columns
from securevfl.models.fedhssl.learner import PartyLearner
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
    name, index = table.name, torch.as_tensor(own, device=features.device)
    columns = config.model.columns(table.feature_names)
    learner = PartyLearner(
        config.model,
        config.pretraining,
        num_features=features.shape[1],
        columns=columns,
        records=len(own),
        # A perceptron sees words as 0/1 columns, and still a word is replaced as a whole.
        augment=_augmentation(config, features[index], one_hot_columns(table.feature_names)),
        party=name,
        seed=config.federation.seed,
        device=features.device,
    )
    return LearnerWithRecords(learner, features, own, name=name, seed=config.federation.seed)


def _warn_without_words(config: FederationConfig, table: PartyTable, observe: Observer) -> None:
    if config.model.encoder == "embedding" and not config.model.columns(table.feature_names):
        text = (
            f'{table.name}: no feature column holds words, so that encoder = "embedding" embeds '
            f"nothing there; list the values of a column of codes as party.categories"
        )
        observe({"event": "warning", "text": text})


def _augmentation(
    config: FederationConfig, own: Tensor, columns: Sequence[CategoricalColumn]
) -> Augmentation:
    if config.model.encoder == "resnet18":
        low, high = (float(end) for end in torch.aminmax(own))
        return AugmentedImages(image=config.model.image, low=low, high=high)
    return CorruptedFeatures(own, rate=config.pretraining.corruption, columns=columns)


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
    """Return a secondary as it takes part in pretraining.

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

    _warn_without_words(config, table, observe)

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
    """Return the primary's run of pretraining.

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
    _warn_without_words(config, table, observe)
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
