"""What becomes of distances: kept links, a source for a secondary's rounds, similarities."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Float32

from securevfl.data.scaling import KeyScaler
from securevfl.data.tables import KeyTable
from securevfl.linkage.linked import LinkedSecondary
from securevfl.linkage.links import LinkTable
from securevfl.linkage.metrics.metric import KeyMetric
from securevfl.linkage.sources import FixedLinks, LinkSource
from securevfl.linkage.spec import LinkSpec
from securevfl.linking.candidates import Candidates, find_candidates
from securevfl.linking.kept_links import KeptLinks, LinkCache, may_be_kept
from securevfl.linking.keys import model_keys
from securevfl.linking.similarities import SimilarLinks, similar_links
from securevfl.linking.sources import source_of_candidates, source_of_metric


def link_by_itself(
    spec: LinkSpec,
    own: KeyTable,
    metric: KeyMetric,
    scaler: KeyScaler | None,
    *,
    cache: LinkCache,
    key: str,
) -> LinkedSecondary:
    """Link where the secondary knows all distances, as without protection.

    Raises:
        DataError: If keys are not what the metric needs.
        ConfigError: If similarities are wanted, and the bound tau cannot be had.
    """
    similar = None
    if may_be_kept(spec):
        kept = cache.get(key, lambda: keep(spec, lambda: find_candidates(spec, metric)))
        similar = kept.similar
        source: LinkSource = FixedLinks(table=kept.links if similar is None else similar.links)
    else:
        source = source_of_metric(spec, metric)
        if spec.similarities is not None:
            assert isinstance(source, FixedLinks), "checked with the federation file"
            similar = similar_links(spec, source.table)
            source = FixedLinks(table=similar.links)
    linked = LinkedSecondary(
        source=source,
        keys=model_keys(scaler, own),
        primary_rows=metric.num_rows,
        figures=_figures(metric.num_rows, own.num_rows, source) | dict(metric.figures()),
    )
    if similar is None:
        return linked
    figures = {**linked.figures, "similarities": similar.figures()}
    return replace(linked, similarities=similar.values, figures=figures)


def link_from_candidates(
    spec: LinkSpec,
    own: KeyTable,
    candidates: Candidates,
    scaler: KeyScaler | None,
    *,
    rows: int,
    similarities: Float32[np.ndarray, "rows links"] | None = None,
) -> LinkedSecondary:
    """Link where a coordinator has found the candidates; the secondary knows no distance."""
    source = source_of_candidates(spec, candidates, rows=rows, records=own.num_rows)
    return LinkedSecondary(
        source=source,
        keys=model_keys(scaler, own),
        primary_rows=rows,
        similarities=similarities,
        figures=_figures(rows, own.num_rows, source),
    )


def keep(spec: LinkSpec, find: Callable[[], Candidates]) -> KeptLinks:
    """Find the K nearest candidates of every row and make similarities where they are wanted.

    Raises:
        DataError: If keys are not what the metric needs, or all distances are equal.
        ConfigError: If the bound tau cannot be had.
    """
    links = all_links(spec, find())
    return KeptLinks(
        links=links, similar=similar_links(spec, links) if spec.similarities is not None else None
    )


def coordinate(
    spec: LinkSpec, find: Callable[[], Candidates], *, cache: LinkCache, key: str
) -> tuple[Candidates, SimilarLinks | None]:
    """Do a coordinator's part: find candidates and, where wanted, make similarities.

    Returns:
        What the secondary gets, which tells it an order but no distance, and what the primary gets.

    Raises:
        DataError: If keys are not what the metric needs.
        ConfigError: If the bound tau cannot be had.
    """
    if not may_be_kept(spec):
        return find().without_distances(), None
    kept = cache.get(key, lambda: keep(spec, find))
    links = kept.links if kept.similar is None else kept.similar.links
    return Candidates(ranked=links).without_distances(), kept.similar


def all_links(spec: LinkSpec, found: Candidates) -> LinkTable:
    """Return the K nearest candidates of every row, whatever is sampled later."""
    return found.link(np.arange(found.num_rows), None, k=spec.choice.neighbours)


def _figures(rows: int, records: int, source: LinkSource) -> dict[str, Any]:
    figures: dict[str, Any] = {"rows": rows, "records": records}
    if isinstance(source, FixedLinks):
        present = source.table.present
        figures["links"] = int(present.sum())
        figures["rows_without_links"] = int((~present.any(axis=1)).sum())
        figures["most_uses_of_a_record"] = source.table.most_uses(records)
    return figures
