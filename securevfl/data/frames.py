"""What every reader of a table asks of its columns."""

from collections.abc import Sequence

import pandas as pd

from securevfl.data.sources.columns import require_names


def require_columns(frame: pd.DataFrame, columns: Sequence[str], *, where: str) -> None:
    """Check that all columns are there.

    Raises:
        DataError: Naming the first that is not, the nearest name, and those that there are.
    """
    require_names([str(name) for name in frame.columns], columns, where=where)
