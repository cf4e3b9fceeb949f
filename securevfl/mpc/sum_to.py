"""Secure sum and mean: the primary alone learns the total of the parties' words.

Each party multiplies its tensors by its weight (a count of samples, say) and appends the weight
itself; the sum of both is revealed, and their ratio is the mean. One ring element a number, in
steps of 2^-32 and larger ones for large numbers: parameters are few, and want more precision than
representations.
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

# Add up the parties' words so that the primary alone learns the total.


@runtime_checkable
class SumTo(Protocol):
    """Adds every party's words modulo 2^64, element by element, for the primary."""

    def __call__(self, words: Words, *, round_number: int, active: Sequence[int]) -> Words | None:
        """Contribute ``words``; return the total at the primary and None elsewhere.

        Args:
            words: This party's contribution; the primary gives its own or zeros. A secondary's is
                masked in place, the primary's becomes the total; neither may be used again.
            round_number: The round, never used before in this session.
            active: Ranks of the secondaries that contribute.

        Reveals:
            To the primary: the total. The primary together with some of the active secondaries
            learns the sum of the other active ones, and nothing else; under sparse masks that
            holds for fewer of them than :func:`securevfl.mpc.masks.connectivity`. If these
            were told different things (:meth:`bind`), it learns nothing. To anyone else: nothing.
        """
        ...

    def bind(self, message_digest: bytes, ranks: Sequence[int]) -> None:
        """Let later sums hold only if these ranks have had this message of the primary too.

        A secondary binds every message of the primary that others get as well, as soon as it comes;
        see :meth:`securevfl.mpc.masks.PairwiseMasks.bind`. The primary binds nothing.

        Reveals:
            Nothing.
        """
        ...

    def prepare(self, count: int, *, round_number: int, active: Sequence[int]) -> None:
        """Do ahead what does not depend on the words, while the model computes.

        The round counts as used from here on, whether words follow or not.

        Args:
            count: Words that this party will contribute.
            round_number: The round, never used before in this session.
            active: Ranks of the secondaries that will contribute.

        Reveals:
            Nothing.
        """
        ...


@runtime_checkable
class WordWire(Protocol):
    """A party's end of an authenticated, ordered star around the primary, which carries words."""

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
    """The same total for the simulator, where all parties live in one process: no masks."""

    def __call__(self, contributions: Sequence[Words]) -> Words:
        """Return the sum of all contributions; int64 wraps, which is arithmetic modulo 2^64.

        Raises:
            ProtocolError: If there is none, or their sizes differ.

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


# The weighted mean of all parties' parameters, of which only the mean is seen.

_PRECISION_BITS: Final = 32


def fraction_bits(last_mean: Mapping[str, Tensor]) -> dict[str, int]:
    """Return by tensor how many binary places the next mean has, on which all parties agree.

    32, or 39 - e where the tensor's largest number in the last mean is 2^e or more, but below
    2^(e+1), with e >= 7. A step is then 2^-39 of that number or finer, and a party's number may be
    2^24 / (parties x its weight) times as large in the next mean. Weights behind ISO noise grow so
    ([FedHSSL] Equation 7): each mean's noise is as large as the longest row before it.

    Args:
        last_mean: The last mean, the same at all parties.
    """
    return {
        name: min(_PRECISION_BITS, _PRECISION_BITS + 8 - math.frexp(float(value.abs().max()))[1])
        for name, value in last_mean.items()
    }


def words_needed(shapes: Mapping[str, Sequence[int]]) -> int:
    """Return how many words carry tensors of these shapes and the weight."""
    return sum(torch.Size(shape).numel() for shape in shapes.values()) + 1


def encode_weighted(
    tensors: Mapping[str, Tensor],
    *,
    weight: float,
    parties: int,
    bits: Mapping[str, int] = MappingProxyType({}),
) -> Words:
    """Return one party's weighted tensors and its weight as words, in order of name.

    Args:
        tensors: Named float tensors; every party has the same names and shapes.
        weight: The party's say in the mean, >= 0; 0 counts a party out without showing it.
        parties: Most contributions to the sum.
        bits: Of :func:`fraction_bits`, the same at every party; 32 for a tensor that it lacks.

    Raises:
        EncodingRangeError: If a value is not finite or float, or a sum of ``parties`` such values
            could leave the ring; nothing was encoded.

    Reveals:
        Nothing by itself. Summed by :class:`securevfl.mpc.sum_to.SumTo`: to the primary, the
        weighted mean and the sum of the weights.
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

    Each is within ``parties * 2^-(bits + 1) / (sum of weights)`` of the exact mean, and then
    rounded.

    Args:
        total_words: The sum of all parties' words.
        shapes: Shape of every tensor by name, the same at every party.
        bits: As the words were encoded with.

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
