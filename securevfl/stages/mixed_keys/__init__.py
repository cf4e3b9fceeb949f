"""Keys of several columns with metrics and weights of their own."""

from securevfl.core.stages import Stage

STAGE = Stage(metrics={"mixed": "mixed:Mixed"})
