"""What a party measures of one round."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One party's figures of one round."""

    wall_s: float = 0.0

    cpu_s: float = 0.0

    sent: int = 0
    """Bytes."""

    received: int = 0
    """Bytes."""

    max_error: float = 0.0
    """Of the mean, at the primary; 0 elsewhere."""
