"""A process that computes for another one of the same party."""

import torch
from torch import Tensor, nn

from securevfl.federation.dropout_stream import DropoutStream
from securevfl.federation.shared_work import (
    Batch,
    Order,
    Part,
    PrivateRows,
    Work,
    flat,
    split,
    values_of,
)
from securevfl.federation.worker_group import WorkerGroup


class Helper:
    """A process that computes for rank 0 until that ends."""

    def __init__(self, group: WorkerGroup, *, device: torch.device) -> None:
        """Make it.

        Args:
            group: The processes; this is not rank 0.
            device: Where this process computes.
        """
        self._group = group
        self._device = device
        self._part: Part | None = None
        self._rows = 0

    def work(self) -> None:
        """Do what rank 0 wants."""
        while True:
            order, *about = self._group.tell()
            if order == Order.END:
                return
            if order == Order.TAKE:
                self._take(*self._group.hand_over())
                continue
            assert self._part is not None, "there is work to do"
            if order == Order.WEIGHTS:
                self._take_weights(self._part.work.module)
            elif order == Order.GRADIENTS:
                self._give_gradients(self._part)
            elif order == Order.PRIVATE_GRADIENTS:
                self._give_private_gradients(self._part)
            else:
                self._compute(self._part, Order(order), Batch.of(about))

    def _take(self, work: Work, private: PrivateRows | None) -> None:
        stream = DropoutStream(0, f"rank {self._group.rank}", device=self._device)
        self._part = Part(work.on(self._device), private, stream=stream)

    def _take_weights(self, module: nn.Module) -> None:
        values = values_of(module)
        told = flat(values, values)
        self._group.spread(told)
        with torch.no_grad():
            for value, new in zip(values, split(told, values), strict=True):
                value.copy_(new)

    def _compute(self, part: Part, order: Order, batch: Batch) -> None:
        self._rows = batch.sizes[self._group.rank]
        if not self._rows:
            return
        rows = [self._received() for _ in batch.wanted]
        part.work.module.train(batch.training)
        part.stream = DropoutStream(batch.seed, f"rank {self._group.rank}", device=self._device)
        with part.stream.active(), torch.no_grad():
            out = part.compute(order, rows, batch.wanted)
        self._group.send(out, to=0)

    def _give_gradients(self, part: Part) -> None:
        own: list[Tensor | None] = [None for _ in part.parameters]
        if self._rows:
            inputs, own = part.gradients(self._received())
            for one in inputs:
                self._group.send(one, to=0)
        self._group.add_up(flat(own, part.parameters))

    def _give_private_gradients(self, part: Part) -> None:
        if self._rows:
            total = part.private_gradients(self._received())
        else:
            total = torch.zeros(sum(one.numel() for one in part.parameters) + 1, dtype=torch.int64)
        self._group.add_up(total)

    def _received(self) -> Tensor:
        return self._group.receive(source=0).to(self._device)
