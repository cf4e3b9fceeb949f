"""Breast histopathology images (BHI) as Kaggle distributes them: two patches a sample."""

from pathlib import Path
from typing import Final

import numpy as np

from research.common.aligned.images import read_images
from research.common.aligned.views import AlignedViews
from securevfl.core import checks
from securevfl.core.conventions import stream
from securevfl.core.errors import DataError

_TRAINING_SHARE: Final = 0.8


def load_histopathology(folder: Path, *, size: int = 32, seed: int = 0) -> AlignedViews:
    """Read the patches of every patient, and pair those of one patient and one label.

    Each party gets one patch of a pair. Four fifths of the patients are for training: no patient is
    on both sides. An odd patch is left out.

    Args:
        folder: Holds one folder a patient, each with the folders ``0`` and ``1`` of PNG files.
        size: Height and width to which patches (50 x 50) are resized, in pixels.
        seed: Of the drawing of patients and pairs.

    Raises:
        DataError: If there are fewer than two patients, or a file can't be read.

    References:
        [FedHSSL] Appendix A; jorghyq2016/FedHSSL @ ff17934, data/bhi_dataset.py (32 pixels, pairs
        without replacement; its pairs follow the order of the folder's files).
    """
    checks.at_least(1, size=size)
    patients = sorted(path for path in folder.glob("*") if path.is_dir())
    if len(patients) < 2:
        raise DataError(f"BHI: {folder}: has {len(patients)} patients' folders, at least 2 needed")
    order = stream(seed, "bhi", "patients").permutation(len(patients))
    first: list[Path] = []
    second: list[Path] = []
    labels: list[int] = []
    # Of two patients one is for training, of any number at least one is for testing.
    train_patients = min(len(patients) - 1, max(1, int(_TRAINING_SHARE * len(patients))))
    train_rows = 0
    for place, number in enumerate(order):
        for label in (0, 1):
            patches = sorted((patients[number] / str(label)).glob("*.png"))
            drawn = stream(seed, "bhi", patients[number].name, label).permutation(len(patches))
            pairs = drawn[: len(patches) // 2 * 2].reshape(-1, 2)
            first += [patches[one] for one, _ in pairs]
            second += [patches[other] for _, other in pairs]
            labels += [label] * len(pairs)
        if place + 1 == train_patients:
            train_rows = len(labels)
    return AlignedViews(
        name="bhi",
        views=(read_images(first, size=size), read_images(second, size=size)),
        labels=np.array(labels, dtype=np.int64),
        train=np.arange(train_rows),
        test=np.arange(train_rows, len(labels)),
        metric="f1",
        images=((3, size, size),) * 2,
    )
