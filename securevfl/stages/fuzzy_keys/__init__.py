"""Keys that are alike rather than equal: texts by their edits, and columns of several kinds."""

from securevfl.core.stages import StageManifest

STAGE = StageManifest(metrics={"levenshtein": "edits:Levenshtein", "mixed": "mixed:Mixed"})
