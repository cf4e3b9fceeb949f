"""What a joint model adds to the primary alone: the paired interval, and the verdict."""

import numpy as np
import pytest
import torch

from securevfl.core.seeds import stream
from securevfl.models.alone.choice import fit_alone
from securevfl.models.alone.gain import AloneMeasured, gain_in_words, measure_alone
from securevfl.models.alone.margins import OwnInputs
from securevfl.models.baselines.baseline_config import BaselineConfig
from securevfl.models.bootstrap import resamples_for
from securevfl.models.tasks import TaskHead

ROWS = 160
TEST = np.arange(120, ROWS)
ERROR = TaskHead(task="regression", label_deviation=20.0)
SHARE = TaskHead(task="binary", chosen="accuracy")


def measured(
    head: TaskHead, labels: np.ndarray, joint: np.ndarray, values: np.ndarray
) -> tuple[AloneMeasured, np.ndarray]:
    """Return what is measured, and alone's margins of the test rows."""
    inputs = OwnInputs(values=values)
    alone = fit_alone(
        inputs,
        labels,
        head,
        train=np.arange(80),
        validation=np.arange(80, 120),
        seed=1,
        network=BaselineConfig(hidden=(4,), epochs=1),
    )
    found = measure_alone(
        alone,
        inputs.take(TEST),
        torch.from_numpy(labels[TEST]),
        torch.from_numpy(joint[TEST]),
        threshold=0.5,
        seed=7,
    )
    return found, alone.margins(inputs.take(TEST))


def table() -> tuple[np.ndarray, np.ndarray]:
    """Return the primary's one column, and labels that half depend on it."""
    random = np.random.default_rng(3)
    values = random.normal(size=(ROWS, 1))
    return values, (values[:, 0] + random.normal(size=ROWS)).astype(np.float32)


def test_the_interval_is_that_of_paired_draws() -> None:
    """As computed draw by draw: both models on the same rows, in the labels' own unit."""
    values, labels = table()
    joint = (labels + 0.3 * np.random.default_rng(5).normal(size=ROWS)).astype(np.float32)[:, None]
    found, alone = measured(ERROR, labels, joint, values)
    known, outputs = labels[TEST], joint[TEST, 0]
    places = stream(7, "bootstrap").integers(0, len(TEST), size=(resamples_for(40, 1), len(TEST)))

    def rmse(predicted: np.ndarray, rows: np.ndarray) -> float:
        return 20 * float(np.sqrt(np.mean((predicted[rows] - known[rows]) ** 2)))

    gains = [rmse(alone[:, 0], rows) - rmse(outputs, rows) for rows in places]
    assert found.gain.interval == pytest.approx(np.quantile(gains, [0.025, 0.975]), rel=1e-4)
    assert found.gain.value == pytest.approx(
        rmse(alone[:, 0], np.arange(40)) - rmse(outputs, np.arange(40)), rel=1e-4
    )
    assert found.gain.outcome == "better"
    one = found.candidates[found.chosen]
    of_alone = [rmse(alone[:, 0], rows) for rows in places]
    assert one["interval"] == pytest.approx(np.quantile(of_alone, [0.025, 0.975]), rel=1e-4)


@pytest.mark.parametrize(
    ("quality", "outcome"), [(1.0, "better"), (None, "unclear"), (-1.0, "worse")]
)
def test_outcomes(quality: float | None, outcome: str) -> None:
    """Labels themselves are better, alone's own margins are no gain, the contrary is worse."""
    values, numbers = table()
    labels = (numbers > 0).astype(np.float32)
    right = (2 * labels - 1)[:, None]
    _, alone = measured(SHARE, labels, right, values)
    joint = right.copy()
    joint[TEST] = alone if quality is None else quality * right[TEST]
    found, _ = measured(SHARE, labels, joint, values)
    assert found.gain.outcome == outcome
    assert np.sign(found.gain.value) == (quality or 0.0)


def test_verdicts() -> None:
    """Plain words, the metric in its own unit, and which way is better where it is not up."""
    cases = [
        (SHARE, 0.041, (0.01, 0.072), "boosting"),
        (SHARE, -0.04, (-0.06, -0.02), "network"),
        (SHARE, 0.004, (-0.01, 0.018), "linear"),
        (ERROR, 5.25, (2.0, 9.0), "boosting"),
        (SHARE, 0.1, None, "constant"),
    ]
    said = [
        gain_in_words(head, value, interval, chosen=chosen, used="joint").verdict
        for head, value, interval, chosen in cases
    ]
    assert said == [
        "joint beats alone by 0.041 accuracy (95 % interval 0.010 to 0.072); alone is boosting",
        "joint is worse than alone by 0.040 accuracy (95 % interval 0.020 to 0.060): use alone; "
        "alone is the network",
        "no clear gain over alone: +0.004 accuracy (95 % interval -0.010 to +0.018); alone is the "
        "linear model",
        "joint beats alone by 5.25 RMSE (95 % interval 2.00 to 9.00; lower RMSE is better); alone "
        "is boosting",
        "no clear gain over alone: +0.100 accuracy (too few test rows for an interval); alone is "
        "a constant, without columns of its own",
    ]
    gated = gain_in_words(SHARE, 0.0, (0.0, 0.0), chosen="boosting", used="alone")
    assert gated.verdict.startswith("no clear gain on validation rows: predictions are alone's")
    assert (gated.used, gated.outcome) == ("alone", "unclear")
