"""Plan of a run: its releases, their noise, and the format of what crosses the cut."""

import math
from collections.abc import Mapping, Sized
from dataclasses import dataclass, replace
from typing import Final, Literal

from securevfl.config.federation import FederationConfig
from securevfl.core.errors import ConfigError
from securevfl.dp.privacy import Privacy
from securevfl.dp.regime import Regime
from securevfl.dp.release_plan import ReleasePlan
from securevfl.federation.rounds.aggregation import AGGREGATIONS, Aggregation
from securevfl.federation.rounds.cut import CutLayer
from securevfl.federation.run_facts import RunFacts
from securevfl.mpc.ring_format import COARSEST_STEP, RingFormat

Purpose = Literal["release", "train", "validation", "test", "predict"]

ROUNDS_AHEAD: Final = 8
"""Most rounds that are announced and not yet answered, where none depends on another.

Over a line with a round trip of 50 ms one round at a time waits 50 ms for each; eight wait once. A
secondary of a frozen run keeps as many answers, so more would cost it disk.
"""


class RoundCounter:
    """Round numbers of one session; a number is given out once."""

    def __init__(self) -> None:
        self.last = 0

    def next(self) -> int:
        """Return the next round number, from 1."""
        self.last += 1
        return self.last


def active_parties(secondaries: Sized, party_dropout: float) -> int:
    """Return how many secondaries answer a training round; at least one.

    References:
        [FeT] section 5.1, party dropout: ``(1 - r_d) k``, here rounded to the nearest whole.
    """
    return max(1, round((1 - party_dropout) * len(secondaries)))


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """All that is decided before anything is sent; computed once, and handed on."""

    config: FederationConfig
    """The federation file."""

    facts: RunFacts
    """The primary's rows, and where the run starts."""

    releases: ReleasePlan
    """Everything that will be released, for the accounting."""

    noise_share_std: float
    """``tau``: what each secondary adds to its own term, in the units of the representation; 0 for
    the mechanism ``none``. Calibrating it to an epsilon is the costly part of a plan."""

    cut: CutLayer
    """The format of what crosses the cut."""

    ranks: Mapping[str, int]
    """Name to rank: the primary is 0, secondaries count from 1, third parties come after them."""

    training_rows: int
    """Rows of an epoch's training rounds: all labelled ones; fewer with
    ``training.rows = "aligned"``, once keys are linked. The accounting is of all of them."""

    @property
    def regime(self) -> Regime:
        """How encoders come by their weights, and what follows from it."""
        return self.config.regime

    @property
    def learns(self) -> bool:
        """Whether secondaries get gradients."""
        by_gradients = self.config.family.learns_by_gradients
        return self.regime.learns and by_gradients and not self.facts.predicts

    @property
    def single_pass(self) -> Purpose | None:
        """What every row is released once for, if that is all that happens."""
        if self.facts.predicts:
            return "predict"
        return "release" if self.regime.releases_once else None

    def aggregation(self) -> Aggregation:
        """Return how representations are clipped, encoded and averaged."""
        kind = _aggregation_of(self.config)
        return kind(self.cut)

    @property
    def secondaries(self) -> dict[int, str]:
        """Names by rank of the secondaries that take part."""
        active = self.facts.active
        names = {self.ranks[party.name]: party.name for party in self.config.secondaries}
        return {rank: name for rank, name in names.items() if active is None or rank in active}

    @property
    def active(self) -> int:
        """How many secondaries answer a training round, of those that take part."""
        present = self.secondaries
        if self.single_pass is not None:
            return len(present)
        return active_parties(present, self.config.model.party_dropout)

    @property
    def average_positions_every(self) -> int:
        """Epochs between averages of positional encodings; 0 for none, as of frozen encoders."""
        return self.config.model.average_positions_every if self.learns else 0


_MOST_COUNT_NOISE: Final = 0.1
"""Where the noise on a number of linked rows is a larger part of all rows than this, none is said:
it would tell nothing of links, and end good runs."""


def plan_run(config: FederationConfig, facts: RunFacts) -> RunPlan:
    """Decide what a run releases, with how much noise, and how it is encoded.

    Raises:
        PrivacyError: If the promise that is asked for does not hold; see also
            :func:`securevfl.config.disclosure.require_covered_channels`.
        EncodingRangeError: If no fixed-point format holds what is released.
    """
    releases = _releases(config, facts, config.privacy)
    releases.check()
    share_std = releases.noise_share_std()
    # The same at every party: it depends on the file and on the number of rows alone.
    if releases.link_count_std(share_std) > _MOST_COUNT_NOISE * facts.rows:
        releases = replace(releases, linked_rows=None)
        share_std = releases.noise_share_std()
    return _plan(config, facts, releases, share_std)


