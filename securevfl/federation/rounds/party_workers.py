"""A party's own processes: what they hand to one another, over ``torch.distributed``.

This is the one module that uses it, and the one that reads a whole object from a file: all of it is
one party's, on one machine. Parties speak by typed messages, over their own star.
"""

import copy
import io
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor, nn

from securevfl.core import files
from securevfl.core.devices import Precision, computing_in, reads, to_device, widened
from securevfl.core.errors import ConfigError
from securevfl.federation.rounds import updates
from securevfl.federation.rounds.cut import CutRows
from securevfl.models.building import Forward
from securevfl.models.building import row_by_row as each_row
from securevfl.models.cuda_graphs import Network
from securevfl.models.family import DistinctBottom

# A helper waits for its next order as long as the party waits for others. One that has died is
# noticed by torchrun, which ends them all.
_PATIENCE: Final = timedelta(days=30)

_MOST_NUMBERS: Final = 16
_MOST_DIMENSIONS: Final = 4
_TYPES: Final = (torch.float32, torch.float64, torch.int64, torch.bool)


LinkIndex = Int64[Tensor, "batch links"]
"""Record of each link; anything valid where there is none."""

LinkMask = Bool[Tensor, "batch links"]
"""Which links there are."""


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


# Each record of a batch once: what a bottom model computes of it serves every link to it.


def represent_distinct(
    bottom: Forward,
    features: Float[Tensor, "records features"],
    keys: Float[Tensor, "records dimension"],
    index: LinkIndex,
    present: LinkMask,
) -> Float[Tensor, "batch links width"]:
    """Apply a recordwise bottom model to each linked record once, and gather by link.

    A batch links to a record many times (K links a row, and near rows share records); the model's
    work and its gradient's shrink by as much. Dropout, if the model has any, is then the same for
    all links to a record.

    Args:
        bottom: A recordwise model, see :class:`securevfl.models.family.Bottom`.
        features: All of the secondary's records.
        keys: Their keys.
        index: Record of each link, on the host; anything valid where there is none.
        present: Which links there are, on the host.
    """
    if bool(present.any()):
        # A record that nobody linked must not stand in for none: batch norm would look at it.
        index = torch.where(present, index, index[present][0])
    device, full = features.device, bool(present.all())
    records, place = (to_device(one, device) for one in _distinct(index, len(features)))
    alone = torch.ones(len(records), 1, dtype=torch.bool, device=device)
    vectors = bottom(features[records].unsqueeze(1), keys[records].unsqueeze(1), alone).squeeze(1)
    gathered: Tensor = vectors.index_select(0, place.flatten()).view(*index.shape, -1)
    return gathered if full else gathered * to_device(present, device).unsqueeze(-1)


def represent_linked(
    bottom: DistinctBottom,
    features: Float[Tensor, "records features"],
    keys: Float[Tensor, "records dimension"],
    index: LinkIndex,
    present: LinkMask,
) -> CutRows:
    """Apply a bottom model whose links see one another, with each linked record given once.

    An absent link has a record of zeros, as it has where each link is given by itself: whatever a
    model makes of an empty slot, no record of the table stands in it.

    Args:
        bottom: The model.
        features: All of the secondary's records.
        keys: Their keys.
        index: Record of each link, on the host; anything valid where there is none.
        present: Which links there are, on the host.
    """
    device = features.device
    records, found = _distinct(index[present], len(features))
    full = len(found) == index.numel()
    if full:
        place = found.view_as(index)
    else:
        place = torch.full_like(index, len(records)).masked_scatter_(present, found)
    records, place, present = (to_device(one, device) for one in (records, place, present))
    features, keys = features[records], keys[records]
    if not full:
        features, keys = (
            torch.cat([one, one.new_zeros(1, one.shape[1])]) for one in (features, keys)
        )
    return bottom.of_distinct(features, keys, place, present)


def _distinct(
    index: Int64[Tensor, "*links"], num_records: int
) -> tuple[Int64[Tensor, " records"], Int64[Tensor, "*links"]]:
    """Return the records in rising order, and the place of each link's record among them."""
    if num_records > 4 * index.numel():
        return index.unique(return_inverse=True)
    # Marking the records of a table that is not much larger is cheaper than sorting the links.
    seen = torch.zeros(num_records, dtype=torch.bool, device=index.device)
    seen[index.flatten()] = True
    place = seen.cumsum(0).sub_(1)
    return seen.nonzero().squeeze(1), place[index]


# A secondary's records at work: what its bottom model makes of the links to them.


