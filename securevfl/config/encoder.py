"""The ``[encoder]`` table: how frozen encoders of few numbers are made, and where they write."""

from dataclasses import dataclass
from typing import Literal, assert_never

from securevfl.core import checks
from securevfl.dp.fitting import FittingPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderSettings:
    """The ``[encoder]`` table; without it frozen encoders are the family's own random ones."""

    method: Literal["random", "principal", "autoencoder"]
    """``random`` draws a projection without data. The others are fitted to each secondary's own
    records, behind noise that the run's epsilon counts: ``principal`` to their leading principal
    components, ``autoencoder`` by DP-SGD to what survives the noise of a release."""

    layout: Literal["blocks", "sum"] = "blocks"
    """``blocks`` gives every secondary its own coordinates of the sum, ``hidden`` over their
    number each; with ``sum`` all of them write into all."""

    share: float = 0.05
    """Part of the run's privacy, in squared mu, that fitting may use, in (0, 1)."""

    steps: int = 200
    """Noised steps of an autoencoder's training."""

    sampling_rate: float = 0.05
    """Rate of the fresh secret sample of records that each of those steps sees, in (0, 1]."""

    def __post_init__(self) -> None:
        checks.one_of(("random", "principal", "autoencoder"), method=self.method)
        checks.whole(steps=self.steps)
        checks.at_least(1, steps=self.steps)
        checks.rate(sampling_rate=self.sampling_rate)
        checks.one_of(("blocks", "sum"), layout=self.layout)
        checks.open_unit(share=self.share)

    @property
    def fitting(self) -> FittingPlan | None:
        """What fitting takes; None if nothing is fitted."""
        match self.method:
            case "random":
                return None
            case "principal":
                return FittingPlan(share=self.share)
            case "autoencoder":
                return FittingPlan(
                    share=self.share, steps=self.steps, sampling_rate=self.sampling_rate
                )
            case _:
                assert_never(self.method)
