"""NUS-WIDE as its authors distribute it: image features at the primary, tags at the secondary."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd

from research.common.aligned.views import AlignedViews
from securevfl.core.errors import ConfigError, DataError

CONCEPTS: Final = (
    "sky",
    "clouds",
    "person",
    "water",
    "animal",
    "grass",
    "buildings",
    "window",
    "plants",
    "lake",
)
"""The ten concepts of the paper's experiment, from its published code."""

_FEATURES: Final = ("CH", "CM55", "CORR", "EDH", "WT")
"""Colour histogram, moments and correlogram, edges and wavelets: 634 numbers together."""


def load_nuswide(folder: Path, *, concepts: Sequence[str] = CONCEPTS) -> AlignedViews:
    """Read NUS-WIDE.

    Rows that have exactly one of the concepts become that class; the others are left out. Training
    and test rows are the authors' own.

    Args:
        folder: Holds ``Groundtruth/TrainTestLabels/Labels_CONCEPT_Train.txt``,
            ``Low_Level_Features/Train_Normalized_CH.dat`` and so on, and
            ``NUS_WID_Tags/Train_Tags1k.dat``, and the same with ``Test``.
        concepts: Two or more of its 81 concepts.

    Raises:
        ConfigError: If fewer than two concepts are given.
        DataError: If a file is missing, or does not fit the others.

    References:
        [FedHSSL] Appendix A; jorghyq2016/FedHSSL @ ff17934, data/nuswide_dataset_multi.py for the
        concepts and the rule of exactly one.
    """
    if len(set(concepts)) < max(2, len(concepts)):
        raise ConfigError(f"concepts: must be two different ones or more, got {list(concepts)}")
    parts = [_part(folder, concepts, part) for part in ("Train", "Test")]
    rows = [len(labels) for labels, _, _ in parts]
    return AlignedViews(
        name="nuswide",
        views=tuple(np.concatenate([part[1 + view] for part in parts]) for view in range(2)),
        labels=np.concatenate([labels for labels, _, _ in parts]),
        train=np.arange(rows[0]),
        test=np.arange(rows[0], sum(rows)),
        metric="accuracy",
    ).standardised()


def _part(
    folder: Path, concepts: Sequence[str], part: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    labels = folder / "Groundtruth" / "TrainTestLabels"
    marks = _beside([labels / f"Labels_{concept}_{part}.txt" for concept in concepts])
    chosen = np.flatnonzero(marks.sum(axis=1) == 1)
    features = folder / "Low_Level_Features"
    images = _beside([features / f"{part}_Normalized_{name}.dat" for name in _FEATURES])
    tags = _beside([folder / "NUS_WID_Tags" / f"{part}_Tags1k.dat"])
    for what, values in (("image features", images), ("tags", tags)):
        if len(values) != len(marks):
            raise DataError(
                f"NUS-WIDE {part}: {len(values)} rows of {what}, but {len(marks)} of labels"
            )
    return marks[chosen].argmax(axis=1).astype(np.int64), images[chosen], tags[chosen]


def _beside(paths: Sequence[Path]) -> np.ndarray:
    """Read files of numbers without a header, and put their columns beside one another."""
    columns: list[np.ndarray] = []
    for path in paths:
        try:
            # Lines end in a separator; any white space as the separator reads past it.
            frame = pd.read_csv(path, sep=r"\s+", header=None, dtype=np.float32)
        except (OSError, ValueError) as error:
            raise DataError(f"NUS-WIDE: {path}: can't be read: {error}") from None
        if columns and len(frame) != len(columns[0]):
            raise DataError(
                f"NUS-WIDE: {path} has {len(frame)} rows, {paths[0].name} has {len(columns[0])}"
            )
        columns.append(frame.to_numpy())
    return np.concatenate(columns, axis=1)
