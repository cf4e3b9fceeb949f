"""One party's process: its session, to the last line of its log, and all that a helper does."""

import contextlib
import json
import math
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Literal

from securevfl.config.disclosure import require_covered_channels
from securevfl.config.federation import FederationConfig, link_spec
from securevfl.config.rules import require_helpers
from securevfl.config.sections import IN_MEMORY
from securevfl.core import errors, files, interrupts
from securevfl.core.formatting import finite_or_none
from securevfl.core.memory import loading
from securevfl.core.progress import Observer, SpendingPlanned, Stage, Warned
from securevfl.data.tables import PartyTable
from securevfl.federation.checkpoint import is_unused
from securevfl.federation.messages import PredictRequest, Ready, RoundKind
from securevfl.federation.run_plan import RunFacts, RunPlan
from securevfl.federation.saved_model import SavedModel
from securevfl.federation.session.handshake import Joined, join_session
from securevfl.federation.session.membership import absent_names, idle_helpers, session_spec
from securevfl.federation.session.party_files import LOG_FILE, PartyFiles
from securevfl.federation.stage import run_stages
from securevfl.ledger.countersigning import Countersigner, Occasion
from securevfl.linkage.protections.protection import Take, take_nothing
from securevfl.linkage.stage.link_cache import LinkCache
from securevfl.linkage.stage.linkage_parts import reveals_of
from securevfl.linkage.stage.linking import LinkageInput, help_to_link
from securevfl.linkage.stage.party_keys import keys_of
from securevfl.runtime.run_folder import write_federation
from securevfl.runtime.run_options import PartyJob, require_precision
from securevfl.transport.identity import Identity, expiring
from securevfl.transport.message import StarKind


@dataclass(frozen=True, kw_only=True, eq=False)
class PartySession:
    """One party in one session: its job, its identity, the keys that it trusts, and its files."""

    job: PartyJob
    identity: Identity
    """This party's long-term identity."""
    pinned: Mapping[str, str]
    """Every party's pinned public key."""
    files: PartyFiles
    """Its log, checkpoints and ledger."""

    @property
    def config(self) -> FederationConfig:
        """The federation file."""
        return self.job.config

    @property
    def observe(self) -> Observer:
        """Called with progress."""
        return self.job.observe

    def read_table(self, model: SavedModel | None = None) -> PartyTable:
        """Read this party's own table, and warn of what does not go with the promise.

        Args:
            model: Reads columns as they were for this model; None as the federation file says.

        Raises:
            DataError: If the table can't be used.
        """
        # pandas loads with it, and a party that only helps has no table.
        with loading():
            from securevfl.runtime.run_tables import read_party, table_warnings

        party, table = self.config.party(self.job.name), self.job.table
        if table is None:
            table = read_party(self.config, party, self.job.data_root, self.observe, model=model)
        for text in table_warnings(self.config, party, table):
            self.observe(Warned(text=text))
        return table

    def open_ledger(self, plan: RunPlan) -> None:
        """Open the table's ledger, and report what the run may spend and what was spent before.

        Raises:
            SecureVflError: As :meth:`PartyFiles.open_ledger`.
        """
        outlook = self.files.open_ledger(plan)
        self.observe(
            SpendingPlanned(
                party=self.job.name,
                unit=outlook.unit,
                delta=outlook.delta,
                runs_before=outlook.runs_before,
                epsilon=finite_or_none(outlook.epsilon),
                total_before=finite_or_none(outlook.total_before),
                total=finite_or_none(outlook.total),
                limit=outlook.limit.epsilon if outlook.limit else None,
                limit_delta=outlook.limit.delta if outlook.limit else None,
            )
        )

    def resumed_run(self) -> str:
        """Return the run that is resumed in this party's folder, and warn of damaged files.

        Returns:
            The run's id; empty where the party starts afresh.

        Raises:
            ConfigError: If it should resume a run, and the folder holds none.
        """
        if not self.files.resume:
            return ""
        for text in self.files.checkpoints.resume():
            self.files.log("warning", text=text)
            self.observe(Warned(text=f"{self.job.name}: {text}"))
        return self.files.checkpoints.run

    def place(self, table: PartyTable, facts: RunFacts) -> LinkageInput:
        """Return what this party brings to linking with those that take part."""
        spec = session_spec(self.config, facts.active)
        return LinkageInput(
            spec=spec,
            keys=keys_of(spec.keys, table),
            data_root=self.job.data_root,
            cache=LinkCache.of_party(
                spec, self.job.name, self.job.folder, data_root=self.job.data_root
            ),
        )

    def require_no_listen(self) -> None:
        """Refuse a place to listen for a party that only dials out.

        Raises:
            ConfigError: If one was given.
        """
        if self.job.listen is not None:
            raise errors.ConfigError(
                f"--listen: {self.job.name!r} is no primary, and all others only dial out"
            )


