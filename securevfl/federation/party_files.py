"""What one party keeps of a run in its own folder: log, checkpoints and ledger, as one."""

from pathlib import Path
from types import TracebackType
from typing import Final

from securevfl.config.federation import FederationConfig
from securevfl.core.events import EventLog
from securevfl.federation.checkpoint import Checkpoints, used_folder
from securevfl.federation.ledger import Ledger
from securevfl.federation.run_plan import RunPlan

LOG_FILE: Final = "log.jsonl"


class PartyFiles:
    """One party's folder of a run, held open from the party's first act to its last.

    The ledger opens when it is known what the run will release; until then there is none.
    """

    def __init__(
        self,
        folder: Path,
        config: FederationConfig,
        *,
        party: str,
        resume: bool,
        simulated: bool = False,
    ) -> None:
        """Open the folder, and its log.

        Args:
            folder: The party's own within the run folder.
            config: The federation file.
            party: Whose it is.
            resume: Whether the run goes on with what lies there.
            simulated: Whether all parties share this process: nothing leaves it, so nobody keeps a
                log, and the ledger is not synced line by line (two syncs a round cost more than
                training a small model).
        """
        self.folder = folder
        self.party = party
        self.resume = resume
        self.checkpoints = Checkpoints(folder, settings_digest=config.settings_digest)
        self._simulated = simulated
        self._log = None if simulated else EventLog(folder / LOG_FILE, party=party)
        self._ledger: Ledger | None = None

    @property
    def ledger(self) -> Ledger:
        """The party's ledger, once :meth:`open_ledger` has opened it."""
        assert self._ledger is not None, "opened when the run is planned"
        return self._ledger

    def log(self, event: str, **fields: object) -> None:
        """Write a line to the log: plain figures and words only.

        Raises:
            SecureVflError: If a field is anything else.
        """
        if self._log is not None:
            self._log.write(event, **fields)

    def open_ledger(self, plan: RunPlan) -> None:
        """Open the ledger: the run's own file, or the one that runs on this data share.

        A fresh run must fit into what the ledger has left. A resumed one has spent a part of it,
        and asks before every epoch and every release. Checkpoints are tied to the ledger from now
        on.

        Raises:
            ConfigError: If a fresh run would start in the folder of another one.
            BudgetExceededError: If a fresh run could not finish; nothing was sent then.
        """
        own, releases = self.folder / "ledger.jsonl", plan.releases
        shared = plan.config.privacy.ledger
        path = own if shared is None else Path(shared).expanduser().parent / f"{self.party}.jsonl"
        if not self.resume:
            self.checkpoints.require_unused()
        ledger = Ledger(
            path,
            party=self.party,
            plan=releases,
            noise_share_std=plan.noise_share_std,
            durable=not self._simulated or shared is not None,
        )
        self._ledger = ledger
        if not self.resume:
            # A run that failed before its first release has used nothing but its folder's name.
            if shared is None and ledger.all_rounds:
                raise used_folder(self.folder)
            ledger.require_room(
                rounds=releases.rounds,
                row_releases=releases.row_releases,
                passes=releases.releases_per_row,
            )
        self.checkpoints.guard(ledger)

    def close(self) -> None:
        """Let the ledger and the log go; later charges and lines raise."""
        if self._ledger is not None:
            self._ledger.close()
        if self._log is not None:
            self._log.close()

    def __enter__(self) -> "PartyFiles":
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.close()
