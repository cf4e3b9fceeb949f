"""The budget calculator: three directions, all units and encoders, all refusals."""

import math

import pytest

from securevfl.core.errors import ConfigError, PrivacyError
from securevfl.desk.accountants import compare
from securevfl.dp.accountant import pld_epsilon
from securevfl.dp.budget import Budget
from securevfl.dp.events import SampledRelease
from securevfl.dp.gaussian import gaussian_epsilon


def budget(**changes) -> Budget:
    """Return 100 rounds at q = 0.1 with a frozen encoder, changed as asked."""
    plan = {"steps": 100, "sampling_rate": 0.1, "delta": 1e-5, "links_per_record": 4}
    return Budget(**{**plan, **changes})


def test_noise_and_epsilon_are_two_directions_of_one_curve() -> None:
    """Noise from epsilon is enough, and a thousandth less of it is not."""
    for plan in (budget(), budget(unit="entity", secondaries=2), budget(encoder="dp-trained")):
        z = plan.noise_multiplier(epsilon=2.0)

        assert 1.99 < plan.epsilon(noise_multiplier=z) <= 2.0
        assert plan.epsilon(noise_multiplier=z * (1 - 1e-3)) > 2.0


def test_steps_close_the_circle() -> None:
    """The noise that a hundred sampled steps need allows a hundred, or one that rounding spared."""
    z = budget().noise_multiplier(epsilon=2.0)

    assert 100 <= budget().steps_within(epsilon=2.0, noise_multiplier=z) <= 101


def test_steps_stay_within_the_target_and_one_more_does_not() -> None:
    """The number of steps is rounded down."""
    plan = budget(sampling_rate=1.0)
    steps = plan.steps_within(epsilon=3.0, noise_multiplier=20.0)

    assert budget(sampling_rate=1.0, steps=steps).epsilon(noise_multiplier=20.0) <= 3.0
    assert budget(sampling_rate=1.0, steps=steps + 1).epsilon(noise_multiplier=20.0) > 3.0
    assert plan.steps_within(epsilon=0.001, noise_multiplier=1.0) == 0


def test_each_row_of_the_table_has_its_accountant() -> None:
    """The table "How epsilon is computed" of docs/privacy.md, line by line."""
    linked = budget(
        unit="linked-row", sampling_rate=1.0, links_per_record=None, batches_per_epoch=20
    )
    assert linked.epsilon(noise_multiplier=2.0) == gaussian_epsilon(
        delta=1e-5, noise_multiplier=1 / math.sqrt(5 / 4)
    )
    fresh = SampledRelease(sampling_rate=0.1, noise_multiplier=2.0, count=100)
    assert budget().epsilon(noise_multiplier=2.0) == pld_epsilon([fresh], delta=1e-5)
    shared = SampledRelease(sampling_rate=0.1, noise_multiplier=2.0 / math.sqrt(20), count=5)
    assert budget(sampling="per-epoch", batches_per_epoch=20).epsilon(
        noise_multiplier=2.0
    ) == pld_epsilon([shared], delta=1e-5)
    trained = budget(encoder="trained", sampling_rate=1.0, links_per_record=None)
    assert trained.epsilon(noise_multiplier=20.0) == pytest.approx(
        gaussian_epsilon(delta=1e-5, noise_multiplier=2.0), rel=1e-9
    )
    both = budget(encoder="dp-trained", gradient_noise_multiplier=1.5)
    joint = SampledRelease(
        sampling_rate=0.1, noise_multiplier=(2.0**-2 + 1.5**-2) ** -0.5, count=100
    )
    assert both.epsilon(noise_multiplier=2.0) == pld_epsilon([joint], delta=1e-5)


def test_an_epoch_cut_short_counts_whole() -> None:
    """Seven rounds of three an epoch are three epochs, not two and a third."""
    plan = budget(unit="linked-row", sampling_rate=1.0, steps=7, batches_per_epoch=3)

    assert plan.releases(1.0)[0].count == 3


def test_noise_in_units_of_rows_follows_the_sensitivity() -> None:
    """Tau = z Delta_sum / sqrt(k - c)."""
    plan = budget(secondaries=5, colluding=1, clip_norm=2.0)

    assert plan.sensitivity() == 8.0
    assert plan.noise_share_std(noise_multiplier=3.0) == 12.0
    trained = budget(encoder="trained", sampling_rate=1.0, batch_rows=64)
    assert trained.sensitivity() == 16.0
    rows = budget(unit="linked-row", encoder="trained", sampling_rate=1.0, batch_rows=64)
    assert rows.sensitivity() == 16.0


