"""Countersigning in a party's life: who signs, for what, and what a run folder keeps of it."""

import json
from pathlib import Path

from securevfl.core import files as core_files
from securevfl.core.errors import ConfigError
from securevfl.federation.absence import absent_names
from securevfl.federation.countersign import Countersigner, Occasion
from securevfl.federation.run_plan import RunFacts
from securevfl.runtime.party_job import PartyLife
from securevfl.runtime.run_folder import write_federation


def countersigner(life: PartyLife, facts: RunFacts, *, session: bytes) -> Countersigner:
    """Return a party's part in countersigning; its ledger must be open.

    The run folder gets the federation file and ``identities.json``, both public, and the party's
    own folder ``ledger.json``, which says where its ledger lies: what ``securevfl verify`` reads.

    Args:
        life: The party.
        facts: The run's, with its id.
        session: The transport's id of the session.
    """
    config, ledger = life.config, life.files.ledger.file
    if not facts.predicts:
        # A run's file says what it was trained under; predictions may spend by a later one.
        write_federation(life.job.run_folder, config)
    _keep_identities(life)
    if ledger.path is not None:
        core_files.write_json(
            life.job.folder / "ledger.json",
            {"ledger": str(ledger.path.resolve()), "run": facts.run},
        )
    return Countersigner(
        ledger,
        life.identity,
        {
            party.name: life.pinned[party.name]
            for party in config.table_parties
            if party.name not in absent_names(config, facts.active)
        },
        Occasion(federation=config.federation.name, digest=config.digest, run=facts.run),
        session=session,
        known=life.files.ledger.others.of(config.federation.name),
    )


def read_identities(run_folder: Path) -> dict[str, dict[str, str]]:
    """Return the public identities by federation file's digest and party; none if none are kept.

    Raises:
        ConfigError: If the file is not one of identities.
    """
    path = run_folder / "identities.json"
    if not path.exists():
        return {}
    try:
        kept = json.loads(core_files.read_text(path))
        return {
            str(digest): {str(name): str(text) for name, text in parties.items()}
            for digest, parties in kept.items()
        }
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path}: is not a file of identities ({error})") from None


def _keep_identities(life: PartyLife) -> None:
    """Keep this start's public identities beside those of earlier starts of the same run.

    A launched run has new ones at every start. All its parties write the same content.
    """
    folder = life.job.run_folder
    kept = {**read_identities(folder), life.config.digest: dict(life.pinned)}
    core_files.write_json(folder / "identities.json", kept)
