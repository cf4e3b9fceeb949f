"""One party's dropout stream: the same draws whether parties share a process or not."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from securevfl.core.conventions import derive_seed


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
