"""Settings of the baselines that link."""

from dataclasses import dataclass

from securevfl.models.pair_settings import ManyLinksSettings, OneLinkSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class Top1SimConfig(OneLinkSettings):
    """Each row with its most similar record: ``family = "top1sim"``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactConfig(OneLinkSettings):
    """Each row with the record of the very same key, if there is one: ``family = "exact"``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AvgSimConfig(ManyLinksSettings):
    """The mean of the predictions with each of K records: ``family = "avgsim"``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureSimConfig(ManyLinksSettings):
    """Like ``avgsim``, with the similarity as one more input: ``family = "featuresim"``."""
