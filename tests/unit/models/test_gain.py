"""What a joint model adds to the primary alone: the paired interval, and the verdict."""

import numpy as np
import pytest
import torch

from securevfl.core.conventions import stream
from securevfl.models.alone.choice import Decision, fit_alone
from securevfl.models.alone.gain import AloneMeasured, PlaceboGain, gain_in_words, measure_alone
from securevfl.models.alone.margins import BaselineConfig, OwnInputs
from securevfl.models.task_metrics import resamples_for
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
        gain_in_words(head, value, interval, chosen=chosen).verdict
        for head, value, interval, chosen in cases
    ]
    assert said == [
        "joint improves on the local baseline by 0.041 accuracy (95 % interval 0.010 to 0.072); "
        "the local baseline is boosting",
        "joint is worse than the local baseline by 0.040 accuracy (95 % interval 0.020 to 0.060): "
        "use the local baseline; the local baseline is the network",
        "no clear gain over the local baseline: +0.004 accuracy (95 % interval -0.010 to +0.018); "
        "the local baseline is the linear model",
        "joint improves on the local baseline by 5.25 RMSE (95 % interval 2.00 to 9.00; lower RMSE "
        "is better); the local baseline is boosting",
        "no clear gain over the local baseline: +0.100 accuracy (too few test rows for an "
        "interval); the local baseline is a constant, without columns of its own",
    ]


@pytest.mark.parametrize(
    ("figures", "why"),
    [
        # At most 0.004 is gained, and a model is clearly no better.
        ({"scale": 0.5, "gain": 0.002, "error": 0.001}, "no clear gain on the 1,234 rows"),
        ({"scale": 0.5, "gain": 0.001, "error": 0.002}, "no clear gain on the 1,234 rows"),
        ({"scale": 0.0, "gain": 0.0, "error": 0.0}, "no clear gain on the 1,234 rows"),
        # It may be much better.
        (
            {"scale": 0.5, "gain": 0.01, "error": 0.02},
            "1,234 rows without the test rows are too few to tell whether joint is better (loss "
            "lower by 0.010 ± 0.020)",
        ),
        # Directions have seen so much of these rows that nothing can be said.
        (
            {"scale": 0.0, "gain": 0.0, "error": 0.0, "optimism": 0.1},
            "1,234 rows without the test rows are too few to tell whether joint is better (loss "
            "lower by 0.000 ± 0.000)",
        ),
    ],
)
def test_why_the_local_baseline_answers(figures: dict[str, float], why: str) -> None:
    """Rows that are too few are no evidence that partners don't help."""
    decision = Decision(used="alone", rows=1234, **figures)
    found = gain_in_words(SHARE, 0.3, (0.2, 0.4), chosen="average", decision=decision)
    assert (found.used, found.outcome) == ("alone", "unclear")
    assert found.verdict.startswith(why)
    assert found.verdict.endswith(
        ": predictions are the local baseline's, which is an average of its models"
    )


@pytest.mark.parametrize(
    ("partners", "interval", "outcome", "words"),
    [
        (0.03, (0.01, 0.05), "better", "of which 0.030 (0.010 to 0.050) from the partners"),
        (
            0.002,
            (-0.01, 0.014),
            "unclear",
            "no clear gain from the partners: joint improves on the local baseline by 0.041 "
            "accuracy (95 % interval 0.010 to 0.072), and on the same training with partners' "
            "rows permuted by +0.002 (-0.010 to +0.014)",
        ),
    ],
)
def test_what_a_placebo_gains_as_well_is_not_the_partners(
    partners: float, interval: tuple[float, float], outcome: str, words: str
) -> None:
    """A gain over the local baseline is called one only where it is one over the placebo too."""
    found = gain_in_words(
        SHARE,
        0.041,
        (0.01, 0.072),
        chosen="boosting",
        partners=PlaceboGain(placebo="permuted", value=partners, interval=interval),
    )
    assert found.outcome == outcome
    assert words in found.verdict


def test_the_best_placebo_counts() -> None:
    """Partners are held against the placebo that does better on the test rows."""
    values, labels = table()
    drawn = np.random.default_rng(5)
    inputs = OwnInputs(values=values)
    alone = fit_alone(
        inputs,
        labels,
        ERROR,
        train=np.arange(80),
        validation=np.arange(80, 120),
        seed=1,
        network=BaselineConfig(hidden=(4,), epochs=1),
    )
    known = torch.from_numpy(labels[TEST])
    near, nearer = (
        known[:, None] + scale * torch.from_numpy(drawn.normal(size=(40, 1))).float()
        for scale in (0.3, 0.2)
    )
    found = measure_alone(
        alone,
        inputs.take(TEST),
        known,
        near,
        threshold=0.5,
        seed=7,
        placebos={"own": near + 5, "permuted": nearer},
    )
    assert found.gain.placebo == "permuted"
    assert found.gain.value > 0 > found.gain.partners
    assert found.gain.outcome == "unclear"
    assert "no clear gain from the partners" in found.gain.verdict
    again = measure_alone(
        alone, inputs.take(TEST), known, near, threshold=0.5, seed=7, placebos={"own": near + 5}
    )
    assert again.gain.outcome == "better"
    assert again.gain.partners_interval is not None
    assert again.gain.partners_interval[0] > 0


@pytest.mark.parametrize(
    ("unit", "amount"), [(1e-7, "1.23e-07 RMSE (95 % interval 1e-07 to 2e-07"), (1e30, "1.23e+30")]
)
def test_a_verdict_has_significant_digits_in_any_unit(unit: float, amount: str) -> None:
    gain = gain_in_words(ERROR, 1.23 * unit, (1.0 * unit, 2.0 * unit), chosen="linear")
    assert amount in gain.verdict
    assert "0.000" not in gain.verdict
