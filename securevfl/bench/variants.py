"""Ways to bring the mean of k tensors to the primary: ours, and what it is compared with.

Each is run by all k + 1 parties at once. Rank 0 is the primary, which holds nothing; ranks 1 to k
are the secondaries. Only the first two and the last two hide the tensors from the primary.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float32
from torch import Tensor

from securevfl.core.ranks import PRIMARY_RANK
from securevfl.dp.ring_noise import ExactDiscreteGaussian
from securevfl.federation.exchange_over_star import PrimaryWire
from securevfl.federation.messages import RoundKind
from securevfl.federation.star_secondary import SecondaryWire
from securevfl.mpc.codec import decode_sum, encode, quantise, require_row_norms, to_float
from securevfl.mpc.compat import import_crypten
from securevfl.mpc.crypten_bridge import CrypTenBridge
from securevfl.mpc.masks import PairwiseMasks
from securevfl.mpc.ring_format import RingFormat
from securevfl.mpc.sum_to import CrypTenSumTo
from securevfl.transport.message import Message
from securevfl.transport.star import PrimaryTransport, SecondaryTransport

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
        self.sum_to = CrypTenSumTo(CrypTenBridge(wire, rank=rank), masks)
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
