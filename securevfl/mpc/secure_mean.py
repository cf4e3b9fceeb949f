"""The weighted mean of all parties' parameters, of which only the mean is seen.

Each party multiplies its tensors by its weight (a count of samples, say) and appends the weight
itself; the sum of both is revealed, and their ratio is the mean. One ring element a number, in
steps of 2^-32: parameters are few, and want more precision than representations.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from jaxtyping import Int64
from torch import Tensor

from securevfl.core import checks
from securevfl.core.errors import EncodingRangeError, ProtocolError

_PRECISION_BITS: Final = 32


def words_needed(shapes: Mapping[str, Sequence[int]]) -> int:
    """Return how many words carry tensors of these shapes and the weight."""
    return sum(torch.Size(shape).numel() for shape in shapes.values()) + 1


def encode_weighted(
    tensors: Mapping[str, Tensor], *, weight: float, parties: int
) -> Int64[Tensor, "words"]:
    """Return one party's weighted tensors and its weight as words, in order of name.

    Args:
        tensors: Named float tensors; every party has the same names and shapes.
        weight: The party's say in the mean, >= 0; 0 counts a party out without showing it.
        parties: Most contributions to the sum.

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
    ordered = [tensors[name].detach().reshape(-1).double() for name in sorted(tensors)]
    device = ordered[0].device if ordered else torch.device("cpu")
    flat = torch.cat([*ordered, torch.ones(1, dtype=torch.float64, device=device)]) * weight
    largest = float(flat.abs().max())
    limit = 2.0 ** (63 - _PRECISION_BITS) / parties
    if not largest < limit:
        raise EncodingRangeError(
            f"a weighted parameter is {largest:g}, outside the bound {limit:g} that {parties} "
            f"parties leave in the ring; nothing was sent"
        )
    return torch.round(flat * 2.0**_PRECISION_BITS).to(torch.int64)


def decode_mean(
    total_words: Int64[Tensor, "words"], shapes: Mapping[str, Sequence[int]]
) -> dict[str, Tensor]:
    """Return the weighted mean of every tensor, in float32.

    Each is within ``parties * 2^-33 / (sum of weights)`` of the exact mean, and then rounded.

    Args:
        total_words: The sum of all parties' words.
        shapes: Shape of every tensor by name, the same at every party.

    Raises:
        ProtocolError: If the number of words does not fit ``shapes``, or no weight is positive.
    """
    needed = words_needed(shapes)
    if total_words.numel() != needed:
        raise ProtocolError(f"a mean needs {needed} words, got {total_words.numel()}")
    total = total_words.to(torch.float64)
    if not float(total[-1]) > 0:
        raise ProtocolError("the parties' weights do not sum to more than zero: no mean exists")
    mean = (total[:-1] / total[-1]).to(torch.float32)
    parts = mean.split([torch.Size(shapes[name]).numel() for name in sorted(shapes)])
    return {
        name: part.view(tuple(shapes[name]))
        for name, part in zip(sorted(shapes), parts, strict=True)
    }
