"""Before a run: what a user should hear."""

from securevfl.config.federation import FederationConfig
from securevfl.config.parties import PartySettings
from securevfl.core.column_meanings import keys_in_clear
from securevfl.data.tables import PartyTable


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
