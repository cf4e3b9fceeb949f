"""The life of a party that only helps to link: join, coordinate or deal, leave."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from securevfl.config.federation import FederationConfig
from securevfl.config.link_spec import link_spec
from securevfl.federation.joining import joined
from securevfl.federation.messages import RoundKind
from securevfl.linking.kept_links import LinkCache
from securevfl.linking.parties import help_to_link
from securevfl.linking.protections.table import reveals_of
from securevfl.transport.identity import Identity
from securevfl.transport.message import Message

# What a helper's log calls its part.
_DONE: Final = {"coordinator": "coordinated", "dealer": "dealt"}


def run_linkage_helper(
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
        What :func:`securevfl.linking.parties.help_to_link` says.
    """
    with joined(config, identity, pinned, epochs=[], pretrained=[]) as star:
        log("connected")
        star.transport.send(Message(kind=RoundKind.READY))
        spec, role = link_spec(config), config.party(identity.name).role
        assert role == "coordinator" or role == "dealer", "others have a table"
        figures = help_to_link(
            spec,
            role,
            star.transport,
            star.pair_keys,
            rows=star.facts.rows,
            cache=LinkCache.of_party(spec, identity.name, folder),
        )
        log(_DONE[role], learned=reveals_of(spec, role), **figures)
