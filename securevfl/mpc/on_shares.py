"""CrypTen between parties: its programs over channels that carry arrays in order.

The communicator has the collectives of CrypTen's arithmetic, for arrays only: nothing is pickled,
and received arrays must have the expected shape and type. With a provider of tuples
(:mod:`securevfl.mpc.dealt_tuples`), CrypTen's arithmetic, comparisons and encoder run on it.

A party sends others only its shares of opened values. To each share it adds AES-256 key streams
that it has in common with every other member and that cancel in the sum, so that a single share is
uniform. CrypTen's sharings of zero come from torch's generators, whose 32-bit state could be found
by search, so nothing is protected by them alone: openings within a multiplication are hidden by the
dealer's numbers, and all openings by these streams.

The arithmetic is secure against all but one of the members if they follow the protocol but pool
what they see, as long as the dealer does not collude. A member that does not follow it can change
results.
"""

import hashlib
import hmac
import os
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from securevfl.core.errors import ProtocolError
from securevfl.mpc import crypten_bridge
from securevfl.mpc.codec import Words, WordWire
from securevfl.mpc.crypten_bridge import ArithmeticSharedTensor, CrypTenSumTo, ReduceOp
from securevfl.mpc.dealt_sums import uniform
from securevfl.mpc.dealt_tuples import DealerLine, DealtTuples, SeedOfMember
from securevfl.mpc.masks import PairwiseMasks

_STREAM_LABEL: Final = b"securevfl/mpc/on-shares/stream/v1"
_SEED_LABEL: Final = b"securevfl/mpc/on-shares/zero/v1"

# From this size on, with three and more members, it is cheaper if each adds up a part of an opening
# for all.
_LARGE: Final = 1 << 12

_DTYPES: Final = (torch.int64, torch.int32, torch.uint8, torch.float32, torch.float64, torch.bool)
_MOST_AXES: Final = 16


@runtime_checkable
class Lines(Protocol):
    """One party's private, ordered and authenticated lines to all others."""

    def send(self, rank: int, step: int, values: npt.NDArray[Any]) -> None:
        """Send an array to a party.

        Reveals:
            To that party: the array.
        """
        ...

    def receive(
        self, rank: int, step: int, *, dtype: npt.DTypeLike, shape: tuple[int | None, ...]
    ) -> npt.NDArray[Any]:
        """Return a party's next array.

        Args:
            rank: Rank of the sender.
            step: The array's step in the program.
            dtype: Its type.
            shape: Its shape; None stands for any length.

        Raises:
            ProtocolError: If it is of another step, type or shape.
        """
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Seat:
    """One member's place in a joint computation."""

    rank: int
    """This member's rank, one of the world's."""
    world: tuple[int, ...]
    """Ranks of all that compute, ascending; CrypTen counts them from 0."""
    pair_keys: Mapping[int, bytes]
    """32 bytes that it shares with each other one, by rank."""
    context: bytes
    """Context of the computation: session, run and program, the same at all members."""
    lines: Lines | None = None
    """Lines to the other members; None if nothing is opened."""
    dealer: DealerLine | None = None
    """The way to the dealer; None where nothing is multiplied."""

    def key(self, peer: int, label: bytes, *numbers: int) -> bytes:
        """Return a key that this member and ``peer`` share for one purpose."""
        agreed = label + struct.pack(f">I{len(numbers)}q", len(numbers), *numbers) + self.context
        return hmac.digest(self.pair_keys[peer], agreed, "sha256")


