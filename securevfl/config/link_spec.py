"""What a federation file says about linking, as the linking stage takes it."""

import math

from securevfl.config.federation import FederationConfig
from securevfl.linkage.metrics.metric import KeySpec
from securevfl.linkage.spec import (
    ChoiceSpec,
    HidingSpec,
    LinkRoles,
    LinkSpec,
    SimilaritySpec,
    SplitSpec,
)
from securevfl.linkage.stage.linking import METRICS, PROTECTIONS


def key_spec(config: FederationConfig) -> KeySpec:
    """Return which keys are compared, and how."""
    linkage = config.linkage
    return KeySpec(
        columns=config.primary.key,
        metric=METRICS[linkage.metric],
        fields=None if linkage.fields is None else linkage.field_list(),
        missing_similarity=linkage.missing_similarity,
        ranges=linkage.ranges,
        blocking=linkage.blocking,
        fold=linkage.fold,
        spelling=linkage.spelling,
        code_bits=linkage.code_bits,
        code_concentration=linkage.code_concentration,
    )


def tells_rows(config: FederationConfig) -> bool:
    """Whether the primary is told which of its rows are linked, to learn from these alone.

    Cross-party pretraining needs that, and so does ``training.rows = "aligned"``.
    """
    pretrains = "cross" in config.family.pretraining and config.pretraining.checkpoint is None
    return pretrains or config.training.rows == "aligned"


def _max_distance(config: FederationConfig) -> float:
    limit = config.linkage.max_distance
    return min(config.family.max_distance, math.inf if limit is None else limit)


def link_spec(config: FederationConfig) -> LinkSpec:
    """Return all that linking needs; a run asks once and hands it on."""
    linkage, privacy, training = config.linkage, config.privacy, config.training
    similarities = None
    if config.family.needs_similarities(config.model):
        similarities = SimilaritySpec(noise=linkage.similarity_noise, tau=linkage.similarity_tau)
    return LinkSpec(
        keys=key_spec(config),
        hiding=HidingSpec(
            protection=linkage.protection,
            secret=linkage.secret,
            cell=linkage.cell,
            key_bits=linkage.key_bits,
        ),
        choice=ChoiceSpec(
            neighbours=config.model.neighbours,
            by=linkage.choose,
            links_per_record=privacy.links_per_record,
            sampling_rate=privacy.sampling_rate,
            once=privacy.encoder == "frozen",
            max_distance=_max_distance(config),
            least_linked=linkage.least_linked,
        ),
        roles=LinkRoles(
            primary=config.primary.name,
            secondaries=tuple(party.name for party in config.secondaries),
            helpers={
                party.role: party.name
                for party in config.callers
                if party.role in PROTECTIONS[linkage.protection].helpers
            },
        ),
        split=SplitSpec(
            seed=config.federation.seed,
            validation_fraction=training.validation_fraction,
            test_fraction=training.test_fraction,
        )
        if config.split == "random"
        else None,
        similarities=similarities,
        tells_rows=tells_rows(config),
        cache=linkage.cache,
        idle_timeout_s=config.runtime.idle_timeout_s,
        written=config.source["linkage"],
    )
