"""What a run will do: its rows, its releases and the format of what crosses the cut."""

import math
from dataclasses import dataclass

from securevfl.config.federation import FederationConfig
from securevfl.core.errors import (
    DataError,
)
from securevfl.data.rows import RowSplit, split_rows
from securevfl.data.tables import PartyTable
from securevfl.dp.release_plan import ReleasePlan
from securevfl.federation.rounds import active_parties
from securevfl.mpc.ring_format import COARSEST_STEP, RingFormat


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


def is_frozen(config: FederationConfig) -> bool:
    """Whether bottom models stay as they are and every row is released once."""
    return config.privacy.encoder == "frozen"


def release_plan(config: FederationConfig, facts: RunFacts) -> ReleasePlan:
    """Return everything that the run will release, for the accounting.

    Raises:
        PrivacyError: If the promise that is asked for does not hold; see also
            :func:`federation.preflight.require_covered_channels`.
    """
    training, privacy = config.training, config.privacy
    batch = training.batch_size
    secondaries = len(config.secondaries)
    if is_frozen(config):
        rounds, row_releases, per_row = math.ceil(facts.rows / batch), facts.rows, 1
        active = secondaries
    else:
        parts = (facts.train_rows, facts.validation_rows)
        rounds = training.epochs * sum(math.ceil(rows / batch) for rows in parts)
        rounds += math.ceil(facts.test_rows / batch)
        row_releases = training.epochs * sum(parts) + facts.test_rows
        per_row = training.epochs
        active = active_parties(config.secondaries, config.model.party_dropout)
    plan = ReleasePlan(
        privacy=privacy,
        parties=secondaries,
        min_active=active,
        rounds=rounds,
        rows_per_round=min(batch, facts.rows),
        row_releases=row_releases,
        releases_per_row=per_row,
        links=config.model.neighbours,
        pooled=config.family.pooled(config.model, frozen=is_frozen(config)),
        contested=config.linkage.choose == "rows",
        disjoint=config.encoder is not None and config.encoder.layout == "blocks",
        fitting=config.encoder.fitting if config.encoder else None,
        rounding=0.0 if config.linkage.choose == "rows" else _projection_rounding(config),
    )
    plan.check()
    return plan


def _projection_rounding(config: FederationConfig) -> float:
    """Return what rounding can add where a row's sum is drawn back to norm C.

    A projected sum is rounded towards zero, which moves each coordinate of two neighbouring sums
    apart by less than one unit; the ring's coarsest unit is taken, since the unit is only chosen
    once the noise is known.
    """
    _, width = cut_shape(config)
    return math.sqrt(width) * COARSEST_STEP / config.model.neighbours


def ring_format(config: FederationConfig, plan: ReleasePlan) -> RingFormat:
    """Return the fixed-point format that all parties use."""
    scale = slots(config, plan)
    return RingFormat.choose(
        clip_norm=config.privacy.clip_norm * scale,
        noise_share_std=plan.noise_share_std() * scale,
        parties=len(config.secondaries),
    )


def cut_shape(config: FederationConfig) -> tuple[int, int]:
    """Return (L, H), the shape of one row's aggregate."""
    return config.family.cut_shape(config.model)


def slots(config: FederationConfig, plan: ReleasePlan) -> int:
    """Return how many slots one released row is the sum of: K where they are pooled."""
    return config.model.neighbours if plan.pooled else 1