class LineCommunicator(crypten_bridge.Communicator):  # type: ignore[misc]
    """CrypTen's collectives over lines; CrypTen's ranks are positions in the world."""

    BYTES_PER_ELEMENT = 8

    def __init__(self, member: Seat, *, first_step: int = 0) -> None:
        """Create a member's communicator.

        Args:
            member: This party's seat.
            first_step: Number of its first step, higher than all earlier steps of the member.
        """
        self._member = member
        self._world = member.world
        self._place = member.world.index(member.rank)
        self._others = [place for place in range(len(member.world)) if place != self._place]
        self._step = first_step
        self._name = f"rank{self._place}"
        self.reset_communication_stats()

    def _refuse_operation(self, *_positional: object, **_named: object) -> NoReturn:
        """Refuse collectives that would pickle objects, or that nothing here needs."""
        raise ProtocolError("CrypTen asked for a way to communicate that is not offered here")

    isend = irecv = send_obj = recv_obj = _refuse_operation

    def get_world_size(self) -> int:
        """Return the number of members."""
        return len(self._world)

    def get_rank(self) -> int:
        """Return this party's position."""
        return self._place

    def set_name(self, name: str) -> None:
        """Set the party's name."""
        self._name = name

    def get_name(self) -> str:
        """Return the party's name."""
        return self._name

    def send(self, tensor: Tensor, dst: int) -> None:
        """Send a tensor.

        Reveals:
            To ``dst``: the tensor.
        """
        # Not a collective step: the two parties' lines keep the order.
        self._send(dst, tensor)

    def recv(self, tensor: Tensor, src: int | None = None) -> Tensor:
        """Receive a tensor into ``tensor``, and return it."""
        if src is None:
            self._refuse_operation()
        return tensor.copy_(self._receive(src, tensor.dtype, tensor.shape))

    def broadcast(self, sent: Any, src: int, async_op: bool = False, batched: bool = False) -> Any:
        """Send one party's tensors to all others, in place of their tensors.

        Reveals:
            To all members: the tensors.
        """
        self._require_waiting(async_op)
        for tensor in sent if batched else [sent]:
            self._begin()
            if self._place == src:
                for place in self._others:
                    self._send(place, tensor)
            else:
                tensor.copy_(self._receive(src, tensor.dtype, tensor.shape))
        return sent

    def broadcast_obj(self, obj: Any, src: int) -> torch.Size:
        """Send one party's shape to all others; other objects are refused.

        Reveals:
            To all members: the shape.
        """
        self._begin()
        if self._place != src:
            return torch.Size(self._receive(src, torch.int64, (None,)).tolist())
        if not isinstance(obj, torch.Size) or len(obj) > _MOST_AXES:
            self._refuse_operation()
        for place in self._others:
            self._send(place, torch.tensor(obj, dtype=torch.int64))
        return obj

    def scatter(
        self, scatter_list: Any, src: int, size: Any = None, async_op: bool = False
    ) -> Tensor:
        """Send one party's tensors, one to each member.

        Reveals:
            To each party: its tensor.
        """
        self._require_waiting(async_op)
        self._begin()
        if self._place != src:
            return self._receive(src, torch.int64, scatter_list[0].shape if size is None else size)
        for place in self._others:
            self._send(place, scatter_list[place])
        own: Tensor = scatter_list[src]
        return own

    def gather(self, tensor: Tensor, dst: int, async_op: bool = False) -> Sequence[Tensor | None]:
        """Send every party's tensor to one party.

        Reveals:
            To ``dst``: the tensors.
        """
        self._require_waiting(async_op)
        self._begin()
        if self._place == dst:
            return self._from_all(tensor)
        self._send(dst, tensor)
        return [None]

    def all_gather(self, tensor: Tensor, async_op: bool = False) -> list[Tensor]:
        """Send every party's tensor to all members.

        Reveals:
            To all members: the tensors.
        """
        self._require_waiting(async_op)
        self._begin()
        for place in self._others:
            self._send(place, tensor)
        return self._from_all(tensor)

    def barrier(self) -> None:
        """Wait for all members."""
        self.all_gather(torch.zeros(1, dtype=torch.uint8))

    def reduce(
        self,
        shares: Any,
        dst: int,
        op: Any = ReduceOp.SUM,
        async_op: bool = False,
        batched: bool = False,
    ) -> Any:
        """Open tensors to one party, which gets the sum, or XOR, of all shares.

        Reveals:
            To ``dst``: the total only.
        """
        self._require_waiting(async_op)
        tensors = list(shares) if batched else [shares]
        hidden = self._hidden(tensors, op)
        if self._place != dst:
            self._send(dst, hidden)
            return None
        total = self._total(self._from_all(hidden), op)
        return _apart(total, tensors) if batched else total.view(shares.shape)

    def all_reduce(
        self, shares: Any, op: Any = ReduceOp.SUM, async_op: bool = False, batched: bool = False
    ) -> Any:
        """Open tensors to all members, which get the sum, or XOR, of all shares.

        Reveals:
            To all members: the total only.
        """
        self._require_waiting(async_op)
        tensors = list(shares) if batched else [shares]
        hidden = self._hidden(tensors, op)
        parts = [hidden] * len(self._world)
        large = len(self._world) > 2 and hidden.numel() >= _LARGE
        if large:
            parts = list(hidden.tensor_split(len(self._world)))
        for place in self._others:
            self._send(place, parts[place])
        total = self._total(self._from_all(parts[self._place]), op)
        if large:
            self._begin()
            for place in self._others:
                self._send(place, total)
            total = torch.cat(
                [
                    total if place == self._place else self._receive(place, torch.int64, part.shape)
                    for place, part in enumerate(parts)
                ]
            )
        return _apart(total, tensors) if batched else total.view(shares.shape)

    def _hidden(self, tensors: Sequence[Tensor], op: Any) -> Tensor:
        """Return the concatenated numbers of shares, under streams that cancel in the total."""
        self._begin()
        if op not in (ReduceOp.SUM, ReduceOp.BXOR):
            self._refuse_operation()
        if any(tensor.dtype != torch.int64 for tensor in tensors):
            raise ProtocolError("what is opened must be shares, of int64")
        hidden = torch.cat([tensor.reshape(-1) for tensor in tensors])
        words, member = hidden.numpy().view(np.uint64), self._member
        for peer in self._world:
            if peer != member.rank:
                numbers = (self._step, op == ReduceOp.SUM, len(words), *self._world)
                stream = uniform(member.key(peer, _STREAM_LABEL, *numbers), 0, words.shape)
                if op == ReduceOp.BXOR:
                    np.bitwise_xor(words, stream, out=words)
                else:
                    combine = np.add if member.rank < peer else np.subtract
                    combine(words, stream, out=words)
        return hidden

    def _total(self, shares: Sequence[Tensor], op: Any) -> Tensor:
        total = shares[0].clone()
        for share in shares[1:]:
            total = total.add_(share) if op == ReduceOp.SUM else total.bitwise_xor_(share)
        return total

    def _from_all(self, own: Tensor) -> list[Tensor]:
        return [
            own if place == self._place else self._receive(place, own.dtype, own.shape)
            for place in range(len(self._world))
        ]

    def _begin(self) -> None:
        self._step += 1
        self.comm_rounds += 1

    def _require_waiting(self, async_op: bool) -> None:
        if async_op:
            self._refuse_operation()

    def _send(self, place: int, tensor: Tensor) -> None:
        if tensor.dtype not in _DTYPES or tensor.dim() > _MOST_AXES:
            raise ProtocolError(f"a tensor of {tensor.dtype} cannot be sent")
        lines = self._member.lines or self._refuse_operation()
        self.comm_bytes += tensor.nbytes
        values = tensor.detach().contiguous().numpy()
        lines.send(self._world[place], self._step, values)

    def _receive(self, place: int, dtype: torch.dtype, shape: Sequence[int | None]) -> Tensor:
        begin = time.monotonic()
        kind = torch.empty(0, dtype=dtype).numpy().dtype
        lines = self._member.lines or self._refuse_operation()
        values = lines.receive(self._world[place], self._step, dtype=kind, shape=tuple(shape))
        self.comm_time += time.monotonic() - begin
        return torch.from_numpy(values)


