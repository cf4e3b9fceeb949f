"""What the processes of one party share of a batch: each computes the rows that are its own."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from securevfl.federation.dropout_stream import DropoutStream
from securevfl.federation.records import OwnRecords
from securevfl.federation.updates import GradientUnits, RowGradients


@runtime_checkable
class Work(Protocol):
    """What is computed of rows, each by itself."""

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

    def on(self, device: torch.device) -> "TopRows":
        """Return a copy on a device."""
        return TopRows(copy.deepcopy(self.module).to(device))

    def __call__(
        self, features: Tensor, keys: Tensor, aggregate: Tensor, similarities: Tensor | None = None
    ) -> Tensor:
        """Return the outputs; see :class:`models.split.Top`."""
        output: Tensor = self.module(features, keys, aggregate, similarities)
        return output


@dataclass(frozen=True, kw_only=True, slots=True)
class PrivateRows:
    """How gradients of rows are clipped, where each update is a release."""

    clip_norm: float
    """``C`` of releases."""

    units: GradientUnits
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
    """What helpers are told of a batch."""

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


class Part:
    """One process's rows: the model at work on them, and what waits for a gradient."""

    def __init__(self, work: Work, private: PrivateRows | None, *, stream: DropoutStream) -> None:
        """Make it.

        Args:
            work: What is computed.
            private: How gradients are clipped, where each update is a release.
            stream: Of dropped units, where updates are releases; elsewhere one is active.
        """
        self.work = work
        self.private = private
        self.stream = stream
        self._graph: tuple[list[Tensor], Tensor] | None = None
        self._rows: RowGradients | None = None

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
