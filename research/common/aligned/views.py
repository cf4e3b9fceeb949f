"""Views of the same rows at several parties, and which rows are aligned, labelled or for testing.

FedHSSL asks what local and aligned records are worth when few of them have labels. Its experiments
take a fully aligned set and forget most of the alignment and most of the labels; so do we.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float32, Int64

from securevfl.core import checks
from securevfl.core.conventions import Task, stream
from securevfl.core.errors import ConfigError, DataError
from securevfl.data.scaling import FeatureScaler
from securevfl.data.tables import require_finite

Metric = Literal["accuracy", "auc", "f1"]
Categories = tuple[tuple[int, int], ...]
"""(feature column, categories) of every categorical column of one view."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class AlignedViews:
    """One table a party, all with the same rows in the same order; the primary's is first."""

    name: str
    """What the set is called."""

    views: tuple[Float32[np.ndarray, "_ _"], ...]
    """Features of each party: numbers, pixels of an image, or codes of categories."""

    labels: Int64[np.ndarray, " rows"]
    """Class numbers from 0."""

    train: Int64[np.ndarray, " train_rows"]
    """Rows to learn from."""

    test: Int64[np.ndarray, " test_rows"]
    """Rows that only the last measurement sees."""

    metric: Metric
    """What the set is reported by."""

    images: tuple[tuple[int, int, int], ...] = ()
    """Channels, height and width of each party's image; empty if features are not pixels."""

    categories: tuple[Categories, ...] = ()
    """Categorical columns of each party; empty if there are none."""

    def __post_init__(self) -> None:
        rows = len(self.labels)
        if len(self.views) < 2 or any(len(view) != rows for view in self.views):
            raise DataError(
                f"{self.name}: needs two views or more with as many rows as labels ({rows}), got "
                f"{[len(view) for view in self.views]}"
            )
        for number, view in enumerate(self.views, 1):
            where = f"{self.name}, view {number}"
            require_finite(
                view, tuple(f"x{column}" for column in range(view.shape[1])), where=where
            )
        if len(self.train) == 0 or len(self.test) == 0:
            raise DataError(f"{self.name}: has no training or no test rows")
        if np.isin(self.train, self.test).any():
            raise DataError(f"{self.name}: a row is for training and for testing")

    @property
    def classes(self) -> int:
        """Different labels."""
        return int(self.labels.max()) + 1

    @property
    def task(self) -> Task:
        """What the label is."""
        return "binary" if self.classes == 2 else "multiclass"

    def standardised(self) -> "AlignedViews":
        """Return the same with numbers at mean 0 and deviation 1 over the training rows.

        Pixels and codes stay as they are.
        """
        if self.images:
            return self
        views = []
        for number, view in enumerate(self.views):
            codes = [place for place, _ in self.categories[number]] if self.categories else []
            scaled = FeatureScaler.standard(view[self.train]).apply(view)
            scaled[:, codes] = view[:, codes]
            views.append(scaled)
        return AlignedViews(
            name=self.name,
            views=tuple(views),
            labels=self.labels,
            train=self.train,
            test=self.test,
            metric=self.metric,
            images=self.images,
            categories=self.categories,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScarceRows:
    """What is known of the training rows in one experiment; each list contains the next."""

    local: Int64[np.ndarray, " local_rows"]
    """Rows of which every party has its features; parties need not know which of them match."""

    aligned: Int64[np.ndarray, " aligned_rows"]
    """Rows that match between the parties, who know it."""

    labelled: Int64[np.ndarray, " labelled_rows"]
    """Rows that match and have a label at the primary."""


def scarce_rows(data: AlignedViews, *, aligned: float, labelled: int, seed: int) -> ScarceRows:
    """Draw which training rows are aligned and which of them are labelled.

    Classes are drawn as they come, but the labelled rows hold each class at least once where
    ``labelled`` allows it: a classifier that never saw a class measures the draw, not the method.

    Args:
        data: The set.
        aligned: Share of the training rows that parties can align.
        labelled: How many of the aligned rows have labels.
        seed: Of the drawing.

    Raises:
        ConfigError: If there are fewer aligned rows than labelled ones, or the share is impossible.

    References:
        [FedHSSL] V-A ("Training Details"): 20 % or 40 % of the training rows are aligned, 200 to
        1000 of them labelled; local pretraining uses all rows.
    """
    checks.rate(aligned=aligned)
    checks.at_least(1, labelled=labelled)
    order = stream(seed, "scarce").permutation(data.train)
    share = order[: round(aligned * len(order))]
    if labelled > len(share):
        raise ConfigError(
            f"labelled: {labelled} rows, but only {len(share)} of {data.name} are aligned "
            f"({aligned:g} of {len(order)}); lower it or raise the share"
        )
    # The first row of each class, then the others in the order drawn.
    _, firsts = np.unique(data.labels[share], return_index=True)
    rest = np.setdiff1d(np.arange(len(share)), firsts)
    places = np.concatenate([np.sort(firsts), rest])[:labelled]
    return ScarceRows(local=order, aligned=share, labelled=share[places])
