"""Linking with all parties in one process: the same links as between processes, no cryptography."""

from pathlib import Path

import numpy as np
from jaxtyping import Float32

from securevfl.data.tables import KeyTable
from securevfl.linkage.linked import LinkedPrimary, LinkedSecondary
from securevfl.linkage.metrics.bloom import CodeKeys, encode
from securevfl.linkage.metrics.metric import KeyMetric
from securevfl.linkage.secret import LinkageSecret
from securevfl.linkage.spec import LinkSpec
from securevfl.linking.candidates import find_candidates
from securevfl.linking.kept_links import LinkCache, links_key
from securevfl.linking.key_metric import linkage_secret, quantised_metric
from securevfl.linking.keys import key_scaler, model_keys
from securevfl.linking.links_of_party import coordinate, link_from_candidates
from securevfl.linking.shown import link_shown, plain_metric, shown_keys


class Linker:
    """Links one secondary after another to one primary, all in this process.

    Args:
        spec: What linking needs.
        primary: The primary's keys.
        data_root: Where the file with the linkage secret is found; without one, a fresh secret
            does as well, since all parties are in this process.
        folder: The run's folder of parties, where links are kept; None keeps none.

    Raises:
        ConfigError: If the secret cannot be read.
        DataError: If the primary's keys can't be linked.
    """

    def __init__(
        self,
        spec: LinkSpec,
        primary: KeyTable,
        *,
        data_root: Path | None = None,
        folder: Path | None = None,
    ) -> None:
        self._spec = spec
        self._keys = primary
        self._folder = folder
        self._secret = LinkageSecret.fresh()
        if spec.hiding.secret is not None and data_root is not None:
            self._secret = linkage_secret(spec, data_root)
        self._scaler = key_scaler(spec.keys, primary)
        self._similarities: list[Float32[np.ndarray, "rows links"] | None] = []

    @property
    def primary_keys(self) -> KeyTable:
        """The primary's keys, as they were given."""
        return self._keys

    @property
    def primary(self) -> LinkedPrimary:
        """The primary's part, once all secondaries are linked."""
        return LinkedPrimary(
            keys=model_keys(self._scaler, self._keys), similarities=stacked(self._similarities)
        )

    def __call__(self, own: KeyTable) -> LinkedSecondary:
        """Link the next secondary.

        Raises:
            DataError: If its table can't be linked.
            ConfigError: If similarities are wanted, and the bound tau cannot be had.

        Reveals:
            Nothing leaves the process, which holds everybody's table.
        """
        linked = self._link(own)
        self._similarities.append(linked.similarities)
        return linked

    def _link(self, own: KeyTable) -> LinkedSecondary:
        spec = self._spec
        if spec.hiding.protection == "none":
            return link_shown(spec, own, shown_keys(spec, self._keys), self.cache(own))
        metric = self.metric(own)
        candidates, similar = coordinate(
            spec,
            lambda: find_candidates(spec, metric),
            cache=self.cache(own),
            key=self.key(own),
        )
        return link_from_candidates(
            spec,
            own,
            candidates,
            self._scaler,
            rows=self._keys.num_rows,
            similarities=None if similar is None else similar.values,
        )

    def cache(self, own: KeyTable) -> LinkCache:
        """Return where a secondary's links are kept."""
        folder = None if self._folder is None else self._folder / own.name
        return LinkCache.of_party(self._spec, own.name, folder)

    def key(self, own: KeyTable) -> str:
        """Return the key of a secondary's links in its cache."""
        coded = self._spec.hiding.protection == "bloom"
        secret = self._secret.check_value("cache") if coded else ""
        return links_key(self._spec, self._keys, own, secret=secret)

    def metric(self, own: KeyTable) -> KeyMetric:
        """Return what is compared under the file's protection."""
        spec = self._spec
        if spec.hiding.protection == "none":
            return plain_metric(spec, self._keys, own)
        if spec.hiding.protection == "bloom":
            return CodeKeys(
                primary=encode(spec.keys, self._keys, self._secret),
                records=encode(spec.keys, own, self._secret),
            )
        return quantised_metric(spec.keys, self._keys, own)


def stacked(
    parts: list[Float32[np.ndarray, "rows links"] | None],
) -> Float32[np.ndarray, "rows secondaries links"] | None:
    """Put the similarities of all secondaries side by side; None if there are none."""
    given = [part for part in parts if part is not None]
    return np.stack(given, axis=1) if given else None
