"""A device: its numbers on the host, read together, and the precision of its products.

Kernels are launched and run later. Whoever reads a number of theirs waits for all of them, and the
device has nothing to do until the next launch; so checks and small results gather here, and are
read in one go, before anything that they guard leaves.
"""

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final, Literal

import numpy as np
import torch
from torch import Tensor

Then = Callable[[Tensor], None]
"""Takes a value on the host: checks it, or keeps it."""


class DeviceReads:
    """Values that a device computes, and what is to be done when they are known."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Tensor, Then]] = []

    def add(self, value: Tensor, then: Then) -> None:
        """Call ``then`` with a value once it is known: at once if it is on the host."""
        if value.device.type == "cpu":
            then(value)
        else:
            self._waiting.append((value, then))

    def take(self, other: "DeviceReads") -> None:
        """Read with these what has gathered elsewhere."""
        self._waiting += other._waiting
        other._waiting = []

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Let this thread's reads gather here in the block, and wait until they are asked for."""
        outer = getattr(_LOCAL, "reads", None)
        _LOCAL.reads = self
        try:
            yield
        finally:
            _LOCAL.reads = outer

    def host(self, *values: Tensor) -> list[Tensor]:
        """Return values on the host, after all that has waited was read with them.

        Raises:
            Exception: What a check that has waited raises; the values are not returned then.
        """
        waiting, self._waiting = self._waiting, []
        known = _on_host([value for value, _ in waiting] + list(values))
        for (_, then), value in zip(waiting, known, strict=False):
            then(value)
        return known[len(waiting) :]


_LOCAL: Final = threading.local()


def reads() -> DeviceReads:
    """Return what gathers in this thread; nothing waits outside of :func:`read_together`."""
    gathering: DeviceReads | None = getattr(_LOCAL, "reads", None)
    return _AtOnce() if gathering is None else gathering


@contextmanager
def read_together() -> Iterator[DeviceReads]:
    """Let reads gather until the block ends, or :meth:`DeviceReads.host` is called within.

    Blocks within blocks are one: the outermost waits.
    """
    outer = getattr(_LOCAL, "reads", None)
    if outer is not None:
        yield outer
        return
    gathered = DeviceReads()
    with gathered.gathering():
        yield gathered
        gathered.host()


def to_device(value: Tensor | np.ndarray, device: torch.device) -> Tensor:
    """Return a value of the host on a device, without waiting for the device."""
    tensor = value if isinstance(value, Tensor) else torch.from_numpy(value)
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    # From memory that the system may move, a copy waits for all that the device does before it.
    return tensor.pin_memory().to(device, non_blocking=True)


Precision = Literal["float32", "bfloat16"]
"""In what a network's matrix products and convolutions take their inputs."""


def computing_in(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Return a block in which this thread's networks compute in a precision.

    Weights, their gradients and sums within a product stay float32. bfloat16 has the range of
    float32, so that no loss need be scaled. Results are widened after the block
    (:func:`widen_floats`).

    References:
        torch's automatic mixed precision, ``torch.autocast``.
    """
    if precision == "float32" and not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bfloat16")


def widen_floats(value: Tensor) -> Tensor:
    """Return floats in at least 32 bits; differentiable."""
    return value.float() if value.itemsize < 4 else value


class _AtOnce(DeviceReads):
    def add(self, value: Tensor, then: Then) -> None:
        then(value.cpu())

    def take(self, other: DeviceReads) -> None:
        other.host()


_SMALL: Final = 2
"""Most numbers of a check."""


def _on_host(values: list[Tensor]) -> list[Tensor]:
    devices = {value.device for value in values if value.is_cuda}
    known = list(values)
    for places in _alike(values).values():
        # Numbers of checks cross together: a copy takes longer than all of them.
        together = torch.stack([values[place] for place in places]).detach()
        parts = together.to("cpu", non_blocking=True).unbind()
        for place, part in zip(places, parts, strict=True):
            known[place] = part
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return known


def _alike(values: list[Tensor]) -> dict[Hashable, list[int]]:
    """Return the places of a device's values that cross in one copy; large ones go alone."""
    places_by_key: dict[Hashable, list[int]] = {}
    for place, value in enumerate(values):
        if value.is_cuda:
            small = value.numel() <= _SMALL
            key = (value.device, value.dtype, value.shape) if small else place
            places_by_key.setdefault(key, []).append(place)
    return places_by_key
