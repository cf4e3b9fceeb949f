"""Private set intersection between processes: a run, predictions of a session, other tables."""

from typing import Any

import numpy as np
import pandas as pd
import pytest

import securevfl as sv

pytest.importorskip("rbcl")
pytestmark = pytest.mark.multiprocess

# As close as the ring's steps let sums of float32 be; see test_simulated_equals_federated.py.
STEP = 2**-14


def test_a_run_by_psi_is_the_run_by_shown_keys() -> None:
    """Two secondaries with other people too: equal losses, and predictions by the same links."""
    random = np.random.default_rng(0)
    wealth = random.normal(size=90)
    names = [f"person {number}" for number in range(90)]
    own = pd.DataFrame({"name": names, "age": random.normal(size=90), "y": wealth > 0})
    bank = pd.DataFrame({"name": names[:80], "wealth": wealth[:80]}).sample(frac=1, random_state=0)
    shop = pd.DataFrame({"name": [*names[40:], "else"], "spent": random.normal(size=51)})
    given: dict[str, Any] = {
        "primary": own,
        "secondaries": {"bank": bank, "shop": shop},
        "label": "y",
        "key": "name",
        "model": sv.models.Top1Sim(hidden=8),
        "privacy": sv.dp.Privacy(mechanism="none", encoder="trained"),
        "training": sv.TrainingSettings(epochs=2, learning_rate=0.02),
        "progress": False,
    }
    shown = sv.simulate(**given, linkage=sv.LinkageSettings(metric="exact", protection="none"))
    hidden = sv.train(
        **given, linkage=sv.LinkageSettings(metric="exact", protection="psi", pad_to=100)
    )
    assert hidden.losses == pytest.approx(shown.losses, abs=STEP)
    new = own.drop(columns="y")[30:60]
    np.testing.assert_allclose(
        hidden.predict(new).probabilities, shown.predict(new).probabilities, atol=1e-3
    )
