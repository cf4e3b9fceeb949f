"""Joining the primary's session, for all that call it; serving in one session or many."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Final

from securevfl.config.federation import FederationConfig
from securevfl.core import errors, interrupts
from securevfl.core.progress import Warned
from securevfl.federation.messages import PredictRequest
from securevfl.federation.run_plan import RunFacts
from securevfl.federation.session.handshake import Joined, join_session
from securevfl.runtime.party import PartySession


@contextlib.contextmanager
def join(party: PartySession, *, run: str = "", predicts: bool = False) -> Iterator[Joined]:
    """Join the session that the primary holds; see :func:`securevfl.federation.session.handshake`.

    Args:
        party: A secondary or a helper.
        run: Id of the run that it resumes, or whose model it serves; empty for a fresh start, and
            for a helper.
        predicts: Whether it serves a saved model, and does not train.
    """
    job, files = party.job, party.files
    resumes = not predicts and not party.config.party(job.name).is_helper
    with join_session(
        party.config,
        party.identity,
        party.pinned,
        epochs=files.checkpoints.epochs() if resumes else [],
        pretrained=files.checkpoints.pretraining_iterations() if resumes else [],
        run=run,
        predicts=predicts,
        patience_s=None if predicts else job.join_timeout_s,
        returning=not predicts and job.returning,
    ) as star:
        files.log("connected")
        yield star


# A primary that ends, fails or is not there yet ends a session, not a party that serves on; nor
# does a request that its budget does not cover, which was refused before anything left.
_COMES_BACK: Final = (errors.PartyFailedError, errors.PartyTimeoutError, errors.BudgetExceededError)


def serve_sessions(party: PartySession, session: Callable[[], None]) -> None:
    """Serve in one session; a party that serves on joins again whenever it has ended."""
    while True:
        try:
            session()
        except _COMES_BACK as error:
            if interrupts.is_noted() or not party.job.serves_on:
                raise
            party.files.log("waiting", reason=type(error).__name__)
            if not party.config.party(party.job.name).is_helper:
                text = f"{party.job.name}: {error.for_others()}; joining again"
                party.observe(Warned(text=text))
        if not party.job.serves_on:
            return


def require_same_parties(
    config: FederationConfig, session: RunFacts, request: PredictRequest
) -> None:
    """Refuse a request to other secondaries than the session's, which this party has checked.

    Raises:
        ProtocolError: Naming their ranks.
    """
    ranks = tuple(config.ranks[party.name] for party in config.secondaries)
    active = ranks if session.active is None else session.active
    if request.active != active:
        raise errors.ProtocolError(
            f"the primary asks for predictions of the parties {list(request.active)!r}, and the "
            f"session has {list(active)!r}"
        )
