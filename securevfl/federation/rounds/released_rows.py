"""Released rows that the primary keeps, and the exchange that trains on them.

A row is released once. So a run that was cut goes on behind the last round that lies here. The next
few (:data:`securevfl.federation.exchange.ROUNDS_AHEAD`) may have been announced and not kept: their
rows are asked for again, and every secondary answers with what it answered before
(:mod:`securevfl.federation.rounds.release`).
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from securevfl.core.errors import ConfigError, PrivacyError, ProtocolError
from securevfl.core.progress import Observer, RowsReleased
from securevfl.federation.exchange import ROUNDS_AHEAD, EpochMark, Exchange, RoundCounter, RoundPlan
from securevfl.federation.state_files import DamagedError, StateFolder
from securevfl.transport.message import MessageKind, TypedMessage

# What the primary of a frozen run keeps: every round's rows, from the moment it has them.


class KeptRows:
    """The rounds of one release pass in the primary's folder, a file each."""

    def __init__(
        self,
        files: StateFolder,
        parts: Sequence[npt.NDArray[np.int64]],
        *,
        shape: tuple[int, ...],
    ) -> None:
        """Find out what is kept.

        Args:
            files: The primary's; they name the run.
            parts: Row ids of every round of the pass, in order.
            shape: Of one row of the cut, (L, H); a round of any other counts as damaged.

        Raises:
            ConfigError: If what is kept is of other rows, as if the table had changed.
        """
        self._files = files
        self.parts = parts
        self._shape = shape
        self._kept: dict[int, Tensor] = {}
        for number, part in enumerate(parts):
            aggregate = self._read(number, part)
            if aggregate is not None:
                self._kept[number] = aggregate
        if files.holds(_name(len(parts))):
            raise self._other_table()

    def missing(self) -> list[int]:
        """Return the rounds that are not kept, in order, counted from 0."""
        return [number for number in range(len(self.parts)) if number not in self._kept]

    def keep(self, number: int, aggregate: Float[Tensor, "batch positions width"]) -> None:
        """Keep a round's rows; they are on the disk when this returns.

        Raises:
            StorageError: If the disk takes no more.
        """
        rows = torch.from_numpy(self.parts[number])
        self._files.write(_name(number), {"rows": rows, "aggregate": aggregate})
        self._kept[number] = aggregate

    def asked_again(self, booked: Int64[np.ndarray, " rows"]) -> list[Int64[np.ndarray, " batch"]]:
        """Return the rows of each round that was released and never kept, in order.

        Args:
            booked: Rows that the primary's ledger has booked in this run.

        Raises:
            PrivacyError: If others are among them than the last rounds that were announced: no
                secondary releases those again.
        """
        missing = self.missing()
        lost = [number for number in missing if np.isin(self.parts[number], booked).any()]
        if not lost:
            return []
        last = lost == missing[: len(lost)] and lost[0] > max(self._kept, default=-1)
        if not last or len(lost) > ROUNDS_AHEAD:
            raise PrivacyError(
                f"{self._files.path / _name(lost[0])}: is missing or damaged, and the rows that it "
                f"held cannot be released again; restore it from a copy, or start another run with "
                f"another --out, which is charged to the table's total"
            )
        return [self.parts[number] for number in lost]

    def require_all(self) -> None:
        """Refuse a pass that is not whole; nothing is asked for.

        Raises:
            ConfigError: Naming the file that is damaged, or how many rows there are so far.
        """
        missing = self.missing()
        for number in missing:
            if self._files.holds(_name(number)):
                raise ConfigError(
                    f"{self._files.path / _name(number)}: is damaged; restore it from a copy"
                )
        if missing:
            there = sum(len(self.parts[number]) for number in self._kept)
            raise ConfigError(
                f"{self._files.path / 'released'}: holds {there} of the "
                f"{sum(map(len, self.parts))} rows; go on with the run (--resume) until all are "
                f"released"
            )

    def all(self) -> Float[Tensor, "rows positions width"]:
        """Return the aggregates of all rows, once every round is kept."""
        return torch.cat([self._kept[number] for number in range(len(self.parts))])

    def _read(self, number: int, part: Int64[np.ndarray, " batch"]) -> Tensor | None:
        try:
            state = self._files.read(_name(number))
        except (FileNotFoundError, DamagedError):
            return None
        rows, aggregate = state.get("rows"), state.get("aggregate")
        if not isinstance(rows, Tensor) or not isinstance(aggregate, Tensor):
            return None
        if not torch.equal(rows, torch.from_numpy(part)):
            raise self._other_table()
        if aggregate.shape != (len(part), *self._shape) or not aggregate.isfinite().all():
            return None
        return aggregate

    def _other_table(self) -> ConfigError:
        rows = sum(map(len, self.parts))
        return ConfigError(
            f"{self._files.path / 'released'}: other rows were released than the {rows} that the "
            f"table has now; restore the table, or choose another --out"
        )


def _name(number: int) -> str:
    return f"released/{number + 1}.pt"


# Each row released once, then reused, as a frozen encoder allows; docs/privacy.md, section 4.


class ReleasedRows:
    """An exchange that answers from stored releases: nothing is sent between parties."""

    def __init__(
        self,
        aggregates: Float[Tensor, "rows positions width"],
        *,
        ranks: tuple[int, ...],
        rounds: RoundCounter,
        device: torch.device,
    ) -> None:
        """Make it.

        Args:
            aggregates: Of all rows.
            ranks: Of all secondaries.
            rounds: Gives out the session's round numbers.
            device: Where the top model computes.
        """
        self._aggregates = aggregates
        self._ranks = ranks
        self.rounds = rounds
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
        rows = torch.as_tensor(plan.rows, device=self._aggregates.device)
        return self._aggregates[rows].to(self._device)

    def release_each(
        self, plans: Iterator[RoundPlan]
    ) -> Iterator[Float[Tensor, "batch positions width"]]:
        """Yield the stored aggregates of each round's rows.

        Reveals:
            Nothing: these values were released before.
        """
        return map(self.release, plans)

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

    def tell(self, message: TypedMessage, *, answer: MessageKind | None = None) -> None:  # noqa: ARG002
        """Refuse: a frozen encoder learns nothing.

        Reveals:
            Nothing.
        """
        raise ProtocolError("a frozen encoder learns nothing that it could be told")

    def end_epoch(self, mark: EpochMark) -> None:
        """Do nothing: no secondary trains.

        Reveals:
            Nothing.
        """


def release_once(
    exchange: Exchange, kept: KeptRows, *, observe: Observer
) -> Float[Tensor, "rows positions width"]:
    """Release every row that is not kept yet, and return all aggregates, in the order of row ids.

    A round is announced when the one :data:`securevfl.federation.exchange.ROUNDS_AHEAD` before it
    is kept, so that a crash loses none but those under way, which every secondary can answer again.

    Args:
        exchange: Where the secondaries are.
        kept: What was released before, of all rows 0 to n - 1: training, validation and test
            alike.
        observe: Hears of every round.

    Reveals:
        To the primary: one noisy average for every row. To the secondaries: nothing new.
    """
    if not kept.parts:
        raise ProtocolError("there are no rows to release")
    missing = kept.missing()
    plans = (
        RoundPlan(
            round_number=exchange.rounds.next(),
            rows=kept.parts[number],
            active=exchange.ranks,
            purpose="release",
        )
        for number in missing
    )
    for number, aggregate in zip(missing, exchange.release_each(plans), strict=True):
        kept.keep(number, aggregate.cpu())
        observe(RowsReleased(done=number + 1, of=len(kept.parts)))
    return kept.all()
