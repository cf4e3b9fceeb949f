"""Keys become hashes under a secret that the coordinator does not have: it sees which are equal."""

import hmac
from collections.abc import Iterator, Mapping
from typing import ClassVar, Final

import numpy as np

from securevfl.core.errors import ConfigError
from securevfl.data.tables import KeyTable
from securevfl.linkage.metrics.exact import ExactKeys, exact_texts, numbered_keys
from securevfl.linkage.metrics.metric import KeySpec
from securevfl.linkage.secret import LinkageSecret
from securevfl.linkage.spec import LinkSpec
from securevfl.linking.protections.bloom import ByCodes, Bytes

_HASH_BYTES: Final = 32


class Hashes(ByCodes):
    """HMAC-SHA256 of exact keys: equal keys are linked, and of others nothing can be compared."""

    name: ClassVar[str] = "hashes"
    learned: ClassVar[Mapping[str, str]] = {
        "primary": "nothing of a secondary's records",
        "secondary": "for each primary row, which of its own records have the same key: so the "
        "keys of the rows that it shares with the primary, and that it has no record of the others",
        "coordinator": "which keys are equal, within a table and between tables, and how often "
        "each occurs; nothing else of a key. Without the linkage secret it cannot hash guesses",
    }

    def check(self, keys: KeySpec) -> None:
        """Ask for a metric of equal keys alone."""
        if not keys.metric.equal_only:
            raise ConfigError(
                f'linkage.protection: "{self.name}" finds equal keys alone and goes with '
                f'metric = "exact"; for {keys.metric.name!r} use "bloom"'
            )
        super().check(keys)

    def encode(self, spec: LinkSpec, keys: KeyTable, secret: LinkageSecret) -> Bytes:
        """Return a hash a row; that of a missing key equals no other, and looks like any."""
        raw = b"".join(self._hashes(spec.keys, keys, secret))
        return np.frombuffer(raw, dtype=np.uint8).reshape(-1, _HASH_BYTES)

    def code_bytes(self, spec: LinkSpec) -> int:  # noqa: ARG002
        """Return the length of a hash."""
        return _HASH_BYTES

    def compare_codes(self, rows: Bytes, records: Bytes) -> ExactKeys:
        """Ask which hashes are equal."""
        return numbered_keys(_cut(rows), _cut(records))

    def _hashes(self, spec: KeySpec, keys: KeyTable, secret: LinkageSecret) -> Iterator[bytes]:
        there, missing = secret.subkey("hashes"), secret.subkey("hashes", "missing", keys.name)
        for row, text in enumerate(exact_texts(spec, keys)):
            key, words = (missing, str(row)) if text is None else (there, text)
            # A lone surrogate is no UTF-8, but may stand in a text that Python read.
            yield hmac.digest(key, words.encode(errors="surrogatepass"), "sha256")


def _cut(codes: Bytes) -> list[bytes]:
    raw = codes.tobytes()
    return [raw[start : start + _HASH_BYTES] for start in range(0, len(raw), _HASH_BYTES)]
