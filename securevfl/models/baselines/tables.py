"""Inputs of the one-table baselines.

Solo is the primary alone: its features, and its keys where they are inputs. Combine is the
ceiling: the features of all parties, joined by the true match of every row, which exists only
where the truth is known.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from securevfl.core.errors import DataError


def solo_inputs(
    features: Float[Tensor, "rows features"], keys: Float[Tensor, "rows dimension"] | None
) -> Float[Tensor, "rows inputs"]:
    """Return what the primary has without any partner; ``keys`` is None where no model has them."""
    if keys is None:
        return features
    return torch.cat([features, keys.to(features.dtype)], dim=1)


def combined_inputs(
    primary: Float[Tensor, "rows inputs"],
    secondaries: Sequence[Float[Tensor, "_ _"]],
    matches: Sequence[Int[Tensor, " _"]],
) -> Float[Tensor, "rows all_inputs"]:
    """Join the true match of every row at every secondary to the primary's own inputs.

    Args:
        primary: What :func:`solo_inputs` returns.
        secondaries: Each secondary's features, its own rows in its own order.
        matches: For each secondary, the number of the record that truly belongs to each row.

    Raises:
        DataError: If a match points outside its table, or their numbers differ.
    """
    if len(secondaries) != len(matches):
        raise DataError(f"combine: {len(secondaries)} tables but {len(matches)} lists of matches")
    columns = [primary]
    for number, (features, match) in enumerate(zip(secondaries, matches, strict=True), 1):
        if len(match) != len(primary):
            raise DataError(
                f"combine: secondary {number} has {len(match)} matches for {len(primary)} rows"
            )
        if not bool(((match >= 0) & (match < len(features))).all()):
            raise DataError(
                f"combine: secondary {number} has no true match for some rows; "
                f"combine needs one for every row"
            )
        columns.append(features[match].to(primary.dtype))
    return torch.cat(columns, dim=1)
