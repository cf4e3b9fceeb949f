"""How a launcher starts parties again: those that were killed, and those that these need."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

from securevfl.config.federation import FederationConfig
from securevfl.config.losses import goes_on
from securevfl.core.progress import Observer, ProgressEvent, SpendingPlanned, Stage, Warned
from securevfl.federation.checkpoint import has_begun
from securevfl.launch.outcome import PartyFailure
from securevfl.launch.process import PartyCommand


def going_on(command: PartyCommand, run_folder: Path) -> PartyCommand:
    """Return how a party goes on, or begins if it was lost before it knew of the run."""
    begun = has_begun(run_folder / "parties" / command.name)
    resume = ["--resume"] if begun and "--resume" not in command.arguments else []
    return replace(command, arguments=[*command.arguments, *resume])


class StartAgain:
    """Says how parties that were killed are started again, as often as a run may be lost."""

    def __init__(self, config: FederationConfig, run_folder: Path, observe: Observer) -> None:
        self._config, self._run_folder, self._observe = config, run_folder, observe
        self._killed = 0
        self._away: set[str] = set()
        # Once for each that was killed, at most: no mistake of ours may go round for ever.
        self._called_back: Counter[str] = Counter()

    def heard(self, name: str, event: ProgressEvent | None) -> None:
        """Note what a party tells as soon as it is in a session: its spending, or its helping."""
        helps = self._config.party(name).is_helper
        if isinstance(event, Stage if helps else SpendingPlanned):
            self._away.discard(name)

    def __call__(self, command: PartyCommand, failure: PartyFailure | None) -> PartyCommand | None:
        """Return how a party is started again; None: it is not.

        Args:
            command: How it was started.
            failure: What became of it; None: it has ended well.
        """
        if failure is None:
            # It ended with a session that one of those who are still away was killed in: that one
            # has the end of the run before it, and for that needs those who are through.
            if not self._is_needed() or self._called_back[command.name] >= self._killed:
                return None
            self._called_back[command.name] += 1
        else:
            self._killed += 1
            if self._killed >= self._config.runtime.most_losses:
                return None
            self._observe(Warned(text=f"{failure.party}: {failure.reason}; it is started again"))
            self._away.add(command.name)
        return going_on(command, self._run_folder)

    def _is_needed(self) -> bool:
        """Whether somebody is away without whom no run ends."""
        if goes_on(self._config):
            return self._config.primary.name in self._away
        return bool(self._away)
