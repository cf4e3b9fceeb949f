"""A party without a table: it joins, helps to link, deals masks, and leaves."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Final, Literal

from securevfl.config.federation import FederationConfig, link_spec
from securevfl.core import errors
from securevfl.core.memory import loading
from securevfl.core.progress import Stage
from securevfl.federation.messages import PredictRequest, Ready, RoundKind
from securevfl.federation.session.membership import absent_names, idle_helpers
from securevfl.federation.stage import run_stages
from securevfl.linkage.protections.protection import Take, take_nothing
from securevfl.linkage.stage.link_cache import LinkCache
from securevfl.linkage.stage.linkage_parts import reveals_of
from securevfl.linkage.stage.linking import help_to_link
from securevfl.runtime.party import PartySession, join, require_same_parties, serve_sessions
from securevfl.transport.message import StarKind

_LONGER_THAN_A_RUN_S: Final = 365 * 24 * 3600.0

# A helper's part, by role, in its log.
_DONE: Final = {"coordinator": "coordinated", "dealer": "dealt"}


def run_helper(party: PartySession) -> None:
    """Take part in linkage and in stages as the coordinator or the dealer.

    Where a session that is lost is followed by another one, stay until the run is over.

    Raises:
        SecureVflError: Any failure, here or at another party.

    Reveals:
        What :func:`securevfl.linkage.stage.linking.help_to_link` and :meth:`RunStage.help` say.
    """
    config, name, files = party.config, party.job.name, party.files
    party.require_no_listen()
    with join(party) as star:
        star.transport.send(Ready().to_message())
        party.observe(Stage(text="helping"))
        spec, role = link_spec(config), _helper_role(config, name)
        if role in spec.roles.helpers:
            with _recording(party, role, run=star.facts.run) as take:
                figures = help_to_link(
                    spec,
                    role,
                    star.transport,
                    star.sealed,
                    rows=star.facts.rows,
                    cache=LinkCache.of_party(
                        spec, name, files.folder, data_root=party.job.data_root
                    ),
                    take=take,
                )
            files.log(_DONE[role], learned=reveals_of(spec, role), **figures)
        for stage in run_stages(config):
            if (helped := stage.help(config, role, star)) is not None:
                event, figures = helped
                files.log(event, **figures)
        if config.helpers_stay:
            # A session that is lost is followed by another, which links with this party's help.
            star.transport.receive(
                StarKind.DONE, round_number=None, deadline_s=_LONGER_THAN_A_RUN_S
            )


@contextlib.contextmanager
def _recording(party: PartySession, role: str, *, run: str) -> Iterator[Take]:
    """Yield the recorder of a coordinator's view; it records nothing unless that is asked for."""
    job = party.job
    # A dealer receives sizes alone.
    if role != "coordinator" or job.record_mib is None:
        yield take_nothing
        return
    # It loads torch, which helpers do without.
    with loading():
        from securevfl.federation.rounds.recording import recording

    with recording(
        job.name, party.files.folder, run=run, most_mib=job.record_mib, observe=party.observe
    ) as recorder:
        yield take_nothing if recorder is None else recorder.take


def serve_as_helper(party: PartySession) -> None:
    """Help to link the rows of one request for predictions after another.

    Raises:
        ConfigError: If the party helps stages of training alone, which predictions do not need.
        SecureVflError: Any failure here; where the party serves on, a primary that goes away is
            waited for instead.

    Reveals:
        What :func:`securevfl.linkage.stage.linking.help_to_link` says.
    """
    config, name = party.config, party.job.name
    party.require_no_listen()
    if name in idle_helpers(config):
        raise errors.ConfigError(
            f"party {name!r}: deals masks for class means alone, and predictions need none; "
            f"start the other parties without it"
        )
    serve_sessions(party, lambda: _help_to_predict(party))


def _help_to_predict(party: PartySession) -> None:
    config, name = party.config, party.job.name
    role, spec = _helper_role(config, name), link_spec(config)
    links = name in spec.roles.helpers.values()
    if links and spec.similarities is not None:
        raise errors.ProtocolError(
            f"{name}: predictions of a family that reads similarities need the scale of training, "
            f'which a coordinator does not keep; link with protection = "none"'
        )
    with join(party, predicts=True) as star:
        absent = frozenset(absent_names(config, star.facts.active))
        spec = replace(spec, roles=replace(spec.roles, absent=absent))
        wait_s = math.inf if party.job.serves_on else config.waits.work.for_primary_s
        next_one = partial(
            star.transport.receive,
            (RoundKind.PREDICT, StarKind.DONE),
            round_number=None,
            deadline_s=wait_s,
        )
        message = next_one()
        while message.kind is RoundKind.PREDICT:
            request = PredictRequest.from_message(message)
            require_same_parties(config, star.facts, request)
            star.transport.send(Ready().to_message())
            if links:
                help_to_link(
                    spec,
                    role,
                    star.transport,
                    star.sealed,
                    rows=request.rows,
                    cache=LinkCache(None),
                )
            message = next_one()


def _helper_role(config: FederationConfig, name: str) -> Literal["coordinator", "dealer"]:
    role = config.party(name).role
    assert role == "coordinator" or role == "dealer", "others have a table"
    return role
