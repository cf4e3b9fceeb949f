"""Runs that go on without a secondary: which of them can, and with how few."""

from securevfl.config.federation import FederationConfig
from securevfl.core.errors import ConfigError


def goes_on(config: FederationConfig) -> bool:
    """Whether training goes on without a secondary that is lost."""
    return config.runtime.on_loss == "continue"


def helpers_stay(config: FederationConfig) -> bool:
    """Whether a coordinator or dealer stays to the run's end: who is lost is linked once more."""
    return config.runtime.on_loss == "wait"


def keeps_room(config: FederationConfig) -> bool:
    """Whether the plan covers one pass over the rows, and one over the test rows, more than needed.

    A loss within the last epoch, or once test rows are charged, takes as much: a run that goes on
    by itself can then still test what it has trained.
    """
    privacy = config.privacy
    budgeted = privacy.mechanism != "none" and privacy.accounting == "sound"
    return config.runtime.on_loss != "stop" and budgeted and privacy.encoder != "frozen"


def least_in_training(config: FederationConfig) -> int:
    """Return how few secondaries a session of training may have; noise is made for so few.

    All of them, where a run does not go on without one. Else ``runtime.least_secondaries``, by
    default all but one, and at least two that follow the protocol beside those that collude: the
    sum of one such secondary and of colluding ones would be its own numbers.
    """
    everybody = len(config.secondaries)
    if not goes_on(config):
        return everybody
    told = config.runtime.least_secondaries
    return max(everybody - 1, config.privacy.colluding + 2) if told is None else told


def require_continuable(config: FederationConfig) -> None:
    """Refuse ``on_loss = "continue"`` where a run could not go on, or a promise would not hold.

    Raises:
        ConfigError: Naming the reason and what to write instead.
    """
    if not goes_on(config):
        return
    reason = _why_not(config)
    if reason is not None:
        raise ConfigError(
            f'runtime.on_loss: "continue" is not offered here: {reason}; write on_loss = "wait"'
        )
    _require_enough(config)


def _why_not(config: FederationConfig) -> str | None:
    """Return why no party can be left out, if none can."""
    helpers = [party.role for party in config.parties if party.is_helper]
    if config.privacy.encoder == "frozen":
        return (
            "frozen encoders release each row once, with all secondaries in it, and a row that "
            "lacks one could never be asked for again"
        )
    if config.family.assisted:
        return (
            f"with {config.family.name!r} every secondary's part of the model is what the others "
            f"have left to explain, and lies with it alone"
        )
    if config.family.pretraining:
        return f"{config.family.name!r} pretrains encoders, which takes all parties"
    if config.training.rows == "aligned":
        return (
            'training.rows = "aligned" are rows that are linked at every secondary, and would be '
            "others without one"
        )
    if config.family.needs_similarities(config.model):
        return (
            f"{config.family.name!r} reads similarities of every secondary, which are noised once, "
            f"for all"
        )
    if helpers:
        return (
            f"the {helpers[0]} leaves when links are made, and a session without the lost party "
            f"would need it again; or choose a linkage.protection without a helper"
        )
    return None


def _require_enough(config: FederationConfig) -> None:
    """Refuse numbers under which nobody may be missing, or one would be seen by itself."""
    everybody, colluding = len(config.secondaries), config.privacy.colluding
    noised = config.privacy.mechanism != "none"
    told, least = config.runtime.least_secondaries, least_in_training(config)
    enough = colluding + (1 if noised else 2)
    if least < enough:
        raise ConfigError(
            f"runtime.least_secondaries: must be at least {enough} with privacy.colluding = "
            f"{colluding}{'' if noised else ' and no noise'}, got {least}; with fewer the sum "
            f"would be one secondary's own numbers"
        )
    if least < everybody:
        return
    if told is None and enough < everybody:
        raise ConfigError(
            f"runtime.least_secondaries: by default {least} must stay, and there are {everybody}; "
            f"write {enough} if all agree that one secondary's numbers may be hidden by its own "
            f'noise alone, or on_loss = "wait"'
        )
    raise ConfigError(
        f"runtime.least_secondaries: {least} must stay, and there are {everybody} secondaries, so "
        f'none could ever be missing; write on_loss = "wait"'
    )
