"""One key per pair of secondaries and session: ephemeral X25519, then HKDF-SHA256.

The primary relays the public keys. Each party signs :meth:`KeyOffer.statement` with its long-term
identity, which the federation file pins, so that the relay cannot put its own keys in between.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from securevfl.core.errors import AuthenticationError, ConfigError, ProtocolError

SESSION_BYTES: Final = 16
PUBLIC_BYTES: Final = 32
# AES-256: the mask of a whole session hangs on this key, and the sum must stay hidden for years.
PAIR_KEY_BYTES: Final = 32
_OFFER_LABEL: Final = b"securevfl/mpc/key-offer/v1"
_PAIR_LABEL: Final = b"securevfl/mpc/pair-key/v2"


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyOffer:
    """What one secondary announces to the others: who it is, and its key for this session."""

    session: bytes
    """The session id, 16 bytes, chosen by the primary."""

    rank: int
    """The party's rank, from 1; 0 is the primary, which takes no part in masking."""

    name: str
    """The party's name in the federation file."""

    public: bytes
    """Its X25519 public key of this session, 32 bytes."""

    def __post_init__(self) -> None:
        if len(self.session) != SESSION_BYTES:
            raise ConfigError(
                f"a session id has {SESSION_BYTES} bytes, got one of {len(self.session)}"
            )
        if self.rank < 1:
            raise ConfigError(f"only secondaries, of rank 1 and up, mask; got rank {self.rank}")
        if len(self.public) != PUBLIC_BYTES:
            raise AuthenticationError(
                f"{self.name} offered a key of {len(self.public)} bytes, not {PUBLIC_BYTES}"
            )

    def statement(self) -> bytes:
        """Return the bytes that the party signs with its long-term identity.

        Every field is bound: a statement of another session, rank, name or key differs.
        """
        name = self.name.encode()
        head = struct.pack(">II", self.rank, len(name))
        return b"".join([_OFFER_LABEL, self.session, head, name, self.public])


class SessionKey:
    """A secondary's ephemeral key pair; it agrees on pair keys once, then forgets itself.

    Used once, because the pair keys of a session may never be derived a second time: a second set
    of masks from the same keys would cancel the first.
    """

    def __init__(self, *, session: bytes, rank: int, name: str) -> None:
        self._private: X25519PrivateKey | None = X25519PrivateKey.generate()
        self.offer = KeyOffer(
            session=session,
            rank=rank,
            name=name,
            public=self._private.public_key().public_bytes_raw(),
        )

    def __repr__(self) -> str:
        return f"SessionKey(rank={self.offer.rank}, name={self.offer.name!r})"

    def agree(self, offers: Mapping[int, KeyOffer], *, agreed: bytes) -> dict[int, bytes]:
        """Return this party's pair key with every other secondary.

        Args:
            offers: Every secondary's verified offer by rank; this party's own may be among them.
            agreed: What the relay has told of the session. Two parties that were told different
                things get two different keys: no mask of theirs cancels, and neither opens what the
                other has sealed.

        Raises:
            ProtocolError: If keys were agreed before.
            AuthenticationError: If an offer is of another session or rank, repeats another
                party's key, or is a point that leads to no secret.

        Reveals:
            Nothing; the keys stay in this process.
        """
        if self._private is None:
            raise ProtocolError("pair keys of this session were agreed before; start a new session")
        private, self._private = self._private, None
        others = {rank: offer for rank, offer in offers.items() if rank != self.offer.rank}
        own = offers.get(self.offer.rank, self.offer)
        if own != self.offer:
            raise AuthenticationError(f"the relay changed the key that {self.offer.name} offered")
        publics = [self.offer.public, *(offer.public for offer in others.values())]
        if len(set(publics)) != len(publics):
            raise AuthenticationError("two parties offered one and the same key")
        keys = {}
        for rank, offer in others.items():
            if offer.rank != rank or offer.session != self.offer.session:
                raise AuthenticationError(
                    f"the key offer of {offer.name} is for rank {offer.rank} of another place or "
                    f"session; expected rank {rank} of this one"
                )
            try:
                secret = private.exchange(X25519PublicKey.from_public_bytes(offer.public))
            except ValueError:
                raise AuthenticationError(
                    f"the key that {offer.name} offered is a point of low order"
                ) from None
            keys[rank] = _pair_key(secret, self.offer, offer, agreed)
        return keys


def _pair_key(secret: bytes, first: KeyOffer, other: KeyOffer, agreed: bytes) -> bytes:
    lower, higher = sorted((first, other), key=lambda offer: offer.rank)
    # Statements are self-delimiting, so what follows them is the rest.
    info = _PAIR_LABEL + lower.statement() + higher.statement() + agreed
    derive = HKDF(algorithm=SHA256(), length=PAIR_KEY_BYTES, salt=first.session, info=info)
    return derive.derive(secret)
