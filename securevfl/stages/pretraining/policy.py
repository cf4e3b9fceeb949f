"""Pretraining as the federation file has it: rules, and what its exchanges show."""

from collections.abc import Iterator

from securevfl.config.federation import FederationConfig
from securevfl.config.stage_policy import NOT_COVERED, Channel, StagePolicy
from securevfl.core.errors import ConfigError


class PretrainingPolicy(StagePolicy):
    """Rules and disclosure of families that pretrain."""

    def applies(self, config: FederationConfig) -> bool:
        """Return whether the family pretrains."""
        return bool(config.family.pretraining)

    def require(self, config: FederationConfig) -> None:
        """Refuse an estimator in the place of the network that is pretrained.

        Raises:
            ConfigError: If the top model is one.
        """
        if config.top is not None and not config.regime.learns:
            raise ConfigError(
                f'model.top: "{config.top.name}" takes the place of the network that '
                f"{config.family.name!r} pretrains; choose a family without pretraining"
            )

    def why_noise_fails(self, config: FederationConfig) -> str | None:
        """Return that encoders that do not train were pretrained without noise."""
        regime, name = config.regime, config.family.name
        if not regime.caps_records:
            return None
        return (
            f"model.family: {name!r} pretrains encoders on private records without noise, so they "
            f"are not {regime.name} in the sense of the promise; use encoder = "
            f'"trained", or "fedsplitnn"'
        )

    def why_rows_stay_secret(self, config: FederationConfig) -> str:
        """Return that projections of aligned rows carry no noise."""
        return _without_noise(config, "averages of projections")

    def channels(self, config: FederationConfig) -> Iterator[Channel]:
        """Yield what pretraining exchanges."""
        if "cross" in config.family.pretraining:
            yield from _projections(config)
        if "aggregate" in config.family.pretraining:
            yield _aggregation(config)


def _without_noise(config: FederationConfig, what: str) -> str:
    return (
        f"model.family: {config.family.name!r} exchanges {what} in pretraining, which carry no "
        f'noise, so epsilon would not cover them; use family = "fedlocalssl", which exchanges '
        f'nothing, or mechanism = "none"'
    )


def _projections(config: FederationConfig) -> Iterator[Channel]:
    """Yield what projections of aligned rows show."""
    settings = config.pretraining
    each = len(config.secondaries) == 1 or settings.exchange == "plain"
    seen = "each secondary's" if each else "the average of the secondaries'"
    yield Channel(
        "pretraining, to the primary",
        f"{seen} unit vectors for every aligned row",
        NOT_COVERED,
        "secondaries",
        "primary",
        refusal=_without_noise(config, "averages of projections"),
    )
    yield Channel(
        "pretraining, from the primary",
        "every secondary: the primary's unit vectors of every aligned row, made without labels; "
        "and which rows are held out",
        NOT_COVERED,
        "primary",
        "secondaries",
    )


def _aggregation(config: FederationConfig) -> Channel:
    """Return what means of local top encoders show."""
    covered = "heuristic: a secure mean without noise"
    if len(config.secondaries) == 1:
        covered = "not covered: with one secondary the mean gives its weights away"
    return Channel(
        "pretraining, aggregation of models",
        "every party: the mean of all parties' local top encoders and heads",
        covered,
        "all",
        "all",
        refusal=_without_noise(config, "means of weights"),
    )
