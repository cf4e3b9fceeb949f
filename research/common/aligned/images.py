"""Image files as rows of pixels."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float32
from PIL import Image, UnidentifiedImageError

from securevfl.core.errors import DataError


def read_images(paths: Sequence[Path], *, size: int) -> Float32[np.ndarray, "images pixels"]:
    """Read images as red, green and blue in [0, 1], resized to ``size`` by ``size`` pixels.

    Args:
        paths: Files of any format that Pillow knows.
        size: Height and width of what is returned, in pixels.

    Returns:
        One row an image: its channels one after the other, each row by row.

    Raises:
        DataError: If a file can't be read.
    """
    pixels = np.empty((len(paths), 3 * size * size), dtype=np.float32)
    for row, path in enumerate(paths):
        try:
            with Image.open(path) as image:
                small = image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR)
        except (OSError, UnidentifiedImageError) as error:
            raise DataError(f"image {path}: can't be read: {error}") from None
        pixels[row] = np.asarray(small, dtype=np.float32).transpose(2, 0, 1).reshape(-1) / 255
    return pixels
