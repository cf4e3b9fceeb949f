"""CPU seconds to first results: ``simulate`` of 25,000 rows by exact ids, and ``lab advise`` of it.

    python research/advise/cpu_seconds.py [--rows 25000] [--profile]

A made table of 23 columns, skewed amounts among them: 12 are the primary's. Each part runs in a
process of its own, loading included. ``--profile`` prints where the time went.
"""

import argparse
import cProfile
import pstats
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd

import securevfl as sv

COLUMNS = 23


def tables(rows: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the primary's frame and the secondary's, whose rows are in another order."""
    drawn = np.random.default_rng(0)
    standard = drawn.normal(size=(rows, COLUMNS))
    weights = drawn.normal(size=COLUMNS) * 1.2 / np.sqrt(COLUMNS)
    odds = standard @ weights + 0.5 * (standard[:, 0] > 1) * standard[:, 13] - 1.2
    values = np.where(np.arange(COLUMNS) % 2 == 0, np.exp(1.2 * standard + 3), standard)
    frame = pd.DataFrame(values, columns=[f"x{number}" for number in range(COLUMNS)])
    frame.insert(0, "id", [f"C{number:06d}" for number in drawn.permutation(rows)])
    frame["y"] = (odds + drawn.logistic(size=rows) > 0).astype(int)
    own = frame[["id", *(f"x{number}" for number in range(0, COLUMNS, 2)), "y"]]
    others = frame[["id", *(f"x{number}" for number in range(1, COLUMNS, 2))]]
    return own, others.sample(frac=1, random_state=1)


def simulated(rows: int) -> None:
    own, others = tables(rows)
    print(
        sv.simulate(
            primary=own,
            secondaries=[others],
            label="y",
            key="id",
            linkage=sv.LinkageSettings(metric="exact", protection="none"),
            privacy=sv.dp.Privacy(epsilon=8.0, delta=1e-5),
            encoder="auto",
            bounds={"secondary-1": [-4.0, 4.0]},
            progress=False,
        )
    )


def advised(rows: int) -> None:
    # Not loaded by ``simulate``, whose seconds count its own loading.
    from securevfl.lab.advice import advise

    own, others = tables(rows)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        own.to_csv(folder / "own.csv", index=False)
        others.to_csv(folder / "others.csv", index=False)
        bounds = [f"--bounds=x{number}=-4,4" for number in range(1, COLUMNS, 2)]
        subprocess.run(
            [
                *(sys.executable, "-c", "from securevfl.cli.main import main; main()", "init"),
                *("--primary=own.csv", "--label=y", "--secondary=others.csv", "--out=fed.toml"),
                *bounds,
            ],
            cwd=folder,
            check=True,
            capture_output=True,
        )
        file = folder / "fed.toml"
        config = sv.read_federation(file)
        asked = [1.0, 2.0, 4.0, 8.0, 16.0]
        advice = advise(file, config, epsilons=asked, seeds=3, data_root=folder)
    for one in advice.rehearsed:
        print(one.verdict())
    print(advice.worth())


PARTS = {"simulate": simulated, "advise": advised}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=25_000)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--part", choices=PARTS, help="in this process; default: each in its own")
    options = parser.parse_args()
    if options.part is None:
        for part in PARTS:
            subprocess.run([sys.executable, *sys.argv, "--part", part], check=True)
        return
    profile = cProfile.Profile(time.process_time)
    if options.profile:
        profile.runcall(PARTS[options.part], options.rows)
        pstats.Stats(profile).sort_stats("cumulative").print_stats("securevfl", 40)
    else:
        PARTS[options.part](options.rows)
    print(f"{options.part}: {time.process_time():.1f} CPU seconds")


if __name__ == "__main__":
    main()
