"""A federation among scikit-learn's tools: what partners are worth, a search, and a kept model.

    python examples/estimators.py [--device cuda]

Two made-up tables: the label of the primary's customers depends on what a secondary knows of them.
Prints accuracies of held-out folds, together and alone, and the search's best settings.
"""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
from sklearn.model_selection import GridSearchCV, cross_val_score

import securevfl as sv

ROWS = 300


def tables() -> tuple[pd.DataFrame, "pd.Series[Any]", pd.DataFrame]:
    """Return the primary's columns, its labels, and the secondary's table."""
    random = np.random.default_rng(2)
    wealth, ids = random.normal(size=ROWS), np.arange(ROWS, dtype=np.float64)
    jobs = random.choice(["cook", "nurse"], ROWS)
    own = pd.DataFrame({"id": ids, "age": random.integers(20, 70, ROWS), "job": jobs})
    theirs = pd.DataFrame({"id": ids, "wealth": wealth}).sample(frac=1, random_state=0)
    return own, pd.Series(np.where(wealth + 0.5 * (jobs == "nurse") > 0, "yes", "no")), theirs


def main(device: str = "cpu") -> dict[str, float]:
    """Return accuracies and the search's best area under the curve."""
    X, y, bureau = tables()
    model = sv.FederatedClassifier(
        sv.models.Top1Sim(hidden=8),
        key=["id"],
        secondaries=[bureau],
        epochs=8,
        learning_rate=0.02,
        random_state=0,
        device=device,
    )
    figures = {"together": float(cross_val_score(model, X, y, cv=2).mean())}
    model.set_params(secondaries=())
    figures["alone"] = float(cross_val_score(model, X, y, cv=2).mean())
    model.set_params(secondaries=[bureau])
    grid = {"model_settings": [{"hidden": 4}, {"hidden": 16}]}
    search = GridSearchCV(model, grid, cv=2, scoring="roc_auc").fit(X, y)
    figures["best_auc"] = float(search.best_score_)
    for name, value in figures.items():
        print(f"{name}: {value:.3f}")
    print("best:", search.best_params_)
    with TemporaryDirectory() as folder:
        keep_and_use(bureau, X.assign(y=y), Path(folder) / "run")
    return figures


def keep_and_use(bureau: pd.DataFrame, bank: pd.DataFrame, folder: Path) -> None:
    """Train a run that stays on the disk, and predict with it as with any estimator."""
    partner = sv.data.from_frame(bureau, name="bureau", key=["id"])
    sv.simulate(
        [sv.data.from_frame(bank, name="bank", key=["id"], label="y"), partner],
        sv.models.Top1Sim(hidden=8),
        privacy=sv.dp.Privacy(mechanism="none"),
        training=sv.TrainingSettings(epochs=8, learning_rate=0.02),
        with_alone=False,
        out=folder,
    )
    kept = sv.FederatedClassifier.from_run(folder, parties=[partner])
    print("kept:", kept.classes_, kept.predict_proba(bank)[:2].round(3).tolist())
    print("epsilon of training:", kept.epsilon_)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A federation as an estimator.")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    main(parser.parse_args().device)
