"""How a party that dials out joins: connection, handshake, keys with the other callers."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from securevfl.config.federation import FederationConfig
from securevfl.config.parties import parse_address
from securevfl.federation import handshake
from securevfl.federation.messages import RoundKind
from securevfl.federation.run_plan import RunFacts
from securevfl.mpc.pair_keys import SessionKey
from securevfl.transport.connection import TransportLimits
from securevfl.transport.identity import Identity
from securevfl.transport.star import SecondaryTransport


@dataclass(frozen=True, kw_only=True, eq=False)
class Joined:
    """What a caller has once it has joined a session."""

    transport: SecondaryTransport
    """Its connection to the primary."""

    facts: RunFacts
    """What the primary says of its rows."""

    pair_keys: Mapping[int, bytes]
    """A key with every other caller, by rank; the primary has none of them."""

    rank: int
    """This party's own rank."""


@contextmanager
def joined(
    config: FederationConfig,
    identity: Identity,
    pinned: Mapping[str, str],
    *,
    epochs: list[int],
    pretrained: list[int],
) -> Iterator[Joined]:
    """Join the primary's session, and leave it when the ``with`` block ends.

    Args:
        config: The federation file.
        identity: This party's long-term identity.
        pinned: Every party's pinned public key.
        epochs: Epochs that this party could resume.
        pretrained: Iterations of pretraining that it could resume.

    Raises:
        ProtocolError: If the primary cannot be reached, or is not who the file says.

    Reveals:
        To the primary: that this party takes part, the file's hash, its public key of the session
        and the epochs. To the other callers: that public key.
    """
    assert config.primary.address is not None, "checked with the federation file"
    transport = SecondaryTransport(
        parse_address(config.primary.address),
        identity,
        pinned,
        config.ranks,
        limits=transport_limits(config),
    )
    with transport:
        transport.connect(config.runtime.join_timeout_s)
        rank = config.ranks[identity.name]
        key = SessionKey(session=transport.session, rank=rank, name=identity.name)
        transport.send(
            handshake.hello(
                config, identity=identity, key=key, epochs=epochs, pretrained=pretrained
            )
        )
        message = transport.receive(
            RoundKind.WELCOME, round_number=0, deadline_s=config.runtime.join_timeout_s
        )
        facts, pair_keys = handshake.open_welcome(config, message, key=key, pinned=pinned)
        yield Joined(transport=transport, facts=facts, pair_keys=pair_keys, rank=rank)


def transport_limits(config: FederationConfig) -> TransportLimits:
    """Return a transport's deadlines, as the federation file sets them."""
    return TransportLimits(silence_timeout_s=config.runtime.silence_timeout_s)
