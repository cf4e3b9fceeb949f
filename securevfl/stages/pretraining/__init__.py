"""Self-supervised pretraining of encoders (FedHSSL): the stage before rounds."""

from securevfl.core.stages import StageManifest

STAGE = StageManifest(
    learners={"fedhssl": "learner:build_learner"},
    policy="policy:PretrainingPolicy",
    run="stage:PretrainingStage",
)
