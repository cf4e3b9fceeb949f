"""What the papers' formulas would claim for a run: shown beside the sound figure, never instead.

These are readings of published claims, not guarantees.
"""

from securevfl.core import checks
from securevfl.dp.accountant import epsilon_of
from securevfl.dp.calibration import noise_multiplier_for
from securevfl.dp.events import SampledRelease


def epsilon_as_published(
    *, average_multiplier: float, sampling_rate: float, rounds: int, delta: float
) -> float:
    """Return what [FeT]'s Theorem 3 claims, its constants replaced by a tight accountant.

    The theorem takes the noise of the released average, in units of the clip norm, for a noise
    multiplier, each of the ``B T`` batches for one step of Poisson-subsampled DP-SGD at rate q, and
    says nothing of how many rows a record touches, of how much one neighbour's removal moves a
    row, or of what a trained encoder remembers.

    Args:
        average_multiplier: Standard deviation of the noise on the average over the clip norm, > 0.
        sampling_rate: ``q``, in (0, 1].
        rounds: Batches times epochs, >= 0.
        delta: In (0, 1).

    References:
        [FeT] Theorem 3 (arXiv:2410.17986v1).
    """
    checks.whole(rounds=rounds)
    checks.at_least(0, rounds=rounds)
    checks.open_unit(delta=delta)
    release = SampledRelease(
        sampling_rate=sampling_rate, noise_multiplier=average_multiplier, count=rounds
    )
    return epsilon_of([release], delta=delta)


def noise_multiplier_as_published(
    *, epsilon: float, sampling_rate: float, rounds: int, delta: float
) -> float:
    """Return the average's noise over the clip norm at which the claim is ``epsilon``.

    The inverse of :func:`epsilon_as_published`.
    """
    return noise_multiplier_for(
        lambda z: [SampledRelease(sampling_rate=sampling_rate, noise_multiplier=z, count=rounds)],
        epsilon=epsilon,
        delta=delta,
    )
