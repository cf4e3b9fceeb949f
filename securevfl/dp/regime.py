"""Encoder regimes: how weights of bottom models depend on records, and what follows from it.

``privacy.encoder`` names a regime. All that differs between regimes is an answer of its class;
others ask (``privacy.regime``, ``config.regime``) and compare no names.
"""

from abc import ABC
from collections.abc import Mapping
from typing import ClassVar, Final, Literal

from securevfl.core.errors import ConfigError
from securevfl.dp.events import Unit

Encoder = Literal["trained", "frozen", "dp-trained"]
"""Names of the regimes."""


class Regime(ABC):
    """Answers that depend on how bottom models come by their weights."""

    name: ClassVar[Encoder]

    learns: ClassVar[bool]
    """True if secondaries get gradients, and weights change from round to round."""

    caps_records: ClassVar[bool]
    """True if a record moves no released row but those that it is linked to, noised updates aside:
    a cap on its links then bounds what it changes."""

    noises_updates: ClassVar[bool] = False
    """True if every update of the weights is a release of its own, behind noise."""

    amplified_units: ClassVar[tuple[Unit, ...]] = ()
    """Units whose guarantee a secret sample of records amplifies."""

    weights_guarantee: ClassVar[str]
    """Coverage of weights that parties average, in words; see
    :mod:`securevfl.config.disclosure`."""

    @property
    def releases_once(self) -> bool:
        """Whether each row is released once, and all rounds are parts of one fixed answer.

        Both ends keep the answer, so that neither testing nor a resumed run releases a row again.
        """
        return not self.learns

    @property
    def saves_epochs(self) -> bool:
        """Whether secondaries save epochs, and a resumed run goes back to one that all have.

        Without epochs it resumes row by row.
        """
        return self.learns

    def require_update_settings(self, settings: Mapping[str, float | None]) -> None:
        """Refuse settings of noised updates where updates are not noised.

        Args:
            settings: Settings by name; None where one is not given.

        Raises:
            ConfigError: Naming the first that is given.
        """
        for name, value in settings.items():
            if value is not None and not self.noises_updates:
                raise ConfigError(f'{name}: goes with encoder = "dp-trained", got {self.name!r}')


class Frozen(Regime):
    """Weights are fixed before the first release; records shape them through noised fits alone."""

    name = "frozen"
    learns = False
    caps_records = True
    amplified_units = (Unit.SECONDARY_RECORD, Unit.ENTITY)
    weights_guarantee = "nothing is sent"


class Trained(Regime):
    """Weights are trained freely, so that any record may move every later row."""

    name = "trained"
    learns = True
    caps_records = False
    weights_guarantee = "heuristic: a secure mean without noise"


class DpTrained(Regime):
    """Weights are trained by noised updates, each charged with the round that it follows."""

    name = "dp-trained"
    learns = True
    caps_records = True
    noises_updates = True
    amplified_units = (Unit.SECONDARY_RECORD,)
    weights_guarantee = "covered by epsilon: every update of the weights is noised"


REGIMES: Final[Mapping[str, Regime]] = {
    regime.name: regime for regime in (Trained(), Frozen(), DpTrained())
}
"""Every regime by its name."""
