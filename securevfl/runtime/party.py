"""One party's life, from its job to its last line in the log. Every party's process runs this."""

from typing import Any

from securevfl.config.federation import FederationConfig
from securevfl.config.rules import require_covered_channels, require_helpers
from securevfl.core import files
from securevfl.core.errors import ConfigError
from securevfl.core.progress import Observer
from securevfl.federation.party_files import PartyFiles
from securevfl.runtime.figures import RunFigures
from securevfl.runtime.linkage_helper import run_linkage_helper
from securevfl.runtime.party_job import PartyJob, PartyLife
from securevfl.runtime.primary_party import run_primary
from securevfl.runtime.secondary_party import run_secondary
from securevfl.transport.identity import Identity

_LIVES = {
    "primary": run_primary,
    "secondary": run_secondary,
    "coordinator": run_linkage_helper,
    "dealer": run_linkage_helper,
}


def run_party(job: PartyJob, observe: Observer) -> RunFigures | dict[str, Any] | None:
    """Run one party to the end; the primary returns the run's figures, or those of pretraining.

    Raises:
        SecureVflError: Whatever went wrong, here or at another party, named.

    Reveals:
        What the messages of :mod:`securevfl.transport.message` say, and nothing else.
    """
    config = job.config
    party = config.party(job.name)
    files.require_writable_folder(job.folder)
    table = None if party.is_helper else job.data_root / party.data
    with PartyFiles(job.folder, config, party=job.name, resume=job.resume, table=table) as own:
        try:
            require_covered_channels(config)
            require_helpers(config)
            life = PartyLife(
                job=job,
                identity=Identity.load(job.identity_folder, job.name),
                pinned=pinned_identities(config),
                files=own,
                observe=observe,
            )
            own.log("start", role=party.role, digest=config.digest, resume=job.resume)
            figures = _LIVES[party.role](life)
            own.log("done")
            return figures
        except BaseException as error:
            own.log("failed", error=type(error).__name__, reason=str(error)[:500])
            raise


def pinned_identities(config: FederationConfig) -> dict[str, str]:
    """Return every party's pinned public key.

    Raises:
        ConfigError: If the federation file pins none for some party.
    """
    missing = [party.name for party in config.parties if party.identity is None]
    if missing:
        raise ConfigError(
            f"party {missing[0]!r}: the federation file pins no identity for it; "
            f"run securevfl provision and add the line that it prints"
        )
    return {party.name: party.identity for party in config.parties if party.identity is not None}
