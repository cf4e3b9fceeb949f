"""The tables of the README: an agency, a rental company and a school board."""

from pathlib import Path

import numpy as np
import pandas as pd

ROWS = 500


def write_tables(folder: Path, rows: int = ROWS) -> None:
    """Flats whose prices depend on rents and schools that only the secondaries know."""
    random = np.random.default_rng(0)
    place = random.uniform(0, 1, (rows, 2))
    rooms = random.integers(1, 6, rows)
    rent, nights = random.uniform(50, 500, (2, rows))
    marks, pupils = random.uniform(0, 100, (2, rows))
    price = 100 * rooms + rent + 3 * marks + random.normal(scale=20, size=rows)

    def save(name: str, **columns: np.ndarray) -> None:
        noisy = place + random.normal(scale=1e-4, size=place.shape)
        keys = {"lon": noisy[:, 0], "lat": noisy[:, 1]}
        order = random.permutation(rows)
        pd.DataFrame({**keys, **columns}).iloc[order].to_csv(folder / f"{name}.csv", index=False)

    save("agency", rooms=rooms, price=price)
    save("rental", rent=rent, nights=nights)
    save("school", marks=marks, pupils=pupils)
