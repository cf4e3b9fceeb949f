"""Averages of rounds that the primary keeps, a file each, so that none is requested twice."""

import hashlib
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from securevfl.core.errors import ConfigError, PrivacyError
from securevfl.federation.checkpoint import DamagedError, StateFolder
from securevfl.federation.rounds.cut import CutRows
from securevfl.federation.run_plan import ROUNDS_AHEAD


@dataclass(eq=False)
class CachedRows:
    """The rounds of one release pass in the primary's folder, a file each."""

    files: StateFolder
    """The primary's; they name the run."""
    parts: Sequence[npt.NDArray[np.int64]]
    """Row ids of every round of the pass, in order."""
    _: KW_ONLY
    shape: tuple[int, ...]
    """Shape of one row of the cut, (L, H); a round of any other counts as damaged."""

    def __post_init__(self) -> None:
        """Find out what is kept.

        Raises:
            ConfigError: If what is kept is of other rows, as if the table had changed.
        """
        self._kept: dict[int, Tensor] = {}
        for number, part in enumerate(self.parts):
            aggregate = self._read(number, part)
            if aggregate is not None:
                self._kept[number] = aggregate
        if self.files.holds(_release_file(len(self.parts))):
            raise self._other_table()

    def missing(self) -> list[int]:
        """Return the rounds that are not kept, in order, counted from 0."""
        return [number for number in range(len(self.parts)) if number not in self._kept]

    def keep(self, number: int, aggregate: CutRows) -> None:
        """Keep a round's rows; they are on the disk when this returns.

        Raises:
            StorageError: If the disk takes no more.
        """
        rows = torch.from_numpy(self.parts[number])
        self.files.write(_release_file(number), {"rows": rows, "aggregate": aggregate})
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
                f"{self.files.path / _release_file(lost[0])}: is missing or damaged, and the rows "
                f"that it held cannot be released again; restore it from a copy, or start another "
                f"run with another --out, which is charged to the table's total"
            )
        return [self.parts[number] for number in lost]

    def require_all(self) -> None:
        """Refuse a pass that is not whole; nothing is asked for.

        Raises:
            ConfigError: Naming the file that is damaged, or how many rows there are so far.
        """
        missing = self.missing()
        for number in missing:
            if self.files.holds(_release_file(number)):
                raise ConfigError(
                    f"{self.files.path / _release_file(number)}: is damaged; restore it from a copy"
                )
        if missing:
            there = sum(len(self.parts[number]) for number in self._kept)
            raise ConfigError(
                f"{self.files.path / 'released'}: holds {there} of the "
                f"{sum(map(len, self.parts))} rows; go on with the run (--resume) until all are "
                f"released"
            )

    def all(self) -> Float[Tensor, "rows positions width"]:
        """Return the aggregates of all rows, once every round is kept."""
        return torch.cat([self._kept[number] for number in range(len(self.parts))])

    def _read(self, number: int, part: Int64[np.ndarray, " batch"]) -> Tensor | None:
        try:
            state = self.files.read(_release_file(number))
        except (FileNotFoundError, DamagedError):
            return None
        rows, aggregate = state.get("rows"), state.get("aggregate")
        if not isinstance(rows, Tensor) or not isinstance(aggregate, Tensor):
            return None
        if not torch.equal(rows, torch.from_numpy(part)):
            raise self._other_table()
        if aggregate.shape != (len(part), *self.shape) or not aggregate.isfinite().all():
            return None
        return aggregate

    def _other_table(self) -> ConfigError:
        rows = sum(map(len, self.parts))
        return ConfigError(
            f"{self.files.path / 'released'}: other rows were released than the {rows} that the "
            f"table has now; restore the table, or choose another --out"
        )


def _release_file(number: int) -> str:
    return f"released/{number + 1}.pt"


class CachedTestRounds:
    """The averages of test rounds in the primary's folder, a file each."""

    def __init__(
        self,
        files: StateFolder,
        parts: Sequence[npt.NDArray[np.int64]],
        *,
        top: nn.Module,
        ranks: tuple[int, ...],
        shape: tuple[int, ...],
    ) -> None:
        """Read the rounds that are kept.

        Args:
            files: The primary's; they name the run.
            parts: Row ids of every test round, in order.
            top: The primary's half of the model that is tested. Rounds cached for another model,
                or for other secondaries, are requested again.
            ranks: Ranks of the secondaries that answer.
            shape: Shape of one row of the cut, (L, H).
        """
        self._files = files
        self._parts = parts
        self._model = _digest(top, ranks)
        self._shape = shape
        self._kept: list[Tensor] = []
        # Rounds are kept in order, so what comes behind one that is missing is of another model.
        for number in range(len(parts)):
            aggregate = self._read(number)
            if aggregate is None:
                break
            self._kept.append(aggregate)

    def missing(self) -> list[int]:
        """Return how many rows each round has that is still to be requested."""
        return [len(part) for part in self._parts[len(self._kept) :]]

    def find(self, rows: Int64[np.ndarray, " batch"]) -> CutRows | None:
        """Return the average of a round of these rows; None if it is not kept."""
        for part, aggregate in zip(self._parts, self._kept, strict=False):
            if np.array_equal(part, rows):
                return aggregate
        return None

    def keep(self, aggregate: CutRows) -> None:
        """Keep the average of the first round that is missing; it is on the disk then.

        Raises:
            StorageError: If the disk takes no more.
        """
        number, kept = len(self._kept), aggregate.cpu()
        rows = torch.from_numpy(self._parts[number])
        self._files.write(
            _test_file(number), {"model": self._model, "rows": rows, "aggregate": kept}
        )
        self._kept.append(kept)

    def _read(self, number: int) -> Tensor | None:
        try:
            state = self._files.read(_test_file(number))
        except (FileNotFoundError, DamagedError):
            return None
        rows, aggregate = state.get("rows"), state.get("aggregate")
        part = torch.from_numpy(self._parts[number])
        if not isinstance(rows, Tensor) or not isinstance(aggregate, Tensor):
            return None
        if state.get("model") != self._model or not torch.equal(rows, part):
            return None
        return aggregate if aggregate.shape == (len(part), *self._shape) else None


def _test_file(number: int) -> str:
    return f"tested/{number + 1}.pt"


def _digest(top: nn.Module, ranks: tuple[int, ...]) -> str:
    """Return the hash of a model and of who answers.

    An epoch that is trained once more, behind other noise, is another model of the same number.
    """
    made = hashlib.sha256(repr(ranks).encode())
    for name, value in sorted(top.state_dict().items()):
        made.update(name.encode())
        made.update(value.detach().cpu().contiguous().numpy().tobytes())
    return made.hexdigest()
