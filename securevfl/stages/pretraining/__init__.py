"""Self-supervised pretraining of encoders (FedHSSL): the stage before supervised rounds."""

from securevfl.core.stages import Stage

STAGE = Stage(policy="policy:PretrainingPolicy", run="stage:PretrainingStage")
