"""The life of a party that only helps to link: join, coordinate or deal, leave."""

from securevfl.config.channels import reveals_of
from securevfl.federation.handshake import joined
from securevfl.federation.messages import Ready
from securevfl.linking.coordinator import Coordinator, serve_as_dealer
from securevfl.linking.kept_links import LinkCache
from securevfl.linking.lines import CallerDesk
from securevfl.runtime.party_job import PartyLife


def help_to_link(life: PartyLife) -> None:
    """Take part in linkage as the coordinator or the dealer.

    Raises:
        SecureVflError: Whatever went wrong, here or at another party.

    Reveals:
        What :class:`Coordinator` and :func:`serve_as_dealer` say.
    """
    config, name, files = life.config, life.job.name, life.files
    life.require_no_listen()
    with joined(config, life.identity, life.pinned, epochs=[], pretrained=[]) as star:
        files.log("connected")
        star.transport.send(Ready().to_message())
        desk = CallerDesk(
            star.transport,
            config.ranks,
            star.pair_keys,
            deadline_s=config.runtime.idle_timeout_s,
        )
        role = config.party(name).role
        learned = reveals_of(config, role)
        if role == "dealer":
            files.log("dealt", learned=learned, blocks=serve_as_dealer(config, desk))
            return
        cache = LinkCache.of_party(config, name, files.folder)
        coordinator = Coordinator(config, rows=star.facts.rows, desk=desk, cache=cache)
        files.log("coordinated", learned=learned, similarities=coordinator.serve())
