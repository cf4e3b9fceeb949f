"""Computing with tensors: reading values of devices together, precision, and CPU threads.

Kernels run after they are launched. Reading a result waits for all of them and leaves the device
idle until the next launch. So checks and small results are collected here and read together, before
anything that they guard is sent.

Libraries start a thread per core, and these spin while they wait for each other. On cores shared
with another program, a fit of 25,000 rows took twenty times the CPU time of one thread.
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
    """Pending values of a device, each with a function to call when it is known."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Tensor, Then]] = []

    def add(self, value: Tensor, then: Then) -> None:
        """Call ``then`` with a value once it is known; at once if it is on the host."""
        if value.device.type == "cpu":
            then(value)
        else:
            self._waiting.append((value, then))

    def take(self, other: "DeviceReads") -> None:
        """Add the pending values of ``other`` to these."""
        self._waiting += other._waiting
        other._waiting = []

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Collect this thread's reads here in the block, until :meth:`host` is called."""
        outer = getattr(_LOCAL, "reads", None)
        _LOCAL.reads = self
        try:
            yield
        finally:
            _LOCAL.reads = outer

    def host(self, *values: Tensor) -> list[Tensor]:
        """Return values on the host, after reading all pending values with them.

        Raises:
            Exception: As a pending check raises it; the values are not returned then.
        """
        waiting, self._waiting = self._waiting, []
        known = _on_host([value for value, _ in waiting] + list(values))
        for (_, then), value in zip(waiting, known, strict=False):
            then(value)
        return known[len(waiting) :]


_LOCAL: Final = threading.local()


def reads() -> DeviceReads:
    """Return this thread's collector; outside of :func:`read_together` values are read at once."""
    gathering: DeviceReads | None = getattr(_LOCAL, "reads", None)
    return _AtOnce() if gathering is None else gathering


@contextmanager
def read_together() -> Iterator[DeviceReads]:
    """Collect reads until the block ends, or :meth:`DeviceReads.host` is called in it.

    A nested block is part of the outermost one.
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
    # A copy from unpinned memory would wait for all earlier work of the device.
    return tensor.pin_memory().to(device, non_blocking=True)


Precision = Literal["float32", "bfloat16"]
"""Type of the inputs of a network's matrix products and convolutions."""


def computing_in(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which this thread's networks compute with a given precision.

    Weights, their gradients and sums within a product stay float32. bfloat16 has the range of
    float32, so losses need no scaling. Results are widened after the block (:func:`widen_floats`).

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
    with torch.no_grad():
        for first, *others in _alike(values).values():
            if not others:
                known[first] = values[first].to("cpu", non_blocking=True)
                continue
            # Small values are copied together, since a copy takes longer than its content.
            places = (first, *others)
            together = torch.stack([values[place] for place in places])
            parts = together.to("cpu", non_blocking=True).unbind()
            for place, part in zip(places, parts, strict=True):
                known[place] = part
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return known


def _alike(values: list[Tensor]) -> dict[Hashable, list[int]]:
    """Return the indices of values that are copied together; large values are copied alone."""
    places_by_key: dict[Hashable, list[int]] = {}
    for place, value in enumerate(values):
        if value.is_cuda:
            small = value.numel() <= _SMALL
            key = (value.device, value.dtype, value.shape) if small else place
            places_by_key.setdefault(key, []).append(place)
    return places_by_key


CELLS_A_THREAD: Final = 2_000_000
"""Numbers of a table that are worth one more thread."""


@contextmanager
def few_threads(cells: int) -> Iterator[None]:
    """Compute in the block with a number of threads that suits the size of a table.

    One thread, and one more for each :data:`CELLS_A_THREAD` numbers, but never more than before.

    Args:
        cells: Numbers in the table.
    """
    from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

    pools = ThreadpoolController()  # looks through all loaded libraries
    most = 1 + cells // CELLS_A_THREAD
    before = torch.get_num_threads()
    limits = {pool["prefix"]: min(most, pool["num_threads"]) for pool in pools.info()}
    torch.set_num_threads(min(most, before))
    try:
        with pools.limit(limits=limits):
            yield
    finally:
        torch.set_num_threads(before)
