"""What a party countersigns, and the files of a run folder that say so."""

import json
from pathlib import Path

from securevfl.core import errors, files
from securevfl.federation.run_plan import RunFacts
from securevfl.federation.session.membership import absent_names
from securevfl.ledger.countersigning import Countersigner, Occasion
from securevfl.runtime.party import PartySession
from securevfl.runtime.run_folder import write_federation


def countersigner(party: PartySession, facts: RunFacts, *, session: bytes) -> Countersigner:
    """Return a party's part in countersigning; its ledger must be open.

    The run folder gets the federation file and ``identities.json``, both public, and the party's
    own folder ``ledger.json``, the place of its ledger, for ``securevfl ledger verify``.

    Args:
        party: The party.
        facts: The run's, with its id.
        session: The transport's id of the session.
    """
    config, ledger = party.config, party.files.ledger.file
    if not facts.predicts:
        # A run's file says what it was trained under; predictions may spend by a later one.
        write_federation(party.job.run_folder, config)
    _keep_identities(party)
    if ledger.path is not None:
        files.write_json(
            party.job.folder / "ledger.json",
            {"ledger": str(ledger.path.resolve()), "run": facts.run},
        )
    return Countersigner(
        ledger,
        party.identity,
        {
            table_party.name: party.pinned[table_party.name]
            for table_party in config.table_parties
            if table_party.name not in absent_names(config, facts.active)
        },
        Occasion(federation=config.federation.name, digest=config.digest, run=facts.run),
        session=session,
        known=party.files.ledger.others.of(config.federation.name),
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
        kept = json.loads(files.read_text(path))
        return {
            str(digest): {str(name): str(text) for name, text in parties.items()}
            for digest, parties in kept.items()
        }
    except (OSError, ValueError, AttributeError) as error:
        raise errors.ConfigError(f"{path}: is not a file of identities ({error})") from None


def _keep_identities(party: PartySession) -> None:
    """Save this start's public identities with those of earlier starts of the same run.

    A launched run has new ones at every start. All its parties write the same content.
    """
    folder = party.job.run_folder
    kept = {**read_identities(folder), party.config.digest: dict(party.pinned)}
    files.write_json(folder / "identities.json", kept)
