"""Assisted boosting as the federation file has it: rules, and what it shows of labels."""

from collections.abc import Iterator

from securevfl.config.federation import FederationConfig
from securevfl.config.stage_policy import NOT_COVERED, Channel, StagePolicy
from securevfl.core.errors import ConfigError
from securevfl.dp.labels import SMALLEST_EPSILON, LabelMechanism, LabelRelease
from securevfl.stages.assist.family import AssistConfig


def settings_of(config: FederationConfig) -> AssistConfig:
    """Return the ``[model]`` table of a federation file whose family is ``assist``.

    Raises:
        TypeError: If its family is another.
    """
    if not isinstance(config.model, AssistConfig):
        raise TypeError(f"model.family is assist, and not {config.family.name!r}")
    return config.model


def labels_released(config: FederationConfig) -> LabelRelease:
    """Return the release of the labels that residuals are made of."""
    epsilon = settings_of(config).label_epsilon
    gaussian = epsilon is not None and config.federation.task == "regression"
    drawn: LabelMechanism = "noised" if gaussian else "randomised"
    return LabelRelease(
        mechanism="plaintext" if epsilon is None else drawn,
        epsilon=epsilon,
        delta=config.privacy.delta if gaussian else 0.0,
        parties=len(config.secondaries),
    )


class AssistPolicy(StagePolicy):
    """Rules and disclosure of residuals."""

    def applies(self, config: FederationConfig) -> bool:
        """Return whether the family is ``assist``."""
        return isinstance(config.model, AssistConfig)

    def require(self, config: FederationConfig) -> None:
        """Refuse settings that assisted boosting has no use for, or by which labels would show.

        Raises:
            ConfigError: Naming the field, the rule and the value.
        """
        name = config.family.name
        if config.regime.caps_records:
            raise ConfigError(
                f"privacy.encoder: {name!r} fits models in rounds, and none is "
                f'{config.privacy.encoder}; write encoder = "trained"'
            )
        _require_labels_covered(config)

    def why_noise_fails(self, config: FederationConfig) -> str:
        """Return that scores have no noise."""
        return (
            f"model.family: {config.family.name!r} releases scores of models that are fitted to "
            f"private records without noise, so no epsilon would cover them; set "
            f'privacy.mechanism = "none", or take frozen encoders (family = "fet", '
            f'privacy.encoder = "frozen")'
        )

    def why_all_take_part(self, config: FederationConfig) -> str:
        """Return that each secondary's models explain what the others leave."""
        return (
            f"with {config.family.name!r} every secondary's part of the model is what the others "
            f"have left to explain, and lies with it alone"
        )

    def label_release(self, config: FederationConfig) -> LabelRelease:
        """Return the labels that residuals are made of."""
        return labels_released(config)

    def channels(self, config: FederationConfig) -> Iterator[Channel]:
        """Yield what residuals and steps show of labels."""
        if config.label_epsilon is None:
            yield Channel(
                "residuals",
                f"every secondary: what is left to explain of every training row's label, up to "
                f"{config.epochs} times, from which labels can be read; each round's step, and "
                f"which round was the best",
                NOT_COVERED,
                "primary",
                "secondaries",
            )
            return
        yield Channel(
            "residuals",
            f"every secondary: what is left to explain of labels that are drawn once a run, up to "
            f"{config.epochs} times; each round's step, and when a round brings nothing",
            f"covered by label_epsilon = {config.label_epsilon:g}, against all secondaries "
            f"together",
            "primary",
            "secondaries",
        )


def label_range(settings: AssistConfig) -> tuple[float, float]:
    """Return the range of a regression's labels under an epsilon.

    Raises:
        ConfigError: If an end is missing, or the upper one is not above the lower one.
    """
    lower, upper = settings.label_lower, settings.label_upper
    if lower is None or upper is None:
        name = "label_lower" if lower is None else "label_upper"
        raise ConfigError(
            f"model.{name}: is missing; with model.label_epsilon write the range of a "
            f"regression's labels, from what is known of them and not from the table"
        )
    if not lower < upper:
        raise ConfigError("model.label_upper: must be above model.label_lower")
    return lower, upper


def _require_labels_covered(config: FederationConfig) -> None:
    """Refuse settings under which an epsilon of labels would not hold, or has no meaning."""
    settings = settings_of(config)
    regression = config.federation.task == "regression"
    if settings.label_epsilon is None or not regression:
        for name in ("label_lower", "label_upper"):
            if getattr(settings, name) is not None:
                raise ConfigError(
                    f"model.{name}: bounds what one label of a regression says under "
                    f"model.label_epsilon; leave it out"
                )
    if settings.label_epsilon is None:
        return
    if settings.label_epsilon < SMALLEST_EPSILON:
        raise ConfigError(
            f"model.label_epsilon: must be at least {SMALLEST_EPSILON:g}, got "
            f"{settings.label_epsilon!r}; below it nothing is left of labels"
        )
    if regression:
        label_range(settings)
