"""L2 sensitivity of the sum that the primary learns, and each party's share of the noise.

The formulas are derived in docs/privacy.md, section 3. ``C`` is the clip norm of one row at one
secondary, ``k_a`` the active secondaries, ``m`` the most rows that one record can touch (the
record-side cap), ``B`` the rows that are released together.
"""

import math

import scipy  # special functions load when they are first named

from securevfl.core import checks
from securevfl.core.errors import ConfigError, PrivacyError
from securevfl.dp.events import Neighbouring, Unit


def row_change(
    *,
    clip_norm: float,
    active: int,
    unit: Unit,
    absent_row_is_zero: bool = False,
    pooled_links: int | None = None,
    contested: bool = True,
    rounding: float = 0.0,
    disjoint: bool = False,
) -> float:
    """Return the largest L2 change of one row of the sum.

    A row of one secondary has norm at most ``C``, so any two of its values are at most ``2C``
    apart: removing a neighbour lets another one in, and the row moves by up to 2C, not C.

    With ``pooled_links = K``, a row is the mean over K slots of vectors of norm at most ``C``, each
    a function of one record alone, and empty slots are zero. The eligible records of a row are a
    fixed set, and the K nearest of them fill the slots; without one record the slots hold the same
    vectors but for one, which becomes the next nearest record's or zero. So the mean moves by at
    most ``2C/K``. Exchanging one record for another moves a row no further: one vector leaves and
    another enters.

    If the slots are not contested, a row is the sum of *all* eligible records' vectors over K,
    scaled down to the ball of radius C. No record takes a removed one's place, and scaling down to
    a ball moves no two points further apart: the row moves by at most ``C/K``.

    What touches all ``k_a`` secondaries moves the sum by ``k_a`` times what it moves one term, if
    all terms can move the same way. Where every secondary writes into coordinates of its own, the
    changes stand at right angles: ``sqrt(k_a)`` times.

    Args:
        clip_norm: ``C``, in the units of the representation, > 0.
        active: ``k_a``, >= 1.
        unit: Unit that is added, removed or exchanged.
        absent_row_is_zero: For ``linked-row``: the release of a row without links is exactly zero,
            so that removing it costs C and not 2C.
        pooled_links: ``K``, if each row is such a mean; None otherwise.
        contested: Whether only the K nearest eligible records fill the slots.
        rounding: Largest extra L2 change through rounding after the mean, in the same units, >= 0:
            ``sqrt(width) * granularity`` if the mean is rounded into the ring, 0 if each record's
            vector is rounded before integers are added.
        disjoint: Whether every secondary's term is zero where another's is not.

    Returns:
        The change, in the units of ``clip_norm``.
    """
    checks.positive(clip_norm=clip_norm)
    checks.non_negative(rounding=rounding)
    checks.whole_from(1, active=active)
    all_terms = math.sqrt(active) if disjoint else active
    if unit is Unit.LINKED_ROW:
        return (1 if absent_row_is_zero else 2) * clip_norm * all_terms
    change = 2 * clip_norm
    if pooled_links is not None:
        checks.whole_from(1, pooled_links=pooled_links)
        # Rounding towards zero keeps every norm below C, so 2C bounds the change in any case.
        moved = 2 * clip_norm if contested else clip_norm
        change = min(change, moved / pooled_links + rounding)
    return change * all_terms if unit is Unit.ENTITY else change


def rows_changed(
    *, links_per_record: int, rows: int, neighbouring: Neighbouring = Neighbouring.ADD_REMOVE
) -> int:
    """Return how many of ``rows`` released rows one record can touch.

    Adding or removing touches at most ``m`` rows; exchanging one record for another touches the m
    rows of each.
    """
    checks.whole_from(1, links_per_record=links_per_record, rows=rows)
    touched = links_per_record
    if neighbouring is Neighbouring.REPLACE_ONE:
        touched = 2 * links_per_record
    return min(touched, rows)


