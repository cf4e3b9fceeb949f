"""Private set intersection of exact keys."""

from securevfl.core.stages import StageManifest

STAGE = StageManifest(protections={"psi": "psi:Psi"})
