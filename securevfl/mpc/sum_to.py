"""Secure sum and weighted mean: the primary alone learns the total of the parties' words.

For a mean, each party multiplies its tensors by its weight (a number of samples, for example) and
appends the weight; the sums of both are revealed, and their ratio is the mean. Each number has its
own ring element, in steps of 2^-32, or larger ones for large numbers: parameters are few, and need
more precision than representations.
"""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, Protocol, runtime_checkable

import torch
from jaxtyping import Int64
from torch import Tensor

from securevfl.core import checks
from securevfl.core.errors import EncodingRangeError, ProtocolError

Words = Int64[Tensor, "words"]
"""Elements of the ring, 64 bits each."""


@runtime_checkable
class SumTo(Protocol):
    """Adds all parties' words modulo 2^64, element by element, for the primary."""

    def __call__(self, words: Words, *, round_number: int, active: Sequence[int]) -> Words | None:
        """Contribute ``words``; return the total at the primary and None elsewhere.

        Args:
            words: This party's contribution; the primary's own or zeros. A secondary's words are
                masked in place, the primary's become the total; neither may be used again.
            round_number: The round, never used before in this session.
            active: Ranks of the secondaries that contribute.

        Reveals:
            To the primary: the total. The primary together with some of the active secondaries
            learns the sum of the other active ones, and nothing else; under sparse masks only while
            the colluding ones are fewer than :func:`securevfl.mpc.masks.connectivity`. If active
            secondaries got different messages (:meth:`bind`), it learns nothing. To any other
            party: nothing.
        """
        ...

    def bind(self, message_digest: bytes, ranks: Sequence[int]) -> None:
        """Make later sums valid only if these ranks have received this message of the primary too.

        A secondary binds every message that the primary sends to others too, on receipt; see
        :meth:`securevfl.mpc.masks.PairwiseMasks.bind`. The primary binds nothing.

        Reveals:
            Nothing.
        """
        ...

    def prepare(self, count: int, *, round_number: int, active: Sequence[int]) -> None:
        """Start the work that does not depend on the words, while the model computes.

        The round counts as used from now on, even without words.

        Args:
            count: Number of words that this party will contribute.
            round_number: The round, never used before in this session.
            active: Ranks of the secondaries that will contribute.

        Reveals:
            Nothing.
        """
        ...


@runtime_checkable
class WordWire(Protocol):
    """Transport of words: an authenticated, ordered star around the primary."""

    @property
    def masked(self) -> bool:
        """True at a secondary, whose words go in under masks; False at the primary."""
        ...

    def carry(self, round_number: int, words: Words, ranks: Sequence[int]) -> None:
        """Send a secondary's words, or add to the primary's as many from each of ``ranks``.

        Reveals:
            To the primary: a secondary's words as they are.
        """
        ...


class InProcessSum:
    """The sum for the simulator, where all parties are in one process: without masks."""

    def __call__(self, contributions: Sequence[Words]) -> Words:
        """Return the sum of all contributions modulo 2^64, as int64 wraps.

        Raises:
            ProtocolError: If there are none, or their sizes differ.

        Reveals:
            Nothing leaves the process.
        """
        if not contributions or len({len(words) for words in contributions}) != 1:
            raise ProtocolError(
                f"cannot add contributions of {[len(words) for words in contributions]} words"
            )
        total = contributions[0].clone()
        for words in contributions[1:]:
            total += words
        return total


_PRECISION_BITS: Final = 32


def fraction_bits(last_mean: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the number of binary places of each tensor in the next mean, equal at all parties.

    It is 32, or 39 - e if the tensor's largest number in the last mean is in [2^e, 2^(e+1)) with e
    >= 7. A step is then at most 2^-39 of that number, and a party's number may grow by 2^24 /
    (parties x its weight) in the next mean. Weights with ISO noise do grow ([FedHSSL] Equation 7),
    since each mean's noise is as large as the longest row before it.

    Args:
        last_mean: The last mean, equal at all parties.
    """
    return {
        name: min(_PRECISION_BITS, _PRECISION_BITS + 8 - math.frexp(float(value.abs().max()))[1])
        for name, value in last_mean.items()
    }


def words_needed(shapes: Mapping[str, Sequence[int]]) -> int:
    """Return the number of words for tensors of these shapes and the weight."""
    return sum(torch.Size(shape).numel() for shape in shapes.values()) + 1


def encode_weighted(
    tensors: Mapping[str, Tensor],
    *,
    weight: float,
    parties: int,
    bits: Mapping[str, int] = MappingProxyType({}),
) -> Words:
    """Return one party's weighted tensors and its weight as words, sorted by name.

    Args:
        tensors: Named float tensors; every party has the same names and shapes.
        weight: The party's weight in the mean, >= 0; 0 leaves the party out, without showing it.
        parties: Largest number of contributions to the sum.
        bits: Result of :func:`fraction_bits`, equal at every party; 32 for a missing tensor.

    Raises:
        EncodingRangeError: If a value is not finite or not float, or a sum of ``parties`` such
            values could overflow.

    Reveals:
        Nothing alone. Summed by :class:`securevfl.mpc.sum_to.SumTo`: to the primary, the weighted
        mean and the sum of the weights.
    """
    checks.non_negative(weight=weight)
    checks.at_least(1, parties=parties)
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise EncodingRangeError(f"{name} is {tensor.dtype}; only float tensors are averaged")
    parts = [
        (tensors[name].detach().reshape(-1).double(), 2.0 ** bits.get(name, _PRECISION_BITS))
        for name in sorted(tensors)
    ]
    device = parts[0][0].device if parts else torch.device("cpu")
    parts.append((torch.ones(1, dtype=torch.float64, device=device), 2.0**_PRECISION_BITS))
    flat = torch.cat([value * steps for value, steps in parts]) * weight
    limit = 2.0**63 / parties
    if not float(flat.abs().max()) < limit:
        maxima = [(float(value.abs().max()) * weight, limit / steps) for value, steps in parts]
        largest, bound = next((size, most) for size, most in maxima if not size < most)
        raise EncodingRangeError(
            f"a weighted parameter is {largest:g}, outside the bound {bound:g} that {parties} "
            f"parties leave in the ring; nothing was sent"
        )
    return torch.round(flat).to(torch.int64)


def decode_mean(
    total_words: Words,
    shapes: Mapping[str, Sequence[int]],
    *,
    bits: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """Return the weighted mean of every tensor, in float32.

    Before rounding to float32, each is within ``parties * 2^-(bits + 1) / (sum of weights)`` of the
    exact mean.

    Args:
        total_words: The sum of all parties' words.
        shapes: Shape of every tensor by name, the same at every party.
        bits: The ``bits`` of :func:`encode_weighted`.

    Raises:
        ProtocolError: If the number of words does not fit ``shapes``, or no weight is positive.
    """
    needed = words_needed(shapes)
    if total_words.numel() != needed:
        raise ProtocolError(f"a mean needs {needed} words, got {total_words.numel()}")
    total = total_words.to(torch.float64)
    if not float(total[-1]) > 0:
        raise ProtocolError("the parties' weights do not sum to more than zero: no mean exists")
    mean = total[:-1] / total[-1]
    parts = mean.split([torch.Size(shapes[name]).numel() for name in sorted(shapes)])
    coarser = {name: 2.0 ** (_PRECISION_BITS - bits.get(name, _PRECISION_BITS)) for name in shapes}
    return {
        name: (part * coarser[name]).to(torch.float32).view(tuple(shapes[name]))
        for name, part in zip(sorted(shapes), parts, strict=True)
    }
