"""Build one party from the federation file and its own table: the same way in every runner."""

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Bool, Float32
from torch import nn

from securevfl.config.federation import FederationConfig
from securevfl.config.parties import PartySettings
from securevfl.config.rules import require_enough_records
from securevfl.core.errors import DataError, PrivacyError
from securevfl.core.progress import Observer
from securevfl.core.seeds import derive_seed
from securevfl.data.rows import RowSplit
from securevfl.data.scaling import LabelScaler, feature_scaler
from securevfl.data.tables import PartyTable
from securevfl.dp.ring_noise import ExactDiscreteGaussian, NoiseBuffer
from securevfl.federation.allowance import Allowance, SessionLimits
from securevfl.federation.dropout_stream import DropoutStream
from securevfl.federation.fitting import Fitting, build_direction_bottom
from securevfl.federation.kept_release import KeptRelease
from securevfl.federation.ledger import Ledger
from securevfl.federation.primary import Primary, PrimaryData
from securevfl.federation.release import Contribution
from securevfl.federation.rounds import Exchange
from securevfl.federation.run_plan import RunPlan
from securevfl.federation.secondary import Secondary, SecondaryData
from securevfl.federation.state_files import StateFolder
from securevfl.federation.updates import GradientNoise, require_separate_rows
from securevfl.linkage.linked import LinkedPrimary, LinkedSecondary
from securevfl.models.building import bottom_of, top_of
from securevfl.models.directions import DirectionBottom
from securevfl.models.initial import initialise
from securevfl.models.optimisers import build_optimizer
from securevfl.models.tasks import TaskHead


def build_secondary(
    plan: RunPlan,
    party: PartySettings,
    table: PartyTable,
    linked: LinkedSecondary,
    ledger: Ledger,
    *,
    device: torch.device,
    files: StateFolder | None = None,
) -> Secondary:
    """Initialise and protect one linked secondary.

    Args:
        plan: The run.
        party: Who it is.
        table: Its table.
        linked: Its links.
        ledger: Its own, open.
        device: Where it computes.
        files: Keeps what a frozen encoder's release rests on; None keeps nothing, and then the run
            cannot be resumed.

    Raises:
        ConfigError: If its bottom model is not what its family says.
        DataError: If its table has too few records.
        PrivacyError: If its features were made, or its bottom model mixes rows or records, in a
            way that the promise does not allow.
    """
    config = plan.config
    require_enough_records(config, table)
    if config.privacy.encoder != "trained" and config.privacy.mechanism != "none":
        _require_declared_features(table, encoder=config.privacy.encoder)
    features = features_of(party, table)
    bottom = _build_bottom(plan, party, table)
    if _promised_row_by_row(config):
        require_separate_rows(bottom, encoder=config.privacy.encoder)
    records = {"features": torch.from_numpy(features), "keys": torch.from_numpy(linked.keys)}
    bottom.to(device)
    kept = None
    if plan.frozen:
        fit = None
        if isinstance(bottom, DirectionBottom) and plan.releases.fitting:
            fit = Fitting(plan, bottom, features, ledger, name=party.name)
        kept = KeptRelease(
            files, ledger, bottom=bottom, links=linked.source, records=records, fit=fit
        )
    return Secondary(
        SecondaryData(
            name=party.name,
            features=records["features"].to(device),
            keys=records["keys"].to(device),
            links=kept or linked.source,
            primary_rows=linked.primary_rows,
        ),
        bottom,
        Contribution(
            plan.aggregation(),
            noise=_release_noise(plan),
            ledger=kept or ledger,
        ),
        allowance=Allowance(SessionLimits.of(plan, party=party.name)),
        dropout=DropoutStream(config.federation.seed, party.name, device=device),
        optimizer=None if plan.frozen else optimizer_of(config, bottom),
        gradient_noise=_gradient_noise(plan),
        kept=kept,
    )


def _build_bottom(plan: RunPlan, party: PartySettings, table: PartyTable) -> nn.Module:
    config = plan.config
    return _initialised(
        config,
        party.name,
        lambda: (
            build_direction_bottom(config, party, num_features=table.num_features)
            if config.encoder
            else bottom_of(
                config.family,
                config.model,
                num_features=table.num_features,
                key_dim=table.key_dim,
                feature_names=table.feature_names,
                frozen=plan.frozen,
                pooled=plan.releases.pooled,
            )
        ),
    )


def _promised_row_by_row(config: FederationConfig) -> bool:
    """Whether the budget holds only if no row moves another's representation."""
    privacy = config.privacy
    published = privacy.encoder == "trained" and privacy.accounting == "as-published"
    return privacy.mechanism != "none" and not published


def _release_noise(plan: RunPlan) -> NoiseBuffer | None:
    # The accounting speaks of rows that are means over K slots; what leaves is their sum.
    noise_std = plan.noise_share_std * plan.cut.slots
    if noise_std == 0:
        return None
    return NoiseBuffer(ExactDiscreteGaussian(noise_std / plan.cut.ring.granularity))


def _gradient_noise(plan: RunPlan) -> GradientNoise | None:
    privacy = plan.config.privacy
    if privacy.encoder != "dp-trained":
        return None
    return GradientNoise(
        clip_norm=privacy.update_clip_norm,
        noise_std=plan.releases.gradient_noise_std(plan.noise_share_std),
    )


