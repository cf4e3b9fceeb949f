"""Each party's half of the network: built from the federation file, saved when the run ends."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32
from torch import nn

from securevfl.config.federation import FederationConfig
from securevfl.config.rules import require_enough_records
from securevfl.config.sections import PartySettings
from securevfl.core.conventions import derive_seed
from securevfl.core.errors import PrivacyError
from securevfl.core.progress import Observer
from securevfl.data.tables import KeyTable, PartyTable, RowSplit
from securevfl.dp.laplace import GridScores, LaplacePlan
from securevfl.dp.laplace_noise import LaplaceShare
from securevfl.dp.ring_noise import ExactDiscreteGaussian, NoiseBuffer, RingNoise
from securevfl.dp.symbols import SymbolNoise
from securevfl.federation import base
from securevfl.federation.checkpoint import StateFolder
from securevfl.federation.encoder_fitting import FittedBottom, PrincipalFitting, build_encoder
from securevfl.federation.rounds import fitted_primary
from securevfl.federation.rounds.cached_release import CachedRelease, CountedRelease
from securevfl.federation.rounds.exchanges import Exchange
from securevfl.federation.rounds.network_primary import NetworkPrimary
from securevfl.federation.rounds.primary import Primary, PrimaryData, PrimaryInputs
from securevfl.federation.rounds.release import KeySymbols, RowScores, Scores, SecondaryRelease
from securevfl.federation.rounds.secondary import Secondary, SecondaryData
from securevfl.federation.rounds.updates import DropoutStream, GradientNoise
from securevfl.federation.run_plan import RunPlan, pools
from securevfl.federation.saved_model import FOLDER, PrimaryPart, SavedModel
from securevfl.federation.session.party_files import PartyFiles
from securevfl.federation.session.request_validator import RequestValidator, SessionLimits
from securevfl.ledger.ledger import Ledger
from securevfl.linkage.spec import LinkedPrimary, LinkedSecondary
from securevfl.models.building import bottom_of, require_no_batch_norm, require_rows_apart, top_of
from securevfl.models.fitted_top import FittedTop, MixedTop, TiedTop
from securevfl.models.frozen import LARGEST_SCORE, DirectionBottom
from securevfl.models.layers import initialise
from securevfl.models.optimisers import PacedOptimizer, build_optimizer
from securevfl.models.registry import is_built_in
from securevfl.models.tasks import Metrics, TaskHead


@dataclass(frozen=True, kw_only=True, eq=False)
class BottomAtWork:
    """A secondary's bottom model on the device, and its own records as the model takes them."""

    bottom: nn.Module
    features: Float32[np.ndarray, "records features"]
    row_by_row: bool
    """True if the bottom model takes one row at a time."""


def bottom_at_work(
    plan: RunPlan,
    party: PartySettings,
    table: PartyTable,
    *,
    device: torch.device,
    model: SavedModel | None = None,
) -> BottomAtWork:
    """Begin one secondary's bottom model, or load the one that it has kept, for all requests.

    Args:
        plan: The run.
        party: Who it is.
        table: Its table.
        device: Where it computes.
        model: Its half of the network as it was kept; None begins a new one.

    Raises:
        ConfigError: If the model is not what its family says, or the kept one does not fit.
        DataError: If its table has too few records.
        PrivacyError: If features, or a model that mixes rows or records, break the promise.
    """
    config = plan.config
    require_enough_records(config, table)
    if config.features_are_declared:
        base.require_declared_features(table, encoder=config.regime.name)
    features = base.features_of(party, table, model)
    bottom = build_bottom(config, party, table)
    if model is not None:
        model.into(bottom)
    privacy = config.privacy
    # Then the budget holds only if no row moves another's representation.
    sound = privacy.accounting == "sound" or config.regime.caps_records
    promised = privacy.mechanism != "none" and sound
    apart = promised and not is_built_in(config.family)
    if promised:
        require_no_batch_norm(bottom, encoder=config.regime.name)
    if apart and config.encoder is None:
        require_rows_apart(
            config.family,
            config.model,
            bottom,
            num_features=table.num_features,
            key_dim=table.key_dim,
            encoder=config.regime.name,
            learns=config.regime.learns,
            noises_updates=config.regime.noises_updates,
        )
    return BottomAtWork(bottom=bottom.to(device), features=features, row_by_row=apart)


