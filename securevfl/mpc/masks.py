"""Pairwise masks: AES-256-CTR key streams that cancel in the sum over the active secondaries.

Masks cancel along the edges of a graph over the active secondaries. With all masks of some
secondaries, one can compute the sum of the others' words over each connected part of the remaining
graph, and nothing else. So a secondary's term is protected by the graph's connectivity: the number
of secondaries that it takes to separate it from the others.

The sparse graph is the ring of the active secondaries in order of rank, each of them joined to the
``degree / 2`` nearest on either side: a circulant graph, whose connectivity is its degree.

References:
    [Har62] F. Harary. The Maximum Connectivity of a Graph. PNAS 48(7), 1962: the connectivity.
    [BBGLR20] J. Bell et al. Secure Single-Server Aggregation with (Poly)Logarithmic Overhead. CCS
    2020 (IACR ePrint 2020/704), section 3: sums under a sparse graph of masks. Theirs is drawn at
    random; why ours is not is in docs/threat-model.md.

The mask of rank i in round r is ``sum_(j > i) F(k_ijr, r) - sum_(j < i) F(k_ijr, r) mod 2^64``,
over its neighbours j among the active ranks, where F is an AES-256 key stream with nonce r.

``k_ijr`` is HMAC-SHA256, under the pair's session key, of everything that the two must agree on:
the round, the number of words, the degree of the graph, all active ranks, and the pair's
*transcript*, a chained hash of every message that the primary has sent to both so far. If the
primary sends two secondaries different values, in this round or before, their masks do not cancel,
and every sum with one of them is uniform noise.
"""

import hashlib
import hmac
import os
import struct
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import GCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from jaxtyping import Int64
from torch import Tensor

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


def neighbours(rank: int, active: Sequence[int], degree: int | None) -> tuple[int, ...]:
    """Return the ranks with which ``rank`` shares masks, in rising order.

    Args:
        rank: One of ``active``.
        active: All ranks of the round, in rising order.
        degree: Number of neighbours, even; None or at least the number of others: all of them.
    """
    parties = len(active)
    if degree is None or degree >= parties - 1:
        return tuple(other for other in active if other != rank)
    place, half = active.index(rank), degree // 2
    steps = (*range(-half, 0), *range(1, half + 1))
    return tuple(sorted(active[(place + step) % parties] for step in steps))


def connectivity(parties: int, degree: int | None) -> int:
    """Return the number of active secondaries that it takes to isolate another one in the graph.

    Fewer of them, together with the primary, see the sum of all the others and nothing else.

    References:
        [Har62]: a circulant graph of even degree has that connectivity.

    Examples:
        >>> connectivity(50, 12)
        12
        >>> connectivity(10, 12), connectivity(10, None)
        (9, 9)
    """
    others = parties - 1
    return others if degree is None else min(degree, others)


# Key streams are computed in pieces that stay in the cache while they are added; smaller ones cost
# more in calls, larger ones hardly less.
_PIECE_BYTES: Final = 1 << 18
_ZEROS: Final = memoryview(bytes(_PIECE_BYTES))
_AES_BLOCK_BYTES: Final = 16
_ROUND_LABEL: Final = b"securevfl/mpc/round-key/v2"
_NO_TRANSCRIPT: Final = bytes(32)

_Streams = list[tuple[int, CipherContext]]
"""Rank of each neighbour, and its key stream of the round."""


