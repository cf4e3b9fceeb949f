"""Avazu's click-through table as Kaggle distributes it, dealt to two parties."""

from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd

from research.common.aligned.views import AlignedViews, Categories
from securevfl.core import checks
from securevfl.core.conventions import stream
from securevfl.core.errors import DataError

# The published code's columns; its paper counts eight numbers where the code has seven, and the
# hour of the day is the one that is left.
_WORDS: Final = (
    ("device_ip", "device_model", "C14", "C17", "C19", "C20", "C21"),
    (
        "site_id",
        "site_domain",
        "site_category",
        "app_id",
        "app_domain",
        "app_category",
        "device_id",
    ),
)
_NUMBERS: Final = (
    ("C15", "C16", "C18", "hour"),
    ("C1", "banner_pos", "device_type", "device_conn_type"),
)
_CHUNK: Final = 1_000_000


def load_avazu(
    path: Path, *, train_rows: int = 100_000, test_rows: int = 20_000, seed: int = 0
) -> AlignedViews:
    """Read Kaggle's ``train.csv`` (or ``train.gz``), and keep a random sample.

    Categorical columns become codes from 0, in sorted order of the training rows' words; words
    that no training row has get the code after the last, which an embedding reads as "replaced".
    Numbers are standardised by the training rows; the hour is the hour of the day.

    Args:
        path: The file, 40,428,967 rows; it is read in pieces.
        train_rows: Rows drawn for training.
        test_rows: Further rows drawn for testing.
        seed: Of the drawing.

    Raises:
        DataError: If it can't be read, lacks a column, or has too few rows.

    References:
        [FedHSSL] Appendix A: 14 categorical and 8 continuous features, both dealt out equally,
        100,000 training and 20,000 test rows; jorghyq2016/FedHSSL @ ff17934, data/ctr_dataset.py
        for which party gets which.

    Differs from the published code: it numbers words by training and test rows together.
    """
    checks.at_least(1, train_rows=train_rows, test_rows=test_rows)
    frame = _sample(path, train_rows + test_rows, seed=seed)
    frame["hour"] = frame["hour"].astype(np.int64) % 100
    views, categories = [], []
    for words, numbers in zip(_WORDS, _NUMBERS, strict=True):
        codes, counts = _codes(frame, words, train_rows)
        own = [frame[number].to_numpy(dtype=np.float32)[:, None] for number in numbers]
        views.append(np.concatenate([codes, *own], axis=1))
        categories.append(counts)
    return AlignedViews(
        name="avazu",
        views=tuple(views),
        labels=np.array(frame["click"], dtype=np.int64),
        train=np.arange(train_rows),
        test=np.arange(train_rows, train_rows + test_rows),
        metric="auc",
        categories=tuple(categories),
    ).standardised()


def _sample(path: Path, rows: int, *, seed: int) -> pd.DataFrame:
    """Return ``rows`` random rows of the file in random order, with only pieces in memory."""
    words = [name for own in _WORDS for name in own]
    wanted = ["click", *words, *(name for own in _NUMBERS for name in own)]
    generator = stream(seed, "avazu", "rows")
    kept = pd.DataFrame()
    try:
        chunks = pd.read_csv(
            path, usecols=wanted, dtype=dict.fromkeys(words, str), chunksize=_CHUNK
        )
        # Each row draws a number; the rows with the smallest are a uniform sample.
        for chunk in chunks:
            chunk["drawn"] = generator.random(len(chunk))
            kept = pd.concat([kept, chunk]).nsmallest(rows, "drawn")
    except (OSError, EOFError, ValueError) as error:
        raise DataError(f"Avazu: {path}: can't be read: {error}") from None
    if len(kept) < rows:
        raise DataError(f"Avazu: {path}: has {len(kept)} rows, {rows} are needed")
    return kept.reset_index(drop=True)


def _codes(
    frame: pd.DataFrame, columns: tuple[str, ...], train_rows: int
) -> tuple[np.ndarray, Categories]:
    codes, counts = [], []
    for place, column in enumerate(columns):
        values = frame[column].to_numpy(dtype=np.str_)
        known = np.unique(values[:train_rows])
        found = np.minimum(np.searchsorted(known, values), len(known) - 1)
        codes.append(np.where(known[found] == values, found, len(known)).astype(np.float32))
        counts.append((place, len(known)))
    return np.stack(codes, axis=1), tuple(counts)