def build_secondary(
    plan: RunPlan,
    party: PartySettings,
    table: PartyTable,
    linked: LinkedSecondary,
    ledger: Ledger,
    *,
    device: torch.device,
    files: StateFolder | None = None,
    kept_bottom: BottomAtWork | None = None,
    after_round: int = 0,
) -> Secondary:
    """Initialise and protect one linked secondary.

    Args:
        plan: The run.
        party: Who it is.
        table: Its table.
        linked: Its links.
        ledger: Its own, open.
        device: Where it computes.
        files: Keeps what a frozen encoder's release rests on; with None no run is resumed.
        kept_bottom: Its half of the network as it was kept; None begins a new one.
        after_round: Round numbers up to it were used before in this session.

    Raises:
        SecureVflError: What :func:`bottom_at_work` raises, where it begins a new one.
    """
    config = plan.config
    at_work = kept_bottom or bottom_at_work(plan, party, table, device=device)
    bottom, features = at_work.bottom, at_work.features
    records = {"features": torch.from_numpy(features), "keys": torch.from_numpy(linked.keys)}
    kept, counted = None, None
    most, symbols = plan.releases.releases_per_record, plan.releases.symbols
    # Behind noise of its own every row is a release.
    firsts = None if symbols is None else linked.firsts
    if most is not None:
        texts = None if symbols is None else linked.texts
        counted = CountedRelease(linked.source, ledger, most, firsts=firsts, texts=texts)
    elif plan.regime.releases_once:
        fit: Callable[[], None] | None = None
        if kept_bottom is None and isinstance(bottom, FittedBottom) and plan.releases.fitting:
            fit = _refuse_unfitted
            if isinstance(bottom, DirectionBottom) and not config.encoder_reads_labels:
                fit = PrincipalFitting(plan, bottom, features, ledger)
        kept = CachedRelease(
            files,
            ledger,
            bottom=bottom,
            links=linked.source,
            records=records,
            firsts=firsts,
            fit=fit,
        )
    data = SecondaryData(
        name=party.name,
        features=records["features"].to(device),
        keys=records["keys"].to(device),
        links=counted or kept or linked.source,
        primary_rows=linked.primary_rows,
    )
    charge = counted or kept
    noise = noise_of(plan)
    contribution = SecondaryRelease(
        plan.aggregation(),
        noise=None if noise is None else NoiseBuffer(noise),
        scores=_scores_of(plan, charge),
        ledger=charge or ledger,
    )
    privacy, gradient_noise = config.privacy, None
    if plan.learns and plan.regime.noises_updates:
        gradient_noise = GradientNoise(
            clip_norm=privacy.update_clip_norm,
            noise_std=plan.releases.gradient_noise_std(plan.noise_share_std),
        )
    return Secondary(
        data,
        bottom,
        contribution,
        validator=RequestValidator(
            SessionLimits.of(plan, party=party.name, after_round=after_round)
        ),
        dropout=DropoutStream(config.federation.seed, party.name, device=device),
        optimizer=optimizer_of(config, bottom) if plan.learns else None,
        gradient_noise=gradient_noise,
        kept=kept,
        row_by_row=at_work.row_by_row,
        precision=config.training.precision if plan.regime.learns else "float32",
    )


def noise_of(plan: RunPlan) -> RingNoise | None:
    """Return what draws a secondary's share of noise; None adds none."""
    cut, laplace = plan.cut, plan.releases.laplace
    if laplace is not None:
        return LaplaceShare(
            plan.noise_share_std * laplace.largest,
            plan.releases.honest,
            grid_unit=round(cut.grid_step / cut.ring.granularity),
        )
    # The accounting speaks of rows that are means over K slots; what leaves is their sum.
    units = cut.noise_share_std * cut.slots / cut.ring.granularity
    return ExactDiscreteGaussian(units) if units else None


def _scores_of(plan: RunPlan, charge: CachedRelease | CountedRelease | None) -> Scores | None:
    """Return what makes a row's score or votes; None where vectors are released.

    Raises:
        PrivacyError: If the encoder is not frozen.
    """
    scores, clip_norm = plan.releases.scores, plan.config.privacy.clip_norm
    if scores is None:
        return None
    if charge is None:
        raise PrivacyError("scores are of frozen encoders, whose rows are released once")
    unit = clip_norm / LARGEST_SCORE
    if isinstance(scores, LaplacePlan):
        grid = GridScores(plan=scores, unit=unit)
        return RowScores(scores=grid, step=plan.cut.grid_step)
    noise = SymbolNoise(plan=scores, odds=plan.noise_share_std, unit=unit)
    return KeySymbols(noise=noise, keys=charge, clip_norm=clip_norm)


