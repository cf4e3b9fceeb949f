"""Linking with all parties in one process: the same links as between processes, no cryptography."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from jaxtyping import Float32

from securevfl.data.tables import KeyTable
from securevfl.linkage.linked import LinkedPrimary, LinkedSecondary
from securevfl.linkage.metrics.metric import KeyMetric
from securevfl.linkage.secret import LinkageSecret
from securevfl.linkage.similarities import SimilarityScale
from securevfl.linkage.spec import LinkSpec
from securevfl.linking.kept_links import LinkCache
from securevfl.linking.keys import key_scaler, model_keys, read_secret, scale_of
from securevfl.linking.messages import LinkedRows, alignment_of
from securevfl.linking.protections.table import protection_of
from securevfl.linking.similar_links import stacked


class Linker:
    """Links one secondary after another to one primary, all in this process.

    Args:
        spec: What linking needs.
        primary: The primary's keys.
        data_root: Where the file with the linkage secret is found.
        secret: The linkage secret. None reads the file that the federation names, if it does and
            ``data_root`` is given; else a fresh secret does as well, since all parties are here.
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
        secret: LinkageSecret | None = None,
        folder: Path | None = None,
    ) -> None:
        if secret is None and spec.hiding.secret is not None and data_root is not None:
            secret = read_secret(spec, data_root)
        self._spec = spec
        self._keys = primary
        self._folder = folder
        self._secret = secret or LinkageSecret.fresh()
        self._protection = protection_of(spec)
        self._similarities: list[Float32[np.ndarray, "rows links"] | None] = []
        self._rows: list[LinkedRows] = []

    @property
    def primary(self) -> LinkedPrimary:
        """The primary's part, once all secondaries are linked."""
        scaler = key_scaler(self._spec, self._keys)
        return LinkedPrimary(
            keys=model_keys(scaler, self._keys),
            key_scale=scale_of(scaler),
            similarities=stacked(self._similarities),
            alignment=alignment_of(self._spec, self._rows),
        )

    def __call__(
        self, own: KeyTable, *, similarity_scale: SimilarityScale | None = None
    ) -> LinkedSecondary:
        """Link the next secondary.

        Args:
            own: Its keys.
            similarity_scale: That of its kept model; None takes it from the training rows' links.

        Raises:
            DataError: If its table can't be linked.
            ConfigError: If similarities are wanted, and the bound tau cannot be had.

        Reveals:
            Nothing leaves the process, which holds everybody's table.
        """
        spec = replace(self._spec, similarity_scale=similarity_scale)
        linked = self._protection.link_in_process(
            spec, self._keys, own, secret=self._secret, cache=self.cache(own)
        )
        self._similarities.append(linked.similarities)
        if self._spec.tells_rows:
            self._rows.append(LinkedRows(rows=linked.linked_rows(), apart=linked.apart))
        return linked

    def cache(self, own: KeyTable) -> LinkCache:
        """Return where a secondary's links are kept."""
        folder = None if self._folder is None else self._folder / own.name
        return LinkCache.of_party(self._spec, own.name, folder)

    def key(self, own: KeyTable) -> str:
        """Return the key of a secondary's links in its cache."""
        return self._protection.key(self._spec, self._keys, own, self._secret)

    def metric(self, own: KeyTable) -> KeyMetric:
        """Return what is compared under the file's protection."""
        return self._protection.compare(self._spec, self._keys, own, self._secret)
