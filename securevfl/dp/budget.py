"""Budget calculator: epsilon from noise, noise from epsilon, steps from both.

:class:`Budget` is a plan of releases; ``lab.accountants`` has its epsilon under five accountants.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Final, Literal

from securevfl.core import checks
from securevfl.core.errors import ConfigError, PrivacyError
from securevfl.dp import events, sensitivity
from securevfl.dp.accountant import Method, epsilon_of
from securevfl.dp.calibration import noise_multiplier_for
from securevfl.dp.gaussian import composed_multiplier
from securevfl.dp.privacy import UnitName
from securevfl.dp.regime import REGIMES, Encoder, Regime

Sampling = Literal["per-round", "per-epoch", "fixed-size"]
NeighbouringName = Literal["add-remove", "replace-one"]

# A search for the number of steps gives up here.
_MOST_STEPS: Final = 10**9


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """A plan of releases, without its noise; docs/privacy.md, section 3, "How epsilon is computed".

    The noise multiplier is that of one round: ``z = tau sqrt(k - c) / Delta_sum``, the noise that
    honest parties leave on the sum over what one unit can change in it (with the m rows that one
    record touches counted in ``Delta_sum``; with a trained encoder, all B rows of the round).
    """

    steps: checks.FromZero
    """Rounds, >= 0; each releases one average."""

    delta: checks.OpenUnit
    """Failure probability of the whole, in (0, 1)."""

    sampling_rate: checks.Rate = 1.0
    """``q``: rate of the secret Poisson sample of records that is linked, in (0, 1]."""

    unit: UnitName = "secondary-record"
    """Unit of the guarantee."""

    encoder: Encoder = "frozen"
    """How bottom models depend on private data."""

    links_per_record: checks.Count | None = None
    """``m``: most rows of a round that one record can be linked to. Has no default: without the
    record-side cap there is no bound. Not needed for linked rows and trained encoders."""

    secondaries: checks.Count = 1
    """``k``: parties that add a noise share in every round."""

    colluding: checks.FromZero = 0
    """``c``: how many of them may help the primary."""

    clip_norm: checks.Positive = 1.0
    """``C``, in the units of the representation; matters for noise in those units alone."""

    batch_rows: checks.Count = 128
    """``B``: rows of a round; matters for noise in units of the representation alone."""

    sampling: Sampling = "per-round"
    """``per-round``: a fresh sample each round; ``per-epoch``: one for ``batches_per_epoch``
    rounds; ``fixed-size`` samples are refused."""

    sampling_secret: bool = True
    """True if the primary never learns which records were sampled."""

    batches_per_epoch: checks.Count = 1
    """Rounds of an epoch; a row is in one of them. For linked rows whose encoder is not
    ``trained``, and for ``per-epoch`` sampling."""

    neighbouring: NeighbouringName = "add-remove"
    """Difference of neighbouring tables: one unit is there or not, or is exchanged for another."""

    rows_mix: bool = False
    """True if one row's representation depends on other rows of its batch, as with BatchNorm in a
    bottom model. Refused: one record then moves every row."""

    gradient_noise_multiplier: checks.Positive | None = None
    """For ``dp-trained``: multiplier of the noise on each update of the bottom model; the forward
    one if None."""

    gradient_clip_norm: checks.Positive | None = None
    """``C_g``, for ``dp-trained``: clip norm of one row's gradient, 1 if None; matters for noise
    in its own units alone."""

    accountant: Method = "auto"
    """``auto``, ``pld`` or ``rdp``."""

    counts_links: bool = False
    """True if each secondary also releases its linked-row count, once and noised, as in runs."""

    def __post_init__(self) -> None:
        checks.require_limits(self)
        self.regime.require_update_settings(
            {
                "gradient_noise_multiplier": self.gradient_noise_multiplier,
                "gradient_clip_norm": self.gradient_clip_norm,
            }
        )
        sensitivity.honest_parties(active=self.secondaries, colluding=self.colluding)
        self._check_promise()

    def _check_promise(self) -> None:
        """Refuse plans that no accountant covers.

        Raises:
            PrivacyError: With the change that makes the plan sound.
        """
        if self._needs_cap and self.links_per_record is None:
            raise PrivacyError(
                f"links_per_record: must be given for unit = {self.unit!r} with a {self.encoder} "
                f"encoder; without a record-side cap one record can touch any number of rows"
            )
        if self.rows_mix and self.regime.caps_records:
            raise PrivacyError(
                "rows_mix: a bottom model that mixes the rows of a batch (BatchNorm) lets one "
                "record move them all; use LayerNorm or none"
            )
        if self.sampling == "fixed-size":
            raise PrivacyError(
                'sampling: "fixed-size" samples (without replacement) are not accounted for: '
                "removing a record changes who else is drawn; use Poisson sampling"
            )
        if self.sampling_rate == 1:
            return
        if not self.sampling_secret:
            raise PrivacyError(
                "sampling_secret: a sample that the primary knows amplifies nothing; keep it "
                "secret, or set sampling_rate to 1"
            )
        if self.unit == "linked-row":
            raise PrivacyError(
                'sampling_rate: does not amplify unit = "linked-row", which is released in every '
                "round; set it to 1, or choose another unit"
            )
        regime = self.regime
        if not regime.amplified_units:
            raise PrivacyError(
                'sampling_rate: does not amplify with encoder = "trained", whose weights remember '
                "records that were sampled before; set it to 1, or use a frozen or dp-trained "
                "encoder"
            )
        fresh = self.sampling == "per-round" or not regime.noises_updates
        if events.Unit(self.unit) not in regime.amplified_units or not fresh:
            raise PrivacyError(
                'sampling_rate: with encoder = "dp-trained" amplification is accounted for the '
                'unit "secondary-record" and a fresh sample each round only; set it to 1'
            )

    @property
    def _needs_cap(self) -> bool:
        return self.unit != "linked-row" and self.regime.caps_records

    @property
    def regime(self) -> Regime:
        """The encoder's regime."""
        return REGIMES[self.encoder]

    def releases(self, noise_multiplier: float) -> list[events.NoisedRelease]:
        """Return the plan's releases at a round's noise multiplier ``z``, for an accountant.

        The rounds come first, and what each secondary says of its links after them.
        """
        rounds = self._rounds(noise_multiplier)
        if not self.counts_links or not self.steps:
            return [rounds]
        answers = 1 if self.unit == "secondary-record" else self.secondaries
        return [rounds, events.link_count_release(rounds, answers=answers)]

    def _rounds(self, noise_multiplier: float) -> events.NoisedRelease:
        """Return what all rounds release.

        References:
            docs/privacy.md, section 3, "How epsilon is computed". ``dp-trained``: forward and
            gradient releases of a round compose to ``(z_f^-2 + z_g^-2)^-1/2``. One sample an
            epoch: the B rounds that share it are one release of sqrt(B) times the sensitivity.
        """
        checks.positive(noise_multiplier=noise_multiplier)
        z, count = noise_multiplier, self.steps
        if self.regime.noises_updates:
            z = composed_multiplier(z, self.gradient_noise_multiplier or z)
        if self.unit == "linked-row" and self.regime.caps_records:
            # A row is in one batch of an epoch; the other batches do not depend on it.
            count = -(-self.steps // self.batches_per_epoch)
        if self.sampling_rate == 1:
            return events.GaussianRelease(noise_multiplier=z, count=count)
        if self.sampling == "per-epoch":
            z /= math.sqrt(self.batches_per_epoch)
            count = -(-self.steps // self.batches_per_epoch)
        replace_one = self.neighbouring == "replace-one"
        if self.unit == "entity" and self.sampling == "per-round" and not replace_one:
            return events.EntitySampledRelease(
                parties=self.secondaries,
                sampling_rate=self.sampling_rate,
                noise_multiplier=z,
                count=count,
            )
        if replace_one:
            # z was measured by the exchange, of up to 2m rows; the event wants one record's m.
            exchanged, added = (
                sensitivity.rows_changed(
                    links_per_record=self.links_per_record or self.batch_rows,
                    rows=self.batch_rows,
                    neighbouring=neighbouring,
                )
                for neighbouring in (
                    events.Neighbouring.REPLACE_ONE,
                    events.Neighbouring.ADD_REMOVE,
                )
            )
            z *= math.sqrt(exchanged / added)
        return events.SampledRelease(
            sampling_rate=self.sampling_rate,
            noise_multiplier=z,
            count=count,
            neighbouring=events.Neighbouring(self.neighbouring),
        )

    def epsilon(self, *, noise_multiplier: float) -> float:
        """Return epsilon of the plan at a round's noise multiplier; rounded up.

        Raises:
            ConfigError: If the multiplier is not positive and finite, or delta too small for the
                accountant.
        """
        return epsilon_of(self.releases(noise_multiplier), delta=self.delta, method=self.accountant)

    def noise_multiplier(self, *, epsilon: float) -> float:
        """Return a round's noise multiplier that keeps the plan within ``epsilon``; rounded up.

        Raises:
            ConfigError: If ``epsilon`` is not positive and finite, or no noise is enough.
        """
        return noise_multiplier_for(
            self.releases, epsilon=epsilon, delta=self.delta, method=self.accountant
        )

    def steps_within(self, *, epsilon: float, noise_multiplier: float) -> int:
        """Return the most rounds that stay within ``epsilon`` at a noise multiplier; rounded down.

        ``self.steps`` is not used.

        Raises:
            ConfigError: If more than 1e9 rounds fit.
        """
        checks.positive(epsilon=epsilon, noise_multiplier=noise_multiplier)

        def cost(steps: int) -> float:
            return replace(self, steps=steps).epsilon(noise_multiplier=noise_multiplier)

        too_many = 1
        while cost(too_many) <= epsilon:
            too_many *= 4
            if too_many > _MOST_STEPS:
                raise ConfigError(
                    f"more than {_MOST_STEPS} steps stay within epsilon = {epsilon!r}"
                )
        return bisect_right(range(too_many), epsilon, lo=too_many // 4, key=cost) - 1

    def sensitivity(self) -> float:
        """Return ``Delta_sum`` of one round, in the units of ``clip_norm``.

        For linked rows 2C k: the release of a row without links is not assumed zero.
        """
        rows = self.batch_rows
        return sensitivity.sum_sensitivity(
            clip_norm=self.clip_norm,
            active=self.secondaries,
            unit=events.Unit(self.unit),
            links_per_record=self.links_per_record if self._needs_cap else rows,
            rows=rows,
            neighbouring=events.Neighbouring(self.neighbouring),
        ) * (math.sqrt(rows) if self.unit == "linked-row" and not self.regime.caps_records else 1)

    def gradient_noise_std(self, gradient_noise_multiplier: float) -> float:
        """Return ``tau_g``: noise on one secondary's sum of a round's clipped row gradients.

        For ``dp-trained``; in the units of ``gradient_clip_norm``. Exchanging a unit changes twice
        the rows, and updates of an entity or a linked row are made at every secondary.
        """
        checks.positive(gradient_noise_multiplier=gradient_noise_multiplier)
        unit = events.Unit(self.unit)
        change = sensitivity.gradient_sensitivity(
            clip_norm=self.gradient_clip_norm or 1.0,
            unit=unit,
            rows=sensitivity.rows_changed(
                links_per_record=self.links_per_record or 1,
                rows=self.batch_rows,
                neighbouring=events.Neighbouring(self.neighbouring),
            ),
        )
        if unit is not events.Unit.SECONDARY_RECORD:
            change *= math.sqrt(self.secondaries)
        return gradient_noise_multiplier * change

    def noise_share_std(self, *, noise_multiplier: float) -> float:
        """Return ``tau``: what each secondary adds to its own term, in the units of ``clip_norm``.

        Computed from :meth:`sensitivity`, at ``secondaries`` active and ``colluding`` of them
        helping the primary.
        """
        checks.positive(noise_multiplier=noise_multiplier)
        return sensitivity.noise_share_std(
            sum_std=noise_multiplier * self.sensitivity(),
            active=self.secondaries,
            colluding=self.colluding,
        )
