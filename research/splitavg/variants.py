"""Variants of the mean of k tensors at the primary: SplitAvg and its baselines.

Each is run by all k + 1 parties at once. Rank 0 is the primary, which holds nothing; ranks 1 to k
are the secondaries. Only the first two and the last two hide the tensors from the primary.
"""

import os
import socket
import stat
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float32
from torch import Tensor

from securevfl.core.conventions import PRIMARY_RANK
from securevfl.core.errors import ConfigError
from securevfl.dp.ring_noise import ExactDiscreteGaussian
from securevfl.federation.messages import RoundKind
from securevfl.federation.over_star import PrimaryWire, SecondaryWire
from securevfl.mpc.codec import (
    RingFormat,
    decode_sum,
    encode,
    quantise,
    require_row_norms,
    to_float,
)
from securevfl.mpc.crypten_bridge import CrypTenSumTo, import_crypten
from securevfl.mpc.masks import PairwiseMasks
from securevfl.transport.message import Message
from securevfl.transport.star import PrimaryTransport, SecondaryTransport

# What a party measures of one round.


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One party's figures of one round."""

    wall_s: float = 0.0

    cpu_s: float = 0.0

    sent: int = 0
    """Bytes."""

    received: int = 0
    """Bytes."""

    max_error: float = 0.0
    """Largest error of the mean, at the primary; 0 elsewhere."""


# Bytes that this process has sent and received over TCP, as the kernel counts them.

