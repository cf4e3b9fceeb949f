"""Class means: the stage in which encoders are fitted to sums of records by class."""

from securevfl.core.stages import Stage

STAGE = Stage(policy="policy:ClassMeansPolicy", run="stage:ClassMeansStage")
