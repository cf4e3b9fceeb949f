"""Timeouts of parties that wait for one another, all from one table.

Parties wait in chains: all others for the primary, which waits for a secondary, which waits for the
coordinator. If the last party stops answering, the one next to it must report first, since only it
knows whose turn it is. So a timeout is longer for parties further up the chain.
"""

from dataclasses import dataclass
from typing import Final

_HELPER: Final = 1 / 2
_SECONDARY: Final = 3 / 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """The timeouts of one wait, in seconds, by waiting and awaited party."""

    primary_s: float
    """Timeout of the primary that waits for a caller: the setting itself."""
    for_primary_s: float
    """Timeout of a caller that waits for the primary, which may itself be waiting or computing."""

    @property
    def helper_s(self) -> float:
        """Timeout of a helper that waits for another caller."""
        return _HELPER * self.primary_s

    @property
    def secondary_s(self) -> float:
        """Timeout of a secondary that waits for another caller."""
        return _SECONDARY * self.primary_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Waits:
    """Timeouts of a session, from the settings of ``[runtime]``.

    A process that sends no heartbeats or reads nothing is noticed sooner, by ``silence_timeout_s``
    and ``lowest_rate``; these timeouts are for processes that seem to work.
    """

    join_s: float
    """Timeout for all to join, ``join_timeout_s``."""
    return_s: float
    """Seconds that a lost party may take to come back; 0 where the others do not wait."""
    round_s: float
    """Timeout of an answer in a round, ``round_timeout_s``."""
    idle_s: float
    """Timeout of long work, ``idle_timeout_s``."""
    silence_s: float
    """Longest silence of a connected party, ``silence_timeout_s``."""

    @property
    def second_s(self) -> float:
        """Timeout of a second party of one name; by then it is known whether the first is lost."""
        return 2 * self.silence_s

    def joining(self, patience_s: float | None = None) -> Wait:
        """Return the wait for all to join; a caller's lasts until it is admitted.

        Args:
            patience_s: Seconds that all may take, by this party's own state; default: ``join_s``.
        """
        patience_s = self.join_s if patience_s is None else patience_s
        # The primary may be waiting for a lost party; all greetings then take one round.
        longest_s = max(patience_s, self.return_s)
        return Wait(primary_s=patience_s, for_primary_s=longest_s + 2 * self.round_s)

    @property
    def answer(self) -> Wait:
        """The wait for an immediate answer in a round, and for the message after it."""
        # The primary may wait until the message is read, then for the answers, and then compute.
        return Wait(primary_s=self.round_s, for_primary_s=3 * self.round_s)

    @property
    def work(self) -> Wait:
        """The wait for an answer that may need a pass over a table, or for any next message."""
        return Wait(primary_s=self.idle_s, for_primary_s=self.idle_s + self.round_s)
