"""Updates of a bottom model: plain steps, or noised ones that are releases themselves."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import Any, Final, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from securevfl.core.conventions import derive_seed
from securevfl.core.devices import Precision, computing_in, reads, widen_floats
from securevfl.core.errors import PrivacyError
from securevfl.dp.clipping import clip_gradients, clip_rows, finite_or_zero
from securevfl.dp.ring_noise import ExactDiscreteGaussian, RingNoise
from securevfl.federation.rounds.cut import CutRows
from securevfl.models.building import Forward


class DropoutStream:
    """A party's own state of torch's generator, active while the party computes.

    Layers such as ``nn.Dropout`` draw from torch's one global generator. A simulated federation
    runs all parties in one process, so each party brings its own state and takes it home again:
    a simulated and a federated run then drop the same units on a CPU. On a GPU secondaries that are
    computed together draw from the first one's stream.
    """

    def __init__(self, seed: int, party: str, *, device: torch.device) -> None:
        self._device = device
        generator = torch.Generator(device=device).manual_seed(derive_seed(seed, "dropout", party))
        self.state = generator.get_state()

    def generator(self) -> torch.Generator:
        """Return a generator that continues this stream; it must bring its state home."""
        generator = torch.Generator(device=self._device)
        generator.set_state(self.state)
        return generator

    @contextmanager
    def active(self) -> Iterator[None]:
        """Use this party's stream inside the block."""
        outside = self._get()
        self._set(self.state)
        try:
            yield
        finally:
            self.state = self._get()
            self._set(outside)

    def _get(self) -> torch.Tensor:
        if self._device.type == "cuda":
            return torch.cuda.get_rng_state(self._device)
        return torch.get_rng_state()

    def _set(self, state: torch.Tensor) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(state, self._device)
        else:
            torch.set_rng_state(state)


# Numbers of row gradients that are held at a time: 32 MiB of float32, and some copies.
_MOST_NUMBERS: Final = 2**23

# And of those, that are clipped and rounded at a time: their copies in float64 stay in the cache.
_AT_A_TIME: Final = 2**17

# Noise is 2^20 to 2^21 units wide, so rounding B rows towards zero takes less than B 2^-20 of it
# from a coordinate.
_NOISE_BITS: Final = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkedRecords:
    """What a bottom model is given for a batch of rows."""

    features: Float[Tensor, "batch links features"]
    """The linked records' features; rows of absent links hold anything finite."""

    keys: Float[Tensor, "batch links dimension"]
    """The linked records' keys; rows of absent links hold anything finite."""

    present: Bool[Tensor, "batch links"]
    """True for each link that exists."""

    def pieces(self, rows: int) -> "list[LinkedRecords]":
        """Yield parts of at most that many rows."""
        parts = (self.features.split(rows), self.keys.split(rows), self.present.split(rows))
        return [
            LinkedRecords(features=features, keys=keys, present=present)
            for features, keys, present in zip(*parts, strict=True)
        ]


@runtime_checkable
class BackwardStep(Protocol):
    """A training round that waits for its gradient."""

    def gradients_from(self, gradient: CutRows, *, zero_lost: bool = False) -> Tensor:
        """Set ``grad`` of the bottom model's parameters.

        Args:
            gradient: Of the loss, with respect to this party's term of the aggregate.
            zero_lost: Whether gradients become zero, all of them, if a number is not finite.

        Returns:
            1 if a number is not finite, and else 0, on the model's device.
        """
        ...


def lost_of(gradients: Sequence[Tensor | None], *, device: torch.device) -> Float[Tensor, ""]:
    """Return 1 if a number of some gradients is not finite, and else 0."""
    lost = torch.zeros((), device=device)
    known = [gradient for gradient in gradients if gradient is not None]
    if known:
        # One kernel for all; scaled by 1 they stay as they are.
        torch._amp_foreach_non_finite_check_and_unscale_(known, lost, torch.ones_like(lost))
    return lost


