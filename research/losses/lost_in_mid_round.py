"""What a round costs that loses secondaries: done again without them, or masks that survive it.

    python research/losses/lost_in_mid_round.py                # k = 5, 20, 50; 0, 5 and 20 % lost

Two protocols, each with its real work, all parties in one process, and each sum checked:

- *again*: what securevfl does. Pairwise masks; if somebody's words are missing, those that are left
  encode, draw noise and mask once more, as a new round.
- *shared seeds*: Bonawitz et al., "Practical secure aggregation" (CCS 2017), Figure 4. In each
  round everyone makes a key pair and a seed of its own, shares both secrets with all by Shamir's
  scheme (two thirds restore one), and adds the seed's key stream to its masks. The primary then
  gets shares, of seeds from those that are there, of keys of those that are lost, and takes both
  sorts of masks off.
- *seeds alone* is the same with keys and shares for nothing: a bound on what anything built on
  masks and seeds can cost (Flamingo, IEEE S&P 2023, has its keys made once and few that hold
  shares).

CPU is of all parties together; *way* is what must be done one after the other: the slowest
secondary's part, the primary's, and the trips over the line. Words are lost after everyone has made
its own, which is the worst moment for both.
"""

import argparse
import contextlib
import math
import secrets
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from torch import Tensor

from securevfl.core.errors import ProtocolError
from securevfl.core.memory import keep_freed_memory
from securevfl.dp.ring_noise import ExactDiscreteGaussian
from securevfl.mpc.codec import RingFormat, encode, quantise, require_row_norms
from securevfl.mpc.masks import PairwiseMasks

PARTIES = (5, 20, 50)
LOST = (0.0, 0.05, 0.2)
ROW_WIDTH = 5000
CLIP_NORM = 1.0
NOISE_SHARE_STD = 1.0
PRIME: Final = 2**521 - 1
"""A Mersenne prime above any secret of 32 bytes."""
SHARE_BYTES = 66
PRIMARY = 0

TRIPS = {"again": 1, "shared seeds": 3, "seeds alone": 2}
"""Ways to the primary and back of a round that loses nobody; *again* has one more for a loss."""


def share(secret: bytes, parties: int, threshold: int) -> dict[int, int]:
    """Return Shamir's shares, the polynomial's values at 1 to ``parties``.

    Python's integers, because no package at hand has it for 32 bytes; nothing else uses it.
    """
    polynomial = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    polynomial.append(int.from_bytes(secret))
    shares = {}
    for at in range(1, parties + 1):
        value = 0
        for coefficient in polynomial:
            value = (value * at + coefficient) % PRIME
        shares[at] = value
    return shares


def restore(shares: Mapping[int, int]) -> bytes:
    """Return the secret of shares by where they are values: Lagrange's formula at 0."""
    secret = 0
    for at, value in shares.items():
        above = math.prod(other for other in shares if other != at)
        below = math.prod(other - at for other in shares if other != at)
        secret += value * above * pow(below, -1, PRIME)
    return (secret % PRIME).to_bytes(32)


def pair_keys(
    rank: int, private: X25519PrivateKey, publics: Mapping[int, bytes]
) -> dict[int, bytes]:
    """Return a secondary's keys of a round with all others."""
    keys = {}
    for peer, public in publics.items():
        if peer != rank:
            secret = private.exchange(X25519PublicKey.from_public_bytes(public))
            keys[peer] = HKDF(SHA256(), length=32, salt=None, info=b"").derive(secret)
    return keys


class Clock:
    """CPU seconds of one party each, and bytes sent by a secondary that is there."""

    def __init__(self) -> None:
        self.phases: list[defaultdict[int, float]] = [defaultdict(float)]
        self.bytes = 0

    @contextlib.contextmanager
    def of(self, rank: int) -> Iterator[None]:
        """Note what one party computes inside."""
        began = time.process_time()
        yield
        self.phases[-1][rank] += time.process_time() - began

    def next(self) -> None:
        """Begin what can only be done when all have done what is noted so far."""
        self.phases.append(defaultdict(float))

    def cpu(self) -> float:
        """Return all parties' milliseconds."""
        return 1e3 * sum(sum(phase.values()) for phase in self.phases)

    def way(self) -> float:
        """Return the milliseconds of the slowest secondary and of the primary, phase by phase."""
        return 1e3 * sum(
            phase[PRIMARY] + max((s for rank, s in phase.items() if rank != PRIMARY), default=0.0)
            for phase in self.phases
        )


