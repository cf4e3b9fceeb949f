"""What the primary of a frozen run keeps: every round's rows, from the moment it has them.

A row is released once. So a run that was cut goes on behind the last round that lies here. The next
few (:data:`securevfl.federation.rounds.ROUNDS_AHEAD`) may have been announced and not kept: their
rows are asked for again, and every secondary answers with what it answered before
(:mod:`federation.kept_release`).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from securevfl.core.errors import ConfigError, PrivacyError
from securevfl.federation.rounds import ROUNDS_AHEAD
from securevfl.federation.state_files import DamagedError, StateFolder


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
