"""What became of a party's process, as the launcher tells it."""

from dataclasses import dataclass
from typing import Final

from securevfl.core.errors import (
    ConfigError,
    PartyFailedError,
    PrivacyError,
    SecureVflError,
)

_ERRORS: Final[dict[int, type[SecureVflError]]] = {
    error.exit_code: error for error in (ConfigError, PartyFailedError, PrivacyError)
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PartyExit:
    """How a party's process ended."""

    name: str
    """The party."""

    exit_code: int
    """0 to 255 as the process chose; minus the signal's number when a signal ended it."""

    seconds: float
    """Seconds from its start to its end."""

    peak_memory_bytes: int
    """Largest resident memory: as the process itself reported it, or else what the system knows of
    it, which may be what its launcher held when it started the process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartyFailure:
    """The failure that ended a launch."""

    party: str
    """The party where it began."""

    reason: str
    """One sentence."""

    exit_code: int
    """What a command that reports it should exit with."""

    def error(self) -> SecureVflError:
        """Return an exception of the kind that carries :attr:`exit_code`."""
        return _ERRORS.get(self.exit_code, SecureVflError)(f"{self.party}: {self.reason}")
