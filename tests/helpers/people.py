"""Two tables about the same people: misspelt names, dates, words, empty cells, ids of one's own."""

from pathlib import Path

import numpy as np
import pandas as pd

PEOPLE = 120
_SYLLABLES = ("an", "bor", "cel", "dra", "el", "fin", "gor", "hal", "ir", "jen", "kas", "lo")


def write_people(folder: Path) -> None:
    """Write ``bank.csv``, with the label ``default``, and ``shop.csv``."""
    random = np.random.default_rng(5)
    names = [
        " ".join("".join(random.choice(_SYLLABLES, 3)).title() for _ in range(2))
        for _ in range(PEOPLE)
    ]
    births = np.datetime64("1950-01-01") + random.integers(0, 15_000, PEOPLE).astype(
        "timedelta64[D]"
    )
    income = random.normal(40, 10, PEOPLE).round(1)
    spent = random.uniform(0, 900, PEOPLE).round(2)
    plan = random.choice(["basic", "gold"], PEOPLE)
    default = (spent - 10 * income + random.normal(scale=50, size=PEOPLE) > 50).astype(int)
    pd.DataFrame(
        {
            "customer_id": random.permutation(90_000)[:PEOPLE],
            "name": names,
            "birth_date": births.astype(str),
            "income": np.where(random.random(PEOPLE) < 0.1, np.nan, income),
            "opened": (births + np.timedelta64(8000, "D")).astype(str),
            "remark": [f"remark {number}: {name}" for number, name in enumerate(names)],
            "default": default,
        }
    ).to_csv(folder / "bank.csv", index=False)
    since = np.datetime64("2015-01-01") + random.integers(0, 3000, PEOPLE).astype("timedelta64[D]")
    misspelt = [name[:-1] if number % 4 == 0 else name for number, name in enumerate(names)]
    pd.DataFrame(
        {
            "full name": misspelt,
            "birth date": births.astype(str),
            "spent": np.where(random.random(PEOPLE) < 0.1, np.nan, spent),
            "plan": pd.Series(plan).mask(random.random(PEOPLE) < 0.1),
            "since": since.astype(str),
            "member": random.random(PEOPLE) < 0.5,
        }
    ).sample(frac=1, random_state=2).to_csv(folder / "shop.csv", index=False)