def optimizer_of(config: FederationConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Return a party's optimizer, as the federation file sets it."""
    training = config.training
    return build_optimizer(
        training.optimizer,
        model.parameters(),
        learning_rate=training.learning_rate,
        weight_decay=training.weight_decay,
    )


def features_of(party: PartySettings, table: PartyTable) -> Float32[np.ndarray, "rows features"]:
    """Return a party's features, scaled as the federation file says."""
    scaler = feature_scaler(
        table.features, table.feature_names, scaling=party.scaling, bounds=party.bounds
    )
    return scaler.apply(table.features)


def _require_declared_features(table: PartyTable, *, encoder: str) -> None:
    if table.inferred_columns:
        column = table.inferred_columns[0]
        raise PrivacyError(
            f"table of {table.name!r}: column {column!r} holds words, and which words there are "
            f"depends on the records, so a {encoder} encoder's epsilon would not hold; list them "
            f'as party.categories = {{ {column} = ["...", "..."] }}, or exclude the column'
        )


def build_top(config: FederationConfig, table: PartyTable, *, outputs: int) -> nn.Module:
    """Return the primary's top model with its initial weights.

    Args:
        config: The federation file.
        table: The primary's table.
        outputs: Numbers that the task asks for.

    Raises:
        ConfigError: If the family fails to build it, or builds another.
    """
    return _initialised(
        config,
        config.primary.name,
        lambda: top_of(
            config.family,
            config.model,
            num_features=table.num_features,
            key_dim=table.key_dim,
            feature_names=table.feature_names,
            outputs=outputs,
            classes=config.federation.task != "regression",
        ),
    )


def _initialised(config: FederationConfig, party: str, build: Callable[[], nn.Module]) -> nn.Module:
    """Build a model from its party's stream, and its positional encoding as its family says."""
    with torch.random.fork_rng(devices=[]):
        model = build()
    whose = () if config.family.shares_positions(config.model) else (party,)
    initialise(
        model,
        seed=derive_seed(config.federation.seed, "init", party),
        positions_seed=derive_seed(config.federation.seed, "init", "positions", *whose),
    )
    return model


def task_head(config: FederationConfig, table: PartyTable, split: RowSplit) -> TaskHead:
    """Return the task with the numbers of the primary's training labels.

    Raises:
        DataError: If the labels are constant in the training rows.
    """
    assert table.labels is not None, "the primary's table has labels"
    if config.federation.task == "regression":
        scaler = LabelScaler.fit(table.labels[split.train])
        return TaskHead(
            task="regression", label_deviation=scaler.deviation, chosen=config.training.metric
        )
    classes = len(table.classes or ()) if config.federation.task == "multiclass" else 1
    return TaskHead(task=config.federation.task, num_classes=classes, chosen=config.training.metric)


def targets_of(table: PartyTable, split: RowSplit, head: TaskHead) -> torch.Tensor:
    """Return the labels as losses take them; regression labels are standardised."""
    assert table.labels is not None, "the primary's table has labels"
    labels = table.labels
    if head.task == "regression":
        labels = LabelScaler.fit(labels[split.train]).apply(labels)
    targets = torch.from_numpy(labels)
    return targets if head.task == "multiclass" else targets.to(torch.float32)


def primary_data(
    config: FederationConfig,
    table: PartyTable,
    split: RowSplit,
    linked: LinkedPrimary,
    *,
    device: torch.device,
) -> PrimaryData:
    """Return the primary's table as tensors.

    Its scaler is fitted to all of its rows, which are its own affair: no promise is made about
    them. Regression labels are standardised by training rows alone.

    Raises:
        DataError: If the labels are constant in the training rows, or none of these is aligned
            where only such rows may train.
    """
    head = task_head(config, table, split)
    return PrimaryData(
        features=torch.from_numpy(features_of(config.primary, table)).to(device),
        keys=torch.from_numpy(linked.keys).to(device),
        targets=targets_of(table, split, head).to(device),
        head=head,
        split=split,
        aligned=_aligned(config, linked, split),
        similarities=None
        if linked.similarities is None
        else torch.from_numpy(linked.similarities).to(device),
    )


def _aligned(
    config: FederationConfig, linked: LinkedPrimary, split: RowSplit
) -> Bool[np.ndarray, " rows"] | None:
    """Return which rows training rounds may have; None for all."""
    if config.training.rows == "all" or linked.alignment is None:
        return None
    aligned = linked.alignment.everywhere
    if not aligned[split.train].any():
        raise DataError(
            f"training.rows: none of the {len(split.train)} labelled training rows is linked at "
            f'every secondary; set it to "all", or look at linkage.max_distance'
        )
    return aligned


def build_primary(
    plan: RunPlan,
    table: PartyTable,
    data: PrimaryData,
    exchange: Exchange,
    *,
    observe: Observer,
) -> Primary:
    """Initialise the primary.

    Args:
        plan: The run.
        table: The primary's table, for the names of its columns.
        data: The same as tensors.
        exchange: Where the secondaries are.
        observe: Hears of progress.
    """
    device = data.features.device
    top = build_top(plan.config, table, outputs=data.head.outputs).to(device)
    return Primary(
        plan,
        data,
        top,
        exchange,
        optimizer=optimizer_of(plan.config, top),
        dropout=DropoutStream(plan.config.federation.seed, plan.config.primary.name, device=device),
        observe=observe,
    )
