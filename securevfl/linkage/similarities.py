"""Similarities for FedSim: negative distances, normalised by the training links, noised once.

The noise bounds one greedy attacker (tau, ``dp/sensitivity.py``); it is not differential
privacy. It is drawn once and kept with the values it was added to: fresh noise over the same
similarities in every run, as in the published code, averages out.
"""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float32

from securevfl.core import checks
from securevfl.core.errors import ConfigError, DataError
from securevfl.linkage.links import LinkTable


@dataclass(frozen=True, kw_only=True, slots=True)
class SimilarityScale:
    """mu_0 and sigma_0, from the training links; validation, test and later rows use the same."""

    mean: float
    """mu_0, the mean negative distance of training links, in the metric's unit."""

    deviation: float
    """sigma_0, their standard deviation, > 0."""

    whole_distances: bool
    """Whether all distances were whole numbers, as of Bloom filters: tau speaks of no others."""

    def __post_init__(self) -> None:
        checks.positive(deviation=self.deviation)
        if not math.isfinite(self.mean):
            raise ConfigError(f"mean must be finite, got {self.mean!r}")

    @classmethod
    def fit(cls, training_links: LinkTable) -> "SimilarityScale":
        """Take mean and deviation over all links of the training rows.

        Where all are equally long, as the nearest of exact ids are, the deviation is 1, one unit of
        the distance: similarities are then 0, and a link of another length differs by its own.

        Raises:
            DataError: If there is no link.

        References:
            [FedSim] section 4.1, eq. (1).
        """
        distances = training_links.distances[training_links.present]
        if not distances.size:
            raise DataError(
                "similarities: no training row has a link, so there is nothing to scale by; check "
                "the keys and linkage.max_distance"
            )
        equal = not distances.max() > distances.min()
        return cls(
            mean=float(-distances.mean()),
            deviation=1.0 if equal else float(distances.std()),
            whole_distances=bool((distances == np.round(distances)).all()),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class SimilarityTable:
    """One similarity a link, with its noise in it for good."""

    values: Float32[np.ndarray, "rows links"]
    """Normalised noised similarities; 0 where a slot holds no record."""

    present: Bool[np.ndarray, "rows links"]
    """Which slots hold a record."""

    noise_std: float
    """Standard deviation of the noise that was added, in units of sigma_0; 0 for none."""

    def __repr__(self) -> str:
        return f"SimilarityTable({self.values.shape}, noise_std={self.noise_std})"


def noised_similarities(
    links: LinkTable,
    scale: SimilarityScale,
    *,
    noise_std: float,
    insecure_seed: int | None = None,
) -> SimilarityTable:
    """Normalise links and add the noise that stays with them.

    ``s_ij = (-distance_ij - mu_0) / sigma_0 + N(0, noise_std^2)``

    Args:
        links: All links that will ever be used, so that each is noised once.
        scale: From the training links.
        noise_std: sigma, >= 0, in units of sigma_0.
        insecure_seed: Makes the noise predictable: tests only. By default the operating system
            seeds it afresh.

    Raises:
        ConfigError: If ``noise_std`` is negative or not finite.

    Reveals:
        Nothing by itself. Whoever gets the values, with record numbers, can locate records by
        trilateration if there are many; sorted and without numbers they tell less.

    References:
        [FedSim] section 4.1, eq. (1) and (2).
    """
    checks.non_negative(noise_std=noise_std)
    generator = np.random.default_rng(insecure_seed)
    present = links.present
    exact = (-links.distances[present] - scale.mean) / scale.deviation
    values = np.zeros(links.indices.shape, dtype=np.float32)
    values[present] = exact + noise_std * generator.standard_normal(exact.shape)
    return SimilarityTable(values=values, present=present, noise_std=noise_std)
