"""A secondary's encoder and its sums of records by class."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from jaxtyping import Float32, Float64, Int64
from torch import Tensor

from securevfl.config.sections import PartySettings
from securevfl.core.errors import PrivacyError
from securevfl.dp.class_sums import RADIUS, SumFormat, noised_ranks
from securevfl.federation.encoder_fitting import FittedBottom
from securevfl.federation.rounds.cached_release import CachedRelease
from securevfl.federation.run_plan import RunPlan
from securevfl.models import frozen
from securevfl.stages.class_means.class_labels import keep_of, label_noise_std
from securevfl.stages.class_means.policy import hides_labels

_CHUNK: Final = 2**15
"""Numbers of records that are mapped together, to bound memory."""


def sum_format_of(plan: RunPlan, numbers: int) -> SumFormat:
    """Return the format of class sums, which primary and secondaries reckon alike.

    Args:
        plan: The run, whose encoders are class means.
        numbers: Features of a record.

    Raises:
        PrivacyError: If the noise leaves nothing to fit to.
    """
    # Where nothing is promised there may be no cap: a record is in a row once.
    cap = plan.config.privacy.links_per_record or plan.facts.rows
    return SumFormat.choose(
        features=numbers,
        bins=plan.config.encoder_classes + 1,
        links_per_record=cap,
        noise_multiplier=plan.releases.fitting_multiplier(),
    )


def scale_of(shape: frozen.RecordShape) -> float:
    """Return the factor for records so that they fill a ball of radius ``RADIUS sqrt(d)``.

    Without it their words, of which a record has one a column, would count as d numbers, and have
    the noise of d.
    """
    # A record has one word a column, and all words of a column have one length.
    longest = float((np.square(shape.word_lengths) / shape.word_counts).sum())
    squares = RADIUS**2 * len(shape.plain_places) + longest
    return RADIUS * math.sqrt(shape.features / squares)


@dataclass(eq=False)
class ClassMeansFitting:
    """One secondary's part in the class-means stage, and the fit of its encoder.

    Its steps are :meth:`begin`, :meth:`vectors` and :meth:`noise`, of which the class sums are
    made by somebody, and :meth:`finish`.

    Raises:
        PrivacyError: If the noise leaves nothing to fit to.
    """

    plan: RunPlan
    """The run, whose encoders are class means."""
    party: PartySettings
    """Section of the federation file about the party."""
    kept: CachedRelease
    """The party's release, which rests on the encoder and calls back for its fit."""
    _sums: Float64[np.ndarray, "bins numbers"] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        bottom, features = self.kept.bottom, self.kept.records["features"].numpy()
        if not isinstance(bottom, FittedBottom):
            raise TypeError(f"class means are fitted by an [encoder] table, not {type(bottom)}")
        self.bottom: FittedBottom = bottom
        """The encoder, not fitted yet."""
        self.features: Float32[np.ndarray, "records features"] = features
        """The party's records, scaled."""
        self.format = sum_format_of(self.plan, features.shape[1])
        """Format of the class sums."""

    @property
    def name(self) -> str:
        """The party's name."""
        return self.party.name

    @property
    def encoder_fixed(self) -> bool:
        """Whether the encoder was fitted and kept before: then no class sums are needed."""
        return self.kept.encoder_fixed

    def begin(self, *, leaves: bool) -> None:
        """Charge the fitting, before anything of it is computed.

        Args:
            leaves: Whether noised class sums leave this party, to be answered by the primary.

        Raises:
            BudgetExceededError: If the budget forbids it.
            PrivacyError: If class sums of this run left before and what came of them was lost.
        """
        if not self.kept.ledger.encoder_fitted:
            self.kept.ledger.charge_fitting()
        elif leaves:
            raise PrivacyError(
                "class sums of this run were charged, may have left, and what came back is lost; "
                "they are not made again with other noise: start another run with another --out, "
                "which is charged to the table's total"
            )

    def _by_record(
        self, compute: Callable[[Tensor], Tensor]
    ) -> Float64[np.ndarray, "records numbers"]:
        """Return what the encoder computes for each record."""
        device = next(self.bottom.buffers()).device
        chunk = max(1, _CHUNK // self.features.shape[1])
        parts = [
            compute(torch.from_numpy(self.features[first : first + chunk]).to(device)).cpu()
            for first in range(0, max(1, len(self.features)), chunk)
        ]
        return torch.cat(parts).numpy()

    def _ranks(
        self, compute: Callable[[Tensor], Tensor], edges: Float64[np.ndarray, " edges"]
    ) -> Float64[np.ndarray, "columns cells"]:
        """Return noised ranks of what the encoder computes: one step of the charged fitting."""
        multiplier = self.plan.releases.fitting_multiplier()
        return noised_ranks(self._by_record(compute), edges, noise_multiplier=multiplier)

    def _records(self) -> Float64[np.ndarray, "records numbers"]:
        """Return the records as class sums count them; fits a score encoder's columns first."""
        if isinstance(self.bottom, frozen.ScoreBottom):
            self.bottom.fit_columns(self._ranks(self.bottom.numbers, frozen.COLUMN_EDGES))
            records = self._by_record(self.bottom.records)
        else:
            records = self.bottom.shape.arrange(self.features)
        return records * scale_of(self.bottom.shape)

    @property
    def _record_noise(self) -> float:
        """Deviation of the noise that protects the records, in units; 0 without a promise."""
        return (self.plan.releases.fitting_multiplier() or 0.0) * self.format.change_of_record

    @property
    def _unit(self) -> float:
        """A unit of the class sums, in units of a record's numbers."""
        return float(2.0**-self.format.bits / scale_of(self.bottom.shape))

    @property
    def seen_columns(self) -> int:
        """Columns that a label can be seen in: numbers of a record, less what noise hides.

        A mean of n / C rows, of deviation at most 1, with noise of deviation s in their sum has
        1 / (1 + s^2 C / n) of its variance from the rows: only that part follows their labels. A
        word has at most n / L of the rows in the mean, with L words in its column.
        """
        ratio = (
            (self._record_noise * self._unit) ** 2
            * (self.format.bins - 1)
            / max(1, self.plan.facts.rows)
        )
        shape = self.bottom.shape
        columns = len(shape.plain_places) / (1 + ratio)
        columns += sum(len(column) / (1 + ratio * len(column)) for column in shape.words)
        return math.ceil(columns)

    def vectors(self) -> Int64[np.ndarray, "rows numbers"]:
        """Return the vector of each of the primary's rows, in units of the format.

        After :meth:`begin`, and once a fit.
        """
        rows = np.arange(self.plan.facts.rows, dtype=np.int64)
        return self.format.row_vectors(self._records(), self.kept.links.link(rows).indices)

    def noise(self) -> Int64[np.ndarray, "bins numbers"]:
        """Return fresh noise that protects the records; zeros where nothing is promised."""
        return self.format.noise(self._record_noise)

    def by_labels(
        self, bins: Int64[np.ndarray, " rows"], *, keep: float | None
    ) -> Float64[np.ndarray, "bins numbers"]:
        """Return noised class sums by bins that the primary has sent.

        Args:
            bins: Of every row.
            keep: Probability with which labels were kept by randomised response; sums are
                corrected for it, so that they are right in the mean. None: labels are true.

        References:
            [KBR16] Kairouz, Bonawitz and Ramage, section 4: the unbiased estimate of frequencies.
        """
        sums = (self.format.by_bins(self.vectors(), bins) + self.noise()).astype(np.float64)
        if keep is None:
            return sums
        classes = len(sums) - 1
        other = (1 - keep) / (classes - 1)
        known = sums[:-1]
        sums[:-1] = (known - other * known.sum(axis=0)) / (keep - other)
        return sums

    def finish(self, sums: Float64[np.ndarray, "bins numbers"]) -> None:
        """Take the class sums, fit the encoder to them, and keep it.

        Args:
            sums: In units, with all noise that there is.
        """
        self._sums = sums
        self.kept.settle()

    def __call__(self) -> None:
        """Fit the encoder to the class sums that came.

        Raises:
            PrivacyError: If none have come: the primary asks for rows too early.
        """
        if self._sums is None:
            raise PrivacyError("the primary asks for rows before it has let class means be fitted")
        counts, means = self.format.means(self._sums)
        shape = self.bottom.shape
        means /= scale_of(shape)
        if isinstance(self.bottom, frozen.ScoreBottom):
            self.bottom.fit_weights(
                counts[:2],
                means[:2],
                radius=RADIUS * math.sqrt(len(shape.plain_places)),
                noise_std=self._noise_std(),
            )
            self.bottom.fit_ranks(self._ranks(self.bottom.scores, frozen.SCORE_EDGES))
            return
        directions = shape.restore(frozen.class_directions(counts, means))
        self.bottom.encode.fit(centre=directions.centre, projection=directions.weights)

    def _noise_std(self) -> float:
        """Return the deviation of all noise in a class's sum of a number of records."""
        config = self.plan.config
        label_noise = label_noise_std(config, self.format) if hides_labels(config) else 0.0
        keep = keep_of(config)
        inflation = 1.0 if keep is None else 1 / (keep - (1 - keep))
        return float(np.hypot(self._record_noise, label_noise)) * inflation * self._unit
