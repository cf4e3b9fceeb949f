"""Estimate the representation that a row would have at the party that does not have it."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def attend(
    queries: Float[Tensor, "rows width"],
    keys: Float[Tensor, "others width"],
    values: Float[Tensor, "others value_width"],
    *,
    temperature: float,
    hidden: Bool[Tensor, "rows others"] | None = None,
) -> Float[Tensor, "rows value_width"]:
    """Return, for each query, the values averaged by how similar their keys are.

    Args:
        queries: Representations at the party that has the rows.
        keys: Representations of other rows at the same party.
        values: Those other rows' representations at the other party.
        temperature: Below 1 sharpens: weights are raised to the power 1/temperature.
        hidden: Others that a row must not use, itself for example.

    References:
        [FedCVT] section 4.2: scaled dot-product attention, sharpened. A softmax whose weights are
        raised to 1/T and normalised again is the softmax of scores over T.
    """
    scores = queries @ keys.T / (keys.shape[1] ** 0.5 * temperature)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(dim=1) @ values


def agreed_labels(
    *logits: Float[Tensor, "rows classes"], confidence: float
) -> tuple[Tensor, Bool[Tensor, " rows"]]:
    """Return the classes that classifiers predict, and which rows they all agree on with trust.

    References:
        [FedCVT] section 4.3: a pseudo-label needs equal classes at all classifiers, each above a
        threshold.
    """
    votes = [one.softmax(dim=1).max(dim=1) for one in logits]
    trusted = torch.stack([vote.values > confidence for vote in votes]).all(dim=0)
    same = torch.stack([vote.indices == votes[0].indices for vote in votes]).all(dim=0)
    return votes[0].indices, trusted & same