# What a log keeps of an error: its text, and the innermost frames of its traceback.
_REASON: Final = 500
_FRAMES: Final = 40


@contextlib.contextmanager
def party_session(job: PartyJob, *, identity: Identity | None = None) -> Iterator[PartySession]:
    """Hold one party's identity and files for a session; failures go to its log.

    Args:
        job: The party's job.
        identity: Its long-term identity; None reads it from the job's folder.

    Raises:
        SecureVflError: Any failure in the block.
    """
    config = job.config
    party = config.party(job.name)
    files.require_writable_folder(job.folder)
    in_file = not party.is_helper and party.data != IN_MEMORY
    table = job.data_root / party.data if in_file else None
    begins = job.resume and is_unused(job.folder)
    if begins and not (party.is_helper or job.after_loss):
        job.observe(Warned(text=f"{job.name}: no run has begun in {job.run_folder}: it begins now"))
    resume = job.resume and not begins
    with PartyFiles(job.folder, config, party=job.name, resume=resume, table=table) as own:
        try:
            with interrupts.unwrap_interrupts():
                require_covered_channels(config)
                require_helpers(config)
                require_precision(config, job.device)
                # Before anything comes: what was never loaded is no known kind of message.
                run_stages(config)
                session = PartySession(
                    job=job,
                    identity=identity or Identity.load(job.identity_folder, job.name),
                    pinned=pinned_identities(config),
                    files=own,
                )
                for text in expiring(session.identity, session.identity.trusted):
                    own.log("warning", text=text)
                    session.observe(Warned(text=text))
                yield session
        except (errors.SecureVflError, KeyboardInterrupt) as error:
            _log_failure(own, error)
            raise
        except Exception as error:  # noqa: BLE001 - the last resort
            raise _last_resort(job, own, error) from None


def _last_resort(job: PartyJob, own: PartyFiles, error: Exception) -> errors.SecureVflError:
    """Return one line for an unexpected error; its traceback goes to the party's log."""
    known = errors.of_this_machine(error, place=job.folder)
    if known is not None:
        _log_failure(own, known)
        return known
    _log_failure(own, error, trace=traceback.format_tb(error.__traceback__)[-_FRAMES:])
    return errors.SecureVflError(
        f"stopped by an unexpected {type(error).__name__}, which is a mistake of this program; "
        f"where it happened is in {job.folder / LOG_FILE}"
    )


def _log_failure(own: PartyFiles, error: BaseException, **more: object) -> None:
    # A log on a full disk must not hide why the party failed.
    with contextlib.suppress(errors.StorageError):
        own.log("failed", error=type(error).__name__, reason=str(error)[:_REASON], **more)


def pinned_identities(config: FederationConfig) -> dict[str, str]:
    """Return every party's pinned public key.

    Raises:
        ConfigError: If the federation file pins none for some party.
    """
    missing = [party.name for party in config.parties if party.identity is None]
    if missing:
        raise errors.ConfigError(
            f"party {missing[0]!r}: the federation file pins no identity for it; "
            f"run securevfl identity create and add the line that it prints"
        )
    return {party.name: party.identity for party in config.parties if party.identity is not None}


@contextlib.contextmanager
def join(party: PartySession, *, run: str = "", predicts: bool = False) -> Iterator[Joined]:
    """Join the session that the primary holds; see :func:`securevfl.federation.session.handshake`.

    Args:
        party: A secondary or a helper.
        run: Id of the run that it resumes, or whose model it serves; empty for a fresh start, and
            for a helper.
        predicts: Whether it serves a saved model, and does not train.
    """
    job, files = party.job, party.files
    resumes = not predicts and not party.config.party(job.name).is_helper
    with join_session(
        party.config,
        party.identity,
        party.pinned,
        epochs=files.checkpoints.epochs() if resumes else [],
        stage_steps=files.checkpoints.stage_steps() if resumes else [],
        run=run,
        predicts=predicts,
        patience_s=None if predicts else job.join_timeout_s,
        returning=not predicts and job.returning,
        on_busy=lambda text: party.observe(Warned(text=f"{text}; calling again until it is ready")),
    ) as star:
        files.log("connected")
        yield star


# A primary that ends, fails or is not there yet ends a session, not a party that serves on; nor
# does a request that its budget does not cover, which was refused before anything left.
_COMES_BACK: Final = (errors.PartyFailedError, errors.PartyTimeoutError, errors.BudgetExceededError)


def serve_sessions(party: PartySession, session: Callable[[], None]) -> None:
    """Serve in one session; a party that serves on joins again whenever it has ended."""
    while True:
        try:
            session()
        except _COMES_BACK as error:
            if interrupts.is_noted() or not party.job.serves_on:
                raise
            party.files.log("waiting", reason=type(error).__name__)
            if not party.config.party(party.job.name).is_helper:
                text = f"{party.job.name}: {error.for_others()}; joining again"
                party.observe(Warned(text=text))
        if not party.job.serves_on:
            return