class Federation:
    """So many secondaries with an encoded contribution each, and their keys of the session."""

    def __init__(self, parties: int, elements: int) -> None:
        self.ranks = tuple(range(1, parties + 1))
        self.threshold = 2 * parties // 3 + 1
        self.x = torch.randn(elements // ROW_WIDTH, ROW_WIDTH)
        self.x *= 0.99 * CLIP_NORM / self.x.norm(dim=1, keepdim=True)
        self.fmt = RingFormat.choose(
            clip_norm=CLIP_NORM, noise_share_std=NOISE_SHARE_STD, parties=parties
        )
        self.noise = ExactDiscreteGaussian(NOISE_SHARE_STD / self.fmt.granularity)
        keys = {
            (low, high): secrets.token_bytes(32)
            for low in self.ranks
            for high in self.ranks
            if low < high
        }
        self.session_keys = {
            rank: {
                peer: keys[min(rank, peer), max(rank, peer)] for peer in self.ranks if peer != rank
            }
            for rank in self.ranks
        }
        self.masks = {rank: PairwiseMasks(rank, self.session_keys[rank]) for rank in self.ranks}
        self.rounds = 0

    def contribution(self) -> Tensor:
        """Return words with noise, as a release makes them."""
        units = quantise(self.x, self.fmt)
        require_row_norms(units, self.fmt, clip_norm=CLIP_NORM)
        units += self.noise.sample(units.shape)
        return encode(units, self.fmt, reuse=True)

    def again(self, clock: Clock, lost: Sequence[int]) -> None:
        """Try with all, and, if some are lost, once more with those that are left."""
        there = self.ranks
        while True:
            self.rounds += 1
            left = [rank for rank in there if rank not in lost]
            sums = Sums()
            for rank in there:
                with clock.of(rank):
                    words = self.contribution()
                plain = words.clone()
                with clock.of(rank):
                    self.masks[rank].apply(words, round_number=self.rounds, active=there)
                if rank in left:
                    sums.add(clock, words, plain)
            clock.bytes += sums.bytes
            clock.next()
            if len(left) == len(there):
                sums.check()
                return
            there = tuple(left)

    def shared_seeds(self, clock: Clock, lost: Sequence[int], *, shares: bool = True) -> None:
        """Mask twice, and take off what the lost ones' pairs and the others' seeds left."""
        there = [rank for rank in self.ranks if rank not in lost]
        seeds = {rank: secrets.token_bytes(32) for rank in self.ranks}
        dealt = self.deal(clock, seeds) if shares else None
        keys = dealt.keys if dealt else self.session_keys
        sums = Sums()
        for rank in self.ranks:
            with clock.of(rank):
                words = self.contribution()
            plain = words.clone()
            with clock.of(rank):
                _pairs(rank, keys[rank], words)
                _stream(seeds[rank], words)
            if rank in there:
                sums.add(clock, words, plain)
        clock.bytes += sums.bytes
        clock.next()
        if dealt:
            # One share of everybody: of the seed of those that are there, else of the key.
            clock.bytes += SHARE_BYTES * len(self.ranks)
        with clock.of(PRIMARY):
            for rank in there:
                seed = restore(dealt.seed_shares[rank]) if dealt else seeds[rank]
                _stream(seed, sums.masked, taken_off=True)
            for rank in lost:
                _pairs(rank, dealt.keys_of_lost(rank) if dealt else keys[rank], sums.masked)
        sums.check()

    def deal(self, clock: Clock, seeds: Mapping[int, bytes]) -> "Dealt":
        """Make keys of the round, and share them and the seeds with all."""
        privates = {}
        for rank in self.ranks:
            with clock.of(rank):
                privates[rank] = X25519PrivateKey.generate()
        publics = {rank: key.public_key().public_bytes_raw() for rank, key in privates.items()}
        clock.next()
        dealt = Dealt(publics)
        for rank, private in privates.items():
            with clock.of(rank):
                dealt.keys[rank] = pair_keys(rank, private, publics)
                secret = (seeds[rank], private.private_bytes_raw())
                of_seed, of_key = (share(one, len(self.ranks), self.threshold) for one in secret)
                for peer, key in self.session_keys[rank].items():
                    both = b"".join(one[peer].to_bytes(SHARE_BYTES) for one in (of_seed, of_key))
                    nonce = secrets.token_bytes(12)
                    # Opened here too: each opens as many as it seals.
                    AESGCM(key).decrypt(nonce, AESGCM(key).encrypt(nonce, both, None), None)
            few = self.ranks[-self.threshold :]
            dealt.seed_shares[rank] = {peer: of_seed[peer] for peer in few}
            dealt.key_shares[rank] = {peer: of_key[peer] for peer in few}
        clock.bytes += 32 + (len(self.ranks) - 1) * (2 * SHARE_BYTES + 28)
        clock.next()
        return dealt


class Dealt:
    """What a round's keys and seeds are, and the shares that restore them."""

    def __init__(self, publics: Mapping[int, bytes]) -> None:
        self.publics = publics
        self.keys: dict[int, dict[int, bytes]] = {}
        self.seed_shares: dict[int, dict[int, int]] = {}
        self.key_shares: dict[int, dict[int, int]] = {}

    def keys_of_lost(self, rank: int) -> dict[int, bytes]:
        """Return a lost secondary's keys with all others."""
        private = X25519PrivateKey.from_private_bytes(restore(self.key_shares[rank]))
        return pair_keys(rank, private, self.publics)


class Sums:
    """The words that came, added up by the primary, and what they would be without masks."""

    def __init__(self) -> None:
        self.masked = self.plain = torch.zeros(0, dtype=torch.int64)

    def add(self, clock: Clock, words: Tensor, plain: Tensor) -> None:
        """Take in one secondary's words."""
        if not len(self.masked):
            self.masked, self.plain = words, plain
            return
        with clock.of(PRIMARY):
            self.masked += words
        self.plain += plain

    @property
    def bytes(self) -> int:
        """What one secondary sends."""
        return self.masked.nbytes

    def check(self) -> None:
        """Raise unless every mask is off."""
        if not torch.equal(self.masked, self.plain):
            raise ProtocolError("masks did not cancel")


def _pairs(rank: int, keys: Mapping[int, bytes], words: Tensor) -> None:
    PairwiseMasks(rank, keys).apply(words, round_number=0, active=(rank, *keys))


def _stream(seed: bytes, words: Tensor, *, taken_off: bool = False) -> None:
    # The lower rank of a pair adds the stream, the higher one takes it off.
    rank, peer = (2, 1) if taken_off else (1, 2)
    PairwiseMasks(rank, {peer: seed}).apply(words, round_number=0, active=(1, 2))


def measure(federation: Federation, lost: int, repeats: int) -> dict[str, dict[str, float]]:
    """Return each protocol's medians; the protocols run in turns."""
    gone = federation.ranks[len(federation.ranks) - lost :] if lost else ()
    found: dict[str, list[Clock]] = {name: [] for name in TRIPS}
    # The first is to warm up.
    for _ in range(repeats + 1):
        for name, clocks in found.items():
            clocks.append(Clock())
            if name == "again":
                federation.again(clocks[-1], gone)
            else:
                federation.shared_seeds(clocks[-1], gone, shares=name == "shared seeds")
    return {
        name: {
            "cpu": statistics.median(clock.cpu() for clock in clocks[1:]),
            "way": statistics.median(clock.way() for clock in clocks[1:]),
            "bytes": clocks[-1].bytes,
            "trips": TRIPS[name] + (name == "again" and lost > 0),
        }
        for name, clocks in found.items()
    }


def worth_from(calm: dict[str, Any], loss: dict[str, Any], name: str, trip_ms: float) -> list[str]:
    """Return the share of rounds that must lose somebody before a protocol is the cheaper one."""

    def cost(figures: dict[str, float], of: str) -> float:
        return figures["cpu"] if of == "cpu" else figures["way"] + trip_ms * figures["trips"]

    shares = []
    for of in ("cpu", "way"):
        dearer = cost(calm[name], of) - cost(calm["again"], of)
        cheaper = cost(loss["again"], of) - cost(loss[name], of)
        shares.append(f"{dearer / (dearer + cheaper):.0%}" if cheaper > 0 else "never")
    return shares


def main() -> None:
    """Measure and print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parties", type=int, nargs="+", default=PARTIES, help="secondaries")
    parser.add_argument("--lost", type=float, nargs="+", default=LOST, help="of them, in a round")
    parser.add_argument("--elements", type=int, default=640_000, help="a multiple of 5,000")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--trip-ms", type=float, default=50.0, help="to the primary and back")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    print(
        "| k | lost | protocol | CPU of all, ms | way, ms | sent by one, kB | trips "
        "| cheaper where so many rounds lose somebody, CPU "
        f"| way, {arguments.trip_ms:g} ms a trip |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for parties in arguments.parties:
        federation = Federation(parties, arguments.elements)
        calm = measure(federation, 0, arguments.repeats)
        for lost in sorted({math.ceil(share_lost * parties) for share_lost in arguments.lost}):
            found = measure(federation, lost, arguments.repeats) if lost else calm
            for name, of in found.items():
                worth = ["", ""]
                if lost and name != "again":
                    worth = worth_from(calm, found, name, arguments.trip_ms)
                print(
                    f"| {parties} | {lost} | {name} | {of['cpu']:.1f} | {of['way']:.1f} "
                    f"| {of['bytes'] / 1e3:,.0f} | {of['trips']} | {worth[0]} | {worth[1]} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
