"""Similarities for families that read them: scaled by training links, noised once, in order."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float32, Int64

from securevfl.core.errors import ConfigError
from securevfl.data.tables import split_rows
from securevfl.dp import sensitivity
from securevfl.linkage.links import NO_RECORD, LinkTable, SimilarityScale, noised_similarities
from securevfl.linkage.spec import LinkSpec, SimilaritySpec


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SimilarLinks:
    """One secondary's links and their similarities, both in the order of the similarities."""

    links: LinkTable
    """Links in the noised order, for the secondary."""

    values: Float32[np.ndarray, "rows links"]
    """Similarities for the primary; NaN where a slot holds no record."""

    scale: SimilarityScale
    """mu_0 and sigma_0."""

    noise_std: float
    """sigma, in units of sigma_0."""

    def figures(self) -> dict[str, Any]:
        """Return figures for the log."""
        whole, noised = self.scale.whole_distances, self.noise_std > 0
        tau = epsilon = None
        if noised:
            epsilon = sensitivity.similarity_epsilon(
                noise_std=self.noise_std,
                key_scale=self.scale.deviation,
                key_mean=self.scale.mean,
                rows=len(self.values),
            )
        if whole and noised:
            tau = sensitivity.recovery_bound(
                noise_std=self.noise_std, key_scale=self.scale.deviation
            )
        return {
            "mu_0": self.scale.mean,
            "sigma_0": self.scale.deviation,
            "sigma": self.noise_std,
            "epsilon_at_least": epsilon,
            "tau": tau,
            "tau_note": "no noise, no bound"
            if not noised
            else "not applicable: distances are no whole numbers"
            if not whole
            else "probability that one greedy attacker finds a record's key; not DP",
        }


def scaling_rows(spec: LinkSpec, rows: int) -> Int64[np.ndarray, " scaling"]:
    """Return the rows whose links scale similarities; every party can compute them.

    They are the primary's training rows where these are drawn by the public seed alone. A split by
    classes, groups or times is the primary's own knowledge, so all rows are taken.
    """
    if spec.split is None:
        return np.arange(rows, dtype=np.int64)
    return split_rows(
        rows,
        validation_fraction=spec.split.validation_fraction,
        test_fraction=spec.split.test_fraction,
        seed=spec.split.seed,
    ).train


def similar_links(spec: LinkSpec, links: LinkTable) -> SimilarLinks | None:
    """Scale and noise the links of all primary rows, and put them into the noised order.

    Returns:
        Similarities; None if the family reads none.

    Raises:
        DataError: If no training row has a link.
        ConfigError: If the bound tau cannot be had.

    Reveals:
        To the primary, once sent: K numbers a row in falling order. It is not differential
        privacy; tau, where it applies, bounds one greedy attacker.
    """
    if spec.similarities is None:
        return None
    scale = spec.similarity_scale or SimilarityScale.fit(
        links.take(scaling_rows(spec, links.num_rows))
    )
    noise_std = _noise_std(spec, spec.similarities, scale)
    noised = noised_similarities(links, scale, noise_std=noise_std)
    # Missing links are least similar of all; equal ones keep their order by record number.
    order = np.argsort(np.where(links.present, -noised, np.inf), axis=1, kind="stable")
    values = np.take_along_axis(noised, order, axis=1)
    indices = np.take_along_axis(links.indices, order, axis=1)
    values[indices == NO_RECORD] = np.nan
    return SimilarLinks(
        links=LinkTable(
            indices=indices, distances=np.take_along_axis(links.distances, order, axis=1)
        ),
        values=values,
        scale=scale,
        noise_std=noise_std,
    )


def _noise_std(spec: LinkSpec, wanted: SimilaritySpec, scale: SimilarityScale) -> float:
    if wanted.tau is None:
        return wanted.noise or 0.0
    if not scale.whole_distances:
        raise ConfigError(
            f"linkage.similarity_tau: bounds whole-number distances alone, and those of "
            f"linkage.metric = {spec.keys.metric.name!r} are none; set similarity_noise instead"
        )
    floor = sensitivity.reachable_floor(key_scale=scale.deviation)
    if wanted.tau <= floor:
        raise ConfigError(
            f"linkage.similarity_tau: {wanted.tau:g} cannot be reached: with "
            f"sigma_0 = {scale.deviation:.6g} even unlimited noise leaves {floor:.6g}; ask for more"
        )
    return sensitivity.similarity_noise_std(bound=wanted.tau, key_scale=scale.deviation)
