"""Keys of several columns with metrics and weights of their own."""

from securevfl.core.stages import StageManifest

STAGE = StageManifest(metrics={"mixed": "mixed:Mixed"})