def test_exchange_with_sampling_never_costs_less_than_without() -> None:
    """Whichever of m and B binds, the two relations keep their order."""
    for rows in (4, 6, 128):
        removed = budget(batch_rows=rows)
        exchanged = budget(batch_rows=rows, neighbouring="replace-one")
        share = 5.0
        epsilons = [
            plan.epsilon(noise_multiplier=share / plan.sensitivity())
            for plan in (removed, exchanged)
        ]

        assert epsilons[0] < epsilons[1]


def test_small_delta_works_where_an_accountant_is_sound() -> None:
    """Renyi and closed forms go below PLD's limit; PLD refuses."""
    assert budget(delta=1e-12, accountant="rdp").epsilon(noise_multiplier=2.0) > 0
    assert budget(delta=1e-12, sampling_rate=1.0).epsilon(noise_multiplier=20.0) > 0
    with pytest.raises(ConfigError, match="delta = 1e-12 is too small"):
        budget(delta=1e-12, accountant="pld").epsilon(noise_multiplier=2.0)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"links_per_record": None}, "links_per_record: must be given"),
        ({"encoder": "trained"}, "weights remember records"),
        ({"unit": "linked-row"}, "does not amplify unit"),
        ({"sampling_secret": False}, "sample that the primary knows amplifies nothing"),
        ({"sampling": "fixed-size"}, "use Poisson sampling"),
        ({"secondaries": 3, "colluding": 3}, "leaves no secondary"),
        ({"encoder": "dp-trained", "unit": "entity"}, "set it to 1"),
        ({"rows_mix": True}, "use LayerNorm or none"),
    ],
)
def test_unsound_combinations_are_refused(changes: dict, text: str) -> None:
    """Exit code 4, saying what would make them sound."""
    with pytest.raises(PrivacyError, match=text):
        budget(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"delta": math.nan},
        {"delta": 1.0},
        {"sampling_rate": 0.0},
        {"sampling_rate": math.nan},
        {"steps": -1},
        {"links_per_record": 0},
        {"clip_norm": math.inf},
        {"secondaries": 0},
        {"colluding": -1},
        {"gradient_noise_multiplier": 1.0},
        {"encoder": "dp-trained", "gradient_noise_multiplier": math.nan},
    ],
)
def test_impossible_numbers_are_refused(changes: dict) -> None:
    """Exit code 2."""
    with pytest.raises(ConfigError):
        budget(**changes)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_impossible_targets_are_refused(bad: float) -> None:
    """Neither noise nor epsilon may be zero, negative, infinite or NaN."""
    with pytest.raises(ConfigError):
        budget().epsilon(noise_multiplier=bad)
    with pytest.raises(ConfigError):
        budget().noise_multiplier(epsilon=bad)


def test_nothing_released_costs_nothing_and_needs_no_noise() -> None:
    """Zero steps: epsilon zero, and calibration says that any noise is enough."""
    assert budget(steps=0).epsilon(noise_multiplier=1.0) == 0.0
    with pytest.raises(ConfigError, match="any noise is enough"):
        budget(steps=0).noise_multiplier(epsilon=1.0)


def test_the_comparison_is_in_order() -> None:
    """The tight figure is the least of the sound ones; more parties hide one record better."""
    rows = {row.name: row for row in compare(budget(secondaries=4), noise_multiplier=2.0)}
    sound = [row.epsilon for row in rows.values() if row.sound]

    assert rows["sound-pld"].epsilon == min(sound)
    assert rows["naive-composition"].epsilon == max(sound)
    assert rows["without-mpc"].epsilon > 1.5 * rows["sound-pld"].epsilon
    assert not rows["as-published"].sound


def test_the_papers_formula_claims_less_for_a_trained_encoder() -> None:
    """The case that the papers run."""
    plan = budget(encoder="trained", sampling_rate=1.0, secondaries=4)
    rows = {row.name: row.epsilon for row in compare(plan, noise_multiplier=5.0)}

    assert rows["as-published"] < rows["sound-pld"]


def test_a_comparison_leaves_out_what_no_method_answers() -> None:
    """At a delta below PLD's limit only Renyi accounting and addition answer."""
    rows = {
        row.name: row
        for row in compare(budget(unit="entity", secondaries=2, delta=1e-8), noise_multiplier=2.0)
    }
    exchanged = compare(budget(neighbouring="replace-one"), noise_multiplier=2.0)

    assert rows["sound-pld"].epsilon is not None
    assert {row.name for row in exchanged if row.epsilon is None} == {
        "sound-rdp",
        "naive-composition",
    }
