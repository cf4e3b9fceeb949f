"""What a run will do: its rows, its releases and the format of what crosses the cut."""

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from securevfl.config.federation import FederationConfig
from securevfl.core.errors import ConfigError, DataError
from securevfl.data.rows import RowSplit, split_rows
from securevfl.data.tables import PartyTable
from securevfl.dp.release_plan import ReleasePlan
from securevfl.federation.aggregation import AGGREGATIONS, Aggregation
from securevfl.federation.cut import Cut
from securevfl.federation.rounds import active_parties
from securevfl.mpc.ring_format import COARSEST_STEP, RingFormat

RUN_ID_DIGITS: Final = 32
"""Hexadecimal digits of a run's id."""


def new_run() -> str:
    """Return a fresh run's id, which no other run has."""
    return secrets.token_hex(RUN_ID_DIGITS // 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """What every party must know to do its own accounting before anything is released."""

    rows: int
    """The primary's rows; ids run from 0."""

    train_rows: int
    validation_rows: int
    test_rows: int

    unlabelled_rows: int = 0
    """Training rows whose labels are missing or not used."""

    resume_pretraining: int = 0
    """Iterations of pretraining that are done already."""

    resume_epoch: int = 0
    """Epoch to go on from; 0 starts afresh."""

    run: str = field(default_factory=new_run)
    """Names the run in every party's files, so that nobody goes on with the state of another."""


def run_facts(config: FederationConfig, table: PartyTable) -> tuple[RowSplit, RunFacts]:
    """Split the primary's rows and count them.

    Raises:
        DataError: If there are too few rows for that.
    """
    try:
        split = split_rows(
            table.num_rows,
            validation_fraction=config.training.validation_fraction,
            test_fraction=config.training.test_fraction,
            seed=config.federation.seed,
            labelled_rows=config.training.labelled_rows,
            labelled=table.labelled,
        )
    except DataError as error:
        raise DataError(f"table of {table.name!r}: {error}") from None
    facts = RunFacts(
        rows=table.num_rows,
        train_rows=len(split.train),
        validation_rows=len(split.validation),
        test_rows=len(split.test),
        unlabelled_rows=len(split.unlabelled),
        resume_epoch=0,
    )
    return split, facts


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

    cut: Cut
    """The format of what crosses the cut."""

    ranks: Mapping[str, int]
    """Name to rank: the primary is 0, secondaries count from 1, third parties come after them."""

    training_rows: int
    """Rows of an epoch's training rounds: all labelled ones; fewer with
    ``training.rows = "aligned"``, once keys are linked. The accounting is of all of them."""

    @property
    def frozen(self) -> bool:
        """Whether bottom models stay as they are and every row is released once."""
        return self.config.privacy.encoder == "frozen"

    def aggregation(self) -> Aggregation:
        """Return how representations are clipped, encoded and averaged."""
        kind = _aggregation_of(self.config)
        return kind(cut=self.cut, clip_norm=self.config.privacy.clip_norm)

    @property
    def secondaries(self) -> dict[int, str]:
        """Names of the secondaries by rank."""
        return {self.ranks[party.name]: party.name for party in self.config.secondaries}

    @property
    def active(self) -> int:
        """How many secondaries answer a training round."""
        return self.releases.min_active

    @property
    def average_positions_every(self) -> int:
        """Epochs between averages of positional encodings; 0 for none, as of frozen encoders."""
        return 0 if self.frozen else self.config.model.average_positions_every


def plan_run(config: FederationConfig, facts: RunFacts) -> RunPlan:
    """Decide what a run releases, with how much noise, and how it is encoded.

    Raises:
        PrivacyError: If the promise that is asked for does not hold; see also
            :func:`securevfl.config.rules.require_covered_channels`.
        EncodingRangeError: If no fixed-point format holds what is released.
    """
    releases = _releases(config, facts)
    releases.check()
    noise_share_std = releases.noise_share_std()
    slots = config.model.neighbours if releases.pooled else 1
    # The accounting speaks of rows that are means over K slots; what crosses is their sum.
    ring = RingFormat.choose(
        clip_norm=config.privacy.clip_norm * slots,
        noise_share_std=noise_share_std * slots,
        parties=len(config.secondaries),
    )
    return RunPlan(
        config=config,
        facts=facts,
        releases=releases,
        noise_share_std=noise_share_std,
        cut=Cut(ring=ring, slots=slots, shape=config.family.cut_shape(config.model)),
        ranks=config.ranks,
        training_rows=facts.train_rows,
    )


def _releases(config: FederationConfig, facts: RunFacts) -> ReleasePlan:
    training, frozen = config.training, config.privacy.encoder == "frozen"
    batch = training.batch_size
    secondaries = len(config.secondaries)
    if frozen:
        rounds, row_releases, per_row = math.ceil(facts.rows / batch), facts.rows, 1
        active = secondaries
    else:
        parts = (facts.train_rows, facts.validation_rows)
        rounds = training.epochs * sum(math.ceil(rows / batch) for rows in parts)
        rounds += math.ceil(facts.test_rows / batch)
        row_releases = training.epochs * sum(parts) + facts.test_rows
        per_row = training.epochs
        active = active_parties(config.secondaries, config.model.party_dropout)
    return ReleasePlan(
        privacy=config.privacy,
        parties=secondaries,
        min_active=active,
        rounds=rounds,
        rows_per_round=min(batch, facts.rows),
        row_releases=row_releases,
        releases_per_row=per_row,
        links=config.model.neighbours,
        pooled=_aggregation_of(config).pooled,
        contested=config.linkage.choose == "rows",
        disjoint=config.encoder is not None and config.encoder.layout == "blocks",
        fitting=config.encoder.fitting if config.encoder else None,
        rounding=0.0 if config.linkage.choose == "rows" else _projection_rounding(config),
    )


def _aggregation_of(config: FederationConfig) -> type[Aggregation]:
    """Return the aggregation that the family asks for.

    Raises:
        ConfigError: If there is none of that name, or it pools where the family does not.
    """
    family, frozen = config.family, config.privacy.encoder == "frozen"
    name = family.aggregation(config.model, frozen=frozen)
    kind = AGGREGATIONS.get(name)
    if kind is None:
        known = ", ".join(map(repr, AGGREGATIONS))
        raise ConfigError(
            f"model.family: {family.name!r} asks for the aggregation {name!r}; there are {known}"
        )
    if kind.pooled != family.pooled(config.model, frozen=frozen):
        raise ConfigError(
            f"model.family: {family.name!r} asks for the aggregation {name!r}, and only one of the "
            f"two pools a row's records"
        )
    return kind


def _projection_rounding(config: FederationConfig) -> float:
    """Return what rounding can add where a row's sum is drawn back to norm C.

    A projected sum is rounded towards zero, which moves each coordinate of two neighbouring sums
    apart by less than one unit; the ring's coarsest unit is taken, since the unit is only chosen
    once the noise is known.
    """
    _, width = config.family.cut_shape(config.model)
    return math.sqrt(width) * COARSEST_STEP / config.model.neighbours
