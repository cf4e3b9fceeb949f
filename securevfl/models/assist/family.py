"""Assisted boosting as a family."""

from collections.abc import Sequence

from torch import nn

from securevfl.core.errors import ConfigError
from securevfl.models.assist.halves import AssistBottom, AssistTop
from securevfl.models.assist.settings import AssistConfig
from securevfl.models.family import Family


class AssistFamily(Family[AssistConfig]):
    """``family = "assist"``: residuals go out, and the sum of the secondaries' scores comes back.

    It is of the kind of Assisted Learning (Xian et al., 2020) and Gradient Assisted Learning (Diao
    et al., NeurIPS 2022); docs/assist.md says where it is another one.
    """

    name = "assist"
    settings_class = AssistConfig
    assisted = True

    def build_bottom(
        self,
        settings: AssistConfig,
        *,
        num_features: int,  # noqa: ARG002
        key_dim: int,  # noqa: ARG002
        feature_names: Sequence[str] = (),  # noqa: ARG002
        frozen: bool = False,  # noqa: ARG002
    ) -> nn.Module:
        """Return a secondary's half before the first round: every score is zero."""
        return AssistBottom(settings)

    def build_top(
        self,
        settings: AssistConfig,  # noqa: ARG002
        *,
        num_features: int,  # noqa: ARG002
        key_dim: int,  # noqa: ARG002
        feature_names: Sequence[str] = (),  # noqa: ARG002
        outputs: int,
        classes: bool = False,  # noqa: ARG002
    ) -> nn.Module:
        """Return the primary's half before the first round."""
        return AssistTop(outputs)

    def epochs(self, settings: AssistConfig, *, asked: int) -> int:  # noqa: ARG002
        """Return the rounds: each is an epoch of the protocol."""
        return settings.rounds

    def label_epsilon(self, settings: AssistConfig) -> float | None:
        """Return what secondaries may learn of one training row's label; None promises nothing."""
        return settings.label_epsilon

    def require_outputs(self, settings: AssistConfig, outputs: int) -> None:
        """Refuse a width of scores that is not that of the labels.

        Raises:
            ConfigError: Saying what to write.
        """
        if settings.outputs != outputs:
            raise ConfigError(
                f"model.outputs: is {settings.outputs}, and the label asks for {outputs}; write "
                f"model.outputs = {outputs}, which all parties plan by"
            )
