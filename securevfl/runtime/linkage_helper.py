"""The life of a party that only helps to link: join, coordinate or deal, leave."""

from collections.abc import Callable, Mapping
from pathlib import Path

from securevfl.config.federation import FederationConfig
from securevfl.config.link_spec import link_spec
from securevfl.federation.joining import joined
from securevfl.federation.messages import RoundKind
from securevfl.linking.coordinator import Coordinator, serve_as_dealer
from securevfl.linking.kept_links import LinkCache
from securevfl.linking.lines import CallerDesk
from securevfl.linking.reveals import reveals_of
from securevfl.transport.identity import Identity
from securevfl.transport.message import Message


def help_to_link(
    config: FederationConfig,
    identity: Identity,
    pinned: Mapping[str, str],
    *,
    folder: Path,
    log: Callable[..., None],
) -> None:
    """Take part in linkage as the coordinator or the dealer.

    Args:
        config: The federation file.
        identity: This party's long-term identity.
        pinned: Every party's pinned public key.
        folder: Where a coordinator keeps links, and similarities with their noise.
        log: The party's log, which gets what it learned.

    Raises:
        SecureVflError: Whatever went wrong, here or at another party.

    Reveals:
        What :class:`Coordinator` and :func:`serve_as_dealer` say.
    """
    with joined(config, identity, pinned, epochs=[], pretrained=[]) as star:
        log("connected")
        star.transport.send(Message(kind=RoundKind.READY))
        spec = link_spec(config)
        desk = CallerDesk(
            star.transport, spec.roles.ranks, star.pair_keys, deadline_s=spec.idle_timeout_s
        )
        role = config.party(identity.name).role
        learned = reveals_of(spec, role)
        if role == "dealer":
            log("dealt", learned=learned, blocks=serve_as_dealer(spec, desk))
            return
        cache = LinkCache.of_party(spec, identity.name, folder)
        coordinator = Coordinator(spec, rows=star.facts.rows, desk=desk, cache=cache)
        log("coordinated", learned=learned, similarities=coordinator.serve())