def begin_secondary(
    plan: RunPlan,
    name: str,
    table: PartyTable,
    linked: LinkedSecondary,
    files: PartyFiles,
    *,
    device: torch.device,
) -> Secondary:
    """Build a secondary's half of the network, from its checkpoint where the run is resumed.

    Args:
        plan: The run, with where it starts.
        name: The party's name.
        table: Its table.
        linked: Its links.
        files: Its own; its ledger is open.
        device: Where it computes.

    Raises:
        SecureVflError: What :func:`build_secondary` raises.
    """
    checkpoints = files.checkpoints
    secondary = build_secondary(
        plan,
        plan.config.party(name),
        table,
        linked,
        files.ledger,
        files=checkpoints.files,
        device=device,
    )
    epoch = plan.facts.resume_epoch
    saves = plan.regime.saves_epochs
    if saves and epoch:
        checkpoints.load(epoch, partial(secondary.resume, epoch))
    elif files.resume:
        checkpoints.forget_after(0)
        if saves:
            secondary.validator.start_after(epoch)
    return secondary


def _refuse_unfitted() -> None:
    """Refuse the release of an encoder that a stage has to fit, and has not.

    Raises:
        PrivacyError: Always.
    """
    raise PrivacyError("the primary asks for rows before it has let their encoder be fitted")


def build_bottom(config: FederationConfig, party: PartySettings, table: PartyTable) -> nn.Module:
    """Return a secondary's bottom model with its initial weights.

    Args:
        config: The federation file.
        party: Whose it is.
        table: Its table.

    Raises:
        ConfigError: If the family fails to build it, or builds another.
        PrivacyError: If it does not treat each record alone where it must or claims to.
    """
    return _initialise_model(
        config,
        party.name,
        lambda: (
            build_encoder(
                config,
                config.encoder,
                party,
                num_features=table.num_features,
                words=base.places_of_words(table),
            )
            if config.encoder
            else bottom_of(
                config.family,
                config.model,
                num_features=table.num_features,
                key_dim=table.key_dim,
                feature_names=table.feature_names,
                frozen=not config.regime.learns,
                pooled=pools(config),
            )
        ),
    )


def optimizer_of(config: FederationConfig, model: nn.Module) -> PacedOptimizer:
    """Return a party's optimizer, as the federation file sets it."""
    training = config.training
    optimizer = build_optimizer(
        training.optimizer,
        model.parameters(),
        learning_rate=config.learning_rate,
        weight_decay=training.weight_decay,
    )
    return PacedOptimizer(
        optimizer,
        learning_rate=config.learning_rate,
        schedule=training.schedule,
        epochs=config.training.epochs,
    )


def build_top(config: FederationConfig, table: PartyTable, head: TaskHead) -> nn.Module:
    """Return the primary's top model with its initial weights, or an estimator to be fitted.

    Args:
        config: The federation file.
        table: The primary's table, or new rows of it.
        head: The task.

    Raises:
        ConfigError: If the family fails to build it, or builds another.
    """
    if config.top is not None and config.top.corrects:
        positions, width = config.family.cut_shape(config.model)
        tied = TiedTop(width=positions * width, outputs=head.outputs)
        # Beside several classes' scores trees took long, and brought nothing.
        if config.top.name == "tied" or head.outputs > 1:
            return tied
        return MixedTop(tied, fitted_primary.build_fitted_top(config, table, head))
    if config.top is not None:
        return fitted_primary.build_fitted_top(config, table, head)
    return _initialise_model(
        config,
        config.primary.name,
        lambda: top_of(
            config.family,
            config.model,
            num_features=table.num_features,
            key_dim=table.key_dim,
            feature_names=table.feature_names,
            outputs=head.outputs,
            classes=config.federation.task != "regression",
        ),
    )


