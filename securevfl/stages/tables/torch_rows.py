"""Tensors and datasets of torch as frames, with column names that are made up for them."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from securevfl.core.errors import DataError, in_one_line

FEATURES: Final = "x"
LABEL: Final = "y"


def frame_of_rows(rows: Any, *, where: str) -> pd.DataFrame | None:
    """Return a tensor or a dataset as a frame; None of anything else.

    A tensor of shape (rows, ...) has the columns ``x0``, ``x1`` and so on, of each row in torch's
    order. A map-style dataset has items of features; of features and a label, which is called
    ``y``; or of values by name: a number or a word is a column of that name, and a tensor of
    several numbers gives ``name0``, ``name1`` and so on.

    Args:
        rows: What may be one.
        where: Name of the table in messages.

    Raises:
        DataError: If it is a dataset, and not one of these.
    """
    if isinstance(rows, IterableDataset):
        raise DataError(f"{where}: must be a map-style dataset, with len() and [i]; collect it")
    if isinstance(rows, Tensor):
        parts: Any = (rows,)
    elif isinstance(rows, TensorDataset):
        parts = rows.tensors
    elif isinstance(rows, Dataset):
        parts = _parts_of_items(rows, where=where)
    else:
        return None
    if not isinstance(parts, Mapping):
        if not 1 <= len(parts) <= 2:
            raise DataError(
                f"{where}: items must be features, or features and a label, got {len(parts)} "
                f"parts; name them in a dict"
            )
        parts = dict(zip((FEATURES, LABEL), parts, strict=False))
    columns: dict[str, np.ndarray] = {}
    for name, part in parts.items():
        columns |= _columns(str(name), part, where=where)
    return pd.DataFrame(columns)


def _parts_of_items(rows: Any, *, where: str) -> tuple[Any, ...] | dict[str, Any]:
    """Return a dataset's items as lists by part: by place, or by name."""
    items = [rows[number] for number in range(len(rows))]
    if not items:
        raise DataError(f"{where}: has no rows")
    first = items[0]
    if isinstance(first, Mapping):
        if any(not isinstance(item, Mapping) or item.keys() != first.keys() for item in items):
            raise DataError(f"{where}: items must all have the names {', '.join(map(str, first))}")
        return {name: [item[name] for item in items] for name in first}
    if isinstance(first, tuple | list):
        if any(len(item) != len(first) for item in items):
            raise DataError(f"{where}: items must all have {len(first)} parts")
        return tuple(list(part) for part in zip(*items, strict=True))
    return (items,)


def _columns(name: str, part: Any, *, where: str) -> dict[str, np.ndarray]:
    try:
        values = _array(part) if isinstance(part, Tensor) else _stack_items(part)
    except (ValueError, TypeError, RuntimeError) as error:
        raise DataError(
            f"{where}: {name!r} must have one shape in all rows: {in_one_line(error)}"
        ) from None
    if values.ndim == 0 or values.dtype.kind == "c":
        raise DataError(
            f"{where}: {name!r} must be real numbers or words, one row after another, got "
            f"{values.dtype} of shape {values.shape}"
        )
    flat = values.reshape(len(values), -1) if len(values) else values.reshape(0, 1)
    numbered = name == FEATURES or flat.shape[1] > 1
    return {f"{name}{place}" if numbered else name: column for place, column in enumerate(flat.T)}


def _stack_items(items: list[Any]) -> np.ndarray:
    return np.stack(
        [_array(item) if isinstance(item, Tensor) else np.asarray(item) for item in items]
    )


def _array(values: Tensor) -> np.ndarray:
    values = values.detach().cpu()
    if values.dtype in (torch.bfloat16, torch.float16):
        values = values.float()
    return values.numpy()
