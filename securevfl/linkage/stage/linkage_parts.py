"""Every metric and protection by name, and what parties learn from linking."""

import math
from typing import Final

from securevfl.core.stages import Parts
from securevfl.linkage.metrics.exact import Exact
from securevfl.linkage.metrics.metric import Metric
from securevfl.linkage.metrics.points import Euclidean, GreatCircle
from securevfl.linkage.protections.plaintext import Plaintext
from securevfl.linkage.protections.protection import Protection
from securevfl.linkage.spec import LinkSpec

METRICS: Final = Parts[Metric](
    "metrics", {metric.name: metric for metric in (Euclidean(), GreatCircle(), Exact())}
)
"""Metrics by their value of ``linkage.metric``."""

PROTECTIONS: Final = Parts[Protection]("protections", {Plaintext.name: Plaintext()})
"""Protections by their value of ``linkage.protection``."""


def protection_of(spec: LinkSpec) -> Protection:
    """Return the protection of a linkage."""
    return PROTECTIONS[spec.hiding.protection]


def reveals_of(spec: LinkSpec, role: str) -> list[str]:
    """Return what a party of that role learns from linking, one sentence each."""
    protection, limited = protection_of(spec), spec.choice.max_distance < math.inf
    nearest = not (limited or spec.keys.metric.equal_only)
    learned = protection.learns(spec, role)
    if spec.similarities is not None and role == "primary":
        learned.append(
            "for each of its rows and each secondary, K noised similarities in falling order, "
            "without record numbers"
        )
        if limited:
            learned.append("how many of these K records lie within the largest distance of a link")
    if spec.tells_rows and role == "primary":
        learned.append("for each of its rows and each secondary, whether it has a link")
        if nearest:
            learned.append("whether some row's nearest record there has another key")
    if role == "secondary" and protection.helpers:
        if limited and not spec.keys.metric.equal_only:
            learned.append("how many of these lie within the largest distance of a link")
        elif nearest and spec.tells_rows:
            learned.append("whether some row's nearest record has another key")
    return learned