def _initialise_model(
    config: FederationConfig, party: str, build: Callable[[], nn.Module]
) -> nn.Module:
    """Build a model from its party's stream, and its positional encoding as its family says."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # A primary that has labels alone brings no number to its first layer.
        warnings.filterwarnings("ignore", message="Initializing zero-element tensors")
        model = build()
    whose = () if config.family.shares_positions(config.model) else (party,)
    initialise(
        model,
        seed=derive_seed(config.federation.seed, "init", party),
        positions_seed=derive_seed(config.federation.seed, "init", "positions", *whose),
    )
    return model


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
    head = base.task_head(config, table, split)
    shared = linked.firsts if config.encoder_reads_labels else None
    return PrimaryData(
        features=torch.from_numpy(base.features_of(config.primary, table)).to(device),
        keys=torch.from_numpy(linked.keys).to(device),
        targets=base.targets_of(table, split, head).to(device),
        head=head,
        split=split,
        firsts=None if shared is None else torch.from_numpy(shared).to(device),
        aligned=base.aligned_rows(config, linked, split),
        similarities=None
        if linked.similarities is None
        else torch.from_numpy(linked.similarities).to(device),
    )


def build_primary(
    plan: RunPlan,
    table: PartyTable,
    data: PrimaryData,
    exchange: Exchange,
    *,
    observe: Observer,
    estimator: Any = None,
) -> Primary:
    """Initialise the primary.

    Args:
        plan: The run.
        table: The primary's table, for the names of its columns.
        data: The same as tensors.
        exchange: Where the secondaries are.
        observe: Hears of progress.
        estimator: Of scikit-learn, as a top model that no federation file can name.

    Raises:
        ConfigError: If the family fails to build its top model, or builds another.
    """
    device = data.features.device
    top = build_top(plan.config, table, data.head).to(device)
    named = plan.config.top
    if named is not None and isinstance(top, FittedTop | TiedTop | MixedTop):
        features, keys = fitted_primary.read_by_top(
            plan.config, table, features=data.features, keys=data.keys
        )
        inputs = PrimaryInputs(features=features, keys=keys, similarities=data.similarities)
        fitted_by = named.name if estimator is None else estimator
        fit = (
            fitted_primary.EstimatorFit(top, fitted_by)
            if isinstance(top, FittedTop)
            else fitted_primary.CorrectionFit(top)
        )
        return fitted_primary.FittedPrimary(plan, data, inputs, exchange, fit=fit, observe=observe)
    return NetworkPrimary(
        plan,
        data,
        top,
        exchange,
        optimizer=optimizer_of(plan.config, top),
        dropout=DropoutStream(plan.config.federation.seed, plan.config.primary.name, device=device),
        observe=observe,
    )


def save_secondary(
    plan: RunPlan,
    table: PartyTable,
    linked: LinkedSecondary,
    secondary: Secondary,
    ledger: Ledger,
    *,
    folder: Path,
) -> None:
    """Write a secondary's model into its own folder of the run.

    Args:
        plan: The run.
        table: Its table.
        linked: Its links, for how keys and similarities are scaled.
        secondary: Its half of the network, at the best epoch.
        ledger: Its own.
        folder: Its own within the run folder.

    Raises:
        StorageError: If the disk takes no more.
    """
    party = plan.config.party(secondary.name)
    SavedModel(
        **_common(plan, party, table, ledger),
        key_scale=linked.key_scale,
        similarity_scale=linked.similarity_scale,
        weights=secondary.final_weights(),
    ).save(folder / FOLDER)


def save_primary(
    plan: RunPlan,
    table: PartyTable,
    linked: LinkedPrimary,
    keys: KeyTable,
    primary: Primary,
    ledger: Ledger,
    *,
    metrics: Metrics,
    choice: base.Choice | None,
    folder: Path,
) -> None:
    """Write the primary's model; see :func:`save_secondary`.

    Args:
        plan: The run.
        table: Its table.
        linked: How its keys were scaled.
        keys: Its keys, kept where records choose their rows.
        primary: Its half of the network, at the best epoch.
        ledger: Its own.
        metrics: Of the test rows.
        choice: Who answers; None where there is no base.
        folder: Its own within the run folder.

    Raises:
        StorageError: If the disk takes no more.
    """
    SavedModel(
        **_common(plan, plan.config.primary, table, ledger),
        key_scale=linked.key_scale,
        similarity_scale=None,
        weights=primary.top.state_dict(),
        primary=PrimaryPart(
            head=primary.head,
            classes=table.classes,
            label_scaler=base.label_scaler_of(table, primary.data.split, primary.head),
            threshold=primary.threshold if choice is None else choice.threshold,
            metrics=metrics,
            rows=table.num_rows,
            base=None if choice is None else choice.base,
            alone=None if choice is None else choice.alone.best.model,
            scale=primary.scale,
            used="joint" if choice is None else choice.decision.used,
            # Of all rows: to leave out those of one part would show which they are.
            keys=None if plan.config.privacy.links_per_record is None else keys,
        ),
    ).save(folder / FOLDER)


def _common(
    plan: RunPlan, party: PartySettings, table: PartyTable, ledger: Ledger
) -> dict[str, Any]:
    config = plan.config
    return {
        "party": party.name,
        "role": party.role,
        "federation": config.federation.name,
        "digest": config.model_digest,
        "run": plan.facts.run,
        "family": config.family.name,
        "settings": dict(config.source["model"]),
        "features": table.feature_names,
        "schema": None if table.schema is None else table.schema.as_json(),
        "feature_scaler": base.scaler_of(party, table),
        "noise_share_std": plan.noise_share_std,
        "ledger_head": ledger.head,
    }
