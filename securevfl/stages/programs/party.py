"""A party of a program, as the program's function sees it."""

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from securevfl.core.errors import DataError

if TYPE_CHECKING:
    # It loads with a table, which the dealer has not.
    import pandas as pd


@dataclass(frozen=True, eq=False)
class ProgramParty:
    """One party, as its program sees it."""

    name: str
    """The party's name."""
    _: KW_ONLY
    names: tuple[str, ...]
    """All that compute, the primary first; CrypTen's ranks are their places."""
    table: "pd.DataFrame"
    """This party's own table, whole."""

    @property
    def rank(self) -> int:
        """CrypTen's rank of this party."""
        return self.names.index(self.name)

    def column(self, name: str, *, of: str | None = None) -> Tensor:
        """Return a column of numbers, as ``crypten.cryptensor`` takes it.

        Args:
            name: Of the column.
            of: Whose column it is; at others zeros stand in for it, of as many rows as this party
                has. None: this party's own.

        Raises:
            DataError: If there is no such column, or it is not of numbers.
        """
        if of not in (None, self.name):
            return torch.zeros(len(self.table))
        try:
            values = self.table[name].to_numpy(dtype=np.float32)
        except KeyError:
            raise DataError(f"table of {self.name!r}: has no column {name!r}") from None
        except (TypeError, ValueError):
            raise DataError(f"table of {self.name!r}: {name!r} is not of numbers") from None
        return torch.from_numpy(values)
