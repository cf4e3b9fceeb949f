"""Serving on without secondaries that were lost, where the operator wants that."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from securevfl.core.errors import ConfigError, PartyFailedError, PartyTimeoutError
from securevfl.core.progress import Observer, Warned
from securevfl.federation.absence import active_without
from securevfl.federation.kept_model import KeptModel
from securevfl.runtime.party_job import PartyLife
from securevfl.runtime.predicting_primary import PredictingPrimary, predicting
from securevfl.transport.star import PrimaryTransport


class WithoutLost:
    """Sessions of predictions, each without the secondaries that those before it have lost.

    One that was lost stays out until the server is started again: it is turned away when it comes
    back, so that no session ends for it.
    """

    def __init__(
        self,
        life: PartyLife,
        model: KeptModel,
        *,
        opened: Callable[[PrimaryTransport], None],
        observe: Observer,
    ) -> None:
        """Make it.

        Args:
            life: The primary's.
            model: Its half of the network.
            opened: See :func:`predicting`.
            observe: Is warned of every secondary that is lost.
        """
        self._life = life
        self._model = model
        self._opened = opened
        self._observe = observe
        self.lost: tuple[str, ...] = ()
        """Names of those that are out."""

    @contextmanager
    def session(self) -> Iterator[PredictingPrimary]:
        """Hold a session with those that are left; see :func:`predicting`.

        Raises:
            ProtocolError: If a party is lost. The next session goes on without it, if enough
                secondaries are left.
        """
        try:
            with predicting(
                self._life, self._model, opened=self._opened, without=self.lost
            ) as session:
                yield session
        except (PartyTimeoutError, PartyFailedError) as error:
            self._leave_out([] if error.party is None else error.party.split(", "))
            raise

    def _leave_out(self, names: list[str]) -> None:
        config = self._life.config
        secondaries = [party.name for party in config.secondaries]
        fresh = [name for name in names if name in secondaries and name not in self.lost]
        if not fresh:
            return
        without = tuple(name for name in secondaries if name in (*self.lost, *fresh))
        try:
            enough = bool(active_without(config, without))
        except ConfigError:
            enough = False
        if not enough:
            self._observe(
                Warned(
                    text=f"{', '.join(fresh)}: lost, and too few secondaries are left to go on "
                    f"(prediction.least_secondaries); waiting for it"
                )
            )
            return
        self.lost = without
        self._observe(
            Warned(text=f"{', '.join(fresh)}: lost; predictions go on without it and say so")
        )