def plan_prediction(
    config: FederationConfig, facts: RunFacts, *, noise_share_std: float
) -> RunPlan:
    """Decide what one request for predictions releases: every new row once.

    Its noise is that of the model's training, which the top model has learned to live with. Its
    epsilon is computed for what it releases or, where secondaries count how often each record is
    released, for all requests together; it is charged apart from training's. All predictions of
    one model keep ``prediction.epsilon`` or, where there is none, the run's own again.

    Args:
        config: The federation file.
        facts: How many rows are linked and predicted, and the request's id.
        noise_share_std: ``tau`` of the model.

    Raises:
        PrivacyError: If the promise does not hold.
        EncodingRangeError: If no fixed-point format holds what is released.
    """
    privacy = config.privacy
    if privacy.mechanism != "none":
        unit_privacy = replace(privacy, epsilon=None, noise_multiplier=1.0)
        budget = config.prediction.epsilon or privacy.epsilon
        if budget is None:
            share_std = _releases(config, facts, unit_privacy).noise_share_std()
            privacy = replace(unit_privacy, noise_multiplier=noise_share_std / share_std)
        else:
            privacy = replace(privacy, epsilon=budget, noise_multiplier=None)
    releases = _releases(config, facts, privacy)
    releases.check()
    return _plan(config, facts, releases, noise_share_std)


def _plan(
    config: FederationConfig, facts: RunFacts, releases: ReleasePlan, noise_share_std: float
) -> RunPlan:
    return RunPlan(
        config=config,
        facts=facts,
        releases=releases,
        noise_share_std=noise_share_std,
        cut=_cut_of(config, noise_share_std=noise_share_std),
        ranks=config.ranks,
        training_rows=facts.train_rows,
    )


def _cut_of(config: FederationConfig, *, noise_share_std: float) -> CutLayer:
    slots = config.model.neighbours if pools(config) else 1
    # The accounting speaks of rows that are means over K slots; what crosses is their sum.
    ring = RingFormat.choose(
        clip_norm=config.privacy.clip_norm * slots,
        noise_share_std=noise_share_std * slots,
        parties=len(config.secondaries),
    )
    return CutLayer(
        ring=ring,
        slots=slots,
        shape=config.family.cut_shape(config.model),
        clip_norm=config.privacy.clip_norm,
        noise_share_std=noise_share_std,
        disjoint=config.in_blocks,
    )


def pools(config: FederationConfig) -> bool:
    """Return whether rows of the sum are pooled from records that are clipped one by one.

    Raises:
        ConfigError: As :func:`plan_run`, of the aggregation.
    """
    return _aggregation_of(config).pooled


def kept_aggregation(config: FederationConfig, *, noise_share_std: float) -> Aggregation:
    """Return how a kept model's representations are clipped and averaged.

    Args:
        config: The federation file.
        noise_share_std: ``tau`` of the model.

    Raises:
        ConfigError: As :func:`plan_run`, of the aggregation.
    """
    cut = _cut_of(config, noise_share_std=noise_share_std)
    return _aggregation_of(config)(cut)


def _releases(config: FederationConfig, facts: RunFacts, privacy: Privacy) -> ReleasePlan:
    training = config.training
    batch = training.batch_size
    # Fewer active secondaries add less noise. What a request costs is reckoned for those that
    # answer it; of training, noise is made for as few as any session may have.
    some = facts.active if facts.predicts else None
    active = len(config.secondaries if some is None else some)
    counted = config.releases_per_record if facts.predicts else None
    # Where records are counted, an entity has its releases at every secondary, asked or not.
    secondaries = active if counted is None else len(config.secondaries)
    released = facts.predicted_rows if facts.predicts else facts.rows
    if facts.predicts or config.regime.releases_once:
        rounds, row_releases, per_row = math.ceil(released / batch), released, 1
    else:
        parts = (facts.train_rows, facts.validation_rows)
        spare = int(config.reserves_budget)
        rounds = config.epochs * sum(math.ceil(rows / batch) for rows in parts)
        rounds += (1 + spare) * math.ceil(facts.test_rows / batch)
        row_releases = config.epochs * sum(parts) + (1 + spare) * facts.test_rows
        per_row = config.epochs + spare
        active = active_parties(range(config.least_in_training), config.model.party_dropout)
    # A sum that is drawn back to norm C is rounded towards zero, which moves each coordinate of two
    # neighbouring sums apart by less than one unit; the ring's coarsest, since the unit is only
    # chosen once the noise is known.
    _, width = config.family.cut_shape(config.model)
    drawn_back = math.sqrt(width) * COARSEST_STEP / config.model.neighbours
    return ReleasePlan(
        privacy=privacy,
        parties=secondaries,
        min_active=active,
        rounds=rounds,
        rows_per_round=min(batch, released),
        row_releases=row_releases,
        releases_per_row=per_row,
        links=config.model.neighbours,
        pooled=pools(config),
        contested=config.linkage.choose == "rows",
        disjoint=config.in_blocks,
        fitting=None if facts.predicts else config.fitting,
        rounding=0.0 if config.linkage.choose == "rows" else drawn_back,
        linked_rows=facts.rows if privacy.bounds_linked_rows and not facts.predicts else None,
        releases_per_record=counted,
    )


def _aggregation_of(config: FederationConfig) -> type[Aggregation]:
    """Return the aggregation that the family asks for.

    Raises:
        ConfigError: If there is none of that name, or it pools where the family does not.
    """
    family, frozen = config.family, not config.regime.learns
    name = family.aggregation(config.model, frozen=frozen)
    kind = AGGREGATIONS.get(name)
    if kind is None:
        known = ", ".join(map(repr, AGGREGATIONS))
        raise ConfigError(
            f"model.family: {family.name!r} asks for the aggregation {name!r}; there are {known}"
        )
    if kind.pooled != family.pools_records(config.model, frozen=frozen):
        raise ConfigError(
            f"model.family: {family.name!r} asks for the aggregation {name!r}, and only one of the "
            f"two pools a row's records"
        )
    return kind
