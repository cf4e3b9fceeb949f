"""ModelNet40 as twelve rendered views an object, dealt to four parties."""

import re
from pathlib import Path
from typing import Final

import numpy as np

from research.common.aligned.images import read_images
from research.common.aligned.views import AlignedViews
from securevfl.core import checks
from securevfl.core.conventions import stream
from securevfl.core.errors import ConfigError, DataError

_VIEWS: Final = 12
# airplane_0001_001.png, airplane_0001.obj.shaded_v001.png (Su et al.'s renderings), and
# airplane_0001_060_000_001.png (elevation, azimuth, number: the paper's own).
_NAME: Final = re.compile(r"(.+?)(?:\.obj\.shaded_v|_\d{3}_\d{3}_|_)(\d{3})\.png")


def load_modelnet(
    folder: Path, *, parties: int = 4, classes: int = 10, size: int = 32, seed: int = 0
) -> AlignedViews:
    """Read twelve views of each object; neighbouring views go to one party.

    With four parties each has three views of an object, which make three samples: at training
    each party's views in an order of its own, at testing in the order of the camera.

    Args:
        folder: Holds ``CLASS/train`` and ``CLASS/test`` with PNG files, twelve an object.
        parties: 2, 3, 4, 6 or 12.
        classes: How many classes, the first by name.
        size: Height and width to which images are resized, in pixels.
        seed: Of the drawing of views.

    Raises:
        ConfigError: If parties do not divide twelve views, or there are too few classes.
        DataError: If an object has other than twelve views, or a file can't be read.

    References:
        [FedHSSL] Appendix A; jorghyq2016/FedHSSL @ ff17934, data/modelnet_dataset.py. The paper
        speaks of the first 10 of 40 classes and of 24,630 training samples; ModelNet40's first ten
        have 3,644 training objects, so 10,932 samples. ``classes`` chooses.
    """
    if parties not in (2, 3, 4, 6, 12):
        raise ConfigError(f"parties: must divide {_VIEWS} views, got {parties}")
    checks.at_least(2, classes=classes)
    names = sorted(path.name for path in folder.glob("*") if path.is_dir())
    if len(names) < classes:
        raise ConfigError(f"classes: {folder} has {len(names)}, {classes} are asked for")
    files: list[list[Path]] = [[] for _ in range(parties)]
    labels: list[int] = []
    train_rows = 0
    for part in ("train", "test"):
        for label, name in enumerate(names[:classes]):
            for thing, views in sorted(_objects(folder / name / part).items()):
                groups = np.arange(_VIEWS).reshape(parties, -1)
                if part == "train":
                    generator = stream(seed, "modelnet", thing)
                    groups = np.stack([generator.permutation(group) for group in groups])
                for party, group in enumerate(groups):
                    files[party] += [views[number] for number in group]
                labels += [label] * groups.shape[1]
        if part == "train":
            train_rows = len(labels)
    return AlignedViews(
        name="modelnet",
        views=tuple(read_images(own, size=size) for own in files),
        labels=np.array(labels, dtype=np.int64),
        train=np.arange(train_rows),
        test=np.arange(train_rows, len(labels)),
        metric="accuracy",
        images=((3, size, size),) * parties,
    )


def _objects(folder: Path) -> dict[str, list[Path]]:
    """Return the views of every object of a folder, in the camera's order."""
    objects: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.png")):
        match = _NAME.fullmatch(path.name)
        if match is None:
            raise DataError(f"ModelNet: {path}: its name does not end in a view's number")
        objects.setdefault(match[1], []).append(path)
    for thing, views in objects.items():
        if len(views) != _VIEWS:
            raise DataError(f"ModelNet: {folder}: {thing} has {len(views)} views, not {_VIEWS}")
    return objects