def _apart(total: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = total.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def _zero_generators(member: Seat, number: int) -> dict[str, dict[torch.device, torch.Generator]]:
    """Return the generators of CrypTen's sharings of zero, equal for neighbours.

    Nothing that a party sends is hidden by them alone; see the module.
    """
    world, place = member.world, member.world.index(member.rank)

    def of_neighbours(lower: int, upper: int) -> bytes:
        peer = upper if member.rank == lower else lower
        # A single member is its own neighbour.
        return (
            os.urandom(8) if peer == member.rank else member.key(peer, _SEED_LABEL, number, lower)
        )

    before, after = world[place - 1], world[(place + 1) % len(world)]
    seeds = {
        "prev": of_neighbours(before, member.rank),
        "next": of_neighbours(member.rank, after),
        "local": os.urandom(8),
        "global": hashlib.sha256(_SEED_LABEL + member.context).digest(),
    }
    if len(world) == 1:
        seeds["next"] = seeds["prev"]
    generators = {}
    for name, seed in seeds.items():
        generator = torch.Generator().manual_seed(int.from_bytes(seed[:8], "big") >> 1)
        generators[name] = {torch.device("cpu"): generator}
    return generators


# Most steps and requests of one computation; a program with more would take a year.
_MOST_STEPS: Final = 1 << 32


@contextmanager
def computing(member: Seat, *, number: int = 0) -> Iterator[LineCommunicator]:
    """Run CrypTen for a party in this thread.

    Args:
        member: The party's seat.
        number: Number of this computation, rising so that no stream is used twice.

    Raises:
        ProtocolError: If a member fails.

    Reveals:
        To the other members: values that the program opens to them, and sizes.
    """
    world, begun = member.world, number * _MOST_STEPS
    if member.rank not in world or list(world) != sorted(set(world)):
        raise ProtocolError(f"rank {member.rank} cannot compute among {list(world)}")
    tuples = None
    if member.dealer is not None:
        first = member.rank == world[0]
        if first:
            member.dealer.begin(world, number)
        tuples = DealtTuples(
            SeedOfMember(seed=member.dealer.seed(), context=member.context),
            world=world,
            line=member.dealer if first else None,
            first_number=begun,
        )
    communicator = LineCommunicator(member, first_step=begun)
    with crypten_bridge.make_current(
        crypten_bridge.Found(communicator, tuples, _zero_generators(member, number))
    ):
        yield communicator


class SharedSum(CrypTenSumTo):
    """SplitAvg as a CrypTen program, for ``mpc.engine = "crypten"``.

    Every secondary's words are CrypTen tensors that all active secondaries share. Each adds its
    shares up and sends the result to the primary, under its pairwise masks as always. Only at the
    primary do the shares add up to the sum, which is equal to that of ``"masked"`` to the bit.
    """

    def __init__(self, wire: WordWire, masks: PairwiseMasks, seat: Seat) -> None:
        """Create a secondary's end of the sum.

        Args:
            wire: Transport of the words.
            masks: This secondary's masks.
            seat: This secondary's seat among all secondaries.
        """
        super().__init__(wire, masks)
        self._seat = seat

    def __call__(self, words: Words, *, round_number: int, active: Sequence[int]) -> Words | None:
        """Share ``words``, add up the shares and contribute the result; see :class:`SumTo`.

        Raises:
            ProtocolError: If the round's mask was used before, or a peer fails.

        Reveals:
            As :class:`securevfl.mpc.crypten_bridge.CrypTenSumTo`.
        """
        seat, others = replace(self._seat, world=tuple(sorted(active))), torch.zeros_like(words)
        with computing(seat, number=round_number) as communicator:
            own = communicator.get_rank()
            shared = [
                ArithmeticSharedTensor(words if src == own else others, precision=0, src=src)
                for src in range(communicator.get_world_size())
            ]
            total = sum(shared[1:], shared[0]).share
        return super().__call__(total, round_number=round_number, active=active)