@dataclass(kw_only=True, eq=False)
class OwnRecords:
    """A bottom model and the records that it sees, as tensors on one device."""

    bottom: nn.Module
    """The model; an audit puts another one in its place."""

    features: Float[Tensor, "records features"]
    keys: Float[Tensor, "records dimension"]

    row_by_row: bool
    """Whether the model is given one row at a time, as installed families are."""

    apart: bool
    """Whether each link is computed in a place of its own: wherever anything is promised.

    How many records a batch links to is the size of a matrix product, which may decide the last
    bits of every row of it; and one record more or less must leave other rows as they are.
    """

    precision: Precision = "float32"
    """What the model computes in; what it gives is float32."""

    network: Network | None = None
    """The model as a GPU replays it."""

    @property
    def module(self) -> nn.Module:
        """The model, as :class:`securevfl.federation.rounds.party_workers.Work` calls it."""
        return self.bottom

    @property
    def forward(self) -> Forward:
        """The model as it is evaluated."""
        return each_row(self.bottom) if self.row_by_row else self.bottom

    def linked(self, index: LinkIndex, present: LinkMask) -> updates.LinkedRecords:
        """Return the records of links, one link at a time.

        Args:
            index: Record of each link, on the host; anything valid where there is none.
            present: Which links there are, on the host.
        """
        device, full = self.features.device, bool(present.all())
        index, present = to_device(index, device), to_device(present, device)
        features, keys = self.features[index], self.keys[index]
        if not full:
            # Whatever a model makes of an empty slot, no record must stand in it.
            empty = ~present.unsqueeze(-1)
            features, keys = features.masked_fill(empty, 0.0), keys.masked_fill(empty, 0.0)
        return updates.LinkedRecords(features=features, keys=keys, present=present)

    def on(self, device: torch.device) -> "OwnRecords":
        """Return a copy on a device."""
        return replace(
            self,
            bottom=copy.deepcopy(self.bottom).to(device),
            features=self.features.to(device),
            keys=self.keys.to(device),
            network=None,
        )

    def taught(
        self,
        index: LinkIndex,
        present: LinkMask,
        *,
        clip_norm: float,
        units: updates.GradientUnits,
        stream: updates.DropoutStream,
    ) -> updates.RowGradients:
        """Return a batch of rows whose gradients are clipped one by one.

        Args:
            index: Record of each link, on the host; anything valid where there is none.
            present: Which links there are, on the host.
            clip_norm: ``C`` of releases.
            units: Adds the gradients up.
            stream: Of dropped units.
        """
        return updates.RowGradients(
            self.bottom,
            self.linked(index, present),
            forward=self.forward,
            clip_norm=clip_norm,
            units=units,
            stream=stream,
            precision=self.precision,
        )

    def __call__(self, index: LinkIndex, present: LinkMask) -> CutRows:
        """Return the representation of a batch of rows.

        Args:
            index: Record of each link, on the host; anything valid where there is none.
            present: Which links there are, on the host.
        """
        with computing_in(self.precision, self.features.device):
            return widened(self._computed(index, present))

    def _computed(self, index: LinkIndex, present: LinkMask) -> CutRows:
        features, keys = self.features, self.keys
        # What a GPU replays is as large in every round, however many records are linked.
        apart = self.apart or (self.network is not None and features.is_cuda)
        if not apart and self.bottom.recordwise:
            return represent_distinct(self.forward, features, keys, index, present)
        if not apart and isinstance(self.bottom, DistinctBottom) and not self.row_by_row:
            return represent_linked(self.bottom, features, keys, index, present)
        linked = self.linked(index, present)
        forward = self.network or self.forward
        return forward(linked.features, linked.keys, linked.present)


# What the processes of one party share of a batch: each computes the rows that are its own.


@runtime_checkable
class Work(Protocol):
    """A computation whose output for one row depends on that row alone."""

    @property
    def module(self) -> nn.Module:
        """The model that computes it."""
        ...

    def on(self, device: torch.device) -> "Work":
        """Return a copy on a device."""
        ...

    def __call__(self, *rows: Any) -> Tensor:
        """Return one output for each row of the inputs, whose first dimension is the rows."""
        ...


@dataclass(frozen=True, slots=True)
class TopRows:
    """The primary's half of the network as work: its own rows and the average in, outputs out."""

    module: nn.Module
    precision: Precision
    """What the model computes in; outputs are float32."""

    def on(self, device: torch.device) -> "TopRows":
        """Return a copy on a device."""
        return replace(self, module=copy.deepcopy(self.module).to(device))

    def __call__(
        self, features: Tensor, keys: Tensor, aggregate: Tensor, similarities: Tensor | None = None
    ) -> Tensor:
        """Return the outputs; see :class:`securevfl.models.Top`."""
        with computing_in(self.precision, features.device):
            return widened(self.module(features, keys, aggregate, similarities))