# Offsets in Linux's struct tcp_info (include/uapi/linux/tcp.h), stable since 4.19.
_BYTES_RECEIVED_AT: Final = 128
_BYTES_SENT_AT: Final = 200
_TCP_INFO_BYTES: Final = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes over all open TCP sockets of a process."""

    sent: int
    received: int

    def since(self, earlier: "Traffic") -> "Traffic":
        """Return what was added after ``earlier``."""
        return Traffic(sent=self.sent - earlier.sent, received=self.received - earlier.received)


def own_traffic() -> Traffic:
    """Add up the counters of every TCP socket that this process has open, TLS's own included.

    Raises:
        ConfigError: On systems other than Linux.
    """
    if not sys.platform.startswith("linux"):
        raise ConfigError("bytes are counted by Linux's TCP_INFO, which this system lacks")
    sent = received = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            descriptor = os.dup(int(entry.name))
        except OSError:
            continue  # The listing's own descriptor is closed by now.
        try:
            counters = _tcp_counters(descriptor)
        finally:
            os.close(descriptor)
        sent += counters[0]
        received += counters[1]
    return Traffic(sent=sent, received=received)


def _tcp_counters(descriptor: int) -> tuple[int, int]:
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return 0, 0
    with socket.socket(fileno=os.dup(descriptor)) as link:
        if link.family not in (socket.AF_INET, socket.AF_INET6) or link.type != socket.SOCK_STREAM:
            return 0, 0
        info = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    if len(info) < _BYTES_SENT_AT + 8:
        raise ConfigError("this kernel's TCP_INFO does not count bytes sent; it is older than 4.19")
    (sent,) = struct.unpack_from("<Q", info, _BYTES_SENT_AT)
    (received,) = struct.unpack_from("<Q", info, _BYTES_RECEIVED_AT)
    return sent, received


# Ways to bring the mean of k tensors to the primary: ours, and what it is compared with.

crypten = import_crypten()

Variant = Callable[[int], Tensor | None]
"""Runs one round of the given number; returns the mean at the primary."""

DEADLINE_S = 120.0
CLIP_NORM = 1.0


class Bench:
    """One party's end of every variant, over one gloo group and one TLS star."""

    def __init__(
        self,
        x: Float32[Tensor, "rows width"],
        *,
        rank: int,
        names: Mapping[int, str],
        transport: PrimaryTransport | SecondaryTransport,
        pair_keys: Mapping[int, bytes],
        noise_share_std: float,
    ) -> None:
        self.x = x
        self.rank = rank
        self.names = dict(names)
        self.secondaries: Sequence[int] = tuple(r for r in names if r != PRIMARY_RANK)
        self.transport = transport
        masks = None
        if isinstance(transport, PrimaryTransport):
            wire: PrimaryWire | SecondaryWire = PrimaryWire(
                transport, self.names, deadline_s=DEADLINE_S
            )
        else:
            wire = SecondaryWire(transport)
            masks = PairwiseMasks(rank, pair_keys)
        self.sum_to = CrypTenSumTo(wire, masks)
        self.formats = {
            std: RingFormat.choose(
                clip_norm=CLIP_NORM, noise_share_std=std, parties=len(self.secondaries)
            )
            for std in (0.0, noise_share_std)
        }
        self.noise_share_std = noise_share_std
        self.noise = ExactDiscreteGaussian(
            noise_share_std / self.formats[noise_share_std].granularity
        )

    @property
    def variants(self) -> dict[str, Variant]:
        """Every variant by its name in the results."""
        return {
            "naive_crypten": self.naive_crypten,
            "one_zero_share": self.one_zero_share,
            "gather_float32": self.gather_float32,
            "gather_float32_tls": self.gather_float32_tls,
            "splitavg": self.splitavg,
            "splitavg_no_noise": self.splitavg_no_noise,
        }

    def naive_crypten(self, _round: int) -> Tensor | None:
        """Share every tensor on its own, add the shares, reveal: how one would start.

        Reveals:
            Over gloo in clear: shares whose masks have 32 bits of entropy.
        """
        total = None
        for source in self.secondaries:
            mine = self.x if source == self.rank else torch.empty_like(self.x)
            shared = crypten.cryptensor(mine, src=source)
            total = shared if total is None else total + shared
        assert total is not None
        return self._mean(total.get_plain_text(dst=PRIMARY_RANK))

    def one_zero_share(self, _round: int) -> Tensor | None:
        """Add each tensor to one common sharing of zero, reveal: CrypTen used economically.

        Reveals:
            As :meth:`naive_crypten`.
        """
        arithmetic = crypten.mpc.primitives.ArithmeticSharedTensor
        shared = arithmetic.from_shares(arithmetic.PRZS(self.x.shape).share)
        if self.rank != PRIMARY_RANK:
            shared.share += shared.encoder.encode(self.x)
        return self._mean(shared.get_plain_text(dst=PRIMARY_RANK))

    def gather_float32(self, _round: int) -> Tensor | None:
        """Send every tensor to the primary over gloo, in clear.

        Reveals:
            To the primary and to everybody on the wire: every tensor.
        """
        if self.rank != PRIMARY_RANK:
            dist.gather(self.x, dst=PRIMARY_RANK)
            return None
        gathered = [torch.empty_like(self.x) for _ in self.names]
        dist.gather(self.x, gathered, dst=PRIMARY_RANK)
        return self._mean(sum(gathered[1:], start=torch.zeros_like(self.x)))

    def gather_float32_tls(self, round_number: int) -> Tensor | None:
        """Send every tensor to the primary over our transport: what the wire itself costs.

        Reveals:
            To the primary: every tensor.
        """
        if isinstance(self.transport, SecondaryTransport):
            self.transport.send(
                Message(
                    kind=RoundKind.SHARE,
                    round_number=round_number,
                    meta={},
                    tensors={"x": self.x.numpy()},
                )
            )
            return None
        total = torch.zeros_like(self.x)
        for message in self.transport.receive_each(
            [self.names[rank] for rank in self.secondaries],
            RoundKind.SHARE,
            round_number=round_number,
            deadline_s=DEADLINE_S,
        ):
            shape = tuple(self.x.shape)
            total += torch.from_numpy(message.tensor("x", dtype=np.float32, shape=shape))
        return self._mean(total)

    def splitavg(self, round_number: int) -> Tensor | None:
        """Run what a release runs from the clipped rows on: quantise, noise, encode, mask, sum.

        Reveals:
            To the primary: the noised sum.
        """
        return self._splitavg(round_number, noise_share_std=self.noise_share_std)

    def splitavg_no_noise(self, round_number: int) -> Tensor | None:
        """Run the same without noise, at the finest step.

        Reveals:
            To the primary: the sum.
        """
        return self._splitavg(round_number, noise_share_std=0.0)

    def _splitavg(self, round_number: int, *, noise_share_std: float) -> Tensor | None:
        fmt = self.formats[noise_share_std]
        elements = self.x.numel()
        if self.rank == PRIMARY_RANK:
            words = torch.zeros(fmt.words(elements), dtype=torch.int64)
        else:
            units = quantise(self.x, fmt)
            if noise_share_std:
                # The norm bound is what the noise is measured against.
                require_row_norms(units, fmt, clip_norm=CLIP_NORM)
                units += self.noise.sample(units.shape)
            words = encode(units, fmt, reuse=True)
        total = self.sum_to(words, round_number=round_number, active=self.secondaries)
        if total is None:
            return None
        active = len(self.secondaries)
        summed = decode_sum(total, fmt, elements=elements, parties_active=active)
        return to_float(summed, fmt, divisor=active)

    def _mean(self, total: Tensor | None) -> Tensor | None:
        # CrypTen hands something to every party; only the primary's is the sum.
        if self.rank != PRIMARY_RANK or total is None:
            return None
        return total / len(self.secondaries)
