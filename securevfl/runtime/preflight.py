"""Before a run: what is refused, what is warned of, and the budget that it must fit into."""

from pathlib import Path

from securevfl.config.federation import FederationConfig
from securevfl.config.parties import PartySettings
from securevfl.data.tables import PartyTable
from securevfl.dp.release_plan import ReleasePlan
from securevfl.federation.checkpoint import Checkpoints, used_folder
from securevfl.federation.ledger import Ledger


def open_ledger(
    folder: Path,
    config: FederationConfig,
    plan: ReleasePlan,
    *,
    party: str,
    resume: bool,
    simulated: bool = False,
) -> Ledger:
    """Open a party's ledger: that of this run, or one that all runs on the same data share.

    A fresh run must fit into what the ledger has left. A resumed one has spent a part of it, and
    asks before every epoch and every release. A simulated run's own file is not synced line by
    line: nothing is released, and two syncs a round cost more than training a small model.

    Raises:
        ConfigError: If a fresh run would start in the folder of another one.
        BudgetExceededError: If a fresh run could not finish; nothing was sent then.
    """
    own = folder / "ledger.jsonl"
    shared = config.privacy.ledger
    path = own if shared is None else Path(shared).expanduser().parent / f"{party}.jsonl"
    if not resume:
        Checkpoints(folder, settings_digest=config.settings_digest).require_unused()
    ledger = Ledger(
        path,
        party=party,
        plan=plan,
        noise_share_std=plan.noise_share_std(),
        durable=not simulated or shared is not None,
    )
    try:
        if not resume:
            # A run that failed before its first release has used nothing but its folder's name.
            if shared is None and ledger.all_rounds:
                raise used_folder(folder)
            ledger.require_room(
                rounds=plan.rounds, row_releases=plan.row_releases, passes=plan.releases_per_row
            )
    except BaseException:
        ledger.close()
        raise
    return ledger


def warnings_about(config: FederationConfig) -> list[str]:
    """Return what a user should hear before a run, one sentence each."""
    warnings = []
    if len(config.secondaries) == 1:
        warnings.append(
            "there is one secondary, so averaging hides nothing: only the noise protects it"
        )
    if config.privacy.mechanism == "none":
        warnings.append('privacy.mechanism = "none": no noise is added and nothing is promised')
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
    return [f"{party.name}: {text}"] if text else []
