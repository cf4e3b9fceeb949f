"""Training passes as CUDA graphs: one launch instead of hundreds.

Kernels of a small network take the GPU less time than launching them takes the CPU. So forward and
backward pass are captured once for each shape of inputs, and then replayed. Code that branches on
values, or waits, stays outside.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from securevfl.core.devices import Precision, computing_in, widen_floats
from securevfl.core.logs import log
from securevfl.models.family import Stackable

MOST: Final = 8
"""Shapes that one computation is captured for; batches of further shapes are launched."""

_WARM_UPS: Final = 3
"""Passes before a capture, in which libraries allocate memory and choose algorithms."""


class Replays:
    """A function of tensors whose training passes a GPU captures and replays."""

    def __init__(self, compute: Callable[..., Tensor], *, name: str) -> None:
        """Wrap a function.

        Args:
            compute: Returns one tensor from all inputs and then all weights.
            name: Name in logs.
        """
        self._compute = compute
        self._name = name
        self._captured: dict[Hashable, Callable[..., Tensor]] = {}
        self._launches = False

    def __call__(self, inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
        """Return the function's result, on the autograd graph if gradients are enabled.

        The next replay overwrites a replay's result and gradients.

        Args:
            inputs: Of this batch.
            weights: Leaves of the autograd graph, whose memory must not move.
        """
        if not (weights[0].is_cuda and torch.is_grad_enabled()):
            return self._compute(*inputs, *weights)
        shapes = tuple((tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in inputs)
        if shapes not in self._captured:
            full = len(self._captured) == MOST
            if not full or not self._launches:
                about = {"network": self._name, "rows": len(inputs[0])}
                log("launched" if full else "captured", about)
            self._launches = full
            if full:
                return self._compute(*inputs, *weights)
            self._captured[shapes] = _Captured(self._compute, inputs, weights)
        return self._captured[shapes](*inputs, *weights)


class _Captured:
    """CUDA graphs of the forward and the backward pass for inputs of one shape.

    References:
        ``torch.cuda.make_graphed_callables``, whose capture fails if another thread of the process
        allocates memory meanwhile, as the thread that draws noise does.
    """

    def __init__(
        self, compute: Callable[..., Tensor], inputs: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> None:
        # Inputs are copied into these tensors; weights are read in place, by separate leaves.
        self._inputs = [
            tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in inputs
        ]
        values = self._inputs + [weight.detach().requires_grad_() for weight in weights]
        device = weights[0].device
        state = torch.cuda.get_rng_state(device)
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        capturing = partial(torch.cuda.graph, stream=side, capture_error_mode="thread_local")
        # A cache would make the capture use weights that were cast during warm-up, for ever.
        uncached = torch.autocast(device.type, enabled=False, cache_enabled=False)
        with torch.enable_grad(), uncached:
            with torch.cuda.stream(side):
                for _ in range(_WARM_UPS):
                    out = compute(*values)
                    _gradients(out, values, torch.zeros_like(out))
                    del out
            with capturing(self._forward):
                out = compute(*values)
            self._gradient = torch.zeros_like(out)
            with capturing(self._backward, pool=self._forward.pool()):
                self._found = _gradients(out, values, self._gradient)
        self._out = out.detach()
        # Random numbers of the warm-up are drawn again.
        torch.cuda.set_rng_state(state, device)

    def __call__(self, *values: Tensor) -> Tensor:
        """Replay for these inputs and the captured weights."""
        out: Tensor = _Replay.apply(self, *values)  # type: ignore[no-untyped-call]
        return out

    def forward(self, values: Sequence[Tensor]) -> Tensor:
        """Return the output for the inputs, which are the first of ``values``."""
        for own, value in zip(self._inputs, values, strict=False):
            own.detach().copy_(value)
        self._forward.replay()
        return self._out.detach()

    def backward(self, gradient: Tensor) -> Sequence[Tensor | None]:
        """Return the gradient of every input and weight for the last forward replay."""
        self._gradient.copy_(gradient)
        self._backward.replay()
        return self._found


def _gradients(out: Tensor, values: Sequence[Tensor], gradient: Tensor) -> Sequence[Tensor | None]:
    wanted = [value for value in values if value.requires_grad]
    gradients = iter(torch.autograd.grad(out, wanted, gradient, allow_unused=True))
    return [next(gradients) if value.requires_grad else None for value in values]


class _Replay(torch.autograd.Function):
    """Both captured passes as one node of the autograd graph."""

    @staticmethod
    def forward(ctx: Any, captured: _Captured, *values: Tensor) -> Tensor:
        ctx.captured = captured
        return captured.forward(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, *ctx.captured.backward(gradient)


class Network:
    """A network that computes in a given precision; on a GPU its training passes are replayed."""

    def __init__(self, module: nn.Module, precision: Precision) -> None:
        """Wrap a module; one that is not :class:`Stackable` is launched kernel by kernel."""
        self.module = module
        self._precision = precision
        self._weights = dict(module.named_parameters())
        self._replays: dict[Hashable, Replays] = {}
        self._launched = False

    def __call__(self, *inputs: Tensor | None) -> Tensor:
        """Return the outputs, in at least 32 bits."""
        given = [tensor for tensor in inputs if tensor is not None]
        trains = given[0].is_cuda and self.module.training and torch.is_grad_enabled()
        if not (trains and isinstance(self.module, Stackable)):
            if trains and not self._launched:
                log("launched", {"network": type(self.module).__name__, "rows": len(given[0])})
                self._launched = True
            return self._evaluate(self.module, inputs)
        missing = tuple(tensor is None for tensor in inputs)

        def compute(*values: Tensor) -> Tensor:
            left = iter(values)
            filled = [None if is_missing else next(left) for is_missing in missing]
            weights = dict(zip(self._weights, left, strict=True))
            return self._evaluate(lambda *own: functional_call(self.module, weights, own), filled)

        if missing not in self._replays:
            self._replays[missing] = Replays(compute, name=type(self.module).__name__)
        return self._replays[missing](given, list(self._weights.values()))

    def _evaluate(self, network: Callable[..., Tensor], inputs: Sequence[Tensor | None]) -> Tensor:
        device = next(tensor.device for tensor in inputs if tensor is not None)
        with computing_in(self._precision, device):
            return widen_floats(network(*inputs))
