"""Keyed hashes and Bloom filters of text keys."""

from securevfl.core.stages import StageManifest

STAGE = StageManifest(
    metrics={"bloom": "codes:Bloom"},
    protections={"bloom": "by_codes:BloomProtection", "hashes": "by_codes:Hashes"},
)