def require_same_parties(
    config: FederationConfig, session: RunFacts, request: PredictRequest
) -> None:
    """Refuse a request to other secondaries than the session's, which this party has checked.

    Raises:
        ProtocolError: Naming their ranks.
    """
    ranks = tuple(config.ranks[party.name] for party in config.secondaries)
    active = ranks if session.active is None else session.active
    if request.active != active:
        raise errors.ProtocolError(
            f"the primary asks for predictions of the parties {list(request.active)!r}, and the "
            f"session has {list(active)!r}"
        )


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


_LONGER_THAN_A_RUN_S: Final = 365 * 24 * 3600.0

# A helper's part, by role, in its log.
_DONE: Final = {"coordinator": "coordinated", "dealer": "dealt"}


def run_helper(party: PartySession) -> None:
    """Take part in linkage and in stages as the coordinator or the dealer.

    Where a session that is lost is followed by another one, stay until the run is over.

    Raises:
        SecureVflError: Any failure, here or at another party.

    Reveals:
        What :func:`securevfl.linkage.stage.linking.help_to_link` and :meth:`RunStage.help` say.
    """
    config, name, files = party.config, party.job.name, party.files
    party.require_no_listen()
    with join(party) as star:
        star.transport.send(Ready().to_message())
        party.observe(Stage(text="helping"))
        spec, role = link_spec(config), _helper_role(config, name)
        if role in spec.roles.helpers:
            with _recording(party, role, run=star.facts.run) as take:
                figures = help_to_link(
                    spec,
                    role,
                    star.transport,
                    star.sealed,
                    rows=star.facts.rows,
                    cache=LinkCache.of_party(
                        spec, name, files.folder, data_root=party.job.data_root
                    ),
                    take=take,
                )
            files.log(_DONE[role], learned=reveals_of(spec, role), **figures)
        for stage in run_stages(config):
            if (helped := stage.help(config, role, star)) is not None:
                event, figures = helped
                files.log(event, **figures)
        if config.helpers_stay:
            # A session that is lost is followed by another, which links with this party's help.
            star.transport.receive(
                StarKind.DONE, round_number=None, deadline_s=_LONGER_THAN_A_RUN_S
            )


@contextlib.contextmanager
def _recording(party: PartySession, role: str, *, run: str) -> Iterator[Take]:
    """Yield the recorder of a coordinator's view; it records nothing unless that is asked for."""
    job = party.job
    # A dealer receives sizes alone.
    if role != "coordinator" or job.record_mib is None:
        yield take_nothing
        return
    # It loads torch, which helpers do without.
    with loading():
        from securevfl.federation.rounds.recording import recording

    with recording(
        job.name, party.files.folder, run=run, most_mib=job.record_mib, observe=party.observe
    ) as recorder:
        yield take_nothing if recorder is None else recorder.take


def serve_as_helper(party: PartySession) -> None:
    """Help to link the rows of one request for predictions after another.

    Raises:
        ConfigError: If the party helps stages of training alone, which predictions do not need.
        SecureVflError: Any failure here; where the party serves on, a primary that goes away is
            waited for instead.

    Reveals:
        What :func:`securevfl.linkage.stage.linking.help_to_link` says.
    """
    config, name = party.config, party.job.name
    party.require_no_listen()
    if name in idle_helpers(config):
        raise errors.ConfigError(
            f"party {name!r}: deals masks for class means alone, and predictions need none; "
            f"start the other parties without it"
        )
    serve_sessions(party, lambda: _help_to_predict(party))


def _help_to_predict(party: PartySession) -> None:
    config, name = party.config, party.job.name
    role, spec = _helper_role(config, name), link_spec(config)
    links = name in spec.roles.helpers.values()
    if links and spec.similarities is not None:
        raise errors.ProtocolError(
            f"{name}: predictions of a family that reads similarities need the scale of training, "
            f'which a coordinator does not keep; link with protection = "none"'
        )
    with join(party, predicts=True) as star:
        spec = session_spec(config, star.facts.active)
        wait_s = math.inf if party.job.serves_on else config.waits.work.for_primary_s
        next_one = partial(
            star.transport.receive,
            (RoundKind.PREDICT, StarKind.DONE),
            round_number=None,
            deadline_s=wait_s,
        )
        message = next_one()
        while message.kind is RoundKind.PREDICT:
            request = PredictRequest.from_message(message)
            require_same_parties(config, star.facts, request)
            star.transport.send(Ready().to_message())
            if links:
                help_to_link(
                    spec,
                    role,
                    star.transport,
                    star.sealed,
                    rows=request.rows,
                    cache=LinkCache(None),
                )
            message = next_one()


def _helper_role(config: FederationConfig, name: str) -> Literal["coordinator", "dealer"]:
    role = config.party(name).role
    assert role == "coordinator" or role == "dealer", "others have a table"
    return role