class PairwiseMasks:
    """One secondary's masks of a session.

    A round number is used only once, even if the round fails: two releases under one mask would
    reveal their difference. This holds across threads, and a prepared mask that is never applied
    counts as used. A retry is a new round; a restart is a new session with new keys.

    Args:
        rank: This party's rank.
        pair_keys: The session key shared with every other secondary, by rank.
        degree: Number of active secondaries that it shares masks with; None: all.

    Raises:
        ConfigError: If a key or rank is invalid, or two keys are equal.
    """

    def __init__(
        self, rank: int, pair_keys: Mapping[int, bytes], *, degree: int | None = None
    ) -> None:
        if rank < 1 or rank in pair_keys or any(peer < 1 for peer in pair_keys):
            raise ConfigError(f"rank {rank} cannot mask with ranks {sorted(pair_keys)}")
        if any(len(key) != PAIR_KEY_BYTES for key in pair_keys.values()):
            raise ConfigError(f"pair keys must have {PAIR_KEY_BYTES} bytes")
        if len(set(pair_keys.values())) != len(pair_keys):
            raise ConfigError("two pairs share one key; pair keys must differ")
        self.rank = rank
        self._keys = dict(pair_keys)
        self._degree = degree
        self._process = os.getpid()
        self._last_round = -1
        self._lock = threading.Lock()
        self._prepared: dict[int, tuple[int, tuple[int, ...], Future[npt.NDArray[np.int64]]]] = {}
        self._transcripts = dict.fromkeys(pair_keys, _NO_TRANSCRIPT)
        self._worker: ThreadPoolExecutor | None = None

    def __repr__(self) -> str:
        return f"PairwiseMasks(rank={self.rank}, peers={sorted(self._keys)})"

    def bind(self, message_digest: bytes, ranks: Sequence[int]) -> None:
        """Make all later masks depend on a message that the primary has sent to these ranks too.

        Args:
            message_digest: Hash of the message that this party has received.
            ranks: Other parties that must have it, at the same place among all such messages; this
                party's rank and unknown ranks are ignored.
        """
        for rank in self._transcripts.keys() & set(ranks):
            chained = self._transcripts[rank] + message_digest
            self._transcripts[rank] = hashlib.sha256(chained).digest()

    def apply(
        self, words: Int64[Tensor, "words"], *, round_number: int, active: Sequence[int]
    ) -> None:
        """Add this party's mask of one round to ``words``, in place.

        Args:
            words: Encoded contribution, on the CPU and contiguous.
            round_number: Number of the round, accepted once.
            active: Ranks of all secondaries that contribute, this one among them.

        Raises:
            ProtocolError: If the round was used before, was prepared for another size or another
                active set, or ``active`` names an unknown rank.

        Reveals:
            Nothing alone. Without one of this party's pair keys with a neighbour in this round, the
            masked words are uniformly random, and so is their sum with words of parties that
            received other messages. With no other active party there is no mask, and the words are
            plaintext.
        """
        members = self._members(active)
        target = words.numpy()
        with self._lock:
            prepared = self._prepared.pop(round_number, None)
            if prepared is None:
                self._claim(round_number)
        if prepared is None:
            self._add_key_streams(target, self._streams(round_number, len(target), members))
            return
        count, prepared_members, future = prepared
        if (count, prepared_members) != (len(target), members):
            raise ProtocolError(
                f"round {round_number}: the mask was prepared for {count} words of the ranks "
                f"{list(prepared_members)}, but {len(target)} words of {list(members)} came; "
                f"retry as a new round"
            )
        np.add(target, future.result(), out=target)

    def prepare(self, round_number: int, count: int, active: Sequence[int]) -> None:
        """Start computing the mask of a round in the background, while the model computes.

        Masks depend on no data, and not on messages bound later. The round counts as used from now
        on.

        Raises:
            ProtocolError: As :meth:`apply`.

        Reveals:
            Nothing.
        """
        members = self._members(active)
        with self._lock:
            self._claim(round_number)
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, thread_name_prefix="securevfl-masks")
            streams = self._streams(round_number, count, members)
            future = self._worker.submit(self._mask, count, streams)
            self._prepared[round_number] = (count, members, future)

    def close(self) -> None:
        """Stop the background thread and forget the keys; later calls raise."""
        with self._lock:
            worker, self._worker = self._worker, None
            self._prepared.clear()
        if worker is not None:
            worker.shutdown(wait=True, cancel_futures=True)
        self._keys = {}

    def _members(self, active: Sequence[int]) -> tuple[int, ...]:
        if os.getpid() != self._process:
            # A forked copy does not know the rounds that the original process has used.
            raise ProtocolError("masks cannot be used by a forked process; start a new session")
        known = set(self._keys)
        others = set(active) - {self.rank}
        if self.rank not in active or len(set(active)) != len(active) or not others <= known:
            raise ProtocolError(
                f"rank {self.rank} cannot mask for the active ranks {list(active)}; it shares "
                f"keys with {sorted(known)}"
            )
        return tuple(sorted(active))

    def _claim(self, round_number: int) -> None:
        if not 0 <= round_number < 2**63:
            raise ProtocolError(f"a round number must lie in [0, 2^63), got {round_number}")
        # Round numbers rise within a session, so the last one determines the used ones.
        if round_number <= self._last_round:
            raise ProtocolError(
                f"round {round_number}: its mask was used before; a retry must be a new round"
            )
        self._last_round = round_number

    def _mask(self, count: int, streams: _Streams) -> npt.NDArray[np.int64]:
        mask = np.zeros(count, np.int64)
        self._add_key_streams(mask, streams)
        return mask

    def _streams(self, round_number: int, count: int, members: tuple[int, ...]) -> _Streams:
        # Only the list of ranks varies in length, so the encoding is unambiguous.
        numbers = (round_number, count, self._degree or 0, *members)
        agreed = _ROUND_LABEL + struct.pack(f">{len(numbers)}Q", *numbers)
        return [
            (
                peer,
                key_stream(
                    hmac.digest(self._keys[peer], agreed + self._transcripts[peer], "sha256"),
                    round_number,
                ),
            )
            for peer in neighbours(self.rank, members, self._degree)
        ]

    def _add_key_streams(self, target: npt.NDArray[np.int64], streams: _Streams) -> None:
        # A cipher context needs a buffer with one block more than its input.
        buffer = bytearray(_PIECE_BYTES + _AES_BLOCK_BYTES)
        room = memoryview(buffer)
        stream_words = np.frombuffer(buffer, np.int64, _PIECE_BYTES // 8)
        for start in range(0, len(target), _PIECE_BYTES // 8):
            piece = target[start : start + _PIECE_BYTES // 8]
            for peer, stream in streams:
                stream.update_into(_ZEROS[: piece.nbytes], room)
                combine = np.add if self.rank < peer else np.subtract
                combine(piece, stream_words[: len(piece)], out=piece)


def key_stream(key: bytes, number: int) -> CipherContext:
    """Return the AES-256 key stream ``number`` of a key: the encryptor of zeros."""
    # GCM without its tag is counter mode over the blocks nonce || 2, nonce || 3, ...; OpenSSL has
    # wide vector code for it alone, 2.5 times as fast as for plain CTR. The number is the nonce,
    # and the 32-bit counter, which may not wrap, ends a stream after 64 GiB with an error.
    return Cipher(AES256(key), GCM(struct.pack(">IQ", 0, number))).encryptor()