@dataclass(frozen=True, kw_only=True, slots=True)
class PrivateRows:
    """How gradients of rows are clipped, where each update is a release."""

    clip_norm: float
    """``C`` of releases."""

    units: updates.GradientUnits
    """Adds up what is clipped."""


class Order(IntEnum):
    """What rank 0 wants next."""

    END = 0
    TAKE = 1
    WEIGHTS = 2
    COMPUTE = 3
    COMPUTE_TO_LEARN = 4
    COMPUTE_PRIVATELY = 5
    GRADIENTS = 6
    PRIVATE_GRADIENTS = 7


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """A batch's facts for the helper processes."""

    training: bool
    seed: int
    """Of what they drop; of no use where nothing is trained."""
    sizes: list[int]
    """Rows of each rank."""
    wanted: list[bool]
    """Which inputs want a gradient."""

    def numbers(self) -> list[int]:
        """Return it as whole numbers."""
        return [int(self.training), self.seed, len(self.wanted), *self.wanted, *self.sizes]

    @classmethod
    def of(cls, numbers: Sequence[int]) -> "Batch":
        """Return what :meth:`numbers` was made of."""
        training, seed, inputs, *rest = numbers
        return cls(
            training=bool(training),
            seed=seed,
            wanted=[bool(one) for one in rest[:inputs]],
            sizes=list(rest[inputs:]),
        )


@dataclass(eq=False)
class ModelPart:
    """One process's rows: the model at work on them, and what waits for a gradient."""

    work: Work
    """What is computed."""
    private: PrivateRows | None
    """How gradients are clipped, where each update is a release."""
    stream: updates.DropoutStream
    """Of dropped units, where updates are releases; elsewhere one is active."""
    _graph: tuple[list[Tensor], Tensor] | None = field(default=None, init=False)
    _rows: updates.RowGradients | None = field(default=None, init=False)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The model's weights."""
        return list(self.work.module.parameters())

    def compute(self, order: Order, rows: Sequence[Tensor], wanted: Sequence[bool]) -> Tensor:
        """Return the output of rows, and keep what its gradient will need.

        Args:
            order: One of the three that compute.
            rows: What the work takes.
            wanted: Which of it wants a gradient.
        """
        if order is Order.COMPUTE_PRIVATELY:
            assert self.private is not None, "asked for where updates are releases"
            assert isinstance(self.work, OwnRecords), "asked for by a secondary"
            self._rows = self.work.taught(
                *rows,
                clip_norm=self.private.clip_norm,
                units=self.private.units,
                stream=self.stream,
            )
            return self._rows.represent()
        if order is Order.COMPUTE:
            return self.work(*rows)
        with torch.enable_grad():
            inputs = [
                row.detach().requires_grad_() if want else row
                for row, want in zip(rows, wanted, strict=True)
            ]
            out = self.work(*inputs)
        self._graph = [row for row, want in zip(inputs, wanted, strict=True) if want], out
        return out.detach()

    def gradients(self, gradient: Tensor) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return the gradients of the inputs that want one, and of the parameters that have one."""
        assert self._graph is not None, "computed to learn"
        (leaves, out), self._graph = self._graph, None
        found = torch.autograd.grad(out, [*leaves, *self.parameters], gradient, allow_unused=True)
        inputs = [
            torch.zeros_like(leaf) if one is None else one
            for leaf, one in zip(leaves, found, strict=False)
        ]
        return inputs, list(found[len(leaves) :])

    def private_gradients(self, gradient: Tensor) -> Tensor:
        """Return the rows' clipped gradients, added up in whole units, and how many were lost."""
        assert self._rows is not None, "computed privately"
        assert self.private is not None, "computed privately"
        rows, self._rows = self._rows, None
        before = self.private.units.not_finite
        total = rows.total(gradient).to(torch.int64)
        reads().host()
        return torch.cat([total, total.new_tensor([self.private.units.not_finite - before])]).cpu()


def values_of(module: nn.Module) -> list[Tensor]:
    """Return what of a model is numbers, weights first."""
    return [*module.parameters(), *(one for one in module.buffers() if one.is_floating_point())]


def flat(values: Sequence[Tensor | None], shapes: Sequence[Tensor]) -> Tensor:
    """Return values in one vector on the CPU, zeros where there are none."""
    return torch.cat(
        [
            (torch.zeros_like(shape) if value is None else value).detach().flatten().cpu()
            for value, shape in zip(values, shapes, strict=True)
        ]
    )


