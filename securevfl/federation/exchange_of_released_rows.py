"""Each row released once, then reused, as a frozen encoder allows; docs/privacy.md, section 4."""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from securevfl.core.errors import ProtocolError
from securevfl.data.rows import consecutive_batches
from securevfl.federation.rounds import EpochMark, Exchange, RoundPlan


class ReleasedRows:
    """An exchange that answers from stored releases: nothing is sent between parties."""

    def __init__(
        self,
        aggregates: Float[Tensor, "rows positions width"],
        released_by: Exchange,
        *,
        device: torch.device,
    ) -> None:
        self._aggregates = aggregates
        self._ranks = released_by.ranks
        self.rounds = released_by.rounds
        self._device = device

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of all secondaries."""
        return self._ranks

    def release(self, plan: RoundPlan) -> Float[Tensor, "batch positions width"]:
        """Return the stored aggregates of the rows.

        Reveals:
            Nothing: these values were released before.
        """
        return self._aggregates[torch.as_tensor(plan.rows)].to(self._device)

    def return_gradient(
        self, plan: RoundPlan, gradient: Float[Tensor, "batch positions width"]
    ) -> None:
        """Drop the gradient: a frozen encoder does not learn.

        Reveals:
            Nothing.
        """

    def average_positions(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:  # noqa: ARG002
        """Refuse: positional encodings of frozen encoders are equal and stay so.

        Reveals:
            Nothing.
        """
        raise ProtocolError("a frozen encoder has no positional encoding to average")

    def end_epoch(self, mark: EpochMark) -> None:
        """Do nothing: no secondary trains.

        Reveals:
            Nothing.
        """


def release_once(
    exchange: Exchange,
    rows: npt.NDArray[np.int64],
    *,
    batch_size: int,
    observe: Callable[[Mapping[str, object]], None],
) -> Float[Tensor, "rows positions width"]:
    """Release every row exactly once and return the aggregates, in the order of row ids.

    Args:
        exchange: Where the secondaries are.
        rows: All row ids 0 to n - 1, training, validation and test alike.
        batch_size: Rows a round.
        observe: Hears of every round.

    Reveals:
        To the primary: one noisy average for every row. To the secondaries: nothing new.
    """
    parts = consecutive_batches(rows, batch_size=batch_size)
    out: Tensor | None = None
    for done, part in enumerate(parts, 1):
        plan = RoundPlan(
            round_number=exchange.rounds.next(),
            rows=part,
            active=exchange.ranks,
            purpose="release",
        )
        aggregate = exchange.release(plan).cpu()
        if out is None:
            out = torch.empty((len(rows), *aggregate.shape[1:]), dtype=aggregate.dtype)
        out[torch.as_tensor(part)] = aggregate
        observe({"event": "release", "done": done, "of": len(parts)})
    if out is None:
        raise ProtocolError("there are no rows to release")
    return out
