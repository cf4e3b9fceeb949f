"""Every metric by the name that a federation file asks for it."""

from typing import Final

from securevfl.linkage.metrics.bloom import Bloom
from securevfl.linkage.metrics.euclidean import Euclidean
from securevfl.linkage.metrics.exact import Exact
from securevfl.linkage.metrics.great_circle import GreatCircle
from securevfl.linkage.metrics.levenshtein import Levenshtein
from securevfl.linkage.metrics.metric import Metric
from securevfl.linkage.metrics.mixed import Mixed

METRICS: Final[dict[str, Metric]] = {
    metric.name: metric
    for metric in (
        Euclidean(),
        GreatCircle(),
        Levenshtein(),
        Mixed(),
        Bloom(),
        Exact(),
    )
}
"""What ``linkage.metric`` may be."""
