"""Release plan of a run: from a plan to noise, and from noise to epsilon.

``tau`` is the standard deviation of the noise that each secondary adds to its own term of the sum,
in the units of the representation. Of scores it is a noise level: of symbols, the odds of
another cell (:mod:`securevfl.dp.symbols`), of Laplace sums their scale over the largest number of a
record (:mod:`securevfl.dp.laplace`). Formulas: docs/privacy.md, section 3.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, assert_never

from securevfl.core import checks
from securevfl.core.errors import ConfigError, PrivacyError
from securevfl.dp import events, sensitivity
from securevfl.dp.accountant import epsilon_of, simplify_releases
from securevfl.dp.calibration import noise_multiplier_for
from securevfl.dp.gaussian import composed_multiplier, gaussian_noise_multiplier, smallest_enough
from securevfl.dp.laplace import LaplacePlan
from securevfl.dp.privacy import Privacy
from securevfl.dp.pure import pure_delta
from securevfl.dp.sensitivity import gradient_sensitivity, honest_parties, row_change
from securevfl.dp.statement import Statement, bounded_statement, unbounded_statement
from securevfl.dp.symbols import CELLS, SymbolPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class FittingPlan:
    """Privacy budget of encoder fitting, and the noised answers it is spent on.

    Each secondary fits its encoder to noised statistics of its own records, once, before anything
    is released; nothing of that leaves it but through the releases. One record is in the statistics
    of one secondary, an entity in every secondary's, and a row of the primary in none.
    """

    share: checks.OpenUnit
    """Share of the run's budget for all fittings that a unit is in, in (0, 1); a part of the
    squared ``mu = 1/z``, in which Gaussian releases add up."""

    steps: checks.Count = 1
    """Noised answers that one fitting takes from its table, >= 1."""

    def __post_init__(self) -> None:
        checks.require_limits(self)


def epsilon_as_published(
    *, average_multiplier: float, sampling_rate: float, rounds: int, delta: float
) -> float:
    """Return the epsilon that [FeT]'s Theorem 3 claims, with a tight accountant's constants.

    The theorem takes the noise of the released average, in units of the clip norm, for a noise
    multiplier, each of the ``B T`` batches for one step of Poisson-subsampled DP-SGD at rate q, and
    says nothing of how many rows a record touches, of how much one neighbour's removal moves a
    row, or of what a trained encoder remembers.

    Args:
        average_multiplier: Standard deviation of the noise on the average over the clip norm, > 0.
        sampling_rate: ``q``, in (0, 1].
        rounds: Batches times epochs, >= 0.
        delta: In (0, 1).

    References:
        [FeT] Theorem 3 (arXiv:2410.17986v1).
    """
    checks.whole_from(0, rounds=rounds)
    checks.open_unit(delta=delta)
    release = events.SampledRelease(
        sampling_rate=sampling_rate, noise_multiplier=average_multiplier, count=rounds
    )
    return epsilon_of([release], delta=delta)


# A noise level of scores at which nothing is left of them.
_MOST_LEVEL: Final = 1e9

# Relative increase of noise that rounding has left slightly too small; it doubles each time. All
# together come to a thousandth: what needs more was calibrated for other releases.
_NUDGE: Final = 1e-12
_NUDGES: Final = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class ReleasePlan:
    """Privacy-relevant numbers of a run, fixed before anything is sent.

    ``tau`` below is what each party adds to its own term of the sum, in the units of the
    representation; it is the number that runs, and every epsilon is computed from it.

    Party dropout: the noise of the released sum grows with the square root of the active
    secondaries; what a linked row or an entity can change in it grows with their number. The worst
    number is therefore one of the two ends of what the run allows, and both are looked at. (The
    smallest alone would do for ``secondary-record``.)
    """

    privacy: Privacy
    """The guarantee."""

    parties: checks.Count
    """``k``: secondaries of the federation."""

    min_active: checks.Count
    """Fewest secondaries that take part in a round; a run must abort below it."""

    rounds: checks.Count
    """Releases of the whole run: training, validation, test, prediction."""

    rows_per_round: checks.Count
    """``B``: most rows of one round."""

    row_releases: checks.Count
    """Sum over rounds of their rows."""

    releases_per_row: checks.Count
    """Most rounds that one row is in."""

    links: checks.Count
    """``K``: neighbours that a row is linked to at each secondary."""

    pooled: bool = False
    """Each secondary's term of a row is the mean over K slots of clipped vectors, each of them a
    function of one record alone (and of the row's key); empty slots are zero."""

    contested: bool = True
    """True if a pooled row keeps its K nearest eligible records, so that another one takes the
    place of a removed one; else it is the sum of all eligible ones, drawn back to norm C."""

    disjoint: bool = False
    """True if every secondary writes into coordinates of the sum that are its own, which only
    frozen encoders hold to."""

    rounding: checks.NonNegative = 0.0
    """Largest extra L2 change of a pooled row through rounding after the mean; see
    :func:`securevfl.dp.sensitivity.row_change`."""

    fitting: FittingPlan | None = None
    """Plan of every secondary's fitting of a frozen encoder; None fits nothing."""

    linked_rows: checks.Count | None = None
    """Number of the primary's rows, where every secondary sends once, behind noise of its own, how
    many of them are linked; None sends nothing. A secret sample changes no count."""

    releases_per_record: checks.Count | None = None
    """N: rows that one record takes part in, at each secondary and over all requests for
    predictions of a kept model, whatever is asked for. All of them together are then one release,
    however many there are; ``min_active`` of the ``parties`` answer this one. None: what a record
    can change is bounded by what is planned here."""

    symbols: SymbolPlan | None = None
    """Symbols of scores or votes, in place of Gaussian noise; None: none."""

    laplace: LaplacePlan | None = None
    """Scores or votes behind Laplace noise, in place of Gaussian noise; None: none."""

    def __post_init__(self) -> None:
        checks.require_limits(self)
        if self.scores is not None and self.privacy.epsilon is None:
            raise ConfigError(
                "privacy.noise_multiplier: is of Gaussian noise, and one score a record is "
                "released without any; give privacy.epsilon instead"
            )
        if self.min_active > self.parties:
            raise ConfigError(
                f"min_active must be at most parties, got {self.min_active} of {self.parties}"
            )
        if not self.rows_per_round <= self.row_releases <= self.rounds * self.rows_per_round:
            raise ConfigError(
                f"row_releases must lie between rows_per_round and rounds times rows_per_round, "
                f"got {self.row_releases} for {self.rounds} rounds of {self.rows_per_round}"
            )
        if self.releases_per_row > self.rounds:
            raise ConfigError(
                f"releases_per_row must be at most rounds, got {self.releases_per_row} "
                f"of {self.rounds}"
            )
        if self.fitting and not self.privacy.regime.releases_once:
            raise ConfigError(
                f"fitting: only frozen encoders are fitted beforehand; the encoder is "
                f"{self.privacy.encoder!r}"
            )
        if not self.contested and not self.pooled:
            raise ConfigError("contested: only pooled rows can do without a contest for slots")
        bounded = self.privacy.bounds_a_record and not self.contested
        if self.releases_per_record is not None and not bounded:
            raise ConfigError("releases_per_record: a record must change its own rows alone")
        if self.linked_rows is not None and self.privacy.mechanism != "none":
            # Refuses records that may be linked to any number of rows.
            self._linked_rows_change(self.linked_rows)

    @property
    def scores(self) -> SymbolPlan | LaplacePlan | None:
        """Plan of scores or votes; None: vectors behind Gaussian noise."""
        return self.symbols or self.laplace

    @property
    def honest(self) -> int:
        """Fewest secondaries whose noise protects."""
        return honest_parties(active=self.min_active, colluding=self.privacy.colluding)

    def check(self) -> None:
        """Refuse a plan whose guarantee would not hold.

        Raises:
            PrivacyError: Saying what would make it sound.
        """
        privacy = self.privacy
        if privacy.mechanism == "none":
            return
        honest_parties(active=self.min_active, colluding=privacy.colluding)
        if privacy.accounting == "as-published":
            if self.fitting:
                raise PrivacyError(
                    "privacy.accounting: the papers have no formula for fitted encoders; use "
                    '"sound", or an encoder that is not fitted'
                )
            return
        once = privacy.regime.releases_once
        if privacy.sampling_rate < 1 and once and self.releases_per_row > 1:
            raise PrivacyError(
                f"privacy.sampling_rate: one secret sample serves one pass over the rows, but a "
                f"row is released {self.releases_per_row} times; release each row once, or set "
                f"the rate to 1"
            )

    def sensitivity(self) -> float:
        """Return ``Delta_sum`` at k active secondaries, by which ``noise_multiplier`` is defined.

        L2, in the units of the representation. With a trained encoder: of one round, all B rows may
        change. With a dp-trained one: of one round, as many rows change as the record-side cap
        allows. With a frozen one: of the whole run, since its rounds are parts of one fixed answer.
        """
        return self._row_change(self.parties) * math.sqrt(self._measured_rows)

    def noise_share_std(self) -> float:
        """Return ``tau``: what each secondary adds to its own term, in the units of the rows.

        Zero if the mechanism is ``none``; otherwise from ``noise_multiplier``, or calibrated to
        ``epsilon``, rounded towards more noise.

        Raises:
            PrivacyError: If the plan is unsound, or no noise is enough.
        """
        privacy = self.privacy
        if privacy.mechanism == "none":
            return 0.0
        # tau at which releases have the multiplier 1, for the worst number of active secondaries.
        change = self._change_over_noise() * math.sqrt(self._measured_rows)
        if privacy.noise_multiplier is not None:
            return privacy.noise_multiplier * change
        epsilon = privacy.bound
        if self.scores is not None:
            return self._calibrated(self.scores)
        if privacy.accounting == "as-published":
            on_average = noise_multiplier_for(
                lambda z: [
                    events.SampledRelease(
                        sampling_rate=privacy.sampling_rate, noise_multiplier=z, count=self.rounds
                    )
                ],
                epsilon=epsilon,
                delta=privacy.delta,
            )
            return on_average * privacy.clip_norm * math.sqrt(self.parties)
        share_std = change * noise_multiplier_for(
            lambda multiplier: [
                *self.fitting_releases(),
                *self.link_count_releases(multiplier * change),
                self._whole_noised_release(multiplier * change),
            ],
            epsilon=epsilon,
            delta=self.privacy.delta,
        )
        kept = self._nudge_to_budget(share_std)
        if kept is None:
            raise PrivacyError(f"no noise was found for epsilon = {epsilon:g}")
        return kept

    def _nudge_to_budget(self, noise: float, *, below: float = math.inf) -> float | None:
        """Return the noise with as little more as keeps the budget; None if there is none.

        Rounding must not leave the plan's last row over it.
        """
        for nudge in range(_NUDGES):
            if noise >= below:
                break
            if self.epsilon(noise) <= self.privacy.bound:
                return noise
            noise *= 1 + _NUDGE * 2**nudge
        return None

    def _calibrated(self, scores: SymbolPlan | LaplacePlan) -> float:
        """Return the least noise level at which scores keep the plan's epsilon.

        Raises:
            PrivacyError: If what comes before them leaves no epsilon.
        """
        privacy = self.privacy
        # The number of linked rows has noise of its own, which does not depend on this level.
        before = simplify_releases([*self.fitting_releases(), *self.link_count_releases(1.0)])
        multiplier = before[0].noise_multiplier if before else None
        touched = self._touched_releases(self.row_releases, self.releases_per_row)

        def enough(level: float) -> bool:
            if level >= most:
                return True
            release = self._pure_release(scores, level, touched=touched)
            delta = pure_delta([release], epsilon=privacy.bound, noise_multiplier=multiplier)
            return delta <= privacy.delta

        most = min(scores.most_noise, _MOST_LEVEL)
        least = smallest_enough(enough, start=1.0, what="noise of scores")
        level = self._nudge_to_budget(least, below=most)
        if level is None:
            raise PrivacyError(
                f"no noise of scores was found for epsilon = {privacy.bound:g}: what their "
                f"encoder is fitted to leaves nothing; lower encoder.share"
            )
        return level

    def fitting_multiplier(self) -> float | None:
        """Return the noise multiplier of each step of a secondary's fitting; None without noise.

        With ``privacy.epsilon``, fittings have their share of the squared ``mu`` that one Gaussian
        release may have at that epsilon; with ``noise_multiplier``, of the squared ``mu`` of
        fittings and releases together.

        References:
            [DRS19] Corollary 3.3: ``mu`` of Gaussian releases composes as the root of summed
            squares.
        """
        privacy, fitting = self.privacy, self.fitting
        if privacy.mechanism == "none" or fitting is None:
            return None
        # A linked row is in no statistics; records get the noise of one fitting.
        count = fitting.steps * max(1, self._fittings_of_unit)
        if privacy.noise_multiplier is not None:
            together = privacy.noise_multiplier * math.sqrt((1 - fitting.share) / fitting.share)
        else:
            z = gaussian_noise_multiplier(epsilon=privacy.bound, delta=privacy.delta)
            together = z / math.sqrt(fitting.share)
        return together * math.sqrt(count)

    def fitting_releases(self) -> list[events.GaussianRelease]:
        """Return the fittings' releases of one unit, for an accountant; empty if there are none."""
        multiplier, fittings = self.fitting_multiplier(), self._fittings_of_unit
        if self.fitting is None or multiplier is None or not fittings:
            return []
        return [
            events.GaussianRelease(noise_multiplier=multiplier, count=self.fitting.steps * fittings)
        ]

    def link_count_std(self, noise_share_std: float) -> float:
        """Return the deviation of the noise on a secondary's number of linked rows, at ``tau``.

        In rows; 0 without noise. A secondary adds all of it, so no other one matters: neither how
        many there are, nor how many collude.
        """
        if self.linked_rows is None:
            return 0.0
        return sum(
            release.noise_multiplier * self._linked_rows_change(self.linked_rows)
            for release in self.link_count_releases(noise_share_std)
        )

    def link_count_releases(self, noise_share_std: float) -> list[events.GaussianRelease]:
        """Return the answers on linked rows that a unit is in, for an accountant.

        Empty if there are none, or no noise. Together they have ten times the noise multiplier of
        the whole plan's releases: where these are Gaussian, 1/101 of the squared ``mu`` of both.
        Beside scores, ten times that of one Gaussian release at the plan's epsilon.
        """
        if self.linked_rows is None or noise_share_std == 0:
            return []
        if self.scores is None:
            whole = self._whole_noised_release(noise_share_std)
        else:
            privacy = self.privacy
            multiplier = gaussian_noise_multiplier(epsilon=privacy.bound, delta=privacy.delta)
            whole = events.GaussianRelease(noise_multiplier=multiplier)
        answers = 1 if self.privacy.unit == "secondary-record" else self.parties
        return [events.link_count_release(whole, answers=answers)]

    def _linked_rows_change(self, rows: int) -> int:
        """Return the most by which one unit moves a secondary's number of linked rows, of all."""
        return sensitivity.linked_rows_sensitivity(
            unit=events.Unit(self.privacy.unit),
            links_per_record=self.privacy.links_per_record,
            rows=rows,
        )

    @property
    def _fittings_of_unit(self) -> int:
        """The number of secondaries whose statistics contain one unit."""
        match self.privacy.unit:
            case "secondary-record":
                return 1
            case "entity":
                return self.parties
            case "linked-row":
                return 0
            case _:
                assert_never(self.privacy.unit)

    def gradient_noise_std(self, noise_share_std: float) -> float:
        """Return ``tau_g``: noise on one secondary's sum of clipped row gradients, at ``tau``.

        For dp-trained encoders; in the units of ``gradient_clip_norm``. An update carries its own
        secondary's noise, whole; a unit with a record at each of k secondaries changes k updates.
        """
        privacy = self.privacy
        change = gradient_sensitivity(
            clip_norm=privacy.update_clip_norm,
            unit=events.Unit(privacy.unit),
            rows=self._rows_of_a_round,
        )
        if privacy.unit != "secondary-record":
            change *= math.sqrt(self.parties)
        return privacy.update_noise_ratio * self.release_multiplier(noise_share_std) * change

    def epsilon(self, noise_share_std: float) -> float:
        """Return the sound epsilon of the whole plan at ``tau``; infinite without noise."""
        return self.epsilon_after(
            noise_share_std, rounds=self.rounds, row_releases=self.row_releases
        )

    def epsilon_after(
        self, noise_share_std: float, *, rounds: int, row_releases: int, passes: int | None = None
    ) -> float:
        """Return the sound epsilon of a part of the plan, with what comes before its rows.

        That is the fitting of encoders, and the number of linked rows.

        Args:
            noise_share_std: ``tau``; 0 if the mechanism is ``none``.
            rounds: Rounds released, >= 0.
            row_releases: Sum over these rounds of their rows, >= ``rounds``.
            passes: Most of these rounds that one row was in; ``releases_per_row`` if None.
        """
        if row_releases == 0:
            return 0.0
        if noise_share_std == 0:
            return math.inf
        release = self.release(
            noise_share_std, rounds=rounds, row_releases=row_releases, passes=passes
        )
        before = [*self.fitting_releases(), *self.link_count_releases(noise_share_std)]
        return epsilon_of([*before, release], delta=self.privacy.delta)

    def release(
        self, noise_share_std: float, *, rounds: int, row_releases: int, passes: int | None = None
    ) -> events.Release:
        """Return the event that describes a part of the plan, for an accountant.

        Args:
            noise_share_std: ``tau``, > 0.
            rounds: Rounds released, >= 1.
            row_releases: Sum over these rounds of their rows, >= ``rounds``.
            passes: Most of these rounds that one row was in; ``releases_per_row`` if None.

        References:
            docs/privacy.md, section 3.
        """
        checks.positive(noise_share_std=noise_share_std)
        checks.whole(rounds=rounds, row_releases=row_releases)
        checks.at_least(1, rounds=rounds)
        checks.at_least(rounds, row_releases=row_releases)
        touched = self._touched_releases(
            row_releases, self.releases_per_row if passes is None else passes
        )
        if self.scores is not None:
            return self._pure_release(self.scores, noise_share_std, touched=touched)
        return self._noised_release(noise_share_std, rounds=rounds, touched=touched)

    def _pure_release(
        self, scores: SymbolPlan | LaplacePlan, level: float, *, touched: int
    ) -> events.PureRelease:
        """Return the event of the scores or votes that one unit touches."""
        exchanged = scores.exchanged or self.privacy.unit == "linked-row"
        parties = 1 if self.privacy.unit == "secondary-record" else self.parties
        return replace(scores, exchanged=exchanged).release(level, rows=touched, parties=parties)

    def _whole_noised_release(self, noise_share_std: float) -> events.NoisedRelease:
        """Return the event of all of the plan's rows behind Gaussian noise."""
        touched = self._touched_releases(self.row_releases, self.releases_per_row)
        return self._noised_release(noise_share_std, rounds=self.rounds, touched=touched)

    def _noised_release(
        self, noise_share_std: float, *, rounds: int, touched: int
    ) -> events.NoisedRelease:
        """Return the event of rows behind Gaussian noise, of which one unit touches some.

        A dp-trained round's release and update are, given what came before, one Gaussian release
        at ``(z_f^-2 + z_g^-2)^(-1/2)``, on one fresh sample if there is one. A unit touches at most
        ``j = min(m, B)`` rows of a round and ``m passes`` rows of rounds. Without sampling each of
        these costs at most a ``j``-th of a full round's squares (an update's change, ``2 C_g j``,
        is largest together); with it, at most ``m passes`` rounds count, each in full.
        """
        privacy, rate = self.privacy, self.privacy.sampling_rate
        if privacy.regime.noises_updates:
            multiplier = self.release_multiplier(noise_share_std)
            multiplier = composed_multiplier(multiplier, privacy.update_noise_ratio * multiplier)
            if rate < 1:
                # The plan's rounds while there are no more: a figure that changes once a pass is
                # computed once.
                count = min(touched, max(rounds, self.rounds))
                return events.SampledRelease(
                    sampling_rate=rate, noise_multiplier=multiplier, count=count
                )
            return events.GaussianRelease(
                noise_multiplier=multiplier * math.sqrt(self._rows_of_a_round / touched)
            )
        multiplier = noise_share_std / (self._change_over_noise() * math.sqrt(touched))
        if rate < 1 and privacy.regime.releases_once and privacy.unit != "linked-row":
            # Changes at right angles grow as sqrt(j) in the j parties that drew the entity, not as
            # j, so the mixture over j would be too small; the full change bounds it.
            if privacy.unit == "entity" and not self.disjoint:
                return events.EntitySampledRelease(
                    parties=self.parties, sampling_rate=rate, noise_multiplier=multiplier
                )
            return events.SampledRelease(sampling_rate=rate, noise_multiplier=multiplier)
        return events.GaussianRelease(noise_multiplier=multiplier)

    def epsilon_as_published(self, noise_share_std: float) -> float:
        """Return the epsilon that FeT's Theorem 3 claims at ``tau``; not a guarantee.

        The noise of the released average (all k active) over the clip norm is the noise multiplier,
        the sampling rate is q, and every round is one step. Infinite for scores, of which it says
        nothing.
        """
        if noise_share_std == 0 or self.scores is not None:
            return math.inf
        checks.positive(noise_share_std=noise_share_std)
        return epsilon_as_published(
            average_multiplier=noise_share_std / (math.sqrt(self.parties) * self.privacy.clip_norm),
            sampling_rate=self.privacy.sampling_rate,
            rounds=self.rounds,
            delta=self.privacy.delta,
        )

    def statement(
        self, noise_share_std: float, *, spent: float = 0.0, total_epsilon: float | None = None
    ) -> Statement:
        """Return the guarantee at ``tau`` in words.

        Args:
            noise_share_std: ``tau``; 0 if the mechanism is ``none``.
            spent: Epsilon that the run has spent; more than the plan's if rounds were repeated.
            total_epsilon: Of all runs on the table, this one included; None leaves it out.
        """
        privacy = self.privacy
        if privacy.mechanism == "none":
            return unbounded_statement(parties=self.parties)
        published = privacy.accounting == "as-published"
        return bounded_statement(
            unit=privacy.unit,
            encoder=self.scores.kind if self.scores else privacy.encoder,
            epsilon=max(self.epsilon(noise_share_std), spent),
            delta=privacy.delta,
            parties=self.parties,
            colluding=privacy.colluding,
            links_per_record=privacy.links_per_record,
            releases_per_record=self.releases_per_record,
            claimed=self.epsilon_as_published(noise_share_std) if published else None,
            total_epsilon=total_epsilon,
        )

    def _row_change(self, active: int) -> float:
        fixed = self.privacy.regime.releases_once
        # A trained encoder's weights, and with them all K vectors of any row, may change.
        pooled_links = self.links if self.pooled and fixed else None
        return row_change(
            clip_norm=self.privacy.clip_norm,
            active=active,
            unit=events.Unit(self.privacy.unit),
            absent_row_is_zero=self.pooled and fixed,
            pooled_links=pooled_links,
            contested=self.contested,
            rounding=self.rounding if pooled_links else 0.0,
            disjoint=self.disjoint and fixed,
        )

    def _change_over_noise(self) -> float:
        """Return the largest ``row change / sqrt(k_a - c)`` over the allowed ``k_a``.

        Where records are counted, each secondary counts its own, and requests to different
        secondaries may release an entity's k records N times each. In a row of ``k_a`` active
        secondaries the squared change is at most ``k_a`` times the sum of those of its terms (equal
        to it if they stand at right angles), over noise of ``tau^2 (k_a - c)``; there are k N terms
        in all. So N rows with ``k k_a`` (or k) times one secondary's squared change bound it.
        """
        colluding = self.privacy.colluding
        if self.releases_per_record is not None:
            active, terms = self.min_active, 1
            if self.privacy.unit == "entity":
                terms = self.parties * (1 if self.disjoint else active)
            honest = honest_parties(active=active, colluding=colluding)
            # Rounded as below: with all active, N = m costs to the last bit what training did.
            return self._row_change(1) * math.sqrt(terms) / math.sqrt(honest)
        return max(
            self._row_change(active) / math.sqrt(honest_parties(active=active, colluding=colluding))
            for active in (self.min_active, self.parties)
        )

    def _touched_releases(self, row_releases: int, passes: int) -> int:
        """Return how many of the row releases one unit's data can change."""
        privacy = self.privacy
        if self.releases_per_record is not None:
            return self.releases_per_record
        if not privacy.regime.caps_records:
            return row_releases
        match privacy.unit:
            case "linked-row":
                touched = passes
            case "secondary-record" | "entity":
                if privacy.links_per_record is None:
                    return row_releases
                touched = privacy.links_per_record * passes
            case _:
                assert_never(privacy.unit)
        return min(touched, row_releases)

    @property
    def _rows_of_a_round(self) -> int:
        """Most rows of one round that one unit can touch, with an encoder that is not trained."""
        if self.privacy.unit == "linked-row":
            return 1
        return min(self.privacy.links_per_record or self.rows_per_round, self.rows_per_round)

    @property
    def _measured_rows(self) -> int:
        """Rows that ``noise_multiplier`` is measured by."""
        regime = self.privacy.regime
        if regime.releases_once:
            return self._touched_releases(self.row_releases, self.releases_per_row)
        return self._rows_of_a_round if regime.caps_records else self.rows_per_round

    def release_multiplier(self, noise_share_std: float) -> float:
        """Return the noise multiplier of a dp-trained round, or of a frozen run's one release.

        At the worst number of active secondaries.
        """
        return noise_share_std / (self._change_over_noise() * math.sqrt(self._measured_rows))


_KEPT_BY_CLASS: Final = 0.4
"""Part of what directions say of a record that its nearest class says: with it, votes are taken
where they gained more, or no less, on two tables of ten classes (research, "Votes of classes")."""


_MOST_VOTERS: Final = 16
"""Most secondaries whose records vote. Each of many knows little, and the nearest class says too
little of that: 27 gained less by votes at epsilon 2 and 1 (research, "Votes of classes")."""

_MOST_LAPLACE_EPSILON: Final = 64.0
"""Above it no Laplace sum is chosen: symbols survive whole, and e^epsilon is beyond its tables."""


@lru_cache(maxsize=256)
def choose_scores(
    privacy: Privacy, fitting: FittingPlan | None, *, parties: int, exchanged: bool, classes: int
) -> SymbolPlan | LaplacePlan | None:
    """Return the release that leaves most of scores or votes, by the plan alone.

    With several classes it is None where more survives of vectors behind noise: of each number of
    a vector of length C in as many numbers as classes, ``1 / (1 + classes (tau / C)^2)``; and with
    more secondaries than :data:`_MOST_VOTERS`.

    Args:
        privacy: The guarantee of training; vectors alone go without an epsilon.
        fitting: Plan of the encoders' fitting.
        parties: Secondaries of the federation.
        exchanged: Whether a removed record can bring another one forward in its row.
        classes: Number of classes; 1 for a score.

    Raises:
        ConfigError: If scores have no epsilon.
        PrivacyError: If nothing survives at that epsilon.
    """
    if classes > 1 and (privacy.epsilon is None or parties > _MOST_VOTERS):
        return None

    def share(scores: SymbolPlan | LaplacePlan) -> float:
        level = _noise_of_one_record(privacy, fitting, parties, scores)
        honest = honest_parties(active=parties, colluding=privacy.colluding)
        return scores.surviving_share(level, honest=honest)

    choices: list[SymbolPlan | LaplacePlan] = (
        [SymbolPlan(cells=cells, exchanged=exchanged) for cells in CELLS]
        if classes == 1
        else [SymbolPlan(cells=classes, exchanged=exchanged, classes=True)]
    )
    if privacy.epsilon is not None and privacy.epsilon <= _MOST_LAPLACE_EPSILON:
        choices.append(LaplacePlan(classes=classes if classes > 1 else None, exchanged=exchanged))
    best = max(choices, key=share)
    if classes > 1:
        tau = _noise_of_one_record(privacy, fitting, parties, None) / privacy.clip_norm
        if _KEPT_BY_CLASS * share(best) <= 1 / (1 + classes * tau**2):
            return None
    return best


def _noise_of_one_record(
    privacy: Privacy,
    fitting: FittingPlan | None,
    parties: int,
    scores: SymbolPlan | LaplacePlan | None,
) -> float:
    """Return the noise of rows of one record each, which depends on no number of rows."""
    rows = privacy.links_per_record or 1
    plan = ReleasePlan(
        privacy=privacy,
        parties=parties,
        min_active=parties,
        rounds=1,
        rows_per_round=rows,
        row_releases=rows,
        releases_per_row=1,
        links=1,
        fitting=fitting,
        linked_rows=rows,
        symbols=scores if isinstance(scores, SymbolPlan) else None,
        laplace=scores if isinstance(scores, LaplacePlan) else None,
    )
    return plan.noise_share_std()
