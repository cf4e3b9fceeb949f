"""What each party keeps of a run whose training has ended: its :class:`KeptModel`."""

from pathlib import Path
from typing import Any

from securevfl.config.sections import PartySettings
from securevfl.data.tables import KeyTable, PartyTable
from securevfl.federation.base import Choice
from securevfl.federation.own_numbers import label_scaler_of, scaler_of
from securevfl.federation.rounds.primary import Primary
from securevfl.federation.rounds.secondary import Secondary
from securevfl.federation.run_plan import RunPlan
from securevfl.federation.saved_model import FOLDER, KeptModel, PrimaryPart
from securevfl.ledger.ledger import Ledger
from securevfl.linkage.spec import LinkedPrimary, LinkedSecondary
from securevfl.models.tasks import Metrics


def keep_secondary(
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
    KeptModel(
        **_common(plan, party, table, ledger),
        key_scale=linked.key_scale,
        similarity_scale=linked.similarity_scale,
        weights=secondary.final_weights(),
    ).save(folder / FOLDER)


def keep_primary(
    plan: RunPlan,
    table: PartyTable,
    linked: LinkedPrimary,
    keys: KeyTable,
    primary: Primary,
    ledger: Ledger,
    *,
    metrics: Metrics,
    choice: Choice | None,
    folder: Path,
) -> None:
    """Write the primary's model; see :func:`keep_secondary`.

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
    KeptModel(
        **_common(plan, plan.config.primary, table, ledger),
        key_scale=linked.key_scale,
        similarity_scale=None,
        weights=primary.top.state_dict(),
        primary=PrimaryPart(
            head=primary.head,
            classes=table.classes,
            label_scaler=label_scaler_of(table, primary.data.split, primary.head),
            threshold=primary.threshold if choice is None else choice.threshold,
            metrics=metrics,
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
        "feature_scaler": scaler_of(party, table),
        "noise_share_std": plan.noise_share_std,
        "ledger_head": ledger.head,
    }
