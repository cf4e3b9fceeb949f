"""Self-supervised pretraining of encoders (FedHSSL): the stage before supervised rounds."""

from securevfl.core.stages import StageManifest

STAGE = StageManifest(policy="policy:PretrainingPolicy", run="stage:PretrainingStage")
