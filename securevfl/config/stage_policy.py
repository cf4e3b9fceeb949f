"""An optional stage as the federation file has it: whether it runs, its rules, what it shows."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal

from securevfl.config.federation import FederationConfig
from securevfl.core.stages import load_part, stages
from securevfl.dp.labels import LabelRelease
from securevfl.transport.message import Cover

NOT_COVERED: Final = "not covered"


@dataclass(frozen=True, slots=True)
class Channel:
    """One way in which a party learns something."""

    channel: Cover
    """Its name, by which fields of messages refer to it."""

    reveals: str
    """Who learns what."""

    guarantee: str
    """Statement of the promise that covers it, if any does."""

    whose: Literal["secondaries", "primary", "all"]
    """Whose rows, records or weights are learned about."""

    to: Literal["primary", "secondaries", "all", "recipients", "nobody"]
    """Who learns it; ``recipients`` are those who get the model."""

    stated: bool = False
    """True for a channel that no epsilon covers and no promise refuses; the promise's statement and
    docs/privacy.md name it."""

    refusal: str = ""
    """Sentence that refuses a promise with this channel: the setting, what it shows, and what to
    write instead."""


class StagePolicy:
    """A stage as far as the federation file decides; by default it asks for nothing."""

    def applies(self, config: FederationConfig) -> bool:
        """Return whether runs of this federation file have the stage; the rest is asked then."""
        return False

    def require(self, config: FederationConfig) -> None:
        """Refuse settings that do not go with the stage.

        Raises:
            ConfigError: Naming the field, the rule and the value.
            PrivacyError: If a promise would not hold.
        """

    def require_helpers(self, config: FederationConfig) -> None:
        """Refuse a federation between processes that lacks a third party of :meth:`helpers`.

        Raises:
            ConfigError: Naming the role that is missing.
        """

    def helpers(self, config: FederationConfig) -> tuple[str, ...]:
        """Return the roles of third parties that the stage needs between processes."""
        return ()

    def channels(self, config: FederationConfig) -> Iterator[Channel]:
        """Yield the ways in which a party learns something."""
        yield from ()

    def label_release(self, config: FederationConfig) -> LabelRelease | None:
        """Return the labels that the stage releases to secondaries; None for none."""
        return None

    def why_noise_fails(self, config: FederationConfig) -> str | None:
        """Return why noise does not cover releases, and what to write; None if it does."""
        return None

    def why_rows_stay_secret(self, config: FederationConfig) -> str | None:
        """Return what refuses a promise where the stage has rows aligned; None if it has none."""
        return None


@cache
def _all_policies() -> Mapping[str, StagePolicy]:
    return {
        name: load_part(name, manifest.policy)()
        for name, manifest in stages().items()
        if manifest.policy is not None
    }


def policies(config: FederationConfig) -> dict[str, StagePolicy]:
    """Return the policies of the stages that runs of a federation file have, by name."""
    return {name: policy for name, policy in _all_policies().items() if policy.applies(config)}
