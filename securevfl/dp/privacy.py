"""The ``[privacy]`` table of the federation file: mechanism, guarantee and unit."""

import math
from dataclasses import dataclass
from typing import Literal

from securevfl.core import checks
from securevfl.core.errors import ConfigError, PrivacyError
from securevfl.dp.events import Unit
from securevfl.dp.regime import REGIMES, Encoder, Regime

Mechanism = Literal["gaussian", "none"]
UnitName = Literal["secondary-record", "linked-row", "entity"]
Accounting = Literal["sound", "as-published"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Privacy:
    """Protection of representations, and the required guarantee (docs/privacy.md)."""

    mechanism: Mechanism = "gaussian"
    """``gaussian`` adds noise to every average; ``none`` adds no noise and gives no guarantee."""

    epsilon: checks.Positive | None = None
    """Bound on the run's privacy loss, from which noise follows."""

    noise_multiplier: checks.Positive | None = None
    """Instead of ``epsilon``: noise on the sum over the sum's sensitivity."""

    delta: checks.OpenUnit = 1e-5
    """Failure probability of the guarantee; well below 1 over the number of records."""

    clip_norm: checks.Positive = 1.0
    """C: largest L2 norm of a row's representation at one secondary."""

    unit: UnitName = "secondary-record"
    """Protected unit: one record of one secondary, one entity's records at every secondary, or all
    links of one row."""

    encoder: Encoder = "trained"
    """How weights of bottom models depend on records, which decides the accounting. ``frozen``:
    only through what ``[encoder]`` fits with noise. ``dp-trained``: through noised updates.
    ``trained``: freely, at an epsilon that is usually very large."""

    links_per_record: checks.Count | None = None
    """m: most rows, over all uses, that one record can be linked to."""

    sampling_rate: checks.Rate = 1.0
    """q: rate of the secret Poisson sample of records that is linked."""

    colluding: checks.FromZero = 0
    """c: secondaries that may help the primary; the others' noise must be enough."""

    mask_degree: int | None = None
    """Secondaries with which each one shares masks: even, above ``colluding``, from 17 secondaries
    on. So many helpers of the primary can isolate one term, which then has its own noise alone.
    Default: all others."""

    gradient_clip_norm: checks.Positive | None = None
    """C_g, for ``dp-trained``: largest L2 norm of one row's gradient, of a loss that is summed over
    rows. Default 1."""

    gradient_noise_multiplier: checks.Positive | None = None
    """For ``dp-trained`` with ``noise_multiplier``: noise on a batch's summed clipped gradients
    over that sum's sensitivity. Default: by ``gradient_share``."""

    gradient_share: checks.OpenUnit | None = None
    """For ``dp-trained``: updates' part of the budget, as a part of ``1/z^2``; releases use the
    rest. Default 0.5."""

    accounting: Accounting = "sound"
    """``as-published`` calibrates by the papers' formulas, which are no guarantee."""

    def __post_init__(self) -> None:
        checks.require_limits(self)
        self._check_masks()
        self._check_noise()
        self._check_updates()
        if self.mechanism == "gaussian" and self.accounting == "sound":
            self._check_promise()

    def _check_masks(self) -> None:
        degree = self.mask_degree
        if degree is None:
            return
        checks.whole(mask_degree=degree)
        enough = max(2, self.colluding + 1 + (self.colluding + 1) % 2)
        if degree % 2 or degree < 2:
            raise ConfigError(f"mask_degree: must be an even number from {enough} on, got {degree}")
        if degree <= self.colluding:
            raise ConfigError(
                f"mask_degree: {degree} secondaries that help the primary could isolate another's "
                f"term, and colluding = {self.colluding} allows as many; set it to at least "
                f"{enough}, or omit it"
            )

    def _check_noise(self) -> None:
        given = (self.epsilon is not None) + (self.noise_multiplier is not None)
        if self.mechanism == "gaussian" and given != 1:
            raise ConfigError(
                "epsilon: exactly one of epsilon and noise_multiplier must be given; "
                + ("got both" if given else 'got neither (mechanism = "none" needs neither)')
            )
        if self.mechanism == "none" and given:
            raise ConfigError(
                'mechanism: "none" adds no noise, so epsilon and noise_multiplier must be left out'
            )

    def _check_updates(self) -> None:
        self.regime.require_update_settings(
            {
                "gradient_clip_norm": self.gradient_clip_norm,
                "gradient_noise_multiplier": self.gradient_noise_multiplier,
                "gradient_share": self.gradient_share,
            }
        )
        if not self.regime.noises_updates:
            return
        if self.mechanism == "none" or self.accounting == "as-published":
            raise ConfigError(
                'encoder: "dp-trained" needs mechanism = "gaussian" and accounting = "sound"; '
                'an encoder that learns without a guarantee is "trained"'
            )
        if self.gradient_noise_multiplier is not None and (
            self.gradient_share is not None or self.noise_multiplier is None
        ):
            raise ConfigError(
                "gradient_noise_multiplier: goes with noise_multiplier, and without "
                "gradient_share; with epsilon, gradient_share divides the budget"
            )

    def _check_promise(self) -> None:
        """Refuse combinations that no accountant covers.

        Raises:
            PrivacyError: With the change that makes the combination sound.
        """
        regime = self.regime
        if regime.caps_records and self.unit != "linked-row" and not self.links_per_record:
            raise PrivacyError(
                f"links_per_record: must be given for unit = {self.unit!r} with a "
                f"{regime.name} encoder; without a record-side cap one record can touch any "
                f"number of rows"
            )
        if self.sampling_rate < 1 and self.unit == "linked-row":
            raise PrivacyError(
                'sampling_rate: does not amplify unit = "linked-row", since a linked row is '
                "released in every round; set it to 1, or choose another unit"
            )
        if self.sampling_rate < 1 and not regime.amplified_units:
            raise PrivacyError(
                'sampling_rate: does not amplify with encoder = "trained", whose weights '
                "remember records that were sampled before; set it to 1, or use a frozen or "
                "dp-trained encoder"
            )
        if self.sampling_rate < 1 and Unit(self.unit) not in regime.amplified_units:
            raise PrivacyError(
                'sampling_rate: amplification of unit = "entity" is not accounted for with a '
                "dp-trained encoder; set it to 1, or use a frozen encoder"
            )

    def delta_warning(self, records: int) -> str | None:
        """Return a warning if ``delta`` is too large for a table of ``records``, else None."""
        if self.mechanism == "none" or records < 1 or self.delta < 1 / records:
            return None
        return (
            f"privacy.delta = {self.delta:g} is not below 1/{records}, one over the records of a "
            f"table: a mechanism that publishes one random record would satisfy it; choose a "
            f"smaller delta"
        )

    @property
    def regime(self) -> Regime:
        """The encoder's regime."""
        return REGIMES[self.encoder]

    @property
    def bound(self) -> float:
        """Bound on the run's epsilon; infinite where a noise multiplier is given instead."""
        return math.inf if self.epsilon is None else self.epsilon

    @property
    def bounds_a_record(self) -> bool:
        """Whether a record changes the rows that it is released in, and nothing else, for certain.

        Then counting these rows bounds it. A secret sample has another bound for each record.
        """
        fixed = self.regime.releases_once and self.sampling_rate == 1
        promised = self.mechanism != "none" and self.accounting == "sound"
        return fixed and promised and self.unit != "linked-row"

    @property
    def bounds_linked_rows(self) -> bool:
        """Whether a unit moves the number of linked rows by a known number, or nothing is promised.

        Without a cap a record may be the only one of every row.
        """
        capped = self.unit == "linked-row" or self.links_per_record is not None
        return self.mechanism == "none" or capped

    @property
    def update_clip_norm(self) -> float:
        """``C_g``, clip norm of a row's gradient, for a dp-trained encoder."""
        return 1.0 if self.gradient_clip_norm is None else self.gradient_clip_norm

    @property
    def update_noise_ratio(self) -> float:
        """Noise multiplier of a dp-trained encoder's updates over that of its releases."""
        if self.gradient_noise_multiplier is not None and self.noise_multiplier is not None:
            return self.gradient_noise_multiplier / self.noise_multiplier
        share = 0.5 if self.gradient_share is None else self.gradient_share
        return math.sqrt((1 - share) / share)
