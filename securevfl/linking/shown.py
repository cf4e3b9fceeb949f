"""Linkage without protection: the primary shows its keys, and every secondary links by itself."""

from dataclasses import dataclass

from securevfl.data.scaling import KeyScaler
from securevfl.data.tables import KeyTable
from securevfl.linkage.linked import LinkedPrimary, LinkedSecondary
from securevfl.linkage.metrics.metric import KeyMetric
from securevfl.linkage.spec import LinkSpec
from securevfl.linking.kept_links import LinkCache, links_key
from securevfl.linking.keys import key_scaler, model_keys
from securevfl.linking.links_of_party import link_by_itself


@dataclass(frozen=True, kw_only=True, eq=False)
class ShownKeys:
    """What the primary shows for linkage when keys are unprotected."""

    keys: KeyTable
    """The primary's keys, in their own units."""

    scaler: KeyScaler | None
    """Common statistics of keys, so that one place stays one place; None for texts."""


def shown_keys(spec: LinkSpec, keys: KeyTable) -> ShownKeys:
    """Return what the primary shows to every secondary under ``protection = "none"``.

    Reveals:
        Nothing yet; once sent, the primary's keys.
    """
    return ShownKeys(keys=keys, scaler=key_scaler(spec.keys, keys))


def linked_primary(shown: ShownKeys) -> LinkedPrimary:
    """Return the primary's end of a linkage without protection and without similarities."""
    return LinkedPrimary(keys=model_keys(shown.scaler, shown.keys))


def plain_metric(spec: LinkSpec, primary: KeyTable, records: KeyTable) -> KeyMetric:
    """Return both parties' keys with the distance between them, where both may be seen.

    Raises:
        DataError: If keys are not what the metric needs.
    """
    return spec.keys.metric.compare(spec.keys, primary, records, neighbours=spec.choice.neighbours)


def link_shown(
    spec: LinkSpec, own: KeyTable, shown: ShownKeys, cache: LinkCache
) -> LinkedSecondary:
    """Link a secondary's records to the keys that the primary has shown.

    Args:
        spec: What linking needs.
        own: The secondary's keys.
        shown: The primary's.
        cache: Where links are kept.

    Raises:
        DataError: If its table can't be linked: keys of another dimension.
        ConfigError: If similarities are wanted, and the bound tau cannot be had.
    """
    return link_by_itself(
        spec,
        own,
        plain_metric(spec, shown.keys, own),
        shown.scaler,
        cache=cache,
        key=links_key(spec, shown.keys, own),
    )
