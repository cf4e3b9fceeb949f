"""What the primary brings to the fitting of votes: which row is of which class."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int64

from securevfl.config.federation import FederationConfig
from securevfl.core.errors import ConfigError
from securevfl.federation.primary import PrimaryData

LabelNoise = Callable[[tuple[int, int]], Int64[np.ndarray, "bins numbers"]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Ballot:
    """The primary's rows by class, and how much of that secondaries may learn."""

    bins_of_rows: Int64[np.ndarray, " rows"] = field(repr=False)
    """Class of every row, and the number of classes for rows that are not for learning."""
    bins: int
    """Classes, and one more."""
    keep: float | None = None
    """Where labels go out behind randomised response: with which probability one is kept."""


def classes_of(config: FederationConfig, data: PrimaryData) -> Int64[np.ndarray, " rows"]:
    """Return the class of every row, and the number of classes for rows that are not for learning.

    Labels of a regression fall into as many classes as votes have numbers, equally many training
    rows in each.

    Args:
        config: The federation file, whose encoders vote.
        data: The primary's table.

    Raises:
        ConfigError: If votes have not one number for each class.
    """
    _, classes = config.family.cut_shape(config.model)
    targets = data.targets.cpu().numpy()
    train = data.split.train
    if data.head.task == "regression":
        inner = np.quantile(targets[train], np.arange(1, classes) / classes)
        found = np.searchsorted(inner, targets, side="right")
    else:
        there = max(2, data.head.outputs)
        if classes != there:
            raise ConfigError(
                f"model.hidden: votes have one number for each class, and the label has {there}; "
                f"write hidden = {there}, got {classes}"
            )
        found = targets.astype(np.int64)
    bins = np.full(len(targets), classes, dtype=np.int64)
    bins[train] = found[train]
    return bins
