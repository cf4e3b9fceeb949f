"""Gain of ``auto`` where a partner has words or many columns: ``python wide_tables.py``.

Made tables of one primary and one secondary, linked by ids. ``codes``: a column of 300 words that
sets the label. ``words``: six numbers and 20 words. ``many``: 500 columns, of which 20 count.
``alike``: 200 columns of five factors. Prints the gain in AUC over the local baseline, mean and
deviation over seeds, and how often the joint model answers.

    python research/class_means/wide_tables.py --tables codes,many --epsilons none,8,4,2 --seeds 3
"""

import argparse
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

import securevfl as sv
from securevfl.data.scaling import ColumnSettings

Made = tuple[np.ndarray, pd.DataFrame]
"""What the partner's columns add to the log odds of each row; and those columns."""


def numbers(values: np.ndarray) -> pd.DataFrame:
    return pd.DataFrame({f"n{place}": column for place, column in enumerate(values.T)})


def codes(rng: np.random.Generator) -> Made:
    code = rng.integers(0, 300, 4000)
    return 1.5 * rng.normal(size=300)[code], pd.DataFrame(
        {"code": np.char.add("c", code.astype(str))}
    )


def words(rng: np.random.Generator) -> Made:
    word, values = rng.integers(0, 20, 4000), rng.normal(size=(4000, 6))
    odds = rng.normal(size=20)[word] + values[:, 0] + values[:, 1]
    return odds, numbers(values).assign(word=[f"w{number}" for number in word])


def many(rng: np.random.Generator) -> Made:
    values = rng.normal(size=(2000, 500))
    return values[:, :20] @ rng.normal(size=20) / 3, numbers(values)


def alike(rng: np.random.Generator) -> Made:
    factors = rng.normal(size=(4000, 5))
    values = factors @ rng.normal(size=(5, 200)) / 2 + rng.normal(size=(4000, 200))
    return factors @ rng.normal(size=5) * 0.7, numbers(values)


TABLES: dict[str, Callable[[np.random.Generator], Made]] = {
    "codes": codes,
    "words": words,
    "many": many,
    "alike": alike,
}


def gain_of(name: str, epsilon: str, seed: int) -> tuple[float, bool]:
    """Return the gain of one run, and whether the joint model answered."""
    rng = np.random.default_rng(seed)
    odds, partner = TABLES[name](rng)
    own = rng.normal(size=(len(odds), 5))
    label = own[:, 0] + own[:, 1] / 2 + odds + rng.logistic(size=len(odds)) > 0
    ids = [f"id{row}" for row in rng.permutation(len(odds))]
    own_frame = pd.DataFrame(own, columns=[f"a{place}" for place in range(5)])
    names = [str(name) for name in partner]
    texts = [name for name in names if not pd.api.types.is_numeric_dtype(partner[name])]
    declared: dict[str, Sequence[float | str]] = {
        name: [-4.0, 4.0] for name in names if name not in texts
    }
    settings = ColumnSettings(categories={column: sorted(set(partner[column])) for column in texts})
    parties = [
        sv.data.from_frame(
            own_frame.assign(id=ids, label=label), name="bank", key="id", label="label"
        ),
        sv.data.from_frame(partner.assign(id=ids), name="partner", key="id", columns=settings),
    ]
    privacy = sv.dp.Privacy(mechanism="none")
    if epsilon != "none":
        privacy = sv.dp.Privacy(epsilon=float(epsilon), delta=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = sv.simulate(
            parties,
            privacy=privacy,
            encoder="auto",
            seed=seed,
            bounds={"partner": declared},
            linkage=sv.LinkageSettings(protection="none", metric="exact"),
        )
    gain = run.metrics["gain"]
    return gain["value"], gain["used"] == "joint"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--tables", default=",".join(TABLES))
    options.add_argument("--epsilons", default="none,8,4,2")
    options.add_argument("--seeds", type=int, default=3)
    asked = options.parse_args()
    for name in asked.tables.split(","):
        for epsilon in asked.epsilons.split(","):
            runs = [gain_of(name, epsilon, seed) for seed in range(asked.seeds)]
            gains = np.array([gain for gain, _ in runs])
            answers = sum(joint for _, joint in runs)
            print(
                f"{name:6} epsilon {epsilon:>4}: {gains.mean():+.3f} ± {gains.std(ddof=1):.3f}, "
                f"answers in {answers} of {len(runs)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
