"""Clipping of representations, records and gradients to an L2 norm of at most C.

B = rows of the batch, L = positions, K = links of a row, H = width.
"""

import math
from typing import Any, Final, cast

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn.functional import hardshrink

from securevfl.core import checks, devices

# A clipped float32 row is rounded once per element, by a relative 2^-24 at most; aiming this far
# below C keeps its norm at most C after that, with room for the division's own rounding.
_MARGIN: Final = 2.0**-20

# Below it a float32 factor would be denormal and lose that precision. A row 2^100 times too long
# comes from a diverged model; it is counted as zero.
_SMALLEST_SCALE: Final = 2.0**-100


def clip_rows(
    representation: Float[Tensor, "batch positions width"], clip_norm: float
) -> Float[Tensor, "batch positions width"]:
    """Scale each row down to an L2 norm over (L, H) of at most ``clip_norm``.

    ``R_b -> R_b * min(1, C / ||R_b||)``. The norm is at most C in exact arithmetic too, not only
    up to rounding: norms are taken in float64, and a row that is scaled lands at C (1 - 2^-20).
    Differentiable, a zero row included; NaN stays NaN, for the codec to refuse.

    Args:
        representation: One party's representation of a batch, floats of any width.
        clip_norm: C, in the units of the representation, > 0.

    Raises:
        ConfigError: If ``clip_norm`` is not finite and positive.

    References:
        [FeT] Algorithm 1, line 8; the average there takes the unclipped R, which protects nothing.
    """
    return _clip(representation, clip_norm, dim=(1, 2))


def clip_records(
    representation: Float[Tensor, "batch links width"], clip_norm: float
) -> Float[Tensor, "batch links width"]:
    """Scale each record's vector down to an L2 norm over H of at most ``clip_norm``.

    For bottom models whose K vectors each depend on one record alone and are pooled by a mean:
    replacing one record then moves the mean by at most 2C/K, and the mean's norm is at most C.

    Args:
        representation: One vector per link, floats of any width.
        clip_norm: C, in the units of the representation, > 0.

    Raises:
        ConfigError: If ``clip_norm`` is not finite and positive.
    """
    return _clip(representation, clip_norm, dim=(2,))


def clip_gradients(
    gradients: Float[Tensor, "batch parameters"], clip_norm: float
) -> Float[Tensor, "batch parameters"]:
    """Scale each row's gradient down to an L2 norm over all parameters of at most ``clip_norm``.

    Args:
        gradients: One gradient of all parameters a primary row, floats of any width.
        clip_norm: C_g, in the units of the gradient, > 0.

    Raises:
        ConfigError: If ``clip_norm`` is not finite and positive.

    References:
        [ACG16] Algorithm 1 (arXiv:1607.00133v2), where an example is what a row is here.
    """
    return _clip(gradients, clip_norm, dim=(1,))


def is_finite(value: Tensor) -> Bool[Tensor, ""]:
    """Return whether no element is NaN or infinite, on the value's device."""
    if value.numel() == 0:
        return torch.tensor(True, device=value.device)
    # NaN wins over every number here, and this is a tenth of the time of testing each element.
    return torch.isfinite(torch.stack(torch.aminmax(value.detach()))).all()


def finite_or_zero(value: Tensor, *, dim: tuple[int, ...]) -> tuple[Tensor, Int64[Tensor, ""]]:
    """Set every slice along ``dim`` that has NaN or infinity to zero; return how many had.

    Differentiable; the slices that are set to zero give no gradient to ``value``.
    """
    if value.device.type == "cpu" and is_finite(value):
        return value, torch.tensor(0)
    # The largest number of a slice is NaN if any of it is.
    whole = torch.linalg.vector_norm(value.detach(), math.inf, dim=dim, keepdim=True) < math.inf
    return torch.where(whole, value, 0.0), whole.numel() - whole.sum()


def _clip(representation: Tensor, clip_norm: float, *, dim: tuple[int, ...]) -> Tensor:
    checks.positive(clip_norm=clip_norm)
    # A model that computes in half precision is clipped and encoded in single.
    representation = devices.widen_floats(representation)
    target = clip_norm * (1 - _MARGIN)
    # A traced model goes through torch's own operations, and needs no gradient.
    if not (torch.is_grad_enabled() and representation.requires_grad):
        return representation * _scale(representation, target, dim)
    clipped, _ = _Clip.apply(representation, target, dim)  # type: ignore[no-untyped-call]
    return cast(Tensor, clipped)


def _scale(inputs: Tensor, target: float, dim: tuple[int, ...]) -> Tensor:
    norm = torch.linalg.vector_norm(inputs, dim=dim, keepdim=True, dtype=torch.float64)
    # Where nothing is clipped it is 1, even if target / target comes out below it in float64.
    scale = (target / norm).clamp_max(1.0)
    return hardshrink(scale, _SMALLEST_SCALE).to(inputs.dtype)


class _Clip(torch.autograd.Function):
    """Scale slices that are longer than ``target`` down to it, with the gradient in closed form.

    With s the scale of a slice and y = s x the clipped one, of length ``target``, the gradient
    against g is s (g - y (g . y) / target^2); autograd would go back through the norm in float64.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(inputs: Tensor, target: float, dim: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        scale = _scale(inputs, target, dim)
        return inputs * scale, scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _, ctx.target, ctx.dim = inputs
        clipped, scale = output
        ctx.mark_non_differentiable(scale)
        ctx.save_for_backward(clipped, scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor, None, None]:
        clipped, scale = ctx.saved_tensors
        along = (gradient * clipped).sum(dim=ctx.dim, keepdim=True) / ctx.target**2
        # Slices within the target, a zero one among them, have a gradient as if nothing were here.
        radial = clipped * torch.where(scale < 1, along, 0.0)
        return (gradient - radial).mul_(scale), None, None
