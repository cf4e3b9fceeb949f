"""Privacy events: descriptions of releases, written by mechanisms and read by accountants.

Each event's meaning is fixed by its docstring; a new behaviour gets a new class. Multipliers are
noise standard deviation over the L2 sensitivity of the *sum* that the primary learns
(docs/privacy.md, section 3).
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal

from securevfl.core import checks


class Unit(StrEnum):
    """Unit of privacy, whose presence the guarantee hides."""

    LINKED_ROW = "linked-row"
    """One row of the primary together with its links at all secondaries."""

    SECONDARY_RECORD = "secondary-record"
    """One record of one secondary."""

    ENTITY = "entity"
    """One person or thing: a record at every secondary."""


class Neighbouring(StrEnum):
    """Neighbouring relation: the change of the data that the guarantee hides."""

    ADD_REMOVE = "add-remove"
    """One unit is present or absent."""

    REPLACE_ONE = "replace-one"
    """One unit is exchanged for another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GaussianRelease:
    """``count`` releases ``f(D) + N(0, (z C)^2 I)``, each with L2 sensitivity ``C``.

    Holds under any neighbouring relation, as long as ``C`` was derived under it.
    """

    noise_multiplier: checks.Positive
    """``z``, noise standard deviation over L2 sensitivity; dimensionless, > 0."""

    count: checks.FromZero = 1
    """How many such releases were made, >= 0."""

    def __post_init__(self) -> None:
        checks.require_limits(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledRelease:
    """``count`` Gaussian releases, each on a fresh, secret Poisson sample of the records.

    ``noise_multiplier`` is noise over the change that one *sampled* record causes.
    """

    sampling_rate: checks.Rate
    """``q``: probability with which each record is in a round's sample, in (0, 1]."""

    noise_multiplier: checks.Positive
    """``z``, given that the record is in the sample; dimensionless, > 0."""

    count: checks.FromZero = 1
    """How many rounds, each with its own sample, >= 0."""

    neighbouring: Neighbouring = Neighbouring.ADD_REMOVE
    """Under replace-one both the old and the new record are sampled, each at rate q."""

    def __post_init__(self) -> None:
        checks.require_limits(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class EntitySampledRelease:
    """``count`` Gaussian releases; each of ``parties`` samples the entity's record on its own.

    The sum shifts by ``j/parties`` of its sensitivity when ``j`` parties drew the entity, and ``j``
    is binomial with rate q.
    """

    parties: checks.Count
    """Secondaries that hold the entity, >= 1."""

    sampling_rate: checks.Rate
    """``q`` at each party, independent between parties and rounds, in (0, 1]."""

    noise_multiplier: checks.Positive
    """``z`` with respect to the change when all parties drew the entity; dimensionless, > 0."""

    count: checks.FromZero = 1
    """How many rounds, >= 0."""

    def __post_init__(self) -> None:
        checks.require_limits(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class SymbolRelease:
    """``count`` symbols, each decided by one unit alone (:mod:`securevfl.dp.symbols`).

    A unit that is removed leaves a uniform cell: p and q become 1/M each. A unit that is exchanged,
    or brings another one forward, leaves another cell: p becomes q there, and q becomes p.
    """

    cells: checks.Count
    """M, number of cells."""

    odds: checks.Rate
    """``q / p``: probability of any other cell over that of the unit's own, in (0, 1]."""

    exchanged: bool
    """Whether the unit may be exchanged for another; else it is removed or added."""

    count: checks.FromZero = 1
    """How many symbols, >= 0."""

    def __post_init__(self) -> None:
        checks.require_limits(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class LaplaceRelease:
    """``count`` whole numbers behind discrete Laplace noise, ``P(x)`` as ``exp(-|x| / scale)``.

    A unit moves each by up to ``shift``, whether it is removed, added or exchanged.
    """

    shift: checks.Count
    """Largest change, in units of the noise's grid."""

    scale: checks.Positive
    """Scale of the noise, in the same units."""

    count: checks.FromZero = 1
    """How many such numbers, >= 0."""

    def __post_init__(self) -> None:
        checks.require_limits(self)


NoisedRelease = GaussianRelease | SampledRelease | EntitySampledRelease
"""A release behind Gaussian noise."""

PureRelease = SymbolRelease | LaplaceRelease
"""A release whose privacy loss is bounded."""

Release = NoisedRelease | PureRelease

ScoreKind = Literal["symbols", "laplace"]
"""Names of the pure releases that a plan may choose."""


_LINK_COUNT_NOISE: Final = 10.0


def link_count_release(whole: NoisedRelease, *, answers: int) -> GaussianRelease:
    """Return the answers on how many rows are linked that one unit is in.

    Together they have ten times the noise multiplier of the other releases, which is that of one
    Gaussian release where these compose to one.

    Args:
        whole: All other releases of the run.
        answers: Secondaries whose number the unit moves, >= 1.

    References:
        [DRS19] Corollary 3.3, for both roots: ``mu`` composes as the root of summed squares.
    """
    # Each sampled round has its own sample, and rounds do not add up to one multiplier.
    rounds = whole.count if isinstance(whole, GaussianRelease) else 1
    together = _LINK_COUNT_NOISE * whole.noise_multiplier / math.sqrt(rounds)
    return GaussianRelease(noise_multiplier=together * math.sqrt(answers), count=answers)
