"""What one party keeps of a run in its own folder: log, checkpoints and ledger, as one."""

import contextlib
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final

from securevfl.config.federation import FederationConfig
from securevfl.core import files
from securevfl.core.errors import PrivacyError, StorageError
from securevfl.core.logs import EventLog
from securevfl.data.tables import KeyTable
from securevfl.federation.checkpoint import Checkpoints, used_folder
from securevfl.federation.run_plan import PredictionBudget, RunPlan, prediction_budget
from securevfl.ledger.book import Outlook, ProgramUse
from securevfl.ledger.ledger import Ledger, require_rows
from securevfl.ledger.ledger_file import LedgerFile, ledger_of_table

LOG_FILE: Final = "log.jsonl"


@dataclass(eq=False)
class PartyFiles:
    """One party's folder of a run, held open from the party's first act to its last.

    The ledger opens when it is known what the run will release; until then there is none.
    """

    folder: Path
    """The party's own within the run folder."""
    config: FederationConfig
    _: KW_ONLY
    party: str
    """Name of the party."""
    resume: bool
    """True if the run resumes from these files."""
    table: Path | None = None
    """The party's table, whose ledger is charged for every run; None for a party without a file of
    one: a coordinator, or a table in memory, whose ledger lies in the run folder."""
    simulated: bool = False
    """True if all parties share this process.

    Nothing leaves it, so there is no log, and the run has a ledger of its own in its folder, which
    is not synced line by line: two syncs a round cost more than training a small model."""
    _ledger: Ledger | None = field(default=None, init=False)
    _held: LedgerFile | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Open the folder, and its log."""
        digest = self.config.settings_digest
        self.checkpoints = Checkpoints(self.folder, settings_digest=digest)
        self._log = None if self.simulated else EventLog(self.folder / LOG_FILE, party=self.party)

    @property
    def ledger(self) -> Ledger:
        """The party's ledger, once :meth:`open_ledger` has opened it.

        Raises:
            PrivacyError: If it is not open.
        """
        if self._ledger is None:
            raise PrivacyError(f"{self.party}: no ledger is open, so nothing can be charged")
        return self._ledger

    def log(self, event: str, **fields: object) -> None:
        """Write a line to the log: plain figures and words only.

        Raises:
            SecureVflError: If a field is anything else.
        """
        if self._log is not None:
            self._log.write(event, **fields)

    @property
    def run_ledger(self) -> Path:
        """Where the run folder has the ledger, once the party is done: its own, or a copy."""
        return self.folder / "ledger.jsonl"

    def ledger_path(self) -> Path:
        """Return where releases are booked: with the table, or in a simulation's own folder.

        Raises:
            ConfigError: If the table has two ledgers.
        """
        if self.simulated or self.table is None:
            return self.folder / "ledger.jsonl"
        return ledger_of_table(self.table)

    def open_ledger(self, plan: RunPlan) -> Outlook:
        """Open the ledger of the table, or the simulation's own.

        A fresh run must fit into its budget and into what the owner of the table allows. A resumed
        one has spent a part of both, and asks before every epoch and every release. Checkpoints are
        tied to the ledger from now on.

        Returns:
            What the run may spend, beside what was spent on the table before.

        Raises:
            ConfigError: If a fresh run would start in the folder of another one, or another run is
                at work on this table.
            BudgetExceededError: If a fresh run could not finish; nothing was sent then.
        """
        if not self.resume:
            self.checkpoints.require_unused()
        ledger = self._ledger = self._open_ledger(self.ledger_path(), plan)
        # Who holds the ledger is this party's only process.
        files.remove_unfinished(self.folder)
        if not self.resume:
            # A run that failed before its first release has used nothing but its folder's name.
            if self.simulated and ledger.has_spent:
                raise used_folder(self.folder)
            ledger.require_room(
                rounds=plan.releases.rounds,
                row_releases=plan.releases.row_releases,
                passes=plan.releases.releases_per_row,
            )
        self.checkpoints.guard(ledger)
        return ledger.outlook()

    def _open_ledger(self, file: Path | LedgerFile, plan: RunPlan, *, model: str = "") -> Ledger:
        return Ledger(
            file,
            party=self.party,
            plan=plan.releases,
            noise_share_std=plan.noise_share_std,
            durable=not self.simulated,
            run=plan.facts.run,
            federation=self.config.federation.name,
            settings=self.config.settings_digest,
            model=model,
        )

    def book_program(self, use: ProgramUse) -> None:
        """Book a program before it runs.

        The table's ledger is held from now on: a run beside the program is refused, and a limit.

        Args:
            use: The program, and who takes part.

        Raises:
            BudgetExceededError: If the owner of the table does not allow it; nothing is written
                then.
            ConfigError: If a run is at work on this table.
            PrivacyError: If the ledger was altered.
            StorageError: If the disk takes no more.
        """
        file = self.hold_ledger()
        file.book.require_program(self.party)
        file.append(use.line())

    def hold_ledger(self) -> LedgerFile:
        """Keep the ledger for this process from now on, before anything is asked for.

        Raises:
            ConfigError: If another run or server is at work on this table.
            PrivacyError: If the ledger was altered.
        """
        if self._held is None:
            self._held = LedgerFile(self.ledger_path(), durable=not self.simulated)
        return self._held

    def open_prediction(self, plan: RunPlan, *, model: str, keys: KeyTable | None = None) -> Ledger:
        """Open the ledger for one request for predictions, or go on in it with another request.

        Args:
            plan: What the request releases.
            model: Id of the run whose model predicts.
            keys: A secondary's, whose records are counted where the plan has a number of releases.

        Raises:
            ConfigError: If another run is at work on this table.
            BudgetExceededError: If the request does not fit into what predictions may spend, or
                into what the owner of the table allows; nothing was sent then.
            PrivacyError: If it cannot be known how often records were released.
        """
        releases, most, ledger = plan.releases, self.config.prediction.rows, self._ledger
        if ledger is not None:
            require_rows(ledger.budget_sessions, most, more=releases.row_releases)
            ledger.begin(releases, run=plan.facts.run)
        else:
            file, self._held = self.hold_ledger(), None  # a ledger that fails lets it go
            ledger = self._ledger = self._open_ledger(file, plan, model=model)
            require_rows(ledger.budget_sessions, most, more=releases.row_releases)
            ledger.require_room(
                rounds=releases.rounds, row_releases=releases.row_releases, passes=1
            )
        if keys is not None and releases.releases_per_record is not None:
            ledger.count_records(self.folder, keys)
        return ledger

    def prediction_budget(self, model: str) -> PredictionBudget:
        """Return what predictions of a model have spent here; the ledger is held from now on.

        Args:
            model: Id of the run whose model predicts.

        Raises:
            ConfigError: If another run is at work on this table.
            PrivacyError: If the ledger was altered.
        """
        if self._ledger is not None:
            asked = self._ledger.budget_sessions
        else:
            sessions = self.hold_ledger().book.sessions
            asked = [session for session in sessions if session.model == model]
        return prediction_budget(self.config, asked, party=self.party)

    def close(self) -> None:
        """Let the ledger and the log go; later charges and lines raise.

        The run folder gets a copy of a table's ledger as it is now: the run's evidence, which
        nothing is charged to.
        """
        if self._held is not None:
            self._held.close()
        if self._ledger is not None:
            kept = self._ledger.path
            self._ledger.close()
            if kept is not None and kept != self.run_ledger:
                # The ledger itself is whole, whatever becomes of the copy.
                with contextlib.suppress(OSError, StorageError):
                    files.copy_file(kept, self.run_ledger)
        if self._log is not None:
            self._log.close()

    def __enter__(self) -> "PartyFiles":
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        try:
            file = self._held if self._ledger is None else self._ledger.file
            if error is None and file is not None:
                file.require_in_place()
        finally:
            self.close()