def linked_rows_sensitivity(*, unit: Unit, links_per_record: int | None, rows: int) -> int:
    """Return the largest change of the number of linked rows at one secondary.

    A row is linked if some record there may be linked to it. A record picks its m rows by its own
    key and theirs alone, so removing it leaves at most these m without a record, and links none;
    exchanging it for another takes away at most m and adds at most m. A linked row is one row.

    Args:
        unit: What is added, removed or exchanged.
        links_per_record: ``m``, >= 1; for linked rows it may be None.
        rows: Rows of the primary, >= 1.

    Raises:
        ConfigError: If a record has no cap: it may then be the only one of every row.
    """
    checks.whole_from(1, rows=rows)
    if unit is Unit.LINKED_ROW:
        return 1
    if links_per_record is None:
        raise ConfigError(f"links_per_record: must be given for the unit {unit.value!r}")
    return rows_changed(links_per_record=links_per_record, rows=rows)


def gradient_sensitivity(*, clip_norm: float, unit: Unit, rows: int) -> float:
    """Return the largest L2 change of one secondary's sum of clipped row gradients.

    The sum is *one* vector: gradients of all rows of a round are added. A unit that touches ``j``
    of these rows moves each of their gradients from one vector of length at most ``C_g`` to
    another, by up to ``2 C_g``, and nothing keeps these moves from pointing the same way: the sum
    changes by up to ``2 C_g j``. (Released rows lie side by side instead, and change by
    ``2 C sqrt(j)`` together.)

    Args:
        clip_norm: ``C_g``, largest L2 norm of one row's gradient, > 0.
        unit: What is added or removed. A linked row is one row of the round.
        rows: ``j``, most rows of one round that the unit can touch, >= 1.

    Examples:
        >>> gradient_sensitivity(clip_norm=0.5, unit=Unit.SECONDARY_RECORD, rows=4)
        4.0
    """
    checks.positive(clip_norm=clip_norm)
    checks.whole_from(1, rows=rows)
    return 2 * clip_norm * (1 if unit is Unit.LINKED_ROW else rows)


def sum_sensitivity(
    *,
    clip_norm: float,
    active: int,
    unit: Unit,
    links_per_record: int | None,
    rows: int,
    neighbouring: Neighbouring = Neighbouring.ADD_REMOVE,
    absent_row_is_zero: bool = False,
    pooled_links: int | None = None,
    rounding: float = 0.0,
) -> float:
    """Return ``Delta_sum``: the L2 sensitivity of the sum over ``rows`` rows released together.

    References:
        docs/privacy.md, section 3, table of Delta; the pooled case is :func:`row_change`.

    Examples:
        >>> sum_sensitivity(
        ...     clip_norm=1.0, active=4, unit=Unit.SECONDARY_RECORD, links_per_record=4, rows=128
        ... )
        4.0
    """
    change = row_change(
        clip_norm=clip_norm,
        active=active,
        unit=unit,
        absent_row_is_zero=absent_row_is_zero,
        pooled_links=pooled_links,
        rounding=rounding,
    )
    checks.whole_from(1, rows=rows)
    if links_per_record is not None:
        checks.whole_from(1, links_per_record=links_per_record)
    if unit is Unit.LINKED_ROW:
        return change
    if links_per_record is None:
        raise ConfigError(f"links_per_record: must be given for the unit {unit.value!r}")
    touched = rows_changed(links_per_record=links_per_record, rows=rows, neighbouring=neighbouring)
    return change * math.sqrt(touched)


def honest_parties(*, active: int, colluding: int) -> int:
    """Return the number of active secondaries whose noise no colluding party can subtract.

    Raises:
        ConfigError: If a number is out of range.
        PrivacyError: If there is no such secondary.
    """
    checks.whole(active=active, colluding=colluding)
    checks.at_least(1, active=active)
    checks.at_least(0, colluding=colluding)
    if colluding >= active:
        raise PrivacyError(
            f"colluding = {colluding} of {active} active secondaries leaves no secondary whose "
            f"noise protects; it must be at most {active - 1}, or more secondaries must take part"
        )
    return active - colluding


