"""Before a run: the device, aligned rows, and warnings to the user."""

from collections.abc import Callable
from typing import Any

import torch

from securevfl.config.federation import FederationConfig
from securevfl.config.parties import PartySettings
from securevfl.core.column_names import keys_in_clear
from securevfl.core.errors import ConfigError
from securevfl.core.progress import Observer, RowsAligned, Warned
from securevfl.data.tables import PartyTable
from securevfl.linkage.links import Alignment
from securevfl.linkage.spec import LinkSpec
from securevfl.linkage.stage.linking import protection_of
from securevfl.runtime.figures import finite_or_none

# The torch device that a run computes on.


def device_named(name: str) -> torch.device:
    """Return the torch device called ``name``.

    Raises:
        ConfigError: If it is not there.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f'device: must be "cpu" or "cuda", got {name!r}') from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f'device: must be "cpu" or "cuda", got {name!r}')
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: cuda was asked for, and torch finds no GPU; use --device cpu")
    return device


# Before a run: what a user should hear.


def warnings_about(config: FederationConfig) -> list[str]:
    """Return what a user should hear before a run, one sentence each."""
    warnings = []
    if len(config.secondaries) == 1:
        warnings.append(
            "there is one secondary, so averaging hides nothing: only the noise protects it"
        )
    if config.privacy.mechanism == "none":
        warnings.append('privacy.mechanism = "none": no noise is added and nothing is promised')
    shown = keys_in_clear(config.linkage.protection, config.primary.key)
    if shown is not None:
        warnings.append(shown)
    if config.privacy.accounting == "as-published":
        warnings.append(
            'privacy.accounting = "as-published": the papers\' formula is not a guarantee'
        )
    return warnings


def table_warnings(config: FederationConfig, party: PartySettings, table: PartyTable) -> list[str]:
    """Return what a party should hear about its own table, one sentence each.

    What a record is, the unit says: a linked row is a row of the primary, anything else is held by
    secondaries.
    """
    holder = "primary" if config.privacy.unit == "linked-row" else "secondary"
    text = config.privacy.delta_warning(table.num_rows) if party.role == holder else None
    found = [f"{party.name}: {text}" for text in (*([text] if text else []), *table.notes)]
    ids = [] if table.schema is None else [key.name for key in table.schema.keys if key.is_id]
    if ids and config.family.reads_keys(config.model, frozen=config.privacy.encoder == "frozen"):
        found.append(
            f"{party.name}: key {ids[0]!r} numbers rows (whole numbers, no two equal), and family "
            f"{config.family.name!r} reads keys as places; for ids take another family, or "
            f'linkage.metric = "exact" with model.keys_as_features = false'
        )
    return found


# Which rows are aligned, as it is told to whoever runs the primary.


def tell_alignment(
    spec: LinkSpec,
    alignment: Alignment | None,
    *,
    training_rows: int,
    log: Callable[..., None],
    observe: Observer,
) -> dict[str, Any] | None:
    """Tell how many rows are aligned, and warn where nothing says how far a link may be.

    Args:
        spec: What linking needed.
        alignment: What the primary was told; None where nobody asks.
        training_rows: Labelled rows that the joint model will learn from.
        log: The primary's log.
        observe: Hears of the counts and of the warning.

    Returns:
        Counts and the warning, for ``metrics.json``; None where nobody asks.
    """
    if alignment is None:
        return None
    figures = {
        **alignment.figures(
            max_distance=finite_or_none(spec.choice.max_distance),
            unit=protection_of(spec).unit(spec),
        ),
        "training_rows": training_rows,
    }
    log("aligned", **figures)
    observe(
        RowsAligned(
            aligned=figures["aligned"], rows=figures["rows"], by_secondary=figures["by_secondary"]
        )
    )
    if figures["warning"] is not None:
        observe(Warned(text=figures["warning"]))
    return figures
