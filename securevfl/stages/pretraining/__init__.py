"""Self-supervised pretraining of encoders (FedHSSL): its families, and the stage before rounds."""

from securevfl.core.stages import StageManifest

STAGE = StageManifest(
    families={
        "fedhssl": "family:FedHSSLFamily",
        "fedgssl": "family:FedGSSLFamily",
        "fedcssl": "family:FedCSSLFamily",
        "fedlocalssl": "family:FedLocalSSLFamily",
        "fedsplitnn": "family:FedSplitNNFamily",
    },
    policy="policy:PretrainingPolicy",
    run="stage:PretrainingStage",
)
