"""From which probability on a row of a binary task counts as one of the second class."""

from typing import Final, Literal

import numpy as np
import scipy  # special functions load when they are first named
from jaxtyping import Float64, Shaped

Rule = Literal["half", "f1", "youden"] | float
"""``half``: 0.5; ``f1`` and ``youden``: what is best on the validation rows; or a number."""

HALF: Final = 0.5
"""The threshold where nothing else is asked for."""


def choose_threshold(
    rule: Rule, logits: Float64[np.ndarray, " rows"], targets: Shaped[np.ndarray, " rows"]
) -> float:
    """Return the probability above which a row counts as one of the second class.

    Args:
        rule: How it is chosen. ``youden`` maximises the true positives' rate minus the false
            positives'; ``f1`` maximises F1.
        logits: The second class's, of the rows that it is chosen on.
        targets: Their labels, 0 or 1.

    Returns:
        A number in [0, 1]: half-way, in logits, between two rows. Of equally good ones that
        nearest to 0.5; and 0.5 where the rows are not of both classes.
    """
    if isinstance(rule, float):
        return rule
    positives = int((targets == 1).sum())
    negatives = len(targets) - positives
    if rule == "half" or not positives or not negatives:
        return HALF
    scores, place = np.unique(logits, return_inverse=True)
    hits = np.bincount(place, weights=targets == 1)
    alarms = np.bincount(place, weights=targets != 1)
    # What lies above the middle between a score and the next one; above the last one is nothing,
    # which is never best.
    true = positives - hits.cumsum()[:-1]
    false = negatives - alarms.cumsum()[:-1]
    cuts = (scores[:-1] + scores[1:]) / 2
    if not len(cuts):
        return HALF
    if rule == "f1":
        worth = 2 * true / (true + false + positives)
    else:
        worth = true / positives - false / negatives
    best = cuts[worth >= worth.max() - 1e-12]
    return float(scipy.special.expit(best[np.abs(best).argmin()]))


def as_logit(threshold: float) -> float:
    """Return the logit of a threshold."""
    return float(scipy.special.logit(threshold))
