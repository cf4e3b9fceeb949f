"""Peak memory of reading a table, for a text file and for Parquet.

    python research/memory/reading_memory.py [--rows 500000] [--columns 20]

Each reading runs in a process of its own, whose peak is what the system says of it; the peak of a
process that has only imported the same libraries is taken off. Half of the columns are excluded.
``pandas`` is ``pandas.read_csv(low_memory=False)`` or ``pandas.read_parquet`` of the whole file.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

from securevfl.core.memory import peak_memory_bytes
from securevfl.data.sources.read import read_frame
from securevfl.data.sources.settings import Wanted

READERS = ("nothing", "pandas", "read_frame")


def main() -> None:
    """Print a line for each file and reader, or be one of the readers."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--columns", type=int, default=20)
    parser.add_argument("--reader", choices=READERS)
    parser.add_argument("--path", type=Path)
    given = parser.parse_args()
    if given.reader is not None:
        read(given.reader, given.path, given.columns)
        print(peak_memory_bytes())
        return
    with tempfile.TemporaryDirectory() as folder:
        random = np.random.default_rng(0)
        frame = pd.DataFrame(
            {f"x{place}": random.normal(size=given.rows) for place in range(given.columns)}
        )
        for name in ("table.csv", "table.parquet"):
            path = Path(folder) / name
            if name.endswith("csv"):
                frame.to_csv(path, index=False)
            else:
                frame.to_parquet(path, row_group_size=1 << 16)
            peaks = {reader: peak(reader, path, given.columns) for reader in READERS}
            print(
                f"{name}: {path.stat().st_size >> 20} MiB on the disk, "
                f"{given.rows * given.columns * 2 >> 20} MiB kept in float32; peak "
                + ", ".join(
                    f"{reader} {peaks[reader] - peaks['nothing'] >> 20} MiB"
                    for reader in READERS[1:]
                )
            )


def peak(reader: str, path: Path, columns: int) -> int:
    """Return the peak memory of a reader's process, in bytes."""
    command = [sys.executable, __file__, "--reader", reader, "--path", str(path)]
    ended = subprocess.run(
        [*command, "--columns", str(columns)],
        check=True,
        capture_output=True,
        text=True,
        timeout=600,
    )
    return int(ended.stdout)


def read(reader: str, path: Path, columns: int) -> None:
    """Read a file as the reader named does."""
    if reader == "nothing":
        import pyarrow.parquet  # noqa: F401 - its memory is taken off

        return
    if reader == "pandas":
        whole = pd.read_csv(path, low_memory=False) if path.suffix == ".csv" else None
        whole = pd.read_parquet(path) if whole is None else whole
        assert len(whole.columns) == columns
        return
    exclude = [f"x{place}" for place in range(columns // 2)]
    frame = read_frame(path, where="table", wanted=Wanted(exclude=exclude, exact=[]))
    assert len(frame.columns) == columns - columns // 2


if __name__ == "__main__":
    main()
