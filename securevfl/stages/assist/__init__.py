"""Assisted boosting: residuals in the place of gradients."""

from securevfl.core.stages import Stage

STAGE = Stage(
    families={"assist": "family:AssistFamily"},
    policy="policy:AssistPolicy",
    run="stage:AssistStage",
)
