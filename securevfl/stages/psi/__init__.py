"""Private set intersection of exact keys."""

from securevfl.core.stages import Stage

STAGE = Stage(protections={"psi": "psi:Psi"})
