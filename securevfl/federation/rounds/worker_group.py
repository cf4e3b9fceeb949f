"""A party's own processes: what they hand to one another, over ``torch.distributed``.

This is the one module that uses it, and the one that reads a whole object from a file: all of it is
one party's, on one machine. Parties speak by typed messages, over their own star.
"""

import io
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from securevfl.core import files

# A helper waits for its next order as long as the party waits for others. One that has died is
# noticed by torchrun, which ends them all.
_PATIENCE: Final = timedelta(days=30)

_MOST_NUMBERS: Final = 16
_MOST_DIMENSIONS: Final = 4
_TYPES: Final = (torch.float32, torch.float64, torch.int64, torch.bool)


class WorkerGroup:
    """Processes of one party, by rank; rank 0 is the party, the others help it.

    Tensors travel over the CPU's memory and the loopback interface, wherever they are computed.
    """

    def __init__(self, meeting: Path, *, rank: int, size: int) -> None:
        """Meet the others.

        Args:
            meeting: A file of all of them that none has used before, in a folder that is the
                user's alone.
            rank: This process's.
            size: How many there are.
        """
        self.rank = rank
        self.size = size
        self._handed = meeting.with_name(f"{meeting.name}-handed")
        dist.init_process_group(
            "gloo",
            init_method=f"file://{meeting.absolute()}",
            rank=rank,
            world_size=size,
            timeout=_PATIENCE,
        )

    def tell(self, numbers: Sequence[int] = ()) -> list[int]:
        """Return whole numbers that rank 0 gives, at every rank.

        Args:
            numbers: Rank 0's, at most 16 and one for each process.
        """
        value = torch.zeros(1 + _MOST_NUMBERS + self.size, dtype=torch.int64)
        if numbers:
            value[: 1 + len(numbers)] = torch.tensor([len(numbers), *numbers])
        dist.broadcast(value, src=0)
        told = value.tolist()
        return told[1 : 1 + told[0]]

    def hand_over(self, thing: Any = None) -> Any:
        """Return an object that rank 0 gives, at every rank.

        It takes the way of a file that only this user can read, and is gone when all have it: a
        stranger who reaches a port of this machine can make no process load anything.
        """
        if self.rank == 0:
            written = io.BytesIO()
            torch.save(thing, written)
            files.write_bytes(self._handed, written.getvalue())
        dist.barrier()
        if self.rank:
            thing = torch.load(self._handed, weights_only=False)
        dist.barrier()
        if self.rank == 0:
            self._handed.unlink()
        return thing

    def spread(self, value: Tensor) -> None:
        """Make a tensor on the CPU equal to rank 0's, in place."""
        dist.broadcast(value, src=0)

    def send(self, value: Tensor, *, to: int) -> None:
        """Send a tensor to one process, which receives it."""
        value = value.detach().cpu().contiguous()
        about = [_TYPES.index(value.dtype), value.dim(), *value.shape]
        about += [0] * (2 + _MOST_DIMENSIONS - len(about))
        dist.send(torch.tensor(about), dst=to)
        if value.numel():
            dist.send(value.view(-1).view(torch.uint8), dst=to)

    def receive(self, *, source: int) -> Tensor:
        """Return the tensor that a process sends, on the CPU."""
        about = torch.empty(2 + _MOST_DIMENSIONS, dtype=torch.int64)
        dist.recv(about, src=source)
        kind, dimensions, *shape = about.tolist()
        value = torch.empty(shape[:dimensions], dtype=_TYPES[kind])
        if value.numel():
            dist.recv(value.view(-1).view(torch.uint8), src=source)
        return value

    def add_up(self, value: Tensor) -> None:
        """Add up a tensor on the CPU over all processes, in place, at rank 0."""
        dist.reduce(value, dst=0)
