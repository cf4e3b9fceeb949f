"""A primary that has keys and labels alone learns from its partners' columns."""

from typing import Any

import numpy as np
import pandas as pd
import pytest

import securevfl as sv

MODELS: dict[str, Any] = {
    "avgsim": sv.models.AvgSim(neighbours=1),
    "fedsplitnn": sv.models.FedSplitNN(neighbours=1),
    "fedsim": sv.models.FedSim(neighbours=2),
    "fet": sv.models.FeT(neighbours=2, hidden=4, heads=1, fourier_features=4, fourier_width=4),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("task", ["binary", "regression"])
def test_labels_alone_are_enough(model: Any, task: Any) -> None:
    """Keys are ids, so nothing is left for the local baseline: it is a constant."""
    random = np.random.default_rng(2)
    place, wealth = random.permutation(80), random.normal(size=80)
    label = wealth if task == "regression" else np.where(wealth > 0, "yes", "no")
    own = pd.DataFrame({"place": place, "label": label})
    theirs = pd.DataFrame({"place": place, "wealth": wealth}).sample(frac=1, random_state=1)

    run = sv.simulate(
        [
            sv.data.from_frame(own, name="bank", key=["place"], label="label"),
            sv.data.from_frame(theirs, name="bureau", key=["place"]),
        ],
        model,
        privacy=sv.dp.Privacy(mechanism="none"),
        training=sv.TrainingSettings(epochs=1, batch_size=32),
    )
    assert len(run.predict(own[["place"]][:3]).values) == 3
