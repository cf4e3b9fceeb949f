"""When masks may be shared with a few neighbours instead of all other secondaries."""

from typing import Final

from securevfl.config.federation import FederationConfig
from securevfl.core.errors import ConfigError

LARGEST_COMPLETE: Final = 16
"""Up to so many secondaries all share masks with all: key streams are a few milliseconds then."""


def require_maskable(config: FederationConfig) -> None:
    """Check that the federation is large enough for the masks that its file asks for.

    Raises:
        ConfigError: Saying what to write instead.
    """
    degree, secondaries = config.privacy.mask_degree, len(config.secondaries)
    if degree is None:
        return
    if secondaries <= LARGEST_COMPLETE:
        raise ConfigError(
            f"privacy.mask_degree: is offered from {LARGEST_COMPLETE + 1} secondaries on, and "
            f"these are {secondaries}; leave it out, and all of them share masks with all"
        )
    if degree >= secondaries - 1:
        raise ConfigError(
            f"privacy.mask_degree: {degree} are all the others of {secondaries} secondaries; "
            f"leave it out, or write an even number of at most {(secondaries - 2) // 2 * 2}"
        )