def split(vector: Tensor, shapes: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of a vector in the shapes of what it was made of."""
    parts = vector.split([one.numel() for one in shapes])
    return [part.view_as(shape) for part, shape in zip(parts, shapes, strict=True)]


# One party's model on several of its own processes: each has the rows of a batch that are its.

_SEEDS: Final = 2**62


class PartyWorkers:
    """Rank 0's end: divides a computation over all processes."""

    def __init__(
        self,
        group: WorkerGroup,
        work: Work,
        *,
        stream: updates.DropoutStream,
        device: torch.device,
        noise: updates.GradientNoise | None = None,
        clip_norm: float = 0.0,
    ) -> None:
        """Make it; the others get a copy of the work with its first batch.

        Args:
            group: The processes; this is rank 0 of them.
            work: What is computed.
            stream: The party's dropout stream, from which the others' draws are seeded.
            device: Where this process computes.
            noise: What protects each update, if updates are releases.
            clip_norm: ``C`` of releases, then.

        Raises:
            ConfigError: If the model looks at all rows of a batch.
        """
        for name, module in work.module.named_modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                raise ConfigError(
                    f"torchrun: the model's layer {name!r} is a {type(module).__name__}, which "
                    f"looks at all rows of a batch; run this party as one process"
                )
        self._group = group
        self._device = device
        private = None if noise is None else PrivateRows(clip_norm=clip_norm, units=noise)
        self._own = ModelPart(work, private, stream)
        self._known: list[int] = []
        self._sizes: list[int] = []

    def __call__(self, *rows: Tensor) -> Tensor:
        """Return what the work makes of rows, on the autograd graph where one is asked for.

        Args:
            rows: What the work takes, the same number of rows each.
        """
        if not torch.is_grad_enabled():
            return self._compute(Order.COMPUTE, rows, [False] * len(rows), seed=self._seed())
        out: Tensor = _Spread.apply(self, len(rows), *rows, *self._own.parameters)  # type: ignore[no-untyped-call]
        return out

    def represent_privately(self, index: LinkIndex, present: LinkMask) -> CutRows:
        """Return the representation of rows whose gradients are to be clipped one by one.

        Args:
            index: Record of each link, on the host; anything valid where there is none.
            present: Which links there are, on the host.
        """
        links = index, present
        with self._own.stream.active():
            seed = self._seed()
        return self._compute(Order.COMPUTE_PRIVATELY, links, [False, False], seed=seed)

    def private_gradients(self, gradient: CutRows) -> Float64[Tensor, " parameters"]:
        """Return the sum of these rows' clipped gradients in whole units, without noise.

        Args:
            gradient: Of each row's loss, with respect to its representation.
        """
        assert self._own.private is not None, "made with what protects updates"
        part = self._hand_out(Order.PRIVATE_GRADIENTS, gradient)
        total = self._own.private_gradients(part)
        here = int(total[-1])
        self._group.add_up(total)
        self._own.private.units.not_finite += int(total[-1]) - here
        return total[:-1].double().to(self._device)

    def _compute(
        self, order: Order, rows: Sequence[Tensor], wanted: Sequence[bool], *, seed: int
    ) -> Tensor:
        self._catch_up()
        training = self._own.work.module.training
        parts = [row.tensor_split(self._group.size) for row in rows]
        self._sizes = [len(part) for part in parts[0]]
        batch = Batch(training=training, seed=seed, sizes=self._sizes, wanted=list(wanted))
        self._group.tell([order, *batch.numbers()])
        for rank in self._others():
            for part in parts:
                self._group.send(part[rank], to=rank)
        out = [self._own.compute(order, [part[0] for part in parts], wanted)]
        out += [self._group.receive(source=rank).to(self._device) for rank in self._others()]
        return torch.cat(out)

    def _seed(self) -> int:
        """Return a seed of what the others drop in a batch.

        It is drawn as the party's own units are, so that a resumed run drops what it would have.
        """
        if not self._own.work.module.training:
            return 0
        drawn = torch.empty((), dtype=torch.int64, device=self._device)
        return int(drawn.random_(_SEEDS))

    def _gradients(self, gradient: Tensor) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return the gradients of the inputs that want one, and of the parameters."""
        part = self._hand_out(Order.GRADIENTS, gradient)
        inputs, own = self._own.gradients(part)
        for rank in self._others():
            for number, one in enumerate(inputs):
                other = self._group.receive(source=rank).to(self._device)
                inputs[number] = torch.cat([one, other])
        total = flat(own, self._own.parameters)
        self._group.add_up(total)
        # What has no gradient here has none anywhere: an optimizer leaves it as it is.
        return inputs, [
            None if mine is None else one.to(self._device)
            for mine, one in zip(own, split(total, self._own.parameters), strict=True)
        ]

    def _hand_out(self, order: Order, gradient: Tensor) -> Tensor:
        """Give the others their rows of a gradient, and return one's own."""
        self._group.tell([order])
        parts = gradient.split(self._sizes)
        for rank in self._others():
            self._group.send(parts[rank], to=rank)
        return parts[0]

    def _others(self) -> list[int]:
        """Return the ranks that have rows of this batch, but for this one."""
        return [rank for rank in range(1, self._group.size) if self._sizes[rank]]

    def _catch_up(self) -> None:
        """Give the other processes the weights, changed by an optimizer or not.

        Fused optimizers leave no trace of it in a tensor's version.
        """
        work, private = self._own.work, self._own.private
        values = values_of(work.module)
        known = [id(value) for value in values]
        if known != self._known:
            # A new model, or one that parts have been put into.
            if private is not None:
                units = updates.GradientUnits(
                    clip_norm=private.units.clip_norm, granularity=private.units.granularity
                )
                private = PrivateRows(clip_norm=private.clip_norm, units=units)
            self._group.tell([Order.TAKE])
            self._group.hand_over((work.on(torch.device("cpu")), private))
        else:
            self._group.tell([Order.WEIGHTS])
            self._group.spread(flat(values, values))
        self._known = known


class _Spread(torch.autograd.Function):
    """A batch over all processes, as one node of this one's graph."""

    @staticmethod
    def forward(ctx: Any, workers: PartyWorkers, inputs: int, *values: Tensor) -> Tensor:
        ctx.workers = workers
        ctx.wanted = ctx.needs_input_grad[2 : 2 + inputs]
        return workers._compute(
            Order.COMPUTE_TO_LEARN, values[:inputs], ctx.wanted, seed=workers._seed()
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        found, parameters = ctx.workers._gradients(gradients[0])
        left = iter(found)
        inputs = (next(left) if want else None for want in ctx.wanted)
        return None, None, *inputs, *parameters


def end(group: WorkerGroup) -> None:
    """Send the helpers home; called by rank 0."""
    group.tell([Order.END])


# A process that computes for another one of the same party.


@dataclass(eq=False)
class WorkerProcess:
    """A process that computes for rank 0 until that ends."""

    group: WorkerGroup
    """The processes; this is not rank 0."""
    _: KW_ONLY
    device: torch.device
    """Where this process computes."""
    _part: ModelPart | None = field(default=None, init=False)
    _rows: int = field(default=0, init=False)

    def work(self) -> None:
        """Do what rank 0 wants."""
        while True:
            order, *about = self.group.tell()
            if order == Order.END:
                return
            if order == Order.TAKE:
                self._take(*self.group.hand_over())
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
        stream = updates.DropoutStream(0, f"rank {self.group.rank}", device=self.device)
        self._part = ModelPart(work.on(self.device), private, stream)

    def _take_weights(self, module: nn.Module) -> None:
        values = values_of(module)
        told = flat(values, values)
        self.group.spread(told)
        with torch.no_grad():
            for value, new in zip(values, split(told, values), strict=True):
                value.copy_(new)

    def _compute(self, part: ModelPart, order: Order, batch: Batch) -> None:
        self._rows = batch.sizes[self.group.rank]
        if not self._rows:
            return
        rows = [self._received() for _ in batch.wanted]
        part.work.module.train(batch.training)
        part.stream = updates.DropoutStream(
            batch.seed, f"rank {self.group.rank}", device=self.device
        )
        with part.stream.active(), torch.no_grad():
            out = part.compute(order, rows, batch.wanted)
        self.group.send(out, to=0)

    def _give_gradients(self, part: ModelPart) -> None:
        own: list[Tensor | None] = [None for _ in part.parameters]
        if self._rows:
            inputs, own = part.gradients(self._received())
            for one in inputs:
                self.group.send(one, to=0)
        self.group.add_up(flat(own, part.parameters))

    def _give_private_gradients(self, part: ModelPart) -> None:
        if self._rows:
            total = part.private_gradients(self._received())
        else:
            total = torch.zeros(sum(one.numel() for one in part.parameters) + 1, dtype=torch.int64)
        self.group.add_up(total)

    def _received(self) -> Tensor:
        return self.group.receive(source=0).to(self.device)
