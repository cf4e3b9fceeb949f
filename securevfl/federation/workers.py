"""One party's model on several of its own processes: each has the rows of a batch that are its.

Rank 0 is the party, and its weights are the weights. Before a batch it gives its helpers weights
and rows; it puts together what they return, and adds their gradients to its own. What leaves the
party, what is charged for it and all noise are rank 0's affair alone.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor, nn

from securevfl.core.errors import ConfigError
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
from securevfl.federation.updates import GradientNoise, GradientUnits
from securevfl.federation.worker_group import WorkerGroup

_SEEDS: Final = 2**62


class Workers:
    """Rank 0's end: computes over all processes what it would compute by itself."""

    def __init__(
        self,
        group: WorkerGroup,
        work: Work,
        *,
        stream: DropoutStream,
        device: torch.device,
        noise: GradientNoise | None = None,
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
        self._own = Part(work, private, stream=stream)
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

    def represent_privately(
        self, index: Int64[Tensor, "batch links"], present: Bool[Tensor, "batch links"]
    ) -> Float[Tensor, "batch positions width"]:
        """Return the representation of rows whose gradients are to be clipped one by one.

        Args:
            index: Record of each link; anything valid where there is none.
            present: Which links there are.
        """
        links = index, present
        with self._own.stream.active():
            seed = self._seed()
        return self._compute(Order.COMPUTE_PRIVATELY, links, [False, False], seed=seed)

    def private_gradients(
        self, gradient: Float[Tensor, "batch positions width"]
    ) -> Float64[Tensor, " parameters"]:
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
        """Give the others the weights: whether an optimizer has changed them, nobody can see.

        Fused optimizers leave no trace of it in a tensor's version.
        """
        work, private = self._own.work, self._own.private
        values = values_of(work.module)
        known = [id(value) for value in values]
        if known != self._known:
            # A new model, or one that parts have been put into.
            if private is not None:
                units = GradientUnits(
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
    def forward(ctx: Any, workers: Workers, inputs: int, *values: Tensor) -> Tensor:
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
