"""The family of assisted boosting."""

from torch import nn

from securevfl.core.errors import ConfigError
from securevfl.models import family
from securevfl.stages.assist.halves import AssistBottom, AssistTop
from securevfl.stages.assist.settings import AssistConfig


class AssistFamily(family.Family[AssistConfig]):
    """``family = "assist"``: secondaries fit residuals, the primary adds the sum of their scores.

    Similar to Assisted Learning (Xian et al., 2020) and Gradient Assisted Learning (Diao et al.,
    NeurIPS 2022); docs/assist.md says where it is another one.
    """

    name = "assist"
    settings_class = AssistConfig
    learns_by_gradients = False

    def build_bottom(self, settings: AssistConfig, **_: object) -> nn.Module:
        """Return a bottom model before the first round: every score is zero."""
        return AssistBottom(settings)

    def build_top(self, settings: AssistConfig, *, outputs: int, **_: object) -> nn.Module:
        """Return a top model before the first round."""
        return AssistTop(outputs)

    def epochs(self, settings: AssistConfig, *, asked: int) -> int:
        """Return the number of rounds; each is an epoch."""
        return settings.rounds

    def label_epsilon(self, settings: AssistConfig) -> float | None:
        """Return epsilon of a training row's label against secondaries; None if not bounded."""
        return settings.label_epsilon

    def require_outputs(self, settings: AssistConfig, outputs: int) -> None:
        """Refuse a width of scores that does not fit the labels.

        Raises:
            ConfigError: With the correct width.
        """
        if settings.outputs != outputs:
            raise ConfigError(
                f"model.outputs: is {settings.outputs}, and the label asks for {outputs}; write "
                f"model.outputs = {outputs}, which all parties plan by"
            )
