"""Class means: the stage in which encoders are fitted to sums of records by class."""

from securevfl.core.stages import StageManifest

STAGE = StageManifest(
    families={"class-means": "family:ClassMeansFamily"},
    policy="policy:ClassMeansPolicy",
    run="stage:ClassMeansStage",
)