def noise_share_std(*, sum_std: float, active: int, colluding: int = 0) -> float:
    """Return ``tau``, the standard deviation of the noise that each party adds to its own term.

    Colluding parties can subtract what they added, so the others carry the whole of ``sum_std``.

    Args:
        sum_std: Standard deviation that the sum must keep, in the units of the sum, > 0.
        active: Secondaries that add a share, >= 1.
        colluding: Largest number of them that may help the primary, >= 0 and < ``active``.

    Returns:
        ``sum_std / sqrt(active - colluding)``.

    References:
        docs/privacy.md, section 3. Differs from [FeT] section 6.1, which gives each of k parties
        the variance ``sigma^2/k^2``: under averaging that leaves ``sigma/k^1.5`` on the average,
        not sigma.

    Examples:
        >>> noise_share_std(sum_std=2.0, active=5, colluding=1)
        1.0
    """
    checks.positive(sum_std=sum_std)
    return sum_std / math.sqrt(honest_parties(active=active, colluding=colluding))


def recovery_bound(*, noise_std: float, key_scale: float) -> float:
    """Return ``tau``, the bound on the attacker's success for one record, a probability.

    Args:
        noise_std: ``sigma``, noise on the normalised similarity, > 0.
        key_scale: ``sigma_0``, the scale that similarities were divided by, > 0.

    References:
        [FedSim] Theorem 2: ``erf(sqrt(sigma^2 + 1) / (2 sqrt(2) sigma sigma_0))``. Differs from
        the later version's example, which prints 1.94e-5 for sigma = 0.4 and sigma_0 = 21178.86:
        that value belongs to sigma = 4.0.

    Examples:
        >>> f"{recovery_bound(noise_std=0.4, key_scale=21178.86):.4e}"
        '5.0720e-05'
    """
    checks.positive(noise_std=noise_std, key_scale=key_scale)
    return math.erf(math.hypot(noise_std, 1) / (2 * math.sqrt(2) * noise_std * key_scale))


def reachable_floor(*, key_scale: float) -> float:
    """Return the limit of ``tau`` under unlimited noise: ``erf(1 / (2 sqrt(2) sigma_0))``."""
    checks.positive(key_scale=key_scale)
    return math.erf(1 / (2 * math.sqrt(2) * key_scale))


def similarity_noise_std(*, bound: float, key_scale: float) -> float:
    """Return the noise ``sigma`` at which the attacker's bound is ``tau = bound``.

    ``y = 2 sqrt(2) sigma_0 erfinv(tau)``, ``sigma = 1 / sqrt((y - 1)(y + 1))``.

    Raises:
        ConfigError: If ``bound`` is not below 1, or at or below the floor that no noise reaches.
    """
    checks.open_unit(bound=bound)
    floor = reachable_floor(key_scale=key_scale)
    stretched = 2 * math.sqrt(2) * key_scale * float(scipy.special.erfinv(bound))
    if not (bound > floor and stretched > 1):
        raise ConfigError(
            f"bound must be above {floor:.6g}, which is what unlimited noise reaches at "
            f"key_scale = {key_scale!r}; got {bound!r}"
        )
    return 1 / math.sqrt((stretched - 1) * (stretched + 1))


def similarity_epsilon(*, noise_std: float, key_scale: float, key_mean: float, rows: int) -> float:
    """Return a lower bound on epsilon of the noise on similarities, as differential privacy.

    ``epsilon >= Delta^2 / (2 sigma^2)`` with ``Delta = n max(|1 + mu_0|, |1 - mu_0|) / sigma_0``.
    At noise that keeps FedSim's accuracy it is far above any useful guarantee.

    Args:
        noise_std: ``sigma``, noise on the normalised similarity, > 0.
        key_scale: ``sigma_0``, the scale that similarities were divided by, > 0.
        key_mean: ``mu_0``, the mean negative distance of training links.
        rows: ``n``, rows of the primary whose similarities are shown, >= 1.

    References:
        [FedSim] Theorem 1.

    Examples:
        >>> f"{similarity_epsilon(
        ...     noise_std=0.4, key_scale=21178.86, key_mean=-46237.78, rows=14_105
        ... ):.3g}"
        '2.96e+09'
    """
    checks.positive(noise_std=noise_std, key_scale=key_scale)
    checks.non_negative(mean_distance=-key_mean)
    checks.whole_from(1, rows=rows)
    sensitivity = rows * (1 + abs(key_mean)) / key_scale
    return (sensitivity / noise_std) ** 2 / 2