class _Handed(torch.autograd.Function):
    """Ends a graph in one number, whose gradient on the way back is one that came from elsewhere.

    ``Tensor.backward(gradient)`` gives the same gradients, but asks torch's compiler whether shapes
    fit, which loads sympy: 40 MB and most of a second in every secondary's process.
    """

    @staticmethod
    def forward(ctx: Any, term: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return term.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_one: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient, None


def surrogate_loss(term: Tensor, gradient: Tensor) -> Tensor:
    """Return a number that hands ``gradient`` to ``term`` when it is differentiated."""
    end: Tensor = _Handed.apply(term, gradient)  # type: ignore[no-untyped-call]
    return end


@dataclass(frozen=True, eq=False)
class PlainBackwardStep:
    """A plain step: the gradient through the graph that the release was computed on."""

    term: CutRows
    stream: DropoutStream
    parameters: Sequence[nn.Parameter]

    def gradients_from(self, gradient: CutRows, *, zero_lost: bool = False) -> Tensor:
        """Set the gradients by going back through the clip and the bottom model."""
        # A simulation comes here on its way back through the top model, where no graphs grow.
        with self.stream.active(), torch.enable_grad():
            set_gradients(surrogate_loss(self.term, gradient), self.parameters)
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        lost = lost_of(gradients, device=gradient.device)
        if zero_lost and (lost.is_cuda or lost):
            mask = lost.bool()
            for weight_gradient in gradients:
                weight_gradient.masked_fill_(mask, 0.0)
        return lost


def set_gradients(
    loss: Tensor, parameters: Sequence[nn.Parameter], *leaves: Tensor
) -> list[Tensor]:
    """Set ``grad`` of parameters, None where a loss does not depend on one.

    Args:
        loss: One number.
        parameters: Whose gradients are replaced.
        leaves: Other leaves of the loss's graph.

    Returns:
        The gradient of each leaf, zero where the loss does not depend on it.
    """
    found = torch.autograd.grad(loss, [*parameters, *leaves], allow_unused=True)
    for parameter, gradient in zip(parameters, found, strict=False):
        # Fused optimizers take it for granted that a gradient lies in memory as its parameter.
        parameter.grad = None if gradient is None else gradient.contiguous()
    return [
        torch.zeros_like(leaf) if gradient is None else gradient.contiguous()
        for leaf, gradient in zip(leaves, found[len(parameters) :], strict=True)
    ]


class GradientNoise:
    """Adds up clipped gradients and noise in exact integers, as releases do.

    Each row's gradient is rounded towards zero, which lengthens none; their sum is exact, and so is
    the noise. What a run makes of the result (optimizer, averages, best weights) is
    post-processing.
    """

    def __init__(
        self,
        *,
        clip_norm: float,
        noise_std: float,
        sampler: Callable[[float], RingNoise] = ExactDiscreteGaussian,
    ) -> None:
        """Choose the unit in which gradients are rounded, and make the noise for it.

        Args:
            clip_norm: ``C_g``, largest L2 norm of one row's gradient, > 0.
            noise_std: ``tau_g``, noise on the sum, in the units of ``clip_norm``, > 0.
            sampler: Makes noise of a deviation in ring units.
        """
        self.clip_norm = clip_norm
        self.granularity = 2.0 ** (math.floor(math.log2(noise_std)) - _NOISE_BITS)
        self._noise = sampler(noise_std / self.granularity)
        self.not_finite = 0
        """Rows whose gradient counted as zero since it was not finite."""

    def units(self, rows: Float[Tensor, "batch parameters"]) -> Float64[Tensor, " parameters"]:
        """Return the sum of the clipped rows in whole units, without noise.

        A row that is not finite counts as zero, and in ``not_finite``.

        Raises:
            PrivacyError: If a row is over the clip norm.
        """
        rows, lost = finite_or_zero(rows, dim=(1,))
        reads().add(lost, self._count)
        total = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
        at_a_time = len(rows) if rows.is_cuda else _AT_A_TIME // max(1, rows.shape[1])
        norms = []
        for piece in rows.split(max(1, at_a_time)):
            units = clip_gradients(piece, self.clip_norm).double().div_(self.granularity).trunc_()
            norms.append(torch.linalg.vector_norm(units, dim=1))
            # Whole numbers below 2^53 add up exactly in float64.
            total += units.sum(dim=0)
        if norms:
            reads().add(torch.cat(norms).max(), self._check)
        return total

    def _count(self, lost: Tensor) -> None:
        self.not_finite += int(lost)

    def _check(self, longest: Tensor) -> None:
        # The promise rests on this bound: written so that NaN fails. The clip's own margin is far
        # above what float64 loses of a norm.
        if not float(longest) <= self.clip_norm / self.granularity:
            raise PrivacyError("a row's gradient is over its clip norm")

    def add_noise(self, total: Float64[Tensor, " parameters"]) -> Float[Tensor, " parameters"]:
        """Return a sum of rows with fresh noise, in the units of ``clip_norm``, float32."""
        drawn = self._noise.sample(total.shape, device=total.device)
        return ((total + drawn) * self.granularity).float()


@dataclass(eq=False)
class RowGradients:
    """A bottom model's gradients, clipped row by row and added up.

    A row's loss is the inner product of *its own* clipped representation with the gradient that the
    primary sent for it, times the rows of the batch (the primary's loss is their mean): what one
    row teaches does not depend on how many are taught.

    References:
        docs/privacy.md, section 3, "Updates of a dp-trained encoder"; [ACGMMTZ16]
        Algorithm 1, with a row in place of an example.
    """

    bottom: nn.Module
    """The model, in training mode."""
    links: InitVar[LinkedRecords]
    """The same links, of the same secret sample, as the round's release."""
    _: KW_ONLY
    forward: Forward
    """The model as it is evaluated."""
    clip_norm: float
    """``C`` of releases."""
    noise: GradientNoise
    """Adds the gradients up."""
    stream: DropoutStream
    """This party's: the units that the release drops are dropped again."""
    precision: Precision = "float32"
    """Precision in which the model computes; its output is float32."""

    def __post_init__(self, links: LinkedRecords) -> None:
        """Keep what the round's release will be made of; call it before the release."""
        self._pieces = links.pieces(rows_at_a_time(self.bottom))
        self._drawn_from = self.stream.state

    def represent(self) -> CutRows:
        """Return the rows' representation, piece by piece, as the gradients go through them."""
        device = self._pieces[0].features.device
        with self.stream.active(), torch.no_grad(), computing_in(self.precision, device):
            rows = [
                self.forward(piece.features, piece.keys, piece.present) for piece in self._pieces
            ]
            return widen_floats(torch.cat(rows))

    def total(self, gradient: CutRows) -> Float64[Tensor, " parameters"]:
        """Return the sum of the rows' clipped gradients in whole units, without noise.

        Args:
            gradient: Of each row's loss, with respect to its representation.
        """
        parameters = dict(self.bottom.named_parameters())
        released, self.stream.state = self.stream.state, self._drawn_from
        numbers = sum(value.numel() for value in parameters.values())
        total = torch.zeros(numbers, dtype=torch.float64, device=gradient.device)
        # Each row's gradient is taken within; outside of that no graph grows.
        with self.stream.active(), torch.no_grad():
            for rows in self._each(parameters, gradient):
                total += self.noise.units(rows)
        self.stream.state = released
        return total

    def _each(
        self, parameters: Mapping[str, Tensor], gradient: CutRows
    ) -> Iterator[Float[Tensor, "rows parameters"]]:
        def taught(
            weights: Mapping[str, Tensor],
            features: Tensor,
            keys: Tensor,
            present: Tensor,
            wanted: Tensor,
        ) -> Tensor:
            with computing_in(self.precision, features.device):
                row = functional_call(self.bottom, dict(weights), (features, keys, present))
            return (clip_rows(row, self.clip_norm) * wanted).sum()

        each = vmap(grad(taught), in_dims=(None, 0, 0, 0, 0), randomness="different")
        done = 0
        for piece in self._pieces:
            rows = len(piece.present)
            wanted = gradient[done : done + rows]
            done += rows
            # A batch of one row each: the model must not see that there are others.
            gradients = each(
                parameters,
                piece.features.unsqueeze(1),
                piece.keys.unsqueeze(1),
                piece.present.unsqueeze(1),
                wanted.unsqueeze(1),
            )
            yield torch.cat([value.reshape(rows, -1) for value in gradients.values()], dim=1)


@dataclass(frozen=True, eq=False)
class PrivateBackwardStep:
    """A gradient that is one noised release, clipped for each row of the primary."""

    bottom: nn.Module
    """The model that learns."""
    total: Callable[[Tensor], Tensor]
    """Called with the batch's gradient to sum the rows' gradients: :meth:`RowGradients.total`."""
    noise: GradientNoise
    """Protects the update."""

    def gradients_from(self, gradient: CutRows, *, zero_lost: bool = False) -> Tensor:  # noqa: ARG002
        """Set ``grad`` to the noised mean of the batch's gradients, each clipped alone.

        Reveals:
            Nothing by itself: weights stay. What is made of them is covered by the noise, as if
            this gradient had been published.
        """
        count = len(gradient)
        flat = self.noise.add_noise(self.total(gradient * count)) / count
        parameters = list(self.bottom.parameters())
        parts = flat.split([value.numel() for value in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        # What was not finite counted as zero before the noise.
        return lost_of([flat], device=flat.device)


def rows_at_a_time(bottom: nn.Module) -> int:
    """Return for how many rows at a time gradients of all parameters are kept in memory."""
    numbers = sum(value.numel() for value in bottom.parameters())
    return max(1, _MOST_NUMBERS // max(1, numbers))
