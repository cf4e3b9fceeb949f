"""Settings of the baselines that link."""

from dataclasses import dataclass
from typing import ClassVar

from securevfl.models.pair_settings import ManyLinksSettings, PairSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class Top1SimConfig(PairSettings):
    """Each row with its most similar record: ``family = "top1sim"``."""

    neighbours: ClassVar[int] = 1
    """One link a row."""

    @property
    def cut_shape(self) -> tuple[int, int]:
        """(L, H) of the aggregate."""
        return 1, self.hidden


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactConfig(PairSettings):
    """Each row with the record of the very same key, if there is one: ``family = "exact"``."""

    neighbours: ClassVar[int] = 1
    """One link a row."""

    @property
    def cut_shape(self) -> tuple[int, int]:
        """(L, H) of the aggregate."""
        return 1, self.hidden


@dataclass(frozen=True, kw_only=True, slots=True)
class AvgSimConfig(ManyLinksSettings):
    """The mean of the predictions with each of K records: ``family = "avgsim"``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureSimConfig(ManyLinksSettings):
    """Like ``avgsim``, with the similarity as one more input: ``family = "featuresim"``."""
