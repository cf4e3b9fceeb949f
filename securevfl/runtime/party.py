"""One party's life, from its job to its last line in the log. Every party's process runs this."""

import contextlib
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

from securevfl.config.federation import FederationConfig
from securevfl.config.losses import goes_on
from securevfl.config.rules import require_covered_channels, require_helpers
from securevfl.core import files
from securevfl.core.errors import (
    ConfigError,
    PartyAbsentError,
    PartyFailedError,
    PartyLostError,
    PartyTimeoutError,
    PartyTwiceError,
    ProtocolError,
    SecureVflError,
    StorageError,
    of_this_machine,
)
from securevfl.core.memory import give_back_memory, loading
from securevfl.core.progress import Observer, SessionLost
from securevfl.federation.checkpoint import has_begun
from securevfl.federation.session.party_files import LOG_FILE, PartyFiles
from securevfl.runtime.figures import RunFigures
from securevfl.runtime.party_job import PartyJob, PartyLife, RejoinDue
from securevfl.runtime.predictions import Predictions
from securevfl.transport.identity import Identity

# What a log keeps of an error: its text, and the innermost frames of its traceback.
_REASON: Final = 500
_FRAMES: Final = 40

Outcome = RunFigures | Predictions | dict[str, Any] | None
_Ended = Outcome | RejoinDue


def run_party(job: PartyJob, observe: Observer) -> Outcome:
    """Run one party to the end; the primary returns the run's figures, or those of pretraining.

    Where it serves a kept model, the primary returns the predictions that it was asked for. Where
    the federation file says so, a session that is lost is followed by the next one.

    Raises:
        SecureVflError: Whatever went wrong, here or at another party, named.

    Reveals:
        What the messages of :mod:`securevfl.transport.message` say, and nothing else.
    """
    losses, identity = 0, None
    while True:
        try:
            with living(job, observe, identity=identity) as life:
                identity = life.identity
                ended = _lived(life)
            if not isinstance(ended, RejoinDue):
                return ended
            # An epoch was done in it, so the next session is no repetition of this one.
            job = replace(job, after_loss=True, resume=True, awaited=ended.parties)
        except (PartyLostError, PartyTimeoutError) as error:
            losses += 1
            job = _after(error, job, losses)
            # Without its primary no run goes on.
            without = goes_on(job.config) and error.party != job.config.primary.name
            observe(
                SessionLost(
                    why=str(error),
                    wait_s=job.join_timeout_s,
                    goes_on_after_s=job.config.runtime.continue_after_s if without else None,
                )
            )


def _lived(life: PartyLife) -> _Ended:
    """Run one session to its end."""
    job = life.job
    life.files.log(
        "start",
        role=job.config.party(job.name).role,
        digest=job.config.digest,
        resume=job.resume,
    )
    if job.after_loss:
        give_back_memory()
    with loading():
        begin = _life_of(job.config.party(job.name).role, serves=job.serves)
    ended = begin(life)
    life.files.log("rejoin" if isinstance(ended, RejoinDue) else "done")
    return ended


def _after(error: ProtocolError, job: PartyJob, losses: int) -> PartyJob:
    """Return what this party does after a session that was lost, or raise why it was.

    Whoever is lost, all parties leave the session, and join the next one: so that all agree from
    where they go on, by what each of them has on its disk.
    """
    runtime = job.config.runtime
    if job.serves or runtime.on_loss == "stop" or isinstance(error, PartyAbsentError):
        raise error
    if losses >= runtime.most_losses:
        ended = PartyFailedError(
            f"{error}; the run was lost {losses} times, which is runtime.most_losses; go on with "
            f"--resume"
        )
        ended.party = error.party
        raise ended from None
    # One that was never in a session is another one's second, or has been killed and started again
    # before the primary has noticed: that is soon known.
    second = isinstance(error, PartyTwiceError) and not job.returning
    begun = has_begun(job.folder)
    return replace(
        job, after_loss=True, awaited=(), resume=job.resume or begun, may_be_second=second
    )


def _life_of(role: str, *, serves: bool) -> Callable[[PartyLife], _Ended]:
    """Return what a party does from joining to the end.

    Each is imported where it is chosen: no process loads what another role alone needs, and a
    party that only helps needs neither CrypTen nor tables.
    """
    if role == "primary" and serves:
        from securevfl.runtime.predicting_primary import predict_once

        return predict_once
    if role == "primary":
        from securevfl.runtime.primary_party import run_primary

        return run_primary
    if role == "secondary" and serves:
        from securevfl.runtime.predicting_secondary import serve_as_secondary

        return serve_as_secondary
    if role == "secondary":
        from securevfl.runtime.secondary_party import run_secondary

        return run_secondary
    if serves:
        from securevfl.runtime.predicting_secondary import serve_as_helper

        return serve_as_helper
    from securevfl.runtime.helper_party import run_helper

    return run_helper


@contextlib.contextmanager
def living(
    job: PartyJob, observe: Observer, *, identity: Identity | None = None
) -> Iterator[PartyLife]:
    """Hold what one party has from its first act to its last; its log gets what goes wrong.

    Args:
        job: What the party is told.
        observe: Hears of progress.
        identity: Its long-term identity; None reads it from the job's folder.

    Raises:
        SecureVflError: Whatever goes wrong in the block.
    """
    config = job.config
    party = config.party(job.name)
    files.require_writable_folder(job.folder)
    table = None if party.is_helper else job.data_root / party.data
    with PartyFiles(job.folder, config, party=job.name, resume=job.resume, table=table) as own:
        try:
            require_covered_channels(config)
            require_helpers(config)
            yield PartyLife(
                job=job,
                identity=identity or Identity.load(job.identity_folder, job.name),
                pinned=pinned_identities(config),
                files=own,
                observe=observe,
            )
        except (SecureVflError, KeyboardInterrupt) as error:
            _log_failure(own, error)
            raise
        except Exception as error:  # noqa: BLE001 - the last resort
            raise _last_resort(job, own, error) from None


def _last_resort(job: PartyJob, own: PartyFiles, error: Exception) -> SecureVflError:
    """Return one line for an error that nobody foresaw; its traceback goes to the party's log."""
    known = of_this_machine(error, place=job.folder)
    if known is not None:
        _log_failure(own, known)
        return known
    _log_failure(own, error, trace=traceback.format_tb(error.__traceback__)[-_FRAMES:])
    return SecureVflError(
        f"stopped by an unexpected {type(error).__name__}, which is a mistake of this program; "
        f"where it happened is in {job.folder / LOG_FILE}"
    )


def _log_failure(own: PartyFiles, error: BaseException, **more: object) -> None:
    # A log on a full disk must not hide why the party failed.
    with contextlib.suppress(StorageError):
        own.log("failed", error=type(error).__name__, reason=str(error)[:_REASON], **more)


def pinned_identities(config: FederationConfig) -> dict[str, str]:
    """Return every party's pinned public key.

    Raises:
        ConfigError: If the federation file pins none for some party.
    """
    missing = [party.name for party in config.parties if party.identity is None]
    if missing:
        raise ConfigError(
            f"party {missing[0]!r}: the federation file pins no identity for it; "
            f"run securevfl identity create and add the line that it prints"
        )
    return {party.name: party.identity for party in config.parties if party.identity is not None}
