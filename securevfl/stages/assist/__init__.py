"""Assisted boosting: residuals in the place of gradients."""

from securevfl.core.stages import StageManifest

STAGE = StageManifest(
    families={"assist": "family:AssistFamily"},
    policy="policy:AssistPolicy",
    run="parties:AssistStage",
)
