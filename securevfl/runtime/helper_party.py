"""The life of a party without a table: join, help to link, deal masks for votes, leave."""

from typing import Final

from securevfl.config.link_spec import link_spec
from securevfl.config.losses import helpers_stay
from securevfl.core.progress import Stage
from securevfl.federation.class_means.class_means_stage import deal_over
from securevfl.federation.messages import Ready
from securevfl.federation.session.handshake import joined
from securevfl.linkage.stage.kept_links import LinkCache
from securevfl.linkage.stage.linking import help_to_link, reveals_of
from securevfl.runtime.party_job import PartyLife
from securevfl.transport.message import StarKind

_LONGER_THAN_A_RUN_S: Final = 365 * 24 * 3600.0

# What a helper's log calls its part.
_DONE: Final = {"coordinator": "coordinated", "dealer": "dealt"}


def run_helper(life: PartyLife) -> None:
    """Take part in linkage as the coordinator or the dealer, and deal masks where votes need them.

    Where a session that is lost is followed by another one, stay until the run is over.

    Raises:
        SecureVflError: Whatever went wrong, here or at another party.

    Reveals:
        What :func:`securevfl.linkage.stage.linking.help_to_link` and
        :func:`securevfl.federation.class_means.class_means_stage.deal_for_votes` say.
    """
    config, name, files = life.config, life.job.name, life.files
    life.require_no_listen()
    with joined(
        config,
        life.identity,
        life.pinned,
        epochs=[],
        pretrained=[],
        patience_s=life.job.join_timeout_s,
        returning=life.job.returning,
    ) as star:
        files.log("connected")
        star.transport.send(Ready().to_message())
        life.observe(Stage(text="helping"))
        spec, role = link_spec(config), config.party(name).role
        assert role == "coordinator" or role == "dealer", "others have a table"
        if role in spec.roles.helpers:
            figures = help_to_link(
                spec,
                role,
                star.transport,
                star.sealed,
                rows=star.facts.rows,
                cache=LinkCache.of_party(spec, name, files.folder),
            )
            files.log(_DONE[role], learned=reveals_of(spec, role), **figures)
        if role == "dealer" and config.deals_votes:
            files.log("dealt for votes", secondaries=deal_over(star, config))
        if helpers_stay(config):
            # A session that is lost is followed by another, which links with this party's help.
            star.transport.receive(
                StarKind.DONE, round_number=None, deadline_s=_LONGER_THAN_A_RUN_S
            )
