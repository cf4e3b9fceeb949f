"""Where a secondary's rounds get their links from, as the federation file chooses."""

import numpy as np
from jaxtyping import Float64

from securevfl.data.tables import PartyTable
from securevfl.federation.config import FederationConfig
from securevfl.federation.secondary import (
    FixedLinks,
    FreshlySampledLinks,
    LinkSource,
    PickedLinks,
)
from securevfl.linkage.capped import eligible_pairs
from securevfl.linkage.metrics import EuclideanKeys
from securevfl.linkage.sampling import PoissonSampler, SampledLinker


def link_source(
    config: FederationConfig,
    table: PartyTable,
    primary_keys: Float64[np.ndarray, "rows dimension"],
) -> LinkSource:
    """Link by distance, under the cap and from the secret samples that the promise rests on.

    Raises:
        DataError: If keys are not what the metric needs.
    """
    frozen = config.privacy.encoder == "frozen"
    rate = config.privacy.sampling_rate
    if config.linkage.choose == "records":
        assert config.privacy.links_per_record is not None, "checked with the federation file"
        metric = EuclideanKeys(primary=primary_keys, records=table.keys)
        pairs = eligible_pairs(metric, cap=config.privacy.links_per_record)
        return PickedLinks(pairs=pairs, sample=PoissonSampler(table.num_rows, rate).draw())
    linker = SampledLinker(
        primary_keys,
        table.keys,
        config.model.neighbours,
        rate=rate,
        cap=config.privacy.links_per_record,
        # All rows are linked once: a search costs less than a list to filter.
        method="rebuild" if frozen else "auto",
    )
    sampler = PoissonSampler(table.num_rows, rate)
    if rate < 1 and not frozen:
        return FreshlySampledLinks(linker=linker, sampler=sampler)
    # A frozen encoder answers each row once, from one sample for the whole pass.
    rows = np.arange(len(primary_keys), dtype=np.int64)
    return FixedLinks(table=linker.link(rows, sampler.draw()))
