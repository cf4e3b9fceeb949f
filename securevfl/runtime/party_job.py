"""The job of a party's process, and the resources that it holds to its end."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from securevfl.config.federation import FederationConfig
from securevfl.config.link_spec import link_spec
from securevfl.config.losses import goes_on
from securevfl.core import files as core_files
from securevfl.core.errors import ConfigError
from securevfl.core.memory import loading
from securevfl.core.progress import Observer, PresenceChanged, SpendingPlanned, Warned
from securevfl.data.tables import PartyTable
from securevfl.federation.rounds.worker_group import WorkerGroup
from securevfl.federation.run_plan import RunFacts, RunPlan
from securevfl.federation.saved_model import KeptModel
from securevfl.federation.session.membership import absent_names
from securevfl.federation.session.party_files import PartyFiles
from securevfl.ledger.countersigning import Countersigner, Occasion
from securevfl.linkage.stage.kept_links import LinkCache
from securevfl.linkage.stage.linking import OwnPlace
from securevfl.linkage.stage.party_keys import keys_of
from securevfl.runtime.figures import finite_or_none
from securevfl.runtime.preflight import table_warnings
from securevfl.runtime.run_folder import write_federation
from securevfl.transport.identity import Identity

# What a party's process is told, and what it holds from its first act to its last.


@dataclass(frozen=True, kw_only=True)
class NewRows:
    """A file of the primary's new rows, and where their predictions go."""

    path: Path
    out: Path
    id_column: str | None = None
    """What rows are called; None numbers them from 1 on."""
    without: tuple[str, ...] = ()
    """Secondaries that are absent."""


@dataclass(frozen=True, kw_only=True)
class RejoinDue:
    """How a session ends between two epochs, so that some who were lost come back."""

    parties: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class PartyJob:
    """What a party's process is told."""

    config: FederationConfig
    name: str
    run_folder: Path
    identity_folder: Path
    data_root: Path
    device: torch.device
    resume: bool
    listen: str | None = None
    """Where the primary listens, if not at the address of the federation file."""
    pretrain_only: bool = False
    """Whether the primary ends the run when pretraining is done; secondaries follow."""
    serves: bool = False
    """Whether this party answers for the model that it has kept, and does not train."""
    serves_on: bool = False
    """Whether it waits for the next session when one has ended."""
    new_rows: NewRows | None = None
    """What the primary asks for, where it serves."""
    after_loss: bool = False
    """Whether this party was in a session of the run before, which was lost or broken off."""
    may_be_second: bool = False
    """Whether the primary had one of this name in its session when this party first called."""
    awaited: tuple[str, ...] = ()
    """Secondaries for whom the session before was broken off, so that they can come back."""
    group: WorkerGroup | None = None
    """Its own processes, where torchrun has started several."""

    @property
    def returning(self) -> bool:
        """Whether the primary may still believe that this party is connected."""
        return self.resume or self.after_loss

    @property
    def join_timeout_s(self) -> float:
        """Seconds that all parties may take to join, or to come back after a loss.

        Whoever comes back to a run that has gone on without it waits for an epoch to end. Whoever
        calls while one of its name is there waits until the primary would know that one for lost.
        """
        runtime = self.config.runtime
        if self.may_be_second:
            return 2 * runtime.silence_timeout_s
        back = self.after_loss or (self.resume and goes_on(self.config))
        return runtime.wait_s if back else runtime.join_timeout_s

    @property
    def folder(self) -> Path:
        """This party's own folder within the run folder."""
        return self.run_folder / "parties" / self.name


@dataclass(frozen=True, kw_only=True, eq=False)
class PartyLife:
    """One party's process at work: its job, who it is, whom it trusts, what it keeps."""

    job: PartyJob
    identity: Identity
    """This party's long-term identity."""
    pinned: Mapping[str, str]
    """Every party's pinned public key."""
    files: PartyFiles
    """Its log, checkpoints and ledger."""
    observe: Observer
    """Hears of progress."""

    @property
    def config(self) -> FederationConfig:
        """The federation file."""
        return self.job.config

    def tell_presence(self, facts: RunFacts, *, back: Sequence[str] = ()) -> None:
        """Say who is absent from a session, and who is back, where that is anybody."""
        absent = absent_names(self.config, facts.active)
        if absent or back:
            present = len(self.config.secondaries) - len(absent)
            epoch = facts.resume_epoch + 1
            self.files.log("presence", absent=list(absent), back=list(back), epoch=epoch)
            self.observe(
                PresenceChanged(absent=absent, back=tuple(back), epoch=epoch, secondaries=present)
            )

    def read_table(self, model: KeptModel | None = None) -> PartyTable:
        """Read this party's own table, and warn of what does not go with the promise.

        Args:
            model: Reads columns as they were for this model; None as the federation file says.

        Raises:
            DataError: If the table can't be used.
        """
        # pandas loads with it, and a party that only helps has no table.
        with loading():
            from securevfl.runtime.run_tables import read_party

        party = self.config.party(self.job.name)
        table = read_party(self.config, party, self.job.data_root, self.observe, model=model)
        for text in table_warnings(self.config, party, table):
            self.observe(Warned(text=text))
        return table

    def open_ledger(self, plan: RunPlan) -> None:
        """Open the table's ledger, and say what the run may spend beside what was spent before.

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

    def go_on(self) -> str:
        """Find out which run goes on in this party's folder, and tell of damaged files.

        Returns:
            The run's id; empty where the party starts afresh.

        Raises:
            ConfigError: If there is none to go on with, and there should be.
        """
        if not self.job.resume:
            return ""
        for text in self.files.checkpoints.resume():
            self.files.log("warning", text=text)
            self.observe(Warned(text=f"{self.job.name}: {text}"))
        return self.files.checkpoints.run

    def place(self, table: PartyTable, facts: RunFacts) -> OwnPlace:
        """Return what this party brings to linking with those that take part."""
        spec = link_spec(self.config)
        absent = frozenset(absent_names(self.config, facts.active))
        spec = replace(spec, roles=replace(spec.roles, absent=absent))
        return OwnPlace(
            spec=spec,
            keys=keys_of(spec.keys, table),
            data_root=self.job.data_root,
            cache=LinkCache.of_party(spec, self.job.name, self.job.folder),
        )

    def require_no_listen(self) -> None:
        """Refuse a place to listen for a party that only dials out.

        Raises:
            ConfigError: If one was given.
        """
        if self.job.listen is not None:
            raise ConfigError(
                f"--listen: {self.job.name!r} is no primary, and all others only dial out"
            )


# Countersigning in a party's life: who signs, for what, and what a run folder keeps of it.


def countersigner(life: PartyLife, facts: RunFacts, *, session: bytes) -> Countersigner:
    """Return a party's part in countersigning; its ledger must be open.

    The run folder gets the federation file and ``identities.json``, both public, and the party's
    own folder ``ledger.json``, the place of its ledger, for ``securevfl ledger verify``.

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
