"""Settings of an audit; light to import, so that mistakes are refused at once."""

from dataclasses import dataclass
from typing import Final, Literal

from securevfl.core import checks
from securevfl.core.errors import ConfigError
from securevfl.dp.gaussian import gaussian_noise_multiplier
from securevfl.lab.audit.audit_statistics import AuditSize

Release = Literal["sequence", "pooled"]
"""``sequence``: a row of L x H numbers, clipped whole, of a trained encoder, whose rows may be
released again. ``pooled``: the mean of K records, each clipped, of a frozen one."""

RELEASES: Final[tuple[Release, ...]] = ("sequence", "pooled")

ClassMeans = Literal["class_sums", "label_sums", "drawn_labels"]
"""``class_sums``: of a secondary's records, as a primary sees them. ``label_sums``: the same as
that secondary sees them. ``drawn_labels``: by randomised response."""

Audited = Release | ClassMeans | Literal["one_run"]
"""Audited releases; ``one_run`` is a whole training."""

DELTA: Final = 1e-5

ROUNDS_EVENT: Final = "rounds"
"""Event that the primary's process reports once all rounds are released."""

_LEAST_LABELS: Final = 0.5
_MOST_LABELS: Final = 8.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditSettings:
    """Settings of an audit."""

    secondaries: int = 4
    """k, parties that average; the primary comes on top."""

    noise_multiplier: float = 1.0
    """Standard deviation of the noise on the released average, over the clip norm; on class sums,
    over the change by one record."""

    clip_norm: float = 1.0
    """C."""

    rounds: int = 4
    """Releases of each kind, >= 2."""

    label_epsilon: float = 2.0
    """Epsilon of class means for a row's label, against each secondary, at delta 1e-5; 0.5 to 8."""

    timeout_s: float = 300.0
    """Seconds after which the processes are ended."""

    def __post_init__(self) -> None:
        checks.whole(secondaries=self.secondaries, rounds=self.rounds)
        checks.at_least(1, secondaries=self.secondaries)
        checks.at_least(2, rounds=self.rounds)
        checks.positive(
            noise_multiplier=self.noise_multiplier,
            clip_norm=self.clip_norm,
            timeout_s=self.timeout_s,
        )
        if not _LEAST_LABELS <= self.label_epsilon <= _MOST_LABELS:
            raise ConfigError(
                f"label_epsilon must lie in [{_LEAST_LABELS:g}, {_MOST_LABELS:g}] for an audit, "
                f"got {self.label_epsilon!r}: beyond it too many labels would have to be counted"
            )
        # Which noise can be audited at all is checked there.
        AuditSize(noise=self.noise_multiplier, parties=1, rounds=2, rows=1, width=1, step=0.0)

    @property
    def names(self) -> list[str]:
        """All parties, by rank."""
        return ["primary", *(f"secondary-{rank}" for rank in range(1, self.secondaries + 1))]

    @property
    def label_noise(self) -> float:
        """Noise on returned class sums, over the change by one label."""
        return gaussian_noise_multiplier(epsilon=self.label_epsilon, delta=DELTA)
