"""The primary's rows in pretraining: which it may see, for what, and in which batches."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int64

from securevfl.core.conventions import stream
from securevfl.core.errors import DataError
from securevfl.data.rows import RowSplit


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PretrainingRows:
    """Row numbers of the primary's table, each part ascending."""

    aligned: Int64[np.ndarray, " aligned"]
    """Rows whose records at all parties learn from one another: linked at every secondary."""

    own: Int64[np.ndarray, " own"]
    """Rows of the primary's local step: all training rows, labelled or not."""

    held_out: Int64[np.ndarray, " held_out"]
    """Validation and test rows; no party learns from them or from their records."""


def pretraining_rows(
    split: RowSplit, *, linked: Bool[np.ndarray, " rows"] | None, aligned: float, seed: int
) -> PretrainingRows:
    """Choose the rows of pretraining.

    Labelled rows that are linked are aligned in any case ([FedHSSL] section IV-A); of the others
    that are linked, as many are drawn as the share still lacks.

    Args:
        split: The primary's rows.
        linked: Which of its rows are linked at every secondary; None where nothing is learned
            across parties, so that nobody asks.
        aligned: Share of the linked training rows, labelled or not, that count as aligned, in
            (0, 1].
        seed: Run seed; the draw uses its stream ``"aligned"``.

    Raises:
        DataError: If fewer than two rows would be aligned: one row has no batch statistics.
    """
    own = np.sort(np.concatenate([split.train, split.unlabelled]))
    train, others = split.train, split.unlabelled
    if linked is not None:
        train, others = train[linked[train]], others[linked[others]]
    possible = len(train) + len(others)
    wanted = round(aligned * possible) - len(train)
    extra = stream(seed, "aligned").permutation(others)[: max(0, wanted)]
    chosen = np.sort(np.concatenate([train, extra]))
    if aligned < 1 and len(split.unlabelled) == 0:
        # All training rows are labelled: then alignment is drawn among them.
        chosen = np.sort(stream(seed, "aligned").permutation(train)[: round(aligned * possible)])
    if len(chosen) < 2:
        raise DataError(
            f"pretraining: {len(chosen)} aligned rows are too few, of {possible} of the "
            f"{len(own)} training rows that are linked at every secondary; at least 2"
        )
    return PretrainingRows(
        aligned=chosen,
        own=own,
        held_out=np.sort(np.concatenate([split.validation, split.test])),
    )


def even_batches(rows: Int64[np.ndarray, " rows"], *, batch_size: int) -> list[np.ndarray]:
    """Cut rows into batches of nearly one size, at most ``batch_size``, in the order given.

    A short last batch would have batch statistics of its own.
    """
    return np.array_split(rows, max(1, -(-len(rows) // batch_size)))
